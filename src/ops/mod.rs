//! The routes of the private listener: `/healthz`, `/readyz`, `/metrics`, and the status page.

mod history;
mod prometheus;
mod status_page;
mod system;

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use http_body_util::Full;
use hyper::body::Bytes;
use hyper::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, HOST, HeaderMap, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::config::Settings;
use crate::logging::warnings;
use crate::metrics::Metrics;
use crate::shutdown::Shutdown;
use crate::web_page::SECURITY_HEADERS;
use crate::writer::HealthCheck;

use history::{History, Reading};
use status_page::{FILES, Points, Status};
use system::System;

/// Reading file sizes can block on a stuck disk.
const SYSTEM_TIMEOUT: Duration = Duration::from_secs(1);

/// The time between two readings of the history.
const READING_INTERVAL: Duration = Duration::from_secs(1);

const HTML: &str = "text/html; charset=utf-8";
const JSON: &str = "application/json";
const TEXT: &str = "text/plain; charset=utf-8";
const PROMETHEUS_TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Without the files of the status page.
const PATHS: [&str; 6] = [
    "/",
    "/status.txt",
    "/status.json",
    "/healthz",
    "/readyz",
    "/metrics",
];

/// The state behind the routes.
pub(crate) struct Ops {
    metrics: Arc<Metrics>,
    settings: Arc<Settings>,
    shutdown: Shutdown,
    /// Set when the public listener is open.
    health_check: OnceLock<HealthCheck>,
    /// One permit: if the disk is stuck, only one thread waits for it.
    system_reads: Arc<Semaphore>,
    history: Mutex<History>,
}

impl Ops {
    pub(crate) fn new(
        metrics: Arc<Metrics>,
        settings: Arc<Settings>,
        shutdown: Shutdown,
    ) -> Arc<Self> {
        let reading = Reading::new(&metrics, 0, System::default());
        Arc::new(Self {
            history: Mutex::new(History::new(reading)),
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
        let file = FILES.iter().find(|(at, ..)| *at == path);
        let is_known = file.is_some() || PATHS.contains(&path);
        if is_known && ![Method::GET, Method::HEAD].contains(method) {
            let mut response = text(StatusCode::METHOD_NOT_ALLOWED, "Use GET.\n");
            let allowed = HeaderValue::from_static("GET,HEAD");
            response.headers_mut().insert(ALLOW, allowed);
            return response;
        }
        match path {
            "/" => ok(HTML, self.status(&self.history.lock()).html()),
            "/status.txt" => ok(TEXT, self.status(&self.history.lock()).text()),
            "/status.json" => self.points(request.uri().query().unwrap_or_default()),
            "/healthz" => ok(TEXT, "alive\n"),
            "/readyz" => self.readyz().await,
            "/metrics" => self.metrics().await,
            _ => {
                if let Some((_, media_type, content)) = file {
                    return ok(media_type, *content);
                }
                let problem = format!("Not found; the paths are {}.\n", PATHS.join(", "));
                text(StatusCode::NOT_FOUND, problem)
            }
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
        if let Ok(store) = self.serving() {
            // Waits for a result if the last one is too old.
            let _ = store.check().await;
        }
        match self.readiness() {
            Ok(()) => ok(TEXT, "ready\n"),
            Err(reason) => {
                let reason = format!("not ready: {reason}\n");
                text(StatusCode::SERVICE_UNAVAILABLE, reason)
            }
        }
    }

    /// By the last result of the store.
    fn readiness(&self) -> Result<(), String> {
        let result = self.serving()?.result();
        result.map_err(|reason| reason.to_string())?;
        if self.are_tokens_readable() {
            Ok(())
        } else {
            Err("the tokens cannot be read".to_owned())
        }
    }

    async fn metrics(&self) -> Response<Full<Bytes>> {
        let system = self.read_system().await.unwrap_or_default();
        ok(PROMETHEUS_TEXT, prometheus::exposition(self, &system))
    }

    fn status<'a>(&'a self, history: &'a History) -> Status<'a> {
        Status {
            not_ready: self.readiness().err(),
            started_at: self.metrics.started_at,
            history,
            settings: &self.settings.shown,
            warnings: warnings(),
        }
    }

    /// `interval_s` selects the resolution, `first` is the number of the first point.
    fn points(&self, query: &str) -> Response<Full<Bytes>> {
        let value = |name: &str| -> Option<u64> {
            let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
            pairs.find(|(key, _)| *key == name)?.1.parse().ok()
        };
        let history = self.history.lock();
        let interval_s = value("interval_s").unwrap_or(1);
        let ring = (history.0.iter()).find(|ring| ring.interval.as_secs() == interval_s);
        let Some(ring) = ring else {
            return text(StatusCode::BAD_REQUEST, "interval_s must be 1 or 10.\n");
        };
        let first = value("first").unwrap_or_default();
        let points = Points::new(ring, first, self.metrics.started_at);
        let json =
            serde_json::to_string(&points).expect("numbers and names can be written as JSON");
        ok(JSON, json)
    }

    /// Fills the history of the status page, for as long as the process runs.
    pub(crate) async fn record_history(&self) {
        let mut ticks = interval(READING_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        loop {
            ticks.tick().await;
            let system = self.read_system().await.unwrap_or_default();
            let queue_len = self.queue_len();
            let reading = Reading::new(&self.metrics, queue_len, system);
            self.history.lock().record(reading);
        }
    }

    fn queue_len(&self) -> usize {
        let health_check = self.health_check.get();
        health_check.map_or(0, HealthCheck::queue_len)
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
    let mut response = ok(TEXT, text);
    *response.status_mut() = status;
    response
}

fn ok(media_type: &'static str, content: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(content.into()));
    let own = [(CONTENT_TYPE, media_type), (CACHE_CONTROL, "no-store")];
    for (name, value) in own.into_iter().chain(SECURITY_HEADERS) {
        let value = HeaderValue::from_static(value);
        response.headers_mut().insert(name, value);
    }
    response
}
