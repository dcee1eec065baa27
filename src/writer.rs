//! Group commit: a bounded queue feeds the threads that own the store, one for each connection to it. While one
//! batch is being committed the next gathers, and a reply is sent only after the commit that holds its plant.

mod call;
mod in_hand;
mod post;

use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::mpsc;
use tokio::time::sleep;

use crate::plant::{NewPlant, Plant};
use crate::store::{Addition, Outcome, Store, StoreError, TokenId, chain};
use crate::writer::call::Call;
use crate::writer::in_hand::lock;
use crate::writer::post::{Post, send_all};

/// The most plants, and about the most bytes of them, in one transaction.
const BATCH_LEN_MAX: usize = 1024;
const BATCH_BYTES_MAX: usize = 8 << 20;

/// With this many clients at work, a batch is given a moment to gather half of them: fewer and larger commits
/// leave more of the processor for all, and while the store has one half, the other is read and answered.
const CROWD: usize = 16;
const GATHER: Duration = Duration::from_millis(1);

/// How often the clock of a batch is looked at, within the time that a reply may take. One clock for all who wait:
/// a timer for each add would cost a twentieth of the throughput.
const LOOKS_A_TIMEOUT: u32 = 8;

/// The way to the store for everything that is written while serving. When the last clone is
/// dropped, the threads commit what is queued and end.
#[derive(Clone)]
pub struct Writer {
    queue: mpsc::Sender<Job>,
    call: Arc<Call>,
    post: Post<Answer>,
}

/// Why a plant was not added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AddError {
    /// The id belongs to a different plant.
    #[error("the id belongs to a different plant")]
    Taken,
    /// Nothing was stored: too many are waiting already, or the store cannot take it now.
    #[error("the store is busy")]
    Busy,
    /// Nothing was stored: no room.
    #[error("the store is full")]
    Full,
    /// Nobody knows whether it was stored.
    #[error("the answer of the store was lost")]
    Lost,
    /// The plant that has the id is no longer what was stored.
    #[error("the stored plant is damaged")]
    Damaged,
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
    ) -> (Self, WriterThreads) {
        let bodies = stores.into_iter().map(|mut store| {
            move |desk: &Desk, in_hand: &InHand| {
                let result = run(desk, in_hand, &mut store);
                if result.is_err() {
                    // Closing would sync again, and after a failed fsync that may claim success.
                    std::mem::forget(store);
                }
                result
            }
        });
        Self::spawn_with(queue_len_max, reply_timeout, bodies.collect())
    }

    fn spawn_with<F>(
        queue_len_max: usize,
        reply_timeout: Duration,
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
        tokio::spawn(watch(Arc::downgrade(&desk), reply_timeout));
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
        (Self { queue, call, post }, WriterThreads { running, ended })
    }

    /// The same writer for the current runtime: what it answers is delivered there.
    #[must_use]
    pub fn for_this_runtime(&self) -> Self {
        Self {
            queue: self.queue.clone(),
            call: Arc::clone(&self.call),
            post: Post::start(),
        }
    }

    /// Adds a plant. `Ok` means that it is on disk, now or since before.
    pub async fn add(&self, plant: NewPlant, token: TokenId) -> Result<Plant, AddError> {
        let (reply, replied) = self.post.reply();
        let job = Job::Add(Addition { plant, token }, reply);
        self.queue.try_send(job).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => AddError::Busy,
            mpsc::error::TrySendError::Closed(_) => AddError::Lost,
        })?;
        self.call
            .queued(self.queue.max_capacity() - self.queue.capacity());
        // Without a reply the thread is gone.
        replied.await.unwrap_or(Err(AddError::Lost))
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

enum Job {
    Add(Addition, Reply),
    Touch(TokenId, Timestamp),
}

type Answer = Result<Plant, AddError>;
type Reply = post::Reply<Answer>;
type InHand = in_hand::InHand<Reply>;

/// What lies before the threads, and can be answered by another if they are stuck.
struct Desk {
    /// Held by the thread that gathers.
    queue: Mutex<mpsc::Receiver<Job>>,
    /// Of each thread.
    in_hand: Vec<InHand>,
    call: Arc<Call>,
}

/// Answers for threads that do not come back from the store in time.
async fn watch(desk: Weak<Desk>, reply_timeout: Duration) {
    loop {
        sleep(reply_timeout / LOOKS_A_TIMEOUT).await;
        let Some(desk) = desk.upgrade() else {
            return;
        };
        let is_stuck = |in_hand: &&InHand| in_hand.is_stuck(reply_timeout);
        for in_hand in desk.in_hand.iter().filter(is_stuck) {
            let replies = in_hand.take_replies().into_iter();
            send_all(replies.map(|reply| (reply, Err(AddError::Lost))));
        }
        if desk.in_hand.iter().all(|in_hand| is_stuck(&in_hand))
            && let Ok(mut queue) = desk.queue.try_lock()
        {
            // These have never reached the store, and there is nobody to take them there.
            let behind = std::iter::from_fn(|| queue.try_recv().ok());
            send_all(behind.filter_map(|job| match job {
                Job::Add(_, reply) => Some((reply, Err(AddError::Busy))),
                Job::Touch(..) => None,
            }));
        }
    }
}

