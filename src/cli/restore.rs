//! `plantstore restore`: a backup becomes a store. It is read to the end before anything is changed.

use std::path::{Path, PathBuf};

use anyhow::bail;
use clap::Args;

use crate::cli::progress::Progress;
use crate::cli::transfer::{self, Side, Target};
use crate::cli::verify::{backup_file, verify};
use crate::config::StoreSettings;
use crate::store::{OpenError, Restoration, Store};

#[derive(Debug, Args)]
pub(super) struct Restore {
    /// What `plantstore backup` made
    #[arg(value_parser = backup_file())]
    file: PathBuf,

    /// Replace a store that is there, which is kept under another name; in a database, add to what is there
    #[arg(long)]
    force: bool,

    #[command(flatten)]
    store: StoreSettings,
}

impl Restore {
    pub(super) fn run(self) -> anyhow::Result<()> {
        match self.store.store.file() {
            Some(store) => self.to_file(store),
            None => self.to_database(),
        }
    }

    fn to_file(&self, store: &Path) -> anyhow::Result<()> {
        let progress = Progress::of_bytes(Some(0), "copying");
        let tell = &mut |done, all| progress.reach(done, all);
        let restoration = Restoration::begin(&self.file, store, self.force, tell)?;
        drop(progress);
        let copy = Store::open(&restoration.location());
        let (plants, tokens) = self.verify(&mut copy.map_err(|error| self.damaged(error))?)?;
        let kept = restoration.finish()?;
        let store = &self.store.store;
        eprintln!("restored to {store}: plants {plants}, tokens {tokens}");
        if let Some(kept) = kept {
            eprintln!("what was there is kept as {}", kept.display());
        }
        Ok(())
    }

    fn to_database(&self) -> anyhow::Result<()> {
        let location = &self.store.store;
        let mut from = Side {
            store: Store::open_backup(&self.file).map_err(|error| self.damaged(error))?,
            name: self.file.display().to_string(),
        };
        self.verify(&mut from.store)?;
        let mut to = Side {
            store: Store::open_or_create(location)?,
            name: location.to_string(),
        };
        if !self.force && (to.store.has_tokens()? || to.store.count_plants()? > 0) {
            bail!(
                "{location} is not empty; choose an empty database, or have what is missing added with --force"
            );
        }
        let target = if self.force {
            Target::Any
        } else {
            Target::Copy
        };
        let copied = transfer::copy(&mut from, &mut to, target)?.compare(&mut from, &mut to)?;
        let (plants, tokens) = (copied.plants, copied.tokens);
        eprintln!("restored to {location}: plants {plants}, tokens {tokens}");
        copied.report_added_otherwise();
        Ok(())
    }

    /// Why the backup cannot be opened.
    fn damaged(&self, error: OpenError) -> anyhow::Error {
        match error {
            OpenError::Sqlite { source, .. } => anyhow::Error::new(source).context(format!(
                "{} is damaged; nothing was changed; choose another backup",
                self.file.display()
            )),
            other => other.into(),
        }
    }

    fn verify(&self, backup: &mut Store) -> anyhow::Result<(u64, u64)> {
        let (checked, problems) = verify(backup)?;
        if problems > 0 {
            bail!(
                "{} is damaged, problems found: {problems}; nothing was changed; choose another backup",
                self.file.display()
            );
        }
        Ok((checked.plants, checked.tokens))
    }
}
