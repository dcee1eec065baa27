//! Readiness of the writer. The process probes its store about once a second by itself; whoever asks gets the result of
//! the last attempt, and causes another only if that is too old.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::writer::batch::Job;
use crate::writer::desk::Desk;
use crate::writer::health::{Attempt, Health, Unwell, WRITE_HOLDS};

/// How often the store is probed.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);

/// The store does not respond if no attempt has ended for so long, though there is one every second.
const SILENCE_MAX: Duration = Duration::from_secs(4);

/// How long a failure is believed: a node becomes ready again by itself.
const FAILURE_HOLDS: Duration = Duration::from_secs(1);

/// How long a response of the store is waited for: less than the timeout of a health check.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// A look at the writer that does not keep it from ending.
pub struct Pulse {
    queue: mpsc::WeakSender<Job>,
    desk: Weak<Desk>,
    health: Arc<Health>,
}

impl Pulse {
    /// Of the writer with this queue.
    pub fn new(queue: mpsc::WeakSender<Job>, desk: Weak<Desk>, health: Arc<Health>) -> Self {
        Self {
            queue,
            desk,
            health,
        }
    }

    /// How much waits for the store.
    pub fn queue_len(&self) -> usize {
        let queue = self.queue.upgrade();
        queue.map_or(0, |queue| queue.max_capacity() - queue.capacity())
    }

    /// Whether the store takes adds, as the last attempt has shown.
    pub fn last_known(&self) -> Result<(), Unwell> {
        if self.is_stuck() {
            return Err(Unwell::Silent);
        }
        let last = *self.health.attempts().borrow();
        match last {
            Some(last) if last.at.elapsed() < SILENCE_MAX => last.verdict(),
            _ => Err(Unwell::Silent),
        }
    }

    /// Whether the store takes adds. It is probed at once if the last attempt is too old.
    pub async fn check(&self) -> Result<(), Unwell> {
        if self.is_stuck() {
            return Err(Unwell::Silent);
        }
        let mut attempts = self.health.attempts();
        let last = *attempts.borrow_and_update();
        if let Some(last) = last.filter(Attempt::holds) {
            return last.verdict();
        }
        if let (Some(probe), Some(queue)) = (self.health.probe(), self.queue.upgrade()) {
            // A full queue is as good: what is in it will tell.
            let _ = queue.try_send(Job::Probe(probe));
        }
        match timeout(ANSWER_TIMEOUT, attempts.changed()).await {
            Ok(Ok(())) => attempts.borrow().map_or(Ok(()), Attempt::verdict),
            _ => Err(Unwell::Silent),
        }
    }

    /// Probes the store regularly, for as long as the writer runs. A store that has not responded for longer than
    /// `timeout_max`, after which every attempt should have failed with a cause, is an outage too.
    pub async fn probe_regularly(self, timeout_max: Duration) {
        let mut ticks = interval(PROBE_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut attempts = self.health.attempts();
        let mut silence = Duration::ZERO;
        loop {
            ticks.tick().await;
            let Some(queue) = self.queue.upgrade() else {
                return;
            };
            // Counted in ticks: a process that was stopped for a while has not waited for its store.
            silence = match attempts.has_changed() {
                Ok(true) => Duration::ZERO,
                _ => silence + PROBE_INTERVAL,
            };
            attempts.mark_unchanged();
            if silence > timeout_max.max(SILENCE_MAX) {
                self.health.failed(Instant::now(), Unwell::Silent, None);
                attempts.mark_unchanged();
            }
            if let Some(probe) = self.health.probe() {
                // Waits for its turn if the queue is full, unlike an add.
                let _ = timeout(PROBE_INTERVAL, queue.send(Job::Probe(probe))).await;
            }
        }
    }

    fn is_stuck(&self) -> bool {
        let desk = self.desk.upgrade();
        desk.is_some_and(|desk| desk.is_stuck(ANSWER_TIMEOUT))
    }
}

impl Attempt {
    fn holds(&self) -> bool {
        match (self.failure, self.written_at) {
            (None, Some(written_at)) => written_at.elapsed() < WRITE_HOLDS,
            (None, None) => false,
            (Some(_), _) => self.at.elapsed() < FAILURE_HOLDS,
        }
    }

    fn verdict(self) -> Result<(), Unwell> {
        self.failure.map_or(Ok(()), Err)
    }
}
