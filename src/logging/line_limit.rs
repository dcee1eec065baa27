//! A rate limit for one kind of log line, so that it cannot displace other lines. Suppressed lines are counted.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

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

/// The line must not be logged.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Suppressed {
    /// The end of the window, if this is the first suppressed line since `take_suppressed`.
    pub(crate) first_until: Option<Instant>,
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

    pub(crate) fn admit(&self, now: Instant) -> Result<(), Suppressed> {
        let mut state = self.lock();
        let start = match state.window_start {
            Some(start) if now.saturating_duration_since(start) < self.window => start,
            _ => {
                state.window_start = Some(now);
                state.lines = 0;
                now
            }
        };
        if state.lines < self.lines_max {
            state.lines += 1;
            return Ok(());
        }
        state.suppressed += 1;
        let first_until = (state.suppressed == 1).then(|| start + self.window);
        Err(Suppressed { first_until })
    }

    /// The number of lines that were suppressed since the last call.
    pub(crate) fn take_suppressed(&self) -> u64 {
        std::mem::take(&mut self.lock().suppressed)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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
        let suppressed = |first_until| Err(Suppressed { first_until });
        assert_eq!(limit.admit(start), Ok(()));
        assert_eq!(limit.admit(half), Ok(()));
        assert_eq!(limit.admit(half), suppressed(Some(end)));
        assert_eq!(limit.admit(half), suppressed(None));
        assert_eq!(limit.admit(end), Ok(()));
        assert_eq!(limit.take_suppressed(), 2);
        assert_eq!(limit.take_suppressed(), 0);
    }
}
