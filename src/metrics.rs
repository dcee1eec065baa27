//! The figures that an operator watches. Counting is an addition without a lock, and what every request counts, each
//! worker counts for itself: nobody ever waits here.

use std::iter::zip;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

/// Upper bounds of what a request or a commit takes, in microseconds.
const TIMES_US: &[u64] = &[
    250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000,
    2_500_000, 5_000_000, 10_000_000,
];

/// Upper bounds of the plants in a batch.
const SIZES: &[u64] = &[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];

/// Statuses are 100 to 599, in five classes.
const STATUS_MIN: usize = 100;
const STATUSES: usize = 500;
const CLASSES: usize = 5;

/// A number that only grows, or one that is set now and then.
#[derive(Debug, Default)]
pub struct Figure(AtomicU64);

impl Figure {
    /// So many more.
    pub fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    /// So many fewer.
    fn subtract(&self, fewer: u64) {
        self.0.fetch_sub(fewer, Ordering::Relaxed);
    }

    /// So many from now on.
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// How many.
    pub fn value(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// How values are distributed over ranges.
pub struct Histogram {
    bounds: &'static [u64],
    /// One for each bound, and one for what is above them all.
    counts: Vec<Figure>,
    sum: Figure,
}

impl Histogram {
    fn new(bounds: &'static [u64]) -> Self {
        Self {
            bounds,
            counts: (0..=bounds.len()).map(|_| Figure::default()).collect(),
            sum: Figure::default(),
        }
    }

    /// Counts a value.
    pub fn observe(&self, value: u64) {
        let range = self.bounds.partition_point(|bound| *bound < value);
        self.counts[range].add(1);
        self.sum.add(value);
    }

    /// What there is so far.
    pub fn distribution(&self) -> Distribution {
        Distribution {
            bounds: self.bounds,
            counts: self.counts.iter().map(Figure::value).collect(),
            sum: self.sum.value(),
        }
    }
}

/// What a histogram has counted.
pub struct Distribution {
    /// Upper bounds of the ranges, the last range apart, which has none.
    pub bounds: &'static [u64],
    /// Values in each range.
    pub counts: Vec<u64>,
    /// Of all values.
    pub sum: u64,
}

impl Distribution {
    fn merge(mut self, other: &Self) -> Self {
        for (count, more) in zip(&mut self.counts, &other.counts) {
            *count += more;
        }
        self.sum += other.sum;
        self
    }
}

/// What one worker has answered. Others only read it, and it shares no cache line with theirs, so that it stays in the
/// caches of one core.
#[repr(align(128))]
pub struct Answers {
    numbers: Arc<[u32]>,
    /// Answers with an error of the catalogue, in its order.
    errors: Vec<Figure>,
    /// Answers without one, by status.
    statuses: Vec<Figure>,
    /// What they took, by the first digit of the status.
    durations: Vec<Histogram>,
    /// Tokens that did not have to be read.
    pub tokens_known: Figure,
}

impl Answers {
    fn new(numbers: Arc<[u32]>) -> Self {
        let figures = |len| (0..len).map(|_| Figure::default()).collect();
        Self {
            errors: figures(numbers.len()),
            statuses: figures(STATUSES),
            durations: (0..CLASSES).map(|_| Histogram::new(TIMES_US)).collect(),
            tokens_known: Figure::default(),
            numbers,
        }
    }

    /// Counts an answer to a request, and what it took.
    pub fn count(&self, status: u16, error: Option<u32>, duration_us: u64) {
        self.count_refusal(status, error);
        if let Some(class) = self
            .durations
            .get(usize::from(status / 100).wrapping_sub(1))
        {
            class.observe(duration_us);
        }
    }

    /// Counts an answer to what never became a request.
    pub fn count_refusal(&self, status: u16, error: Option<u32>) {
        let of_catalogue = error.and_then(|error| self.numbers.iter().position(|n| *n == error));
        let figure = match of_catalogue {
            Some(index) => self.errors.get(index),
            None => self
                .statuses
                .get(usize::from(status).wrapping_sub(STATUS_MIN)),
        };
        if let Some(figure) = figure {
            figure.add(1);
        }
    }
}

/// Adds by their outcome, as reported to the client: each add is counted once.
#[derive(Default)]
pub struct Adds {
    pub added: Figure,
    pub already_there: Figure,
    pub taken: Figure,
    pub damaged: Figure,
    pub busy: Figure,
    pub unreachable: Figure,
    pub full: Figure,
    pub unknown: Figure,
    /// Rejected before they were queued.
    pub queue_full: Figure,
}

impl Adds {
    /// Each with its name.
    pub fn all(&self) -> [(&'static str, u64); 9] {
        [
            ("added", &self.added),
            ("already_there", &self.already_there),
            ("taken", &self.taken),
            ("damaged", &self.damaged),
            ("busy", &self.busy),
            ("unreachable", &self.unreachable),
            ("full", &self.full),
            ("unknown", &self.unknown),
            ("queue_full", &self.queue_full),
        ]
        .map(|(name, figure)| (name, figure.value()))
    }
}

/// All figures of a server.
pub struct Metrics {
    /// When it was started.
    pub started_at: SystemTime,
    numbers: Arc<[u32]>,
    workers: Mutex<Vec<Arc<Answers>>>,
    /// Connections that are open.
    pub connections: Figure,
    /// Connections that were ever accepted.
    pub connections_accepted: Figure,
    /// Plants in a batch.
    pub batches: Histogram,
    /// Microseconds that a batch took to be committed.
    pub commits_us: Histogram,
    /// What became of plants.
    pub adds: Adds,
    /// When a batch was last committed, in milliseconds since 1970.
    pub last_commit_ms: Figure,
    /// Tokens in memory.
    pub tokens: Figure,
    /// Tokens that had to be read.
    pub token_reads: Figure,
}

impl Metrics {
    /// Nothing yet, of a service that has errors with these numbers.
    pub fn new(error_numbers: impl Iterator<Item = u32>) -> Self {
        Self {
            started_at: SystemTime::now(),
            numbers: error_numbers.collect(),
            workers: Mutex::default(),
            connections: Figure::default(),
            connections_accepted: Figure::default(),
            batches: Histogram::new(SIZES),
            commits_us: Histogram::new(TIMES_US),
            adds: Adds::default(),
            last_commit_ms: Figure::default(),
            tokens: Figure::default(),
            token_reads: Figure::default(),
        }
    }

    /// What one more worker will have answered.
    pub fn answers_of_a_worker(&self) -> Arc<Answers> {
        let answers = Arc::new(Answers::new(Arc::clone(&self.numbers)));
        let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        workers.push(Arc::clone(&answers));
        answers
    }

    /// Counts a connection until it is dropped.
    pub fn connection(self: &Arc<Self>) -> Connection {
        self.connections.add(1);
        self.connections_accepted.add(1);
        Connection(Arc::clone(self))
    }

    /// Records the commit of a batch of plants; a batch of none was a probe.
    pub fn committed(&self, plants: u64, took: Duration) {
        if plants > 0 {
            self.batches.observe(plants);
            self.commits_us.observe(micros(took));
        }
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let now = now.unwrap_or_default().as_millis();
        self.last_commit_ms
            .set(u64::try_from(now).unwrap_or(u64::MAX));
    }

    /// Answers by status and error: all errors of the catalogue, 200, and what else there was.
    pub fn answered(&self) -> Vec<(u16, Option<u32>, u64)> {
        let of_all = |count: &dyn Fn(&Answers) -> u64| self.over_workers(count).sum::<u64>();
        let plain = (0..STATUSES).map(|index| {
            let status = u16::try_from(STATUS_MIN + index).expect("a status has three digits");
            (status, None, of_all(&|a| a.statuses[index].value()))
        });
        let plain = plain.filter(|(status, _, count)| *status == 200 || *count > 0);
        let errors = self.numbers.iter().enumerate().map(|(index, number)| {
            let status = u16::try_from(number / 100).expect("a number is a status × 100 + n");
            (status, Some(*number), of_all(&|a| a.errors[index].value()))
        });
        plain.chain(errors).collect()
    }

    /// What requests took, by the first digit of the status of their answer.
    pub fn durations_us(&self) -> Vec<(usize, Distribution)> {
        // No answer of ours begins with 1: that is not yet the answer.
        let classes = (1..CLASSES).map(|class| {
            let workers = self.over_workers(|answers| answers.durations[class].distribution());
            let empty = Histogram::new(TIMES_US).distribution();
            (class + 1, workers.fold(empty, |all, one| all.merge(&one)))
        });
        classes.collect()
    }

    /// Tokens that did not have to be read.
    pub fn tokens_known(&self) -> u64 {
        self.over_workers(|answers| answers.tokens_known.value())
            .sum()
    }

    fn over_workers<T>(&self, value: impl Fn(&Answers) -> T) -> impl Iterator<Item = T> {
        let workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        let values: Vec<T> = workers.iter().map(|answers| value(answers)).collect();
        values.into_iter()
    }
}

/// Somebody is connected.
pub struct Connection(Arc<Metrics>);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.connections.subtract(1);
    }
}

/// As the log and the histograms have it.
pub fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_counted_in_the_range_up_to_its_bound() {
        let histogram = Histogram::new(&[1, 2, 4]);
        for value in [0, 1, 2, 3, 4, 5, 1000] {
            histogram.observe(value);
        }
        let Distribution { counts, sum, .. } = histogram.distribution();
        assert_eq!((counts, sum), (vec![2, 1, 2, 2], 1015));
    }

    #[test]
    fn answers_of_all_workers_are_one_and_strange_ones_are_counted_somewhere() {
        let metrics = Metrics::new([40000, 50300].into_iter());
        let workers = [metrics.answers_of_a_worker(), metrics.answers_of_a_worker()];
        for worker in &workers {
            worker.count(200, None, 300);
            worker.count_refusal(400, Some(40000));
        }
        workers[0].count(418, Some(41800), 1);
        workers[0].count(999, None, 1); // not a status: there is no place for it
        workers[0].count(0, None, 1);
        assert_eq!(
            metrics.answered(),
            [
                (200, None, 2),
                (418, None, 1),
                (400, Some(40000), 2),
                (503, Some(50300), 0)
            ]
        );
        let durations: Vec<_> = metrics.durations_us().into_iter().collect();
        let (class, of_2xx) = &durations[0];
        assert_eq!((*class, of_2xx.counts[1], of_2xx.sum), (2, 2, 600));
    }
}
