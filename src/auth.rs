//! Authentication: the token cache and the rate limits. A cached record is read again from the store after half a second,
//! so a new token works at once, a revocation is effective within a second, and most requests need no query.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use parking_lot::RwLock;
use tokio::sync::{Mutex, OwnedMutexGuard};

use crate::metrics::{HttpMetrics, Metrics};
use crate::store::{Failure, Store, StoreError, TokenId, TokenRecord, chain};
use crate::token::{Token, TokenDigest};
use crate::writer::{AddError, Writer};

/// How long a cached record is used before it is read again.
const CACHE_TTL: Duration = Duration::from_millis(500);

/// The most tokens that a runtime remembers.
const RUNTIME_ENTRIES_MAX: usize = 4096;

/// Why a token does not authorise a request.
#[derive(Debug)]
pub(crate) enum AuthError {
    /// Unknown or revoked.
    UnknownToken,
    ExpiredToken,
    RateLimited {
        requests_per_second: u32,
        retry_after_s: u64,
    },
    /// The token could not be read; nothing was stored.
    Store {
        failure: Failure,
        cause: String,
    },
    Panic(String),
}

/// The tokens that were used, by digest. Unknown tokens are not cached, so the cache never has more entries than the
/// store has tokens.
pub struct TokenCache {
    /// Locked while a token is read, so that concurrent requests with the same stale record cause one query.
    store: Arc<Mutex<Store>>,
    writer: Writer,
    metrics: Arc<Metrics>,
    entries: RwLock<HashMap<TokenDigest, CachedToken>>,
    read_timeout: Duration,
}

/// The tokens that one runtime has seen, by the value of the `Authorization` header: most requests are authorised without
/// computing a digest and without memory that other cores use. The map hashes with a random key and compares values only if
/// their hashes are equal, so the response time reveals nothing about the tokens in it.
pub struct RuntimeTokens {
    cache: Arc<TokenCache>,
    entries: parking_lot::Mutex<HashMap<Box<[u8]>, RuntimeToken>>,
}

struct RuntimeToken {
    /// A copy of the name in the record: its reference count is used by this runtime only.
    name: Arc<str>,
    token: CachedToken,
}

impl RuntimeTokens {
    pub fn new(cache: &Arc<TokenCache>) -> Self {
        Self {
            cache: Arc::clone(cache),
            entries: parking_lot::Mutex::default(),
        }
    }

    /// Authorises a request by the value of its `Authorization` header, if that was used less than half a second ago. Sets the name of the token, valid
    /// or not.
    pub(crate) fn cached(
        &self,
        authorization: &[u8],
        metrics: &HttpMetrics,
        token_name: &mut Option<Arc<str>>,
    ) -> Option<Result<TokenId, AuthError>> {
        let entries = self.entries.lock();
        let entry = entries.get(authorization)?;
        entry.token.is_fresh().then(|| {
            metrics.token_cache_hits.add(1);
            *token_name = Some(Arc::clone(&entry.name));
            entry.token.authorize()
        })
    }

    /// Authorises a request by the token in its `Authorization` header.
    pub(crate) async fn look_up(
        &self,
        authorization: &[u8],
        token: &Token,
        metrics: &HttpMetrics,
        token_name: &mut Option<Arc<str>>,
    ) -> Result<TokenId, AuthError> {
        let token = self.cache.look_up(token, metrics).await?;
        let name: Arc<str> = (*token.record.name).into();
        *token_name = Some(Arc::clone(&name));
        let authorized = token.authorize();
        let mut entries = self.entries.lock();
        if entries.len() >= RUNTIME_ENTRIES_MAX {
            entries.clear();
        }
        entries.insert(authorization.into(), RuntimeToken { name, token });
        authorized
    }
}

/// A token that is in the store, whether it is valid or not.
#[derive(Clone)]
struct CachedToken {
    record: Arc<TokenRecord>,
    rate_limit: Option<Arc<RateLimit>>,
    read_at: Instant,
}

impl TokenCache {
    /// The last use of a token is recorded through the writer.
    pub fn new(
        store: Store,
        writer: Writer,
        metrics: Arc<Metrics>,
        read_timeout: Duration,
    ) -> Arc<Self> {
        Arc::new(Self {
            store: Arc::new(Mutex::new(store)),
            writer,
            metrics,
            read_timeout,
            entries: RwLock::default(),
        })
    }

    async fn look_up(
        &self,
        token: &Token,
        metrics: &HttpMetrics,
    ) -> Result<CachedToken, AuthError> {
        let digest = token.digest();
        if let Some(cached) = self.cached(&digest, metrics) {
            return Ok(cached);
        }
        let read = async {
            let store = Arc::clone(&self.store).lock_owned().await;
            match self.cached(&digest, metrics) {
                Some(cached) => Ok(cached),
                None => self.read(digest, store).await,
            }
        };
        let read = tokio::time::timeout(self.read_timeout, read).await;
        read.unwrap_or_else(|_| {
            let cause = format!("a token was not read within {:?}", self.read_timeout);
            Err(self.read_failed(&Failure::Unavailable.because(cause)))
        })
    }

