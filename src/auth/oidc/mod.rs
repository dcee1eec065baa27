//! Tokens of an identity provider: JWTs that are verified with its public keys. A task reads the keys every hour, and when a JWT names one
//! that is not known; keys that were read stay in use while the provider cannot be reached.

mod discovery;
mod jwt;
mod keys;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use jiff::Timestamp;
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::auth::AuthError;
use crate::config::OidcSettings;
use crate::metrics::Metrics;
use discovery::Discovery;
use jwt::{Expected, Rejection, VerifiedJwt};
use keys::KeySet;

/// How often the keys are read: without a reason, after a failure, and at the most, whatever JWTs clients send.
const READ_INTERVAL: Duration = Duration::from_secs(3600);
const RETRY_INTERVAL: Duration = Duration::from_secs(10);
const READ_PAUSE: Duration = Duration::from_secs(5);

/// How long a request waits for a key that is not known.
const WAIT_MAX: Duration = Duration::from_secs(10);

/// How many JWTs that turn out to be invalid are verified in a second, of all clients together: they take some percent of a core.
const INVALID_PER_SECOND: u32 = 1000;

pub struct IdentityProvider {
    expected: Expected,
    last_reading: watch::Sender<Reading>,
    next_reading: Notify,
    /// How often keys were withdrawn: JWTs that were verified before have to be verified again.
    withdrawals: AtomicU64,
    /// The current second, and how many JWTs were invalid in it.
    invalid: Mutex<(Instant, u32)>,
    metrics: Arc<Metrics>,
}

#[derive(Clone, Default)]
struct Reading {
    /// None before the first.
    started: Option<Instant>,
    keys: Arc<KeySet>,
    /// How often keys were withdrawn until then.
    withdrawals: u64,
    failure: Option<Arc<str>>,
}

impl Reading {
    /// The keys, and how often others were withdrawn.
    fn keys(&self) -> (Arc<KeySet>, u64) {
        (Arc::clone(&self.keys), self.withdrawals)
    }

    fn recent_failure(&self, now: Instant) -> Option<&Arc<str>> {
        let is_recent = |at: Instant| now.saturating_duration_since(at) < RETRY_INTERVAL;
        let failure = self.failure.as_ref();
        failure.filter(|_| self.started.is_some_and(is_recent))
    }
}

/// The subject of a JWT that was verified, and how long it need not be verified again.
pub(super) struct Subject {
    pub name: Arc<str>,
    pub verified: Verified,
}

#[derive(Clone, Copy)]
pub(super) struct Verified {
    valid_until: Timestamp,
    withdrawals: u64,
}

impl IdentityProvider {
    /// None without a provider. Its keys are read by a task on the current runtime.
    pub(crate) fn start(
        settings: &OidcSettings,
        metrics: &Arc<Metrics>,
    ) -> Result<Option<Arc<Self>>, String> {
        let (Some(issuer), Some(audience)) = (&settings.oidc_issuer, &settings.oidc_audience)
        else {
            return Ok(None);
        };
        let discovery = Discovery::new(issuer)?;
        let provider = Arc::new(Self {
            expected: Expected {
                issuer: issuer.clone(),
                audience: audience.clone(),
                scope: settings.oidc_scope.as_deref().map(Arc::from),
            },
            last_reading: watch::Sender::default(),
            next_reading: Notify::new(),
            withdrawals: AtomicU64::new(0),
            invalid: Mutex::new((Instant::now(), 0)),
            metrics: Arc::clone(metrics),
        });
        tokio::spawn(Arc::clone(&provider).read_keys(discovery));
        Ok(Some(provider))
    }

    /// True if a JWT does not have to be verified again.
    pub(super) fn is_current(&self, verified: Verified) -> bool {
        verified.withdrawals == self.withdrawals.load(Ordering::Acquire)
            && Timestamp::now() <= verified.valid_until
    }

    /// Verifies a JWT, if necessary after waiting until the keys were read again. Sets the name of its subject, also if it is not
    /// authorised. Calls `if_unknown` before it waits, and if there are too many invalid ones also before it verifies a signature.
    pub(super) async fn verify(
        &self,
        jwt: &str,
        token_name: &mut Option<Arc<str>>,
        if_unknown: impl Fn() -> Result<(), AuthError>,
    ) -> Result<Subject, AuthError> {
        let (mut keys, mut withdrawals) = self.last_reading.borrow().keys();
        if self.count_invalid(0) > INVALID_PER_SECOND {
            if_unknown()?;
        }
        let verified = match jwt::verify(jwt, &keys, &self.expected) {
            Err(Rejection::UnknownKey) => {
                if_unknown()?;
                (keys, withdrawals) = self.wait_for_reading(Instant::now()).await?;
                jwt::verify(jwt, &keys, &self.expected)
            }
            verified => verified,
        };
        let [valid, invalid] = &self.metrics.oidc_verifications;
        let VerifiedJwt {
            name,
            valid_until,
            has_scope,
        } = verified
            .inspect(|_| valid.add(1))
            .inspect_err(|_| {
                invalid.add(1);
                self.count_invalid(1);
            })
            .map_err(|rejection| match rejection {
                Rejection::UnknownKey => {
                    AuthError::InvalidJwt("the provider does not have its key")
                }
                Rejection::Invalid(reason) => AuthError::InvalidJwt(reason),
                Rejection::Expired => AuthError::ExpiredJwt,
            })?;
        *token_name = Some(Arc::clone(&name));
        match &self.expected.scope {
            Some(scope) if !has_scope => Err(AuthError::InsufficientScope(Arc::clone(scope))),
            _ => Ok(Subject {
                name,
                verified: Verified {
                    valid_until,
                    withdrawals,
                },
            }),
        }
    }

