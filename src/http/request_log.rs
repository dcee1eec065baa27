//! Around every request: its id, one line in the log, and a response even if the handler panics.
//! The line has no body, no query and no token, and is short whatever the client sends. Lines of rejected and of
//! unauthenticated requests have a limit of their own: they can neither fill the log nor push out lines of others.

use std::any::Any;
use std::borrow::Cow;
use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, OnceLock};
use std::time::{Duration, Instant};

use axum::body::HttpBody;
use axum::http::header::CONNECTION;
use axum::http::{HeaderName, HeaderValue, Request};
use axum::response::{IntoResponse, Response};
use futures_util::FutureExt;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::sleep_until;

use crate::http::error::{ApiError, Logged};
use crate::http::trace_context::TraceContext;
use crate::metrics::{Answers, micros};
use crate::telemetry::{Throttle, Verdict};

/// The header that carries the id of a request, both ways.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The longest id that is taken from a client.
const REQUEST_ID_LEN_MAX: usize = 128;

/// The most bytes of a method or a path in the log.
const LOGGED_BYTES_MAX: usize = 256;

/// At most so many lines a second are about rejected and unauthenticated requests; the others are counted.
const LIMITED_LINES_MAX: u32 = 100;
static LIMITED: Throttle = Throttle::new(LIMITED_LINES_MAX, Duration::from_secs(1));

/// What is found out about a request on its way, by whoever finds it out.
#[derive(Clone, Default)]
pub struct Notes(Arc<Noted>);

#[derive(Default)]
struct Noted {
    caller: OnceLock<Arc<str>>,
    body_read: AtomicBool,
}

impl Notes {
    /// Names the caller.
    pub fn set_caller(&self, name: Arc<str>) {
        let _ = self.0.caller.set(name);
    }

    /// Nothing of this request is left on the connection.
    pub fn set_body_read(&self) {
        self.0.body_read.store(true, Ordering::Relaxed);
    }
}

/// Becomes true when the server wants its connections back: a response then asks for that, and bodies are no longer waited
/// for.
#[derive(Clone, Default)]
pub struct Draining(Arc<Drain>);

#[derive(Default)]
struct Drain {
    has_begun: AtomicBool,
    begun: Notify,
}

impl Draining {
    /// Asks for the connections.
    pub fn begin(&self) {
        self.0.has_begun.store(true, Ordering::SeqCst);
        self.0.begun.notify_waiters();
    }

    /// Waits until the server drains.
    pub async fn begun(&self) {
        let begun = self.0.begun.notified();
        if !self.0.has_begun.load(Ordering::SeqCst) {
            begun.await;
        }
    }
}

/// Has a request answered, logs it and counts it. This is around the router and not a layer of it, which would cost two
/// allocations for each request.
pub async fn log_request<B, F>(
    draining: &Draining,
    answers: &Answers,
    mut request: Request<B>,
    answer: impl FnOnce(Request<B>) -> F,
) -> Response
where
    B: HttpBody,
    F: Future<Output = Result<Response, Infallible>>,
{
    let start = Instant::now();
    let request_id = taken_id(&request).unwrap_or_else(new_request_id);
    let notes = Notes::default();
    notes
        .0
        .body_read
        .store(request.body().is_end_stream(), Ordering::Relaxed);
    request.extensions_mut().insert(notes.clone());
    let trace = TraceContext::of(request.headers());
    let method = request.method().clone();
    let path = shortened(request.uri().path()).into_owned();

    let answered = AssertUnwindSafe(answer(request)).catch_unwind().await;
    let mut response = match answered {
        Ok(Ok(response)) => response,
        Ok(Err(never)) => match never {},
        Err(panic) => ApiError::defect(panic_message(&*panic)).into_response(),
    };

    let headers = response.headers_mut();
    headers.insert(REQUEST_ID, request_id.clone());
    // A body that nobody read is in the way of the next request.
    if draining.0.has_begun.load(Ordering::Relaxed) || !notes.0.body_read.load(Ordering::Relaxed) {
        headers.insert(CONNECTION, HeaderValue::from_static("close"));
    }
    let logged = response.extensions().get::<Logged>();
    let line = Line {
        method: &shortened(method.as_str()),
        path: &path,
        status: response.status().as_u16(),
        error: logged.map(|logged| logged.number),
        cause: logged.and_then(|logged| logged.cause.as_deref()),
        duration_us: micros(start.elapsed()),
        token: notes.0.caller.get().map(|name| &**name),
        request_id: request_id.to_str().unwrap_or_default(),
        trace_id: trace.as_ref().map(TraceContext::trace_id),
        parent_id: trace.as_ref().map(TraceContext::parent_id),
    };
    answers.count(line.status, line.error, line.duration_us);
    log_line(&line);
    response
}

