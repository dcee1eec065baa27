//! The stream below hyper, which does what hyper leaves out: deadlines for a silent peer, bodies
//! for the refusals that hyper answers by itself, and a close that does not lose the last answer.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep};

use crate::http::error::{ApiError, Kind};
use crate::http::request_log::{Line, REQUEST_ID, log_line, new_request_id};
use crate::metrics::Answers;

/// How long a peer that is still sending after the last answer is listened to: until it has been
/// silent for so long, and in all.
const LINGER_SILENCE: Duration = Duration::from_millis(500);
const LINGER_MAX: Duration = Duration::from_secs(10);

/// While the server drains: how long a head may take from its first byte, and a peer that is still sending is listened to.
const DRAIN_HEAD_MAX: Duration = Duration::from_millis(500);
const DRAIN_LINGER_MAX: Duration = Duration::from_secs(1);

/// How long a silent peer is waited for.
#[derive(Debug, Clone, Copy)]
pub struct Deadlines {
    /// For a whole head, from its first byte or from the start of the connection.
    pub header: Duration,
    /// For the next request, and for the peer to take more of an answer.
    pub idle: Duration,
}

/// What a connection is at, and since when; told to the stream by whoever calls the router.
#[derive(Clone)]
pub struct Progress(Arc<Mutex<State>>);

#[derive(Clone, Copy)]
struct State {
    phase: Phase,
    since: Instant,
    is_draining: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    ReadingHead,
    /// The head is complete; the body has deadlines of its own.
    Answering,
    /// The answer is ready to be sent. The first bytes of a head that came along with the request
    /// before are with hyper, out of our sight: such a head has the idle time.
    Idle,
}

/// A connection that was just accepted.
impl Default for Progress {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(State {
            phase: Phase::ReadingHead,
            since: Instant::now(),
            is_draining: false,
        })))
    }
}

impl Progress {
    /// A head is complete.
    pub fn answering(&self) {
        self.set(Phase::Answering);
    }

    /// The answer is ready.
    pub fn answered(&self) {
        self.set(Phase::Idle);
    }

    /// The server wants the connection back. True if a head is arriving, or was never sent.
    pub fn drain(&self) -> bool {
        let mut state = self.lock();
        state.is_draining = true;
        state.phase == Phase::ReadingHead
    }

    fn set(&self, phase: Phase) {
        let mut state = self.lock();
        state.phase = phase;
        state.since = Instant::now();
    }

