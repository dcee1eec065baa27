//! The stream below hyper, which does what hyper leaves out: deadlines for a silent peer, bodies
//! for the refusals that hyper answers by itself, and a close that does not lose the last answer.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep_until};

use crate::http::error::{ApiError, Kind};
use crate::http::request_log::{Line, REQUEST_ID, log_line, new_request_id};

/// How long a peer that is still sending after the last answer is listened to.
const LINGER: Duration = Duration::from_millis(500);

/// How long a silent peer is waited for.
#[derive(Debug, Clone, Copy)]
pub struct Deadlines {
    /// For a whole head, from its first byte or from the start of the connection.
    pub header: Duration,
    /// For the next request, and for the peer to take more of an answer.
    pub idle: Duration,
}

/// What a connection is at, told to the stream by whoever calls the router. The lowest two bits
/// are the phase, the others count how often it has changed: a clock starts anew with each change.
#[derive(Clone, Default)]
pub struct Phase(Arc<AtomicU64>);

const READING_HEAD: u64 = 0;
const ANSWERING: u64 = 1;
const IDLE: u64 = 2;
const PHASE_BITS: u64 = 3;

impl Phase {
    /// A head is complete; its body has deadlines of its own.
    pub fn answering(&self) {
        self.set(ANSWERING);
    }

    /// The answer is ready to be sent.
    pub fn idle(&self) {
        self.set(IDLE);
    }

    fn set(&self, phase: u64) {
        let changes = self.count() | PHASE_BITS;
        self.0.store(changes + 1 + phase, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.count() & PHASE_BITS
    }

    fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A TCP stream with deadlines and manners.
pub struct Stream {
    tcp: TcpStream,
    deadlines: Deadlines,
    phase: Phase,
    /// The change of phase that was last seen waiting, and since when.
    waiting: (u64, Instant),
    /// Since when the peer has taken nothing of what there is to write.
    stalled_since: Option<Instant>,
    /// Wakes up at a deadline or before it. It is moved when it fires, not with every request.
    alarm: Pin<Box<Sleep>>,
    /// Whether the peer has ever said anything.
    heard: bool,
    /// What is written in place of a refusal without a body, as far as it is not written yet.
    substitute: Vec<u8>,
    /// Set once no more is written.
    linger_until: Option<Instant>,
}

impl Stream {
    /// Guards a stream that was just accepted.
    pub fn new(tcp: TcpStream, deadlines: Deadlines, phase: Phase) -> Self {
        let now = Instant::now();
        Self {
            tcp,
            deadlines,
            waiting: (phase.count(), now),
            phase,
            stalled_since: None,
            alarm: Box::pin(sleep_until(now + deadlines.header)),
            heard: false,
            substitute: Vec::new(),
            linger_until: None,
        }
    }

    /// Ready when the peer has been silent for too long.
    fn poll_deadline(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        let count = self.phase.count();
        if self.waiting.0 != count {
            self.waiting = (count, Instant::now());
        }
        let for_bytes = match self.phase.get() {
            READING_HEAD => Some(self.waiting.1 + self.deadlines.header),
            IDLE => Some(self.waiting.1 + self.deadlines.idle),
            _ => None,
        };
        let for_room = self.stalled_since.map(|since| since + self.deadlines.idle);
        let deadline = for_bytes.into_iter().chain(for_room).min();
        match deadline {
            Some(deadline) => self.poll_alarm(cx, deadline),
            None => Poll::Pending,
        }
        .map(|()| io::ErrorKind::TimedOut.into())
    }

    fn poll_alarm(&mut self, cx: &mut Context<'_>, deadline: Instant) -> Poll<()> {
        if self.alarm.deadline() > deadline {
            self.alarm.as_mut().reset(deadline);
        }
        ready!(self.alarm.as_mut().poll(cx));
        if self.alarm.deadline() < deadline {
            self.alarm.as_mut().reset(deadline);
            return self.alarm.as_mut().poll(cx);
        }
        Poll::Ready(())
    }

    fn poll_write_some(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.tcp).poll_write(cx, bytes);
        if polled.is_ready() {
            self.stalled_since = None;
            return polled;
        }
        self.stalled_since.get_or_insert_with(Instant::now);
        self.poll_deadline(cx).map(Err)
    }

    fn poll_write_substitute(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.substitute.is_empty() {
            let bytes = std::mem::take(&mut self.substitute);
            let written = self.poll_write_some(cx, &bytes);
            self.substitute = bytes;
            self.substitute.drain(..ready!(written)?);
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
                self.heard = true;
                if self.phase.get() == IDLE {
                    self.phase.set(READING_HEAD);
                }
            }
            return Poll::Ready(Ok(()));
        }
        let error = ready!(self.poll_deadline(cx));
        if self.phase.get() == READING_HEAD && self.heard {
            let message = "The request line and headers did not arrive in time; send them again.";
            let refusal = refusal(&ApiError::new(Kind::TooSlow, message));
            // There is nothing else in the socket's buffer, so this fits; and the peer is slow, so
            // it is not waited for.
            let _ = self.tcp.try_write(&refusal);
        }
        Poll::Ready(Err(error))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_write_substitute(cx))?;
        match hypers_own_refusal(bytes) {
            Some((0, error)) => {
                self.substitute = refusal(&error);
                Poll::Ready(Ok(bytes.len()))
            }
            // First what stands before it; hyper then comes back with the refusal alone.
            Some((start, _)) => self.poll_write_some(cx, &bytes[..start]),
            None => self.poll_write_some(cx, bytes),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_write_substitute(cx))?;
        Pin::new(&mut self.tcp).poll_flush(cx)
    }

    /// Says that there is no more to come, and then hears the peer out for a moment. A socket that
    /// is closed with unread bytes resets the connection, which can overtake the answer.
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_write_substitute(cx))?;
        let until = if let Some(until) = self.linger_until {
            until
        } else {
            ready!(Pin::new(&mut self.tcp).poll_shutdown(cx))?;
            *self.linger_until.insert(Instant::now() + LINGER)
        };
        let mut scratch = [0; 4096];
        loop {
            let mut scratch = ReadBuf::new(&mut scratch);
            match Pin::new(&mut self.tcp).poll_read(cx, &mut scratch) {
                Poll::Ready(Ok(())) if !scratch.filled().is_empty() && Instant::now() < until => {}
                Poll::Ready(_) => return Poll::Ready(Ok(())),
                Poll::Pending => return self.poll_alarm(cx, until).map(Ok),
            }
        }
    }

    // `is_write_vectored` stays false: hyper then hands over a whole answer in one piece, which is
    // faster for small ones and lets `hypers_own_refusal` see it.
}

