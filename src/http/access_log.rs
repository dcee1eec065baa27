//! The access log: one line per response, also for bytes that are not a valid request. A line has no body, no query and
//! no token, and its length is limited. Lines about rejected and unauthenticated requests have a rate limit of their own,
//! so that they can neither fill the log nor displace other lines.

use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, OnceLock};
use std::time::{Duration, Instant};

use axum::body::HttpBody;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Request};
use axum::response::Response;
use tokio::runtime::Handle;
use tokio::time::sleep_until;

use crate::http::error::{ErrorKind, LoggedError};
use crate::logging::{LineLimit, Suppressed};
use crate::metrics::{HttpMetrics, micros};

/// Sent by the client or generated here; in the response and in the log.
pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// The longest request id that is accepted from a client.
const REQUEST_ID_LEN_MAX: usize = 128;

/// The most bytes of a method or a path in the log.
const LOGGED_BYTES_MAX: usize = 256;

static REJECTED_LINES: LineLimit = LineLimit::new(100, Duration::from_secs(1));

/// What extractors find out about a request; an extension of the request.
#[derive(Clone, Default)]
pub(super) struct RequestContext(Arc<Notes>);

#[derive(Default)]
struct Notes {
    token_name: OnceLock<Arc<str>>,
    is_body_read: AtomicBool,
}

impl RequestContext {
    pub(super) fn set_token_name(&self, name: Arc<str>) {
        let _ = self.0.token_name.set(name);
    }

    pub(super) fn set_body_read(&self) {
        self.0.is_body_read.store(true, Ordering::Relaxed);
    }
}

/// The log entry of a request that is being handled.
pub(super) struct Entry {
    started: Instant,
    request_id: HeaderValue,
    notes: RequestContext,
    traceparent: Option<HeaderValue>,
    method: Method,
    path: String,
}

impl Entry {
    pub(super) fn start<B: HttpBody>(request: &mut Request<B>) -> Self {
        let started = Instant::now();
        let request_id = request.headers().get(REQUEST_ID);
        let request_id = request_id.filter(|id| is_acceptable_id(id)).cloned();
        let request_id = request_id.unwrap_or_else(new_request_id);
        let notes = RequestContext::default();
        if request.body().is_end_stream() {
            notes.set_body_read();
        }
        request.extensions_mut().insert(notes.clone());
        Self {
            started,
            request_id,
            notes,
            traceparent: traceparent(request.headers()).cloned(),
            method: request.method().clone(),
            path: shortened(request.uri().path()).into_owned(),
        }
    }

    pub(super) fn is_body_read(&self) -> bool {
        self.notes.0.is_body_read.load(Ordering::Relaxed)
    }

    /// Logs and counts the response, and adds the request id to it.
    pub(super) fn finish(self, response: &mut Response, metrics: &HttpMetrics) {
        response
            .headers_mut()
            .insert(REQUEST_ID, self.request_id.clone());
        let trace_ids = self.traceparent.as_ref().and_then(trace_ids);
        let error = response.extensions().get::<LoggedError>();
        let line = Line {
            method: &shortened(self.method.as_str()),
            path: &self.path,
            status: response.status().as_u16(),
            error_code: error.map(|error| error.code),
            cause: error.and_then(|error| error.cause.as_deref()),
            duration_us: micros(self.started.elapsed()),
            token_name: self.notes.0.token_name.get().map(|name| &**name),
            request_id: self.request_id.to_str().unwrap_or_default(),
            trace_id: trace_ids.map(|(trace_id, _)| trace_id),
            parent_id: trace_ids.map(|(_, parent_id)| parent_id),
        };
        metrics.response(line.status, line.error_code, line.duration_us);
        line.write();
    }
}

/// Logs and counts the response to bytes that could not be parsed as a request, and generates its request id.
pub(super) fn log_rejection(error: ErrorKind, metrics: &HttpMetrics) -> HeaderValue {
    let request_id = new_request_id();
    let line = Line {
        status: error.status().as_u16(),
        error_code: Some(error.code()),
        request_id: request_id.to_str().unwrap_or_default(),
        ..Line::default()
    };
    metrics.count_response(line.status, line.error_code);
    line.write();
    request_id
}

#[derive(Default)]
struct Line<'a> {
    method: &'a str,
    /// Without the query.
    path: &'a str,
    status: u16,
    error_code: Option<u32>,
    /// Details that are not in the response.
    cause: Option<&'a str>,
    /// From the end of the headers to the response.
    duration_us: u64,
    token_name: Option<&'a str>,
    request_id: &'a str,
    trace_id: Option<&'a str>,
    parent_id: Option<&'a str>,
}

impl Line<'_> {
    /// Server errors are warnings.
    fn write(&self) {
        if self.is_limited() && !is_within_limit() {
            return;
        }
        macro_rules! write_line {
            ($level:ident) => {
                tracing::$level!(
                    target: "plantstore::access_log",
                    // As a field and not as a format string, which would be formatted for every request.
                    message = "request",
                    method = self.method,
                    path = self.path,
                    status = self.status,
                    error_code = self.error_code,
                    cause = self.cause,
                    duration_us = self.duration_us,
                    token_name = self.token_name,
                    request_id = self.request_id,
                    trace_id = self.trace_id,
                    parent_id = self.parent_id,
                )
            };
        }
        if self.status >= 500 {
            write_line!(warn);
        } else {
            write_line!(info);
        }
    }

    /// True if any client can cause such a line at any rate: the request needs no token, or was rejected before its token
    /// was known or because of its token. Server errors are never limited.
    fn is_limited(&self) -> bool {
        match self.status {
            500.. => false,
            401 | 429 => true, // a revoked or expired token has a name too
            _ => self.token_name.is_none(),
        }
    }
}