#[derive(Default)]
struct Batch {
    additions: Vec<Addition>,
    replies: Vec<Reply>,
    touched: Vec<(TokenId, Timestamp)>,
    bytes: usize,
}

/// Ends when there is nobody left to send anything, or when the store must not be used any more.
fn run(desk: &Desk, in_hand: &InHand, store: &mut Store) -> Result<(), StoreError> {
    let mut crowd = 0;
    loop {
        let gathered = Batch::gather(&mut lock(&desk.queue), &desk.call, crowd);
        let Some(batch) = gathered else {
            return Ok(());
        };
        let answered = batch.additions.len();
        batch.commit(in_hand, store)?;
        in_hand.end();
        crowd = answered + lock(&desk.queue).len();
    }
}

impl Batch {
    /// Waits for a first job and takes what there is. In a crowd it waits for half of it, for a moment.
    fn gather(queue: &mut mpsc::Receiver<Job>, call: &Call, crowd: usize) -> Option<Self> {
        let mut batch = Self::default();
        batch.push(queue.blocking_recv()?);
        if crowd >= CROWD {
            call.wait(|| queue.len(), crowd / 2 - 1, GATHER);
        }
        while !batch.is_full()
            && let Ok(job) = queue.try_recv()
        {
            batch.push(job);
        }
        Some(batch)
    }

    fn push(&mut self, job: Job) {
        match job {
            Job::Add(addition, reply) => {
                let Plant { name, tag } = &addition.plant.plant;
                self.bytes += name.len() + tag.as_ref().map_or(0, String::len);
                self.additions.push(addition);
                self.replies.push(reply);
            }
            Job::Touch(token, used_at) => self.touched.push((token, used_at)),
        }
    }

    fn is_full(&self) -> bool {
        self.additions.len() >= BATCH_LEN_MAX || self.bytes >= BATCH_BYTES_MAX
    }

    fn commit(self, in_hand: &InHand, store: &mut Store) -> Result<(), StoreError> {
        in_hand.begin(self.replies);
        let added = store.add(&self.additions, &self.touched);
        // Empty if they were answered already.
        let replies = in_hand.take_replies();
        match added {
            Ok(outcomes) => {
                let answers = self.additions.into_iter().zip(outcomes);
                let answers = answers.map(|(addition, outcome)| match outcome {
                    Outcome::Added | Outcome::AlreadyThere => Ok(addition.plant.plant),
                    Outcome::Taken => Err(AddError::Taken),
                    Outcome::Damaged => Err(AddError::Damaged),
                });
                send_all(replies.into_iter().zip(answers));
            }
            Err(error) => {
                let answer = match error {
                    StoreError::Busy(_) => AddError::Busy,
                    StoreError::Full(_) => AddError::Full,
                    StoreError::Unknown(_) | StoreError::Failed(_) => AddError::Lost,
                    StoreError::Damaged(_) => AddError::Damaged,
                };
                send_all(replies.into_iter().map(|reply| (reply, Err(answer))));
                proceed_unless_failed(error)?;
            }
        }
        Ok(())
    }
}

/// A store that is busy or full may work again later, one that is damaged in a place elsewhere; one that failed must not be used again.
fn proceed_unless_failed(error: StoreError) -> Result<(), StoreError> {
    match error {
        StoreError::Busy(ref cause)
        | StoreError::Full(ref cause)
        | StoreError::Damaged(ref cause)
        | StoreError::Unknown(ref cause) => {
            tracing::warn!(%error, cause = %chain(&**cause), "a batch was not acknowledged");
            Ok(())
        }
        StoreError::Failed(_) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plant() -> NewPlant {
        NewPlant::from_json(br#"{"id":1,"name":"Fern"}"#).expect("a plant")
    }

    #[tokio::test]
    async fn a_panic_of_the_thread_is_noticed_and_answers_nobody_with_success() {
        let (writer, mut thread) = Writer::spawn_with(
            8,
            Duration::from_secs(60),
            vec![|desk: &Desk, _: &InHand| {
                let _ = lock(&desk.queue).blocking_recv();
                panic!("deliberate");
            }],
        );
        let answer = writer.add(plant(), TokenId(1)).await;
        assert_eq!(answer, Err(AddError::Lost));
        assert!(thread.ended().await.is_err());
        let answer = writer.add(plant(), TokenId(1)).await;
        assert_eq!(answer, Err(AddError::Lost));
    }

    #[tokio::test]
    async fn a_full_queue_refuses_at_once() {
        let (release, held) = std::sync::mpsc::channel::<()>();
        let (writer, _thread) = Writer::spawn_with(
            1,
            Duration::from_secs(60),
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
        assert_eq!(answers, (Err(AddError::Lost), Err(AddError::Busy)));
    }
}