/// What is said of a request. A request that never became one has neither method nor path.
#[derive(Default)]
pub struct Line<'a> {
    /// As sent.
    pub method: &'a str,
    /// Without the query.
    pub path: &'a str,
    /// Of the answer.
    pub status: u16,
    /// The number in the answer's body.
    pub error: Option<u32>,
    /// What the client was not told.
    pub cause: Option<&'a str>,
    /// From the end of the head to the answer.
    pub duration_us: u64,
    /// The name of the token.
    pub token: Option<&'a str>,
    /// As returned.
    pub request_id: &'a str,
    /// Of the trace that the request is a part of.
    pub trace_id: Option<&'a str>,
    /// Of the caller's span in it.
    pub parent_id: Option<&'a str>,
}

impl Line<'_> {
    /// True if anyone can cause such a line at any rate: the request was rejected before its caller was known, or because
    /// of its token, or needs none. An error of ours is never limited.
    fn is_limited(&self) -> bool {
        match self.status {
            500.. => false,
            401 | 429 => true, // a token that is revoked or expired has a name too
            _ => self.token.is_none(),
        }
    }
}

/// True if the line fits the limit. Of a second with more, the number of lines that were left out is logged at its end.
fn is_within_limit() -> bool {
    match LIMITED.admit(Instant::now()) {
        Verdict::Log => return true,
        Verdict::Suppress(None) => {}
        Verdict::Suppress(Some(window_end)) => {
            if let Ok(runtime) = Handle::try_current() {
                runtime.spawn(async move {
                    sleep_until(window_end.into()).await;
                    log_suppressed();
                });
            }
        }
    }
    false
}

/// Logs how many lines were left out, if any were. To be called once more when all connections are closed.
pub fn log_suppressed() {
    let count = LIMITED.take_suppressed();
    if count > 0 {
        tracing::info!(
            count,
            "rejected and unauthenticated requests were not logged"
        );
    }
}

/// What a client has sent, as far as it is logged.
fn shortened(text: &str) -> Cow<'_, str> {
    if text.len() <= LOGGED_BYTES_MAX {
        return text.into();
    }
    let end = (0..=LOGGED_BYTES_MAX).rfind(|end| text.is_char_boundary(*end));
    format!("{}…", &text[..end.unwrap_or_default()]).into()
}

/// Writes the line: a warning when the fault is ours.
pub fn log_line(line: &Line<'_>) {
    if line.is_limited() && !is_within_limit() {
        return;
    }
    macro_rules! write_line {
        ($level:ident) => {
            tracing::$level!(
                target: "plantstore::request",
                method = line.method,
                path = line.path,
                status = line.status,
                error = line.error,
                cause = line.cause,
                duration_us = line.duration_us,
                token = line.token,
                request_id = line.request_id,
                trace_id = line.trace_id,
                parent_id = line.parent_id,
            )
        };
    }
    if line.status >= 500 {
        write_line!(warn);
    } else {
        write_line!(info);
    }
}

/// An id of ours: unlike any other of this process, and most likely of any other process.
pub fn new_request_id() -> HeaderValue {
    static NEXT: LazyLock<AtomicU64> = LazyLock::new(|| {
        let start = getrandom::u64().unwrap_or_else(|_| u64::from(std::process::id()) << 32);
        AtomicU64::new(start)
    });
    // Steps by an odd number visit every u64 once; this one makes neighbours look unlike.
    let id = NEXT.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
    HeaderValue::from_str(&format!("{id:016x}")).expect("hexadecimal digits are a header value")
}

/// The client's own id, if it can be trusted in a log and in a header.
fn taken_id<B>(request: &Request<B>) -> Option<HeaderValue> {
    let id = request.headers().get(REQUEST_ID)?;
    let sane = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.:/+=@".contains(byte);
    let fits = (1..=REQUEST_ID_LEN_MAX).contains(&id.len());
    (fits && id.as_bytes().iter().all(sane)).then(|| id.clone())
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without a message").to_owned()
}
