//! The error catalogue: numbers, statuses and messages, and the conversions from the errors of other modules. A test
//! compares it with `openapi.yaml` and `docs/errors.md`.

use std::borrow::Cow;

use axum::Extension;
use axum::http::header::{CONNECTION, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use crate::auth::AuthError;
use crate::plant::Invalid;
use crate::store::{StoreError, chain};
use crate::writer::AddError;

macro_rules! catalogue {
    ($($kind:ident = $number:literal $when:literal,)+) => {
        /// The number is the status × 100 + n, and never changes its meaning.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Kind {
            $(#[doc = $when] $kind = $number,)+
        }

        impl Kind {
            pub const ALL: &[Kind] = &[$(Kind::$kind,)+];

            pub fn when(self) -> &'static str {
                match self { $(Kind::$kind => $when,)+ }
            }
        }
    };
}

catalogue! {
    NotHttp = 40000 "the request is not valid HTTP/1.1, or its body ends early",
    NotJson = 40001 "the body is not JSON",
    NotAPlant = 40002 "the body is JSON but not a NewPlant",
    BadCredentials = 40003 "the credentials are malformed or given twice",
    Conflict = 40009 "the id belongs to a different plant",
    BodyTooLarge = 40013 "the body is larger than the limit",
    NotJsonType = 40015 "the content type is not application/json, or the body is encoded",
    NoCredentials = 40100 "there are no bearer credentials",
    UnknownToken = 40101 "the token is unknown or revoked",
    ExpiredToken = 40102 "the token has expired",
    NoSuchPath = 40400 "no resource has this path",
    NoSuchMethod = 40500 "the path does not support this method",
    TooSlow = 40800 "the request did not arrive in time",
    TooMany = 42900 "the token exceeds its rate limit",
    HeadersTooLarge = 43100 "the request line and headers are larger than the limit",
    Defect = 50000 "an internal error, or the stored plant is damaged",
    Busy = 50300 "the service is too busy; nothing was stored",
    Unknown = 50301 "the store did not confirm the write; the plant may or may not be stored",
    StoreFull = 50302 "the disk is full, or the WAL has reached its limit; nothing was stored",
    Unavailable = 50303 "the store cannot be reached or used; nothing was stored",
}

impl Kind {
    pub fn number(self) -> u32 {
        self as u32
    }

    pub fn status(self) -> StatusCode {
        u16::try_from(self.number() / 100)
            .ok()
            .and_then(|status| StatusCode::from_u16(status).ok())
            .expect("a number of the catalogue is a status × 100 + n")
    }

    fn challenge(self) -> Option<&'static str> {
        match self {
            Self::BadCredentials => Some(r#"Bearer realm="plantstore", error="invalid_request""#),
            Self::NoCredentials => Some(r#"Bearer realm="plantstore""#),
            Self::UnknownToken | Self::ExpiredToken => {
                Some(r#"Bearer realm="plantstore", error="invalid_token""#)
            }
            _ => None,
        }
    }

    /// After these errors, unread bytes on the connection may be the rest of the rejected request.
    fn closes_connection(self) -> bool {
        matches!(
            self,
            Self::NotHttp | Self::BodyTooLarge | Self::TooSlow | Self::HeadersTooLarge
        )
    }
}

/// An error response.
#[derive(Debug)]
pub struct ApiError {
    kind: Kind,
    message: Cow<'static, str>,
    retry_after_s: Option<u64>,
    /// For the log only.
    cause: Option<String>,
}

/// What the access log writes about an error; an extension of the response.
#[derive(Debug, Clone)]
pub(super) struct LoggedError {
    pub(super) number: u32,
    pub(super) cause: Option<String>,
}

#[derive(Serialize)]
struct Body<'a> {
    error: u32,
    message: &'a str,
}

impl ApiError {
    /// The message says what is wrong, where, and what to do.
    pub(super) fn new(kind: Kind, message: impl Into<Cow<'static, str>>) -> Self {
        let retry_after_s = (kind.status() == StatusCode::SERVICE_UNAVAILABLE).then_some(1);
        Self {
            kind,
            message: message.into(),
            retry_after_s,
            cause: None,
        }
    }

