//! The stream below hyper. It disconnects clients that do not read, or that send too many frames that serve no request.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::http::AppState;
use crate::http::http2::CONNECTION_WINDOW_BYTES;
use crate::http::http2::frames::Frames;
use crate::http::http2::in_flight::InFlight;
use crate::http::socket::Socket;

/// The most bytes that are read while the connection is closed. By the flow control windows, a client sends hardly more of its bodies
/// before it learns of the end; one that ignores the end is disconnected.
const LINGER_BYTES_MAX: usize = CONNECTION_WINDOW_BYTES as usize;

pub(super) struct Stream<T> {
    socket: Socket<T>,
    state: Arc<AppState>,
    in_flight: Arc<InFlight>,
    frames: Frames,
}

impl<T: AsyncRead + AsyncWrite + Unpin> Stream<T> {
    pub(super) fn new(io: T, state: Arc<AppState>, in_flight: Arc<InFlight>) -> Self {
        Self {
            socket: Socket::new(io, state.limits.idle_timeout),
            state,
            in_flight,
            frames: Frames::new(),
        }
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncRead for Stream<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let polled = self.socket.poll_read(cx, buf);
        let count = self.frames.follow(&buf.filled()[before..]);
        if count > 0 && !self.in_flight.admit_frames(count) {
            self.state.metrics.http2_floods.add(1);
            let problem = "too many frames that serve no request";
            return Poll::Ready(Err(io::Error::other(problem)));
        }
        polled
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Stream<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let timeout = self.state.limits.idle_timeout;
        self.socket.poll_write(cx, bytes, |since| since + timeout)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let timeout = self.state.limits.idle_timeout;
        self.socket.poll_flush(cx, |since| since + timeout)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let is_closing = self.state.shutdown.is_closing();
        self.socket.poll_close(cx, is_closing, LINGER_BYTES_MAX)
    }
}
