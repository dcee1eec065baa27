//! `/metrics` in the Prometheus text format 0.0.4: one table of all metrics, with base units and bounded labels. A name
//! never changes its meaning; the documentation lists the same names, and a test compares the two.

use std::fmt::{Display, Write};
use std::fs;
use std::time::SystemTime;

use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_gettime};

use crate::metrics::{HistogramSnapshot, Metrics};
use crate::ops::readiness::Status;
use crate::store::Footprint;
use crate::version::COMMIT;

const US_PER_SECOND: f64 = 1e6;
const MS_PER_SECOND: f64 = 1e3;

/// The values that are read for one scrape.
pub(super) struct Scrape<'a> {
    pub(super) metrics: &'a Metrics,
    pub(super) status: Status,
    pub(super) limits: Limits,
    /// None if the kernel did not respond in time.
    pub(super) system: Option<System>,
}

/// Configured limits that are exported as metrics.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) connections: usize,
    pub(crate) queue_len: usize,
    pub(crate) wal_bytes: u64,
}

/// What the kernel reports about the process and the database files.
pub(super) struct System {
    pub(super) process: Process,
    pub(super) footprint: Option<Footprint>,
}

/// `None` where the kernel does not report a value.
pub(super) struct Process {
    cpu_seconds: f64,
    resident_bytes: Option<u64>,
    virtual_bytes: Option<u64>,
    open_fds: Option<u64>,
    max_fds: Option<u64>,
}

