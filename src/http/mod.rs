//! The public interface: routing, and the state of the handlers. A request passes through `stream` (below hyper), `connection`,
//! `access_log`, the routing here, `auth` and `create_plant`; every failure becomes an `ApiError` of `error`.

mod access_log;
mod auth;
pub(crate) mod connection;
mod create_plant;
pub(crate) mod docs;
pub(crate) mod error;
pub(crate) mod stream;

use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Body, Bytes};
use hyper::{Method, Request};
use tokio::sync::Semaphore;

pub(crate) use access_log::{log_suppressed, report_suppressed_lines};
pub use create_plant::{large_body_permits, plant_response, read_plant};

use crate::auth::RuntimeTokens;
use crate::metrics::HttpMetrics;
use crate::shutdown::Shutdown;
use crate::writer::Writer;
use error::ApiError;

pub type Response = hyper::Response<Full<Bytes>>;

/// What the connections and handlers of one runtime share.
pub struct AppState {
    pub writer: Writer,
    pub tokens: RuntimeTokens,
    pub metrics: Arc<HttpMetrics>,
    pub shutdown: Shutdown,
    /// For the request line and headers, from their first byte or from the start of the connection.
    pub header_timeout: Duration,
    pub body_bytes_max: usize,
    /// Shared by all runtimes.
    pub large_body_permits: Arc<Semaphore>,
    /// From the end of the headers to the end of the body.
    pub body_timeout: Duration,
    /// For the next request, and for the client to receive more of a response.
    pub idle_timeout: Duration,
}

/// What is known of a request besides its response, for the access log and for keeping the connection open.
#[derive(Clone, Default)]
pub struct RequestContext {
    pub token_name: Option<Arc<str>>,
    /// Also if there is no body.
    pub is_body_read: bool,
}

/// What a handler returns. It owns its arguments, so that it can be a plain function pointer.
pub struct Handled {
    pub result: Result<Response, ApiError>,
    pub context: RequestContext,
}

/// Routes a request to its handler. Two places to go do not need a router.
pub(crate) async fn handle<B>(
    state: Arc<AppState>,
    request: Request<B>,
    mut context: RequestContext,
) -> Handled
where
    B: Body<Data = Bytes> + Unpin,
{
    let result = match (request.uri().path(), request.method()) {
        ("/plants", &Method::POST) => {
            create_plant::create_plant(&state, request, &mut context).await
        }
        ("/plants", _) => Err(ApiError::method_not_allowed("POST")),
        (path, method) => docs::respond(method, path, request.headers()),
    };
    Handled { result, context }
}
