//! One connection: hyper speaks HTTP/1.1 on a `Stream`, the router answers.

use std::convert::Infallible;
use std::sync::Arc;

use axum::Router;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpStream;
use tokio::sync::watch;

use crate::http::request_log::{Draining, log_request};
use crate::http::stream::{Deadlines, Progress, Stream};
use crate::metrics::Answers;

/// The most bytes of a request line and its headers.
const HEAD_BYTES_MAX: usize = 16 << 10;

/// Serves one connection until either side ends it, or until `stop` changes and what is in flight
/// has been answered: a request whose head is not complete then is not waited for. What is answered is counted.
pub async fn serve(
    stream: TcpStream,
    (router, answers): (Router, Arc<Answers>),
    deadlines: Deadlines,
    draining: Draining,
    mut stop: watch::Receiver<()>,
) {
    let progress = Progress::default();
    let stream = Stream::new(stream, deadlines, progress.clone(), Arc::clone(&answers));
    let router = TowerToHyperService::new(router);
    let service = service_fn(async |request: Request<Incoming>| {
        progress.answering();
        let answer = |request| router.call(request);
        let response = log_request(&draining, &answers, request, answer).await;
        progress.answered();
        Ok::<_, Infallible>(response)
    });
    let connection = http1::Builder::new()
        // A peer that has sent all it wants to send still gets its answer.
        .half_close(true)
        .max_buf_size(4 * HEAD_BYTES_MAX)
        .max_header_size(HEAD_BYTES_MAX)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = &mut connection => ended,
        _ = stop.changed() => {
            // A head that has begun to arrive is given its moment by the stream; hyper would close at once.
            if !progress.drain() {
                connection.as_mut().graceful_shutdown();
            }
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended early");
    }
}
