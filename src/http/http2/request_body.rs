//! The body of a request, of which a handler may read nothing or only a part.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http_body_util::BodyExt;
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use tokio::runtime::Handle;
use tokio::time::timeout;

/// How much of a body is discarded after the response, and for how long.
const DISCARDED_BYTES_MAX: usize = 256 << 10;
const DISCARD_TIMEOUT: Duration = Duration::from_millis(500);

/// When it is dropped, the rest is read and discarded. The HTTP/2 library would reset the stream at once, and curl reports a reset while it
/// sends instead of the response.
pub struct RequestBody(Option<Incoming>);

impl RequestBody {
    pub(super) fn new(body: Incoming) -> Self {
        Self(Some(body))
    }
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        if let Some(body) = self.0.take_if(|body| !body.is_end_stream())
            && let Ok(runtime) = Handle::try_current()
        {
            runtime.spawn(timeout(DISCARD_TIMEOUT, discard(body)));
        }
    }
}

async fn discard(mut body: Incoming) {
    let mut left = DISCARDED_BYTES_MAX;
    while let Some(Ok(frame)) = body.frame().await {
        let len = frame.data_ref().map_or(0, Bytes::len);
        let Some(less) = left.checked_sub(len) else {
            return;
        };
        left = less;
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        match &mut self.0 {
            Some(body) => Pin::new(body).poll_frame(cx),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.0.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.0.as_ref().map(Body::size_hint).unwrap_or_default()
    }
}
