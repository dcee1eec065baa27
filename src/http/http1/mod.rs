//! An HTTP/1.1 connection: hyper parses requests from a `Stream`. While the server drains, each response closes the connection.

mod framing;
mod stream;

use std::convert::Infallible;
use std::sync::Arc;

use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::http::connection::{Activity, ConnectionState, HEADER_BYTES_MAX, respond};
use crate::http::{AppState, Handled, RequestContext};
use crate::shutdown::Phase;
use stream::Stream;
pub(crate) use stream::too_many_connections;

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
            let first_byte_at = connection.set(Activity::Responding);
            let response = respond(&state, &connection, request, first_byte_at, handler).await;
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
