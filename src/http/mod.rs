//! The public interface: the route table. Below it, in the order in which a request meets them:
//! `connection`, `request_log`, `auth`, `tokens`, `create_plant`, `error`.

mod auth;
pub mod connection;
mod create_plant;
pub mod docs;
pub mod error;
mod request_log;
pub mod stream;
mod tokens;

use axum::Router;
use axum::extract::FromRef;
use axum::middleware::from_fn_with_state;
use axum::routing::{get, post};

pub use auth::Caller;
pub use create_plant::{BodyLimits, Created, JsonBody};
pub use request_log::Draining;
pub use tokens::Tokens;

use crate::writer::Writer;
use error::{ApiError, Kind};

/// What the handlers are given, each its own part.
#[derive(Clone)]
pub struct Parts {
    /// The way into the store.
    pub writer: Writer,
    /// Who may use it.
    pub tokens: Tokens,
    /// How much of a body is read.
    pub body_limits: BodyLimits,
    /// Whether connections should be closed.
    pub draining: Draining,
}

/// Every route there is.
pub fn router(parts: Parts) -> Router {
    let routes = Router::new()
        .route("/plants", post(create_plant::create_plant))
        .route("/openapi.json", get(docs::openapi_json))
        .route("/openapi.yaml", get(docs::openapi_yaml));
    with_layers(routes, parts)
}

/// What every route has around it: an `Error` for what it does not take, a request id, a line in
/// the log.
pub fn with_layers(routes: Router<Parts>, parts: Parts) -> Router {
    routes
        .fallback(no_such_path)
        .method_not_allowed_fallback(no_such_method)
        .layer(from_fn_with_state(
            parts.draining.clone(),
            request_log::log_request,
        ))
        .with_state(parts)
}

async fn no_such_path() -> ApiError {
    ApiError::new(
        Kind::NoSuchPath,
        "There is nothing at this path; plants are added with POST /plants.",
    )
}

async fn no_such_method() -> ApiError {
    ApiError::new(
        Kind::NoSuchMethod,
        "This path does not take that method; the Allow header lists those it takes.",
    )
}

impl FromRef<Parts> for Writer {
    fn from_ref(parts: &Parts) -> Self {
        parts.writer.clone()
    }
}

impl FromRef<Parts> for Tokens {
    fn from_ref(parts: &Parts) -> Self {
        parts.tokens.clone()
    }
}

impl FromRef<Parts> for BodyLimits {
    fn from_ref(parts: &Parts) -> Self {
        parts.body_limits
    }
}
