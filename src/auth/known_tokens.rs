//! All tokens of the store, in memory. A thread reads what has changed several times a second, so that a known token needs no
//! query and never waits behind an unknown one. A request with an unknown token waits for the next reading, so a new token
//! works at once; whatever clients send, the store is read at most 50 times a second.

use std::collections::{HashMap, VecDeque};
use std::num::NonZeroU32;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use parking_lot::{Condvar, Mutex, RwLock};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::auth::rate_limit::RateLimit;
use crate::auth::{AuthError, Authorized};
use crate::metrics::Metrics;
use crate::store::{Failure, Store, StoreError, TokenChanges, TokenId, TokenRecord, chain};
use crate::token::TokenDigest;
use crate::writer::{AddError, Writer};

/// How often the tokens are read if no request waits for it, and the least pause between two readings.
const READ_INTERVAL: Duration = Duration::from_millis(250);
const READ_PAUSE: Duration = Duration::from_millis(20);

/// How long the end of the thread is waited for: a query may be stuck.
const END_MAX: Duration = Duration::from_millis(250);

/// What was read is used for this long. With the time that a reading takes, a revocation is effective within a second.
const AGE_MAX: Duration = Duration::from_millis(750);

/// The most uses of tokens that are recorded in a `READ_INTERVAL`.
const USES_MAX: usize = 250;

pub struct KnownTokens {
    tokens: RwLock<Tokens>,
    start: Instant,
    /// When the last successful reading started, in microseconds since `start`; 0 before the first.
    read_at_us: AtomicU64,
    /// How often the connections have moved to another database server: now, and before that reading. What was read from another server
    /// is not used.
    moves: Arc<AtomicU64>,
    moves_read: AtomicU64,
    last_reading: watch::Sender<Reading>,
    next_reading: Arc<NextReading>,
    /// The current minute, as of the last reading.
    minute: AtomicI64,
    /// Tokens whose last use is not recorded yet, each of them once.
    used: Mutex<VecDeque<Arc<KnownToken>>>,
    /// The rate limit of tokens that have none of their own.
    default_limit: Option<NonZeroU32>,
    writer: Writer,
    metrics: Arc<Metrics>,
    timeout: Duration,
}

/// Tokens by their secrets.
#[derive(Default)]
struct Tokens {
    by_digest: HashMap<TokenDigest, Arc<KnownToken>>,
    secrets: HashMap<TokenId, Vec<TokenDigest>>,
}

/// A token that is in the store, whether it is valid or not, as it is with one of its secrets.
pub(super) struct KnownToken {
    pub(super) record: TokenRecord,
    /// True if there is a newer record of it.
    is_superseded: AtomicBool,
    rate_limit: Option<Arc<RateLimit>>,
    /// The minute in which it was last used, and whether that is still to be recorded.
    used_minute: AtomicI64,
    is_use_queued: AtomicBool,
}

/// Wakes the thread if a request waits for the next reading, and at the end.
#[derive(Default)]
struct NextReading {
    state: Mutex<ReaderState>,
    changed: Condvar,
}

#[derive(Default)]
struct ReaderState {
    is_needed: bool,
    has_ended: bool,
}

impl NextReading {
    fn request(&self) {
        self.state.lock().is_needed = true;
        self.changed.notify_all();
    }

    /// Waits until the tokens should be read again.
    fn wait(&self) {
        thread::sleep(READ_PAUSE);
        let mut state = self.state.lock();
        if !state.is_needed {
            self.changed
                .wait_for(&mut state, READ_INTERVAL.saturating_sub(READ_PAUSE));
        }
        state.is_needed = false;
    }

    fn end(&self) {
        self.state.lock().has_ended = true;
        self.changed.notify_all();
    }

    fn wait_for_end(&self) {
        let mut state = self.state.lock();
        let is_running = |state: &mut ReaderState| !state.has_ended;
        self.changed.wait_while_for(&mut state, is_running, END_MAX);
    }
}

/// The thread closes its connection before the writer does: the last connection that is closed empties the WAL.
impl Drop for KnownTokens {
    fn drop(&mut self) {
        self.next_reading.request();
        self.next_reading.wait_for_end();
    }
}

#[derive(Clone)]
struct Reading {
    started: Instant,
    moves: u64,
    failure: Option<(Failure, String)>,
}

impl Reading {
    /// Whether a request that waits since `now` can use the result. A reading that started before the connections moved may be of the old
    /// server, whether it has failed or not.
    fn is_of_use(&self, now: Instant, age_max: Duration, moves: u64) -> bool {
        let age_max = match self.failure {
            None => age_max,
            Some(_) => Duration::ZERO,
        };
        self.started + age_max > now && self.moves == moves
    }
}

