//! The public interface: the route table. Below it, in the order in which a request meets them:
//! `connection`, `request_log`, `trace_context`, `auth`, `tokens`, `create_plant`, `error`.

mod auth;
pub mod connection;
mod create_plant;
pub mod docs;
pub mod error;
mod request_log;
mod state;
pub mod stream;
mod tokens;
mod trace_context;

use std::sync::Arc;

use axum::Router;
use axum::routing::{get, post};

pub use auth::Caller;
pub use create_plant::{Created, JsonBody};
pub use request_log::{Draining, log_request, log_suppressed};
pub use state::{BodyLimits, Parts};
pub use tokens::Tokens;

use error::{ApiError, Kind};
use state::State;

/// Every route there is.
pub fn router(parts: Parts) -> Router {
    let routes = Router::new()
        .route("/plants", post(create_plant::create_plant))
        .route("/openapi.json", get(docs::openapi_json))
        .route("/openapi.yaml", get(docs::openapi_yaml))
        .route("/", get(docs::to_page))
        .route("/docs", get(docs::page))
        .route("/docs/", get(docs::up_to_page))
        .route("/docs/page.css", get(docs::style))
        .route("/docs/page.js", get(docs::script))
        .route("/docs/icon.svg", get(docs::icon));
    complete(routes, parts)
}

/// Gives the routes what they need, and an `Error` for what none of them takes.
pub fn complete(routes: Router<State>, parts: Parts) -> Router {
    routes
        .fallback(no_such_path)
        .method_not_allowed_fallback(no_such_method)
        .with_state(Arc::new(parts))
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
