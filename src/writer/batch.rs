//! A batch: what has gathered in the queue, what the store makes of it, and who is told. Nobody is told before the
//! store has it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use tokio::sync::mpsc;

use crate::metrics::Metrics;
use crate::plant::Plant;
use crate::store::{Addition, Outcome, Store, StoreError, TokenId, chain};
use crate::writer::call::Call;
use crate::writer::error::AddError;
use crate::writer::health::{Health, Probe};
use crate::writer::in_hand;
use crate::writer::post::{self, send_all};

/// The most plants, and about the most bytes of them, in one transaction.
const LEN_MAX: usize = 1024;
const BYTES_MAX: usize = 8 << 20;

/// With this many clients at work, a batch is given a moment to gather half of them: fewer and larger commits
/// leave more of the processor for all, and while the store has one half, the other is read and answered.
const CROWD: usize = 16;
const GATHER: Duration = Duration::from_millis(1);

/// What is queued.
pub enum Job {
    /// A plant to add, and who waits for it.
    Add(Addition, Reply),
    /// A token was used.
    Touch(TokenId, Timestamp),
    /// Somebody wants to know whether the store takes anything.
    Probe(Probe),
}

/// What is told.
pub type Answer = Result<Plant, AddError>;
/// To whom.
pub type Reply = post::Reply<Answer>;
/// Who waits for the store.
pub type InHand = in_hand::InHand<Reply>;

/// Of the server, told after each batch.
#[derive(Clone)]
pub struct Reports {
    /// Whether the store takes what it is given.
    pub health: Arc<Health>,
    /// How much, and how fast.
    pub metrics: Arc<Metrics>,
}

/// What goes into one transaction.
#[derive(Default)]
pub struct Batch {
    additions: Vec<Addition>,
    /// Of the additions, in their order.
    pub replies: Vec<Reply>,
    touched: Vec<(TokenId, Timestamp)>,
    probe: Option<Probe>,
    bytes: usize,
}

impl Batch {
    /// Waits for a first job and takes what there is. In a crowd it waits for half of it, for a moment.
    pub fn gather(queue: &mut mpsc::Receiver<Job>, call: &Call, crowd: usize) -> Option<Self> {
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

    /// Takes one more job.
    pub fn push(&mut self, job: Job) {
        match job {
            Job::Add(addition, reply) => {
                let Plant { name, tag } = &addition.plant.plant;
                self.bytes += name.len() + tag.as_ref().map_or(0, String::len);
                self.additions.push(addition);
                self.replies.push(reply);
            }
            Job::Touch(token, used_at) => self.touched.push((token, used_at)),
            Job::Probe(probe) => self.probe = Some(probe),
        }
    }

    /// How many plants.
    pub fn len(&self) -> usize {
        self.additions.len()
    }

    fn is_full(&self) -> bool {
        self.len() >= LEN_MAX || self.bytes >= BYTES_MAX
    }

    /// Has the store take it, and tells everybody what came of it. An error means that the store must not be used
    /// again.
    pub fn commit(
        mut self,
        in_hand: &InHand,
        store: &mut Store,
        reports: &Reports,
    ) -> Result<(), StoreError> {
        in_hand.begin(std::mem::take(&mut self.replies));
        let begun = Instant::now();
        let added = self.store_in(store);
        self.report(&added, begun.elapsed(), reports);
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
                Ok(())
            }
            Err(error) => {
                let answer = meaning(&error);
                send_all(replies.into_iter().map(|reply| (reply, Err(answer))));
                proceed_unless_failed(error)
            }
        }
    }

    fn store_in(&self, store: &mut Store) -> Result<Vec<Outcome>, StoreError> {
        let outcomes = if self.additions.is_empty() && self.touched.is_empty() {
            Vec::new()
        } else {
            store.add(&self.additions, &self.touched)?
        };
        // Whoever adds plants needs no other proof.
        if self.probe.is_some() && self.additions.is_empty() {
            store.rewrite()?;
        }
        Ok(outcomes)
    }

    fn report(&self, added: &Result<Vec<Outcome>, StoreError>, took: Duration, to: &Reports) {
        let Reports { health, metrics } = to;
        if self.additions.is_empty() && self.probe.is_none() {
            return; // that a token was used is noted if it can be
        }
        health.tell(added.as_ref().err().map(meaning));
        let adds = &metrics.adds;
        let len = self.len() as u64;
        match added {
            Ok(outcomes) => {
                metrics.committed(len, took);
                for outcome in outcomes {
                    let figure = match outcome {
                        Outcome::Added => &adds.added,
                        Outcome::AlreadyThere => &adds.already_there,
                        Outcome::Taken => &adds.taken,
                        Outcome::Damaged => &adds.damaged,
                    };
                    figure.add(1);
                }
            }
            Err(StoreError::Busy(_)) => adds.busy.add(len),
            Err(StoreError::Full(_)) => adds.full.add(len),
            Err(StoreError::Unknown(_) | StoreError::Failed(_)) => adds.lost.add(len),
            Err(StoreError::Damaged(_)) => adds.damaged.add(len),
        }
    }
}

/// What an error of the store is to whoever waits.
fn meaning(error: &StoreError) -> AddError {
    match error {
        StoreError::Busy(_) => AddError::Busy,
        StoreError::Full(_) => AddError::Full,
        StoreError::Unknown(_) | StoreError::Failed(_) => AddError::Lost,
        StoreError::Damaged(_) => AddError::Damaged,
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
