//! What the handlers are given.

use std::sync::Arc;
use std::time::Duration;

use crate::http::request_log::Draining;
use crate::http::tokens::Tokens;
use crate::metrics::Answers;
use crate::writer::Writer;

/// One for all requests: a clone is a pointer.
pub type State = Arc<Parts>;

/// What is behind it.
pub struct Parts {
    /// The way into the store.
    pub writer: Writer,
    /// Who may use it.
    pub tokens: Tokens,
    /// What is counted here.
    pub answers: Arc<Answers>,
    /// How much of a body is read.
    pub body_limits: BodyLimits,
    /// When bodies are no longer waited for.
    pub draining: Draining,
}

/// How much body is read, and for how long.
#[derive(Debug, Clone, Copy)]
pub struct BodyLimits {
    /// The largest body.
    pub bytes_max: usize,
    /// From the end of the head to the end of the body.
    pub timeout: Duration,
}
