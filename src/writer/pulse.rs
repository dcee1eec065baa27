//! How the writer is, for whoever watches it: a watcher keeps nothing alive, and asks the store for no more than it must.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::writer::batch::Job;
use crate::writer::desk::Desk;
use crate::writer::error::AddError;
use crate::writer::health::{Attempt, Health};

/// So long what the last attempt has shown is believed. A store that failed is tried again soon, so that a node comes
/// back by itself.
const SUCCESS_HOLDS: Duration = Duration::from_secs(5);
const FAILURE_HOLDS: Duration = Duration::from_secs(1);

/// So long an answer of the store is waited for: less than those wait who ask whether it has one.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// A look at the writer.
pub struct Pulse {
    queue: mpsc::WeakSender<Job>,
    desk: Weak<Desk>,
    health: Arc<Health>,
}

/// Why the store cannot take adds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Unwell {
    /// The last attempt has failed.
    #[error("{0}")]
    Failed(AddError),
    /// It has had a batch for too long, or did not take one.
    #[error("the store does not answer")]
    Silent,
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

    /// Whether the store takes adds, as far as is known without asking it.
    pub fn last_known(&self) -> Result<(), Unwell> {
        if self.is_stuck() {
            return Err(Unwell::Silent);
        }
        let last = *self.health.attempts().borrow();
        last.map_or(Ok(()), Attempt::verdict)
    }

    /// Whether the store takes adds. If nothing was added lately, it is given something to write that changes nothing.
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

    fn is_stuck(&self) -> bool {
        let desk = self.desk.upgrade();
        desk.is_some_and(|desk| desk.is_stuck(ANSWER_TIMEOUT))
    }
}

impl Attempt {
    fn holds(&self) -> bool {
        let time = match self.failure {
            None => SUCCESS_HOLDS,
            Some(_) => FAILURE_HOLDS,
        };
        self.at.elapsed() < time
    }

    fn verdict(self) -> Result<(), Unwell> {
        match self.failure {
            // One plant cannot be read; others can be added.
            None | Some(AddError::Damaged) => Ok(()),
            Some(failure) => Err(Unwell::Failed(failure)),
        }
    }
}
