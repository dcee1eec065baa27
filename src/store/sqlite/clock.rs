//! The clock that dates plants, with warnings if it jumps. The order of plants does not depend on it: a wrong clock gives wrong dates to
//! the plants that are added while it is wrong, and to no others.

use std::time::Instant;

use jiff::{SignedDuration, Timestamp};

/// A clock that is set back by more than this between two batches has jumped.
const BACK_MAX: SignedDuration = SignedDuration::from_secs(1);

/// A clock that gains or loses more than this against the monotonic clock has jumped. Adjusting a clock gradually changes it by a
/// two-thousandth of the time at most; `DRIFT_SHARE` allows for twice that.
const DRIFT_MAX: SignedDuration = SignedDuration::from_secs(10);
const DRIFT_SHARE: i32 = 1000;

/// Plants that are dated later than this after the start of the process are from a clock that was ahead, or the clock is behind now.
const AHEAD_MAX: SignedDuration = SignedDuration::from_secs(60);

#[derive(Default)]
pub(super) struct Clock {
    last: Option<(Timestamp, Instant)>,
}

impl Clock {
    /// The time of the batch that is about to be stored, in milliseconds since 1970.
    pub(super) fn now(&mut self) -> i64 {
        let (now, instant) = (Timestamp::now(), Instant::now());
        if let Some((last, since)) = self.last.replace((now, instant)) {
            let elapsed = instant.duration_since(since);
            let elapsed = SignedDuration::try_from(elapsed).unwrap_or(SignedDuration::MAX);
            if has_jumped(last, now, elapsed) {
                tracing::warn!(
                    clock = %now,
                    previous = %last,
                    elapsed_us = i64::try_from(elapsed.as_micros()).unwrap_or(i64::MAX),
                    "the clock has jumped; plants are dated with the new time"
                );
            }
        }
        now.as_millisecond()
    }
}

/// Warns if the last plants of a store are dated in the future.
pub(super) fn compare_with(newest: Option<i64>) {
    let now = Timestamp::now();
    if let Some(newest) = newest.and_then(|newest| Timestamp::from_millisecond(newest).ok())
        && newest.duration_since(now) > AHEAD_MAX
    {
        tracing::warn!(
            clock = %now,
            %newest,
            "the newest plants are dated in the future; the clock was ahead when they were added, or is behind now"
        );
    }
}

fn has_jumped(last: Timestamp, now: Timestamp, elapsed: SignedDuration) -> bool {
    let by_clock = now.duration_since(last);
    let drift = by_clock.saturating_sub(elapsed).abs();
    by_clock < -BACK_MAX || drift > DRIFT_MAX + elapsed / DRIFT_SHARE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_jump_is_distinguished_from_a_gradual_adjustment() {
        let last: Timestamp = "2026-11-15T12:00:00Z".parse().expect("a time");
        let jumped = |by_clock_ms: i64, elapsed_s: i64| {
            let now = last + SignedDuration::from_millis(by_clock_ms);
            has_jumped(last, now, SignedDuration::from_secs(elapsed_s))
        };
        assert!(!jumped(0, 0));
        assert!(!jumped(-900, 0));
        assert!(jumped(-1100, 0));
        assert!(!jumped(9000, 0));
        assert!(jumped(11_000, 0));
        assert!(!jumped(3_600_000, 3600));
        assert!(!jumped(86_430_000, 86_400)); // adjusted by half a minute in a day
        assert!(jumped(86_700_000, 86_400));
        assert!(jumped(3_600_000, 7200)); // set back by an hour within two
    }
}
