//! A connection to a server whose settings are safe: writable, in UTF-8, and with every setting on that makes a commit durable.

use std::collections::HashMap;
use std::future::{Ready, poll_fn, ready};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use parking_lot::Mutex;
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};
use tokio_postgres::error::Severity;
use tokio_postgres::tls::TlsConnect;
use tokio_postgres::types::Type;
use tokio_postgres::{AsyncMessage, Client, Config, Connection, Error, Row, Socket, Statement};

use crate::store::error::{Cause, OpenError};
use crate::store::postgres::Values;
use crate::store::postgres::schema::{self, SchemaCheck};
use crate::store::postgres::servers::{
    Backend, Candidate, EarlierProcess, Timeline, optional, process_id, timeline,
};
use crate::store::postgres::tls::{Encrypted, Stream, Tls};

/// Before a statement the settings, and the tables, are checked again if the last check is older: they can be changed while a
/// connection is open.
const SETTINGS_CHECK_INTERVAL: Duration = Duration::from_secs(1);
const SCHEMA_CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// A larger difference between the clocks is logged.
const CLOCK_DIFFERENCE_MAX: SignedDuration = SignedDuration::from_secs(10);

/// The time, and which setting can lose acknowledged plants. A setting that the engine does not have is null, and safe. With
/// remote_write the standby has passed a commit to its kernel, which a power failure there loses.
const CHECK_SETTINGS: &str = "
    SELECT clock_timestamp(), CASE
      WHEN current_setting('fsync', true) = 'off' THEN 'fsync is off: a power failure can lose acknowledged plants'
      WHEN current_setting('full_page_writes', true) = 'off' THEN 'full_page_writes is off: a power failure can tear pages'
      WHEN current_setting('data_sync_retry', true) = 'on'
        THEN 'data_sync_retry is on: a failed fsync can be followed by one that claims success'
      WHEN current_setting('synchronous_commit', true) = 'off'
        THEN 'synchronous_commit is off: a crash can lose acknowledged plants'
      WHEN current_setting('synchronous_standby_names', true) <> ''
          AND current_setting('synchronous_commit', true) NOT IN ('on', 'remote_apply')
        THEN 'synchronous_commit is ' || current_setting('synchronous_commit', true)
          || ' though there are synchronous standbys: a failover can lose acknowledged plants; set it to on'
      WHEN current_setting('synchronous_standby_names', true) <> ''
          AND current_setting('client_min_messages', true) IN ('error', 'fatal', 'panic')
        THEN 'client_min_messages is ' || current_setting('client_min_messages', true)
          || ': a commit that no synchronous standby has confirmed would not be reported; set it to warning'
      WHEN current_setting('server_encoding', true) <> 'UTF8'
        THEN 'server_encoding is not UTF8: not every name could be stored'
    END";

/// Ends the process of an earlier connection that was given up, unless its commit waits for a standby: ended in that wait, its
/// transaction would become visible. One row while there is such a process; false if it was not asked to end. (PostgreSQL 13 has no
/// `pg_terminate_backend` that waits.)
const END_PROCESS: &str = "
    SELECT CASE WHEN wait_event = 'SyncRep' THEN FALSE ELSE pg_terminate_backend(pid) IS NOT NULL END
    FROM pg_catalog.pg_stat_activity WHERE pid = $1 AND backend_start = $2";

/// How long the end of that process is waited for, and how often it is asked for.
const END_TIMEOUT: Duration = Duration::from_secs(1);
const END_PAUSE: Duration = Duration::from_millis(20);

/// The time limit for checking a connection again. A server that was paused would otherwise take the whole time of the operation.
const CHECK_TIMEOUT: Duration = Duration::from_secs(2);

pub(super) struct Session {
    /// The URL without password, for error messages.
    pub(super) database: String,
    /// Only its `_typed` methods and `batch_execute` are used. They give a statement no name, so that a pooler that gives each
    /// transaction another server connection (PgBouncer in transaction mode) can be used.
    pub(super) client: Client,
    /// The statements of batches by their SQL; none if there may be a pooler.
    prepared: Option<Mutex<HashMap<&'static str, Statement>>>,
    /// The history that the server continues, if it is known.
    pub(super) timeline: Option<Timeline>,
    /// The process of the server, unless there may be a pooler.
    pub(super) backend: Option<Backend>,
    connection: ConnectionTask,
    settings_checked_at: Instant,
    schema_checked_at: Instant,
}

impl Session {
    /// Uses a new connection, if the settings of the server are safe.
    pub(super) async fn new(database: String, candidate: Candidate) -> Result<Self, OpenError> {
        let Candidate {
            client,
            connection,
            timeline,
            backend,
            ..
        } = candidate;
        let is_direct = is_direct(&client).await;
        let is_direct = is_direct.map_err(classify_connect_error(&database))?;
        let session = Self {
            database,
            client,
            prepared: is_direct.then(Mutex::default),
            timeline,
            backend: backend.filter(|_| is_direct),
            connection,
            settings_checked_at: Instant::now(),
            schema_checked_at: Instant::now(),
        };
        session.check_settings().await?;
        Ok(session)
    }

