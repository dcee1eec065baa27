//! What lies before the threads, where another can answer for them if they do not come back from the store in time.

use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::sleep;

use crate::metrics::Metrics;
use crate::writer::batch::{InHand, Job};
use crate::writer::call::Call;
use crate::writer::error::AddError;
use crate::writer::post::send_all;

/// How often the clock of a batch is looked at, within the time that a reply may take. One clock for all who wait:
/// a timer for each add would cost a twentieth of the throughput.
const LOOKS_A_TIMEOUT: u32 = 8;

/// The queue, and what the store has.
pub struct Desk {
    /// Held by the thread that gathers.
    pub queue: Mutex<mpsc::Receiver<Job>>,
    /// Of each thread.
    pub in_hand: Vec<InHand>,
    /// How the thread that gathers is called.
    pub call: Arc<Call>,
}

impl Desk {
    /// Whether there is no thread that the store has not kept waiting for so long.
    pub fn is_stuck(&self, timeout: Duration) -> bool {
        self.in_hand.iter().all(|in_hand| in_hand.is_stuck(timeout))
    }
}

/// Answers for threads that do not come back from the store in time.
pub async fn watch(desk: Weak<Desk>, reply_timeout: Duration, metrics: Arc<Metrics>) {
    loop {
        sleep(reply_timeout / LOOKS_A_TIMEOUT).await;
        let Some(desk) = desk.upgrade() else {
            return;
        };
        let stuck = desk.in_hand.iter();
        for in_hand in stuck.filter(|in_hand| in_hand.is_stuck(reply_timeout)) {
            let replies = in_hand.take_replies();
            metrics.adds.unknown.add(replies.len() as u64);
            send_all(
                replies
                    .into_iter()
                    .map(|reply| (reply, Err(AddError::Unknown))),
            );
        }
        if desk.is_stuck(reply_timeout)
            && let Ok(mut queue) = desk.queue.try_lock()
        {
            // These have never reached the store, and there is nobody to take them there.
            let behind = std::iter::from_fn(|| queue.try_recv().ok());
            send_all(behind.filter_map(|job| match job {
                Job::Add(_, reply) => {
                    metrics.adds.busy.add(1);
                    Some((reply, Err(AddError::Busy)))
                }
                Job::Touch(..) | Job::Probe(_) => None,
            }));
        }
    }
}
