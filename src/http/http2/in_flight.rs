//! The requests of an HTTP/2 connection that have no complete response: how many there are and since when, for its timeouts, and
//! how many frames the client may still send that serve no request.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http_body_util::Full;
use hyper::body::{Body, Bytes, Frame, SizeHint};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::http::AppState;
use crate::http::connection::{Activity, ConnectionState};
use crate::http::http2::{GOAWAY_GRACE, RESPONSE_GRACE};

/// How many frames a client may send that serve no request: at first, with each request, and at most. A client needs a few at
/// the start and a few for each request; one that sends only such frames (settings, pings, resets, pieces of headers) is
/// disconnected.
const FRAMES_AT_START: u32 = 1024;
const FRAMES_PER_REQUEST: u32 = 16;
const FRAMES_MAX: u32 = 8192;

pub(super) struct InFlight {
    connection: Arc<ConnectionState>,
    requests: Mutex<Requests>,
}

struct Requests {
    /// When each of them started, in the order in which they did.
    started: BTreeMap<u64, Instant>,
    next: u64,
    /// Since when there are none.
    idle_since: Instant,
    frames_left: u32,
}

/// A request in flight, until its response is sent or its stream was reset.
pub(super) struct InFlightRequest {
    in_flight: Arc<InFlight>,
    number: u64,
    since: Instant,
    is_served: bool,
}

impl InFlight {
    pub(super) fn new(connection: Arc<ConnectionState>) -> Arc<Self> {
        Arc::new(Self {
            connection,
            requests: Mutex::new(Requests {
                started: BTreeMap::new(),
                next: 0,
                idle_since: Instant::now(),
                frames_left: FRAMES_AT_START,
            }),
        })
    }

    pub(super) fn start(self: &Arc<Self>) -> InFlightRequest {
        let since = Instant::now();
        let mut requests = self.requests.lock();
        let number = requests.next;
        requests.next += 1;
        requests.started.insert(number, since);
        if requests.started.len() == 1 {
            self.connection.set(Activity::Responding);
        }
        InFlightRequest {
            in_flight: Arc::clone(self),
            number,
            since,
            is_served: false,
        }
    }

    pub(super) fn has_requests(&self) -> bool {
        !self.requests.lock().started.is_empty()
    }

    /// False if the client has sent too many frames that serve no request.
    pub(super) fn admit_frames(&self, count: u32) -> bool {
        let mut requests = self.requests.lock();
        let left = requests.frames_left.checked_sub(count);
        requests.frames_left = left.unwrap_or(0);
        left.is_some()
    }

    /// When the connection has to be closed, as far as is known now.
    pub(super) fn deadline(&self, state: &AppState, going_away_since: Option<Instant>) -> Instant {
        let limits = &state.limits;
        let requests = self.requests.lock();
        let idle_since = requests.idle_since;
        match (requests.started.first_key_value(), going_away_since) {
            (Some((_, oldest)), _) => *oldest + limits.request_timeout + RESPONSE_GRACE,
            (None, Some(since)) => since.max(idle_since) + GOAWAY_GRACE,
            (None, None) if requests.next == 0 => {
                idle_since + limits.header_timeout.min(limits.request_timeout)
            }
            (None, None) => idle_since + limits.idle_timeout,
        }
    }
}

impl InFlightRequest {
    pub(super) fn since(&self) -> Instant {
        self.since
    }

    pub(super) fn set_served(&mut self) {
        self.is_served = true;
    }
}

impl Drop for InFlightRequest {
    fn drop(&mut self) {
        let mut requests = self.in_flight.requests.lock();
        requests.started.remove(&self.number);
        if self.is_served {
            let left = requests.frames_left + FRAMES_PER_REQUEST;
            requests.frames_left = left.min(FRAMES_MAX);
        }
        if requests.started.is_empty() {
            requests.idle_since = Instant::now();
            self.in_flight.connection.set(Activity::Idle);
        }
    }
}

/// The body of a response, whose request is in flight until it is sent.
pub(super) struct TrackedBody {
    body: Full<Bytes>,
    _in_flight: InFlightRequest,
}

impl TrackedBody {
    pub(super) fn new(body: Full<Bytes>, in_flight: InFlightRequest) -> Self {
        Self {
            body,
            _in_flight: in_flight,
        }
    }
}

impl Body for TrackedBody {
    type Data = Bytes;
    type Error = <Full<Bytes> as Body>::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
