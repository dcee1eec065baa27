//! Connections to the private listener, each for one request. They are accepted at once: if there are too many, the oldest
//! one without a complete request is closed, so that silent ones keep nobody out.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, yield_now};
use tokio::time::{sleep, timeout};

use crate::telemetry::{Throttle, Verdict};

/// The most connections at a time.
pub const CONNECTIONS_MAX: usize = 32;

/// For a whole connection.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(5);

/// After an error of `accept`.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);
static ACCEPT_ERRORS: Throttle = Throttle::new(1, Duration::from_secs(10));

/// A connection that is open.
struct Connection {
    task: AbortHandle,
    has_request: Arc<AtomicBool>,
}

/// Serves the router until it is dropped.
pub async fn serve(listener: TcpListener, router: Router) {
    let mut open = VecDeque::<Connection>::new();
    loop {
        let accepted = listener.accept().await;
        open.retain(|connection| !connection.task.is_finished());
        match accepted {
            Ok((stream, _)) => {
                if open.len() >= CONNECTIONS_MAX {
                    evict(&mut open);
                }
                let has_request = Arc::new(AtomicBool::new(false));
                let task = respond(stream, router.clone(), Arc::clone(&has_request));
                let task = tokio::spawn(task).abort_handle();
                open.push_back(Connection { task, has_request });
            }
            Err(error) => {
                evict(&mut open); // perhaps there are too many open files
                if ACCEPT_ERRORS.admit(Instant::now()) == Verdict::Log {
                    tracing::warn!(%error, "cannot accept a connection to the private listener");
                }
                sleep(ACCEPT_PAUSE).await;
            }
        }
        // Connections that are open come first: those that are waiting could be many.
        yield_now().await;
    }
}

fn evict(open: &mut VecDeque<Connection>) {
    let is_silent = |connection: &Connection| !connection.has_request.load(Ordering::Relaxed);
    let oldest = open.iter().position(is_silent).unwrap_or(0);
    if let Some(connection) = open.remove(oldest) {
        connection.task.abort();
    }
}

async fn respond(stream: TcpStream, router: Router, has_request: Arc<AtomicBool>) {
    let router = TowerToHyperService::new(router);
    let service = service_fn(|request: Request<Incoming>| {
        has_request.store(true, Ordering::Relaxed);
        router.call(request)
    });
    let connection = http1::Builder::new()
        .keep_alive(false)
        .max_buf_size(16 << 10)
        .serve_connection(TokioIo::new(stream), service);
    match timeout(CONNECTION_TIMEOUT, connection).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => {
            tracing::debug!(%error, "a connection to the private listener ended early");
        }
        Err(_) => tracing::debug!("a connection to the private listener took too long"),
    }
}