/// Writes the samples of a metric; a metric without samples is left out.
type Read = fn(&Scrape<'_>, &mut Samples);

/// Type, name, help, samples.
type Metric = (&'static str, &'static str, &'static str, Read);

const METRICS: &[Metric] = &[
    (
        "gauge",
        "plantstore_build_info",
        "Version and commit of the running binary; always 1.",
        |_, out| {
            let version = env!("CARGO_PKG_VERSION");
            out.sample(format_args!("version=\"{version}\",commit=\"{COMMIT}\""), 1);
        },
    ),
    (
        "gauge",
        "plantstore_ready",
        "1 if adds are accepted: the state that /readyz reports.",
        |s, out| out.value(u8::from(s.status.is_ready)),
    ),
    (
        "gauge",
        "plantstore_draining",
        "1 while the server is shutting down and completes the requests in flight.",
        |s, out| out.value(u8::from(s.status.is_draining)),
    ),
    (
        "counter",
        "plantstore_http_requests_total",
        "Requests by response status and error number.",
        |s, out| {
            for (status, error, count) in s.metrics.responses() {
                let error = error.map_or("none".to_owned(), |error| error.to_string());
                out.sample(format_args!("status=\"{status}\",error=\"{error}\""), count);
            }
        },
    ),
    (
        "histogram",
        "plantstore_http_request_duration_seconds",
        "Time from the end of the request headers to the response, by status class.",
        |s, out| {
            for (class, durations_us) in s.metrics.request_durations_us() {
                out.histogram(
                    &format!("class=\"{class}xx\""),
                    &durations_us,
                    US_PER_SECOND,
                );
            }
        },
    ),
    (
        "gauge",
        "plantstore_connections",
        "Open connections to the public listener.",
        |s, out| out.value(s.metrics.connections_open()),
    ),
    (
        "gauge",
        "plantstore_connections_max",
        "Limit of open connections; further ones wait to be accepted.",
        |s, out| out.value(s.limits.connections),
    ),
    (
        "counter",
        "plantstore_connections_accepted_total",
        "Accepted connections to the public listener.",
        |s, out| out.value(s.metrics.connections_accepted()),
    ),
    (
        "counter",
        "plantstore_adds_total",
        "Adds by outcome, as reported to the client.",
        |s, out| {
            let adds = &s.metrics.adds;
            for (outcome, counter) in [
                ("added", &adds.added),
                ("replayed", &adds.replayed),
                ("conflict", &adds.conflict),
                ("damaged", &adds.damaged),
                ("busy", &adds.busy),
                ("unavailable", &adds.unavailable),
                ("full", &adds.full),
                ("unknown", &adds.unknown),
                ("queue_full", &adds.queue_full),
            ] {
                out.sample(format_args!("outcome=\"{outcome}\""), counter.value());
            }
        },
    ),
    (
        "gauge",
        "plantstore_queue_plants",
        "Plants waiting in the queue.",
        |s, out| out.value(s.status.queue_len),
    ),
    (
        "gauge",
        "plantstore_queue_plants_max",
        "Limit of the queue; further adds get a 503.",
        |s, out| out.value(s.limits.queue_len),
    ),
    (
        "histogram",
        "plantstore_batch_plants",
        "Plants per commit.",
        |s, out| {
            out.histogram("", &s.metrics.batch_plants.snapshot(), 1.0);
        },
    ),
    (
        "histogram",
        "plantstore_commit_duration_seconds",
        "Duration of a commit, from handing the batch to the store to its result.",
        |s, out| {
            let durations_us = s.metrics.commit_durations_us.snapshot();
            out.histogram("", &durations_us, US_PER_SECOND);
        },
    ),
    (
        "gauge",
        "plantstore_last_commit_timestamp_seconds",
        "Time of the last successful commit, in seconds since 1970; 0 before the first.",
        |s, out| out.value(in_units(s.metrics.last_commit_ms.value(), MS_PER_SECOND)),
    ),
    (
        "gauge",
        "plantstore_store_size_bytes",
        "Size of the database file, without its WAL.",
        |s, out| out.optional(s.footprint().map(|footprint| footprint.database)),
    ),
    (
        "gauge",
        "plantstore_store_wal_size_bytes",
        "Size of the WAL file.",
        |s, out| out.optional(s.footprint().map(|footprint| footprint.wal)),
    ),
    (
        "gauge",
        "plantstore_store_wal_max_bytes",
        "Limit of the WAL size; adds are rejected beyond it.",
        |s, out| out.optional(s.footprint().map(|_| s.limits.wal_bytes)),
    ),
    (
        "gauge",
        "plantstore_token_cache_entries",
        "Tokens in the cache.",
        |s, out| out.value(s.metrics.token_cache_entries.value()),
    ),
    (
        "counter",
        "plantstore_token_cache_lookups_total",
        "Token lookups by result: hit, or miss (read from the store).",
        |s, out| {
            out.sample("result=\"hit\"", s.metrics.token_cache_hits());
            out.sample("result=\"miss\"", s.metrics.token_cache_misses.value());
        },
    ),
    (
        "gauge",
        "process_start_time_seconds",
        "Start time of the process, in seconds since 1970.",
        |s, out| {
            let started_at = s.metrics.started_at.duration_since(SystemTime::UNIX_EPOCH);
            out.value(started_at.unwrap_or_default().as_secs_f64());
        },
    ),
    (
        "counter",
        "process_cpu_seconds_total",
        "User and system CPU time.",
        |s, out| out.optional(s.process().map(|process| process.cpu_seconds)),
    ),
    (
        "gauge",
        "process_resident_memory_bytes",
        "Resident memory.",
        |s, out| out.optional(s.process().and_then(|process| process.resident_bytes)),
    ),
    (
        "gauge",
        "process_virtual_memory_bytes",
        "Virtual memory.",
        |s, out| out.optional(s.process().and_then(|process| process.virtual_bytes)),
    ),
    (
        "gauge",
        "process_open_fds",
        "Open file descriptors.",
        |s, out| {
            out.optional(s.process().and_then(|process| process.open_fds));
        },
    ),
    (
        "gauge",
        "process_max_fds",
        "Limit of open file descriptors.",
        |s, out| out.optional(s.process().and_then(|process| process.max_fds)),
    ),
];

/// The response body of `/metrics`.
pub(super) fn exposition(scrape: &Scrape<'_>) -> String {
    let mut text = String::new();
    for (kind, name, help, read) in METRICS {
        let mut samples = Samples {
            name,
            text: String::new(),
        };
        read(scrape, &mut samples);
        if !samples.text.is_empty() {
            let samples = samples.text;
            let written = write!(
                text,
                "# HELP {name} {help}\n# TYPE {name} {kind}\n{samples}"
            );
            written.expect("writing to a string does not fail");
        }
    }
    text
}

/// The samples of one metric.
struct Samples {
    name: &'static str,
    text: String,
}

impl Samples {
    fn value(&mut self, value: impl Display) {
        self.line("", "", value);
    }

    fn optional(&mut self, value: Option<impl Display>) {
        if let Some(value) = value {
            self.value(value);
        }
    }

    fn sample(&mut self, labels: impl Display, value: impl Display) {
        self.line("", labels, value);
    }

    /// `unit` is how many of the recorded unit make one of the exported unit. Exported buckets are cumulative.
    fn histogram(&mut self, labels: &str, snapshot: &HistogramSnapshot, unit: f64) {
        let separator = if labels.is_empty() { "" } else { "," };
        let mut total = 0;
        for (index, count) in snapshot.counts.iter().enumerate() {
            total += count;
            let bound = snapshot.bounds.get(index);
            let bound = bound.map_or("+Inf".to_owned(), |b| in_units(*b, unit).to_string());
            let labels = format_args!("{labels}{separator}le=\"{bound}\"");
            self.line("_bucket", labels, total);
        }
        self.line("_sum", labels, in_units(snapshot.sum, unit));
        self.line("_count", labels, total);
    }

    fn line(&mut self, suffix: &str, labels: impl Display, value: impl Display) {
        let (name, labels) = (self.name, labels.to_string());
        let written = match labels.as_str() {
            "" => writeln!(self.text, "{name}{suffix} {value}"),
            labels => writeln!(self.text, "{name}{suffix}{{{labels}}} {value}"),
        };
        written.expect("writing to a string does not fail");
    }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "2^53 microseconds are 285 years"
)]
fn in_units(value: u64, unit: f64) -> f64 {
    value as f64 / unit
}

impl Scrape<'_> {
    fn process(&self) -> Option<&Process> {
        self.system.as_ref().map(|system| &system.process)
    }

    fn footprint(&self) -> Option<&Footprint> {
        self.system.as_ref()?.footprint.as_ref()
    }
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
