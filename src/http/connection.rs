//! One connection: hyper parses HTTP/1.1 from a `Stream`, the router responds. Every response is logged, also if a handler
//! panics, and while the server drains it closes the connection.

use std::any::Any;
use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use axum::Router;
use axum::body::HttpBody;
use axum::http::header::CONNECTION;
use axum::http::{HeaderValue, Request};
use axum::response::{IntoResponse, Response};
use futures_util::FutureExt;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpStream;

use crate::http::error::{ApiError, ErrorKind};
use crate::http::stream::{Activity, Progress, Stream};
use crate::http::{AppState, access_log};
use crate::shutdown::Phase;

/// The most bytes of a request line and its headers.
const HEADER_BYTES_MAX: usize = 16 << 10;

/// Serves one connection until either side closes it, or until the server closes its connections and the request in flight
/// has its response.
pub async fn serve(stream: TcpStream, router: Router, state: Arc<AppState>) {
    let progress = Progress::new();
    let stream = Stream::new(stream, Arc::clone(&state), progress.clone());
    let router = TowerToHyperService::new(router);
    let service = service_fn(async |request: Request<Incoming>| {
        progress.set(Activity::Responding);
        let handler = |request| router.call(request);
        let response = respond(&state, request, handler).await;
        progress.set(Activity::Idle);
        Ok::<_, Infallible>(response)
    });
    let connection = http1::Builder::new()
        // A client that has closed its sending side still gets its response.
        .half_close(true)
        .max_buf_size(4 * HEADER_BYTES_MAX)
        .max_header_size(HEADER_BYTES_MAX)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = &mut connection => ended,
        () = state.shutdown.reached(Phase::Closing) => {
            // Hyper would close at once although headers are arriving; the stream gives them a short timeout instead.
            if progress.activity() != Activity::ReadingHeaders {
                connection.as_mut().graceful_shutdown();
            }
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended early");
    }
}

/// Calls the handler and logs the response. This is a function around the router and not a layer of it, because a layer
/// would cost two allocations per request.
pub async fn respond<B, F>(
    state: &AppState,
    mut request: Request<B>,
    handler: impl FnOnce(Request<B>) -> F,
) -> Response
where
    B: HttpBody,
    F: Future<Output = Result<Response, Infallible>>,
{
    let entry = access_log::Entry::start(&mut request);
    let result = AssertUnwindSafe(handler(request)).catch_unwind().await;
    let mut response = match result {
        Ok(Ok(response)) => response,
        Ok(Err(never)) => match never {},
        Err(panic) => {
            ApiError::with_cause(ErrorKind::Internal, panic_message(&*panic)).into_response()
        }
    };
    // The rest of a body that was not read would be taken for the next request.
    if state.shutdown.is_draining() || !entry.is_body_read() {
        let close = HeaderValue::from_static("close");
        response.headers_mut().insert(CONNECTION, close);
    }
    entry.finish(&mut response, &state.metrics);
    response
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without a message").to_owned()
}
