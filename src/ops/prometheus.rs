//! `/metrics` in the Prometheus text format 0.0.4: one table of all metrics, with base units and bounded labels. A name
//! never changes its meaning; the documentation lists the same names, and a test compares the two.

use std::fmt::Display;
use std::sync::atomic::Ordering;
use std::time::SystemTime;

use crate::metrics::Histogram;
use crate::ops::Ops;
use crate::ops::system::{System, max_fds, open_fds};
use crate::version::COMMIT;

const US_PER_SECOND: f64 = 1e6;
const MS_PER_SECOND: f64 = 1e3;

/// Name, type, help, and a function that writes the samples; a metric without samples is left out.
type Metric = (
    &'static str,
    &'static str,
    &'static str,
    fn(&Ops, &System, &mut Samples),
);

#[rustfmt::skip] // a table
const METRICS: &[Metric] = &[
    ("plantstore_build_info", "gauge", "Version and commit of the running binary; always 1.",
        |_, _, out| out.sample(&[("version", env!("CARGO_PKG_VERSION")), ("commit", COMMIT)], 1)),
    ("plantstore_ready", "gauge", "1 if adds are accepted: the state that /readyz reports.",
        |ops, _, out| out.value(u8::from(ops.readiness().is_ok()))),
    ("plantstore_draining", "gauge", "1 while the server is shutting down and completes the requests in flight.",
        |ops, _, out| out.value(u8::from(ops.shutdown.is_draining()))),
    ("plantstore_http_requests_total", "counter", "Requests by response status and error code.",
        |ops, _, out| for (status, error, count) in ops.metrics.responses() {
            let error = error.map_or("none".to_owned(), |error| error.to_string());
            out.sample(&[("status", &status.to_string()), ("error_code", &error)], count);
        }),
    ("plantstore_http_request_duration_seconds", "histogram", "Time from the end of the request headers to the response, by status class.",
        |ops, _, out| for (class, durations_us) in ops.metrics.request_durations_us() {
            out.histogram(&[("class", &format!("{class}xx"))], &durations_us, US_PER_SECOND);
        }),
    ("plantstore_connections", "gauge", "Open connections to the public listener.",
        |ops, _, out| out.value(ops.metrics.connections_open())),
    ("plantstore_connections_max", "gauge", "Limit of open connections; beyond it unauthenticated and idle ones are closed.",
        |ops, _, out| out.value(ops.settings.max_connections)),
    ("plantstore_connections_accepted_total", "counter", "Accepted connections to the public listener.",
        |ops, _, out| out.value(ops.metrics.connections_accepted.value())),
    ("plantstore_connections_rejected_total", "counter", "Connections that were closed at once because their address had too many.",
        |ops, _, out| out.value(ops.metrics.connections_rejected.value())),
    ("plantstore_connections_evicted_total", "counter", "Unauthenticated or idle connections that were closed to make room for others.",
        |ops, _, out| out.value(ops.metrics.connections_evicted.value())),
    ("plantstore_http2_floods_total", "counter", "HTTP/2 connections that were closed because of too many frames that served no request.",
        |ops, _, out| out.value(ops.metrics.http2_floods())),
    ("plantstore_tls_handshakes_failed_total", "counter", "Connections to the public listener that ended in the TLS handshake.",
        |ops, _, out| out.value(ops.metrics.handshakes_failed.value())),
    ("plantstore_tls_certificate_expiry_timestamp_seconds", "gauge", "When the TLS certificate expires, in seconds since 1970.",
        |ops, _, out| out.values(Some(ops.metrics.certificate_expires_at.load(Ordering::Relaxed)).filter(|at| *at > 0))),
    ("plantstore_oidc_keys", "gauge", "Keys of the identity provider that JWTs are verified with.",
        |ops, _, out| out.value(ops.metrics.oidc_keys.load(Ordering::Relaxed))),
    ("plantstore_oidc_key_readings_total", "counter", "Readings of the keys of the identity provider, by result.",
        |ops, _, out| for (result, count) in ["ok", "failed"].iter().zip(&ops.metrics.oidc_key_readings) {
            out.sample(&[("result", result)], count.value());
        }),
    ("plantstore_oidc_verifications_total", "counter", "JWTs that were verified, by result; one that was verified before is not verified again.",
        |ops, _, out| for (result, count) in ["valid", "invalid"].iter().zip(&ops.metrics.oidc_verifications) {
            out.sample(&[("result", result)], count.value());
        }),
    ("plantstore_adds_total", "counter", "Adds by outcome, as reported to the client.",
        |ops, _, out| for (outcome, count) in ops.metrics.adds.by_outcome() {
            out.sample(&[("outcome", outcome)], count.value());
        }),
    ("plantstore_queue_length", "gauge", "Plants waiting in the queue; a token update or a probe counts as one.",
        |ops, _, out| out.value(ops.queue_len())),
    ("plantstore_queue_length_max", "gauge", "Limit of the queue; further adds get a 503.",
        |ops, _, out| out.value(ops.settings.max_queue)),
    ("plantstore_batch_plants", "histogram", "Plants per successful commit.",
        |ops, _, out| out.histogram(&[], &ops.metrics.batch_plants, 1.0)),
    ("plantstore_commit_duration_seconds", "histogram", "Duration of a successful commit of plants, from handing the batch to the store to its result.",
        |ops, _, out| out.histogram(&[], &ops.metrics.commit_durations_us, US_PER_SECOND)),
    ("plantstore_last_commit_timestamp_seconds", "gauge", "Time of the last successful commit, of plants or of a probe, in seconds since 1970; 0 before the first.",
        |ops, _, out| out.value(in_units(ops.metrics.last_commit_ms.load(Ordering::Relaxed), MS_PER_SECOND))),
    ("plantstore_store_size_bytes", "gauge", "Size of the database file, without its WAL.",
        |_, system, out| out.values(system.files.map(|files| files.database))),
    ("plantstore_store_wal_size_bytes", "gauge", "Size of the WAL file.",
        |_, system, out| out.values(system.files.map(|files| files.wal))),
    ("plantstore_store_wal_max_bytes", "gauge", "Limit of the WAL size; adds are rejected beyond it.",
        |ops, system, out| out.values(system.files.map(|_| ops.settings.wal.max_wal_bytes))),
    ("plantstore_tokens", "gauge", "Tokens in memory, revoked ones included.",
        |ops, _, out| out.value(ops.metrics.tokens.load(Ordering::Relaxed))),
    ("plantstore_token_readings_total", "counter", "Queries for changed tokens, by result.",
        |ops, _, out| for (result, count) in ["ok", "failed"].iter().zip(&ops.metrics.token_readings) {
            out.sample(&[("result", result)], count.value());
        }),
    ("process_start_time_seconds", "gauge", "Start time of the process, in seconds since 1970.",
        |ops, _, out| out.values(ops.metrics.started_at.duration_since(SystemTime::UNIX_EPOCH).map(|at| at.as_secs_f64()))),
    ("process_cpu_seconds_total", "counter", "User and system CPU time.",
        |_, system, out| out.values(system.cpu_seconds)),
    ("process_resident_memory_bytes", "gauge", "Resident memory.",
        |_, system, out| out.values(system.resident_bytes)),
    ("process_virtual_memory_bytes", "gauge", "Virtual memory.",
        |_, system, out| out.values(system.virtual_bytes)),
    ("process_open_fds", "gauge", "Open file descriptors.",
        |_, _, out| out.values(open_fds())),
    ("process_max_fds", "gauge", "Limit of open file descriptors.",
        |_, _, out| out.values(max_fds())),
];

