//! What the store has, and since when: kept where another can answer for a thread that is stuck.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Since when the store has a batch, and whoever waits for its commit.
pub struct InHand<R>(Mutex<Option<(Instant, Vec<R>)>>);

impl<R> Default for InHand<R> {
    fn default() -> Self {
        Self(Mutex::new(None))
    }
}

impl<R> InHand<R> {
    /// From now on.
    pub fn begin(&self, replies: Vec<R>) {
        *lock(&self.0) = Some((Instant::now(), replies));
    }

    /// Those who are still to be answered.
    pub fn take_replies(&self) -> Vec<R> {
        match &mut *lock(&self.0) {
            Some((_, replies)) => std::mem::take(replies),
            None => Vec::new(),
        }
    }

    /// The store is done with it.
    pub fn end(&self) {
        *lock(&self.0) = None;
    }

    /// Whether the store has had it for longer than that.
    pub fn is_stuck(&self, timeout: Duration) -> bool {
        lock(&self.0)
            .as_ref()
            .is_some_and(|(since, _)| since.elapsed() >= timeout)
    }
}

/// What a thread that panicked has left is good enough: it is answered, and the process ends.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
