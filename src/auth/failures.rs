//! Requests without a valid token, limited for each client.

use std::net::{IpAddr, Ipv6Addr};
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use governor::clock::{Clock, DefaultClock};
use governor::state::keyed::HashMapStateStore;
use governor::{Quota, RateLimiter};
use parking_lot::Mutex;

use crate::auth::{Allowance, AuthError};

/// The most clients that are counted separately. The others are counted together.
const CLIENTS_MAX: usize = 1 << 16;
const OTHERS: IpAddr = IpAddr::V6(Ipv6Addr::UNSPECIFIED);

/// How often clients without a recent failure are forgotten when there are so many; it takes about a millisecond.
const CLEANUP_INTERVAL: Duration = Duration::from_secs(1);

/// Without a limit by default.
#[derive(Default)]
pub struct AuthFailures(Option<Limited>);

struct Limited {
    per_second: NonZeroU32,
    limiter: RateLimiter<IpAddr, HashMapStateStore<IpAddr>, DefaultClock>,
    last_cleanup: Mutex<Instant>,
}

impl AuthFailures {
    pub(crate) fn new(per_second: Option<NonZeroU32>) -> Self {
        Self(per_second.map(|per_second| Limited {
            per_second,
            limiter: RateLimiter::hashmap(Quota::per_second(per_second)),
            last_cleanup: Mutex::new(Instant::now()),
        }))
    }

    /// Counts a failure, or a token that is not known yet. An error if the client has reached its limit.
    pub(crate) fn count(&self, client: IpAddr) -> Result<(), AuthError> {
        let Some(Limited {
            per_second,
            limiter,
            last_cleanup,
        }) = &self.0
        else {
            return Ok(());
        };
        if limiter.len() >= CLIENTS_MAX
            && let Some(mut last_cleanup) = last_cleanup.try_lock()
            && last_cleanup.elapsed() >= CLEANUP_INTERVAL
        {
            *last_cleanup = Instant::now();
            limiter.retain_recent();
        }
        let client = match limiter.len() {
            CLIENTS_MAX.. => OTHERS,
            _ => client_network(client),
        };
        limiter.check_key(&client).map_err(|not_until| {
            let wait = not_until.wait_time_from(limiter.clock().now());
            AuthError::TooManyFailures(Allowance {
                policy: "address",
                per_second: per_second.get(),
                remaining: 0,
                retry_after_s: wait.as_secs() + 1,
            })
        })
    }
}

/// What counts as one client: an IPv4 address, or the network of an IPv6 address, because a client usually has all of it.
pub(crate) fn client_network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() & !(u128::MAX >> 64)).into(),
        v4 @ IpAddr::V4(_) => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_have_limits_of_their_own_and_an_ipv6_network_is_one_client() {
        let failures = AuthFailures::new(NonZeroU32::new(2));
        let admitted = |address: &str| {
            let address = address.parse().expect("an address");
            (0..5).filter(|_| failures.count(address).is_ok()).count()
        };
        assert_eq!(admitted("192.0.2.1"), 2);
        assert_eq!(admitted("::ffff:192.0.2.1"), 0);
        assert_eq!(admitted("192.0.2.2"), 2);
        assert_eq!(admitted("2001:db8::1"), 2);
        assert_eq!(admitted("2001:db8::ffff:2"), 0);
        assert_eq!(admitted("2001:db8:0:1::1"), 2);
    }

    #[test]
    fn the_number_of_clients_is_bounded() {
        let failures = AuthFailures::new(NonZeroU32::new(1));
        for client in 0..1 << 17 {
            let _ = failures.count(IpAddr::V4(client.into()));
        }
        let len = failures.0.as_ref().map(|limited| limited.limiter.len());
        assert!(len <= Some(CLIENTS_MAX + 1), "{len:?}");
    }
}
