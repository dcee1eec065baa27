//! The metrics of a server. Recording is an atomic addition without a lock, and what every request records is kept per
//! runtime, so that cores do not share cache lines. `ops/prometheus.rs` has the table of names.

use std::iter::zip;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

/// Bucket bounds of request and commit durations, in microseconds.
const DURATION_BOUNDS_US: &[u64] = &[
    250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000,
    2_500_000, 5_000_000, 10_000_000,
];

/// Bucket bounds of the plants in a batch.
const BATCH_BOUNDS: &[u64] = &[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];

/// Statuses are 100 to 599, in five classes.
const STATUS_MIN: usize = 100;
const STATUSES: usize = 500;
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

#[derive(Debug, Default)]
pub(crate) struct Gauge(AtomicU64);

impl Gauge {
    pub(crate) fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    pub(crate) fn value(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

pub(crate) struct Histogram {
    bounds: &'static [u64],
    /// One per bound, and one for values above the last bound.
    counts: Vec<Counter>,
    sum: Counter,
}

/// The values of a histogram at one time; `counts` are not cumulative.
pub(crate) struct HistogramSnapshot {
    pub(crate) bounds: &'static [u64],
    pub(crate) counts: Vec<u64>,
    pub(crate) sum: u64,
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

    pub(crate) fn snapshot(&self) -> HistogramSnapshot {
        HistogramSnapshot {
            bounds: self.bounds,
            counts: self.counts.iter().map(Counter::value).collect(),
            sum: self.sum.value(),
        }
    }
}

impl HistogramSnapshot {
    fn merge(mut self, other: &Self) -> Self {
        for (count, more) in zip(&mut self.counts, &other.counts) {
            *count += more;
        }
        self.sum += other.sum;
        self
    }
}

/// The responses of one runtime. Only that runtime writes here, and the alignment keeps it off the cache lines of others.
#[repr(align(128))]
pub struct HttpMetrics {
    error_codes: Arc<[u32]>,
    /// Responses with an error code, in its order.
    errors: Vec<Counter>,
    /// Responses without one, by status.
    statuses: Vec<Counter>,
    /// By the first digit of the status.
    durations_us: Vec<Histogram>,
    pub(crate) token_cache_hits: Counter,
}

impl HttpMetrics {
    fn new(error_codes: Arc<[u32]>) -> Self {
        Self {
            errors: counters(error_codes.len()),
            statuses: counters(STATUSES),
            durations_us: (0..STATUS_CLASSES)
                .map(|_| Histogram::new(DURATION_BOUNDS_US))
                .collect(),
            token_cache_hits: Counter::default(),
            error_codes,
        }
    }

    pub(crate) fn response(&self, status: u16, error: Option<u32>, duration_us: u64) {
        self.count_response(status, error);
        let class = usize::from(status / 100).wrapping_sub(1);
        if let Some(durations_us) = self.durations_us.get(class) {
            durations_us.observe(duration_us);
        }
    }

    /// A response to bytes that could not be parsed as a request, which has no duration.
    pub(crate) fn count_response(&self, status: u16, error: Option<u32>) {
        let index = error.and_then(|error| self.error_codes.iter().position(|code| *code == error));
        let counter = match index {
            Some(index) => self.errors.get(index),
            None => self
                .statuses
                .get(usize::from(status).wrapping_sub(STATUS_MIN)),
        };
        if let Some(counter) = counter {
            counter.add(1);
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
    error_codes: Arc<[u32]>,
    runtimes: Mutex<Vec<Arc<HttpMetrics>>>,
    pub(crate) connections_accepted: Counter,
    connections_closed: Counter,
    pub(crate) batch_plants: Histogram,
    pub(crate) commit_durations_us: Histogram,
    pub(crate) adds: Adds,
    /// Milliseconds since 1970; 0 before the first commit.
    pub(crate) last_commit_ms: Gauge,
    pub(crate) token_cache_entries: Gauge,
    pub(crate) token_cache_misses: Counter,
}

impl Metrics {
    /// `error_codes` are those of the error catalogue.
    pub fn new(error_codes: impl Iterator<Item = u32>) -> Self {
        Self {
            started_at: SystemTime::now(),
            error_codes: error_codes.collect(),
            runtimes: Mutex::default(),
            connections_accepted: Counter::default(),
            connections_closed: Counter::default(),
            batch_plants: Histogram::new(BATCH_BOUNDS),
            commit_durations_us: Histogram::new(DURATION_BOUNDS_US),
            adds: Adds::default(),
            last_commit_ms: Gauge::default(),
            token_cache_entries: Gauge::default(),
            token_cache_misses: Counter::default(),
        }
    }

    /// Registers one more runtime.
    pub fn for_runtime(&self) -> Arc<HttpMetrics> {
        let metrics = Arc::new(HttpMetrics::new(Arc::clone(&self.error_codes)));
        let mut runtimes = self.runtimes.lock().unwrap_or_else(PoisonError::into_inner);
        runtimes.push(Arc::clone(&metrics));
        metrics
    }

    /// The connection counts as open until the result is dropped.
    pub(crate) fn connection(self: &Arc<Self>) -> OpenConnection {
        self.connections_accepted.add(1);
        OpenConnection(Arc::clone(self))
    }

    pub(crate) fn connections_open(&self) -> u64 {
        let closed = self.connections_closed.value();
        self.connections_accepted.value().saturating_sub(closed)
    }

    /// Records a commit. A batch without plants was a health check.
    pub(crate) fn committed(&self, plants: u64, duration: Duration) {
        if plants > 0 {
            self.batch_plants.observe(plants);
            self.commit_durations_us.observe(micros(duration));
        }
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let now_ms = now.unwrap_or_default().as_millis();
        self.last_commit_ms
            .set(u64::try_from(now_ms).unwrap_or(u64::MAX));
    }

    /// Responses by status and error code: 200 and every code of the catalogue, and other statuses that occurred.
    pub fn responses(&self) -> Vec<(u16, Option<u32>, u64)> {
        let total = |count: &dyn Fn(&HttpMetrics) -> u64| self.per_runtime(count).sum::<u64>();
        let statuses = (0..STATUSES).map(|index| {
            let status = u16::try_from(STATUS_MIN + index).expect("a status has three digits");
            (status, None, total(&|m| m.statuses[index].value()))
        });
        let statuses = statuses.filter(|(status, _, count)| *status == 200 || *count > 0);
        let errors = self.error_codes.iter().enumerate();
        let errors = errors.map(|(index, code)| {
            let status = u16::try_from(code / 100).expect("an error code is a status × 100 + n");
            (status, Some(*code), total(&|m| m.errors[index].value()))
        });
        statuses.chain(errors).collect()
    }

    /// Request durations by the first digit of the status. The service sends no 1xx responses.
    pub(crate) fn request_durations_us(&self) -> Vec<(usize, HistogramSnapshot)> {
        let classes = (1..STATUS_CLASSES).map(|class| {
            let snapshots = self.per_runtime(|m| m.durations_us[class].snapshot());
            let empty = Histogram::new(DURATION_BOUNDS_US).snapshot();
            (class + 1, snapshots.fold(empty, |all, one| all.merge(&one)))
        });
        classes.collect()
    }

    pub(crate) fn token_cache_hits(&self) -> u64 {
        self.per_runtime(|m| m.token_cache_hits.value()).sum()
    }

    fn per_runtime<T>(&self, value: impl Fn(&HttpMetrics) -> T) -> impl Iterator<Item = T> {
        let runtimes = self.runtimes.lock().unwrap_or_else(PoisonError::into_inner);
        let values: Vec<T> = runtimes.iter().map(|metrics| value(metrics)).collect();
        values.into_iter()
    }
}

pub(crate) struct OpenConnection(Arc<Metrics>);

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.connections_closed.add(1);
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
        let HistogramSnapshot { counts, sum, .. } = histogram.snapshot();
        assert_eq!((counts, sum), (vec![2, 1, 2, 2], 1015));
    }

    #[test]
    fn responses_of_all_runtimes_are_summed_and_unknown_errors_are_counted_by_status() {
        let metrics = Metrics::new([40000, 50300].into_iter());
        let runtimes = [metrics.for_runtime(), metrics.for_runtime()];
        for runtime in &runtimes {
            runtime.response(200, None, 300);
            runtime.count_response(400, Some(40000));
        }
        runtimes[0].response(418, Some(41800), 1);
        runtimes[0].response(999, None, 1); // not a status: not counted
        runtimes[0].response(0, None, 1);
        assert_eq!(
            metrics.responses(),
            [
                (200, None, 2),
                (418, None, 1),
                (400, Some(40000), 2),
                (503, Some(50300), 0)
            ]
        );
        let durations_us = metrics.request_durations_us();
        let (class, of_2xx) = &durations_us[0];
        assert_eq!((*class, of_2xx.counts[1], of_2xx.sum), (2, 2, 600));
    }
}
