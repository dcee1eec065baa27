//! The error catalogue: codes and messages, and the conversions from the errors of other modules. A test compares it with
//! `openapi.yaml` and `docs/errors.md`.

use std::borrow::Cow;
use std::sync::Arc;

use http_body_util::Full;
use hyper::header::{ALLOW, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use hyper::{HeaderMap, StatusCode};
use serde_json::json;

use crate::auth::{Allowance, AuthError};
use crate::http::{Response, json_headers, rate_limit};
use crate::plant::Invalid;
use crate::store::Failure;
use crate::writer::AddError;

macro_rules! catalogue {
    ($($kind:ident = $code:literal, $when:literal, $message:literal;)+) => {
        /// The code is the status × 100 + n, and never changes its meaning.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum ErrorKind {
            $(#[doc = $when] $kind = $code,)+
        }

        impl ErrorKind {
            pub const ALL: &[ErrorKind] = &[$(ErrorKind::$kind,)+];

            /// The description in the documentation.
            pub fn when(self) -> &'static str {
                match self { $(ErrorKind::$kind => $when,)+ }
            }

            /// The message in the response, unless a more specific one is given: what is wrong, and what to do.
            fn message(self) -> &'static str {
                match self { $(ErrorKind::$kind => $message,)+ }
            }
        }
    };
}

catalogue! {
    MalformedRequest = 40000, "the request is not valid HTTP, or its body ends early",
        "The request is not valid HTTP; check its request line, headers and framing.";
    NotJson = 40001, "the body is not JSON",
        "The body is not JSON.";
    InvalidPlant = 40002, "the body is JSON but not a NewPlant",
        "The body is not a plant.";
    MalformedCredentials = 40003, "the credentials are malformed or given twice",
        "The Authorization header is malformed; send `Bearer` and one token.";
    Conflict = 40009, "the id belongs to a different plant",
        "The id belongs to a different plant, which is unchanged; use another id.";
    BodyTooLarge = 40013, "the body is larger than the limit",
        "The body is too large.";
    UnsupportedMediaType = 40015, "the content type is not application/json, or the body has a Content-Encoding",
        "The Content-Type must be application/json.";
    MissingCredentials = 40100, "there are no bearer credentials",
        "A bearer token is required; send it as `Authorization: Bearer <token>`.";
    UnknownToken = 40101, "the token is unknown, revoked or invalid",
        "The token is unknown or revoked; ask the operator for a new one.";
    ExpiredToken = 40102, "the token has expired",
        "The token has expired; ask the operator for a new one.";
    InsufficientScope = 40300, "the token of the identity provider does not have the required scope",
        "The token does not have the required scope; request one with the scope in WWW-Authenticate.";
    NotFound = 40400, "no resource has this path",
        "No resource has this path; add plants with POST /plants.";
    MethodNotAllowed = 40500, "the path does not support this method",
        "This path does not support that method; the Allow header lists the supported ones.";
    RequestTimeout = 40800, "the request did not arrive in time",
        "The request line and headers did not arrive in time; send them again.";
    TooManyRequests = 42900, "the token exceeds its rate limit",
        "The token exceeds its rate limit; wait for the time in Retry-After.";
    TooManyFailures = 42901, "too many requests from the client's address had no valid token",
        "Too many requests from this address had no valid token; wait for the time in Retry-After.";
    TooManyConnections = 42902, "the client's address has too many open connections",
        "This address has too many open connections; close some, or use them for several requests.";
    HeadersTooLarge = 43100, "the request line and headers are larger than the limit",
        "The request line and headers are too large; send fewer or shorter ones.";
    Internal = 50000, "an internal error, or the stored plant is damaged",
        "Internal error; the log of the service has the cause under this x-request-id.";
    Busy = 50300, "the service is too busy; nothing was stored",
        "The service is too busy and nothing was stored; send the same plant again later.";
    UnknownOutcome = 50301, "the store did not confirm the write; the plant may or may not be stored",
        "The plant may or may not have been stored; send the same plant again to find out, which is always safe.";
    StoreFull = 50302, "the disk is full, or the WAL has reached its limit; nothing was stored",
        "The store is full and nothing was stored; send the same plant again later, once there is room again.";
    Unavailable = 50303, "the store cannot be reached or used; nothing was stored",
        "The store cannot be reached or used at the moment and nothing was stored; send the same plant again later.";
    ProviderUnreachable = 50304, "the key of a token of the identity provider cannot be read; nothing was stored",
        "The identity provider cannot be reached to verify the token, and nothing was stored; send the same plant again later.";
}

impl ErrorKind {
    pub fn code(self) -> u32 {
        self as u32
    }

    pub fn status(self) -> StatusCode {
        u16::try_from(self.code() / 100)
            .ok()
            .and_then(|status| StatusCode::from_u16(status).ok())
            .expect("an error code is a status × 100 + n")
    }

