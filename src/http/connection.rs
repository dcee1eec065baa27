//! What HTTP/1.1 and HTTP/2 share: the state of a connection, and the call of the handler. Every response is logged, also if
//! a handler panics.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use futures_util::FutureExt;
use hyper::body::{Body, Bytes};
use hyper::header::{CONNECTION, HeaderValue, STRICT_TRANSPORT_SECURITY, VARY};
use hyper::{Request, Version};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::http::client::Peer;
use crate::http::error::{ApiError, ErrorKind};
use crate::http::{AppState, Handled, RequestContext, Response, access_log, cors, rate_limit};

/// The most bytes of a request line and its headers.
pub(super) const HEADER_BYTES_MAX: usize = 16 << 10;

/// Browsers use TLS for a year.
const HSTS: HeaderValue = HeaderValue::from_static("max-age=31536000");

/// What is known of a connection; shared by its handlers, its stream and the limits of the listener.
pub struct ConnectionState {
    pub(crate) peer: Peer,
    progress: Mutex<Progress>,
    is_encrypted: AtomicBool,
    /// True once a request had a valid token.
    is_authenticated: AtomicBool,
    /// The number of open connections that have authenticated.
    authenticated: Arc<AtomicUsize>,
}

#[derive(Clone, Copy)]
pub(super) struct Progress {
    pub(super) activity: Activity,
    pub(super) since: Instant,
    /// When the first byte of the request arrived, or the connection was opened. Not for HTTP/2, whose requests overlap.
    pub(super) request_started: Instant,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Activity {
    ReadingHeaders,
    /// The headers are complete; the body has timeouts of its own.
    Responding,
    /// The response is ready to be sent. If the first bytes of the next request came along with the previous one, hyper
    /// has them and the stream does not see them: such a request has the idle timeout.
    Idle,
}

impl ConnectionState {
    pub fn new(peer: Peer, authenticated: Arc<AtomicUsize>) -> Arc<Self> {
        let now = Instant::now();
        Arc::new(Self {
            peer,
            progress: Mutex::new(Progress {
                activity: Activity::ReadingHeaders,
                since: now,
                request_started: now,
            }),
            is_encrypted: AtomicBool::new(false),
            is_authenticated: AtomicBool::new(false),
            authenticated,
        })
    }

    pub(super) fn progress(&self) -> Progress {
        *self.progress.lock()
    }

    /// Returns when the request started.
    pub(super) fn set(&self, activity: Activity) -> Instant {
        let mut progress = self.progress.lock();
        progress.set(activity);
        progress.request_started
    }

    /// Notes that bytes have arrived.
    pub(super) fn received(&self) {
        let mut progress = self.progress.lock();
        if progress.activity == Activity::Idle {
            progress.set(Activity::ReadingHeaders);
        }
    }

    pub(crate) fn activity(&self) -> Activity {
        self.progress.lock().activity
    }

    /// Notes that the client uses TLS.
    pub(crate) fn set_encrypted(&self) {
        self.is_encrypted.store(true, Ordering::Relaxed);
    }

    pub(super) fn set_authenticated(&self) {
        if !self.is_authenticated() {
            let was_authenticated = self.is_authenticated.swap(true, Ordering::Relaxed);
            if !was_authenticated {
                self.authenticated.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    pub(crate) fn is_authenticated(&self) -> bool {
        self.is_authenticated.load(Ordering::Relaxed)
    }
}

impl Drop for ConnectionState {
    fn drop(&mut self) {
        if self.is_authenticated() {
            self.authenticated.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Progress {
    fn set(&mut self, activity: Activity) {
        let before = std::mem::replace(&mut self.activity, activity);
        self.since = Instant::now();
        // A request that came along with the one before it starts when it is handled.
        let is_next = before == Activity::Idle && activity != Activity::Idle;
        if is_next || activity == Activity::ReadingHeaders {
            self.request_started = self.since;
        }
    }
}

/// Calls the handler and logs the response. `first_byte_at` is when the request began to arrive.
pub async fn respond<B, F>(
    state: &Arc<AppState>,
    connection: &Arc<ConnectionState>,
    request: Request<B>,
    first_byte_at: Instant,
    handler: impl FnOnce(Arc<AppState>, Request<B>, RequestContext) -> F,
) -> Response
where
    B: Body<Data = Bytes>,
    F: Future<Output = Handled>,
{
    let (client, client_text) = connection
        .peer
        .client(request.headers(), &state.limits.trusted_proxies);
    let started = std::time::Instant::now();
    let entry = access_log::Entry::start(&request, client_text, started);
    let has_connection_header = request.version() < Version::HTTP_2;
    // Only hyper knows where chunks end: what follows them is not taken for a request.
    let is_chunked = request.body().size_hint().exact().is_none();
    let origin = cors::allowed_origin(request.headers(), &state.limits.cors_origins);
    let context = RequestContext {
        connection: Arc::clone(connection),
        client,
        first_byte_at,
        started,
        is_body_read: request.body().is_end_stream(),
        token_name: None,
        allowance: None,
    };
    let response = AssertUnwindSafe(handler(Arc::clone(state), request, context.clone()));
    let response = response.catch_unwind().await;
    let Handled { result, context } = response.unwrap_or_else(|panic| Handled {
        result: Err(ApiError::with_cause(
            ErrorKind::Internal,
            panic_message(&*panic),
        )),
        context,
    });
    let (mut response, error) = match result {
        Ok(response) => (response, None),
        Err(error) => (error.response(), Some(error)),
    };
    // The rest of a body that was not read would be taken for the next request.
    let is_last = state.shutdown.is_draining()
        || !context.is_body_read
        || is_chunked
        || error
            .as_ref()
            .is_some_and(|error| error.kind.closes_connection());
    if has_connection_header && is_last {
        let close = HeaderValue::from_static("close");
        response.headers_mut().insert(CONNECTION, close);
    }
    if connection.is_encrypted.load(Ordering::Relaxed) {
        let headers = response.headers_mut();
        headers.insert(STRICT_TRANSPORT_SECURITY, HSTS);
    }
    if let Some(allowance) = context.allowance {
        rate_limit::describe(allowance, response.headers_mut());
    }
    if !state.limits.cors_origins.is_empty() {
        // Also for requests without an allowed origin: a cache must not use their responses for others.
        let headers = response.headers_mut();
        headers.insert(VARY, HeaderValue::from_static("origin"));
    }
    if let Some(origin) = origin {
        cors::allow(origin, &mut response);
    }
    entry.finish(&mut response, error.as_ref(), &context, &state.metrics);
    response
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without a message").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_request_starts_again_with_the_next_one_only() {
        let now = Instant::now();
        let mut progress = Progress {
            activity: Activity::Responding,
            since: now,
            request_started: now,
        };
        // The second time because the client has received a part of the response.
        progress.set(Activity::Idle);
        progress.set(Activity::Idle);
        assert_eq!(progress.request_started, now);
        progress.set(Activity::ReadingHeaders);
        assert!(progress.request_started > now);
    }
}
