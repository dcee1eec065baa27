//! Group commit: a bounded queue feeds the threads that own the store, one for each connection to it. While one
//! batch is being committed the next gathers, and a reply is sent only after the commit that holds its plant.

mod batch;
mod call;
mod desk;
mod error;
mod health;
mod in_hand;
mod post;
mod pulse;

use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::mpsc;

use crate::metrics::Metrics;
use crate::plant::{NewPlant, Plant};
use crate::store::{Addition, Store, StoreError, TokenId};
use crate::writer::batch::{Answer, Batch, InHand, Job, Reports};
use crate::writer::call::Call;
use crate::writer::desk::{Desk, watch};
use crate::writer::health::Health;
use crate::writer::in_hand::lock;
use crate::writer::post::Post;

pub use error::AddError;
pub use health::Unwell;
pub use pulse::Pulse;

/// The way to the store for everything that is written while serving. When the last clone is
/// dropped, the threads commit what is queued and end.
#[derive(Clone)]
pub struct Writer {
    queue: mpsc::Sender<Job>,
    call: Arc<Call>,
    post: Post<Answer>,
    desk: Weak<Desk>,
    reports: Reports,
}

/// The threads behind a `Writer`.
pub struct WriterThreads {
    running: usize,
    ended: mpsc::Receiver<thread::Result<Result<(), StoreError>>>,
}

impl Writer {
    /// Starts a thread for each connection to the store, and the watch over them on the current runtime.
    pub fn spawn(
        stores: Vec<Store>,
        queue_len_max: usize,
        reply_timeout: Duration,
        metrics: Arc<Metrics>,
    ) -> (Self, WriterThreads) {
        let health = Arc::new(Health::default());
        let reports = Reports { health, metrics };
        let bodies = stores.into_iter().map(|mut store| {
            let reports = reports.clone();
            move |desk: &Desk, in_hand: &InHand| {
                let result = run(desk, in_hand, &mut store, &reports);
                if result.is_err() {
                    // Closing would sync again, and after a failed fsync that may claim success.
                    std::mem::forget(store);
                }
                result
            }
        });
        let bodies = bodies.collect();
        Self::spawn_with(queue_len_max, reply_timeout, reports, bodies)
    }

    fn spawn_with<F>(
        queue_len_max: usize,
        reply_timeout: Duration,
        reports: Reports,
        bodies: Vec<F>,
    ) -> (Self, WriterThreads)
    where
        F: FnOnce(&Desk, &InHand) -> Result<(), StoreError> + Send + 'static,
    {
        let (queue, jobs) = mpsc::channel(queue_len_max);
        let running = bodies.len();
        let (end, ended) = mpsc::channel(running);
        let call = Arc::new(Call::default());
        let desk = Arc::new(Desk {
            queue: Mutex::new(jobs),
            in_hand: bodies.iter().map(|_| InHand::default()).collect(),
            call: Arc::clone(&call),
        });
        let metrics = Arc::clone(&reports.metrics);
        tokio::spawn(watch(Arc::downgrade(&desk), reply_timeout, metrics));
        let post = Post::start();
        for (number, body) in bodies.into_iter().enumerate() {
            let (desk, end) = (Arc::clone(&desk), end.clone());
            let work = move || {
                let body = AssertUnwindSafe(|| body(&desk, &desk.in_hand[number]));
                let result = panic::catch_unwind(body);
                drop(desk); // whoever waits is told before the end is
                let _ = end.try_send(result);
            };
            thread::Builder::new()
                .name("writer".to_owned())
                .spawn(work)
                .expect("a process that has just started can start a thread");
        }
        let writer = Self {
            queue,
            call,
            post,
            desk: Arc::downgrade(&desk),
            reports,
        };
        tokio::spawn(writer.pulse().probe_regularly(reply_timeout));
        (writer, WriterThreads { running, ended })
    }

    /// The same writer for the current runtime: what it answers is delivered there.
    #[must_use]
    pub fn for_this_runtime(&self) -> Self {
        Self {
            post: Post::start(),
            ..self.clone()
        }
    }

    /// A look at how it is, which does not keep it from ending.
    pub fn pulse(&self) -> Pulse {
        let health = Arc::clone(&self.reports.health);
        Pulse::new(self.queue.downgrade(), self.desk.clone(), health)
    }

