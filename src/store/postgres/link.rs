//! A statement is run until what became of it is known: on a new connection if the old one is lost, again if the
//! server says so, and for no longer than it may take.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_postgres::Error;

use crate::store::error::{Cause, StoreError, chain};
use crate::store::postgres::schema::{self, Occasion};
use crate::store::postgres::session::{ConnectError, Session};
use crate::store::postgres::tls::Tls;
use crate::store::url::Url;

/// Between two attempts: longer each time, and never quite the same.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// For a connection to a server that may accept it and never respond.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

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
                session
            }
            _ => {
                let connect = Session::connect(&self.url, self.tls.as_ref());
                let session = match timeout(CONNECT_TIMEOUT, connect).await {
                    Ok(session) => session?,
                    Err(elapsed) => return Err(ConnectError::Away(elapsed.into())),
                };
                let occasion = Occasion {
                    is_first: !self.is_verified,
                    create: self.create,
                };
                schema::ensure(&session.client, occasion).await?;
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
            let cause: Cause = match timeout_at(deadline, self.session()).await {
                Err(elapsed) => elapsed.into(),
                Ok(Err(ConnectError::Away(error))) => error,
                Ok(Err(refused)) => return Err(given_up(may_be_stored, refused.into())),
                Ok(Ok(session)) => {
                    session.expect_no_warning();
                    let result = timeout_at(deadline, attempt(session)).await;
                    let warned = session.has_warned();
                    match result {
                        Ok(Ok(done)) if !warned => return Ok(done),
                        Ok(Err(error)) => {
                            match Meaning::of(&error) {
                                Meaning::Again => {}
                                Meaning::Elsewhere => self.session = None,
                                Meaning::Unknown => {
                                    self.session = None;
                                    may_be_stored = true;
                                }
                                Meaning::Full if !may_be_stored => {
                                    return Err(StoreError::Full(error.into()));
                                }
                                Meaning::Full | Meaning::Never => {
                                    // It may be the prepared statement that is of no use any more.
                                    self.session = None;
                                    return Err(given_up(may_be_stored, error.into()));
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
                return Err(given_up(may_be_stored, cause));
            }
            sleep(jitter).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
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

fn given_up(may_be_stored: bool, cause: Cause) -> StoreError {
    if may_be_stored {
        StoreError::Unknown(cause)
    } else {
        StoreError::Busy(cause)
    }
}

/// Between a half and one. A pause can do without randomness, if there is none.
fn fraction() -> f64 {
    let random = getrandom::u32().unwrap_or(u32::MAX);
    0.5 + f64::from(random) / f64::from(u32::MAX) / 2.0
}
