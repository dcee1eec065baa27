//! The figures as Prometheus reads them (text format 0.0.4): base units, bounded labels. A name never changes its
//! meaning; `docs/monitoring.md` lists them, and a test holds the two together.

use std::fmt::{Display, Write};
use std::time::SystemTime;

use crate::metrics::{Distribution, Metrics};
use crate::ops::process::Process;
use crate::ops::readiness::State;
use crate::store::Footprint;
use crate::version::COMMIT;

const US_A_SECOND: f64 = 1e6;

/// Those of the figures that were set.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Connections to the public listener.
    pub connections: usize,
    /// Plants that wait for the store.
    pub queue: usize,
    /// Bytes of the WAL of a SQLite store.
    pub wal_bytes: u64,
}

/// All of it.
pub fn write(
    metrics: &Metrics,
    state: &State,
    limits: Limits,
    seen: Option<(Process, Option<Footprint>)>,
) -> String {
    let mut page = Page::default();
    page.write_server(state);
    page.write_requests(metrics, limits);
    page.write_adds(metrics, state, limits);
    let (process, footprint) = seen.unzip();
    if let Some(footprint) = footprint.flatten() {
        page.write_footprint(footprint, limits);
    }
    page.write_tokens(metrics);
    page.write_process(process, metrics.started_at);
    page.text
}

#[derive(Default)]
struct Page {
    text: String,
    /// Of the family that is being written.
    name: &'static str,
}

impl Page {
    fn write_server(&mut self, state: &State) {
        self.gauge("plantstore_build_info", "What is running; always 1.");
        let labels = format!(
            "{{version=\"{}\",commit=\"{COMMIT}\"}}",
            env!("CARGO_PKG_VERSION")
        );
        self.sample(&labels, 1);
        self.gauge(
            "plantstore_ready",
            "1 if adds can be taken: the state that /readyz reports.",
        );
        self.value(u8::from(state.is_ready));
        self.gauge(
            "plantstore_draining",
            "Whether the server is about to end and answers what it has accepted.",
        );
        self.value(u8::from(state.is_draining));
    }

    fn write_requests(&mut self, metrics: &Metrics, limits: Limits) {
        self.counter(
            "plantstore_http_requests_total",
            "Requests by the status of the answer and the number of its error.",
        );
        for (status, error, count) in metrics.answered() {
            let error = error.map_or_else(|| "none".to_owned(), |error| error.to_string());
            let labels = format!("{{status=\"{status}\",error=\"{error}\"}}");
            self.sample(&labels, count);
        }
        self.family(
            "plantstore_http_request_duration_seconds",
            "histogram",
            "From the end of the head of a request to its answer, by the class of the status.",
        );
        for (class, durations) in metrics.durations_us() {
            let label = format!("class=\"{class}xx\",");
            self.histogram(&label, &durations, US_A_SECOND);
        }
        self.gauge(
            "plantstore_connections",
            "Connections to the public listener that are open.",
        );
        self.value(metrics.connections.value());
        self.gauge(
            "plantstore_connections_max",
            "As many as there may be at a time; more wait to be accepted.",
        );
        self.value(limits.connections);
        self.counter(
            "plantstore_connections_accepted_total",
            "Connections to the public listener that were accepted.",
        );
        self.value(metrics.connections_accepted.value());
    }

    fn write_adds(&mut self, metrics: &Metrics, state: &State, limits: Limits) {
        self.counter(
            "plantstore_adds_total",
            "Adds by their outcome, as reported to the client.",
        );
        for (outcome, count) in metrics.adds.all() {
            let labels = format!("{{outcome=\"{outcome}\"}}");
            self.sample(&labels, count);
        }
        self.gauge("plantstore_queue_plants", "What waits for the store.");
        self.value(state.queue_len);
        self.gauge(
            "plantstore_queue_plants_max",
            "As many as may wait; more are answered 503.",
        );
        self.value(limits.queue);
        self.family(
            "plantstore_batch_plants",
            "histogram",
            "Plants in a commit.",
        );
        self.histogram("", &metrics.batches.distribution(), 1.0);
        self.family(
            "plantstore_commit_duration_seconds",
            "histogram",
            "What a commit took, from handing a batch to the store to its answer.",
        );
        self.histogram("", &metrics.commits_us.distribution(), US_A_SECOND);
        self.gauge(
            "plantstore_last_commit_timestamp_seconds",
            "When the store last took something, in seconds since 1970; 0 before the first time.",
        );
        self.value(in_units(metrics.last_commit_ms.value(), 1e3));
    }