    fn challenge(self) -> Option<&'static str> {
        match self {
            Self::MalformedCredentials => {
                Some(r#"Bearer realm="plantstore", error="invalid_request""#)
            }
            Self::MissingCredentials => Some(r#"Bearer realm="plantstore""#),
            Self::UnknownToken | Self::ExpiredToken => {
                Some(r#"Bearer realm="plantstore", error="invalid_token""#)
            }
            _ => None,
        }
    }

    /// After these errors, unread bytes on the connection may be the rest of the rejected request.
    pub(super) fn closes_connection(self) -> bool {
        matches!(
            self,
            Self::MalformedRequest
                | Self::BodyTooLarge
                | Self::RequestTimeout
                | Self::TooManyConnections
                | Self::HeadersTooLarge
        )
    }
}

/// What further headers of an error response are about.
#[derive(Debug)]
enum Details {
    None,
    /// The methods that the path supports.
    Allow(&'static str),
    /// The scope that the token does not have.
    Scope(Arc<str>),
    /// The rate limit that was reached.
    RateLimit(Allowance),
}

/// An error response.
#[derive(Debug)]
pub struct ApiError {
    pub(super) kind: ErrorKind,
    message: Cow<'static, str>,
    retry_after_s: Option<u64>,
    details: Details,
    /// For the log only.
    pub(super) cause: Option<String>,
}

impl ApiError {
    pub(super) fn new(kind: ErrorKind, message: impl Into<Cow<'static, str>>) -> Self {
        let is_temporary = [
            StatusCode::SERVICE_UNAVAILABLE,
            StatusCode::TOO_MANY_REQUESTS,
        ];
        let retry_after_s = is_temporary.contains(&kind.status()).then_some(1);
        Self {
            kind,
            message: message.into(),
            retry_after_s,
            details: Details::None,
            cause: None,
        }
    }

    pub(super) fn method_not_allowed(allow: &'static str) -> Self {
        Self {
            details: Details::Allow(allow),
            ..ErrorKind::MethodNotAllowed.into()
        }
    }

    pub(super) fn with_cause(kind: ErrorKind, cause: String) -> Self {
        Self {
            cause: Some(cause),
            ..kind.into()
        }
    }

    /// The headers of the response, except for its length.
    pub(super) fn headers(&self) -> HeaderMap {
        let mut headers = json_headers();
        if let Some(challenge) = self.kind.challenge() {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static(challenge));
        }
        if let Some(seconds) = self.retry_after_s {
            headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        match &self.details {
            Details::None => {}
            Details::Allow(methods) => {
                headers.insert(ALLOW, HeaderValue::from_static(methods));
            }
            Details::Scope(scope) => {
                let challenge = format!(
                    r#"Bearer realm="plantstore", error="insufficient_scope", scope="{scope}""#
                );
                let challenge = HeaderValue::try_from(challenge);
                let challenge = challenge.expect("a scope has printable ASCII characters only");
                headers.insert(WWW_AUTHENTICATE, challenge);
            }
            Details::RateLimit(allowance) => rate_limit::describe(*allowance, &mut headers),
        }
        headers
    }

    pub(super) fn body(&self) -> Vec<u8> {
        let body = json!({ "error": self.kind.code(), "message": self.message });
        body.to_string().into_bytes()
    }

    pub(super) fn response(&self) -> Response {
        let mut response = Response::new(Full::from(self.body()));
        *response.status_mut() = self.kind.status();
        *response.headers_mut() = self.headers();
        response
    }
}

impl From<ErrorKind> for ApiError {
    fn from(kind: ErrorKind) -> Self {
        Self::new(kind, kind.message())
    }
}

impl From<AuthError> for ApiError {
    fn from(error: AuthError) -> Self {
        match error {
            AuthError::UnknownToken | AuthError::RevokedToken => ErrorKind::UnknownToken.into(),
            AuthError::ExpiredToken => ErrorKind::ExpiredToken.into(),
            AuthError::InvalidJwt(reason) => Self::new(
                ErrorKind::UnknownToken,
                format!("The token is not valid: {reason}."),
            ),
            AuthError::ExpiredJwt => Self::new(
                ErrorKind::ExpiredToken,
                "The token has expired; get a new one from the identity provider.",
            ),
            AuthError::InsufficientScope(scope) => Self {
                details: Details::Scope(scope),
                ..ErrorKind::InsufficientScope.into()
            },
            AuthError::ProviderUnreachable(cause) => {
                Self::with_cause(ErrorKind::ProviderUnreachable, cause)
            }
            AuthError::RateLimited(allowance) => {
                let message = format!(
                    "The token is limited to {} requests per second; \
                     wait for the time in Retry-After.",
                    allowance.per_second
                );
                Self {
                    retry_after_s: Some(allowance.retry_after_s),
                    details: Details::RateLimit(allowance),
                    ..Self::new(ErrorKind::TooManyRequests, message)
                }
            }
            AuthError::TooManyFailures(allowance) => Self {
                retry_after_s: Some(allowance.retry_after_s),
                details: Details::RateLimit(allowance),
                ..ErrorKind::TooManyFailures.into()
            },
            AuthError::Store { failure, cause } => Self {
                cause: Some(cause),
                ..AddError::Store(failure).into()
            },
        }
    }
}

impl From<Invalid> for ApiError {
    fn from(invalid: Invalid) -> Self {
        let kind = match invalid {
            Invalid::NotJson(_) => ErrorKind::NotJson,
            Invalid::NotAPlant(_) => ErrorKind::InvalidPlant,
        };
        let problem = kind.message().trim_end_matches('.');
        Self {
            // It names members, and has no values.
            cause: Some(invalid.to_string()),
            ..Self::new(kind, format!("{problem}: {invalid}."))
        }
    }
}

impl From<AddError> for ApiError {
    fn from(error: AddError) -> Self {
        match error {
            AddError::Conflict => ErrorKind::Conflict.into(),
            AddError::Store(Failure::Busy) => ErrorKind::Busy.into(),
            AddError::Store(Failure::Full) => ErrorKind::StoreFull.into(),
            AddError::Store(Failure::Unavailable | Failure::Unusable) => {
                ErrorKind::Unavailable.into()
            }
            AddError::Store(Failure::Unknown | Failure::Fatal) => ErrorKind::UnknownOutcome.into(),
            AddError::Store(Failure::Damaged) => {
                let cause = "the stored plant is damaged: run `plantstore check`, restore a backup";
                Self::with_cause(ErrorKind::Internal, cause.to_owned())
            }
        }
    }
}
