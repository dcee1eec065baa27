//! The bounded queue in front of the writer threads, the wake-up of a thread that waits for a larger batch, and the watchdog
//! that replies for threads that are stuck in a commit.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};
use tokio::time::sleep;

use crate::metrics::Metrics;
use crate::store::{Addition, Failure, TokenId, TokenRecord};
use crate::writer::AddError;
use crate::writer::batch::InFlight;
use crate::writer::health::Health;
use crate::writer::reply::{Reply, reply_all};

/// How often the watchdog runs within `reply_timeout`. One watchdog for all requests: a timer per request would cost 5 % of the
/// throughput.
const CHECKS_PER_TIMEOUT: u32 = 8;

pub(super) enum Job {
    Add(Addition, Reply),
    TokenUse(TokenId, Timestamp),
    CreateToken(Box<NewToken>),
    /// A probe of the store (`health.rs`). The batch holds the value until its end, so that there is one probe at a time.
    Probe(Arc<()>),
}

pub(super) struct NewToken {
    pub(super) record: TokenRecord,
    pub(super) reply: oneshot::Sender<Result<(), Failure>>,
}

/// What the writer threads share: the receiving side of the queue, the batches in flight, health and metrics.
pub(super) struct Queue {
    /// Locked by the thread that gathers a batch.
    pub(super) jobs: Mutex<mpsc::Receiver<Job>>,
    pub(super) wake_up: Arc<WakeUp>,
    /// One per thread.
    pub(super) in_flight: Vec<InFlight>,
    pub(super) health: Arc<Health>,
    pub(super) metrics: Arc<Metrics>,
}

impl Queue {
    pub(super) fn new(
        len_max: usize,
        threads: usize,
        metrics: Arc<Metrics>,
    ) -> (mpsc::Sender<Job>, Self) {
        let (sender, jobs) = mpsc::channel(len_max);
        let queue = Self {
            jobs: Mutex::new(jobs),
            wake_up: Arc::default(),
            in_flight: (0..threads).map(|_| InFlight::default()).collect(),
            health: Arc::default(),
            metrics,
        };
        (sender, queue)
    }

    pub(super) fn len(&self) -> usize {
        self.jobs.lock().len()
    }

    /// True if every writer thread has been in a commit for at least `timeout`.
    pub(super) fn is_stuck(&self, timeout: Duration) -> bool {
        self.in_flight
            .iter()
            .all(|in_flight| in_flight.is_stuck(timeout))
    }
}

/// Lets a thread sleep until enough jobs are queued: the request that queues the last of them wakes it.
#[derive(Default)]
pub(super) struct WakeUp {
    /// The queue length to wake up at; 0 while no thread waits.
    len: AtomicUsize,
    thread: Mutex<Option<Thread>>,
}

impl WakeUp {
    pub(super) fn wait(&self, jobs: &mpsc::Receiver<Job>, len: usize, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        *self.thread.lock() = Some(thread::current());
        self.len.store(len, Ordering::SeqCst);
        while jobs.len() < len
            && let Some(remaining) = deadline.checked_duration_since(Instant::now())
        {
            thread::park_timeout(remaining);
        }
        self.len.store(0, Ordering::SeqCst);
    }

    /// To be called after a job was queued, with the length of the queue.
    pub(super) fn queued(&self, queue_len: usize) {
        let len = self.len.load(Ordering::SeqCst);
        if len != 0
            && queue_len >= len
            && self.len.swap(0, Ordering::SeqCst) != 0
            && let Some(thread) = &*self.thread.lock()
        {
            thread.unpark();
        }
    }
}

/// Replies for threads whose commit takes longer than `reply_timeout`: the outcome of the batch in flight is unknown. If
/// all threads are stuck, nothing takes the queued jobs to the store, and they are rejected.
pub(super) async fn commit_watchdog(queue: Weak<Queue>, reply_timeout: Duration) {
    loop {
        sleep(reply_timeout / CHECKS_PER_TIMEOUT).await;
        let Some(queue) = queue.upgrade() else {
            return;
        };
        let adds = &queue.metrics.adds;
        let stuck = queue.in_flight.iter();
        for in_flight in stuck.filter(|in_flight| in_flight.is_stuck(reply_timeout)) {
            let replies = in_flight.take_replies();
            if !replies.is_empty() {
                let plants = replies.len();
                tracing::warn!(plants, "a commit takes longer than the store timeout");
            }
            adds.unknown.add(replies.len() as u64);
            let replies = replies.into_iter();
            reply_all(replies.map(|reply| (reply, Err(AddError::Store(Failure::Unknown)))));
        }
        if queue.is_stuck(reply_timeout)
            && let Some(mut jobs) = queue.jobs.try_lock()
        {
            let queued = std::iter::from_fn(|| jobs.try_recv().ok());
            reply_all(queued.filter_map(|job| match job {
                Job::Add(_, reply) => {
                    adds.busy.add(1);
                    Some((reply, Err(AddError::Store(Failure::Busy))))
                }
                // A reply that is dropped is a failure.
                Job::TokenUse(..) | Job::CreateToken(..) | Job::Probe(_) => None,
            }));
        }
    }
}