    fn write_footprint(&mut self, footprint: Footprint, limits: Limits) {
        self.gauge(
            "plantstore_store_size_bytes",
            "Size of the database file, its log apart.",
        );
        self.value(footprint.database);
        self.gauge("plantstore_store_wal_size_bytes", "Size of its WAL file.");
        self.value(footprint.wal);
        self.gauge(
            "plantstore_store_wal_max_bytes",
            "Size of the WAL from which on adds are rejected.",
        );
        self.value(limits.wal_bytes);
    }

    fn write_tokens(&mut self, metrics: &Metrics) {
        self.gauge(
            "plantstore_token_cache_entries",
            "Tokens that are kept in memory.",
        );
        self.value(metrics.tokens.value());
        self.counter(
            "plantstore_token_cache_lookups_total",
            "Tokens that were looked up, by whether the store had to be asked (miss).",
        );
        self.sample("{result=\"hit\"}", metrics.tokens_known());
        self.sample("{result=\"miss\"}", metrics.token_reads.value());
    }

    fn write_process(&mut self, process: Option<Process>, started_at: SystemTime) {
        let started_at = started_at.duration_since(SystemTime::UNIX_EPOCH);
        self.gauge(
            "process_start_time_seconds",
            "When the process was started, in seconds since 1970.",
        );
        self.value(started_at.unwrap_or_default().as_secs_f64());
        let Some(process) = process else {
            return;
        };
        self.counter("process_cpu_seconds_total", "Processor time used.");
        self.value(process.cpu_seconds);
        for (name, help, value) in [
            (
                "process_resident_memory_bytes",
                "Memory in use.",
                process.resident_bytes,
            ),
            (
                "process_virtual_memory_bytes",
                "Memory asked for.",
                process.virtual_bytes,
            ),
            (
                "process_open_fds",
                "Files and connections that are open.",
                process.open_fds,
            ),
            (
                "process_max_fds",
                "As many as may be open.",
                process.max_fds,
            ),
        ] {
            if let Some(value) = value {
                self.gauge(name, help);
                self.value(value);
            }
        }
    }

    fn gauge(&mut self, name: &'static str, help: &str) {
        self.family(name, "gauge", help);
    }

    fn counter(&mut self, name: &'static str, help: &str) {
        self.family(name, "counter", help);
    }

    fn family(&mut self, name: &'static str, kind: &str, help: &str) {
        self.name = name;
        self.line(format_args!("# HELP {name} {help}"));
        self.line(format_args!("# TYPE {name} {kind}"));
    }

    fn value(&mut self, value: impl Display) {
        self.sample("", value);
    }

    fn sample(&mut self, labels: &str, value: impl Display) {
        let name = self.name;
        self.line(format_args!("{name}{labels} {value}"));
    }

    /// The ranges of Prometheus reach down to zero, each.
    fn histogram(&mut self, label: &str, distribution: &Distribution, unit: f64) {
        let name = self.name;
        let Distribution {
            bounds,
            counts,
            sum,
        } = distribution;
        let mut total = 0;
        for (index, count) in counts.iter().enumerate() {
            total += count;
            match bounds.get(index) {
                Some(bound) => {
                    let bound = in_units(*bound, unit);
                    self.line(format_args!(
                        "{name}_bucket{{{label}le=\"{bound}\"}} {total}"
                    ));
                }
                None => self.line(format_args!("{name}_bucket{{{label}le=\"+Inf\"}} {total}")),
            }
        }
        let labels = match label.trim_end_matches(',') {
            "" => String::new(),
            label => format!("{{{label}}}"),
        };
        let sum = in_units(*sum, unit);
        self.line(format_args!("{name}_sum{labels} {sum}"));
        self.line(format_args!("{name}_count{labels} {total}"));
    }

    fn line(&mut self, line: impl Display) {
        writeln!(self.text, "{line}").expect("a string takes what is written");
    }
}

/// A value in the unit that Prometheus wants.
#[expect(
    clippy::cast_precision_loss,
    reason = "2^53 microseconds are 285 years"
)]
fn in_units(value: u64, unit: f64) -> f64 {
    value as f64 / unit
}
