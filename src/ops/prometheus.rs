//! `/metrics` in the Prometheus text format 0.0.4: one table of all metrics, with base units and bounded labels. A name
//! never changes its meaning; the documentation lists the same names, and a test compares the two.

use std::fmt::Display;
use std::fs;
use std::time::SystemTime;

use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_gettime};

use crate::metrics::{HistogramSnapshot, Metrics};
use crate::store::FileSizes;
use crate::version::COMMIT;

const US_PER_SECOND: f64 = 1e6;
const MS_PER_SECOND: f64 = 1e3;

/// The values that are read for one scrape.
pub(super) struct Scrape<'a> {
    pub(super) metrics: &'a Metrics,
    pub(super) limits: Limits,
    pub(super) is_ready: bool,
    pub(super) is_draining: bool,
    pub(super) queue_len: usize,
    /// None if the kernel did not respond in time.
    pub(super) process: Option<Process>,
    /// None for PostgreSQL, or if the kernel did not respond in time.
    pub(super) file_sizes: Option<FileSizes>,
}

/// Configured limits that are exported as metrics.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) connections: usize,
    pub(crate) queue_len: usize,
    pub(crate) wal_bytes: u64,
}

/// Name, type, help, and a function that writes the samples; a metric without samples is left out.
type Metric = (
    &'static str,
    &'static str,
    &'static str,
    fn(&Scrape<'_>, &mut Samples),
);

#[rustfmt::skip] // a table
const METRICS: &[Metric] = &[
    ("plantstore_build_info", "gauge", "Version and commit of the running binary; always 1.",
        |_, out| out.sample(&[("version", env!("CARGO_PKG_VERSION")), ("commit", COMMIT)], 1)),
    ("plantstore_ready", "gauge", "1 if adds are accepted: the state that /readyz reports.",
        |s, out| out.value(u8::from(s.is_ready))),
    ("plantstore_draining", "gauge", "1 while the server is shutting down and completes the requests in flight.",
        |s, out| out.value(u8::from(s.is_draining))),
    ("plantstore_http_requests_total", "counter", "Requests by response status and error code.",
        |s, out| for (status, error, count) in s.metrics.responses() {
            let error = error.map_or("none".to_owned(), |error| error.to_string());
            out.sample(&[("status", &status.to_string()), ("error_code", &error)], count);
        }),
    ("plantstore_http_request_duration_seconds", "histogram", "Time from the end of the request headers to the response, by status class.",
        |s, out| for (class, durations_us) in s.metrics.request_durations_us() {
            out.histogram(&[("class", &format!("{class}xx"))], &durations_us, US_PER_SECOND);
        }),
    ("plantstore_connections", "gauge", "Open connections to the public listener.",
        |s, out| out.value(s.metrics.connections_open())),
    ("plantstore_connections_max", "gauge", "Limit of open connections; further ones wait to be accepted.",
        |s, out| out.value(s.limits.connections)),
    ("plantstore_connections_accepted_total", "counter", "Accepted connections to the public listener.",
        |s, out| out.value(s.metrics.connections_accepted.value())),
    ("plantstore_adds_total", "counter", "Adds by outcome, as reported to the client.",
        |s, out| for (outcome, count) in s.metrics.adds.by_outcome() {
            out.sample(&[("outcome", outcome)], count.value());
        }),
    ("plantstore_queue_plants", "gauge", "Plants waiting in the queue; a token update or a probe counts as one.",
        |s, out| out.value(s.queue_len)),
    ("plantstore_queue_plants_max", "gauge", "Limit of the queue; further adds get a 503.",
        |s, out| out.value(s.limits.queue_len)),
    ("plantstore_batch_plants", "histogram", "Plants per successful commit.",
        |s, out| out.histogram(&[], &s.metrics.batch_plants.snapshot(), 1.0)),
    ("plantstore_commit_duration_seconds", "histogram", "Duration of a successful commit of plants, from handing the batch to the store to its result.",
        |s, out| out.histogram(&[], &s.metrics.commit_durations_us.snapshot(), US_PER_SECOND)),
    ("plantstore_last_commit_timestamp_seconds", "gauge", "Time of the last successful commit, of plants or of a probe, in seconds since 1970; 0 before the first.",
        |s, out| out.value(in_units(s.metrics.last_commit_ms.value(), MS_PER_SECOND))),
    ("plantstore_store_size_bytes", "gauge", "Size of the database file, without its WAL.",
        |s, out| out.values(s.file_sizes.map(|file_sizes| file_sizes.database))),
    ("plantstore_store_wal_size_bytes", "gauge", "Size of the WAL file.",
        |s, out| out.values(s.file_sizes.map(|file_sizes| file_sizes.wal))),
    ("plantstore_store_wal_max_bytes", "gauge", "Limit of the WAL size; adds are rejected beyond it.",
        |s, out| out.values(s.file_sizes.map(|_| s.limits.wal_bytes))),
    ("plantstore_token_cache_entries", "gauge", "Tokens in the cache.",
        |s, out| out.value(s.metrics.token_cache_entries.value())),
    ("plantstore_token_cache_lookups_total", "counter", "Token lookups by result: hit, or miss (read from the store).",
        |s, out| {
            out.sample(&[("result", "hit")], s.metrics.token_cache_hits());
            out.sample(&[("result", "miss")], s.metrics.token_cache_misses.value());
        }),
    ("process_start_time_seconds", "gauge", "Start time of the process, in seconds since 1970.",
        |s, out| out.values(s.metrics.started_at.duration_since(SystemTime::UNIX_EPOCH).map(|at| at.as_secs_f64()))),
    ("process_cpu_seconds_total", "counter", "User and system CPU time.",
        |s, out| out.values(s.process.as_ref().map(|process| process.cpu_seconds))),
    ("process_resident_memory_bytes", "gauge", "Resident memory.",
        |s, out| out.values(s.process.as_ref().and_then(|process| process.resident_bytes))),
    ("process_virtual_memory_bytes", "gauge", "Virtual memory.",
        |s, out| out.values(s.process.as_ref().and_then(|process| process.virtual_bytes))),
    ("process_open_fds", "gauge", "Open file descriptors.",
        |s, out| out.values(s.process.as_ref().and_then(|process| process.open_fds))),
    ("process_max_fds", "gauge", "Limit of open file descriptors.",
        |s, out| out.values(s.process.as_ref().and_then(|process| process.max_fds))),
];

/// The response body of `/metrics`.
pub(super) fn exposition(scrape: &Scrape<'_>) -> String {
    let mut text = String::new();
    for (name, kind, help, read) in METRICS {
        let mut samples = Samples {
            name,
            text: String::new(),
        };
        read(scrape, &mut samples);
        if !samples.text.is_empty() {
            text += &[
                "# HELP ",
                name,
                " ",
                help,
                "\n# TYPE ",
                name,
                " ",
                kind,
                "\n",
            ]
            .concat();
            text += &samples.text;
        }
    }
    text
}

/// The samples of one metric.
struct Samples {
    name: &'static str,
    text: String,
}

type Labels<'a> = &'a [(&'a str, &'a str)];

impl Samples {
    fn value(&mut self, value: impl Display) {
        self.line("", &[], value);
    }

    /// At most one.
    fn values<T: Display>(&mut self, value: impl IntoIterator<Item = T>) {
        value.into_iter().for_each(|value| self.value(value));
    }

    fn sample(&mut self, labels: Labels<'_>, value: impl Display) {
        self.line("", labels, value);
    }

    /// `unit` is how many of the recorded unit make one of the exported unit. Exported buckets are cumulative.
    fn histogram(&mut self, labels: Labels<'_>, snapshot: &HistogramSnapshot, unit: f64) {
        let mut total = 0;
        for (index, count) in snapshot.counts.iter().enumerate() {
            total += count;
            let bound = snapshot.bounds.get(index);
            let bound = bound.map_or("+Inf".to_owned(), |b| in_units(*b, unit).to_string());
            self.line("_bucket", &[labels, &[("le", &bound)]].concat(), total);
        }
        self.line("_sum", labels, in_units(snapshot.sum, unit));
        self.line("_count", labels, total);
    }

    fn line(&mut self, suffix: &str, labels: Labels<'_>, value: impl Display) {
        self.text += &[self.name, suffix].concat();
        for (index, (name, value)) in labels.iter().enumerate() {
            let separator = if index == 0 { "{" } else { "," };
            self.text += &[separator, name, "=\"", value, "\""].concat();
        }
        self.text += if labels.is_empty() { " " } else { "} " };
        self.text += &value.to_string();
        self.text.push('\n');
    }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "2^53 microseconds are 285 years"
)]
fn in_units(value: u64, unit: f64) -> f64 {
    value as f64 / unit
}

