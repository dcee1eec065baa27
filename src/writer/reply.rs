//! Replies from the writer threads to the waiting requests. Waking a task of another runtime is a system call; so a
//! thread wakes each runtime once per batch, and a dispatcher task there wakes the requests.

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};

use crate::plant::Plant;
use crate::writer::{AddError, MemoryPermits};

pub(super) type AddResult = Result<Plant, AddError>;
type Waiter = oneshot::Sender<AddResult>;

/// Wakes the waiting requests of one runtime. The channel needs no bound: each connection has at most one request that
/// waits for a reply.
#[derive(Clone)]
pub(super) struct ReplyDispatcher(Arc<mpsc::UnboundedSender<Vec<(Waiter, AddResult)>>>);

/// Where the result of one add is sent.
pub(super) struct Reply {
    waiter: Waiter,
    dispatcher: ReplyDispatcher,
    _permits: Option<Box<MemoryPermits>>,
}

impl ReplyDispatcher {
    /// Starts the dispatcher task on the current runtime.
    pub(super) fn start() -> Self {
        let (sender, mut batches) = mpsc::unbounded_channel::<Vec<(Waiter, AddResult)>>();
        tokio::spawn(async move {
            while let Some(batch) = batches.recv().await {
                for (waiter, result) in batch {
                    // A client that has disconnected learns the outcome by sending the plant again.
                    let _ = waiter.send(result);
                }
            }
        });
        Self(Arc::new(sender))
    }

    pub(super) fn reply(
        &self,
        permits: Option<Box<MemoryPermits>>,
    ) -> (Reply, oneshot::Receiver<AddResult>) {
        let (waiter, received) = oneshot::channel();
        let reply = Reply {
            waiter,
            dispatcher: self.clone(),
            _permits: permits,
        };
        (reply, received)
    }
}

/// Sends each reply its result, with one wake-up per runtime.
pub(super) fn reply_all(results: impl Iterator<Item = (Reply, AddResult)>) {
    let mut batches: Vec<(ReplyDispatcher, Vec<(Waiter, AddResult)>)> = Vec::new();
    for (reply, result) in results {
        let Reply {
            waiter, dispatcher, ..
        } = reply;
        match batches
            .iter_mut()
            .find(|(known, _)| Arc::ptr_eq(&known.0, &dispatcher.0))
        {
            Some((_, batch)) => batch.push((waiter, result)),
            None => batches.push((dispatcher, vec![(waiter, result)])),
        }
    }
    for (dispatcher, batch) in batches {
        // It fails only if the runtime has ended, and the requests with it.
        let _ = dispatcher.0.send(batch);
    }
}
