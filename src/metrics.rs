//! The metrics of a server. Recording is an atomic addition without a lock, and what every request records is kept per
//! runtime, so that cores do not share cache lines. `ops/prometheus.rs` has the table of names.

use std::iter::zip;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;

/// Bucket bounds of request and commit durations, in microseconds.
pub(crate) const DURATION_BOUNDS_US: &[u64] = &[
    250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000,
    2_500_000, 5_000_000, 10_000_000,
];

/// Bucket bounds of the plants in a batch.
const BATCH_BOUNDS: &[u64] = &[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];

/// The statuses of responses that are not errors.
const SUCCESSES: [u16; 4] = [200, 204, 304, 307];

/// The first digit of a status is 1 to 5.
const STATUS_CLASSES: usize = 5;

#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn value(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

pub(crate) struct Histogram {
    pub(crate) bounds: &'static [u64],
    /// One per bound, and one for values above the last bound; not cumulative.
    pub(crate) counts: Vec<Counter>,
    pub(crate) sum: Counter,
}

impl Histogram {
    fn new(bounds: &'static [u64]) -> Self {
        Self {
            bounds,
            counts: counters(bounds.len() + 1),
            sum: Counter::default(),
        }
    }

    fn observe(&self, value: u64) {
        let bucket = self.bounds.partition_point(|bound| *bound < value);
        self.counts[bucket].add(1);
        self.sum.add(value);
    }

    /// The number of values in each bucket.
    pub(crate) fn values(&self) -> impl Iterator<Item = u64> {
        self.counts.iter().map(Counter::value)
    }

    /// Adds the values of a histogram with the same bounds.
    fn merge(&self, other: &Self) {
        for (count, more) in zip(&self.counts, &other.counts) {
            count.add(more.value());
        }
        self.sum.add(other.sum.value());
    }
}

/// The responses of one runtime. Only that runtime writes here, and the alignment keeps it off the cache lines of others.
#[repr(align(128))]
pub struct HttpMetrics {
    response_kinds: Arc<[ResponseKind]>,
    /// One per kind of response.
    responses: Vec<Counter>,
    /// By the first digit of the status.
    durations_us: Vec<Histogram>,
    /// HTTP/2 connections that were closed because of too many frames that served no request.
    pub(crate) http2_floods: Counter,
}

/// The status, and the error code if there is one.
type ResponseKind = (u16, Option<u32>);

impl HttpMetrics {
    fn new(response_kinds: Arc<[ResponseKind]>) -> Self {
        Self {
            responses: counters(response_kinds.len()),
            durations_us: (0..STATUS_CLASSES)
                .map(|_| Histogram::new(DURATION_BOUNDS_US))
                .collect(),
            response_kinds,
            http2_floods: Counter::default(),
        }
    }

    /// A response to bytes that could not be parsed as a request has no duration.
    pub(crate) fn count_response(&self, kind: ResponseKind, duration_us: Option<u64>) {
        let index = self.response_kinds.iter().position(|known| *known == kind);
        debug_assert!(index.is_some(), "{kind:?} is not among the known responses");
        if let Some(index) = index {
            self.responses[index].add(1);
        }
        let class = usize::from(kind.0 / 100).wrapping_sub(1);
        if let (Some(durations_us), Some(duration_us)) = (self.durations_us.get(class), duration_us)
        {
            durations_us.observe(duration_us);
        }
    }
}

/// Adds by outcome, as reported to the client. Each add is counted once.
#[derive(Default)]
pub(crate) struct Adds {
    pub(crate) added: Counter,
    pub(crate) replayed: Counter,
    pub(crate) conflict: Counter,
    pub(crate) damaged: Counter,
    pub(crate) busy: Counter,
    pub(crate) unavailable: Counter,
    pub(crate) full: Counter,
    pub(crate) unknown: Counter,
    /// Rejected because the queue was full.
    pub(crate) queue_full: Counter,
}

