//! The stream below hyper. It adds what hyper lacks: timeouts for silent clients, bodies for the 4xx responses that hyper
//! sends by itself, and a close that does not lose the last response.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

use crate::http::AppState;
use crate::http::access_log::{REQUEST_ID, log_rejection};
use crate::http::client::Peer;
use crate::http::error::{ApiError, ErrorKind};
use crate::http::framing::{Framing, Rejection};
use crate::metrics::HttpMetrics;

/// How long the stream reads on after the last response: until the client has sent nothing for this long, and in total.
const LINGER_IDLE_MAX: Duration = Duration::from_millis(500);
const LINGER_MAX: Duration = Duration::from_secs(10);

/// While the server closes its connections: the timeout for headers that have started to arrive, and the total above.
const CLOSING_HEADERS_MAX: Duration = Duration::from_millis(500);
const CLOSING_LINGER_MAX: Duration = Duration::from_secs(1);

/// What is known of a connection; shared by its handler, its stream and the limits of the listener.
pub struct ConnectionState {
    pub(crate) peer: Peer,
    progress: Mutex<Progress>,
    /// True once a request had a valid token.
    is_authenticated: AtomicBool,
    /// The number of open connections that have authenticated.
    authenticated: Arc<AtomicUsize>,
}

#[derive(Clone, Copy)]
struct Progress {
    activity: Activity,
    since: Instant,
    /// When the first byte of the request arrived, or the connection was opened.
    request_started: Instant,
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
            is_authenticated: AtomicBool::new(false),
            authenticated,
        })
    }

    pub(super) fn set(&self, activity: Activity) {
        self.progress.lock().set(activity);
    }

    pub(crate) fn activity(&self) -> Activity {
        self.progress.lock().activity
    }

    pub(super) fn request_started(&self) -> Instant {
        self.progress.lock().request_started
    }

    pub(super) fn set_authenticated(&self) {
        if !self.is_authenticated() {
            self.is_authenticated.store(true, Ordering::Relaxed);
            self.authenticated.fetch_add(1, Ordering::Relaxed);
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

pub(super) struct Stream<T> {
    io: T,
    state: Arc<AppState>,
    connection: Arc<ConnectionState>,
    framing: Framing,
    /// What is wrong with the bytes that hyper is about to reject.
    rejection: Option<Rejection>,
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

impl<T: AsyncRead + AsyncWrite + Unpin> Stream<T> {
    pub(super) fn new(io: T, state: Arc<AppState>, connection: Arc<ConnectionState>) -> Self {
        Self {
            io,
            timer: Box::pin(sleep(state.limits.header_timeout)),
            state,
            connection,
            framing: Framing::default(),
            rejection: None,
            stalled_since: None,
            has_received: false,
            replacement: Vec::new(),
            lingering_since: None,
        }
    }

    /// Ready if the client has sent nothing for too long while the server waits for it.
    fn poll_idle_timeout(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Progress {
            activity, since, ..
        } = *self.connection.progress.lock();
        let limits = &self.state.limits;
        let timeout = match activity {
            _ if self.stalled_since.is_some() => return Poll::Pending,
            Activity::Responding => return Poll::Pending,
            Activity::Idle => limits.idle_timeout,
            Activity::ReadingHeaders if self.state.shutdown.is_closing() => {
                limits.header_timeout.min(CLOSING_HEADERS_MAX)
            }
            Activity::ReadingHeaders => limits.header_timeout.min(limits.request_timeout),
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
        let polled = Pin::new(&mut self.io).poll_write(cx, bytes);
        if polled.is_ready() {
            if self.stalled_since.take().is_some() && self.connection.activity() == Activity::Idle {
                self.connection.set(Activity::Idle); // slow, but still receiving
            }
            return polled;
        }
        let since = *self.stalled_since.get_or_insert_with(Instant::now);
        let limits = &self.state.limits;
        let request_deadline = self.connection.request_started() + limits.request_timeout;
        let deadline = (since + limits.idle_timeout).min(request_deadline);
        self.poll_timer(cx, deadline)
            .map(|()| Err(io::ErrorKind::TimedOut.into()))
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
        if Pin::new(&mut self.io).poll_read(cx, buf)?.is_ready() {
            if buf.filled().len() > before {
                self.has_received = true;
                let mut progress = self.connection.progress.lock();
                if progress.activity == Activity::Idle {
                    progress.set(Activity::ReadingHeaders);
                }
                drop(progress);
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
            let _ = Pin::new(&mut self.io).poll_write(cx, &response);
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
        Pin::new(&mut self.io).poll_flush(cx)
    }

    /// Closes the sending side, then reads on for a while (a lingering close): closing a socket with unread bytes resets
    /// the connection, and the reset can overtake the response.
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_write_replacement(cx))?;
        if self.lingering_since.is_none() {
            ready!(Pin::new(&mut self.io).poll_shutdown(cx))?;
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
            match Pin::new(&mut self.io).poll_read(cx, &mut scratch) {
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

/// The response to a connection that is closed at once.
pub(crate) fn too_many_connections(peer: &Peer, metrics: &HttpMetrics) -> Vec<u8> {
    rejection(&ErrorKind::TooManyConnections.into(), peer, metrics)
}

/// The bytes of a logged response to what is not a request.
fn rejection(error: &ApiError, peer: &Peer, metrics: &HttpMetrics) -> Vec<u8> {
    let (status, body) = (error.kind.status(), error.body());
    let mut headers = error.headers();
    headers.insert(REQUEST_ID, log_rejection(error, peer.text(), metrics));
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
