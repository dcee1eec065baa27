//! The routes of the private listener: `/healthz`, `/readyz` and `/metrics`.

mod prometheus;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::config::Settings;
use crate::metrics::Metrics;
use crate::shutdown::Shutdown;
use crate::writer::HealthCheck;

use prometheus::System;

/// Reading file sizes can block on a stuck disk.
const SYSTEM_TIMEOUT: Duration = Duration::from_secs(1);

const TEXT: &str = "text/plain; charset=utf-8";
const PROMETHEUS_TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The state behind the routes.
pub(crate) struct Ops {
    metrics: Arc<Metrics>,
    settings: Arc<Settings>,
    shutdown: Shutdown,
    /// Set when the public listener is open.
    health_check: OnceLock<HealthCheck>,
    /// One permit: if the disk is stuck, only one thread waits for it.
    system_reads: Arc<Semaphore>,
}

impl Ops {
    pub(crate) fn new(
        metrics: Arc<Metrics>,
        settings: Arc<Settings>,
        shutdown: Shutdown,
    ) -> Arc<Self> {
        Arc::new(Self {
            metrics,
            settings,
            shutdown,
            health_check: OnceLock::new(),
            system_reads: Arc::new(Semaphore::new(1)),
        })
    }

    pub(crate) fn set_serving(&self, health_check: HealthCheck) {
        let _ = self.health_check.set(health_check);
    }

    pub(crate) fn router(self: Arc<Self>) -> Router {
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

    /// The health check of the store, or why adds are not accepted.
    fn serving(&self) -> Result<&HealthCheck, &'static str> {
        if self.shutdown.is_draining() {
            return Err("draining");
        }
        self.health_check.get().ok_or("starting")
    }

    /// None if this read, or one before it, takes too long.
    async fn read_system(&self) -> Option<System> {
        let permit = Arc::clone(&self.system_reads).try_acquire_owned().ok()?;
        let location = self.settings.store.location.clone();
        let read = tokio::task::spawn_blocking(move || {
            let system = System::read(&location);
            drop(permit);
            system
        });
        timeout(SYSTEM_TIMEOUT, read).await.ok()?.ok()
    }
}

async fn readyz(State(ops): State<Arc<Ops>>) -> Response {
    let reason = match ops.serving() {
        Ok(store) => match store.check().await {
            Ok(()) => return text(StatusCode::OK, "ready\n"),
            Err(reason) => reason.to_string(),
        },
        Err(reason) => reason.to_owned(),
    };
    let reason = format!("not ready: {reason}\n");
    text(StatusCode::SERVICE_UNAVAILABLE, reason)
}

async fn metrics(State(ops): State<Arc<Ops>>) -> Response {
    let system = ops.read_system().await.unwrap_or_default();
    let text = prometheus::exposition(&ops, &system);
    ([(CONTENT_TYPE, PROMETHEUS_TEXT)], text).into_response()
}

fn text(status: StatusCode, text: impl Into<String>) -> Response {
    let headers = [(CONTENT_TYPE, TEXT), (CACHE_CONTROL, "no-store")];
    (status, headers, text.into()).into_response()
}
