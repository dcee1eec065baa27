//! Rate limits with a burst of one second.

use std::num::NonZeroU32;

use governor::clock::{Clock, DefaultClock};
use governor::middleware::StateInformationMiddleware;
use governor::state::{InMemoryState, NotKeyed};
use governor::{Quota, RateLimiter};

use crate::auth::AuthError;

/// The limit of a token on this node.
pub(super) struct RateLimit {
    pub(super) per_second: NonZeroU32,
    limiter: RateLimiter<NotKeyed, InMemoryState, DefaultClock, StateInformationMiddleware>,
}

/// A rate limit that a request was counted for, and what is left of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Allowance {
    /// What the limit is for: `token` or `address`.
    pub policy: &'static str,
    pub per_second: u32,
    pub remaining: u32,
    /// When a request will be admitted; 0 if one would be now.
    pub retry_after_s: u64,
}

impl RateLimit {
    pub(super) fn new(per_second: NonZeroU32) -> Self {
        let limiter = RateLimiter::direct(Quota::per_second(per_second));
        Self {
            per_second,
            limiter: limiter.with_middleware(),
        }
    }

    pub(super) fn admit(&self) -> Result<Allowance, AuthError> {
        let allowance = Allowance {
            policy: "token",
            per_second: self.per_second.get(),
            remaining: 0,
            retry_after_s: 0,
        };
        match self.limiter.check() {
            Ok(state) => Ok(Allowance {
                remaining: state.remaining_burst_capacity(),
                ..allowance
            }),
            Err(not_until) => {
                let wait = not_until.wait_time_from(self.limiter.clock().now());
                Err(AuthError::RateLimited(Allowance {
                    retry_after_s: wait.as_secs() + 1,
                    ..allowance
                }))
            }
        }
    }
}