    fn get(&self) -> State {
        *self.lock()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A TCP stream with deadlines and manners.
pub struct Stream {
    tcp: TcpStream,
    deadlines: Deadlines,
    progress: Progress,
    answers: Arc<Answers>,
    /// Since when the peer has taken nothing of what there is to write.
    stalled_since: Option<Instant>,
    /// Wakes up at a deadline or before it. It is moved when it fires, not with every request.
    alarm: Pin<Box<Sleep>>,
    /// Whether the peer has ever said anything.
    heard: bool,
    /// What is written in place of a refusal without a body, as far as it is not written yet.
    substitute: Vec<u8>,
    /// Set once no more is written: since when, and when the peer has been silent for long enough.
    linger: Option<(Instant, Instant)>,
}

impl Stream {
    /// Guards a stream that was just accepted.
    pub fn new(
        tcp: TcpStream,
        deadlines: Deadlines,
        progress: Progress,
        answers: Arc<Answers>,
    ) -> Self {
        Self {
            tcp,
            deadlines,
            progress,
            answers,
            stalled_since: None,
            alarm: Box::pin(sleep(deadlines.header)),
            heard: false,
            substitute: Vec::new(),
            linger: None,
        }
    }

    /// Ready when the peer has been silent for too long, though it was its turn.
    fn poll_silence(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        let state = self.progress.get();
        let max = match state.phase {
            _ if self.stalled_since.is_some() => return Poll::Pending,
            Phase::ReadingHead if state.is_draining => self.deadlines.header.min(DRAIN_HEAD_MAX),
            Phase::ReadingHead => self.deadlines.header,
            Phase::Idle => self.deadlines.idle,
            Phase::Answering => return Poll::Pending,
        };
        let deadline = state.since + max;
        self.poll_alarm(cx, deadline)
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
            if self.stalled_since.take().is_some() && self.progress.get().phase == Phase::Idle {
                self.progress.set(Phase::Idle); // it takes its time, but it takes its answer
            }
            return polled;
        }
        let since = *self.stalled_since.get_or_insert_with(Instant::now);
        self.poll_alarm(cx, since + self.deadlines.idle)
            .map(|()| Err(io::ErrorKind::TimedOut.into()))
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
                if self.progress.get().phase == Phase::Idle {
                    self.progress.set(Phase::ReadingHead);
                }
            }
            return Poll::Ready(Ok(()));
        }
        let error = ready!(self.poll_silence(cx));
        let in_a_head = self.progress.get().phase == Phase::ReadingHead && self.heard;
        // The peer is slow, so it is not waited for; and an answer that it has not taken yet must not
        // be followed by another.
        if in_a_head && self.stalled_since.is_none() {
            let message = "The request line and headers did not arrive in time; send them again.";
            let refusal = logged_refusal(&ApiError::new(Kind::TooSlow, message), &self.answers);
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
                self.substitute = logged_refusal(&error, &self.answers);
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
        if self.linger.is_none() {
            ready!(Pin::new(&mut self.tcp).poll_shutdown(cx))?;
            let now = Instant::now();
            self.linger = Some((now, now + LINGER_SILENCE));
        }
        let mut scratch = [0; 4096];
        while let Some((since, silence)) = self.linger {
            let mut scratch = ReadBuf::new(&mut scratch);
            let max = if self.progress.get().is_draining {
                since + DRAIN_LINGER_MAX
            } else {
                since + LINGER_MAX
            };
            match Pin::new(&mut self.tcp).poll_read(cx, &mut scratch) {
                Poll::Ready(Ok(())) if !scratch.filled().is_empty() && Instant::now() < max => {
                    self.linger = Some((since, max.min(Instant::now() + LINGER_SILENCE)));
                }
                Poll::Ready(_) => break,
                Poll::Pending => return self.poll_alarm(cx, silence).map(Ok),
            }
        }
        Poll::Ready(Ok(()))
    }

    // `is_write_vectored` stays false: hyper then hands over a whole answer in one piece, which is
    // faster for small ones and lets `hypers_own_refusal` see it.
}

/// What hyper refuses before there is a request, it answers with a head alone. Finds such a head
/// at the end of what is to be written, and gives the error that should have been answered.
///
/// Every answer of ours ends with its body, or is an answer to HEAD and has a request id.
fn hypers_own_refusal(bytes: &[u8]) -> Option<(usize, ApiError)> {
    const VERSION: &[u8] = b"HTTP/1.";
    if !bytes.ends_with(b"\r\n\r\n") {
        return None;
    }
    let start = bytes
        .windows(VERSION.len())
        .rposition(|window| window == VERSION)?;
    let head = std::str::from_utf8(&bytes[start..]).ok()?;
    let bodiless = head.contains("content-length: 0\r\n");
    if !bodiless || head.contains(REQUEST_ID.as_str()) {
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

/// A whole answer, as bytes, for a request that never became one; its line in the log, and its place in the figures.
fn logged_refusal(error: &ApiError, answers: &Answers) -> Vec<u8> {
    let status = error.kind().status();
    let request_id = new_request_id();
    let line = Line {
        status: status.as_u16(),
        error: Some(error.kind().number()),
        request_id: request_id.to_str().unwrap_or_default(),
        ..Line::default()
    };
    answers.count_refusal(line.status, line.error);
    log_line(&line);

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
