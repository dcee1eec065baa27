//! What the docs page and the status page have in common.

use hyper::header::{CONTENT_SECURITY_POLICY, HeaderName, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS};

/// A page may load its own style, script and icon, and send requests to its own listener; nothing else.
pub(crate) const SECURITY_HEADERS: [(HeaderName, &str); 3] = [
    (
        CONTENT_SECURITY_POLICY,
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (REFERRER_POLICY, "no-referrer"),
];

pub(crate) const ICON: &str = include_str!("icon.svg");