/// The response body of `/metrics`.
pub(super) fn exposition(ops: &Ops, system: &System) -> String {
    let mut text = String::new();
    for (name, kind, help, read) in METRICS {
        let mut samples = Samples {
            name,
            text: String::new(),
        };
        read(ops, system, &mut samples);
        if !samples.text.is_empty() {
            let header = format!("# HELP {name} {help}\n# TYPE {name} {kind}\n");
            text += &header;
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
    fn histogram(&mut self, labels: Labels<'_>, histogram: &Histogram, unit: f64) {
        let mut total = 0;
        for (index, count) in histogram.counts.iter().enumerate() {
            total += count.value();
            let bound = histogram.bounds.get(index);
            let bound = bound.map_or("+Inf".to_owned(), |b| in_units(*b, unit).to_string());
            self.line("_bucket", &[labels, &[("le", &bound)]].concat(), total);
        }
        self.line("_sum", labels, in_units(histogram.sum.value(), unit));
        self.line("_count", labels, total);
    }

    fn line(&mut self, suffix: &str, labels: Labels<'_>, value: impl Display) {
        let labels: Vec<_> = labels
            .iter()
            .map(|(name, value)| format!("{name}=\"{value}\""))
            .collect();
        let labels = match &labels[..] {
            [] => String::new(),
            _ => format!("{{{}}}", labels.join(",")),
        };
        let line = format!("{}{suffix}{labels} {value}\n", self.name);
        self.text += &line;
    }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "2^53 microseconds are 285 years"
)]
fn in_units(value: u64, unit: f64) -> f64 {
    value as f64 / unit
}
