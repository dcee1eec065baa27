//! One connection: hyper parses HTTP/1.1 from a `Stream`, a handler responds. Every response is logged, also if a handler
//! panics, and while the server drains it closes the connection.

use std::any::Any;
use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;

use futures_util::FutureExt;
use hyper::Request;
use hyper::body::{Body, Bytes, Incoming};
use hyper::header::{CONNECTION, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::http::error::{ApiError, ErrorKind};
use crate::http::stream::{Activity, ConnectionState, Stream};
use crate::http::{AppState, Handled, RequestContext, Response, access_log, cors, rate_limit};
use crate::shutdown::Phase;

/// The most bytes of a request line and its headers.
const HEADER_BYTES_MAX: usize = 16 << 10;

/// Serves one connection until either side closes it, or until the server closes its connections and the request in flight
/// has its response.
pub async fn serve<T, F>(
    stream: T,
    state: Arc<AppState>,
    connection: Arc<ConnectionState>,
    handler: fn(Arc<AppState>, Request<Incoming>, RequestContext) -> F,
) where
    T: AsyncRead + AsyncWrite + Unpin,
    F: Future<Output = Handled>,
{
    let stream = Stream::new(stream, Arc::clone(&state), Arc::clone(&connection));
    // In a box, because hyper keeps room for it while the connection is idle.
    let service = service_fn(|request: Request<Incoming>| {
        Box::pin(async {
            connection.set(Activity::Responding);
            let response = respond(&state, &connection, request, handler).await;
            connection.set(Activity::Idle);
            Ok::<_, Infallible>(response)
        })
    });
    let served = http1::Builder::new()
        // A client that has closed its sending side still gets its response.
        .half_close(true)
        .max_buf_size(4 * HEADER_BYTES_MAX)
        .max_header_size(HEADER_BYTES_MAX)
        .serve_connection(TokioIo::new(stream), service);
    let mut served = std::pin::pin!(served);
    let ended = tokio::select! {
        ended = &mut served => ended,
        () = state.shutdown.reached(Phase::Closing) => {
            // Hyper would close at once although headers are arriving; the stream gives them a short timeout instead.
            if connection.activity() != Activity::ReadingHeaders {
                served.as_mut().graceful_shutdown();
            }
            served.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended early");
    }
}

/// Calls the handler and logs the response.
pub async fn respond<B, F>(
    state: &Arc<AppState>,
    connection: &Arc<ConnectionState>,
    request: Request<B>,
    handler: impl FnOnce(Arc<AppState>, Request<B>, RequestContext) -> F,
) -> Response
where
    B: Body<Data = Bytes>,
    F: Future<Output = Handled>,
{
    let (client, client_text) = connection
        .peer
        .client(request.headers(), &state.limits.trusted_proxies);
    let started = Instant::now();
    let entry = access_log::Entry::start(&request, client_text, started);
    // Only hyper knows where chunks end: what follows them is not taken for a request.
    let is_chunked = request.body().size_hint().exact().is_none();
    let origin = cors::allowed_origin(request.headers(), &state.limits.cors_origins);
    let context = RequestContext {
        connection: Arc::clone(connection),
        client,
        started,
        is_body_read: request.body().is_end_stream(),
        token_name: None,
        allowance: None,
    };
    let response = AssertUnwindSafe(handler(Arc::clone(state), request, context.clone()));
    let response = response.catch_unwind().await;
    let Handled { result, context } = response.unwrap_or_else(|panic| Handled {
        result: Err(ApiError::with_cause(
            ErrorKind::Internal,
            panic_message(&*panic),
        )),
        context,
    });
    let (mut response, error) = match result {
        Ok(response) => (response, None),
        Err(error) => (error.response(), Some(error)),
    };
    // The rest of a body that was not read would be taken for the next request.
    if state.shutdown.is_draining() || !context.is_body_read || is_chunked {
        let close = HeaderValue::from_static("close");
        response.headers_mut().insert(CONNECTION, close);
    }
    if let Some(allowance) = context.allowance {
        rate_limit::describe(allowance, response.headers_mut());
    }
    if let Some(origin) = origin {
        cors::allow(origin, &mut response);
    }
    entry.finish(&mut response, error.as_ref(), &context, &state.metrics);
    response
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without a message").to_owned()
}
