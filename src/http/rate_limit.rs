//! The headers of a rate limit, according to draft-ietf-httpapi-ratelimit-headers-10.

use hyper::HeaderMap;
use hyper::header::{HeaderName, HeaderValue};

use crate::auth::Allowance;

const POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const STATE: HeaderName = HeaderName::from_static("ratelimit");

/// The policy is a quota per window of one second; the state is what is left, and when there is more.
pub(super) fn describe(allowance: Allowance, headers: &mut HeaderMap) {
    let Allowance {
        policy,
        per_second,
        remaining,
        retry_after_s,
    } = allowance;
    let reset_s = retry_after_s.max(1);
    for (name, value) in [
        (POLICY, format!("\"{policy}\";q={per_second};w=1")),
        (STATE, format!("\"{policy}\";r={remaining};t={reset_s}")),
    ] {
        let value = HeaderValue::try_from(value).expect("numbers are a header value");
        headers.insert(name, value);
    }
}