    /// A panic, or a damaged plant.
    pub(super) fn defect(cause: String) -> Self {
        Self {
            cause: Some(cause),
            ..Self::new(
                Kind::Defect,
                "Internal error; the log of the service has the cause under this x-request-id.",
            )
        }
    }

    fn busy() -> Self {
        Self::new(
            Kind::Busy,
            "The service is too busy and nothing was stored; send the same plant again later.",
        )
    }

    fn unavailable() -> Self {
        Self::new(
            Kind::Unavailable,
            "The store cannot be reached or used at the moment and nothing was stored; \
             send the same plant again later.",
        )
    }

    fn caused_by(self, cause: String) -> Self {
        Self {
            cause: Some(cause),
            ..self
        }
    }

    pub(super) fn kind(&self) -> Kind {
        self.kind
    }

    /// The headers of the response, except for its length.
    pub(super) fn headers(&self) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(challenge) = self.kind.challenge() {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static(challenge));
        }
        if let Some(seconds) = self.retry_after_s {
            headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.kind.closes_connection() {
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        headers
    }

    pub(super) fn body(&self) -> Vec<u8> {
        let body = Body {
            error: self.kind.number(),
            message: &self.message,
        };
        serde_json::to_vec(&body).expect("two plain members can be written as JSON")
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let logged = LoggedError {
            number: self.kind.number(),
            cause: self.cause.clone(),
        };
        let response = (self.kind.status(), self.headers(), self.body());
        (Extension(logged), response).into_response()
    }
}

impl From<AuthError> for ApiError {
    fn from(error: AuthError) -> Self {
        match error {
            AuthError::UnknownToken => Self::new(
                Kind::UnknownToken,
                "The token is unknown or revoked; ask the operator for a new one.",
            ),
            AuthError::ExpiredToken => Self::new(
                Kind::ExpiredToken,
                "The token has expired; ask the operator for a new one.",
            ),
            AuthError::RateLimited {
                requests_per_second,
                retry_after_s,
            } => Self {
                retry_after_s: Some(retry_after_s),
                ..Self::new(
                    Kind::TooMany,
                    format!(
                        "The token is limited to {requests_per_second} requests per second; \
                         wait for the time in Retry-After."
                    ),
                )
            },
            AuthError::Store(error) => error.into(),
            AuthError::Panic(message) => Self::defect(message),
        }
    }
}

impl From<Invalid> for ApiError {
    fn from(invalid: Invalid) -> Self {
        match invalid {
            Invalid::NotJson(_) => {
                Self::new(Kind::NotJson, format!("The body is not JSON: {invalid}."))
            }
            Invalid::NotAPlant(_) => Self::new(
                Kind::NotAPlant,
                format!("The body is not a plant: {invalid}."),
            ),
        }
    }
}

impl From<AddError> for ApiError {
    fn from(error: AddError) -> Self {
        match error {
            AddError::Conflict => Self::new(
                Kind::Conflict,
                "The id belongs to a different plant, which is unchanged; use another id.",
            ),
            AddError::Busy => Self::busy(),
            AddError::Full => Self::new(
                Kind::StoreFull,
                "The store is full and nothing was stored; \
                 send the same plant again later, once there is room again.",
            ),
            AddError::Unavailable => Self::unavailable(),
            AddError::Unknown => Self::new(
                Kind::Unknown,
                "The plant may or may not have been stored; \
                 send the same plant again to find out, which is always safe.",
            ),
            AddError::Damaged => {
                Self::defect(format!("{error}: run `plantstore check`, restore a backup"))
            }
        }
    }
}

/// For reads, such as that of a token: nothing was stored. A read with an unknown outcome has failed because the store is
/// unavailable.
impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        let response = match &error {
            StoreError::Damaged(_) => return Self::defect(chain(&error)),
            StoreError::Busy(_) => Self::busy(),
            StoreError::Unknown(cause) | StoreError::Fatal(cause) => {
                return Self::unavailable().caused_by(chain(&**cause));
            }
            StoreError::Full(_) | StoreError::Unavailable(_) | StoreError::Unusable(_) => {
                Self::unavailable()
            }
        };
        response.caused_by(chain(&error))
    }
}
