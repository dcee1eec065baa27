//! `plantstore serve` and `plantstore migrate`.

use std::time::Duration;

use anyhow::Context;
use clap::Args;

use crate::config::{Settings, StoreSettings};
use crate::store::{Mode, Store};
use crate::{logging, server};

/// The settings of the service.
#[derive(Debug, Args)]
pub(super) struct Serve {
    #[command(flatten)]
    settings: Settings,
}

impl Serve {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let _log = logging::start(self.settings.log_level);
        // For everything but the connections, which have threads of their own.
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("cannot start a runtime")?;
        let ended = runtime.block_on(server::run(&self.settings));
        // A query that a stuck disk does not answer is not waited for.
        runtime.shutdown_timeout(Duration::from_millis(100));
        ended
    }
}

#[derive(Debug, Args)]
pub(super) struct Migrate {
    #[command(flatten)]
    store: StoreSettings,
}

impl Migrate {
    pub(super) fn run(self) -> anyhow::Result<()> {
        Store::open(&self.store.store, Mode::Create)?;
        eprintln!("{} is up to date", self.store.store);
        Ok(())
    }
}
