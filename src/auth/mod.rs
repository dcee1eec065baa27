//! Who may add plants, and how often. Knows nothing of the requests.

mod failures;
mod known_tokens;
mod oidc;
mod rate_limit;
mod runtime_tokens;

pub use failures::AuthFailures;
pub(crate) use failures::client_network;
pub use known_tokens::KnownTokens;
pub use oidc::IdentityProvider;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use oidc::verify_jwt;
pub(crate) use rate_limit::Allowance;
pub use runtime_tokens::RuntimeTokens;

use std::sync::Arc;

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
    /// The end of a sentence for the client.
    InvalidJwt(&'static str),
    ExpiredJwt,
    /// The JWT does not have this scope.
    InsufficientScope(Arc<str>),
    /// The key of the JWT is not known, and could not be read.
    ProviderUnreachable(String),
    RateLimited(Allowance),
    /// The client has sent too many requests without a valid token.
    TooManyFailures(Allowance),
    /// The tokens could not be read; nothing was stored.
    Store {
        failure: Failure,
        cause: String,
    },
}

impl AuthError {
    /// True if the token itself is the reason. An unknown one is counted before it is looked for.
    pub(crate) fn is_failed_authentication(&self) -> bool {
        matches!(
            self,
            Self::RevokedToken
                | Self::ExpiredToken
                | Self::InvalidJwt(_)
                | Self::ExpiredJwt
                | Self::InsufficientScope(_)
        )
    }
}
