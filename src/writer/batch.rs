//! A batch: what has gathered in the queue, what the store makes of it, and who is told. Nobody is told before the
//! store has it.

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use tokio::sync::mpsc;

use crate::metrics::{Adds, Metrics};
use crate::plant::Plant;
use crate::store::{Addition, Outcome, Store, StoreError, TokenId, chain};
use crate::writer::call::Call;
use crate::writer::error::AddError;
use crate::writer::health::{Health, Probe, Unwell};
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
        let is_write_due = self.additions.is_empty()
            && self.probe.is_some()
            && (reports.health.is_write_due() || store.is_disconnected());
        let added = self.store_in(store, is_write_due);
        // Empty if `desk::watch` has answered them, and counted them.
        let replies = in_hand.take_replies();
        let has_written = added.is_ok() && (self.len() > 0 || is_write_due);
        if has_written {
            let len = self.len() as u64;
            reports.metrics.committed(len, begun.elapsed());
        }
        count(&added, replies.len(), &reports.metrics.adds);
        self.report(&added, has_written, begun, &reports.health);
        match added {
            Ok(outcomes) => {
                let answers = self.additions.into_iter().zip(outcomes);
                let answers = answers.map(|(addition, outcome)| match outcome {
                    Outcome::Added | Outcome::Replayed => Ok(addition.plant.plant),
                    Outcome::Conflict => Err(AddError::Taken),
                    Outcome::Damaged => Err(AddError::Damaged),
                });
                send_all(replies.into_iter().zip(answers));
                Ok(())
            }
            Err(error) => {
                let answer = AddError::from(&error);
                send_all(replies.into_iter().map(|reply| (reply, Err(answer))));
                match error {
                    StoreError::Fatal(_) => Err(error),
                    _ => Ok(()), // it may work again later, or elsewhere in the store
                }
            }
        }
    }

    /// The probe comes first: if it fails, nothing of the batch was stored.
    fn store_in(&self, store: &mut Store, is_write_due: bool) -> Result<Vec<Outcome>, StoreError> {
        if self.probe.is_some() {
            store.probe(is_write_due)?;
        }
        if self.additions.is_empty() && self.touched.is_empty() {
            return Ok(Vec::new());
        }
        store.add(&self.additions, &self.touched)
    }

    /// Tells what this shows of the store. That a token was used shows nothing: it is not always a write.
    fn report(
        &self,
        added: &Result<Vec<Outcome>, StoreError>,
        has_written: bool,
        begun: Instant,
        health: &Health,
    ) {
        let error = match added {
            Ok(_) if has_written || self.probe.is_some() => return health.succeeded(has_written),
            // After a failure for good the process ends, and says why.
            Ok(_) | Err(StoreError::Fatal(_)) => return,
            Err(error) => error,
        };
        let cause = error.source().map(chain);
        let cause = cause.as_deref();
        let failure = Unwell::Failed(AddError::from(error));
        // One plant cannot be read; others can be added.
        let is_damaged = matches!(error, StoreError::Damaged(_));
        if is_damaged || !health.failed(begun, failure, cause) {
            tracing::warn!(%error, cause, "a batch was not acknowledged");
        }
    }
}

/// Counts the outcomes of those who are answered now.
fn count(added: &Result<Vec<Outcome>, StoreError>, replies: usize, adds: &Adds) {
    match added {
        Ok(outcomes) => {
            for outcome in outcomes.iter().take(replies) {
                let figure = match outcome {
                    Outcome::Added => &adds.added,
                    Outcome::Replayed => &adds.already_there,
                    Outcome::Conflict => &adds.taken,
                    Outcome::Damaged => &adds.damaged,
                };
                figure.add(1);
            }
        }
        Err(error) => AddError::from(error).counter(adds).add(replies as u64),
    }
}