/// What hyper refuses before there is a request, it answers with a head alone. Finds such a head
/// at the end of what is to be written, and gives the error that should have been answered.
///
/// Every answer of ours ends with its body, or is an answer to HEAD and has a request id.
fn hypers_own_refusal(bytes: &[u8]) -> Option<(usize, ApiError)> {
    const STATUS_LINE: &[u8] = b"HTTP/1.1 4";
    if !bytes.ends_with(b"\r\n\r\n") {
        return None;
    }
    let start = bytes
        .windows(STATUS_LINE.len())
        .rposition(|window| window == STATUS_LINE)?;
    let head = std::str::from_utf8(&bytes[start..]).ok()?;
    if head.contains(REQUEST_ID.as_str()) {
        return None;
    }
    let error = match head.get(9..12) {
        Some("431" | "414") => ApiError::new(
            Kind::HeadTooLarge,
            "The request line and headers are too large; send fewer or shorter ones.",
        ),
        _ => ApiError::new(
            Kind::NotHttp,
            "The request is not valid HTTP/1.1; check its request line, headers and framing.",
        ),
    };
    Some((start, error))
}

/// A whole answer, as bytes, for a request that never became one; and its line in the log.
fn refusal(error: &ApiError) -> Vec<u8> {
    let status = error.kind().status();
    let request_id = new_request_id();
    log_line(&Line {
        status: status.as_u16(),
        error: Some(error.kind().number()),
        request_id: request_id.to_str().unwrap_or_default(),
        ..Line::default()
    });

    let body = error.body();
    let mut headers = error.headers();
    headers.insert(REQUEST_ID, request_id);
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
