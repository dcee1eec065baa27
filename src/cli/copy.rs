//! `plantstore copy`: all plants and tokens of one store to another, compared at the end.

use std::fs;

use anyhow::bail;
use clap::Args;

use crate::cli::transfer::{self, Side, Target};
use crate::config::StoreSettings;
use crate::fs::is_same_file;
use crate::store::{Location, Store};

#[derive(Debug, Args)]
pub(super) struct Copy {
    #[command(flatten)]
    store: StoreSettings,

    /// The target: sqlite:PATH or postgres://USER@HOST/DATABASE, created if it does not exist
    #[arg(long, value_name = "URL")]
    to: Location,

    /// Add to a target that has plants or tokens of its own
    #[arg(long)]
    force: bool,
}

impl Copy {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let (from, to) = (&self.store.store, &self.to);
        if is_same(from, to) {
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
        let target = if self.force {
            Target::Any
        } else {
            Target::Copy
        };
        let copied = transfer::copy(&mut from, &mut to, target)?.compare(&mut from, &mut to)?;
        let (plants, tokens) = (copied.plants, copied.tokens);
        eprintln!("copied and compared: plants {plants}, tokens {tokens}");
        copied.report_added_otherwise();
        Ok(())
    }
}

/// Whether two locations are one store: by any path, link or user.
fn is_same(from: &Location, to: &Location) -> bool {
    match (from.file(), to.file()) {
        (Some(from), Some(to)) => is_same_file(fs::metadata(from), fs::metadata(to)),
        _ => from.to_string() == to.to_string(),
    }
}
