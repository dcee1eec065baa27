//! A statement is run until what became of it is known: on a new connection if the old one is lost, again if the
//! server says so, and for no longer than it may take.

use std::time::Duration;

use tokio::task::yield_now;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_postgres::Error;

use crate::store::error::{Cause, StoreError, chain};
use crate::store::postgres::schema::Occasion;
use crate::store::postgres::session::{ConnectError, Session};
use crate::store::postgres::tls::Tls;
use crate::store::postgres::url::Url;

/// Between two attempts: longer each time, and never quite the same.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// How long tables that were found to be ours are relied upon. They can be changed under an open connection.
const TABLES_HOLD: Duration = Duration::from_secs(10);

/// For a connection to a server that may accept it and never respond.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a probe tries to connect and to get a first response.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);

/// A database, and the connection to it as long as that holds.
pub struct Link {
    /// Where it is.
    pub url: Url,
    /// Whom we trust, if it is to be encrypted.
    pub tls: Option<Tls>,
    /// How long whatever is asked may take, with all attempts.
    pub timeout: Duration,
    /// Whether tables that are missing are to be created.
    pub create: bool,
    /// Whether the tables were found to be ours before.
    pub is_verified: bool,
    /// The connection, while there is one.
    pub session: Option<Session>,
}

impl Link {
    /// The connection, made now if there is none: to a server with safe settings, and with our tables.
    pub async fn session(&mut self) -> Result<&Session, ConnectError> {
        // Taken, so that a connection whose check fails, or does not return, is not used again.
        let session = match self.session.take() {
            Some(mut session) if !session.client.is_closed() => {
                session.check_again().await?;
                if session.verified_at.elapsed() >= TABLES_HOLD {
                    session.verify(Occasion::Again).await?;
                }
                session
            }
            _ => {
                let connect = Session::connect(&self.url, self.tls.as_ref());
                let mut session = match timeout(CONNECT_TIMEOUT, connect).await {
                    Ok(session) => session?,
                    Err(elapsed) => return Err(ConnectError::Away(elapsed.into())),
                };
                let occasion = if self.is_verified {
                    Occasion::Again
                } else {
                    Occasion::First {
                        create: self.create,
                    }
                };
                session.verify(occasion).await?;
                self.is_verified = true;
                session
            }
        };
        Ok(self.session.insert(session))
    }

    /// Does something that can be done again without harm until it is known to have succeeded, or to have failed
    /// for good, or until the time is over.
    pub async fn until_known<T>(
        &mut self,
        attempt: impl AsyncFn(&Session) -> Result<T, Error>,
    ) -> Result<T, StoreError> {
        let deadline = Instant::now() + self.timeout;
        let mut pause = PAUSE_MIN;
        let mut may_be_stored = false;
        loop {
            let mut not_stored: fn(Cause) -> StoreError = StoreError::Unavailable;
            let cause: Cause = match timeout_at(deadline, self.session()).await {
                Err(elapsed) => elapsed.into(),
                Ok(Err(ConnectError::Away(error))) => error,
                Ok(Err(refused)) => {
                    return Err(given_up(
                        may_be_stored,
                        StoreError::Unusable,
                        refused.into(),
                    ));
                }
                Ok(Ok(session)) => {
                    session.expect_no_warning();
                    let result = timeout_at(deadline, attempt(session)).await;
                    let warned = session.has_warned();
                    match result {
                        Ok(Ok(done)) if !warned => return Ok(done),
                        Ok(Err(error)) => {
                            match Meaning::of(&error) {
                                Meaning::Again => not_stored = StoreError::Busy,
                                Meaning::Elsewhere => self.session = None,
                                Meaning::Unknown => {
                                    self.session = None;
                                    may_be_stored = true;
                                }
                                Meaning::Full => {
                                    let full = StoreError::Full;
                                    return Err(given_up(may_be_stored, full, error.into()));
                                }
                                Meaning::Never => {
                                    // It may be the prepared statement that is of no use any more.
                                    self.session = None;
                                    let unusable = StoreError::Unusable;
                                    return Err(given_up(may_be_stored, unusable, error.into()));
                                }
                            }
                            error.into()
                        }
                        Ok(Ok(_)) => {
                            self.session = None;
                            may_be_stored = true;
                            "the database has warned".into()
                        }
                        Err(elapsed) => {
                            // Never a cancel: that could turn a commit that waits into a success.
                            self.session = None;
                            may_be_stored = true;
                            elapsed.into()
                        }
                    }
                }
            };
            tracing::debug!(cause = %chain(&*cause), "another attempt at the database");
            let jitter = pause.mul_f64(fraction());
            if Instant::now() + jitter >= deadline {
                return Err(given_up(may_be_stored, not_stored, cause));
            }
            sleep(jitter).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// Checks that the database takes writes, with a write that changes nothing.
    pub async fn probe(&mut self) -> Result<(), StoreError> {
        // Only this is given up early. A write that waits for its standby keeps its backend until the standby is
        // back, so abandoning one every few seconds would use up the connections of the server.
        let timeout_before = self.timeout;
        self.timeout = timeout_before.min(PROBE_TIMEOUT);
        let reached = self
            .until_known(async |session| session.client.batch_execute("SELECT 1").await)
            .await;
        self.timeout = timeout_before;
        match reached {
            Ok(()) => self.rewrite().await,
            // It wrote nothing.
            Err(StoreError::Unknown(cause)) => Err(StoreError::Unavailable(cause)),
            Err(error) => Err(error),
        }
    }

    /// True if there is no connection, or the server has closed it and that has arrived here.
    pub async fn is_disconnected(&self) -> bool {
        // The task of the connection runs only while we wait: once to be woken, once to read.
        yield_now().await;
        yield_now().await;
        let session = self.session.as_ref();
        session.is_none_or(|session| session.client.is_closed())
    }
}

/// What an error of a statement means for what it was to do.
enum Meaning {
    /// Not done, and the next attempt may succeed.
    Again,
    /// Not done, and this server will not do it: it has become a standby.
    Elsewhere,
    /// Perhaps done.
    Unknown,
    /// Not done: no room.
    Full,
    /// Not done, and not to be done until a person has changed something.
    Never,
}

impl Meaning {
    fn of(error: &Error) -> Self {
        let Some(code) = error.code() else {
            return Self::Unknown; // the connection is gone, or what came is not what was expected
        };
        match code.code() {
            "25006" => Self::Elsewhere,
            "40003" => Self::Unknown,
            "53100" => Self::Full,
            code if code.starts_with("08") || code.starts_with("57P") => Self::Unknown,
            // Serialization, deadlock, locks, a query that somebody has cancelled, too little of something.
            code if ["40", "53", "55", "57"].contains(&&code[..2]) => Self::Again,
            _ => Self::Never,
        }
    }
}

/// An earlier attempt whose response was lost may have stored what a later one could not.
fn given_up(may_be_stored: bool, not_stored: fn(Cause) -> StoreError, cause: Cause) -> StoreError {
    if may_be_stored {
        StoreError::Unknown(cause)
    } else {
        not_stored(cause)
    }
}

/// Between a half and one. A pause can do without randomness, if there is none.
fn fraction() -> f64 {
    let random = getrandom::u32().unwrap_or(u32::MAX);
    0.5 + f64::from(random) / f64::from(u32::MAX) / 2.0
}
