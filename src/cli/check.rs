//! `plantstore check` reads everything in a store, also while the service runs, or in a backup, which it does not change.

use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::Args;

use crate::cli::output::print;
use crate::cli::verify::{backup_file, step_back, verify};
use crate::config::StoreSettings;
use crate::store::{Location, OpenError, Store, accept_loss, is_backup};

const BACKUP_ADVICE: &str =
    "do not rely on it: use another backup, or make a new one with `plantstore backup`";

#[derive(Debug, Args)]
pub(super) struct Check {
    /// A backup, or the file of a store; what --store says, unless given
    #[arg(value_parser = backup_file())]
    file: Option<PathBuf>,

    /// Open the store from now on although committed transactions are missing in it, as after its WAL file was deleted
    #[arg(long)]
    accept_loss: bool,

    #[command(flatten)]
    store: StoreSettings,
}

impl Check {
    pub(super) fn run(self) -> anyhow::Result<()> {
        step_back();
        let is_file = self.file.is_some();
        let location = self.file.map_or(self.store.store, Location::Sqlite);
        let is_backup = is_backup(&location);
        if self.accept_loss && !is_backup {
            accept_loss(&location)?;
        }
        let mut store = match Store::open(&location) {
            Err(OpenError::Missing(path)) if is_file => bail!("there is no file {path}"),
            Err(OpenError::NotOurs(path)) if is_file => bail!(
                "{path} is not a store or a backup of plantstore, or its header is damaged; if it was a backup, \
                 {BACKUP_ADVICE}"
            ),
            Err(OpenError::Sqlite { path, source }) if is_backup => {
                let problem = format!("the backup {path} is damaged; {BACKUP_ADVICE}");
                return Err(source).context(problem);
            }
            opened => opened?,
        };
        let (checked, problems) = verify(&mut store)?;
        match problems {
            0 => {
                let (plants, tokens) = (checked.plants, checked.tokens);
                print(&format!("no damage: plants {plants}, tokens {tokens}\n"))
            }
            _ if is_backup => bail!(
                "the backup {location} is damaged, problems found: {problems}; {BACKUP_ADVICE}"
            ),
            _ => bail!("{location} is damaged, problems found: {problems}; restore a backup"),
        }
    }
}
