//! What the process has done: a point per second for 15 minutes, and one per ten seconds for a day, in a bounded amount of memory. One
//! table has all charts of the status page, and what their lines show.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;

use crate::metrics::{DURATION_BOUNDS_US, Metrics};
use crate::ops::system::System;

/// The time between two points, and how many of them are kept.
const RESOLUTIONS: [(Duration, usize); 2] = [
    (Duration::from_secs(1), 15 * 60),
    (Duration::from_secs(10), 24 * 60 * 6),
];

/// A reading that is late or early by less belongs to its point.
const TOLERANCE: Duration = Duration::from_millis(500);

const US_PER_SECOND: f64 = 1e6;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Unit {
    PerSecond,
    Seconds,
    Plants,
    Connections,
    Bytes,
    /// Of a processor.
    Cores,
}

pub(super) struct Chart {
    pub(super) id: &'static str,
    pub(super) title: &'static str,
    pub(super) unit: Unit,
    pub(super) lines: &'static [Line],
}

pub(super) struct Line {
    pub(super) name: &'static str,
    /// None if there is nothing to show, such as the duration of commits while there are none.
    value: fn(&Interval<'_>) -> Option<f64>,
}

macro_rules! lines {
    ($($name:literal: $value:expr),* $(,)?) => {
        &[$(Line { name: $name, value: $value }),*]
    };
}

#[rustfmt::skip] // a table
pub(super) const CHARTS: &[Chart] = &[
    Chart { id: "adds", title: "Adds", unit: Unit::PerSecond, lines: lines! {
        "added": |of| of.rate_of_adds("added"),
        "replayed": |of| of.rate_of_adds("replayed"),
        "conflict": |of| of.rate_of_adds("conflict"),
        "damaged": |of| of.rate_of_adds("damaged"),
        "busy": |of| of.rate_of_adds("busy"),
        "unavailable": |of| of.rate_of_adds("unavailable"),
        "full": |of| of.rate_of_adds("full"),
        "unknown": |of| of.rate_of_adds("unknown"),
        "queue_full": |of| of.rate_of_adds("queue_full"),
    } },
    Chart { id: "latency", title: "Request duration", unit: Unit::Seconds, lines: lines! {
        "p50": |of| of.quantile(|reading| &reading.request_durations, 0.5),
        "p99": |of| of.quantile(|reading| &reading.request_durations, 0.99),
        "p99.9": |of| of.quantile(|reading| &reading.request_durations, 0.999),
    } },
    // Its lines are the error codes that have occurred.
    Chart { id: ERRORS, title: "Errors", unit: Unit::PerSecond, lines: &[] },
    Chart { id: "commits", title: "Commit duration", unit: Unit::Seconds, lines: lines! {
        "p50": |of| of.quantile(|reading| &reading.commit_durations, 0.5),
        "p99": |of| of.quantile(|reading| &reading.commit_durations, 0.99),
    } },
    Chart { id: "batches", title: "Batch size", unit: Unit::Plants, lines: lines! {
        "mean": |of| of.mean_batch(),
    } },
    Chart { id: "queue", title: "Queue length", unit: Unit::Plants, lines: lines! {
        "waiting": |of| float(of.after.queue_len),
    } },
    Chart { id: "connections", title: "Connections", unit: Unit::Connections, lines: lines! {
        "open": |of| float(of.after.connections),
    } },
    Chart { id: "database", title: "Database size", unit: Unit::Bytes, lines: lines! {
        "file": |of| float(of.after.system.files?.database),
    } },
    Chart { id: "wal", title: "WAL size", unit: Unit::Bytes, lines: lines! {
        "file": |of| float(of.after.system.files?.wal),
    } },
    Chart { id: "cpu", title: "CPU", unit: Unit::Cores, lines: lines! {
        "process": |of| Some((of.after.system.cpu_seconds? - of.before.system.cpu_seconds?) / of.seconds()),
    } },
    Chart { id: "memory", title: "Memory", unit: Unit::Bytes, lines: lines! {
        "resident": |of| float(of.after.system.resident_bytes?),
    } },
];

pub(super) const ERRORS: &str = "errors";

const LINES_LEN: usize = {
    let (mut len, mut index) = (0, 0);
    while index < CHARTS.len() {
        len += CHARTS[index].lines.len();
        index += 1;
    }
    len
};

/// The counters and gauges at one time.
pub(super) struct Reading {
    at: Instant,
    time: SystemTime,
    adds: [(&'static str, u64); 9],
    /// By error code.
    errors: Vec<(u32, u64)>,
    /// The number of values in each bucket.
    request_durations: Vec<u64>,
    commit_durations: Vec<u64>,
    commits: u64,
    plants_committed: u64,
    queue_len: u64,
    connections: u64,
    system: System,
}

impl Reading {
    pub(super) fn new(metrics: &Metrics, queue_len: usize, system: System) -> Self {
        let mut request_durations = vec![0; DURATION_BOUNDS_US.len() + 1];
        for (_, durations_us) in metrics.request_durations_us() {
            for (sum, count) in request_durations.iter_mut().zip(durations_us.values()) {
                *sum += count;
            }
        }
        let errors = metrics.responses().into_iter();
        let errors = errors.filter_map(|(_, code, count)| Some((code?, count)));
        let commit_durations: Vec<u64> = metrics.commit_durations_us.values().collect();
        Self {
            at: Instant::now(),
            time: SystemTime::now(),
            adds: (metrics.adds.by_outcome()).map(|(outcome, count)| (outcome, count.value())),
            errors: errors.collect(),
            request_durations,
            commits: commit_durations.iter().sum(),
            commit_durations,
            plants_committed: metrics.batch_plants.sum.value(),
            queue_len: queue_len as u64,
            connections: metrics.connections_open() as u64,
            system,
        }
    }
}

/// What happened between two readings.
struct Interval<'a> {
    before: &'a Reading,
    after: &'a Reading,
}

impl Interval<'_> {
    fn seconds(&self) -> f64 {
        self.after.at.duration_since(self.before.at).as_secs_f64()
    }

