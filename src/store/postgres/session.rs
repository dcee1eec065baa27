//! A connection to a server that can be believed: writable, in UTF-8, and with nothing switched off that makes
//! a commit a commit.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::OnceCell;
use tokio_postgres::error::{Severity, SqlState};
use tokio_postgres::{AsyncMessage, Client, Connection, NoTls, Socket, Statement};

use crate::store::error::Cause;
use crate::store::postgres::tls::Tls;
use crate::store::url::Url;

/// The version of the schema that we know: the number of steps in `migrations/postgres`.
pub const VERSION: i64 = 3;

/// One statement each, and each can be run again: no engine has to put two of them in one transaction.
pub const STEPS: [&str; 3] = [
    include_str!("../../../migrations/postgres/0001_tokens.sql"),
    include_str!("../../../migrations/postgres/0002_plants.sql"),
    include_str!("../../../migrations/postgres/0003_newest_first.sql"),
];
const _: () = assert!(STEPS.len() as u64 == VERSION.unsigned_abs());

/// A connection, and whether the server has warned on it.
pub struct Session {
    /// For statements.
    pub client: Client,
    warned: Arc<AtomicBool>,
    add: OnceCell<Statement>,
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// It may work later: the server is away, starting, full or read-only.
    #[error("the database cannot be reached")]
    Away(#[source] Cause),
    /// The server would acknowledge what it can lose, or has what we do not know.
    #[error("{0}")]
    Refused(String),
    /// It needs a person: a password, a right, a name.
    #[error("the database refuses us")]
    Rejected(#[source] tokio_postgres::Error),
}

impl Session {
    /// Connects to the first host that can be written to.
    pub async fn connect(url: &Url, tls: Option<&Tls>) -> Result<Self, ConnectError> {
        let warned = Arc::new(AtomicBool::new(false));
        let client = if let Some(tls) = tls {
            let (client, connection) = url.config.connect(tls.clone()).await.map_err(away)?;
            tokio::spawn(drive(connection, Arc::clone(&warned)));
            client
        } else {
            let (client, connection) = url.config.connect(NoTls).await.map_err(away)?;
            tokio::spawn(drive(connection, Arc::clone(&warned)));
            client
        };
        check_settings(&client).await?;
        Ok(Self {
            client,
            warned,
            add: OnceCell::new(),
        })
    }

    /// The statement of a batch, prepared once.
    pub async fn add(&self, sql: &str) -> Result<&Statement, tokio_postgres::Error> {
        self.add.get_or_try_init(|| self.client.prepare(sql)).await
    }

    /// Forgets what the server has warned of so far.
    pub fn expect_no_warning(&self) {
        self.warned.store(false, Ordering::SeqCst);
    }

    /// Whether it has warned since. A commit that stops waiting for its standby is a success with a warning.
    pub fn has_warned(&self) -> bool {
        self.warned.load(Ordering::SeqCst)
    }

    /// The version of the schema; 0 if there is none.
    pub async fn version(&self) -> Result<i64, ConnectError> {
        let sql = "SELECT max(version) FROM plantstore_schema";
        match self.client.query_one(sql, &[]).await {
            Ok(row) => Ok(row.get::<_, Option<i64>>(0).unwrap_or(0)),
            Err(error) if error.code() == Some(&SqlState::UNDEFINED_TABLE) => Ok(0),
            Err(error) => Err(away(error)),
        }
    }
}

/// Settings that can make a 200 a lie, what they may be, and what is lost otherwise. An engine that does not have
/// one has nothing to switch off.
async fn check_settings(client: &Client) -> Result<(), ConnectError> {
    let sql = "SELECT current_setting('fsync', true), current_setting('full_page_writes', true),
                      current_setting('synchronous_commit', true),
                      current_setting('synchronous_standby_names', true),
                      current_setting('server_encoding', true)";
    let row = client.query_one(sql, &[]).await.map_err(away)?;
    let setting = |index| row.get::<_, Option<String>>(index);
    let [
        fsync,
        full_page_writes,
        synchronous_commit,
        standbys,
        encoding,
    ] = [0, 1, 2, 3, 4].map(setting);
    let is = |setting: &Option<String>, value: &str| setting.as_deref() == Some(value);
    let waits_for_standby = standbys.is_some_and(|names| !names.is_empty());
    let problem = if is(&fsync, "off") {
        "fsync is off: a power cut can lose what was acknowledged"
    } else if is(&full_page_writes, "off") {
        "full_page_writes is off: a power cut can tear pages"
    } else if is(&synchronous_commit, "off") {
        "synchronous_commit is off: a crash can lose what was acknowledged"
    } else if is(&synchronous_commit, "local") && waits_for_standby {
        "synchronous_commit is local though there are synchronous standbys: a failover can lose what was acknowledged"
    } else if encoding.is_some_and(|encoding| encoding != "UTF8") {
        "server_encoding is not UTF8: not every name could be stored"
    } else {
        return Ok(());
    };
    Err(ConnectError::Refused(format!(
        "the database server is not safe to use, {problem}"
    )))
}

/// Moves bytes for as long as there is a client, and takes note of warnings.
async fn drive<T>(mut connection: Connection<Socket, T>, warned: Arc<AtomicBool>)
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    while let Some(message) = poll_fn(|context| connection.poll_message(context)).await {
        match message {
            Ok(AsyncMessage::Notice(notice)) => {
                if notice.parsed_severity() == Some(Severity::Warning) {
                    tracing::warn!(message = notice.message(), "the database warns");
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

/// What a failed connection means. Without a code nobody has answered.
fn away(error: tokio_postgres::Error) -> ConnectError {
    let Some(code) = error.code() else {
        return ConnectError::Away(error.into());
    };
    // 28: who we are; 3D, 42: what we asked for. The rest passes: 57P03 starting up, 53300 too many connections.
    match &code.code()[..2] {
        "28" | "3D" | "42" => ConnectError::Rejected(error),
        _ => ConnectError::Away(error.into()),
    }
}
