//! Whether adds can be taken: not before the public listener is open, not after it was closed, and not while the store
//! takes none.

use std::sync::{Arc, PoisonError, RwLock};

use crate::writer::{Pulse, Unwell};

/// Where in its life the server is.
#[derive(Default)]
pub struct Readiness(RwLock<Phase>);

#[derive(Default, Clone)]
enum Phase {
    #[default]
    Starting,
    Serving(Arc<Pulse>),
    Draining(Option<Arc<Pulse>>),
}

/// Why no adds can be taken.
#[derive(Debug, thiserror::Error)]
pub enum Reason {
    /// The store is being opened.
    #[error("starting")]
    Starting,
    /// The server is about to end.
    #[error("draining")]
    Draining,
    /// Of the store.
    #[error(transparent)]
    Store(#[from] Unwell),
}

/// What is known without asking the store.
pub struct State {
    /// Whether adds can be taken.
    pub is_ready: bool,
    /// Whether the server is about to end.
    pub is_draining: bool,
    /// How much waits for the store.
    pub queue_len: usize,
}

impl Readiness {
    /// From now on.
    pub fn serving(&self, pulse: Pulse) {
        self.set(Phase::Serving(Arc::new(pulse)));
    }

    /// From now on.
    pub fn draining(&self) {
        let pulse = match self.phase() {
            Phase::Starting => None,
            Phase::Serving(pulse) => Some(pulse),
            Phase::Draining(pulse) => pulse,
        };
        self.set(Phase::Draining(pulse));
    }

    /// Asks the store, if need be.
    pub async fn check(&self) -> Result<(), Reason> {
        match self.phase() {
            Phase::Starting => Err(Reason::Starting),
            Phase::Draining(_) => Err(Reason::Draining),
            Phase::Serving(pulse) => Ok(pulse.check().await?),
        }
    }

    /// Asks nobody.
    pub fn state(&self) -> State {
        let (pulse, is_draining) = match self.phase() {
            Phase::Starting => (None, false),
            Phase::Serving(pulse) => (Some(pulse), false),
            Phase::Draining(pulse) => (pulse, true),
        };
        let is_well = |pulse: &Arc<Pulse>| pulse.last_known().is_ok();
        State {
            is_ready: !is_draining && pulse.as_ref().is_some_and(is_well),
            is_draining,
            queue_len: pulse.map_or(0, |pulse| pulse.queue_len()),
        }
    }

    fn phase(&self) -> Phase {
        let phase = self.0.read().unwrap_or_else(PoisonError::into_inner);
        phase.clone()
    }

    fn set(&self, phase: Phase) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = phase;
    }
}
