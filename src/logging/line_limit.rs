//! A rate limit for one kind of log line, so that it cannot displace other lines. Suppressed lines are counted.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Admits at most `lines_max` lines per window.
pub(crate) struct LineLimit {
    lines_max: u32,
    window: Duration,
    state: Mutex<State>,
}

struct State {
    window_start: Option<Instant>,
    lines: u32,
    suppressed: u64,
}

impl LineLimit {
    pub(crate) const fn new(lines_max: u32, window: Duration) -> Self {
        Self {
            lines_max,
            window,
            state: Mutex::new(State {
                window_start: None,
                lines: 0,
                suppressed: 0,
            }),
        }
    }

    /// False if the line must not be logged.
    pub(crate) fn admit(&self, now: Instant) -> bool {
        let mut state = self.state.lock();
        let is_in_window = |start| now.saturating_duration_since(start) < self.window;
        if !state.window_start.is_some_and(is_in_window) {
            state.window_start = Some(now);
            state.lines = 0;
        }
        let is_admitted = state.lines < self.lines_max;
        if is_admitted {
            state.lines += 1;
        } else {
            state.suppressed += 1;
        }
        is_admitted
    }

    /// The number of lines that were suppressed since the last call.
    pub(crate) fn take_suppressed(&self) -> u64 {
        std::mem::take(&mut self.state.lock().suppressed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_beyond_the_limit_of_a_window_are_counted() {
        let limit = LineLimit::new(2, Duration::from_secs(1));
        let start = Instant::now();
        let end = start + Duration::from_secs(1);
        let half = start + Duration::from_millis(500);
        assert!(limit.admit(start));
        assert!(limit.admit(half));
        assert!(!limit.admit(half));
        assert!(!limit.admit(half));
        assert!(limit.admit(end));
        assert_eq!(limit.take_suppressed(), 2);
        assert_eq!(limit.take_suppressed(), 0);
    }
}
