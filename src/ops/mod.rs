//! The routes of the private listener: `/healthz`, `/readyz` and `/metrics`.

mod prometheus;

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use http_body_util::Full;
use hyper::body::Bytes;
use hyper::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, HOST, HeaderMap, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
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

    pub(crate) async fn respond<B>(&self, request: &Request<B>) -> Response<Full<Bytes>> {
        let (method, path) = (request.method(), request.uri().path());
        if !self.is_expected_host(request.headers()) {
            let problem = "The private listener does not know this host name; see --ops-host.\n";
            return text(StatusCode::MISDIRECTED_REQUEST, problem);
        }
        let is_known = ["/healthz", "/readyz", "/metrics"].contains(&path);
        if is_known && ![Method::GET, Method::HEAD].contains(method) {
            let mut response = text(StatusCode::METHOD_NOT_ALLOWED, "Use GET.\n");
            let allowed = HeaderValue::from_static("GET,HEAD");
            response.headers_mut().insert(ALLOW, allowed);
            return response;
        }
        match path {
            "/healthz" => text(StatusCode::OK, "alive\n"),
            "/readyz" => self.readyz().await,
            "/metrics" => self.metrics().await,
            _ => text(
                StatusCode::NOT_FOUND,
                "Not found; the paths are /healthz, /readyz and /metrics.\n",
            ),
        }
    }

    /// False if a browser may have sent the request for a web page of another site, whose name its owner has pointed at this
    /// address (DNS rebinding). That is not possible with an address, or with a name without a dot.
    fn is_expected_host(&self, headers: &HeaderMap) -> bool {
        let mut hosts = headers.get_all(HOST).iter();
        let Some(host) = hosts.next() else {
            return true; // no browser
        };
        let is_expected = |host: &str| {
            let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
            host.parse::<IpAddr>().is_ok()
                || host.parse::<SocketAddr>().is_ok()
                || host.starts_with('[')
                || !name.contains('.')
                || self
                    .settings
                    .ops_host
                    .iter()
                    .any(|known| known.eq_ignore_ascii_case(name))
        };
        hosts.next().is_none() && host.to_str().is_ok_and(is_expected)
    }

    async fn readyz(&self) -> Response<Full<Bytes>> {
        let reason = match self.serving() {
            Ok(store) => match store.check().await {
                Ok(()) if self.are_tokens_readable() => return text(StatusCode::OK, "ready\n"),
                Ok(()) => "the tokens cannot be read".to_owned(),
                Err(reason) => reason.to_string(),
            },
            Err(reason) => reason.to_owned(),
        };
        let reason = format!("not ready: {reason}\n");
        text(StatusCode::SERVICE_UNAVAILABLE, reason)
    }

    async fn metrics(&self) -> Response<Full<Bytes>> {
        let system = self.read_system().await.unwrap_or_default();
        let mut response = text(StatusCode::OK, prometheus::exposition(self, &system));
        let media_type = HeaderValue::from_static(PROMETHEUS_TEXT);
        response.headers_mut().insert(CONTENT_TYPE, media_type);
        response
    }

    fn are_tokens_readable(&self) -> bool {
        self.metrics.are_tokens_readable.load(Ordering::Relaxed)
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

fn text(status: StatusCode, text: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(text.into()));
    *response.status_mut() = status;
    for (name, value) in [(CONTENT_TYPE, TEXT), (CACHE_CONTROL, "no-store")] {
        let value = HeaderValue::from_static(value);
        response.headers_mut().insert(name, value);
    }
    response
}