    fn rate(&self, before: u64, after: u64) -> Option<f64> {
        Some(float(after.saturating_sub(before))? / self.seconds())
    }

    fn rate_of_adds(&self, outcome: &str) -> Option<f64> {
        let count = |reading: &Reading| {
            let found = reading.adds.iter().find(|(name, _)| *name == outcome);
            found.map(|(_, count)| *count)
        };
        self.rate(count(self.before)?, count(self.after)?)
    }

    /// The error codes that occurred.
    fn errors(&self) -> Box<[(u32, f32)]> {
        let pairs = self.before.errors.iter().zip(&self.after.errors);
        let rates = pairs.filter(|(before, after)| before.1 < after.1);
        let rates = rates.filter_map(|(before, after)| {
            let rate = self.rate(before.1, after.1)?;
            Some((after.0, single(rate)))
        });
        rates.collect()
    }

    fn mean_batch(&self) -> Option<f64> {
        let commits = self.after.commits - self.before.commits;
        let plants = self.after.plants_committed - self.before.plants_committed;
        (commits > 0).then(|| Some(float(plants)? / float(commits)?))?
    }

    /// In seconds. Interpolated within its bucket, as `histogram_quantile` of Prometheus does it.
    fn quantile(&self, counts: fn(&Reading) -> &Vec<u64>, quantile: f64) -> Option<f64> {
        let counts = counts(self.before).iter().zip(counts(self.after));
        let counts: Vec<u64> = counts.map(|(before, after)| after - before).collect();
        Some(quantile_us(&counts, quantile)? / US_PER_SECOND)
    }
}

fn quantile_us(counts: &[u64], quantile: f64) -> Option<f64> {
    let total: u64 = counts.iter().sum();
    if total == 0 {
        return None;
    }
    let rank = float(total)? * quantile;
    let mut below = 0.0;
    let mut lower = 0.0;
    for (count, upper) in counts.iter().zip(DURATION_BOUNDS_US) {
        let (count, upper) = (float(*count)?, float(*upper)?);
        if count > 0.0 && below + count >= rank {
            return Some(lower + (upper - lower) * (rank - below) / count);
        }
        below += count;
        lower = upper;
    }
    // Above the last bound.
    Some(lower)
}

#[expect(
    clippy::cast_precision_loss,
    clippy::unnecessary_wraps,
    reason = "no chart shows more than 15 digits; the lines are options"
)]
fn float(value: u64) -> Option<f64> {
    Some(value as f64)
}

