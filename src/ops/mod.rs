//! The private listener: health, readiness and metrics. It responds from the start of the process to its end, on a thread
//! of its own, whatever the public listener does and however many silent connections it has itself.

mod connections;
mod page;
mod process;
mod readiness;

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::runtime::Builder;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::metrics::Metrics;
use crate::store::{Footprint, Location, footprint};
use crate::writer::Pulse;

pub use connections::CONNECTIONS_MAX;
pub use page::Limits;
use process::Process;
use readiness::Readiness;

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

    /// Serves connections on a thread of its own, which ends with the process.
    pub fn start(self, listener: std::net::TcpListener) -> io::Result<()> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let listener = {
            let _here = runtime.enter();
            TcpListener::from_std(listener)?
        };
        let serve = move || runtime.block_on(connections::serve(listener, self.router()));
        let ops = thread::Builder::new().name("ops".to_owned());
        ops.spawn(serve).map(drop)
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
