//! Group commit. Requests put plants into a bounded queue; writer threads, one per connection to the store, take what is
//! queued as a batch and commit it. While one batch is being committed the next one gathers, and a request gets its reply
//! only after the commit that contains its plant.

mod batch;
mod health;
mod queue;
mod reply;

use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::anyhow;
use jiff::Timestamp;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

use crate::metrics::{Adds, Counter, Metrics};
use crate::plant::{NewPlant, Plant};
use crate::store::{Addition, Failure, Store, StoreError, TokenId, TokenRecord};
use crate::writer::batch::{Batch, InFlight};
use crate::writer::queue::{Job, NewToken, Queue, WakeUp, commit_watchdog};
use crate::writer::reply::ReplyDispatcher;

pub(crate) use health::HealthCheck;

/// For the memory of a large plant: one of the permits of its token, and one of all.
pub(crate) type MemoryPermits = [OwnedSemaphorePermit; 2];

/// The handle through which requests write to the store. When the last clone is dropped, the threads commit what is queued
/// and end.
#[derive(Clone)]
pub struct Writer {
    jobs: mpsc::Sender<Job>,
    wake_up: Arc<WakeUp>,
    replies: ReplyDispatcher,
    health_check: HealthCheck,
    metrics: Arc<Metrics>,
}

/// The threads behind a `Writer`: each sends its result when it ends.
pub struct WriterThreads(mpsc::Receiver<anyhow::Result<()>>);

/// Why a plant was not added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AddError {
    /// The id belongs to a different plant.
    Conflict,
    /// `Busy` also if the queue is full.
    Store(Failure),
}

impl AddError {
    pub(crate) fn counter(self, adds: &Adds) -> &Counter {
        match self {
            Self::Conflict => &adds.conflict,
            Self::Store(Failure::Busy) => &adds.busy,
            Self::Store(Failure::Unavailable | Failure::Unusable) => &adds.unavailable,
            Self::Store(Failure::Full) => &adds.full,
            Self::Store(Failure::Unknown | Failure::Fatal) => &adds.unknown,
            Self::Store(Failure::Damaged) => &adds.damaged,
        }
    }
}

impl Writer {
    /// Starts one thread per store connection. The watchdog for stuck commits and the probes run on the current
    /// runtime.
    pub fn spawn(
        stores: Vec<Store>,
        queue_len_max: usize,
        reply_timeout: Duration,
        metrics: Arc<Metrics>,
    ) -> (Self, WriterThreads) {
        let bodies = stores.into_iter().map(|mut store| {
            move |queue: &Queue, in_flight: &InFlight| {
                let result = run(queue, in_flight, &mut store);
                if result.is_err() {
                    // Closing the store syncs again, which after a failed fsync may report success.
                    std::mem::forget(store);
                }
                result
            }
        });
        let bodies = bodies.collect();
        Self::spawn_with(queue_len_max, reply_timeout, metrics, bodies)
    }

    fn spawn_with<F>(
        queue_len_max: usize,
        reply_timeout: Duration,
        metrics: Arc<Metrics>,
        bodies: Vec<F>,
    ) -> (Self, WriterThreads)
    where
        F: FnOnce(&Queue, &InFlight) -> Result<(), StoreError> + Send + 'static,
    {
        let (jobs, queue) = Queue::new(queue_len_max, bodies.len(), Arc::clone(&metrics));
        let queue = Arc::new(queue);
        tokio::spawn(commit_watchdog(Arc::downgrade(&queue), reply_timeout));
        let health_check = HealthCheck {
            jobs: jobs.downgrade(),
            queue: Arc::downgrade(&queue),
            health: Arc::clone(&queue.health),
        };
        tokio::spawn(health_check.clone().run(reply_timeout));
        let (end, ended) = mpsc::channel(bodies.len());
        for (number, body) in bodies.into_iter().enumerate() {
            let (queue, end) = (Arc::clone(&queue), end.clone());
            let work = move || {
                let body = AssertUnwindSafe(|| body(&queue, &queue.in_flight[number]));
                let result = match panic::catch_unwind(body) {
                    Ok(result) => result.map_err(Into::into),
                    Err(_) => Err(anyhow!("a writer thread panicked")),
                };
                drop(queue); // requests that wait get their replies before the end is reported
                let _ = end.try_send(result);
            };
            thread::Builder::new()
                .name("writer".to_owned())
                .spawn(work)
                .expect("a process that has just started can start a thread");
        }
        let writer = Self {
            jobs,
            wake_up: Arc::clone(&queue.wake_up),
            replies: ReplyDispatcher::start(),
            health_check,
            metrics,
        };
        (writer, WriterThreads(ended))
    }

    /// The same writer, with replies that are dispatched on the current runtime.
    #[must_use]
    pub fn for_this_runtime(&self) -> Self {
        Self {
            replies: ReplyDispatcher::start(),
            ..self.clone()
        }
    }

    pub(crate) fn health_check(&self) -> HealthCheck {
        self.health_check.clone()
    }

