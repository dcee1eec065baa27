//! The private listener. It responds from the start of the process to its end, on a thread of its own, whatever the load of
//! the public listener. Each connection serves one request; at the limit the oldest connection without a complete request
//! is closed, so that idle connections cannot block a probe.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Builder;
use tokio::task::{AbortHandle, yield_now};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

use crate::ops::Ops;
use crate::server::listener::accept;

pub(super) const CONNECTIONS_MAX: usize = 32;

/// For a whole connection.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(5);

struct Connection {
    task: AbortHandle,
    has_request: Arc<AtomicBool>,
}

/// Starts the thread, which runs until the process ends.
pub(super) fn start(
    listener: TcpListener,
    ops: Arc<Ops>,
    tls: Option<TlsAcceptor>,
) -> io::Result<()> {
    let listener = listener.into_std()?;
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let serve = move || {
        runtime.block_on(async {
            let listener = TcpListener::from_std(listener)?;
            let history = Arc::clone(&ops);
            tokio::spawn(async move { history.record_history().await });
            serve(listener, ops, tls).await
        })
    };
    let thread = thread::Builder::new().name("ops".to_owned());
    thread.spawn(serve).map(drop)
}

async fn serve(listener: TcpListener, ops: Arc<Ops>, tls: Option<TlsAcceptor>) -> io::Result<()> {
    let mut open = VecDeque::<Connection>::new();
    loop {
        let accepted = accept(&listener, "private").await;
        open.retain(|connection| !connection.task.is_finished());
        // After an error, the process may have reached its limit of open files.
        if accepted.is_none() || open.len() >= CONNECTIONS_MAX {
            evict(&mut open);
        }
        if let Some((stream, _)) = accepted {
            let has_request = Arc::new(AtomicBool::new(false));
            let task = accept_connection(
                stream,
                tls.clone(),
                Arc::clone(&ops),
                Arc::clone(&has_request),
            );
            let task = tokio::spawn(task).abort_handle();
            open.push_back(Connection { task, has_request });
        }
        // Requests on open connections take precedence over further connections.
        yield_now().await;
    }
}

fn evict(open: &mut VecDeque<Connection>) {
    let is_idle = |connection: &Connection| !connection.has_request.load(Ordering::Relaxed);
    let oldest = open.iter().position(is_idle).unwrap_or(0);
    if let Some(connection) = open.remove(oldest) {
        connection.task.abort();
    }
}

async fn accept_connection(
    stream: TcpStream,
    tls: Option<TlsAcceptor>,
    ops: Arc<Ops>,
    has_request: Arc<AtomicBool>,
) {
    let served = async {
        match tls {
            None => serve_connection(stream, ops, has_request).await,
            Some(tls) => {
                let stream = tls.accept(stream).await?;
                serve_connection(stream, ops, has_request).await
            }
        }
    };
    match timeout(CONNECTION_TIMEOUT, served).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => {
            tracing::debug!(%error, "a connection to the private listener ended early");
        }
        Err(_) => tracing::debug!("a connection to the private listener timed out"),
    }
}

async fn serve_connection(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    ops: Arc<Ops>,
    has_request: Arc<AtomicBool>,
) -> io::Result<()> {
    let service = service_fn(async |request: Request<Incoming>| {
        has_request.store(true, Ordering::Relaxed);
        Ok::<_, Infallible>(ops.respond(&request).await)
    });
    let connection = http1::Builder::new()
        .keep_alive(false)
        .max_buf_size(16 << 10)
        .serve_connection(TokioIo::new(stream), service);
    connection.await.map_err(io::Error::other)
}
