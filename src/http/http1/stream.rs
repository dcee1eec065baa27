//! The stream below hyper. It adds what hyper lacks: timeouts for silent clients, bodies for the 4xx responses that hyper
//! sends by itself, and a close that does not lose the last response.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper::header::{CONNECTION, DATE, HeaderValue};
use jiff::Timestamp;
use jiff::fmt::rfc2822::DateTimePrinter;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;

use crate::http::AppState;
use crate::http::access_log::{REQUEST_ID, log_rejection};
use crate::http::client::Peer;
use crate::http::connection::{Activity, ConnectionState};
use crate::http::error::{ApiError, ErrorKind};
use crate::http::http1::framing::{Framing, Rejection};
use crate::http::socket::Socket;
use crate::metrics::HttpMetrics;

/// The timeout for headers that have started to arrive when the server closes its connections.
const CLOSING_HEADERS_MAX: Duration = Duration::from_millis(500);

pub(super) struct Stream<T> {
    socket: Socket<T>,
    state: Arc<AppState>,
    connection: Arc<ConnectionState>,
    framing: Framing,
    /// What is wrong with the bytes that hyper is about to reject.
    rejection: Option<Rejection>,
    has_received: bool,
    /// The unwritten rest of the response that replaces one of hyper's without a body.
    replacement: Vec<u8>,
}

impl<T: AsyncRead + AsyncWrite + Unpin> Stream<T> {
    pub(super) fn new(io: T, state: Arc<AppState>, connection: Arc<ConnectionState>) -> Self {
        Self {
            socket: Socket::new(io, state.limits.header_timeout),
            state,
            connection,
            framing: Framing::default(),
            rejection: None,
            has_received: false,
            replacement: Vec::new(),
        }
    }

    /// Ready if the client has sent nothing for too long while the server waits for it.
    fn poll_idle_timeout(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let progress = self.connection.progress();
        let limits = &self.state.limits;
        let timeout = match progress.activity {
            _ if self.socket.is_stalled() => return Poll::Pending,
            Activity::Responding => return Poll::Pending,
            Activity::Idle => limits.idle_timeout,
            Activity::ReadingHeaders if self.state.shutdown.is_closing() => {
                limits.header_timeout.min(CLOSING_HEADERS_MAX)
            }
            Activity::ReadingHeaders => limits.header_timeout.min(limits.request_timeout),
        };
        self.socket.poll_deadline(cx, progress.since + timeout)
    }

    fn poll_write_some(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let was_stalled = self.socket.is_stalled();
        let deadline = |since| write_deadline(&self.state, &self.connection, since);
        let polled = self.socket.poll_write(cx, bytes, deadline);
        if was_stalled && polled.is_ready() && self.connection.activity() == Activity::Idle {
            self.connection.set(Activity::Idle); // slow, but still receiving
        }
        polled
    }

    fn replacement_response(&self, error: &ApiError) -> Vec<u8> {
        rejection(error, &self.connection.peer, &self.state.metrics)
    }

    fn poll_write_replacement(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.replacement.is_empty() {
            let bytes = std::mem::take(&mut self.replacement);
            let written = self.poll_write_some(cx, &bytes);
            self.replacement = bytes;
            self.replacement.drain(..ready!(written)?);
        }
        Poll::Ready(Ok(()))
    }
}

