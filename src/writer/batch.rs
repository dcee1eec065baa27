//! A batch: the jobs of one transaction. The replies wait in `InFlight`, where the watchdog finds them if the commit is
//! stuck, and are sent only after the commit.

use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use parking_lot::Mutex;

use crate::plant::Plant;
use crate::store::{Addition, Failure, Outcome, Store, StoreError, TokenId, chain};
use crate::user::current_user;
use crate::writer::AddError;
use crate::writer::health::{Health, NotReady};
use crate::writer::queue::{Job, NewToken, Queue};
use crate::writer::reply::{Reply, reply_all};

/// The most plants, and approximately the most bytes of them, in one transaction.
const LEN_MAX: usize = 1024;
const BYTES_MAX: usize = 8 << 20;

/// The most new tokens before it: each has a commit of its own, for which the plants wait.
const NEW_TOKENS_MAX: usize = 16;

/// From this many concurrent clients on, a batch waits up to `GATHER_TIMEOUT` for half of them: fewer and larger commits
/// use less CPU time, and while one half is being committed, the requests of the other half are read.
const GATHER_CLIENTS_MIN: usize = 16;
const GATHER_TIMEOUT: Duration = Duration::from_millis(1);

/// The batch that a writer thread is committing: since when, and the replies that wait for it.
#[derive(Default)]
pub(super) struct InFlight(Mutex<Option<(Instant, Vec<Reply>)>>);

impl InFlight {
    /// The replies that were not sent yet.
    pub(super) fn take_replies(&self) -> Vec<Reply> {
        match &mut *self.0.lock() {
            Some((_, replies)) => std::mem::take(replies),
            None => Vec::new(),
        }
    }

    pub(super) fn end(&self) {
        *self.0.lock() = None;
    }

    pub(super) fn is_stuck(&self, timeout: Duration) -> bool {
        self.0
            .lock()
            .as_ref()
            .is_some_and(|(since, _)| since.elapsed() >= timeout)
    }
}

#[derive(Default)]
pub(super) struct Batch {
    additions: Vec<Addition>,
    token_uses: Vec<(TokenId, Timestamp)>,
    /// In transactions of their own.
    new_tokens: Vec<NewToken>,
    probe: Option<Arc<()>>,
    bytes: usize,
}

impl Batch {
    /// Waits for a first job, takes what is queued, and puts the replies in flight. None when every `Writer` is dropped.
    pub(super) fn gather(
        queue: &Queue,
        in_flight: &InFlight,
        concurrent_clients: usize,
    ) -> Option<Self> {
        let mut batch = Self::default();
        let mut jobs = queue.jobs.lock();
        let first = jobs.blocking_recv()?;
        if concurrent_clients >= GATHER_CLIENTS_MIN {
            let len = concurrent_clients / 2 - 1;
            queue.wake_up.wait(&jobs, len, GATHER_TIMEOUT);
        }
        let mut slot = in_flight.0.lock();
        let (_, replies) = slot.insert((Instant::now(), Vec::new()));
        batch.push(first, replies);
        while !batch.is_full()
            && let Ok(job) = jobs.try_recv()
        {
            batch.push(job, replies);
        }
        Some(batch)
    }

    fn push(&mut self, job: Job, replies: &mut Vec<Reply>) {
        match job {
            Job::Add(addition, reply) => {
                let Plant { name, tag } = &addition.plant.plant;
                self.bytes += name.len() + tag.as_ref().map_or(0, String::len);
                self.additions.push(addition);
                replies.push(reply);
            }
            Job::TokenUse(token, used_at) => self.token_uses.push((token, used_at)),
            Job::CreateToken(token) => self.new_tokens.push(*token),
            Job::Probe(probe) => self.probe = Some(probe),
        }
    }

    /// The number of plants.
    pub(super) fn len(&self) -> usize {
        self.additions.len()
    }

    fn is_full(&self) -> bool {
        self.len() >= LEN_MAX || self.bytes >= BYTES_MAX || self.new_tokens.len() >= NEW_TOKENS_MAX
    }

