//! The private listener: `/healthz`, `/readyz` and `/metrics`. It responds from the start of the process to its end, on a
//! thread of its own, whatever the load of the public listener. Each connection serves one request; at the limit the
//! oldest connection without a complete request is closed, so that idle connections cannot block a probe.

mod prometheus;

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::State;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::http::{Request, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Builder;
use tokio::sync::Semaphore;
use tokio::task::{AbortHandle, yield_now};
use tokio::time::{sleep, timeout};

use crate::logging::LineLimit;
use crate::metrics::Metrics;
use crate::store::{FileSizes, Location, file_sizes};
use crate::writer::HealthCheck;

pub(crate) use prometheus::Limits;
use prometheus::{Process, Scrape};

pub(crate) const CONNECTIONS_MAX: usize = 32;

/// For a whole connection.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(5);

/// Reading file sizes can block on a stuck disk.
const SYSTEM_TIMEOUT: Duration = Duration::from_secs(1);

const ACCEPT_RETRY: Duration = Duration::from_millis(20);
static ACCEPT_ERRORS: LineLimit = LineLimit::new(1, Duration::from_secs(10));

const TEXT: &str = "text/plain; charset=utf-8";
const PROMETHEUS_TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A clone is a pointer.
#[derive(Clone)]
pub(crate) struct Ops(Arc<Inner>);

struct Inner {
    metrics: Arc<Metrics>,
    location: Location,
    limits: Limits,
    /// Set when the public listener is open.
    health_check: OnceLock<HealthCheck>,
    is_draining: AtomicBool,
    /// One permit: if the disk is stuck, only one thread waits for it.
    system_reads: Arc<Semaphore>,
}

impl Ops {
    pub(crate) fn new(metrics: Arc<Metrics>, location: Location, limits: Limits) -> Self {
        Self(Arc::new(Inner {
            metrics,
            location,
            limits,
            health_check: OnceLock::new(),
            is_draining: AtomicBool::new(false),
            system_reads: Arc::new(Semaphore::new(1)),
        }))
    }

    pub(crate) fn set_serving(&self, health_check: HealthCheck) {
        let _ = self.0.health_check.set(health_check);
    }

    pub(crate) fn set_draining(&self) {
        self.0.is_draining.store(true, Ordering::Relaxed);
    }

    fn is_draining(&self) -> bool {
        self.0.is_draining.load(Ordering::Relaxed)
    }

    /// The health check of the store, or why adds are not accepted.
    fn serving(&self) -> Result<&HealthCheck, &'static str> {
        match self.0.health_check.get() {
            _ if self.is_draining() => Err("draining"),
            Some(health_check) => Ok(health_check),
            None => Err("starting"),
        }
    }

    /// Starts the thread, which runs until the process ends.
    pub(crate) fn start(self, listener: std::net::TcpListener) -> io::Result<()> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let listener = {
            let _guard = runtime.enter();
            TcpListener::from_std(listener)?
        };
        let serve = move || runtime.block_on(serve(listener, self.router()));
        let ops = thread::Builder::new().name("ops".to_owned());
        ops.spawn(serve).map(drop)
    }

    fn router(self) -> Router {
        Router::new()
            .route("/healthz", get(async || text(StatusCode::OK, "alive\n")))
            .route("/readyz", get(readyz))
            .route("/metrics", get(metrics))
            .fallback(async || {
                let message = "Not found; the paths are /healthz, /readyz and /metrics.\n";
                text(StatusCode::NOT_FOUND, message)
            })
            .method_not_allowed_fallback(async || {
                text(StatusCode::METHOD_NOT_ALLOWED, "Use GET.\n")
            })
            .with_state(self)
    }

    /// None if this read, or one before it, takes too long.
    async fn read_system(&self) -> Option<(Process, Option<FileSizes>)> {
        let permit = Arc::clone(&self.0.system_reads).try_acquire_owned().ok()?;
        let location = self.0.location.clone();
        let read = tokio::task::spawn_blocking(move || {
            let system = (Process::read(), file_sizes(&location));
            drop(permit);
            system
        });
        timeout(SYSTEM_TIMEOUT, read).await.ok()?.ok()
    }
}

async fn readyz(State(ops): State<Ops>) -> Response {
    let result = match ops.serving() {
        Ok(health_check) => health_check
            .check()
            .await
            .map_err(|reason| reason.to_string()),
        Err(reason) => Err(reason.to_owned()),
    };
    match result {
        Ok(()) => text(StatusCode::OK, "ready\n"),
        Err(reason) => text(
            StatusCode::SERVICE_UNAVAILABLE,
            format!("not ready: {reason}\n"),
        ),
    }
}

async fn metrics(State(ops): State<Ops>) -> Response {
    let (process, file_sizes) = ops.read_system().await.unzip();
    let scrape = Scrape {
        metrics: &ops.0.metrics,
        limits: ops.0.limits,
        is_ready: ops
            .serving()
            .is_ok_and(|health_check| health_check.result().is_ok()),
        is_draining: ops.is_draining(),
        queue_len: ops.0.health_check.get().map_or(0, HealthCheck::queue_len),
        process,
        file_sizes: file_sizes.flatten(),
    };
    let text = prometheus::exposition(&scrape);
    ([(CONTENT_TYPE, PROMETHEUS_TEXT)], text).into_response()
}

fn text(status: StatusCode, text: impl Into<String>) -> Response {
    let headers = [(CONTENT_TYPE, TEXT), (CACHE_CONTROL, "no-store")];
    (status, headers, text.into()).into_response()
}

struct Connection {
    task: AbortHandle,
    has_request: Arc<AtomicBool>,
}

async fn serve(listener: TcpListener, router: Router) {
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
                let task = serve_connection(stream, router.clone(), Arc::clone(&has_request));
                let task = tokio::spawn(task).abort_handle();
                open.push_back(Connection { task, has_request });
            }
            Err(error) => {
                evict(&mut open); // the process may have reached its limit of open files
                if ACCEPT_ERRORS.admit(Instant::now()).is_ok() {
                    tracing::warn!(%error, "cannot accept a connection to the private listener");
                }
                sleep(ACCEPT_RETRY).await;
            }
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

async fn serve_connection(stream: TcpStream, router: Router, has_request: Arc<AtomicBool>) {
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
        Err(_) => tracing::debug!("a connection to the private listener timed out"),
    }
}