impl KnownTokens {
    /// Starts the thread, which ends when the result is dropped. The last use of a token is recorded through the writer.
    pub fn start(
        store: Store,
        writer: Writer,
        metrics: Arc<Metrics>,
        timeout: Duration,
        default_limit: Option<NonZeroU32>,
    ) -> Arc<Self> {
        let start = Instant::now();
        let (last_reading, _) = watch::channel(Reading {
            started: start,
            moves: 0,
            failure: None,
        });
        let tokens = Arc::new(Self {
            tokens: RwLock::default(),
            start,
            read_at_us: AtomicU64::new(0),
            moves: store.moves(),
            moves_read: AtomicU64::new(0),
            last_reading,
            next_reading: Arc::default(),
            minute: AtomicI64::new(0),
            used: Mutex::default(),
            default_limit,
            writer,
            metrics,
            timeout,
        });
        let weak = Arc::downgrade(&tokens);
        let next_reading = Arc::clone(&tokens.next_reading);
        thread::Builder::new()
            .name("tokens".to_owned())
            .spawn(move || read_changes(store, &weak, &next_reading))
            .expect("a process that has just started can start a thread");
        tokens
    }

    /// False if a token may have been revoked a second ago without this being known.
    pub(super) fn is_current(&self, now: Instant) -> bool {
        let read_at = Duration::from_micros(self.read_at_us.load(Ordering::Relaxed));
        !read_at.is_zero()
            && self.moves_read.load(Ordering::Relaxed) == self.moves.load(Ordering::Relaxed)
            && now
                .saturating_duration_since(self.start)
                .saturating_sub(read_at)
                < AGE_MAX
    }

    /// Finds a token, if necessary after waiting until the tokens were read again. Before it waits for a token that is not
    /// known, it calls `if_unknown`.
    pub(super) async fn find(
        &self,
        digest: &TokenDigest,
        if_unknown: impl FnOnce() -> Result<(), AuthError>,
    ) -> Result<Arc<KnownToken>, AuthError> {
        let find = || self.tokens.read().by_digest.get(digest).map(Arc::clone);
        let now = Instant::now();
        let age_max = match find() {
            Some(known) if self.is_current(now) => return Ok(known),
            Some(_) => AGE_MAX,
            None => {
                // Before the first reading no token is known.
                if self.read_at_us.load(Ordering::Relaxed) > 0 {
                    if_unknown()?;
                }
                Duration::ZERO
            }
        };
        self.wait_for_reading(now, age_max).await?;
        find().ok_or(AuthError::UnknownToken)
    }

    /// Finds a subject of the identity provider by its name. One that is not there yet is created.
    pub(super) async fn find_or_create(&self, name: &str) -> Result<Arc<KnownToken>, AuthError> {
        let digest = TokenDigest::of_name(name);
        match self.find(&digest, || Ok(())).await {
            Err(AuthError::UnknownToken) => {}
            found => return found,
        }
        let created = self.writer.create_token(TokenRecord::new(name, digest));
        let created = timeout(self.timeout, created).await;
        if let Err(failure) = created.unwrap_or(Err(Failure::Unavailable)) {
            AddError::Store(failure).counter(&self.metrics.adds).add(1);
            let cause = "the subject of the JWT was not recorded".to_owned();
            return Err(AuthError::Store { failure, cause });
        }
        self.find(&digest, || Ok(())).await
    }

    /// Waits for a successful reading that started at most `age_max` before `now`, or for the failure of one that started later.
    async fn wait_for_reading(&self, now: Instant, age_max: Duration) -> Result<(), AuthError> {
        let mut last_reading = self.last_reading.subscribe();
        self.next_reading.request();
        let reading = last_reading.wait_for(|reading| {
            reading.is_of_use(now, age_max, self.moves.load(Ordering::Relaxed))
        });
        let failure = match timeout(self.timeout, reading).await {
            Ok(Ok(reading)) => reading.failure.clone(),
            Ok(Err(_)) => Some((Failure::Unavailable, "the server is stopping".to_owned())),
            Err(_) => {
                let cause = format!("the tokens were not read within {:?}", self.timeout);
                Some((Failure::Unavailable, cause))
            }
        };
        let Some((failure, cause)) = failure else {
            return Ok(());
        };
        // The add is counted with those that the store has rejected.
        AddError::Store(failure).counter(&self.metrics.adds).add(1);
        Err(AuthError::Store { failure, cause })
    }