impl Adds {
    pub(crate) fn by_outcome(&self) -> [(&'static str, &Counter); 9] {
        [
            ("added", &self.added),
            ("replayed", &self.replayed),
            ("conflict", &self.conflict),
            ("damaged", &self.damaged),
            ("busy", &self.busy),
            ("unavailable", &self.unavailable),
            ("full", &self.full),
            ("unknown", &self.unknown),
            ("queue_full", &self.queue_full),
        ]
    }
}

pub struct Metrics {
    pub(crate) started_at: SystemTime,
    response_kinds: Arc<[ResponseKind]>,
    runtimes: Mutex<Vec<Arc<HttpMetrics>>>,
    pub(crate) connections_accepted: Counter,
    /// Because their address had too many.
    pub(crate) connections_rejected: Counter,
    /// To make room for others.
    pub(crate) connections_evicted: Counter,
    /// Each open connection has a clone.
    open_connections: Arc<()>,
    pub(crate) batch_plants: Histogram,
    pub(crate) commit_durations_us: Histogram,
    pub(crate) adds: Adds,
    /// Milliseconds since 1970; 0 before the first commit.
    pub(crate) last_commit_ms: AtomicU64,
    pub(crate) tokens: AtomicU64,
    /// Successful ones and failed ones.
    pub(crate) token_readings: [Counter; 2],
    /// False after the last reading of the tokens has failed.
    pub(crate) are_tokens_readable: AtomicBool,
    /// Readings of the keys of the identity provider: successful ones and failed ones.
    pub(crate) oidc_key_readings: [Counter; 2],
    pub(crate) oidc_keys: AtomicU64,
    /// JWTs that were valid and those that were not.
    pub(crate) oidc_verifications: [Counter; 2],
    pub(crate) handshakes_failed: Counter,
    /// In seconds since 1970; 0 without TLS.
    pub(crate) certificate_expires_at: AtomicI64,
}

impl Metrics {
    /// `error_codes` are those of the error catalogue.
    pub fn new(error_codes: impl Iterator<Item = u32>) -> Self {
        let errors = error_codes.map(|code| {
            let status = u16::try_from(code / 100).expect("an error code is a status × 100 + n");
            (status, Some(code))
        });
        let successes = SUCCESSES.map(|status| (status, None));
        Self {
            started_at: SystemTime::now(),
            response_kinds: successes.into_iter().chain(errors).collect(),
            runtimes: Mutex::default(),
            connections_accepted: Counter::default(),
            connections_rejected: Counter::default(),
            connections_evicted: Counter::default(),
            open_connections: Arc::default(),
            batch_plants: Histogram::new(BATCH_BOUNDS),
            commit_durations_us: Histogram::new(DURATION_BOUNDS_US),
            adds: Adds::default(),
            last_commit_ms: AtomicU64::default(),
            tokens: AtomicU64::default(),
            token_readings: Default::default(),
            are_tokens_readable: AtomicBool::new(false),
            oidc_key_readings: Default::default(),
            oidc_keys: AtomicU64::default(),
            oidc_verifications: Default::default(),
            handshakes_failed: Counter::default(),
            certificate_expires_at: AtomicI64::default(),
        }
    }

    /// Registers one more runtime.
    pub fn for_runtime(&self) -> Arc<HttpMetrics> {
        let metrics = Arc::new(HttpMetrics::new(Arc::clone(&self.response_kinds)));
        self.runtimes.lock().push(Arc::clone(&metrics));
        metrics
    }

    /// The connection counts as open until the result is dropped.
    pub(crate) fn connection(&self) -> Arc<()> {
        self.connections_accepted.add(1);
        Arc::clone(&self.open_connections)
    }

    pub(crate) fn connections_open(&self) -> usize {
        Arc::strong_count(&self.open_connections) - 1
    }

    /// Records a commit. A batch without plants was a probe.
    pub(crate) fn committed(&self, plants: u64, duration: Duration) {
        if plants > 0 {
            self.batch_plants.observe(plants);
            self.commit_durations_us.observe(micros(duration));
        }
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let now_ms = now.unwrap_or_default().as_millis();
        let now_ms = u64::try_from(now_ms).unwrap_or(u64::MAX);
        self.last_commit_ms.store(now_ms, Ordering::Relaxed);
    }

    /// All kinds of responses, with their number.
    pub fn responses(&self) -> Vec<(u16, Option<u32>, u64)> {
        let runtimes = self.runtimes.lock();
        let kinds = self.response_kinds.iter().enumerate();
        kinds
            .map(|(index, (status, code))| {
                let counts = runtimes.iter().map(|http| http.responses[index].value());
                (*status, *code, counts.sum())
            })
            .collect()
    }

    pub(crate) fn http2_floods(&self) -> u64 {
        let runtimes = self.runtimes.lock();
        runtimes.iter().map(|http| http.http2_floods.value()).sum()
    }

    /// Request durations by the first digit of the status. The service sends no 1xx responses.
    pub(crate) fn request_durations_us(&self) -> Vec<(usize, Histogram)> {
        let runtimes = self.runtimes.lock();
        (1..STATUS_CLASSES)
            .map(|class| {
                let total = Histogram::new(DURATION_BOUNDS_US);
                for http in &*runtimes {
                    total.merge(&http.durations_us[class]);
                }
                (class + 1, total)
            })
            .collect()
    }
}

fn counters(len: usize) -> Vec<Counter> {
    (0..len).map(|_| Counter::default()).collect()
}

pub(crate) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_counted_in_the_first_bucket_that_has_room_for_it() {
        let histogram = Histogram::new(&[1, 2, 4]);
        for value in [0, 1, 2, 3, 4, 5, 1000] {
            histogram.observe(value);
        }
        let counts: Vec<u64> = histogram.counts.iter().map(Counter::value).collect();
        assert_eq!((counts, histogram.sum.value()), (vec![2, 1, 2, 2], 1015));
    }

    #[test]
    fn responses_of_all_runtimes_are_summed() {
        let metrics = Metrics::new([40000, 50300].into_iter());
        for runtime in [metrics.for_runtime(), metrics.for_runtime()] {
            runtime.count_response((200, None), Some(300));
            runtime.count_response((400, Some(40000)), None);
        }
        assert_eq!(
            metrics.responses(),
            [
                (200, None, 2),
                (204, None, 0),
                (304, None, 0),
                (307, None, 0),
                (400, Some(40000), 2),
                (503, Some(50300), 0)
            ]
        );
        let durations_us = metrics.request_durations_us();
        let (class, of_2xx) = &durations_us[0];
        let count = of_2xx.counts[1].value();
        assert_eq!((*class, count, of_2xx.sum.value()), (2, 2, 600));
    }
}