    /// Checks settings and tables again from time to time. After an error the connection must not be used.
    pub(super) async fn check_again(&mut self) -> Result<(), OpenError> {
        match timeout(CHECK_TIMEOUT, self.check_what_is_due()).await {
            Ok(checked) => checked,
            Err(elapsed) => Err(unreachable(&self.database, elapsed)),
        }
    }

    async fn check_what_is_due(&mut self) -> Result<(), OpenError> {
        if self.settings_checked_at.elapsed() >= SETTINGS_CHECK_INTERVAL {
            self.check_settings().await?;
            if self.backend.is_none() && self.timeline.is_some() {
                // A pooler may use another server by now.
                let timeline = timeline(&self.client).await;
                let timeline = timeline.map_err(classify_connect_error(&self.database))?;
                self.timeline = Some(timeline.ok_or_else(|| {
                    unreachable(&self.database, "it does not report its timeline")
                })?);
            }
            self.settings_checked_at = Instant::now();
        }
        if self.schema_checked_at.elapsed() >= SCHEMA_CHECK_INTERVAL {
            schema::ensure(self, SchemaCheck::Repeated, || {}).await?;
            self.schema_checked_at = Instant::now();
        }
        Ok(())
    }

    /// Runs a statement of a batch, which is prepared once on a direct connection.
    pub(super) async fn query_prepared(
        &self,
        sql: &'static str,
        values: &Values<'_>,
    ) -> Result<Vec<Row>, Error> {
        let Some(prepared) = &self.prepared else {
            return self.client.query_typed(sql, values).await;
        };
        let known = prepared.lock().get(sql).cloned();
        let statement = if let Some(statement) = known {
            statement
        } else {
            let statement = self.client.prepare(sql).await?;
            prepared.lock().insert(sql, statement.clone());
            statement
        };
        let values: Vec<_> = values.iter().map(|(value, _)| *value).collect();
        self.client.query(&statement, &values).await
    }

    /// Ends the process of an earlier connection.
    pub(super) async fn end_process(&self, earlier: Backend) -> Result<EarlierProcess, OpenError> {
        let values: &Values<'_> = &[
            (&earlier.pid, Type::INT4),
            (&earlier.started_at, Type::TIMESTAMPTZ),
        ];
        let end = Instant::now() + END_TIMEOUT;
        loop {
            let rows = self.client.query_typed(END_PROCESS, values).await;
            // None if the role must not end it, or the engine has no such function: then it counts until it ends.
            let rows = optional(rows).map_err(classify_connect_error(&self.database))?;
            let Some(process) = rows.as_ref().and_then(|rows| rows.first()) else {
                return Ok(EarlierProcess::Ended);
            };
            let is_asked = process.try_get(0);
            let is_asked: bool = is_asked.map_err(classify_connect_error(&self.database))?;
            if !is_asked {
                return Ok(EarlierProcess::WaitsForStandby);
            }
            if Instant::now() >= end {
                return Ok(EarlierProcess::StillRuns);
            }
            sleep(END_PAUSE).await;
        }
    }

    pub(super) fn clear_warning(&self) {
        self.connection.warned.store(false, Ordering::SeqCst);
    }

    /// True after a warning of the server. A commit that stops waiting for its standby is a success with a warning.
    pub(super) fn has_warned(&self) -> bool {
        self.connection.warned.load(Ordering::SeqCst)
    }

    pub(super) fn must_not_be_used(&self, problem: String) -> OpenError {
        let database = self.database.clone();
        OpenError::Unsafe { database, problem }
    }

    /// Rejects settings that can lose acknowledged plants, and compares the clocks.
    async fn check_settings(&self) -> Result<(), OpenError> {
        let asked_at = Timestamp::now();
        let row = self.client.query_typed_one(CHECK_SETTINGS, &[]).await;
        let checked = row.and_then(|row| Ok((row.try_get(0)?, row.try_get(1)?)));
        let (time, problem): (_, Option<String>) =
            checked.map_err(classify_connect_error(&self.database))?;
        compare_clocks(asked_at, time, Timestamp::now());
        problem.map_or(Ok(()), |problem| Err(self.must_not_be_used(problem)))
    }
}

/// Logs when the clock of this machine and that of the database begin to differ, and when they agree again: once for all
/// connections. Plants are dated by the database, but tokens expire by the clock of this machine.
fn compare_clocks(asked_at: Timestamp, database: Timestamp, answered_at: Timestamp) {
    static DIFFER: AtomicBool = AtomicBool::new(false);
    let ahead = asked_at.duration_since(database);
    let behind = database.duration_since(answered_at);
    let difference = ahead.max(behind);
    let differ = difference > CLOCK_DIFFERENCE_MAX;
    if DIFFER.swap(differ, Ordering::Relaxed) == differ {
        return;
    }
    if differ {
        let direction = if ahead > behind { "ahead of" } else { "behind" };
        tracing::warn!(
            "the clock of this machine is {} s {direction} the clock of the database; plants are dated by the database",
            difference.as_secs()
        );
    } else {
        tracing::info!("the clock of this machine agrees with that of the database again");
    }
}