    fn apply(&self, changes: TokenChanges) {
        let mut tokens = self.tokens.write();
        let mut before = Tokens::default();
        if changes.is_complete {
            std::mem::swap(&mut *tokens, &mut before);
        }
        for record in changes.changed {
            let old = [tokens.remove(record.id), before.remove(record.id)];
            let old = old.iter().flatten().next().map(Arc::as_ref);
            tokens.insert(record, old, self.default_limit);
        }
        for old in before.by_digest.into_values() {
            old.is_superseded.store(true, Ordering::Relaxed);
        }
        let len = tokens.secrets.len() as u64;
        self.metrics.tokens.store(len, Ordering::Relaxed);
    }

    /// Notes that a token was used, once a minute.
    fn note_use(&self, token: &Arc<KnownToken>) {
        let minute = self.minute.load(Ordering::Relaxed);
        if token.used_minute.load(Ordering::Relaxed) < minute
            && token.used_minute.fetch_max(minute, Ordering::Relaxed) < minute
            && !token.is_use_queued.swap(true, Ordering::Relaxed)
        {
            self.used.lock().push_back(Arc::clone(token));
        }
    }

    /// Records some of the uses; the others later, so that a minute in which many tokens are used delays no plants.
    fn record_uses(&self) {
        let mut used = self.used.lock();
        let some = used.len().min(USES_MAX);
        let some: Vec<_> = used.drain(..some).collect();
        drop(used);
        for token in some {
            token.is_use_queued.store(false, Ordering::Relaxed);
            let minute = token.used_minute.load(Ordering::Relaxed);
            let used_at = Timestamp::from_second(minute * 60).unwrap_or(Timestamp::UNIX_EPOCH);
            self.writer.record_token_use(token.record.id, used_at);
        }
    }
}

impl Tokens {
    /// Removes a token with all its secrets. Returns it as it was.
    fn remove(&mut self, id: TokenId) -> Option<Arc<KnownToken>> {
        let digests = self.secrets.remove(&id)?;
        let mut removed = None;
        for digest in digests {
            if let Some(old) = self.by_digest.remove(&digest) {
                old.is_superseded.store(true, Ordering::Relaxed);
                removed.get_or_insert(old);
            }
        }
        removed
    }

    fn insert(
        &mut self,
        record: TokenRecord,
        before: Option<&KnownToken>,
        default_limit: Option<NonZeroU32>,
    ) {
        let digests = record.secrets().collect();
        self.secrets.insert(record.id, digests);
        let previous = record.previous_secret.map(|previous| TokenRecord {
            digest: previous.digest,
            expires_at: Some(previous.expires_at),
            ..record.clone()
        });
        let known = Arc::new(KnownToken::new(record, before, default_limit));
        if let Some(previous) = previous {
            // Both secrets share the rate limit.
            let previous = KnownToken::new(previous, Some(&known), default_limit);
            self.by_digest
                .insert(previous.record.digest, Arc::new(previous));
        }
        self.by_digest.insert(known.record.digest, known);
    }
}

/// The thread. It keeps neither the tokens nor the writer alive while it waits.
fn read_changes(mut store: Store, tokens: &Weak<KnownTokens>, next_reading: &NextReading) {
    let mut last_event = None;
    let moves = store.moves();
    let mut moves_read = 0;
    let mut has_failed = false;
    let mut uses_recorded_at = None;
    let _last = loop {
        let started = Instant::now();
        let minute = Timestamp::now().as_second().div_euclid(60);
        let moves_before = moves.load(Ordering::SeqCst);
        if moves_before != moves_read || has_failed {
            // Another server, or one that was restored, may have another event with that number.
            last_event = None;
        }
        let changes = panic::catch_unwind(AssertUnwindSafe(|| store.token_changes(last_event)));
        let changes = changes.unwrap_or_else(|_| {
            Err(Failure::Unavailable.because("reading the tokens has panicked"))
        });
        let Some(tokens) = tokens.upgrade() else {
            break None;
        };
        let failure = match changes {
            Ok(changes) => {
                let is_first = tokens.read_at_us.load(Ordering::Relaxed) == 0;
                if is_first && !changes.changed.iter().any(gives_access) {
                    tracing::info!(
                        "no token gives access; `plantstore token create NAME` creates one"
                    );
                }
                last_event = Some(changes.last_event);
                moves_read = moves_before;
                tokens.minute.store(minute, Ordering::Relaxed);
                if !changes.changed.is_empty() || changes.is_complete {
                    tokens.apply(changes);
                }
                let read_at = started.duration_since(tokens.start).as_micros();
                let read_at = u64::try_from(read_at).unwrap_or(u64::MAX);
                tokens.moves_read.store(moves_read, Ordering::Relaxed);
                tokens.read_at_us.store(read_at.max(1), Ordering::Release);
                if uses_recorded_at.is_none_or(|at| started - at >= READ_INTERVAL) {
                    uses_recorded_at = Some(started);
                    tokens.record_uses();
                }
                None
            }
            Err(error) => Some(unreadable(&error)),
        };
        let metrics = &tokens.metrics;
        let [succeeded, failed] = &metrics.token_readings;
        let count = if failure.is_none() { succeeded } else { failed };
        count.add(1);
        // An outage is detected by the writer, which knows when adds start to fail; but it is over only when tokens can be read.
        let is_readable = match &failure {
            None => true,
            Some((Failure::Unusable, _)) => false,
            Some(_) if has_failed => false,
            Some(_) => metrics.are_tokens_readable.load(Ordering::Relaxed),
        };
        metrics
            .are_tokens_readable
            .store(is_readable, Ordering::Relaxed);
        has_failed = failure.is_some();
        tokens.last_reading.send_replace(Reading {
            started,
            moves: moves_before,
            failure,
        });
        if Arc::strong_count(&tokens) == 1 {
            break Some(tokens);
        }
        drop(tokens);
        next_reading.wait();
    };
    drop(store);
    next_reading.end();
}

