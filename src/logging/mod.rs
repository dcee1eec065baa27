//! The application log: readable lines on a terminal, JSON lines otherwise. A request only appends to a bounded buffer,
//! which a thread writes to standard error, so a reader of the log that is slow or stuck does not slow down requests:
//! lines that do not fit are dropped and counted. `tracing-appender` wakes its thread for every line, which cost a quarter
//! of the throughput.

mod line;
mod line_limit;

use std::collections::VecDeque;
use std::io::{self, IsTerminal, Write};
use std::panic;
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, SystemTime};

use parking_lot::{Condvar, Mutex};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

pub(crate) use line::{Line, Piece, field_name};
pub(crate) use line_limit::LineLimit;

const BUFFER_BYTES_MAX: usize = 1 << 20;

/// How long lines gather in the buffer before they are written together.
const FLUSH_INTERVAL: Duration = Duration::from_millis(20);

/// How long the end of the process waits for standard error to take what is buffered.
const FINAL_FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// How many warnings are remembered, and how much of each.
const WARNINGS_MAX: usize = 50;
const WARNING_CHARS_MAX: usize = 1000;

static OUTPUT: OnceLock<Output> = OnceLock::new();

struct Output {
    is_json: bool,
    buffer: Buffer,
    /// The newest one first.
    warnings: Mutex<VecDeque<Warning>>,
}

/// A warning or an error that was logged.
#[derive(Debug, Clone)]
pub(crate) struct Warning {
    pub(crate) time: SystemTime,
    pub(crate) text: String,
}

/// The newest warnings and errors, the newest one first.
pub(crate) fn warnings() -> Vec<Warning> {
    let warnings = OUTPUT.get().map(|output| output.warnings.lock());
    warnings.map_or(Vec::new(), |warnings| warnings.iter().cloned().collect())
}

/// Flushes and ends the log when it is dropped.
pub struct Guard {
    output: &'static Output,
    flushed: Receiver<()>,
}

/// Starts logging to standard error. To be called once.
pub fn start(level: LevelFilter) -> Guard {
    let output = OUTPUT.get_or_init(|| Output {
        is_json: !io::stderr().is_terminal(),
        buffer: Buffer::default(),
        warnings: Mutex::default(),
    });
    let flushed = in_background(move || output.buffer.flush_to(&mut io::stderr()));
    let _ = tracing::subscriber::set_global_default(Log(level));
    panic::set_hook(Box::new(
        |panic| tracing::error!(%panic, "a thread panicked"),
    ));
    Guard { output, flushed }
}

/// Writes events as lines. There are no spans.
struct Log(LevelFilter);

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        // The HTTP/2 library warns of invalid frames: a client could fill the log with them.
        let is_about_frames = metadata.target().starts_with("h2::");
        let level = if is_about_frames {
            Level::DEBUG.max(*metadata.level())
        } else {
            *metadata.level()
        };
        level <= self.0
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.0)
    }

    fn event(&self, event: &Event<'_>) {
        let metadata = event.metadata();
        if let Some(mut line) = Line::without_message(*metadata.level(), metadata.target()) {
            event.record(&mut line);
            line.write();
        }
        if *metadata.level() <= Level::WARN {
            remember(event);
        }
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// For `warnings`.
fn remember(event: &Event<'_>) {
    let Some(output) = OUTPUT.get() else {
        return;
    };
    let mut line = Line::readable();
    event.record(&mut line);
    let text = line.into_text().chars().take(WARNING_CHARS_MAX).collect();
    let time = SystemTime::now();
    let mut warnings = output.warnings.lock();
    warnings.truncate(WARNINGS_MAX - 1);
    warnings.push_front(Warning { time, text });
}

/// True for characters that a terminal or a viewer acts on instead of showing them: control characters, direction marks,
/// line separators, and characters without a glyph. Joiners are not among them: scripts and emoji need them.
pub(crate) fn is_unprintable(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}')
}

/// Writes a message for the user to standard error, with a timeout.
pub(crate) fn write_stderr(text: String) {
    let written = in_background(move || {
        let _ = io::stderr().write_all(text.as_bytes());
    });
    let _ = written.recv_timeout(FINAL_FLUSH_TIMEOUT);
}

/// Runs on a thread what may block forever. The channel receives a message when it is done.
fn in_background(work: impl FnOnce() + Send + 'static) -> Receiver<()> {
    let (done, is_done) = channel();
    thread::Builder::new()
        .name("log".to_owned())
        .spawn(move || {
            work();
            let _ = done.send(());
        })
        .expect("one more thread can be started");
    is_done
}

impl Drop for Guard {
    fn drop(&mut self) {
        let buffer = &self.output.buffer;
        buffer.state.lock().is_closed = true;
        buffer.changed.notify_one();
        let _ = self.flushed.recv_timeout(FINAL_FLUSH_TIMEOUT);
    }
}

#[derive(Default)]
struct Buffer {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    lines: Vec<u8>,
    dropped: usize,
    is_closed: bool,
}

impl Buffer {
    fn flush_to(&self, output: &mut impl Write) {
        let mut lines = Vec::new();
        loop {
            let mut state = self.state.lock();
            let is_idle = |state: &mut State| state.lines.is_empty() && !state.is_closed;
            self.changed.wait_while(&mut state, is_idle);
            let is_open = |state: &mut State| !state.is_closed;
            self.changed
                .wait_while_for(&mut state, is_open, FLUSH_INTERVAL);
            std::mem::swap(&mut lines, &mut state.lines);
            let dropped = std::mem::take(&mut state.dropped);
            let is_closed = state.is_closed;
            drop(state);

            // If standard error is closed, there is nowhere to report that.
            let _ = output.write_all(&lines);
            lines.clear();
            if is_closed {
                return;
            }
            if dropped > 0 {
                tracing::warn!(
                    dropped,
                    "log lines were dropped because the log was not read in time"
                );
            }
        }
    }

    fn push(&self, line: &[u8]) {
        let mut state = self.state.lock();
        if state.lines.len() + line.len() > BUFFER_BYTES_MAX {
            state.dropped += 1;
            return;
        }
        let is_first = state.lines.is_empty();
        state.lines.extend_from_slice(line);
        drop(state);
        if is_first {
            self.changed.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_that_is_not_read_is_bounded_and_does_not_block() {
        let buffer = Buffer::default();
        for _ in 0..BUFFER_BYTES_MAX {
            buffer.push(b"{}\n");
        }
        let state = buffer.state.lock();
        assert!(state.lines.len() <= BUFFER_BYTES_MAX);
        assert_eq!(state.lines.len() / 3 + state.dropped, BUFFER_BYTES_MAX);
    }

    #[test]
    fn lines_that_were_logged_before_the_end_are_written() {
        let buffer = Buffer::default();
        buffer.push(b"a line\n");
        buffer.state.lock().is_closed = true;
        let mut output = Vec::new();
        buffer.flush_to(&mut output);
        assert_eq!(output, b"a line\n");
    }
}