/// The task that runs a connection. When this is dropped, the connection is closed, whatever it is waiting for.
pub(super) struct ConnectionTask {
    warned: Arc<AtomicBool>,
    task: AbortHandle,
}

impl Drop for ConnectionTask {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Connects to a server that accepts writes.
pub(super) async fn connect(config: &Config, tls: &Tls) -> Result<(Client, ConnectionTask), Error> {
    let (client, connection) = config.connect(tls.clone()).await?;
    let warned = Arc::new(AtomicBool::new(false));
    let task = tokio::spawn(drive(connection, Arc::clone(&warned))).abort_handle();
    Ok((client, ConnectionTask { warned, task }))
}

/// Runs the connection for as long as there is a client, and records warnings.
async fn drive(
    mut connection: Connection<Socket, Stream<Encrypted<Socket>>>,
    warned: Arc<AtomicBool>,
) {
    while let Some(message) = poll_fn(|context| connection.poll_message(context)).await {
        match message {
            Ok(AsyncMessage::Notice(notice)) => {
                if notice.parsed_severity() == Some(Severity::Warning) {
                    tracing::warn!(cause = notice.message(), "warning from the database");
                    // Long before its transaction ids are used up, the server sends a warning with each new one.
                    let is_about_commit = notice.routine() != Some("GetNewTransactionId");
                    warned.fetch_or(is_about_commit, Ordering::SeqCst);
                }
            }
            Ok(_) => {}
            Err(error) => {
                tracing::debug!(%error, "a connection to the database ended");
                return;
            }
        }
    }
}

/// False if there is a pooler: the process id that it announces when the connection is made differs from `pg_backend_pid()`. Also
/// false for an engine that has no such function.
async fn is_direct(client: &Client) -> Result<bool, Error> {
    match client.query_typed_one("SELECT pg_backend_pid()", &[]).await {
        Ok(row) => {
            let announced = announced_pid(client).await;
            Ok(announced.is_some() && announced == process_id(&row))
        }
        Err(error) if error.code().is_some() => Ok(false),
        Err(error) => Err(error),
    }
}

/// The driver exposes the announced process id only in a cancel request, which is therefore written to memory; nothing is sent.
async fn announced_pid(client: &Client) -> Option<i32> {
    let mut request = Vec::new();
    // Reading returns the byte with which a server accepts TLS.
    let stream = tokio::io::join(tokio::io::repeat(b'S'), &mut request);
    let cancel_token = client.cancel_token();
    let written = cancel_token.cancel_query_raw(stream, NoHandshake).await;
    // Length, code, process id, key: 4 bytes each, after a request for TLS if the connection is encrypted.
    let pid = request.len().checked_sub(8)?..request.len() - 4;
    written.ok()?;
    Some(i32::from_be_bytes(request[pid].try_into().ok()?))
}

/// Passes the stream through unchanged in place of a TLS handshake.
struct NoHandshake;

impl<S> TlsConnect<S> for NoHandshake
where
    Stream<S>: tokio_postgres::tls::TlsStream + Unpin,
{
    type Stream = Stream<S>;
    type Error = io::Error;
    type Future = Ready<io::Result<Stream<S>>>;

    fn connect(self, stream: S) -> Self::Future {
        ready(Ok(Stream {
            inner: stream,
            end_point: None,
        }))
    }
}

/// Distinguishes a server that rejects the connection from one that cannot be reached. An error without a code means that the
/// server did not respond, or that the driver has ended the login.
pub(super) fn classify_connect_error(database: &str) -> impl FnOnce(Error) -> OpenError {
    // SQLSTATE classes: 28 is authentication, 3D an unknown database, 42 missing privileges. The operator must act on these. All
    // others are temporary, such as 57P03 (the server is starting) and 53300 (too many connections).
    move |source| match source.code().map(|code| &code.code()[..2]) {
        Some("28" | "3D" | "42") => OpenError::caused_by(
            source,
            format!(
                "the database {database} rejects the connection; check the user, the password and the name in --store"
            ),
        ),
        // The driver has no other way to tell these apart.
        None if source.to_string() == "invalid configuration" => OpenError::caused_by(
            source,
            format!(
                "the database {database} requires a password; write it in --store, PGPASSWORD or the password file"
            ),
        ),
        None if source.to_string() == "authentication error" => OpenError::caused_by(
            source,
            format!(
                "the login to the database {database} was ended; check channel_binding and the password in --store"
            ),
        ),
        _ => unreachable(database, source),
    }
}

pub(super) fn unreachable(database: &str, source: impl Into<Cause>) -> OpenError {
    OpenError::Unreachable {
        database: database.to_owned(),
        source: source.into(),
    }
}
