//! Who may add plants, and how often. Knows no HTTP.

mod failures;
mod known_tokens;
mod rate_limit;
mod runtime_tokens;

pub use failures::AuthFailures;
pub(crate) use failures::client_network;
pub use known_tokens::KnownTokens;
pub(crate) use rate_limit::Allowance;
pub use runtime_tokens::RuntimeTokens;

use crate::store::{Failure, TokenId};

/// A request that may add a plant.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Authorized {
    pub token: TokenId,
    /// If the token has a rate limit.
    pub allowance: Option<Allowance>,
}

/// Why a token does not authorise a request.
#[derive(Debug)]
pub(crate) enum AuthError {
    UnknownToken,
    RevokedToken,
    ExpiredToken,
    RateLimited(Allowance),
    /// The client has sent too many requests without a valid token.
    TooManyFailures(Allowance),
    /// The tokens could not be read; nothing was stored.
    Store {
        failure: Failure,
        cause: String,
    },
}
