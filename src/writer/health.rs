//! Whether the store takes what it is given, as the last attempt has shown. Of the attempts that are made only to find
//! out, there is one at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use tokio::sync::watch;

use crate::writer::error::AddError;

/// What is known.
pub struct Health {
    last: watch::Sender<Option<Attempt>>,
    probing: Arc<AtomicBool>,
}

/// An attempt to store something.
#[derive(Debug, Clone, Copy)]
pub struct Attempt {
    /// When it ended.
    pub at: Instant,
    /// Why it failed, if it did.
    pub failure: Option<AddError>,
}

/// The right to make an attempt that nobody but a watcher needs. Another may have it once this is dropped.
pub struct Probe(Arc<AtomicBool>);

impl Default for Health {
    fn default() -> Self {
        Self {
            last: watch::Sender::new(None),
            probing: Arc::default(),
        }
    }
}

impl Health {
    /// Tells of an attempt that ended just now.
    pub fn tell(&self, failure: Option<AddError>) {
        let at = Instant::now();
        self.last.send_replace(Some(Attempt { at, failure }));
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
