//! A connection to a server whose settings are safe: writable, in UTF-8, and with every setting on that makes a commit durable.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_postgres::error::Severity;
use tokio_postgres::{AsyncMessage, Connection, Error, NoTls, Socket};

use crate::store::error::OpenError;
use crate::store::postgres::client::Client;
use crate::store::postgres::schema::{self, SchemaCheck};
use crate::store::postgres::tls::Tls;
use crate::store::postgres::url::Url;

/// The settings are checked again before a statement if the last check is older: some can be changed while a connection is open.
const SETTINGS_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// A larger difference between the clocks is logged.
const CLOCK_DIFFERENCE_MAX: SignedDuration = SignedDuration::from_secs(10);

pub(super) struct Session {
    pub(super) client: Client,
    warned: Arc<AtomicBool>,
    checked_at: Instant,
    pub(super) verified_at: Instant,
}

impl Session {
    /// Connects to the first host that can be written to.
    pub(super) async fn connect(url: &Url, tls: Option<&Tls>) -> Result<Self, OpenError> {
        let warned = Arc::new(AtomicBool::new(false));
        let database = url.to_string();
        let client = if let Some(tls) = tls {
            let connected = url.config.connect(tls.clone()).await;
            let (client, connection) = connected.map_err(classify_connect_error(&database))?;
            tokio::spawn(drive(connection, Arc::clone(&warned)));
            client
        } else {
            let connected = url.config.connect(NoTls).await;
            let (client, connection) = connected.map_err(classify_connect_error(&database))?;
            tokio::spawn(drive(connection, Arc::clone(&warned)));
            client
        };
        let client = Client::new(client, database.clone()).await;
        let client = client.map_err(classify_connect_error(&database))?;
        check_settings(&client).await?;
        Ok(Self {
            client,
            warned,
            checked_at: Instant::now(),
            verified_at: Instant::now(),
        })
    }

    /// Checks or creates the tables. After an error the connection must not be used.
    pub(super) async fn verify(&mut self, schema_check: SchemaCheck) -> Result<(), OpenError> {
        schema::ensure(&self.client, schema_check).await?;
        self.verified_at = Instant::now();
        Ok(())
    }

    /// Checks the settings again from time to time. After an error the connection must not be used.
    pub(super) async fn check_again(&mut self) -> Result<(), OpenError> {
        if self.checked_at.elapsed() >= SETTINGS_CHECK_INTERVAL {
            check_settings(&self.client).await?;
            self.checked_at = Instant::now();
        }
        Ok(())
    }

    pub(super) fn clear_warning(&self) {
        self.warned.store(false, Ordering::SeqCst);
    }

    /// True after a warning of the server. A commit that stops waiting for its standby is a success with a warning.
    pub(super) fn has_warned(&self) -> bool {
        self.warned.load(Ordering::SeqCst)
    }
}

/// Rejects settings that can lose acknowledged plants, and compares the clocks. A setting that the engine does not have is safe.
async fn check_settings(client: &Client) -> Result<(), OpenError> {
    let sql = "SELECT current_setting('fsync', true), current_setting('full_page_writes', true),
                      current_setting('data_sync_retry', true),
                      current_setting('synchronous_commit', true),
                      current_setting('synchronous_standby_names', true),
                      current_setting('server_encoding', true),
                      clock_timestamp()";
    let asked_at = Timestamp::now();
    let row = client.query_one(sql, &[]).await;
    let row = row.map_err(classify_connect_error(&client.database))?;
    compare_clocks(asked_at, row.get(6), Timestamp::now());
    let setting = |index| row.get::<_, Option<&str>>(index);
    let standbys = setting(4).is_some_and(|names| !names.is_empty());
    let problem = if setting(0) == Some("off") {
        "fsync is off: a power failure can lose acknowledged plants".to_owned()
    } else if setting(1) == Some("off") {
        "full_page_writes is off: a power failure can tear pages".to_owned()
    } else if setting(2) == Some("on") {
        "data_sync_retry is on: a failed fsync can be followed by one that claims success"
            .to_owned()
    } else if setting(3) == Some("off") {
        "synchronous_commit is off: a crash can lose acknowledged plants".to_owned()
    } else if standbys
        && let Some(level) = setting(3)
        && !["on", "remote_apply"].contains(&level)
    {
        // With remote_write the standby has passed it to its kernel, which a power failure there loses.
        format!(
            "synchronous_commit is {level} though there are synchronous standbys: \
             a failover can lose acknowledged plants; set it to on"
        )
    } else if setting(5).is_some_and(|encoding| encoding != "UTF8") {
        "server_encoding is not UTF8: not every name could be stored".to_owned()
    } else {
        return Ok(());
    };
    Err(OpenError::Unsafe {
        database: client.database.clone(),
        problem,
    })
}

/// Logs when the clock of this machine and that of the database begin to differ, and when they agree again: once for all
/// connections. Plants are dated by the database, but tokens expire by the clock of this machine.
fn compare_clocks(asked_at: Timestamp, database: Timestamp, answered_at: Timestamp) {
    static DIFFER: AtomicBool = AtomicBool::new(false);
    let ahead = asked_at.duration_since(database);
    let behind = database.duration_since(answered_at);
    let differ = ahead.max(behind) > CLOCK_DIFFERENCE_MAX;
    if DIFFER.swap(differ, Ordering::Relaxed) == differ {
        return;
    }
    if differ {
        let (seconds, direction) = if ahead > behind {
            (ahead.as_secs(), "ahead of")
        } else {
            (behind.as_secs(), "behind")
        };
        tracing::warn!(
            "the clock of this machine is {seconds} s {direction} the clock of the database; plants are dated by the database"
        );
    } else {
        tracing::info!("the clock of this machine agrees with that of the database again");
    }
}

/// Runs the connection for as long as there is a client, and records warnings.
async fn drive<T>(mut connection: Connection<Socket, T>, warned: Arc<AtomicBool>)
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    while let Some(message) = poll_fn(|context| connection.poll_message(context)).await {
        match message {
            Ok(AsyncMessage::Notice(notice)) => {
                if notice.parsed_severity() == Some(Severity::Warning) {
                    tracing::warn!(cause = notice.message(), "warning from the database");
                    warned.store(true, Ordering::SeqCst);
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

/// Tells a server that rejects the connection from one that cannot be reached. An error without a code means that the server did not
/// respond.
pub(super) fn classify_connect_error(database: &str) -> impl FnOnce(Error) -> OpenError {
    |source| {
        let database = database.to_owned();
        // SQLSTATE classes: 28 is authentication, 3D an unknown database, 42 missing privileges. The operator must act on these. All
        // others are temporary, such as 57P03 (the server is starting) and 53300 (too many connections).
        match source.code().map(|code| &code.code()[..2]) {
            Some("28" | "3D" | "42") => OpenError::caused_by(
                source,
                format!(
                    "the database {database} rejects the connection; check the user, the password and the name in --store"
                ),
            ),
            _ => OpenError::Unreachable {
                database,
                source: source.into(),
            },
        }
    }
}
