//! Health of the store. The process probes the store about once a second through the queue, and every batch shows whether
//! the store accepts writes too; readiness checks report the last result. An outage is logged once when it starts and once
//! when it ends.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::metrics::micros;
use crate::store::Failure;
use crate::writer::queue::{Job, Queue};

const PROBE_INTERVAL: Duration = Duration::from_secs(1);

/// How long a successful write shows that the next one would succeed: a probe then need not write.
const WRITE_TTL: Duration = Duration::from_secs(5);

/// The store is unresponsive if no result is more recent than this, although there is a probe every second.
const RESULT_AGE_MAX: Duration = Duration::from_secs(4);

/// How long a readiness check waits for a result: less than the timeout of common health checks.
const CHECK_TIMEOUT: Duration = Duration::from_secs(2);

/// Why the store does not accept writes.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum NotReady {
    #[error("{kind}: {cause}")]
    Failed { kind: Failure, cause: String },
    #[error("the store does not respond")]
    Unresponsive,
}

/// The result of the last use of the store.
#[derive(Default)]
pub(super) struct Health(watch::Sender<Status>);

#[derive(Default)]
struct Status {
    /// When the store was last used.
    used_at: Option<Instant>,
    /// When the store last committed a write.
    written_at: Option<Instant>,
    /// Since when, and why.
    outage: Option<(Instant, NotReady)>,
}

impl Status {
    fn is_recent(&self) -> bool {
        self.used_at.is_some_and(|at| at.elapsed() < RESULT_AGE_MAX)
    }

    fn result(&self) -> Result<(), NotReady> {
        match &self.outage {
            _ if !self.is_recent() => Err(NotReady::Unresponsive),
            Some((_, reason)) => Err(reason.clone()),
            None => Ok(()),
        }
    }
}

impl Health {
    /// Only a write ends an outage.
    pub(super) fn succeeded(&self, has_written: bool) {
        self.0.send_if_modified(|status| {
            if status.outage.is_some() && !has_written {
                return false;
            }
            let now = Instant::now();
            status.used_at = Some(now);
            if has_written {
                status.written_at = Some(now);
            }
            if let Some((since, _)) = status.outage.take() {
                let outage_us = micros(since.elapsed());
                tracing::warn!(outage_us, "the store accepts writes again");
            }
            true
        });
    }

    /// Returns false, and records nothing, if a write has succeeded since the failed attempt started.
    pub(super) fn failed(&self, started: Instant, reason: NotReady) -> bool {
        self.0.send_if_modified(|status| {
            if status.written_at.is_some_and(|at| at > started) {
                return false;
            }
            let now = Instant::now();
            status.used_at = Some(now);
            let since = status.outage.as_ref().map(|(since, _)| *since);
            if since.is_none() {
                const MESSAGE: &str = "the store does not accept writes";
                match &reason {
                    NotReady::Failed { kind, cause } => {
                        tracing::warn!(reason = %kind, cause, "{MESSAGE}");
                    }
                    NotReady::Unresponsive => tracing::warn!(%reason, "{MESSAGE}"),
                }
            }
            let since = since.unwrap_or(now);
            status.outage = Some((since, reason));
            true
        })
    }

    /// True if a probe must write: there is an outage, or the last write is too old.
    pub(super) fn is_write_due(&self) -> bool {
        let status = self.0.borrow();
        let is_recent = |at: Instant| at.elapsed() < WRITE_TTL;
        status.outage.is_some() || !status.written_at.is_some_and(is_recent)
    }
}

/// Checks whether the store accepts writes. Holds only weak references, so it does not keep the writer from ending.
#[derive(Clone)]
pub(crate) struct HealthCheck {
    pub(super) jobs: mpsc::WeakSender<Job>,
    pub(super) queue: Weak<Queue>,
    pub(super) health: Arc<Health>,
}

impl HealthCheck {
    pub(crate) fn queue_len(&self) -> usize {
        let jobs = self.jobs.upgrade();
        jobs.map_or(0, |jobs| jobs.max_capacity() - jobs.capacity())
    }

    /// The last result.
    pub(crate) fn result(&self) -> Result<(), NotReady> {
        if self.is_stuck() {
            return Err(NotReady::Unresponsive);
        }
        self.health.0.borrow().result()
    }

    /// The last result, or the next one if the last is too old: after the start, or if the process was suspended.
    pub(crate) async fn check(&self) -> Result<(), NotReady> {
        if !self.is_stuck() {
            let mut status = self.health.0.subscribe();
            let _ = timeout(CHECK_TIMEOUT, status.wait_for(Status::is_recent)).await;
        }
        self.result()
    }

    fn is_stuck(&self) -> bool {
        let queue = self.queue.upgrade();
        queue.is_some_and(|queue| queue.is_stuck(CHECK_TIMEOUT))
    }

    /// Probes the store until the writer ends. No result for longer than `attempt_timeout`, after which every attempt
    /// should have failed with a cause, is an outage too.
    pub(super) async fn run(self, attempt_timeout: Duration) {
        let mut ticks = interval(PROBE_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut status = self.health.0.subscribe();
        let mut silence = Duration::ZERO;
        // A queued probe holds a clone, so that there is one at a time.
        let probe = Arc::new(());
        loop {
            ticks.tick().await;
            let Some(jobs) = self.jobs.upgrade() else {
                return;
            };
            // Counted in ticks: while the process was suspended, it did not wait for the store.
            silence = match status.has_changed() {
                Ok(true) => Duration::ZERO,
                _ => silence + PROBE_INTERVAL,
            };
            if silence > attempt_timeout.max(RESULT_AGE_MAX) {
                self.health.failed(Instant::now(), NotReady::Unresponsive);
            }
            status.mark_unchanged();
            if Arc::strong_count(&probe) == 1 {
                // Unlike an add, it waits if the queue is full.
                let probe = Job::Probe(Arc::clone(&probe));
                let _ = timeout(PROBE_INTERVAL, jobs.send(probe)).await;
            }
        }
    }
}
