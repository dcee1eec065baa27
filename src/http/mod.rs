//! The public interface: routing, and the state of the handlers. A request passes through `http1` or `http2`, `connection`,
//! `access_log`, the routing here, `auth` and `create_plant`; every failure becomes an `ApiError` of `error`.

mod access_log;
mod auth;
pub(crate) mod client;
pub(crate) mod connection;
mod cors;
mod create_plant;
pub(crate) mod docs;
pub(crate) mod error;
mod host;
pub(crate) mod http1;
pub(crate) mod http2;
mod large_bodies;
mod rate_limit;
mod socket;

use std::net::IpAddr;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use http_body_util::Full;
use hyper::body::{Body, Bytes};
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue, X_CONTENT_TYPE_OPTIONS};
use hyper::{HeaderMap, Method, Request};
use ipnet::IpNet;

use access_log::REQUEST_ID;
pub(crate) use access_log::{log_suppressed, report_suppressed_lines};
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use auth::{Credentials, credentials};
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use create_plant::decode_request;
pub use create_plant::{plant_response, read_plant};
pub(crate) use large_bodies::LargeBodies;

use crate::auth::{Allowance, AuthFailures, RuntimeTokens};
use crate::metrics::HttpMetrics;
use crate::shutdown::Shutdown;
use crate::writer::Writer;
use connection::ConnectionState;
use error::ApiError;

pub type Response = hyper::Response<Full<Bytes>>;

/// The headers of a response with JSON. Cloning them takes half the time of inserting each; the request id is replaced.
fn json_headers() -> HeaderMap {
    static HEADERS: LazyLock<HeaderMap> = LazyLock::new(|| {
        let headers = [
            (CONTENT_TYPE, "application/json"),
            (CACHE_CONTROL, "no-store"),
            (X_CONTENT_TYPE_OPTIONS, "nosniff"),
            (REQUEST_ID, ""),
        ];
        let headers = headers.map(|(name, value)| (name, HeaderValue::from_static(value)));
        HeaderMap::from_iter(headers)
    });
    HEADERS.clone()
}

/// What the connections and handlers of one runtime share.
pub struct AppState {
    pub writer: Writer,
    pub tokens: RuntimeTokens,
    pub metrics: Arc<HttpMetrics>,
    pub shutdown: Shutdown,
    pub limits: Arc<Limits>,
}

/// What clients may do. Shared by all runtimes.
pub struct Limits {
    /// For the request line and headers, from their first byte or from the start of the connection.
    pub header_timeout: Duration,
    /// From the end of the headers to the end of the body.
    pub body_timeout: Duration,
    /// From the first byte of a request to the last one of the response.
    pub request_timeout: Duration,
    /// For the next request, and for the client to receive more of a response.
    pub idle_timeout: Duration,
    pub body_bytes_max: usize,
    pub(crate) large_bodies: LargeBodies,
    /// Their headers say who the client is.
    pub trusted_proxies: Vec<IpNet>,
    pub auth_failures: AuthFailures,
    /// The origins of scripts that may send requests.
    pub cors_origins: Vec<HeaderValue>,
}

/// Long timeouts, for tests and benchmarks.
impl Default for Limits {
    fn default() -> Self {
        let timeout = Duration::from_secs(60);
        Self {
            header_timeout: timeout,
            body_timeout: timeout,
            request_timeout: timeout,
            idle_timeout: timeout,
            body_bytes_max: 1 << 20,
            large_bodies: LargeBodies::new(1 << 20),
            trusted_proxies: Vec::new(),
            auth_failures: AuthFailures::default(),
            cors_origins: Vec::new(),
        }
    }
}

/// What is known of a request besides its response, for the access log and for keeping the connection open.
#[derive(Clone)]
pub struct RequestContext {
    pub(crate) connection: Arc<ConnectionState>,
    /// The address of the client, which may be behind a proxy.
    pub(crate) client: IpAddr,
    /// When the request began to arrive.
    pub(crate) first_byte_at: tokio::time::Instant,
    /// When its headers were complete.
    pub(crate) started: Instant,
    pub token_name: Option<Arc<str>>,
    /// Also if there is no body.
    pub is_body_read: bool,
    /// If the token is valid and has a rate limit.
    pub(crate) allowance: Option<Allowance>,
}

/// What a handler returns. It owns its arguments, so that it can be a plain function pointer.
pub struct Handled {
    pub result: Result<Response, ApiError>,
    pub context: RequestContext,
}

/// Rejects a request that was sent without TLS to a listener that uses it.
pub(crate) async fn require_tls<B>(
    _: Arc<AppState>,
    _: Request<B>,
    context: RequestContext,
) -> Handled {
    let message = "This port uses TLS; send the request to https://.";
    let result = Err(ApiError::new(error::ErrorKind::MalformedRequest, message));
    Handled { result, context }
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
    if let Err(error) = host::check_host(&request) {
        let result = Err(error);
        return Handled { result, context };
    }
    let result = match (request.uri().path(), request.method()) {
        ("/plants", &Method::POST) => {
            create_plant::create_plant(&state, request, &mut context).await
        }
        ("/plants", _) => cors::preflight(&request, &state.limits.cors_origins)
            .ok_or_else(|| ApiError::method_not_allowed("POST")),
        (path, method) => docs::respond(method, path, request.headers()),
    };
    Handled { result, context }
}
