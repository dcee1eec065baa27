//! Runs a statement until its outcome is known: on a new connection if the old one is lost, again if the server says so, and
//! within a time limit.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_postgres::Error;

use crate::store::error::{Cause, OpenError, StoreError, chain};
use crate::store::postgres::schema::SchemaCheck;
use crate::store::postgres::session::Session;
use crate::store::postgres::tls::Tls;
use crate::store::postgres::url::Url;

/// The pause between two attempts: it doubles each time up to the maximum, with jitter.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// The tables are verified again before a statement if the last check is older: they can be changed while a connection is open.
const SCHEMA_CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// A server may accept a connection and never respond.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// A database, and the connection to it while there is one.
pub(super) struct RetryingClient {
    pub(super) url: Url,
    /// None if the connection is not encrypted.
    pub(super) tls: Option<Tls>,
    /// The time limit of each operation, with all attempts.
    pub(super) timeout: Duration,
    /// How the next connection verifies the tables.
    pub(super) schema_check: SchemaCheck,
    pub(super) session: Option<Session>,
}

impl RetryingClient {
    /// Connects if necessary: to a server with safe settings, and with our tables.
    pub(super) async fn session(&mut self) -> Result<&Session, OpenError> {
        // Taken, so that a connection whose check fails, or does not return, is not used again.
        let session = match self.session.take() {
            Some(mut session) if !session.client.is_closed() => {
                session.check_again().await?;
                if session.verified_at.elapsed() >= SCHEMA_CHECK_INTERVAL {
                    session.verify(SchemaCheck::Repeated).await?;
                }
                session
            }
            _ => {
                let connect = Session::connect(&self.url, self.tls.as_ref());
                let mut session = match timeout(CONNECT_TIMEOUT, connect).await {
                    Ok(session) => session?,
                    Err(elapsed) => {
                        return Err(OpenError::Unreachable {
                            database: self.url.to_string(),
                            source: elapsed.into(),
                        });
                    }
                };
                session.verify(self.schema_check).await?;
                self.schema_check = SchemaCheck::Repeated;
                session
            }
        };
        Ok(self.session.insert(session))
    }

    /// Runs what can be run again without harm until it has succeeded, or has failed for good, or the time is over.
    pub(super) async fn run<T>(
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
                Ok(Err(OpenError::Unreachable { source, .. })) => source,
                Ok(Err(rejected)) => {
                    return Err(given_up(
                        may_be_stored,
                        StoreError::Unusable,
                        rejected.into(),
                    ));
                }
                Ok(Ok(session)) => {
                    session.clear_warning();
                    let result = timeout_at(deadline, attempt(session)).await;
                    let warned = session.has_warned();
                    match result {
                        Ok(Ok(done)) if !warned => return Ok(done),
                        Ok(Err(error)) => {
                            match ErrorClass::of(&error) {
                                ErrorClass::Temporary => not_stored = StoreError::Busy,
                                ErrorClass::Standby => self.session = None,
                                ErrorClass::Unknown => {
                                    self.session = None;
                                    may_be_stored = true;
                                }
                                ErrorClass::Full => {
                                    let full = StoreError::Full;
                                    return Err(given_up(may_be_stored, full, error.into()));
                                }
                                ErrorClass::Permanent => {
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
                            "the database has sent a warning".into()
                        }
                        Err(elapsed) => {
                            // Never a cancel request: it would turn a commit that waits for its standby into a success.
                            self.session = None;
                            may_be_stored = true;
                            elapsed.into()
                        }
                    }
                }
            };
            tracing::debug!(cause = %chain(&*cause), "retrying a database statement");
            let jitter = pause.mul_f64(fraction());
            if Instant::now() + jitter >= deadline {
                return Err(given_up(may_be_stored, not_stored, cause));
            }
            sleep(jitter).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }
}

/// What an error says about whether the statement was executed, and whether to run it again.
enum ErrorClass {
    /// Not executed; another attempt may succeed.
    Temporary,
    /// Not executed: this server has become a standby, so the next attempt needs a new connection.
    Standby,
    /// The statement may have been executed.
    Unknown,
    /// Not executed: the disk is full.
    Full,
    /// Not executed, and no attempt succeeds until the operator changes something.
    Permanent,
}

impl ErrorClass {
    fn of(error: &Error) -> Self {
        let Some(code) = error.code() else {
            return Self::Unknown; // the connection is lost, or the response is invalid
        };
        match code.code() {
            "25006" => Self::Standby,
            "40003" => Self::Unknown,
            "53100" => Self::Full,
            code if code.starts_with("08") || code.starts_with("57P") => Self::Unknown,
            // Serialization, deadlock, locks, a cancelled query, insufficient resources.
            code if ["40", "53", "55", "57"].contains(&&code[..2]) => Self::Temporary,
            _ => Self::Permanent,
        }
    }
}

/// An earlier attempt whose response was lost may have stored what a later one did not.
fn given_up(may_be_stored: bool, not_stored: fn(Cause) -> StoreError, cause: Cause) -> StoreError {
    if may_be_stored {
        StoreError::Unknown(cause)
    } else {
        not_stored(cause)
    }
}

/// A random number between a half and one; one if the operating system has no random numbers.
fn fraction() -> f64 {
    let random = getrandom::u32().unwrap_or(u32::MAX);
    0.5 + f64::from(random) / f64::from(u32::MAX) / 2.0
}
