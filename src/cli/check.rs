//! `plantstore check`, beside a running server or without one, and of a backup, which it leaves as it is.

use std::path::PathBuf;

use anyhow::bail;
use clap::Args;

use crate::cli::output::print;
use crate::cli::verify::{step_back, verify};
use crate::config::StoreSettings;
use crate::store::{Location, Store};

#[derive(Debug, Args)]
pub(super) struct Check {
    /// A backup, or the file of a store; what --store says, unless given
    file: Option<PathBuf>,

    #[command(flatten)]
    store: StoreSettings,
}

impl Check {
    pub(super) fn run(self) -> anyhow::Result<()> {
        step_back();
        let location = self.file.map_or(self.store.store, Location::Sqlite);
        let (checked, problems) = verify(&mut Store::open(&location)?)?;
        if problems > 0 {
            bail!("{location} is damaged, problems found: {problems}; restore a backup");
        }
        let (plants, tokens) = (checked.plants, checked.tokens);
        print(&format!("no damage: plants {plants}, tokens {tokens}\n"))
    }
}
