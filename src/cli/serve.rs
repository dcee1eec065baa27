//! `plantstore serve`.

use std::time::Duration;

use anyhow::Context;
use clap::Args;

use crate::config::Settings;
use crate::{server, telemetry};

/// The settings of the service.
#[derive(Debug, Args)]
pub(super) struct Serve {
    #[command(flatten)]
    settings: Settings,
}

impl Serve {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let _log = telemetry::start(self.settings.log_level);
        let runtime = tokio::runtime::Runtime::new().context("cannot start threads")?;
        let ended = runtime.block_on(server::run(&self.settings));
        // A query that a stuck disk does not answer is not waited for.
        runtime.shutdown_timeout(Duration::from_millis(100));
        ended
    }
}