/// When a client is disconnected that does not read its response.
fn write_deadline(state: &AppState, connection: &ConnectionState, since: Instant) -> Instant {
    let limits = &state.limits;
    let request_deadline = connection.progress().request_started + limits.request_timeout;
    (since + limits.idle_timeout).min(request_deadline)
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncRead for Stream<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.rejection.is_some() {
            // Hyper looks at headers that came in several pieces only when their end has arrived.
            let end = b"\r\n\r\n";
            buf.put_slice(&end[..end.len().min(buf.remaining())]);
            return Poll::Ready(Ok(()));
        }
        let before = buf.filled().len();
        if self.socket.poll_read(cx, buf)?.is_ready() {
            if buf.filled().len() > before {
                self.has_received = true;
                self.connection.received();
                if let Err((len, rejection)) = self.framing.follow(&buf.filled()[before..]) {
                    // Hyper gets a byte that no request contains, and responds.
                    buf.set_filled(before + len);
                    buf.put_slice(&[0]);
                    self.rejection = Some(rejection);
                }
            }
            return Poll::Ready(Ok(()));
        }
        ready!(self.poll_idle_timeout(cx));
        if self.has_received && self.connection.activity() == Activity::ReadingHeaders {
            let response = self.replacement_response(&ErrorKind::RequestTimeout.into());
            // One attempt, because the client is slow.
            self.socket.try_write(cx, &response);
        }
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Stream<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_write_replacement(cx))?;
        match hyper_rejection(bytes) {
            Some((0, error)) => {
                let error = match self.rejection {
                    Some(Rejection { kind, message }) => ApiError::new(kind, message),
                    None => error.into(),
                };
                self.replacement = self.replacement_response(&error);
                Poll::Ready(Ok(bytes.len()))
            }
            // The bytes before it first; hyper then calls again with the rest.
            Some((start, _)) => self.poll_write_some(cx, &bytes[..start]),
            None => self.poll_write_some(cx, bytes),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_write_replacement(cx))?;
        let this = &mut *self;
        let deadline = |since| write_deadline(&this.state, &this.connection, since);
        this.socket.poll_flush(cx, deadline)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_write_replacement(cx))?;
        let is_closing = self.state.shutdown.is_closing();
        self.socket.poll_close(cx, is_closing, usize::MAX)
    }

    // `is_write_vectored` stays false: hyper then writes a whole response at once, which is faster for small ones and lets
    // `hyper_rejection` see it.
}

/// Finds a response without a body at the end of `bytes`, which hyper sends when it cannot parse a request, and returns
/// where it starts and the error to send instead. The service's own responses end with a body, or have a request id.
fn hyper_rejection(bytes: &[u8]) -> Option<(usize, ErrorKind)> {
    const VERSION: &[u8] = b"HTTP/1.";
    if !bytes.ends_with(b"\r\n\r\n") {
        return None;
    }
    let start = bytes
        .windows(VERSION.len())
        .rposition(|window| window == VERSION)?;
    let headers = std::str::from_utf8(&bytes[start..]).ok()?;
    let is_empty = headers.contains("content-length: 0\r\n");
    if !is_empty || headers.contains(REQUEST_ID.as_str()) {
        return None;
    }
    let error = match headers.get(9..12) {
        Some("431" | "414") => ErrorKind::HeadersTooLarge,
        _ => ErrorKind::MalformedRequest,
    };
    Some((start, error))
}

/// The response to a connection that is closed at once.
pub(crate) fn too_many_connections(peer: &Peer, metrics: &HttpMetrics) -> Vec<u8> {
    rejection(&ErrorKind::TooManyConnections.into(), peer, metrics)
}

/// The bytes of a logged response to what is not a request.
fn rejection(error: &ApiError, peer: &Peer, metrics: &HttpMetrics) -> Vec<u8> {
    let (status, body) = (error.kind.status(), error.body());
    let mut headers = error.headers();
    headers.insert(CONNECTION, HeaderValue::from_static("close"));
    headers.insert(REQUEST_ID, log_rejection(error, peer.text(), metrics));
    let date = DateTimePrinter::new().timestamp_to_rfc9110_string(&Timestamp::now());
    let date = date.ok().and_then(|date| HeaderValue::try_from(date).ok());
    headers.extend(date.map(|date| (DATE, date)));
    let mut bytes = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n", body.len()).into_bytes();
    for (name, value) in &headers {
        for part in [name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"] {
            bytes.extend_from_slice(part);
        }
    }
    bytes.extend_from_slice(b"\r\n");
    bytes.extend_from_slice(&body);
    bytes
}