    /// How many JWTs were invalid in this second, with these.
    fn count_invalid(&self, more: u32) -> u32 {
        let mut invalid = self.invalid.lock();
        let (second, count) = &mut *invalid;
        if second.elapsed() >= Duration::from_secs(1) {
            (*second, *count) = (Instant::now(), 0);
        }
        *count += more;
        *count
    }

    /// The keys of the next reading. An error if it fails, or if the last one has just failed.
    async fn wait_for_reading(&self, now: Instant) -> Result<(Arc<KeySet>, u64), AuthError> {
        let mut last_reading = self.last_reading.subscribe();
        self.next_reading.notify_one();
        if let Some(cause) = last_reading.borrow().recent_failure(now) {
            return Err(AuthError::ProviderUnreachable(cause.to_string()));
        }
        // The first one, which has the keys as well, started before the request.
        let is_first = last_reading.borrow().started.is_none();
        let next =
            last_reading.wait_for(|reading| reading.started.is_some_and(|at| is_first || at > now));
        let cause = match timeout(WAIT_MAX, next).await {
            Ok(Ok(reading)) => match &reading.failure {
                None => return Ok(reading.keys()),
                Some(cause) => cause.to_string(),
            },
            Ok(Err(_)) => "the server is stopping".to_owned(),
            Err(_) => format!("the keys were not read within {WAIT_MAX:?}"),
        };
        Err(AuthError::ProviderUnreachable(cause))
    }

    /// The task. It ends with the runtime.
    async fn read_keys(self: Arc<Self>, discovery: Discovery) {
        loop {
            let started = Instant::now();
            let read = discovery.read_keys().await;
            let has_failed = read.is_err();
            self.apply(started, read);
            let interval = if has_failed {
                RETRY_INTERVAL
            } else {
                READ_INTERVAL
            };
            tokio::select! {
                () = self.next_reading.notified() => sleep_until(started + READ_PAUSE).await,
                () = sleep(interval) => {}
            }
        }
    }

    fn apply(&self, started: Instant, read: Result<KeySet, String>) {
        let before = self.last_reading.borrow().clone();
        let [succeeded, failed] = &self.metrics.oidc_key_readings;
        let mut reading = Reading {
            started: Some(started),
            keys: before.keys,
            withdrawals: before.withdrawals,
            failure: None,
        };
        match read {
            Ok(keys) => {
                succeeded.add(1);
                if keys.len() == 0 {
                    let ignored = keys.ignored;
                    tracing::warn!(ignored, "the identity provider has no key that can be used");
                } else if before.started.is_none() || before.failure.is_some() {
                    let (keys, ignored) = (keys.len(), keys.ignored);
                    tracing::info!(keys, ignored, "the keys of the identity provider were read");
                }
                if !keys.contains_all(&reading.keys) {
                    reading.withdrawals += 1;
                }
                reading.keys = Arc::new(keys);
                let len = reading.keys.len() as u64;
                self.metrics.oidc_keys.store(len, Ordering::Relaxed);
                // Before the new keys can be used: from then on, no JWT is accepted that was verified with a withdrawn one.
                self.withdrawals
                    .store(reading.withdrawals, Ordering::Release);
                self.last_reading.send_replace(reading);
            }
            Err(cause) => {
                failed.add(1);
                if before.failure.as_deref() != Some(&*cause) {
                    tracing::warn!(
                        cause,
                        "the keys of the identity provider cannot be read; JWTs with known keys are accepted"
                    );
                }
                reading.failure = Some(cause.into());
                self.last_reading.send_replace(reading);
            }
        }
    }
}

/// Verifies a JWT with the keys in a JSON text.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn verify_jwt(keys: &str, jwt: &str) -> bool {
    let Ok(keys) = serde_json::from_str(keys) else {
        return false;
    };
    let expected = Expected {
        issuer: "https://login.example".to_owned(),
        audience: "plants".to_owned(),
        scope: None,
    };
    jwt::verify(jwt, &KeySet::new(keys), &expected).is_ok()
}