    /// Commits the batch and sends the replies. An error means that the store must not be used again.
    pub(super) fn commit(
        mut self,
        queue: &Queue,
        in_flight: &InFlight,
        store: &mut Store,
    ) -> Result<(), StoreError> {
        let started = Instant::now();
        let is_write_due = self.additions.is_empty()
            && self.probe.is_some()
            && (queue.health.is_write_due() || store.is_disconnected());
        let created = self.create_tokens(store);
        let result = created.and_then(|()| self.write(store, is_write_due));
        // Empty if `commit_watchdog` has sent and counted them.
        let replies = in_flight.take_replies();
        let has_written = result.is_ok() && (self.len() > 0 || is_write_due);
        if has_written {
            let len = self.len() as u64;
            queue.metrics.committed(len, started.elapsed());
        }
        self.report_health(&result, has_written, started, &queue.health);
        let adds = &queue.metrics.adds;
        match result {
            Ok(outcomes) => {
                let results = self.additions.into_iter().zip(outcomes);
                let results = results.map(|(addition, outcome)| {
                    let plant = addition.plant.plant;
                    let (counter, result) = match outcome {
                        Outcome::Added => (&adds.added, Ok(plant)),
                        Outcome::Replayed => (&adds.replayed, Ok(plant)),
                        Outcome::Conflict => (&adds.conflict, Err(AddError::Conflict)),
                        Outcome::Damaged => (&adds.damaged, Err(AddError::Store(Failure::Damaged))),
                    };
                    counter.add(1);
                    result
                });
                reply_all(replies.into_iter().zip(results));
                Ok(())
            }
            Err(error) => {
                let result = AddError::Store(error.kind);
                result.counter(adds).add(replies.len() as u64);
                reply_all(replies.into_iter().map(|reply| (reply, Err(result))));
                match error.kind {
                    Failure::Fatal => Err(error),
                    _ => Ok(()), // a later batch may succeed
                }
            }
        }
    }

    /// Creates the tokens and replies. An error means that the store must not be used again.
    fn create_tokens(&mut self, store: &mut Store) -> Result<(), StoreError> {
        for token in self.new_tokens.drain(..) {
            let created = match store.create_token(&token.record, &current_user()) {
                Ok(true) => Ok(()),
                // Another token has its name.
                Ok(false) => Err(Failure::Unusable),
                Err(error) if error.kind == Failure::Fatal => return Err(error),
                Err(error) => {
                    let cause = chain(&*error.cause);
                    tracing::warn!(%error, cause, "a subject of the identity provider was not recorded");
                    // The plant is not stored, so its outcome is not unknown.
                    Err(match error.kind {
                        Failure::Unknown => Failure::Unavailable,
                        kind => kind,
                    })
                }
            };
            let _ = token.reply.send(created);
        }
        Ok(())
    }

    /// The probe comes first: if it fails, nothing of the batch was stored.
    fn write(&self, store: &mut Store, is_write_due: bool) -> Result<Vec<Outcome>, StoreError> {
        if self.probe.is_some() {
            store.probe(is_write_due)?;
        }
        if self.additions.is_empty() && self.token_uses.is_empty() {
            return Ok(Vec::new());
        }
        store.add(&self.additions, &self.token_uses)
    }

    /// Records what the result shows about the store. A batch that only records the use of tokens shows nothing, because
    /// it does not always write.
    fn report_health(
        &self,
        result: &Result<Vec<Outcome>, StoreError>,
        has_written: bool,
        started: Instant,
        health: &Health,
    ) {
        let error = match result {
            Ok(_) if has_written || self.probe.is_some() => return health.succeeded(has_written),
            Ok(_) => return,
            // The process ends and logs the cause.
            Err(error) if error.kind == Failure::Fatal => return,
            Err(error) => error,
        };
        let kind = error.kind;
        let cause = chain(&*error.cause);
        let reason = NotReady::Failed {
            kind,
            cause: cause.clone(),
        };
        // One damaged plant does not keep others from being added.
        if kind == Failure::Damaged || !health.failed(started, reason) {
            tracing::warn!(%error, cause, "a batch failed");
        }
    }
}