/// False if the line is to be suppressed; the number of suppressed lines is then logged at the end of the second.
fn is_within_limit() -> bool {
    let Err(Suppressed { first_until }) = REJECTED_LINES.admit(Instant::now()) else {
        return true;
    };
    if let (Some(window_end), Ok(runtime)) = (first_until, Handle::try_current()) {
        runtime.spawn(async move {
            sleep_until(window_end.into()).await;
            log_suppressed();
        });
    }
    false
}

/// Logs how many lines were suppressed, if any. Also called when all connections are closed.
pub(crate) fn log_suppressed() {
    let count = REJECTED_LINES.take_suppressed();
    if count > 0 {
        tracing::info!(
            count,
            "rejected and unauthenticated requests were not logged"
        );
    }
}

fn shortened(text: &str) -> Cow<'_, str> {
    if text.len() <= LOGGED_BYTES_MAX {
        return text.into();
    }
    let end = (0..=LOGGED_BYTES_MAX).rfind(|end| text.is_char_boundary(*end));
    format!("{}…", &text[..end.unwrap_or_default()]).into()
}

/// Unique within this process, and most likely among all processes.
fn new_request_id() -> HeaderValue {
    static NEXT: LazyLock<AtomicU64> = LazyLock::new(|| {
        let start = getrandom::u64().unwrap_or_else(|_| u64::from(std::process::id()) << 32);
        AtomicU64::new(start)
    });
    // Adding an odd number visits every u64 once; with this one, consecutive ids differ in most digits.
    let id = NEXT.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
    HeaderValue::from_str(&format!("{id:016x}")).expect("hexadecimal digits are a header value")
}

/// True for ids that are safe in a log and in a header.
fn is_acceptable_id(id: &HeaderValue) -> bool {
    let is_safe = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.:/+=@".contains(byte);
    (1..=REQUEST_ID_LEN_MAX).contains(&id.len()) && id.as_bytes().iter().all(is_safe)
}

/// The trace id and the parent id of a valid W3C `traceparent` header. Parsed here because the crates that do so belong to
/// the OpenTelemetry SDK, which the service does not use: it logs the ids and sends no spans.
fn trace_ids(traceparent: &HeaderValue) -> Option<(&str, &str)> {
    let mut fields = traceparent.to_str().ok()?.split('-');
    let [version, trace_id, parent_id, flags] = [
        fields.next()?,
        fields.next()?,
        fields.next()?,
        fields.next()?,
    ];
    let is_hex = |text: &str, len| {
        text.len() == len && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
    };
    let is_id = |text: &str, len| is_hex(text, len) && text.bytes().any(|byte| byte != b'0');
    let is_valid = is_hex(version, 2)
        && version != "ff"
        && is_id(trace_id, 32)
        && is_id(parent_id, 16)
        && is_hex(flags, 2)
        // Later versions may append fields.
        && (version != "00" || fields.next().is_none());
    is_valid.then_some((trace_id, parent_id))
}

/// None if the header is missing or repeated.
fn traceparent(headers: &HeaderMap) -> Option<&HeaderValue> {
    let mut values = headers.get_all(TRACEPARENT).iter();
    values.next().filter(|_| values.next().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALID: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn ids(value: &str) -> Option<(String, String)> {
        let value = HeaderValue::from_bytes(value.as_bytes()).expect("a header value");
        let (trace_id, parent_id) = trace_ids(&value)?;
        Some((trace_id.to_owned(), parent_id.to_owned()))
    }

    #[test]
    fn both_ids_are_taken_from_a_valid_header_of_this_or_a_later_version() {
        let expected = (
            "4bf92f3577b34da6a3ce929d0e0e4736".to_owned(),
            "00f067aa0ba902b7".to_owned(),
        );
        assert_eq!(ids(VALID), Some(expected.clone()));
        for later in [
            VALID.replace("00-4", "cc-4"),
            VALID.replace("00-4", "cc-4") + "-what the future brings",
            VALID.replace("00-4", "01-4") + "-",
            VALID.replace("-01", "-ff"),
        ] {
            assert_eq!(ids(&later), Some(expected.clone()), "{later}");
        }
    }

    #[test]
    fn anything_else_is_no_header() {
        let zeros = |len: usize| "0".repeat(len);
        for bad in [
            String::new(),
            "00".to_owned(),
            VALID[..54].to_owned(),
            VALID.to_owned() + "-00",
            VALID.to_owned() + "0",
            VALID.replace("00-4", "ff-4"),
            VALID.replace("00-4", "0X-4"),
            VALID.replace("00-4", "01-4") + "0",
            VALID.to_uppercase(),
            VALID.replace("4bf9", "4BF9"),
            VALID.replace("-01", "-0g"),
            VALID.replace("-01", "--1"),
            VALID.replace("4736-00", "473600-"),
            VALID.replacen('-', "_", 1),
            VALID.replace("4bf92f3577b34da6a3ce929d0e0e4736", &zeros(32)),
            VALID.replace("00f067aa0ba902b7", &zeros(16)),
            VALID.replace("4bf9", "4bé"),
        ] {
            assert_eq!(ids(&bad), None, "{bad}");
        }
    }

    #[test]
    fn two_headers_are_none() {
        let mut headers = HeaderMap::new();
        headers.append(TRACEPARENT, VALID.parse().expect("a value"));
        assert!(traceparent(&headers).is_some());
        headers.append(TRACEPARENT, VALID.parse().expect("a value"));
        assert_eq!(traceparent(&headers), None);
    }
}
