//! `plantstore backup`, beside a running server or without one. The file has its name once it was read to the end and
//! found sound, and not before.

use std::path::PathBuf;

use anyhow::bail;
use clap::Args;

use crate::cli::progress::Progress;
use crate::cli::transfer::{self, Side, Target};
use crate::cli::verify::{backup_file, step_back, verify};
use crate::config::StoreSettings;
use crate::store::{BackupFile, Store};

#[derive(Debug, Args)]
pub(super) struct Backup {
    /// The file to make
    #[arg(value_parser = backup_file())]
    file: PathBuf,

    /// Replace a backup of that name, once the new one is whole
    #[arg(long)]
    force: bool,

    #[command(flatten)]
    store: StoreSettings,
}

impl Backup {
    pub(super) fn run(self) -> anyhow::Result<()> {
        step_back();
        let location = &self.store.store;
        let mut source = Store::open(location)?;
        let backup = BackupFile::begin(&self.file, location.file(), self.force)?;
        let progress = Progress::of(0, "copying");
        if !source.copy_pages(&backup, &mut |done, all| progress.reach(done, all))? {
            fill(source, &backup, location.to_string())?;
        }
        drop(progress);
        backup.settle()?;

        let mut copy = Store::open(&backup.location())?;
        copy.throttle()?;
        let (checked, problems) = verify(&mut copy)?;
        drop(copy);
        if problems > 0 {
            bail!(
                "the copy is damaged, problems found: {problems}; no backup was made; \
                 `plantstore check` tells whether the store is"
            );
        }
        backup.finish()?;
        let (file, plants, tokens) = (self.file.display(), checked.plants, checked.tokens);
        eprintln!("{file} is complete and was checked: plants {plants}, tokens {tokens}");
        Ok(())
    }
}

/// Copies what is no file. Plants are never changed, so all that were there at the beginning are in it, and some that
/// came meanwhile; and so are the tokens that added those.
fn fill(source: Store, backup: &BackupFile, name: String) -> anyhow::Result<()> {
    let mut from = Side {
        store: source,
        name,
    };
    let mut to = Side {
        store: Store::open_to_fill(backup)?,
        name: backup.location().to_string(),
    };
    let mut transfer = transfer::copy(&mut from, &mut to, Target::Copy)?;
    transfer.copy_tokens(&mut from, &mut to)
}
