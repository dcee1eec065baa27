//! The public interface: the route table and the state of its handlers. A request passes through `stream` (below hyper),
//! `connection`, `access_log`, this table, `auth` and `create_plant`; every failure becomes an `ApiError` of `error`.

mod access_log;
mod auth;
pub(crate) mod connection;
mod create_plant;
pub(crate) mod docs;
pub(crate) mod error;
pub(crate) mod stream;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::routing::post;

pub(crate) use access_log::{log_suppressed, report_suppressed_lines};
pub use auth::Caller;
pub use create_plant::{JsonBody, PlantResponse};

use crate::auth::TokenCache;
use crate::metrics::HttpMetrics;
use crate::shutdown::Shutdown;
use crate::writer::Writer;
use error::{ApiError, ErrorKind};

/// What the connections and handlers of one runtime share.
pub struct AppState {
    pub writer: Writer,
    pub tokens: Arc<TokenCache>,
    pub metrics: Arc<HttpMetrics>,
    pub shutdown: Shutdown,
    /// For the request line and headers, from their first byte or from the start of the connection.
    pub header_timeout: Duration,
    pub body_bytes_max: usize,
    /// From the end of the headers to the end of the body.
    pub body_timeout: Duration,
    /// For the next request, and for the client to receive more of a response.
    pub idle_timeout: Duration,
}

pub(crate) fn router(state: Arc<AppState>) -> Router {
    let routes = Router::new().route("/plants", post(create_plant::create_plant));
    let routes = routes.merge(docs::routes());
    with_fallbacks(routes, state)
}

/// Adds the state and the responses to unknown paths and methods. Benchmarks and tests use it with routes of their own.
pub fn with_fallbacks(routes: Router<Arc<AppState>>, state: Arc<AppState>) -> Router {
    routes
        .fallback(async || ApiError::from(ErrorKind::NotFound))
        .method_not_allowed_fallback(async || ApiError::from(ErrorKind::MethodNotAllowed))
        .with_state(state)
}
