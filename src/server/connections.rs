//! Every connection there is, and no more than there may be: accepted, given to a worker, and at the end let go of
//! without losing an answer.

use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout_at};

use crate::http::stream::Deadlines;
use crate::http::{Draining, connection};
use crate::metrics::{Answers, Metrics};
use crate::server::workers::Workers;
use crate::telemetry::{Throttle, Verdict};

/// While draining, how long a client that keeps its connection may take to send one more request,
/// which is answered with the wish to close. Closing at once could cross a request on its way.
const LAST_REQUEST_GRACE: Duration = Duration::from_millis(500);

/// After an error of `accept`, of which one in ten seconds is logged.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);
static ACCEPT_ERRORS: Throttle = Throttle::new(1, Duration::from_secs(10));

/// Those that are open.
pub struct Connections {
    workers: Workers<(Router, Arc<Answers>)>,
    deadlines: Deadlines,
    draining: Draining,
    metrics: Arc<Metrics>,
    slots: Arc<Semaphore>,
    tasks: JoinSet<()>,
    stop: watch::Sender<()>,
}

impl Connections {
    /// None yet; these workers will have them.
    pub fn new(
        workers: Workers<(Router, Arc<Answers>)>,
        deadlines: Deadlines,
        draining: Draining,
        metrics: Arc<Metrics>,
        max: usize,
    ) -> Self {
        Self {
            workers,
            deadlines,
            draining,
            metrics,
            slots: Arc::new(Semaphore::new(max)),
            tasks: JoinSet::new(),
            stop: watch::Sender::new(()),
        }
    }

    /// Accepts whoever connects, as soon as there is room.
    pub async fn accept_from(&mut self, listener: &TcpListener) {
        loop {
            let slot = Arc::clone(&self.slots).acquire_owned().await;
            let slot = slot.expect("the semaphore is never closed");
            let accepted = listener.accept().await;
            match accepted.and_then(|(stream, _)| stream.into_std()) {
                Ok(stream) => self.spawn(stream, slot),
                // The peer is gone already, or there are no more file descriptors for now.
                Err(error) => {
                    if ACCEPT_ERRORS.admit(Instant::now().into_std()) == Verdict::Log {
                        tracing::warn!(%error, "cannot accept a connection");
                    }
                    sleep(ACCEPT_PAUSE).await;
                }
            }
            while self.tasks.try_join_next().is_some() {}
        }
    }

    /// Closes the listener, but takes first what had connected before, as far as there is room.
    pub fn accept_waiting(&mut self, listener: TcpListener) {
        // The runtime may not have heard of the latest yet; the kernel has.
        let Ok(listener) = listener.into_std() else {
            return;
        };
        while let Ok(slot) = Arc::clone(&self.slots).try_acquire_owned()
            && let Ok((stream, _)) = listener.accept()
            && stream.set_nonblocking(true).is_ok()
        {
            self.spawn(stream, slot);
        }
    }

    fn spawn(&mut self, stream: TcpStream, slot: OwnedSemaphorePermit) {
        // An answer is written whole, so there is nothing to wait for before it is sent.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "cannot set TCP_NODELAY");
        }
        let deadlines = self.deadlines;
        let (draining, stop) = (self.draining.clone(), self.stop.subscribe());
        let counted = self.metrics.connection();
        self.workers
            .spawn(&mut self.tasks, stream, async move |stream, own| {
                connection::serve(stream, own, deadlines, draining, stop).await;
                drop((slot, counted));
            });
    }

    /// Lets those who are connected send a last request, then closes what is idle and waits for
    /// the rest.
    pub async fn drain(&mut self, deadline: Instant) {
        let grace = deadline.min(Instant::now() + LAST_REQUEST_GRACE);
        if timeout_at(grace, self.all_ended()).await.is_err() {
            self.finish(deadline).await;
        }
    }

    /// Closes what is idle and waits for the rest.
    pub async fn finish(&mut self, deadline: Instant) {
        self.stop.send_replace(());
        if timeout_at(deadline, self.all_ended()).await.is_err() {
            tracing::warn!(
                connections = self.tasks.len(),
                "out of time: connections are cut"
            );
        }
    }

    async fn all_ended(&mut self) {
        while self.tasks.join_next().await.is_some() {}
    }
}
