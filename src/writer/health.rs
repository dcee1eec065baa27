//! Whether the store takes writes, as its last use has shown. An outage is logged once when it starts and once when it
//! ends. Of the attempts that are made only to find out, there is one at a time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::metrics::micros;
use crate::writer::error::AddError;
use crate::writer::in_hand::lock;

/// How long a write proves that the next one would succeed.
pub const WRITE_HOLDS: Duration = Duration::from_secs(5);

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

/// The result of the last attempt, and the outage that it belongs to.
pub struct Health {
    last: watch::Sender<Option<Attempt>>,
    /// When the current outage started.
    outage: Mutex<Option<Instant>>,
    probing: Arc<AtomicBool>,
}

/// An attempt to use the store.
#[derive(Debug, Clone, Copy)]
pub struct Attempt {
    /// When it ended.
    pub at: Instant,
    /// Why it failed, if it did.
    pub failure: Option<Unwell>,
    /// When the store last committed a write, in this attempt or before it.
    pub written_at: Option<Instant>,
}

/// The right to make an attempt that nobody but a watcher needs. Another may have it once this is dropped.
pub struct Probe(Arc<AtomicBool>);

impl Default for Health {
    fn default() -> Self {
        Self {
            last: watch::Sender::new(None),
            outage: Mutex::default(),
            probing: Arc::default(),
        }
    }
}

impl Health {
    /// Records an attempt that succeeded just now. Only a write ends an outage.
    pub fn succeeded(&self, has_written: bool) {
        let mut outage = lock(&self.outage);
        if outage.is_some() && !has_written {
            return;
        }
        let at = Instant::now();
        let written_at = if has_written {
            Some(at)
        } else {
            self.written_at()
        };
        self.last.send_replace(Some(Attempt {
            at,
            failure: None,
            written_at,
        }));
        if let Some(since) = outage.take() {
            let outage_us = micros(since.elapsed());
            tracing::warn!(outage_us, "the store is available again");
        }
    }

    /// Records an attempt that failed just now. False if that says nothing about the store as it is now, because a
    /// write has succeeded since the attempt began.
    pub fn failed(&self, begun: Instant, failure: Unwell, cause: Option<&str>) -> bool {
        let mut outage = lock(&self.outage);
        let written_at = self.written_at();
        if written_at.is_some_and(|written_at| written_at > begun) {
            return false;
        }
        let at = Instant::now();
        self.last.send_replace(Some(Attempt {
            at,
            failure: Some(failure),
            written_at,
        }));
        if outage.is_none() {
            *outage = Some(at);
            tracing::warn!(reason = %failure, cause, "the store is unavailable");
        }
        true
    }

    /// True if the next probe must write: what is known is too old, or not good.
    pub fn is_write_due(&self) -> bool {
        let recent = |written_at: Instant| written_at.elapsed() < WRITE_HOLDS;
        lock(&self.outage).is_some() || !self.written_at().is_some_and(recent)
    }

    fn written_at(&self) -> Option<Instant> {
        self.last.borrow().and_then(|last| last.written_at)
    }

    /// The last attempt, and those to come.
    pub fn attempts(&self) -> watch::Receiver<Option<Attempt>> {
        self.last.subscribe()
    }

    /// None if somebody has it already.
    pub fn probe(&self) -> Option<Probe> {
        let taken = self.probing.swap(true, Ordering::Relaxed);
        (!taken).then(|| Probe(Arc::clone(&self.probing)))
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}
