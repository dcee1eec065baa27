//! A socket, with or without TLS, whose other end may stop to read: writes have a deadline, and a close does not lose the last
//! response.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

/// How long a socket is read after its sending side was closed: until the client has sent nothing for this long, and in total.
const LINGER_IDLE_MAX: Duration = Duration::from_millis(500);
const LINGER_MAX: Duration = Duration::from_secs(10);

/// The total while the server closes its connections.
const CLOSING_LINGER_MAX: Duration = Duration::from_secs(1);

pub(super) struct Socket<T> {
    io: T,
    /// Fires at the deadline or before it: it is reset when it fires, not with every request.
    timer: Pin<Box<Sleep>>,
    /// Since when the client has received nothing of what is to be written.
    stalled_since: Option<Instant>,
    /// Since when the sending side is being closed, and whether it is.
    closing_since: Option<Instant>,
    is_half_closed: bool,
    /// Bytes that were read since then.
    lingered_bytes: usize,
}

impl<T: AsyncRead + AsyncWrite + Unpin> Socket<T> {
    /// `first_timeout` is the least time after which a deadline is expected.
    pub(super) fn new(io: T, first_timeout: Duration) -> Self {
        Self {
            io,
            timer: Box::pin(sleep(first_timeout)),
            stalled_since: None,
            closing_since: None,
            is_half_closed: false,
            lingered_bytes: 0,
        }
    }

    pub(super) fn is_stalled(&self) -> bool {
        self.stalled_since.is_some()
    }

    /// Without a deadline.
    pub(super) fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buf)
    }

    /// One attempt, without a deadline.
    pub(super) fn try_write(&mut self, cx: &mut Context<'_>, bytes: &[u8]) {
        let _ = Pin::new(&mut self.io).poll_write(cx, bytes);
        let _ = Pin::new(&mut self.io).poll_flush(cx);
    }

    /// `deadline` is computed from when the client stopped to read.
    pub(super) fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        bytes: &[u8],
        deadline: impl Fn(Instant) -> Instant,
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.io).poll_write(cx, bytes);
        if polled.is_ready() {
            self.stalled_since = None;
            return polled;
        }
        self.poll_stalled(cx, deadline).map(Err)
    }

    /// With TLS, written bytes may be in a buffer until they are flushed.
    pub(super) fn poll_flush(
        &mut self,
        cx: &mut Context<'_>,
        deadline: impl Fn(Instant) -> Instant,
    ) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.io).poll_flush(cx);
        if polled.is_ready() {
            self.stalled_since = None;
            return polled;
        }
        self.poll_stalled(cx, deadline).map(Err)
    }

    fn poll_stalled(
        &mut self,
        cx: &mut Context<'_>,
        deadline: impl Fn(Instant) -> Instant,
    ) -> Poll<io::Error> {
        let since = *self.stalled_since.get_or_insert_with(Instant::now);
        self.poll_deadline(cx, deadline(since))
            .map(|()| io::ErrorKind::TimedOut.into())
    }

    pub(super) fn poll_deadline(&mut self, cx: &mut Context<'_>, deadline: Instant) -> Poll<()> {
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

    /// Closes the sending side, then reads on for a while (a lingering close): closing a socket with unread bytes resets the
    /// connection, and the reset can overtake the response. The time is limited, more so if the server `is_closing`, and the bytes.
    pub(super) fn poll_close(
        &mut self,
        cx: &mut Context<'_>,
        is_closing: bool,
        bytes_max: usize,
    ) -> Poll<io::Result<()>> {
        let max = if is_closing {
            CLOSING_LINGER_MAX
        } else {
            LINGER_MAX
        };
        let since = *self.closing_since.get_or_insert_with(Instant::now);
        if !self.is_half_closed {
            if let Poll::Ready(closed) = Pin::new(&mut self.io).poll_shutdown(cx) {
                closed?;
                self.is_half_closed = true;
                self.timer.as_mut().reset(Instant::now() + LINGER_IDLE_MAX);
            } else {
                return self.poll_deadline(cx, since + max).map(Ok);
            }
        }
        let mut scratch = [0; 4096];
        loop {
            let mut scratch = ReadBuf::new(&mut scratch);
            match Pin::new(&mut self.io).poll_read(cx, &mut scratch) {
                Poll::Pending => return self.timer.as_mut().poll(cx).map(Ok),
                Poll::Ready(Ok(()))
                    if !scratch.filled().is_empty()
                        && since.elapsed() < max
                        && self.lingered_bytes < bytes_max =>
                {
                    self.lingered_bytes += scratch.filled().len();
                    self.timer.as_mut().reset(Instant::now() + LINGER_IDLE_MAX);
                }
                Poll::Ready(_) => return Poll::Ready(Ok(())),
            }
        }
    }
}
