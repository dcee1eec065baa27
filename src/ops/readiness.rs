//! Readiness: adds are accepted while the public listener is open and the store accepts writes.

use std::sync::{Arc, PoisonError, RwLock};

use crate::writer::{HealthCheck, Unavailable};

#[derive(Default)]
pub(super) struct Readiness(RwLock<Phase>);

#[derive(Default, Clone)]
enum Phase {
    #[default]
    Starting,
    Serving(Arc<HealthCheck>),
    Draining(Option<Arc<HealthCheck>>),
}

#[derive(Debug, thiserror::Error)]
pub(super) enum NotReady {
    #[error("starting")]
    Starting,
    #[error("draining")]
    Draining,
    #[error(transparent)]
    Store(#[from] Unavailable),
}

/// What is known without a query of the store.
pub(super) struct Status {
    pub(super) is_ready: bool,
    pub(super) is_draining: bool,
    pub(super) queue_len: usize,
}

impl Readiness {
    pub(super) fn set_serving(&self, store: HealthCheck) {
        self.set(Phase::Serving(Arc::new(store)));
    }

    pub(super) fn set_draining(&self) {
        let store = match self.phase() {
            Phase::Starting => None,
            Phase::Serving(store) => Some(store),
            Phase::Draining(store) => store,
        };
        self.set(Phase::Draining(store));
    }

    /// Probes the store if the last result is too old.
    pub(super) async fn check(&self) -> Result<(), NotReady> {
        match self.phase() {
            Phase::Starting => Err(NotReady::Starting),
            Phase::Draining(_) => Err(NotReady::Draining),
            Phase::Serving(store) => Ok(store.check().await?),
        }
    }

    pub(super) fn status(&self) -> Status {
        let (store, is_draining) = match self.phase() {
            Phase::Starting => (None, false),
            Phase::Serving(store) => (Some(store), false),
            Phase::Draining(store) => (store, true),
        };
        let is_available = |store: &Arc<HealthCheck>| store.last_result().is_ok();
        Status {
            is_ready: !is_draining && store.as_ref().is_some_and(is_available),
            is_draining,
            queue_len: store.map_or(0, |store| store.queue_len()),
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
