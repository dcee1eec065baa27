//! The access log: one line per response, also for bytes that are not a valid request. A line has no body, no query and
//! no token, and its length is limited. Lines about rejected and unauthenticated requests have a rate limit of their own,
//! so that they can neither fill the log nor displace other lines.

use std::borrow::Cow;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hyper::header::{HeaderName, HeaderValue};
use hyper::{HeaderMap, Method, Request};
use tokio::time::sleep;
use tracing::Level;

use crate::http::error::ApiError;
use crate::http::{RequestContext, Response};
use crate::logging::{Line, LineLimit, Piece, field_name};
use crate::metrics::{HttpMetrics, micros};

/// Sent by the client or generated here; in the response and in the log.
pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// The longest request id that is accepted from a client.
const REQUEST_ID_LEN_MAX: usize = 128;

/// The most bytes of a method or a path in the log.
const LOGGED_BYTES_MAX: usize = 256;

const REJECTED_LINES_WINDOW: Duration = Duration::from_secs(1);
static REJECTED_LINES: LineLimit = LineLimit::new(100, REJECTED_LINES_WINDOW);

/// What follows the time in every line.
const RESPONSE: Piece = Piece {
    json: r#","level":"INFO","target":"plantstore::access_log","message":"request""#,
    text: "  INFO request",
};
const SERVER_ERROR: Piece = Piece {
    json: r#","level":"WARN","target":"plantstore::access_log","message":"request""#,
    text: "  WARN request",
};

/// The log entry of a request that is being handled.
pub(super) struct Entry<'a> {
    /// Its address.
    client: Cow<'a, str>,
    request_id: HeaderValue,
    /// None if there was no valid request.
    started: Option<Instant>,
    method: Option<Method>,
    path: Cow<'static, str>,
    traceparent: Option<HeaderValue>,
}

impl<'a> Entry<'a> {
    pub(super) fn start<B>(request: &Request<B>, client: Cow<'a, str>, started: Instant) -> Self {
        let request_id = request.headers().get(REQUEST_ID);
        let request_id = request_id.filter(|id| is_acceptable_id(id)).cloned();
        Self {
            client,
            request_id: request_id.unwrap_or_else(new_request_id),
            started: Some(started),
            method: Some(request.method().clone()),
            path: match request.uri().path() {
                "/plants" => "/plants".into(),
                path => shortened(path).into_owned().into(),
            },
            traceparent: traceparent(request.headers()).cloned(),
        }
    }

    /// Logs and counts the response, and adds the request id to it.
    pub(super) fn finish(
        self,
        response: &mut Response,
        error: Option<&ApiError>,
        context: &RequestContext,
        metrics: &HttpMetrics,
    ) {
        let status = response.status().as_u16();
        self.write(status, error, context.token_name.as_deref(), metrics);
        response.headers_mut().insert(REQUEST_ID, self.request_id);
    }

    /// Server errors are warnings.
    fn write(
        &self,
        status: u16,
        error: Option<&ApiError>,
        token_name: Option<&str>,
        metrics: &HttpMetrics,
    ) {
        let error_code = error.map(|error| error.kind.code());
        let duration_us = self.started.map(|started| micros(started.elapsed()));
        metrics.count_response((status, error_code), duration_us);
        if is_limited(status, token_name) && !REJECTED_LINES.admit(Instant::now()) {
            return;
        }
        let (level, start) = if status >= 500 {
            (Level::WARN, SERVER_ERROR)
        } else {
            (Level::INFO, RESPONSE)
        };
        let Some(mut line) = Line::start(level, start) else {
            return;
        };
        let method = self.method.as_ref().map_or("", Method::as_str);
        line.plain(field_name!("client"), &self.client);
        line.plain(field_name!("method"), &shortened(method));
        line.text(field_name!("path"), &self.path);
        line.number(field_name!("status"), status.into());
        if let Some(error) = error {
            line.number(field_name!("error_code"), error.kind.code().into());
            line.optional_text(field_name!("cause"), error.cause.as_deref());
        }
        if let Some(duration_us) = duration_us {
            line.number(field_name!("duration_us"), duration_us);
        }
        line.optional_text(field_name!("token_name"), token_name);
        line.plain(
            field_name!("request_id"),
            self.request_id.to_str().unwrap_or_default(),
        );
        if let Some((trace_id, parent_id)) = self.traceparent.as_ref().and_then(trace_ids) {
            line.plain(field_name!("trace_id"), trace_id);
            line.plain(field_name!("parent_id"), parent_id);
        }
        line.write();
    }
}

/// Logs and counts the response to bytes that could not be parsed as a request, and generates its request id.
pub(super) fn log_rejection(error: &ApiError, client: &str, metrics: &HttpMetrics) -> HeaderValue {
    let entry = Entry {
        client: client.into(),
        request_id: new_request_id(),
        started: None,
        method: None,
        path: "".into(),
        traceparent: None,
    };
    entry.write(error.kind.status().as_u16(), Some(error), None, metrics);
    entry.request_id
}

/// True if any client can cause such a line at any rate: the request needs no token, or was rejected before its token was
/// known or because of its token. Server errors are never limited.
fn is_limited(status: u16, token_name: Option<&str>) -> bool {
    match status {
        500.. => false,
        401 | 403 | 429 => true, // a token that is not valid may have a name too
        _ => token_name.is_none(),
    }
}

/// Logs once a second how many lines were suppressed.
pub(crate) async fn report_suppressed_lines() {
    loop {
        sleep(REJECTED_LINES_WINDOW).await;
        log_suppressed();
    }
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
    let digit = |index: usize| b"0123456789abcdef"[(id >> (60 - 4 * index) & 15) as usize];
    let digits: [u8; 16] = std::array::from_fn(digit);
    HeaderValue::from_bytes(&digits).expect("hexadecimal digits are a header value")
}

/// True for ids that are safe in a log and in a header.
fn is_acceptable_id(id: &HeaderValue) -> bool {
    let is_safe = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.:/+=@".contains(byte);
    (1..=REQUEST_ID_LEN_MAX).contains(&id.len()) && id.as_bytes().iter().all(is_safe)
}

/// The trace id and the parent id of a valid W3C `traceparent` header. Parsed here because the crates that do so belong to
/// the OpenTelemetry SDK, which the service does not use: it logs the ids and sends no spans.
fn trace_ids(traceparent: &HeaderValue) -> Option<(&str, &str)> {
    let fields: Vec<&str> = traceparent.to_str().ok()?.split('-').collect();
    let &[version, trace_id, parent_id, flags, ref further @ ..] = &fields[..] else {
        return None;
    };
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
        && (version != "00" || further.is_empty());
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