    /// The add is counted with those that the store has rejected.
    fn read_failed(&self, error: &StoreError) -> AuthError {
        let failure = match error.kind {
            // Nothing was written, so its outcome is not unknown.
            Failure::Unknown | Failure::Fatal | Failure::Full => Failure::Unavailable,
            kind => kind,
        };
        AddError::Store(failure).counter(&self.metrics.adds).add(1);
        let cause = chain(&*error.cause);
        AuthError::Store { failure, cause }
    }

    fn cached(&self, digest: &TokenDigest, metrics: &HttpMetrics) -> Option<CachedToken> {
        let entries = self.entries.read();
        let cached = entries.get(digest)?;
        cached.is_fresh().then(|| {
            metrics.token_cache_hits.add(1);
            cached.clone()
        })
    }

    async fn read(
        &self,
        digest: TokenDigest,
        mut store: OwnedMutexGuard<Store>,
    ) -> Result<CachedToken, AuthError> {
        self.metrics.token_cache_misses.add(1);
        let read_at = Instant::now();
        // The store stays locked until the query returns, even if this request has stopped waiting for it.
        let record = tokio::task::spawn_blocking(move || store.token(&digest))
            .await
            .map_err(|panic| AuthError::Panic(panic.to_string()))?
            .map_err(|error| self.read_failed(&error))?
            .filter(|record| record.digest == digest)
            .ok_or(AuthError::UnknownToken)?;

        let mut entries = self.entries.write();
        let rate_limit = record.rate_limit.map(|per_second| {
            let previous = entries
                .get(&digest)
                .and_then(|entry| entry.rate_limit.clone());
            previous.unwrap_or_else(|| Arc::new(RateLimit::new(per_second, read_at)))
        });
        let cached = CachedToken {
            record: Arc::new(record),
            rate_limit,
            read_at,
        };
        entries.insert(digest, cached.clone());
        let cache_entries = &self.metrics.token_cache_entries;
        cache_entries.store(entries.len() as u64, Ordering::Relaxed);
        drop(entries);
        self.record_token_use(&cached);
        Ok(cached)
    }

    /// Records the last use to the minute, so at most once a minute and not for every request.
    fn record_token_use(&self, token: &CachedToken) {
        let now = Timestamp::now();
        let minute = now.as_second() - now.as_second().rem_euclid(60);
        let last_used_at = token.record.last_used_at;
        let is_recorded = last_used_at.is_some_and(|at| at.as_second() >= minute);
        if !is_recorded && token.check_validity().is_ok() {
            let minute = Timestamp::from_second(minute).unwrap_or(now);
            self.writer.record_token_use(token.record.id, minute);
        }
    }
}

impl CachedToken {
    fn is_fresh(&self) -> bool {
        self.read_at.elapsed() < CACHE_TTL
    }

    fn authorize(&self) -> Result<TokenId, AuthError> {
        self.check_validity()?;
        if let Some(limit) = &self.rate_limit {
            limit.admit(Instant::now())?;
        }
        Ok(self.record.id)
    }

    fn check_validity(&self) -> Result<(), AuthError> {
        if self.record.revoked_at.is_some() {
            return Err(AuthError::UnknownToken);
        }
        match self.record.expires_at {
            Some(expires_at) if expires_at <= Timestamp::now() => Err(AuthError::ExpiredToken),
            _ => Ok(()),
        }
    }
}

/// A rate limit with a burst of one second: the generic cell rate algorithm, whose state is one number, the time at
/// which the bucket will be empty. The crate that implements it, `governor`, brings keyed state stores, clocks and a
/// dozen dependencies for what is one `fetch_update` here.
struct RateLimit {
    per_second: u32,
    start: Instant,
    empty_at_ns: AtomicU64,
}

impl RateLimit {
    fn new(per_second: u32, start: Instant) -> Self {
        Self {
            per_second,
            start,
            empty_at_ns: AtomicU64::new(0),
        }
    }

    fn admit(&self, now: Instant) -> Result<(), AuthError> {
        const SECOND_NS: u64 = 1_000_000_000;
        let step_ns = SECOND_NS / u64::from(self.per_second.max(1));
        let now_ns = now.saturating_duration_since(self.start).as_nanos();
        let now_ns = u64::try_from(now_ns).unwrap_or(u64::MAX);
        self.empty_at_ns
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |empty_at_ns| {
                let next_ns = empty_at_ns.max(now_ns) + step_ns;
                (next_ns <= now_ns + SECOND_NS).then_some(next_ns)
            })
            .map(drop)
            .map_err(|empty_at_ns| {
                let wait_ns = (empty_at_ns + step_ns).saturating_sub(now_ns + SECOND_NS);
                AuthError::RateLimited {
                    requests_per_second: self.per_second,
                    retry_after_s: wait_ns.div_ceil(SECOND_NS).max(1),
                }
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_limit_admits_a_burst_of_one_second_and_then_the_rate() {
        let start = Instant::now();
        let limit = RateLimit::new(10, start);
        let admitted = |at: Duration| (0..100).filter(|_| limit.admit(start + at).is_ok()).count();
        assert_eq!(admitted(Duration::ZERO), 10);
        assert_eq!(admitted(Duration::from_millis(99)), 0);
        assert_eq!(admitted(Duration::from_millis(100)), 1);
        assert_eq!(admitted(Duration::from_millis(400)), 3);
        assert_eq!(admitted(Duration::from_secs(60)), 10);
    }
}
