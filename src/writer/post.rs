//! The way back from the thread. Waking a task of another runtime is a call of the kernel; so the thread
//! wakes each runtime once a batch, and the tasks there are woken from within.

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};

/// Delivers answers on one runtime.
///
/// What is on its way is bounded by who waits: one request of each connection.
pub struct Post<A>(Arc<mpsc::UnboundedSender<Vec<Letter<A>>>>);

/// Where one answer goes.
pub struct Reply<A> {
    to: oneshot::Sender<A>,
    by: Post<A>,
}

struct Letter<A> {
    to: oneshot::Sender<A>,
    answer: A,
}

impl<A: Send + 'static> Post<A> {
    /// On the current runtime.
    pub fn start() -> Self {
        let (bags, mut delivery) = mpsc::unbounded_channel::<Vec<Letter<A>>>();
        tokio::spawn(async move {
            while let Some(bag) = delivery.recv().await {
                for Letter { to, answer } in bag {
                    // Whoever has hung up finds out by sending the plant again.
                    let _ = to.send(answer);
                }
            }
        });
        Self(Arc::new(bags))
    }

    /// What the thread is given, and what is waited for.
    pub fn reply(&self) -> (Reply<A>, oneshot::Receiver<A>) {
        let (to, answered) = oneshot::channel();
        let by = self.clone();
        (Reply { to, by }, answered)
    }
}

/// Sends everybody their answer, each runtime's together.
pub fn send_all<A>(answers: impl Iterator<Item = (Reply<A>, A)>) {
    let mut bags: Vec<(Post<A>, Vec<Letter<A>>)> = Vec::new();
    for (Reply { to, by }, answer) in answers {
        let letter = Letter { to, answer };
        match bags
            .iter_mut()
            .find(|(post, _)| Arc::ptr_eq(&post.0, &by.0))
        {
            Some((_, bag)) => bag.push(letter),
            None => bags.push((by, vec![letter])),
        }
    }
    for (post, bag) in bags {
        // With a runtime, all who waited there are gone.
        let _ = post.0.send(bag);
    }
}

impl<A> Clone for Post<A> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}
