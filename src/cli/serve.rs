//! `plantstore serve` and `plantstore migrate`.

use std::time::Duration;

use anyhow::Context;
use clap::Args;

use crate::cli::terminal::print_message;
use crate::config::{Settings, StoreSettings};
use crate::store::{Mode, Store, schema};
use crate::{logging, server};

/// Run the HTTP server
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  plantstore serve
  plantstore serve --listen :8080 --store sqlite:/srv/plants.db
  plantstore serve --listen :443 --tls-cert fullchain.pem --tls-key privkey.pem
  plantstore serve --config /etc/plantstore/plantstore.toml")]
pub(super) struct Serve {
    #[command(flatten)]
    settings: Settings,
}

impl Serve {
    /// Sets the names and values that the status page shows.
    pub(super) fn show(&mut self, mut settings: Vec<(String, String)>) {
        for (name, value) in &mut settings {
            if name == "store" {
                // Without its password.
                *value = self.settings.store.location.to_string();
            }
        }
        self.settings.shown = settings;
    }

    /// What is wrong with the settings as a whole.
    pub(super) fn contradiction(&self) -> Option<&'static str> {
        let Settings { tls, oidc, ops, .. } = &self.settings;
        Some(
            if self.settings.proxy_protocol && self.settings.trusted_proxy.is_empty() {
                "--proxy-protocol needs --trusted-proxy; without it no connection would be accepted"
            } else if tls.tls_cert.is_some() != tls.tls_key.is_some() {
                "--tls-cert and --tls-key need each other"
            } else if ops.ops_tls && tls.tls_cert.is_none() {
                "--ops-tls needs --tls-cert and --tls-key"
            } else if oidc.oidc_issuer.is_some() != oidc.oidc_audience.is_some() {
                "--oidc-issuer and --oidc-audience need each other"
            } else if ops.ops_listen == Some(self.settings.listen)
                && self.settings.listen.port() != 0
            {
                // Two sockets can be bound to one address as long as neither listens.
                "--listen and --ops-listen are the same; choose another --ops-listen"
            } else {
                return None;
            },
        )
    }

    pub(super) fn run(self) -> anyhow::Result<()> {
        let _log = logging::start(self.settings.log_level);
        // This runtime runs everything except connections, which have threads of their own.
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("cannot start a runtime")?;
        let ended = runtime.block_on(server::run(&self.settings));
        // Do not wait for a query on a disk that is stuck.
        runtime.shutdown_timeout(Duration::from_millis(100));
        ended
    }
}

/// Create or upgrade the database schema (needs a role with DDL privileges)
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  plantstore migrate --store postgres://owner@db.example/plants"
)]
pub(super) struct Migrate {
    #[command(flatten)]
    store: StoreSettings,
}

impl Migrate {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let location = &self.store.location;
        let before = schema(location)?;
        Store::open(location, Mode::Create)?;
        match before {
            None => print_message(format_args!("{location} was created")),
            Some(schema) if schema.is_current => {
                print_message(format_args!("{location} is up to date"));
            }
            Some(schema) => print_message(format_args!(
                "{location} was upgraded from version {}",
                schema.version
            )),
        }
        Ok(())
    }
}
