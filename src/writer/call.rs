//! Waiting for a crowd.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use crate::writer::in_hand::lock;

/// How a thread waits for others to queue without looking again and again: the last of them calls it.
#[derive(Default)]
pub struct Call {
    /// How many are to be queued; 0 while no thread waits.
    wanted: AtomicUsize,
    thread: Mutex<Option<Thread>>,
}

impl Call {
    /// Waits until so many are queued, for this long at most.
    pub fn wait(&self, queued: impl Fn() -> usize, wanted: usize, at_most: Duration) {
        let end = Instant::now() + at_most;
        *lock(&self.thread) = Some(thread::current());
        self.wanted.store(wanted, Ordering::SeqCst);
        while queued() < wanted
            && let Some(rest) = end.checked_duration_since(Instant::now())
        {
            thread::park_timeout(rest);
        }
        self.wanted.store(0, Ordering::SeqCst);
    }

    /// To be told whenever something was queued.
    pub fn queued(&self, len: usize) {
        let wanted = self.wanted.load(Ordering::SeqCst);
        if wanted != 0
            && len >= wanted
            && self.wanted.swap(0, Ordering::SeqCst) != 0
            && let Some(thread) = &*lock(&self.thread)
        {
            thread.unpark();
        }
    }
}
