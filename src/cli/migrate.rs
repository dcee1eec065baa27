//! `plantstore migrate`: the schema, made or brought up to date by a role that may.

use clap::Args;

use crate::config::StoreSettings;
use crate::store::Store;

#[derive(Debug, Args)]
pub(super) struct Migrate {
    #[command(flatten)]
    store: StoreSettings,
}

impl Migrate {
    pub(super) fn run(self) -> anyhow::Result<()> {
        Store::open_or_create(&self.store.store)?;
        eprintln!("{} is up to date", self.store.store);
        Ok(())
    }
}
