//! One connection: hyper parses HTTP/1.1 from a `Stream`, a handler responds. Every response is logged, also if a handler
//! panics, and while the server drains it closes the connection.

use std::any::Any;
use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures_util::FutureExt;
use hyper::Request;
use hyper::body::{Body, Bytes, Incoming};
use hyper::header::{CONNECTION, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use crate::http::error::{ApiError, ErrorKind};
use crate::http::stream::{Activity, Progress, Stream};
use crate::http::{AppState, Handled, RequestContext, Response, access_log};
use crate::shutdown::Phase;

/// The most bytes of a request line and its headers.
const HEADER_BYTES_MAX: usize = 16 << 10;

/// Serves one connection until either side closes it, or until the server closes its connections and the request in flight
/// has its response.
pub async fn serve<F>(
    stream: TcpStream,
    state: Arc<AppState>,
    handler: fn(Arc<AppState>, Request<Incoming>, RequestContext) -> F,
) where
    F: Future<Output = Handled>,
{
    let progress = Progress::new();
    let stream = Stream::new(stream, Arc::clone(&state), progress.clone());
    // In a box, because hyper keeps room for it while the connection is idle.
    let service = service_fn(|request: Request<Incoming>| {
        Box::pin(async {
            progress.set(Activity::Responding);
            let response = respond(&state, request, handler).await;
            progress.set(Activity::Idle);
            Ok::<_, Infallible>(response)
        })
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

/// Calls the handler and logs the response.
pub async fn respond<B, F>(
    state: &Arc<AppState>,
    request: Request<B>,
    handler: impl FnOnce(Arc<AppState>, Request<B>, RequestContext) -> F,
) -> Response
where
    B: Body<Data = Bytes>,
    F: Future<Output = Handled>,
{
    let entry = access_log::Entry::start(&request);
    let context = RequestContext {
        token_name: None,
        is_body_read: request.body().is_end_stream(),
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
    if state.shutdown.is_draining() || !context.is_body_read {
        let close = HeaderValue::from_static("close");
        response.headers_mut().insert(CONNECTION, close);
    }
    entry.finish(&mut response, error.as_ref(), &context, &state.metrics);
    response
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without a message").to_owned()
}
