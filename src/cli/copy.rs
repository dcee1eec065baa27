//! `plantstore copy`: everything from one store to another, compared at the end.

use anyhow::bail;
use clap::Args;

use crate::cli::transfer::{self, Side};
use crate::config::StoreSettings;
use crate::store::{Location, Store};

#[derive(Debug, Args)]
pub(super) struct Copy {
    #[command(flatten)]
    store: StoreSettings,

    /// Where to: sqlite:PATH or postgres://USER@HOST/DATABASE, made if it is not there
    #[arg(long, value_name = "URL")]
    to: Location,
}

impl Copy {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let (from, to) = (&self.store.store, &self.to);
        if from == to {
            bail!("{from} cannot be copied to itself; choose another --to");
        }
        let mut from = Side {
            store: Store::open(from)?,
            name: from.to_string(),
        };
        let mut to = Side {
            store: Store::open_or_create(to)?,
            name: to.to_string(),
        };
        let tokens = transfer::copy(&mut from, &mut to)?;
        let (plants, tokens) = transfer::compare(&mut from, &mut to, &tokens)?;
        eprintln!("copied and compared: plants {plants}, tokens {tokens}");
        Ok(())
    }
}
