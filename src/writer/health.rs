//! Health of the store: the result of the last attempt to use it, and the readiness check. An outage is logged once when
//! it starts and once when it ends. The process probes the store about once a second; a readiness check reports the last
//! result and causes another probe only if that is too old.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::metrics::micros;
use crate::writer::AddError;
use crate::writer::queue::{Job, Queue, lock};

const PROBE_INTERVAL: Duration = Duration::from_secs(1);

/// How long a successful write shows that the next one would succeed.
const SUCCESS_TTL: Duration = Duration::from_secs(5);

/// How long a failure is reported before the store is probed again: a node becomes ready again by itself.
const FAILURE_TTL: Duration = Duration::from_secs(1);

/// The store is unresponsive if no attempt has ended for this long, although there is a probe every second.
const UNRESPONSIVE_AFTER: Duration = Duration::from_secs(4);

/// How long a readiness check waits for a probe: less than the timeout of common health checks.
const CHECK_TIMEOUT: Duration = Duration::from_secs(2);

/// Why the store does not accept writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unavailable {
    #[error("{0}")]
    Failed(AddError),
    #[error("the store does not answer")]
    Unresponsive,
}

pub(super) struct Health {
    last: watch::Sender<Option<Attempt>>,
    outage_since: Mutex<Option<Instant>>,
    is_probing: Arc<AtomicBool>,
}

/// An attempt to use the store.
#[derive(Debug, Clone, Copy)]
struct Attempt {
    ended_at: Instant,
    result: Result<(), Unavailable>,
    /// When the store last committed a write, in this attempt or before it.
    written_at: Option<Instant>,
}

/// A permit for the one probe that may be under way; released when it is dropped.
pub(super) struct Probe(Arc<AtomicBool>);

impl Default for Health {
    fn default() -> Self {
        Self {
            last: watch::Sender::new(None),
            outage_since: Mutex::default(),
            is_probing: Arc::default(),
        }
    }
}

impl Health {
    /// Records an attempt that has just succeeded. Only a write ends an outage.
    pub(super) fn succeeded(&self, has_written: bool) {
        let mut outage_since = lock(&self.outage_since);
        if outage_since.is_some() && !has_written {
            return;
        }
        let now = Instant::now();
        self.last.send_replace(Some(Attempt {
            ended_at: now,
            result: Ok(()),
            written_at: if has_written {
                Some(now)
            } else {
                self.written_at()
            },
        }));
        if let Some(since) = outage_since.take() {
            let outage_us = micros(since.elapsed());
            tracing::warn!(outage_us, "the store is available again");
        }
    }

    /// Records an attempt that has just failed. Returns false, and records nothing, if a write has succeeded since the
    /// attempt started.
    pub(super) fn failed(
        &self,
        started: Instant,
        reason: Unavailable,
        cause: Option<&str>,
    ) -> bool {
        let mut outage_since = lock(&self.outage_since);
        let written_at = self.written_at();
        if written_at.is_some_and(|written_at| written_at > started) {
            return false;
        }
        let now = Instant::now();
        self.last.send_replace(Some(Attempt {
            ended_at: now,
            result: Err(reason),
            written_at,
        }));
        if outage_since.is_none() {
            *outage_since = Some(now);
            tracing::warn!(%reason, cause, "the store is unavailable");
        }
        true
    }

    /// True if the next probe must write: there is an outage, or the last write is too old.
    pub(super) fn is_write_due(&self) -> bool {
        let is_recent = |written_at: Instant| written_at.elapsed() < SUCCESS_TTL;
        lock(&self.outage_since).is_some() || !self.written_at().is_some_and(is_recent)
    }

    fn written_at(&self) -> Option<Instant> {
        self.last.borrow().and_then(|last| last.written_at)
    }

    fn start_probe(&self) -> Option<Probe> {
        let is_probing = self.is_probing.swap(true, Ordering::Relaxed);
        (!is_probing).then(|| Probe(Arc::clone(&self.is_probing)))
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

impl Attempt {
    fn is_current(&self) -> bool {
        match (self.result, self.written_at) {
            (Ok(()), Some(written_at)) => written_at.elapsed() < SUCCESS_TTL,
            (Ok(()), None) => false,
            (Err(_), _) => self.ended_at.elapsed() < FAILURE_TTL,
        }
    }
}

/// Checks whether the store accepts writes. Holds only weak references, so it does not keep the writer from ending.
pub(crate) struct HealthCheck {
    jobs: mpsc::WeakSender<Job>,
    queue: Weak<Queue>,
    health: Arc<Health>,
}

impl HealthCheck {
    pub(super) fn new(
        jobs: mpsc::WeakSender<Job>,
        queue: Weak<Queue>,
        health: Arc<Health>,
    ) -> Self {
        Self {
            jobs,
            queue,
            health,
        }
    }

    pub(crate) fn queue_len(&self) -> usize {
        let jobs = self.jobs.upgrade();
        jobs.map_or(0, |jobs| jobs.max_capacity() - jobs.capacity())
    }

    /// The result of the last attempt, without a probe.
    pub(crate) fn last_result(&self) -> Result<(), Unavailable> {
        if self.is_stuck() {
            return Err(Unavailable::Unresponsive);
        }
        match *self.health.last.borrow() {
            Some(last) if last.ended_at.elapsed() < UNRESPONSIVE_AFTER => last.result,
            _ => Err(Unavailable::Unresponsive),
        }
    }

    /// The result of the last attempt, or of a new probe if that is too old.
    pub(crate) async fn check(&self) -> Result<(), Unavailable> {
        if self.is_stuck() {
            return Err(Unavailable::Unresponsive);
        }
        let mut attempts = self.health.last.subscribe();
        let last = *attempts.borrow_and_update();
        if let Some(last) = last.filter(Attempt::is_current) {
            return last.result;
        }
        if let (Some(probe), Some(jobs)) = (self.health.start_probe(), self.jobs.upgrade()) {
            // If the queue is full, the batches in it are attempts too.
            let _ = jobs.try_send(Job::Probe(probe));
        }
        match timeout(CHECK_TIMEOUT, attempts.changed()).await {
            Ok(Ok(())) => attempts.borrow().map_or(Ok(()), |last| last.result),
            _ => Err(Unavailable::Unresponsive),
        }
    }

    /// Probes the store regularly until the writer ends. No result for longer than `attempt_timeout`, after which every
    /// attempt should have failed with a cause, is an outage too.
    pub(super) async fn run(self, attempt_timeout: Duration) {
        let mut ticks = interval(PROBE_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut attempts = self.health.last.subscribe();
        let mut silence = Duration::ZERO;
        loop {
            ticks.tick().await;
            let Some(jobs) = self.jobs.upgrade() else {
                return;
            };
            // Counted in ticks: while the process was stopped, it did not wait for the store.
            silence = match attempts.has_changed() {
                Ok(true) => Duration::ZERO,
                _ => silence + PROBE_INTERVAL,
            };
            attempts.mark_unchanged();
            if silence > attempt_timeout.max(UNRESPONSIVE_AFTER) {
                self.health
                    .failed(Instant::now(), Unavailable::Unresponsive, None);
                attempts.mark_unchanged();
            }
            if let Some(probe) = self.health.start_probe() {
                // Unlike an add, it waits if the queue is full.
                let _ = timeout(PROBE_INTERVAL, jobs.send(Job::Probe(probe))).await;
            }
        }
    }

    fn is_stuck(&self) -> bool {
        let queue = self.queue.upgrade();
        queue.is_some_and(|queue| queue.is_stuck(CHECK_TIMEOUT))
    }
}