/// What the kernel reports about the process; `None` where it does not report a value.
pub(super) struct Process {
    cpu_seconds: f64,
    resident_bytes: Option<u64>,
    virtual_bytes: Option<u64>,
    open_fds: Option<u64>,
    max_fds: Option<u64>,
}

impl Process {
    pub(super) fn read() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let bytes = |name| Some(kibibytes(&status, name)? * 1024);
        let cpu = clock_gettime(ClockId::ProcessCPUTime);
        Self {
            #[expect(
                clippy::cast_precision_loss,
                reason = "less than a century of CPU time"
            )]
            cpu_seconds: cpu.tv_sec as f64 + cpu.tv_nsec as f64 / 1e9,
            resident_bytes: bytes("VmRSS:"),
            virtual_bytes: bytes("VmSize:"),
            // Without the descriptor that reads the directory.
            open_fds: fs::read_dir("/proc/self/fd")
                .ok()
                .map(|fds| (fds.count() as u64).saturating_sub(1)),
            max_fds: getrlimit(Resource::Nofile).current,
        }
    }
}

fn kibibytes(status: &str, name: &str) -> Option<u64> {
    let value = status.lines().find_map(|line| line.strip_prefix(name))?;
    value.trim().strip_suffix(" kB")?.parse().ok()
}