    /// Adds a plant. `Ok` means that it is on disk, now or since before.
    pub async fn add(&self, plant: NewPlant, token: TokenId) -> Result<Plant, AddError> {
        let (reply, replied) = self.post.reply();
        let job = Job::Add(Addition { plant, token }, reply);
        let adds = &self.reports.metrics.adds;
        self.queue.try_send(job).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => {
                adds.queue_full.add(1);
                AddError::Busy
            }
            mpsc::error::TrySendError::Closed(_) => {
                adds.unknown.add(1);
                AddError::Unknown
            }
        })?;
        self.call
            .queued(self.queue.max_capacity() - self.queue.capacity());
        replied.await.unwrap_or_else(|_| {
            adds.unknown.add(1); // the thread is gone
            Err(AddError::Unknown)
        })
    }

    /// Notes that a token was used, some time soon; a full queue forgets it.
    pub fn touch_token(&self, token: TokenId, used_at: Timestamp) {
        let _ = self.queue.try_send(Job::Touch(token, used_at));
    }
}

impl WriterThreads {
    /// Waits for the threads to end: well, when every `Writer` is gone; or else, for the first of them, with the
    /// reason.
    pub async fn ended(&mut self) -> anyhow::Result<()> {
        while self.running > 0 {
            match self.ended.recv().await {
                Some(Ok(result)) => result?,
                _ => anyhow::bail!("a writer thread panicked"),
            }
            self.running -= 1;
        }
        Ok(())
    }
}

/// Ends when there is nobody left to send anything, or when the store must not be used any more.
fn run(
    desk: &Desk,
    in_hand: &InHand,
    store: &mut Store,
    reports: &Reports,
) -> Result<(), StoreError> {
    let mut crowd = 0;
    loop {
        let gathered = Batch::gather(&mut lock(&desk.queue), &desk.call, crowd);
        let Some(batch) = gathered else {
            return Ok(());
        };
        let answered = batch.len();
        batch.commit(in_hand, store, reports)?;
        in_hand.end();
        crowd = answered + lock(&desk.queue).len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plant() -> NewPlant {
        NewPlant::from_json(br#"{"id":1,"name":"Fern"}"#).expect("a plant")
    }

    fn reports() -> Reports {
        Reports {
            health: Arc::default(),
            metrics: Arc::new(Metrics::new([].into_iter())),
        }
    }

    #[tokio::test]
    async fn a_panic_of_the_thread_is_noticed_and_answers_nobody_with_success() {
        let (writer, mut thread) = Writer::spawn_with(
            8,
            Duration::from_secs(60),
            reports(),
            vec![|desk: &Desk, _: &InHand| {
                let _ = lock(&desk.queue).blocking_recv();
                panic!("deliberate");
            }],
        );
        let answer = writer.add(plant(), TokenId(1)).await;
        assert_eq!(answer, Err(AddError::Unknown));
        assert!(thread.ended().await.is_err());
        let answer = writer.add(plant(), TokenId(1)).await;
        assert_eq!(answer, Err(AddError::Unknown));
    }

    #[tokio::test]
    async fn a_full_queue_refuses_at_once() {
        let (release, held) = std::sync::mpsc::channel::<()>();
        let (writer, _thread) = Writer::spawn_with(
            1,
            Duration::from_secs(60),
            reports(),
            vec![move |_: &Desk, _: &InHand| {
                let _ = held.recv();
                Ok(())
            }],
        );
        writer.touch_token(TokenId(1), Timestamp::now());
        let answer = writer.add(plant(), TokenId(1)).await;
        assert_eq!(answer, Err(AddError::Busy));
        drop(release);
    }

    #[tokio::test]
    async fn a_stuck_store_is_an_answer_that_was_lost_and_who_is_behind_it_was_not_stored() {
        let (_release, held) = std::sync::mpsc::channel::<()>();
        let (writer, _thread) = Writer::spawn_with(
            8,
            Duration::from_millis(80),
            reports(),
            vec![move |desk: &Desk, in_hand: &InHand| {
                let mut batch = Batch::default();
                batch.push(lock(&desk.queue).blocking_recv().expect("a job"));
                in_hand.begin(batch.replies);
                let _ = held.recv();
                Ok(())
            }],
        );
        let stuck = writer.add(plant(), TokenId(1));
        let behind = writer.add(plant(), TokenId(1));
        let answers = tokio::join!(stuck, behind);
        assert_eq!(answers, (Err(AddError::Unknown), Err(AddError::Busy)));
    }
}