fn gives_access(token: &TokenRecord) -> bool {
    token.revoked_at.is_none() && token.expires_at.is_none_or(|end| end > Timestamp::now())
}

fn unreadable(error: &StoreError) -> (Failure, String) {
    let failure = match error.kind {
        // Nothing was written, so its outcome is not unknown.
        Failure::Unknown | Failure::Fatal | Failure::Full => Failure::Unavailable,
        kind => kind,
    };
    (failure, chain(&*error.cause))
}

impl KnownToken {
    fn new(record: TokenRecord, before: Option<&Self>, default_limit: Option<NonZeroU32>) -> Self {
        let limit = record.rate_limit.and_then(NonZeroU32::new);
        let rate_limit = limit.or(default_limit).map(|per_second| {
            let before = before.and_then(|before| before.rate_limit.as_ref());
            let before = before.filter(|limit| limit.per_second == per_second);
            before.map_or_else(|| Arc::new(RateLimit::new(per_second)), Arc::clone)
        });
        let used_minute = record
            .last_used_at
            .map_or(i64::MIN, |at| at.as_second().div_euclid(60));
        let used_before = before.map_or(i64::MIN, |before| {
            before.used_minute.load(Ordering::Relaxed)
        });
        Self {
            record,
            is_superseded: AtomicBool::new(false),
            rate_limit,
            used_minute: AtomicI64::new(used_minute.max(used_before)),
            is_use_queued: AtomicBool::new(false),
        }
    }

    pub(super) fn is_superseded(&self) -> bool {
        self.is_superseded.load(Ordering::Relaxed)
    }

    pub(super) fn authorize(
        self: &Arc<Self>,
        tokens: &KnownTokens,
    ) -> Result<Authorized, AuthError> {
        if self.record.revoked_at.is_some() {
            return Err(AuthError::RevokedToken);
        }
        let is_over = |time: Timestamp| time <= Timestamp::now();
        if self.record.expires_at.is_some_and(is_over) {
            return Err(AuthError::ExpiredToken);
        }
        let limit = self.rate_limit.as_ref();
        let allowance = limit.map(|limit| limit.admit()).transpose()?;
        tokens.note_use(self);
        Ok(Authorized {
            token: self.record.id,
            allowance,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reading_that_started_before_a_move_to_another_server_is_of_no_use() {
        let long_before = Instant::now();
        let (before, now) = (long_before + AGE_MAX / 2, long_before + AGE_MAX);
        let after = now + AGE_MAX;
        let failure = || Some((Failure::Unavailable, "no connection".to_owned()));
        for (started, moves, failure, expected) in [
            (after, 1, None, true),
            (before, 1, None, true),
            (long_before, 1, None, false),
            (after, 1, failure(), true),
            (before, 1, failure(), false),
            (after, 0, None, false),
            (before, 0, None, false),
            (after, 0, failure(), false),
        ] {
            let case = format!(
                "{:?} {moves} {failure:?}",
                started.checked_duration_since(now)
            );
            let reading = Reading {
                started,
                moves,
                failure,
            };
            assert_eq!(reading.is_of_use(now, AGE_MAX, 1), expected, "{case}");
        }
    }
}
