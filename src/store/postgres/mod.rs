//! Plants and tokens in PostgreSQL, or an engine that speaks its protocol. A batch is one statement, and its outcome is never
//! guessed: if a response is lost, the same batch is run again.

mod batch;
mod channel_binding;
mod options;
mod password;
mod query;
mod retry;
mod rows;
pub(super) mod schema;
mod servers;
mod session;
mod tls;
mod tls_options;
mod tokens;
pub(super) mod url;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Runtime};
use tokio::task::yield_now;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Error, Row};

use crate::fs::failed_to;
use crate::store::Mode;
use crate::store::error::{OpenError, StoreError, chain};
use crate::store::postgres::retry::RetryingClient;
use crate::store::postgres::schema::SchemaCheck;
use crate::store::postgres::servers::{Servers, Uses};
use crate::store::postgres::session::{Session, unreachable};
use crate::store::postgres::tls::Tls;
use crate::store::postgres::url::Url;

/// The time limit of one operation of a command, which may count all plants.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(600);

/// The least time limit of the first connection, which may have to create tables.
const OPEN_TIMEOUT: Duration = Duration::from_secs(30);

/// One connection to the database, made anew whenever it is lost.
pub struct Postgres {
    /// None only while it is dropped.
    runtime: Option<Runtime>,
    client: RetryingClient,
    /// When a batch had an id that was taken.
    id_taken_at: Option<Instant>,
}

/// The values of a statement, with their SQL types.
type Values<'a> = [(&'a (dyn ToSql + Sync), Type)];

impl Postgres {
    /// Connects to a server with safe settings, and verifies the tables or creates them. Several nodes may create them at once.
    pub(crate) fn open(url: &Url, mode: Mode) -> Result<Self, OpenError> {
        let tls = url.tls.as_ref().map(Tls::load).transpose()?;
        let servers = Servers::new(url.clone(), tls.unwrap_or_default(), is_server(mode));
        if is_server(mode) && url.is_in_clear_text() {
            tracing::warn!(
                database = %url,
                "the connection to the database on another machine is not encrypted; add sslmode=verify-full&sslrootcert=FILE to --store"
            );
        }
        let mut store = Self::new(Arc::new(servers), mode)?;
        store.connect(mode)?;
        Ok(store)
    }

    /// Another connection, which always uses the same server as this one. During an outage it is made later.
    pub(crate) fn another(&self, mode: Mode) -> Result<Self, OpenError> {
        let mut store = Self::new(Arc::clone(&self.client.servers), mode)?;
        if self.client.session.is_some() {
            store.connect(mode)?;
        }
        Ok(store)
    }

    pub(crate) fn moves(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.client.servers.moves)
    }

    /// Without a connection.
    fn new(servers: Arc<Servers>, mode: Mode) -> Result<Self, OpenError> {
        let (create, timeout) = match mode {
            Mode::Read | Mode::ReadBackup | Mode::Write => (false, COMMAND_TIMEOUT),
            Mode::Create | Mode::Import | Mode::FillBackup => (true, COMMAND_TIMEOUT),
            Mode::Serve { timeout } | Mode::ServeTokens { timeout } => (true, timeout),
        };
        let runtime = Builder::new_current_thread().enable_all().build();
        let database = servers.to_string();
        let runtime = runtime.map_err(failed_to("start a runtime for", Path::new(&database)))?;
        Ok(Self {
            runtime: Some(runtime),
            client: RetryingClient {
                servers,
                timeout,
                schema_check: SchemaCheck::First { create },
                session: None,
                last_backend: None,
                uses: match mode {
                    Mode::Serve { .. } => Uses::Commits,
                    _ => Uses::Other,
                },
            },
            id_taken_at: None,
        })
    }

    /// A server that cannot be reached yet is an error only for a command.
    fn connect(&mut self, mode: Mode) -> Result<(), OpenError> {
        let database = self.client.servers.to_string();
        let connected = self.block_on(async |client| {
            let timeout = client.timeout.max(OPEN_TIMEOUT);
            match tokio::time::timeout(timeout, client.session()).await {
                Ok(session) => session.map(drop),
                Err(elapsed) => Err(unreachable(&database, elapsed)),
            }
        });
        match connected {
            Err(OpenError::Unreachable { source, .. }) if is_server(mode) => {
                // The first probe logs this once, for all connections.
                tracing::debug!(database, cause = %chain(&*source), "the database cannot be reached yet");
                Ok(())
            }
            connected => connected,
        }
    }

    /// True if there is no connection, or the server has closed it and that has arrived here, or other connections have left that
    /// server.
    pub(crate) fn is_disconnected(&mut self) -> bool {
        self.block_on(async |client| {
            // The task of the connection runs only while this waits: once to be woken, once to read.
            yield_now().await;
            yield_now().await;
            let session = client.session.as_ref();
            session.is_none_or(|session| session.client.is_closed() || client.is_outdated(session))
        })
    }

    fn block_on<T>(&mut self, work: impl AsyncFnOnce(&mut RetryingClient) -> T) -> T {
        let runtime = self.runtime.as_ref().expect("taken only by the drop");
        runtime.block_on(work(&mut self.client))
    }

    /// Runs what can be run again without harm until its outcome is known.
    fn run<T>(
        &mut self,
        attempt: impl AsyncFn(&Session) -> Result<T, Error>,
    ) -> Result<T, StoreError> {
        self.block_on(async |client| client.run(attempt).await)
    }

    fn query(&mut self, sql: &str, values: &Values<'_>) -> Result<Vec<Row>, StoreError> {
        self.run(async |session| session.client.query_typed(sql, values).await)
    }

    fn query_one(&mut self, sql: &str, values: &Values<'_>) -> Result<Row, StoreError> {
        self.run(async |session| session.client.query_typed_one(sql, values).await)
    }

    /// Returns the number of rows.
    fn execute(&mut self, sql: &str, values: &Values<'_>) -> Result<u64, StoreError> {
        self.run(async |session| session.client.execute_typed(sql, values).await)
    }
}

fn is_server(mode: Mode) -> bool {
    matches!(mode, Mode::Serve { .. } | Mode::ServeTokens { .. })
}

impl Drop for Postgres {
    fn drop(&mut self) {
        // Dropped in place, a runtime would wait, and that is not allowed where another one is running.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
