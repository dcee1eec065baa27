//! The log: readable on a terminal, JSON lines elsewhere, written by a thread of its own. A
//! request only appends to a buffer, and a log that nobody reads holds up nothing: what does not
//! fit is left out and counted.

mod json_lines;
mod throttle;

use std::io::{self, IsTerminal, Write};
use std::panic;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use tracing_subscriber::filter::LevelFilter;

use json_lines::JsonLines;
pub use throttle::{Throttle, Verdict};

/// Bytes of log that wait to be written, at most.
const BUFFER_BYTES_MAX: usize = 1 << 20;

/// How long lines gather before they are written together: waking a thread for each would cost
/// more than making it.
const GATHER: Duration = Duration::from_millis(20);

/// How long the end waits for somebody to read what was logged.
const END_TIMEOUT: Duration = Duration::from_secs(1);

/// Ends the log. What was logged before is written first, if anybody reads it.
pub struct Guard {
    log: Log,
    written: Receiver<()>,
}

/// Starts logging to standard error.
pub fn start(level: LevelFilter) -> Guard {
    let log = Log::default();
    let for_thread = log.clone();
    let written = in_background(move || for_thread.write_to(&mut io::stderr()));

    let for_events = log.clone();
    let format = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(move || for_events.clone());
    if io::stderr().is_terminal() {
        format.with_target(false).init();
    } else {
        format.event_format(JsonLines).init();
    }
    panic::set_hook(Box::new(|panic| tracing::error!(%panic, "a defect")));
    Guard { log, written }
}

/// True for characters that a terminal or a viewer acts on instead of showing them: control characters, marks of
/// direction, line separators, and characters without a glyph. Joiners are none of these: scripts and emoji need them.
pub fn is_unprintable(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}')
}

/// Tells a person something on standard error, unless nobody takes it.
pub fn say(text: String) {
    let said = in_background(move || {
        let _ = io::stderr().write_all(text.as_bytes());
    });
    let _ = said.recv_timeout(END_TIMEOUT);
}

/// Does something that may block for ever, and tells when it is done.
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
        self.log.lock().ended = true;
        self.log.0.changed.notify_one();
        let _ = self.written.recv_timeout(END_TIMEOUT);
    }
}

#[derive(Clone, Default)]
struct Log(Arc<Shared>);

#[derive(Default)]
struct Shared {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    lines: Vec<u8>,
    left_out: usize,
    ended: bool,
}

impl Log {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        let waiting = self.0.waiting.lock();
        waiting.unwrap_or_else(PoisonError::into_inner)
    }

    fn write_to(&self, output: &mut impl Write) {
        let mut lines = Vec::new();
        loop {
            let idle = |waiting: &mut Waiting| waiting.lines.is_empty() && !waiting.ended;
            let waiting = self.0.changed.wait_while(self.lock(), idle);
            let mut waiting = waiting.unwrap_or_else(PoisonError::into_inner);
            if !waiting.ended {
                let gathering = |waiting: &mut Waiting| !waiting.ended;
                waiting = match self
                    .0
                    .changed
                    .wait_timeout_while(waiting, GATHER, gathering)
                {
                    Ok((waiting, _)) => waiting,
                    Err(poisoned) => poisoned.into_inner().0,
                };
            }
            std::mem::swap(&mut lines, &mut waiting.lines);
            let left_out = std::mem::take(&mut waiting.left_out);
            let ended = waiting.ended;
            drop(waiting);

            // When standard error is gone there is nobody left to tell.
            let _ = output.write_all(&lines);
            lines.clear();
            if left_out > 0 && !ended {
                tracing::warn!(lines = left_out, "the log was too slow to take these lines");
            }
            if ended {
                return;
            }
        }
    }
}

/// Takes a line, which the formatter hands over whole.
impl Write for Log {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut waiting = self.lock();
        if waiting.lines.len() + line.len() > BUFFER_BYTES_MAX {
            waiting.left_out += 1;
            return Ok(line.len());
        }
        let first = waiting.lines.is_empty();
        waiting.lines.extend_from_slice(line);
        drop(waiting);
        if first {
            self.0.changed.notify_one();
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_that_nobody_reads_keeps_at_most_its_buffer_and_blocks_nobody() {
        let log = Log::default();
        for _ in 0..BUFFER_BYTES_MAX {
            log.clone().write_all(b"{}\n").expect("writing never fails");
        }
        let waiting = log.lock();
        assert!(waiting.lines.len() <= BUFFER_BYTES_MAX);
        assert_eq!(waiting.lines.len() / 3 + waiting.left_out, BUFFER_BYTES_MAX);
    }

    #[test]
    fn what_was_logged_before_the_end_is_written() {
        let log = Log::default();
        log.clone()
            .write_all(b"a line\n")
            .expect("writing never fails");
        log.lock().ended = true;
        let mut output = Vec::new();
        log.write_to(&mut output);
        assert_eq!(output, b"a line\n");
    }
}