#[expect(clippy::cast_possible_truncation, reason = "a chart shows four digits")]
fn single(value: f64) -> f32 {
    value as f32
}

/// A point of all lines.
pub(super) struct Point {
    pub(super) time: SystemTime,
    /// In the order of the charts and their lines; NaN where there is nothing to show.
    values: [f32; LINES_LEN],
    errors: Box<[(u32, f32)]>,
}

/// The points of one resolution.
pub(super) struct Ring {
    pub(super) interval: Duration,
    len_max: usize,
    last: Arc<Reading>,
    points: VecDeque<Point>,
    /// The number of the next point. Numbers are never used again.
    pub(super) next: u64,
}

/// The values of a line, one for each point.
pub(super) struct Values {
    pub(super) name: String,
    pub(super) values: Vec<Option<f32>>,
}

impl Ring {
    fn record(&mut self, reading: &Arc<Reading>) {
        let elapsed = reading.at.duration_since(self.last.at);
        if elapsed + TOLERANCE < self.interval || elapsed.is_zero() {
            return;
        }
        let interval = Interval {
            before: &self.last,
            after: reading,
        };
        let mut values = [f32::NAN; LINES_LEN];
        let lines = CHARTS.iter().flat_map(|chart| chart.lines);
        for (value, line) in values.iter_mut().zip(lines) {
            *value = (line.value)(&interval).map_or(f32::NAN, single);
        }
        let errors = interval.errors();
        if self.points.len() == self.len_max {
            self.points.pop_front();
        }
        self.points.push_back(Point {
            time: reading.time,
            values,
            errors,
        });
        self.last = Arc::clone(reading);
        self.next += 1;
    }

    /// The points from this number on, as far as they are kept; all of them if there is no such number yet.
    pub(super) fn since(&self, first: u64) -> impl Iterator<Item = &Point> + Clone {
        let oldest = self.next - self.points.len() as u64;
        let skipped = if first > self.next {
            0
        } else {
            first.saturating_sub(oldest)
        };
        self.points
            .range(usize::try_from(skipped).unwrap_or_default()..)
    }

    /// The points of the last `period`.
    pub(super) fn within(&self, period: Duration) -> impl Iterator<Item = &Point> + Clone {
        let len = period.as_secs() / self.interval.as_secs();
        self.since(self.next.saturating_sub(len))
    }
}

/// The lines of a chart, with their values at these points.
pub(super) fn lines_of<'a>(
    chart: &'static Chart,
    points: impl Iterator<Item = &'a Point> + Clone,
) -> Vec<Values> {
    if chart.id == ERRORS {
        return errors_of(points);
    }
    let before = CHARTS.iter().take_while(|other| other.id != chart.id);
    let first: usize = before.map(|other| other.lines.len()).sum();
    let lines = chart.lines.iter().enumerate().map(|(index, line)| {
        let values = points.clone().map(|point| point.values[first + index]);
        Values {
            name: line.name.to_owned(),
            values: values
                .map(|value| Some(value).filter(|value| !value.is_nan()))
                .collect(),
        }
    });
    lines.collect()
}

