//! The private listener: health, readiness and figures. It answers from the first moment of the process to its last, and
//! whatever is asked here costs the adds next to nothing.

mod page;
mod process;
mod readiness;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

use crate::metrics::Metrics;
use crate::store::{Footprint, Location, footprint};
use crate::writer::Pulse;

pub use page::Limits;
use process::Process;
use readiness::Readiness;

/// More wait to be accepted. A connection is for one question, and for no longer than that.
const CONNECTIONS_MAX: usize = 32;
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);

/// For what the kernel says of files and of ourselves; a disk can be stuck.
const LOOK_TIMEOUT: Duration = Duration::from_secs(1);

const TEXT: &str = "text/plain; charset=utf-8";
const PROMETHEUS_TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// What is watched. A clone is a pointer.
#[derive(Clone)]
pub struct Ops(Arc<Watched>);

struct Watched {
    metrics: Arc<Metrics>,
    readiness: Readiness,
    location: Location,
    limits: Limits,
    /// One look at the files at a time.
    look: Arc<Semaphore>,
}

impl Ops {
    /// Of a server that is starting.
    pub fn new(metrics: Arc<Metrics>, location: Location, limits: Limits) -> Self {
        Self(Arc::new(Watched {
            metrics,
            readiness: Readiness::default(),
            location,
            limits,
            look: Arc::new(Semaphore::new(1)),
        }))
    }

    /// The public listener is open, and behind it is this writer.
    pub fn serving(&self, pulse: Pulse) {
        self.0.readiness.serving(pulse);
    }

    /// The public listener is closed.
    pub fn draining(&self) {
        self.0.readiness.draining();
    }

    /// Answers whoever connects, until it is dropped.
    pub async fn serve(self, listener: TcpListener) {
        let router = self.router();
        let slots = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        loop {
            let slot = Arc::clone(&slots).acquire_owned().await;
            let slot = slot.expect("the semaphore is never closed");
            match listener.accept().await {
                Ok((stream, _)) => {
                    let router = router.clone();
                    tokio::spawn(async move {
                        answer(stream, router).await;
                        drop(slot);
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection of a watcher");
                    sleep(Duration::from_millis(20)).await;
                }
            }
        }
    }

    fn router(self) -> Router {
        Router::new()
            .route(
                "/healthz",
                get(async || say(StatusCode::OK, "alive\n".to_owned())),
            )
            .route("/readyz", get(readyz))
            .route("/metrics", get(metrics))
            .fallback(async || {
                let paths =
                    "There is nothing at this path; there are /healthz, /readyz and /metrics.\n";
                say(StatusCode::NOT_FOUND, paths.to_owned())
            })
            .method_not_allowed_fallback(async || {
                let method = "This path is only read; use GET.\n";
                say(StatusCode::METHOD_NOT_ALLOWED, method.to_owned())
            })
            .with_state(self)
    }

    /// None if the kernel takes too long, this time or since the last time.
    async fn look(&self) -> Option<(Process, Option<Footprint>)> {
        let turn = Arc::clone(&self.0.look).try_acquire_owned().ok()?;
        let location = self.0.location.clone();
        let look = tokio::task::spawn_blocking(move || {
            let seen = (Process::look(), footprint(&location));
            drop(turn);
            seen
        });
        timeout(LOOK_TIMEOUT, look).await.ok()?.ok()
    }
}

/// `GET /readyz`: whether adds can be taken.
async fn readyz(State(ops): State<Ops>) -> Response {
    match ops.0.readiness.check().await {
        Ok(()) => say(StatusCode::OK, "ready\n".to_owned()),
        Err(reason) => {
            let text = format!("not ready: {reason}\n");
            say(StatusCode::SERVICE_UNAVAILABLE, text)
        }
    }
}

/// `GET /metrics`: everything that is counted.
async fn metrics(State(ops): State<Ops>) -> Response {
    let seen = ops.look().await;
    let state = ops.0.readiness.state();
    let text = page::write(&ops.0.metrics, &state, ops.0.limits, seen);
    ([(CONTENT_TYPE, PROMETHEUS_TEXT)], text).into_response()
}

fn say(status: StatusCode, text: String) -> Response {
    let headers = [(CONTENT_TYPE, TEXT), (CACHE_CONTROL, "no-store")];
    (status, headers, text).into_response()
}

async fn answer(stream: TcpStream, router: Router) {
    let connection = http1::Builder::new()
        .keep_alive(false)
        .max_buf_size(16 << 10)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    match timeout(CONNECTION_TIMEOUT, connection).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "a connection of a watcher ended early"),
        Err(_) => tracing::debug!("a connection of a watcher took too long"),
    }
}
