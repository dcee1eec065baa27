//! Runs a statement until its outcome is known: on a new connection if the old one is lost, again if the server says so, and
//! within a time limit.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::yield_now;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_postgres::Error;
use tokio_postgres::error::{DbError, Severity};

use crate::store::error::{Failure, OpenError, StoreError, chain};
use crate::store::postgres::schema::{self, SchemaCheck};
use crate::store::postgres::servers::{Backend, SEARCH_INTERVAL, Servers, Uses};
use crate::store::postgres::session::Session;

/// The pause between two attempts: it doubles each time up to the maximum, with jitter.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// A database, and the connection to it while there is one.
pub(super) struct RetryingClient {
    pub(super) servers: Arc<Servers>,
    /// The time limit of each operation, with all attempts.
    pub(super) timeout: Duration,
    /// How the next connection verifies the tables.
    pub(super) schema_check: SchemaCheck,
    pub(super) session: Option<Session>,
    /// The process that served the last connection. If that was given up, it may go on for as long as it waits for something.
    pub(super) last_backend: Option<Backend>,
    pub(super) uses: Uses,
}

impl RetryingClient {
    /// Connects if necessary: to a server with safe settings, and with our tables.
    pub(super) async fn session(&mut self) -> Result<&Session, OpenError> {
        // Taken, so that a connection whose check fails, or does not return, is not used again.
        let session = self.session.take();
        let session =
            session.filter(|session| !session.client.is_closed() && !self.is_outdated(session));
        if let Some(mut session) = session {
            session.check_again().await?;
            if !self.is_outdated(&session) {
                return Ok(self.session.insert(session));
            }
        }
        let session = self.connect().await?;
        Ok(self.session.insert(session))
    }

    /// True if other connections of this process use a newer server.
    pub(super) fn is_outdated(&self, session: &Session) -> bool {
        self.servers.is_outdated(session.timeline)
    }

    async fn connect(&mut self) -> Result<Session, OpenError> {
        let connect = (self.servers).connect(self.uses, self.last_backend, self.timeout);
        let session = connect.await?;
        let last_backend = &mut self.last_backend;
        *last_backend = session.backend;
        // A process that upgrades the tables is not ended when its connection is given up.
        schema::ensure(&session, self.schema_check, || *last_backend = None).await?;
        *last_backend = session.backend;
        self.schema_check = SchemaCheck::Repeated;
        Ok(session)
    }

    /// Runs what can be run again without harm until it has succeeded, or has failed for good, or the time is over.
    pub(super) async fn run<T>(
        &mut self,
        statement: impl AsyncFn(&Session) -> Result<T, Error>,
    ) -> Result<T, StoreError> {
        let started = Instant::now();
        let deadline = started + self.timeout;
        let mut pause = PAUSE_MIN;
        let mut may_be_stored = false;
        loop {
            let mut error = match self.attempt(&statement, deadline).await {
                Ok(done) => return Ok(done),
                Err(error) => error,
            };
            may_be_stored |= error.kind == Failure::Unknown;
            let is_final = matches!(error.kind, Failure::Full | Failure::Unusable);
            // After an error that is final, it may be the prepared statement that is of no use any more.
            if !matches!(error.kind, Failure::Busy | Failure::Full) {
                self.session = None;
            }
            let jitter = pause.mul_f64(fraction());
            if is_final || Instant::now() + jitter >= deadline {
                if may_be_stored {
                    // An attempt whose response was lost may have stored what a later one did not.
                    error.kind = Failure::Unknown;
                }
                return Err(error);
            }
            let cause = chain(&*error.cause);
            tracing::debug!(cause, "retrying a database statement");
            if started.elapsed() >= SEARCH_INTERVAL {
                self.servers.report(&cause);
            }
            sleep(jitter).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    async fn attempt<T>(
        &mut self,
        statement: &impl AsyncFn(&Session) -> Result<T, Error>,
        deadline: Instant,
    ) -> Result<T, StoreError> {
        let servers = Arc::clone(&self.servers);
        let started = Instant::now();
        let session = match timeout_at(deadline, self.session()).await {
            Ok(Ok(session)) => session,
            Ok(Err(OpenError::Unreachable { source, .. })) => {
                return Err(Failure::Unavailable.because(source));
            }
            Ok(Err(rejected)) => return Err(Failure::Unusable.because(rejected)),
            Err(_) => {
                let reason = format!("no connection to {servers} within the time limit");
                return Err(Failure::Unavailable.because(reason));
            }
        };
        session.clear_warning();
        let result = tokio::select! {
            biased;
            result = timeout_at(deadline, statement(session)) => result,
            () = servers.newer_than(session.timeline), if session.timeline.is_some() => {
                return Err(Failure::Unknown.because("the database has another primary now"));
            }
        };
        if started.elapsed() >= SEARCH_INTERVAL {
            // The tasks of connections that the search has given up end only while this waits.
            yield_now().await;
        }
        let warned = session.has_warned();
        match result {
            Ok(Ok(_)) if warned => Err(Failure::Unknown.because("the database has sent a warning")),
            // A stale primary may have confirmed it, which the newer one does not have.
            Ok(Ok(_)) if servers.is_outdated(session.timeline) => {
                Err(Failure::Unknown.because("the database has another primary now"))
            }
            Ok(Ok(done)) => Ok(done),
            Ok(Err(error)) => Err(classify(&error).because(error)),
            // Never a cancel request: it would turn a commit that waits for its standby into a success.
            Err(_) => Err(Failure::Unknown.because(servers.reason_of_timeout())),
        }
    }
}

/// Whether the statement was executed, and whether to run it again: not if the store is full or unusable.
fn classify(error: &Error) -> Failure {
    let Some(code) = error.code() else {
        return Failure::Unknown; // the connection is lost, or the response is invalid
    };
    let severity = error.as_db_error().and_then(DbError::parsed_severity);
    if matches!(severity, Some(Severity::Fatal | Severity::Panic)) {
        // The server process has ended, perhaps after the commit: a failed sync of the WAL, or a disk that is full then, is a PANIC.
        return Failure::Unknown;
    }
    match code.code() {
        "25006" => Failure::Unavailable, // this server has become a standby
        "40003" => Failure::Unknown,
        // Another session has recorded an event at the same time.
        "23505" if table(error) == Some("token_events") => Failure::Busy,
        "53100" => Failure::Full,
        code if code.starts_with("08") || code.starts_with("57P") => Failure::Unknown,
        // Serialization, deadlock, locks, a cancelled query, insufficient resources.
        code if ["40", "53", "55", "57"].contains(&&code[..2]) => Failure::Busy,
        _ => Failure::Unusable,
    }
}

/// The table that the error is about.
fn table(error: &Error) -> Option<&str> {
    error.as_db_error()?.table()
}

/// A random number between a half and one; one if the operating system has no random numbers.
fn fraction() -> f64 {
    let random = getrandom::u32().unwrap_or(u32::MAX);
    0.5 + f64::from(random) / f64::from(u32::MAX) / 2.0
}
