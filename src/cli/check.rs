//! `plantstore check`, beside a running server or without one.

use anyhow::bail;
use clap::Args;

use crate::cli::output::print;
use crate::config::StoreSettings;
use crate::store::Store;

/// After so many problems the rest is only counted.
const TOLD_MAX: usize = 100;

#[derive(Debug, Args)]
pub(super) struct Check {
    #[command(flatten)]
    store: StoreSettings,
}

impl Check {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let mut problems = 0;
        let mut told = Ok(());
        let checked = Store::open(&self.store.store)?.check(&mut |problem| {
            problems += 1;
            if problems <= TOLD_MAX && told.is_ok() {
                told = print(&format!("{problem}\n"));
            }
        })?;
        told?;
        if problems > 0 {
            bail!("the store is damaged, problems found: {problems}; restore a backup");
        }
        let (plants, tokens) = (checked.plants, checked.tokens);
        print(&format!("no damage: plants {plants}, tokens {tokens}\n"))
    }
}
