//! An HTTP/2 connection: hyper parses requests from a `Stream`, and each of them has a task. Timeouts are those of HTTP/1.1; where
//! they cannot be for a single request, they close the connection.

mod frames;
mod in_flight;
mod request_body;
mod stream;

use std::convert::Infallible;
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::{Body, Incoming};
use hyper::header::CONTENT_LENGTH;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper::{Method, Request};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, sleep_until};

use crate::http::connection::{ConnectionState, HEADER_BYTES_MAX, respond};
use crate::http::error::ErrorKind;
use crate::http::{AppState, Handled, RequestContext, Response};
use crate::shutdown::Phase;
use in_flight::{InFlight, TrackedBody};
pub(crate) use request_body::RequestBody;
use stream::Stream;

/// The most requests in flight on a connection.
const STREAMS_MAX: u32 = 256;

/// How much of its bodies a client may send before they are read: of one, and of all on a connection.
const STREAM_WINDOW_BYTES: u32 = 64 << 10;
const CONNECTION_WINDOW_BYTES: u32 = 256 << 10;

/// The most bytes of responses that wait for their client, for each request.
const SEND_BUFFER_BYTES: usize = 64 << 10;

/// Headers above this size are rejected by hyper, with an empty response; from `HEADER_BYTES_MAX` by us, with an error body.
const HEADER_LIST_BYTES_MAX: u32 = 64 << 10;

/// As many as hyper accepts with HTTP/1.1.
const HEADERS_MAX: usize = 100;

/// How long a client may take to close a connection without requests after it was asked to.
const GOAWAY_GRACE: Duration = Duration::from_millis(500);

/// For the 408 that a request gets at its timeout, before the connection is closed.
const RESPONSE_GRACE: Duration = Duration::from_secs(1);

/// Serves one connection until either side closes it, or until the server drains and the requests in flight have their responses.
pub async fn serve<T, F>(
    stream: T,
    state: Arc<AppState>,
    connection: Arc<ConnectionState>,
    handler: fn(Arc<AppState>, Request<RequestBody>, RequestContext) -> F,
) where
    T: AsyncRead + AsyncWrite + Unpin,
    F: Future<Output = Handled> + Send + 'static,
{
    let in_flight = InFlight::new(Arc::clone(&connection));
    let stream = Stream::new(stream, Arc::clone(&state), Arc::clone(&in_flight));
    let service = service_fn(|request: Request<Incoming>| {
        let mut in_flight = in_flight.start();
        let (state, connection) = (Arc::clone(&state), Arc::clone(&connection));
        async move {
            let is_too_large =
                request.headers().len() > HEADERS_MAX || header_bytes(&request) > HEADER_BYTES_MAX;
            let is_head = request.method() == Method::HEAD;
            let request = request.map(RequestBody::new);
            let handle = move |state, request, context| async move {
                if is_too_large {
                    let result = Err(ErrorKind::HeadersTooLarge.into());
                    return Handled { result, context };
                }
                handler(state, request, context).await
            };
            let mut response =
                respond(&state, &connection, request, in_flight.since(), handle).await;
            if is_head {
                remove_body(&mut response);
            }
            in_flight.set_served();
            Ok::<_, Infallible>(response.map(|body| TrackedBody::new(body, in_flight)))
        }
    });
    let served = http2::Builder::new(TokioExecutor::new())
        .max_concurrent_streams(STREAMS_MAX)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_send_buf_size(SEND_BUFFER_BYTES)
        .max_header_list_size(HEADER_LIST_BYTES_MAX)
        .serve_connection(TokioIo::new(stream), service);
    let mut served = std::pin::pin!(served);
    let mut going_away_since = None;
    let draining = state.shutdown.reached(Phase::Draining);
    let mut draining = std::pin::pin!(draining);
    loop {
        let (now, deadline) = (Instant::now(), in_flight.deadline(&state, going_away_since));
        if deadline <= now {
            if going_away_since.is_some() || in_flight.has_requests() {
                tracing::debug!("a connection timed out");
                return;
            }
            served.as_mut().graceful_shutdown();
            going_away_since = Some(now);
            continue;
        }
        // A later event may have an earlier deadline, but not a shorter timeout.
        let timeout_min = match going_away_since {
            Some(_) => GOAWAY_GRACE,
            None => shortest_timeout(&state),
        };
        let look_again = deadline.min(now + timeout_min);
        tokio::select! {
            ended = &mut served => {
                if let Err(error) = ended {
                    if is_flood(&error) {
                        state.metrics.http2_floods.add(1);
                    }
                    tracing::debug!(%error, "a connection ended early");
                }
                return;
            }
            () = &mut draining, if going_away_since.is_none() => {
                served.as_mut().graceful_shutdown();
                going_away_since = Some(Instant::now());
            }
            () = sleep_until(look_again) => {}
        }
    }
}

/// Leaves only the length of the body: hyper does that for HTTP/1.1 alone.
fn remove_body(response: &mut Response) {
    let body = std::mem::take(response.body_mut());
    if let Some(len @ 1..) = body.size_hint().exact() {
        response.headers_mut().insert(CONTENT_LENGTH, len.into());
    }
}

fn shortest_timeout(state: &AppState) -> Duration {
    let limits = &state.limits;
    let shorter = limits.header_timeout.min(limits.idle_timeout);
    shorter.min(limits.request_timeout)
}

/// True if a limit of the HTTP/2 library has ended the connection: too many requests that are reset at once, or too many pieces of
/// headers. `Stream` counts the other floods.
fn is_flood(error: &hyper::Error) -> bool {
    let error = error.source();
    let error = error.and_then(|error| error.downcast_ref::<h2::Error>());
    error.is_some_and(|error| {
        error.is_library() && error.reason() == Some(h2::Reason::ENHANCE_YOUR_CALM)
    })
}

/// What the same request would need with HTTP/1.1.
fn header_bytes<B>(request: &Request<B>) -> usize {
    let headers = request.headers().iter();
    let headers = headers.map(|(name, value)| name.as_str().len() + value.len() + 4);
    let authority = request.uri().authority();
    let target = request.uri().path_and_query();
    request.method().as_str().len()
        + authority.map_or(0, |authority| authority.as_str().len())
        + target.map_or(0, |target| target.as_str().len())
        + headers.sum::<usize>()
}