    /// Adds a plant. `Ok` means that the plant is durable, added now or before. The permits for its memory are held until the plant is
    /// out of the queue, even if the client does not wait for it.
    pub(crate) async fn add(
        &self,
        plant: NewPlant,
        token: TokenId,
        permits: Option<Box<MemoryPermits>>,
    ) -> Result<Plant, AddError> {
        let (reply, received) = self.replies.reply(permits);
        let job = Job::Add(Addition { plant, token }, reply);
        let adds = &self.metrics.adds;
        // A closed queue drops the job, and with it the reply.
        if let Err(TrySendError::Full(_)) = self.jobs.try_send(job) {
            adds.queue_full.add(1);
            return Err(AddError::Store(Failure::Busy));
        }
        self.wake_up
            .queued(self.jobs.max_capacity() - self.jobs.capacity());
        received.await.unwrap_or_else(|_| {
            adds.unknown.add(1); // the thread has ended
            Err(AddError::Store(Failure::Unknown))
        })
    }

    /// Records the last use of a token with the next batch. Dropped if half of the queue is taken, for which plants come first.
    pub(crate) fn record_token_use(&self, token: TokenId, used_at: Timestamp) {
        if self.jobs.capacity() * 2 > self.jobs.max_capacity() {
            let _ = self.jobs.try_send(Job::TokenUse(token, used_at));
        }
    }

    /// Creates a token with the next batch, unless it exists.
    pub(crate) async fn create_token(&self, record: TokenRecord) -> Result<(), Failure> {
        let (reply, created) = oneshot::channel();
        let job = Job::CreateToken(Box::new(NewToken { record, reply }));
        if let Err(TrySendError::Full(_)) = self.jobs.try_send(job) {
            return Err(Failure::Busy);
        }
        created.await.unwrap_or(Err(Failure::Unavailable))
    }
}

impl WriterThreads {
    /// Waits until all threads have ended after the last `Writer` was dropped, or until one has failed.
    pub(crate) async fn ended(&mut self) -> anyhow::Result<()> {
        while let Some(result) = self.0.recv().await {
            result?;
        }
        Ok(())
    }
}

/// The loop of a writer thread. Ends when every `Writer` is dropped, or with an error if the store must not be used again.
fn run(queue: &Queue, in_flight: &InFlight, store: &mut Store) -> Result<(), StoreError> {
    let mut concurrent_clients = 0;
    while let Some(batch) = Batch::gather(queue, in_flight, concurrent_clients) {
        let len = batch.len();
        batch.commit(queue, in_flight, store)?;
        in_flight.end();
        concurrent_clients = len + queue.len();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plant() -> NewPlant {
        NewPlant::from_json(br#"{"id":1,"name":"Fern"}"#).expect("a plant")
    }

    fn spawn<F>(queue_len_max: usize, reply_timeout: Duration, body: F) -> (Writer, WriterThreads)
    where
        F: FnOnce(&Queue, &InFlight) -> Result<(), StoreError> + Send + 'static,
    {
        let metrics = Arc::new(Metrics::new([].into_iter()));
        Writer::spawn_with(queue_len_max, reply_timeout, metrics, vec![body])
    }

    const LONG: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn a_panic_of_the_thread_is_reported_and_the_outcome_of_its_batch_is_unknown() {
        let (writer, mut threads) = spawn(8, LONG, |queue, in_flight| {
            let _batch = Batch::gather(queue, in_flight, 0);
            panic!("deliberate");
        });
        let reply = writer.add(plant(), TokenId(1), None).await;
        assert_eq!(reply, Err(AddError::Store(Failure::Unknown)));
        assert!(threads.ended().await.is_err());
        let reply = writer.add(plant(), TokenId(1), None).await;
        assert_eq!(reply, Err(AddError::Store(Failure::Unknown)));
    }

    #[tokio::test]
    async fn a_full_queue_rejects_at_once() {
        let (release, held) = std::sync::mpsc::channel::<()>();
        let (writer, _threads) = spawn(1, LONG, move |_, _| {
            let _ = held.recv();
            Ok(())
        });
        writer.record_token_use(TokenId(1), Timestamp::now());
        let reply = writer.add(plant(), TokenId(1), None).await;
        assert_eq!(reply, Err(AddError::Store(Failure::Busy)));
        drop(release);
    }

    #[tokio::test]
    async fn the_outcome_of_a_stuck_commit_is_unknown_and_what_is_queued_behind_it_is_rejected() {
        let (_release, held) = std::sync::mpsc::channel::<()>();
        let (taken, is_taken) = oneshot::channel();
        let timeout = Duration::from_millis(80);
        let (writer, _threads) = spawn(8, timeout, move |queue, in_flight| {
            let _batch = Batch::gather(queue, in_flight, 0);
            let _ = taken.send(());
            let _ = held.recv();
            Ok(())
        });
        let stuck = writer.add(plant(), TokenId(1), None);
        let behind = async {
            is_taken
                .await
                .expect("the thread has taken the first plant");
            writer.add(plant(), TokenId(1), None).await
        };
        let replies = tokio::join!(stuck, behind);
        assert_eq!(
            replies,
            (
                Err(AddError::Store(Failure::Unknown)),
                Err(AddError::Store(Failure::Busy))
            )
        );
    }
}
