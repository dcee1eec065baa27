//! The stream below hyper. It adds what hyper lacks: timeouts for silent clients, bodies for the 4xx responses that hyper
//! sends by itself, and a close that does not lose the last response.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep};

use crate::http::AppState;
use crate::http::access_log::{REQUEST_ID, log_rejection};
use crate::http::error::{ApiError, ErrorKind};
use crate::metrics::HttpMetrics;

/// How long the stream reads on after the last response: until the client has sent nothing for this long, and in total.
const LINGER_IDLE_MAX: Duration = Duration::from_millis(500);
const LINGER_MAX: Duration = Duration::from_secs(10);

/// While the server closes its connections: the timeout for headers that have started to arrive, and the total above.
const CLOSING_HEADERS_MAX: Duration = Duration::from_millis(500);
const CLOSING_LINGER_MAX: Duration = Duration::from_secs(1);

/// What a connection is doing, and since when; shared by `connection.rs` and the stream.
#[derive(Clone)]
pub(super) struct Progress(Arc<Mutex<(Activity, Instant)>>);

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Activity {
    ReadingHeaders,
    /// The headers are complete; the body has timeouts of its own.
    Responding,
    /// The response is ready to be sent. If the first bytes of the next request came along with the previous one, hyper
    /// has them and the stream does not see them: such a request has the idle timeout.
    Idle,
}

impl Progress {
    pub(super) fn new() -> Self {
        Self(Arc::new(Mutex::new((
            Activity::ReadingHeaders,
            Instant::now(),
        ))))
    }

    pub(super) fn set(&self, activity: Activity) {
        *self.0.lock() = (activity, Instant::now());
    }

    pub(super) fn activity(&self) -> Activity {
        self.0.lock().0
    }
}

pub(super) struct Stream {
    tcp: TcpStream,
    state: Arc<AppState>,
    progress: Progress,
    /// Since when the client has received nothing of what is to be written.
    stalled_since: Option<Instant>,
    /// Fires at the deadline or before it: it is reset when it fires, not with every request.
    timer: Pin<Box<Sleep>>,
    has_received: bool,
    /// The unwritten rest of the response that replaces one of hyper's without a body.
    replacement: Vec<u8>,
    /// Set after the last response.
    lingering_since: Option<Instant>,
}

impl Stream {
    pub(super) fn new(tcp: TcpStream, state: Arc<AppState>, progress: Progress) -> Self {
        Self {
            tcp,
            timer: Box::pin(sleep(state.header_timeout)),
            state,
            progress,
            stalled_since: None,
            has_received: false,
            replacement: Vec::new(),
            lingering_since: None,
        }
    }

    /// Ready if the client has sent nothing for too long while the server waits for it.
    fn poll_idle_timeout(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let (activity, since) = *self.progress.0.lock();
        let timeout = match activity {
            _ if self.stalled_since.is_some() => return Poll::Pending,
            Activity::Responding => return Poll::Pending,
            Activity::Idle => self.state.idle_timeout,
            Activity::ReadingHeaders if self.state.shutdown.is_closing() => {
                self.state.header_timeout.min(CLOSING_HEADERS_MAX)
            }
            Activity::ReadingHeaders => self.state.header_timeout,
        };
        self.poll_timer(cx, since + timeout)
    }

    fn poll_timer(&mut self, cx: &mut Context<'_>, deadline: Instant) -> Poll<()> {
        if self.timer.deadline() > deadline {
            self.timer.as_mut().reset(deadline);
        }
        ready!(self.timer.as_mut().poll(cx));
        if self.timer.deadline() < deadline {
            self.timer.as_mut().reset(deadline);
            return self.timer.as_mut().poll(cx);
        }
        Poll::Ready(())
    }

    fn poll_write_some(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.tcp).poll_write(cx, bytes);
        if polled.is_ready() {
            if self.stalled_since.take().is_some() && self.progress.activity() == Activity::Idle {
                self.progress.set(Activity::Idle); // slow, but still receiving
            }
            return polled;
        }
        let since = *self.stalled_since.get_or_insert_with(Instant::now);
        self.poll_timer(cx, since + self.state.idle_timeout)
            .map(|()| Err(io::ErrorKind::TimedOut.into()))
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

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        if Pin::new(&mut self.tcp).poll_read(cx, buf)?.is_ready() {
            if buf.filled().len() > before {
                self.has_received = true;
                if self.progress.activity() == Activity::Idle {
                    self.progress.set(Activity::ReadingHeaders);
                }
            }
            return Poll::Ready(Ok(()));
        }
        ready!(self.poll_idle_timeout(cx));
        if self.has_received && self.progress.activity() == Activity::ReadingHeaders {
            let response = replacement_response(ErrorKind::RequestTimeout, &self.state.metrics);
            // One attempt, because the client is slow.
            let _ = self.tcp.try_write(&response);
        }
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_write_replacement(cx))?;
        match hyper_rejection(bytes) {
            Some((0, error)) => {
                self.replacement = replacement_response(error, &self.state.metrics);
                Poll::Ready(Ok(bytes.len()))
            }
            // The bytes before it first; hyper then calls again with the rest.
            Some((start, _)) => self.poll_write_some(cx, &bytes[..start]),
            None => self.poll_write_some(cx, bytes),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_write_replacement(cx))?;
        Pin::new(&mut self.tcp).poll_flush(cx)
    }

    /// Closes the sending side, then reads on for a while (a lingering close): closing a socket with unread bytes resets
    /// the connection, and the reset can overtake the response.
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_write_replacement(cx))?;
        if self.lingering_since.is_none() {
            ready!(Pin::new(&mut self.tcp).poll_shutdown(cx))?;
            self.timer.as_mut().reset(Instant::now() + LINGER_IDLE_MAX);
        }
        let since = *self.lingering_since.get_or_insert_with(Instant::now);
        let max = if self.state.shutdown.is_closing() {
            CLOSING_LINGER_MAX
        } else {
            LINGER_MAX
        };
        let mut scratch = [0; 4096];
        loop {
            let mut scratch = ReadBuf::new(&mut scratch);
            match Pin::new(&mut self.tcp).poll_read(cx, &mut scratch) {
                Poll::Pending => return self.timer.as_mut().poll(cx).map(Ok),
                Poll::Ready(Ok(())) if !scratch.filled().is_empty() && since.elapsed() < max => {
                    self.timer.as_mut().reset(Instant::now() + LINGER_IDLE_MAX);
                }
                Poll::Ready(_) => return Poll::Ready(Ok(())),
            }
        }
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

/// The bytes of a logged response to what could not be parsed as a request.
fn replacement_response(kind: ErrorKind, metrics: &HttpMetrics) -> Vec<u8> {
    let error = ApiError::from(kind);
    let (status, body) = (kind.status(), error.body());
    let mut headers = error.headers();
    headers.insert(REQUEST_ID, log_rejection(&error, metrics));
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
