//! The tokens that are in use, read again from the store every half second: a new token works at
//! once, a revocation holds within a second, and a request costs no query.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use tokio::sync::{Mutex, OwnedMutexGuard};

use crate::http::error::ApiError;
use crate::metrics::{Answers, Metrics};
use crate::store::{Store, StoreError, TokenId, TokenRecord};
use crate::token::{Token, TokenDigest};
use crate::writer::{AddError, Writer};

/// How long a record is believed without another look at the store.
const FRESH_FOR: Duration = Duration::from_millis(500);

/// Every token of the store, by digest, as far as it has been used. It is never larger than the
/// store's own table: what is not in the store is not kept.
#[derive(Clone)]
pub struct Tokens(Arc<Inner>);

struct Inner {
    /// Held while reading, so that a stale record is read once and not once a connection.
    store: Arc<Mutex<Store>>,
    writer: Writer,
    metrics: Arc<Metrics>,
    known: RwLock<HashMap<TokenDigest, Known>>,
    read_timeout: Duration,
}

/// A token that the store knows. Whether it may be used, `admit` says.
#[derive(Clone)]
pub struct Known {
    record: Arc<TokenRecord>,
    limit: Option<Arc<RateLimit>>,
    read_at: Instant,
}

impl Tokens {
    /// Tokens of this store; that they were used is noted through the writer.
    pub fn new(
        store: Store,
        writer: Writer,
        metrics: Arc<Metrics>,
        read_timeout: Duration,
    ) -> Self {
        Self(Arc::new(Inner {
            store: Arc::new(Mutex::new(store)),
            writer,
            metrics,
            read_timeout,
            known: RwLock::default(),
        }))
    }

    /// Finds a token, as it was at most half a second ago.
    pub async fn look_up(&self, token: &Token, answers: &Answers) -> Result<Known, ApiError> {
        let digest = token.digest();
        if let Some(known) = self.fresh(&digest, answers) {
            return Ok(known);
        }
        let read = async {
            let store = Arc::clone(&self.0.store).lock_owned().await;
            match self.fresh(&digest, answers) {
                Some(known) => Ok(known),
                None => self.read(digest, store).await,
            }
        };
        let read = tokio::time::timeout(self.0.read_timeout, read).await;
        read.unwrap_or_else(|_| {
            let cause = format!("a token was not read within {:?}", self.0.read_timeout);
            Err(self.unread(StoreError::Unavailable(cause.into())))
        })
    }

    /// The response to an add whose token could not be read. It is counted with those that the store has rejected.
    fn unread(&self, error: StoreError) -> ApiError {
        let outcome = match AddError::from(&error) {
            AddError::Unknown | AddError::Full => AddError::Unreachable, // nothing was written
            outcome => outcome,
        };
        outcome.counter(&self.0.metrics.adds).add(1);
        error.into()
    }

    fn fresh(&self, digest: &TokenDigest, answers: &Answers) -> Option<Known> {
        let all = self.0.known.read().unwrap_or_else(PoisonError::into_inner);
        let known = all.get(digest)?;
        (known.read_at.elapsed() < FRESH_FOR).then(|| {
            answers.tokens_known.add(1);
            known.clone()
        })
    }

    async fn read(
        &self,
        digest: TokenDigest,
        mut store: OwnedMutexGuard<Store>,
    ) -> Result<Known, ApiError> {
        self.0.metrics.token_reads.add(1);
        let read_at = Instant::now();
        // The store is not free before it has responded, also if this request is not waiting for it any more.
        let record = tokio::task::spawn_blocking(move || store.token(&digest))
            .await
            .map_err(|panic| ApiError::defect(panic.to_string()))?
            .map_err(|error| self.unread(error))?
            .filter(|record| record.digest == digest)
            .ok_or_else(ApiError::unknown_token)?;

        let mut all = self.0.known.write().unwrap_or_else(PoisonError::into_inner);
        let limit = record.rate_limit.map(|per_second| {
            let before = all.get(&digest).and_then(|known| known.limit.clone());
            before.unwrap_or_else(|| Arc::new(RateLimit::new(per_second, read_at)))
        });
        let known = Known {
            record: Arc::new(record),
            limit,
            read_at,
        };
        all.insert(digest, known.clone());
        self.0.metrics.tokens.set(all.len() as u64);
        drop(all);
        self.note_use(&known.record);
        Ok(known)
    }

    /// Has the minute of use written down, once a minute and not once a request.
    fn note_use(&self, record: &TokenRecord) {
        let now = Timestamp::now();
        let minute = now.as_second() - now.as_second().rem_euclid(60);
        let noted = record
            .last_used_at
            .is_some_and(|at| at.as_second() >= minute);
        if !noted && standing(record).is_ok() {
            let minute = Timestamp::from_second(minute).unwrap_or(now);
            self.0.writer.touch_token(record.id, minute);
        }
    }
}

impl Known {
    /// Its number.
    pub fn id(&self) -> TokenId {
        self.record.id
    }

    /// Its name, for the log.
    pub fn name(&self) -> Arc<str> {
        Arc::clone(&self.record.name)
    }

    /// Lets one request pass, or says why not.
    pub fn admit(&self) -> Result<(), ApiError> {
        standing(&self.record)?;
        match &self.limit {
            Some(limit) => limit.admit(Instant::now()),
            None => Ok(()),
        }
    }
}

fn standing(record: &TokenRecord) -> Result<(), ApiError> {
    if record.revoked_at.is_some() {
        return Err(ApiError::unknown_token());
    }
    match record.expires_at {
        Some(end) if end <= Timestamp::now() => Err(ApiError::expired_token()),
        _ => Ok(()),
    }
}

/// So many requests a second, with a second's worth at once: the generic cell rate algorithm,
/// whose whole state is the time at which the bucket will be empty again.
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

    fn admit(&self, now: Instant) -> Result<(), ApiError> {
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
                ApiError::too_many(self.per_second, wait_ns.div_ceil(SECOND_NS).max(1))
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_limit_lets_a_second_s_worth_pass_at_once_and_then_the_rate() {
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
