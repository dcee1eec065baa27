//! The log: readable on a terminal, JSON lines elsewhere, written by a thread of its own. A log that
//! nobody reads never holds up a request; what does not fit in its queue is left out.

use std::io::{self, IsTerminal};

use tracing_appender::non_blocking::{NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::filter::LevelFilter;

/// Lines that wait to be written, at most.
const QUEUE_LEN_MAX: usize = 16 << 10;

/// Starts logging to standard error. What is logged is written when the guard is dropped.
pub fn start(level: LevelFilter) -> WorkerGuard {
    let (writer, guard) = NonBlockingBuilder::default()
        .buffered_lines_limit(QUEUE_LEN_MAX)
        .finish(io::stderr());
    let log = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(writer);
    if io::stderr().is_terminal() {
        log.with_target(false).init();
    } else {
        log.json().flatten_event(true).init();
    }
    guard
}