fn errors_of<'a>(points: impl Iterator<Item = &'a Point> + Clone) -> Vec<Values> {
    let len = points.clone().count();
    let mut lines = BTreeMap::<u32, Vec<Option<f32>>>::new();
    for (index, point) in points.enumerate() {
        for (code, rate) in &point.errors {
            lines.entry(*code).or_insert_with(|| vec![Some(0.0); len])[index] = Some(*rate);
        }
    }
    let lines = lines.into_iter().map(|(code, values)| Values {
        name: code.to_string(),
        values,
    });
    lines.collect()
}

pub(super) struct History(pub(super) [Ring; RESOLUTIONS.len()]);

impl History {
    pub(super) fn new(reading: Reading) -> Self {
        let last = Arc::new(reading);
        Self(RESOLUTIONS.map(|(interval, len_max)| Ring {
            interval,
            len_max,
            last: Arc::clone(&last),
            points: VecDeque::new(),
            next: 0,
        }))
    }

    pub(super) fn record(&mut self, reading: Reading) {
        let reading = Arc::new(reading);
        self.0.iter_mut().for_each(|ring| ring.record(&reading));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(metrics: &Metrics, start: Instant, second: u64) -> Reading {
        let mut reading = Reading::new(metrics, 0, System::default());
        reading.at = start + Duration::from_secs(second);
        reading
    }

    #[test]
    fn the_points_of_a_day_are_kept_in_little_memory() {
        let metrics = Metrics::new([40001].into_iter());
        let start = Instant::now();
        let mut history = History::new(reading(&metrics, start, 0));
        for second in 1..=100_000 {
            history.record(reading(&metrics, start, second));
        }
        let lens = history.0.each_ref().map(|ring| ring.points.len());
        assert_eq!(lens, [900, 8640]);
        assert_eq!(
            history.0.each_ref().map(|ring| ring.next),
            [100_000, 10_000]
        );
        assert!(lens.iter().sum::<usize>() * size_of::<Point>() < 2 << 20);
    }

    #[test]
    fn a_point_has_the_rates_of_its_interval() {
        let metrics = Metrics::new([40001, 40009].into_iter());
        let start = Instant::now();
        let mut history = History::new(reading(&metrics, start, 0));
        metrics.adds.added.add(30);
        metrics
            .for_runtime()
            .count_response((400, Some(40009)), None);
        history.record(reading(&metrics, start, 2));
        let [ring, slow] = &history.0;
        let last = |id: &str| {
            let chart = CHARTS.iter().find(|chart| chart.id == id);
            let lines = lines_of(chart.expect(id), ring.since(0));
            lines
                .into_iter()
                .next()
                .map(|line| (line.name, line.values))
        };
        assert_eq!(last("adds"), Some(("added".to_owned(), vec![Some(15.0)])));
        assert_eq!(last(ERRORS), Some(("40009".to_owned(), vec![Some(0.5)])));
        assert_eq!(last("latency"), Some(("p50".to_owned(), vec![None])));
        assert_eq!(slow.points.len(), 0);
    }

    #[test]
    fn every_outcome_of_an_add_has_a_line() {
        let metrics = Metrics::new([].into_iter());
        let outcomes = metrics.adds.by_outcome().map(|(outcome, _)| outcome);
        let lines: Vec<_> = CHARTS[0].lines.iter().map(|line| line.name).collect();
        assert_eq!(lines, outcomes);
    }

    #[test]
    fn a_quantile_is_interpolated_within_its_bucket() {
        let mut counts = vec![0; DURATION_BOUNDS_US.len() + 1];
        assert_eq!(quantile_us(&counts, 0.5), None);
        counts[2] = 10; // between 500 and 1,000 µs
        assert_eq!(quantile_us(&counts, 0.5), Some(750.0));
        assert_eq!(quantile_us(&counts, 1.0), Some(1000.0));
        *counts.last_mut().expect("a bucket") = 90;
        assert_eq!(quantile_us(&counts, 0.5), Some(10_000_000.0));
    }
}
