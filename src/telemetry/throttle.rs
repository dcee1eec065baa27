//! A limit on log lines of one kind, so that they cannot push out others. What is over the limit is counted.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Lets so many lines pass in each window of time.
pub struct Throttle {
    lines_max: u32,
    window: Duration,
    state: Mutex<State>,
}

struct State {
    /// When the current window began.
    since: Option<Instant>,
    lines: u32,
    suppressed: u64,
}

/// What is to be done with a line.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Log it.
    Log,
    /// Do not log it. If it is the first since `take_suppressed`, the window ends at this time.
    Suppress(Option<Instant>),
}

impl Throttle {
    /// A limit for one kind of line.
    pub const fn new(lines_max: u32, window: Duration) -> Self {
        Self {
            lines_max,
            window,
            state: Mutex::new(State {
                since: None,
                lines: 0,
                suppressed: 0,
            }),
        }
    }

    /// Decides about a line that is about to be logged.
    pub fn admit(&self, now: Instant) -> Verdict {
        let mut state = self.lock();
        let since = match state.since {
            Some(since) if now.saturating_duration_since(since) < self.window => since,
            _ => {
                state.since = Some(now);
                state.lines = 0;
                now
            }
        };
        if state.lines < self.lines_max {
            state.lines += 1;
            return Verdict::Log;
        }
        state.suppressed += 1;
        Verdict::Suppress((state.suppressed == 1).then(|| since + self.window))
    }

    /// How many lines were suppressed since this was last asked.
    pub fn take_suppressed(&self) -> u64 {
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
    fn a_window_has_so_many_lines_and_the_rest_is_counted() {
        let throttle = Throttle::new(2, Duration::from_secs(1));
        let start = Instant::now();
        let end = start + Duration::from_secs(1);
        let half = start + Duration::from_millis(500);
        assert_eq!(throttle.admit(start), Verdict::Log);
        assert_eq!(throttle.admit(half), Verdict::Log);
        assert_eq!(throttle.admit(half), Verdict::Suppress(Some(end)));
        assert_eq!(throttle.admit(half), Verdict::Suppress(None));
        assert_eq!(throttle.admit(end), Verdict::Log);
        assert_eq!(throttle.take_suppressed(), 2);
        assert_eq!(throttle.take_suppressed(), 0);
    }
}
