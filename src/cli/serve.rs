//! `plantstore serve`.

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
        tokio::runtime::Runtime::new()
            .context("cannot start threads")?
            .block_on(server::run(&self.settings))
    }
}
