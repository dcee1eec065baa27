//! How far the shutdown of the server has got. The server sets the phase; connections, request bodies and the readiness
//! check read it.

use std::future;

use tokio::sync::watch;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    #[default]
    Serving,
    /// Responses ask to close the connection, and bodies have a short timeout.
    Draining,
    /// Idle connections are closed.
    Closing,
}

/// Clones must come from the receiver that `channel` returns: `is_draining` compares with the phase that it has seen.
/// Without a sender the server never shuts down.
#[derive(Clone)]
pub struct Shutdown(watch::Receiver<Phase>);

impl Default for Shutdown {
    fn default() -> Self {
        Self::channel().1
    }
}

impl Shutdown {
    pub(crate) fn channel() -> (watch::Sender<Phase>, Self) {
        let (sender, receiver) = watch::channel(Phase::Serving);
        (sender, Self(receiver))
    }

    /// Called for every request, so it takes no lock.
    pub(crate) fn is_draining(&self) -> bool {
        self.0.has_changed().unwrap_or(false)
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.is_draining() && *self.0.borrow() == Phase::Closing
    }

    pub(crate) async fn reached(&self, phase: Phase) {
        let mut receiver = self.0.clone();
        if receiver.wait_for(|now| *now >= phase).await.is_err() {
            future::pending::<()>().await;
        }
    }
}
