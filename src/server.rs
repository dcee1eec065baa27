//! Assemble, serve, drain: the only wiring. Whatever ends the writer ends the process, and a
//! process that was asked to end answers what it has accepted first.

mod first_run;
mod workers;

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use axum::Router;
use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::net::{TcpListener, TcpSocket};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use crate::config::Settings;
use crate::http::stream::Deadlines;
use crate::http::{self, BodyLimits, Draining, Tokens, connection};
use crate::store::{Location, Store};
use crate::writer::{Writer, WriterThreads};

pub use workers::Workers;

/// While draining, how long a client that keeps its connection may take to send one more request,
/// which is answered with the wish to close. Closing at once could cross a request on its way.
const LAST_REQUEST_GRACE: Duration = Duration::from_millis(500);

/// How long the answers to those who wait may take once the store has failed.
const FAILED_DRAIN_TIMEOUT: Duration = Duration::from_millis(700);

/// How long the writer has for what it holds when the time for draining is over.
const LAST_COMMIT_TIMEOUT: Duration = Duration::from_secs(1);

/// Connections that the kernel keeps for us until they are accepted.
const BACKLOG: u32 = 1024;

/// Runs the service until it is asked to end, or until its store fails.
pub async fn run(settings: &Settings) -> anyhow::Result<()> {
    let mut asked_to_end = Signals::new()?;
    raise_open_files_limit();

    // The port is claimed first, so that nothing is made when it is taken; but nobody can connect
    // before the store is ready.
    let socket = bind(settings.listen)?;
    let Opened {
        stores,
        reader,
        first_token,
    } = {
        let settings = settings.clone();
        tokio::task::spawn_blocking(move || open(&settings)).await??
    };
    let (writer, writer_threads) =
        Writer::spawn(stores, settings.max_queue, settings.store_timeout);

    let listener = socket
        .listen(BACKLOG)
        .with_context(|| cannot_listen(settings.listen))?;
    let address = listener.local_addr().context("cannot listen")?;
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        %address,
        store = %settings.store.store,
        "listening"
    );
    if let Some(token_path) = first_token {
        first_run::greet(&token_path, reachable(address));
    }

    let draining = Draining::default();
    let tokens = Tokens::new(reader, writer.clone(), settings.store_timeout);
    let body_limits = BodyLimits {
        bytes_max: settings.body.max_body_bytes,
        timeout: settings.body_timeout,
    };
    let workers = Workers::start(|| {
        http::router(http::Parts {
            writer: writer.for_this_runtime(),
            tokens: tokens.clone(),
            body_limits,
        })
    })?;
    drop((writer, tokens)); // the last of them ends the writer
    let deadlines = Deadlines {
        header: settings.header_timeout,
        idle: settings.idle_timeout,
    };
    let connections = Connections::new(
        workers,
        deadlines,
        draining.clone(),
        settings.max_connections,
    );
    serve(
        listener,
        connections,
        draining,
        writer_threads,
        &mut asked_to_end,
        settings.drain_timeout,
    )
    .await
}

/// The store, as often as it is needed.
struct Opened {
    stores: Vec<Store>,
    /// For the tokens.
    reader: Store,
    first_token: Option<PathBuf>,
}

fn open(settings: &Settings) -> anyhow::Result<Opened> {
    let location = &settings.store.store;
    let timeout = settings.store_timeout;
    let mut stores = Store::open_to_serve(location, settings.store_connections, timeout)?;
    let first_token = match (location, &mut stores[..]) {
        (Location::Sqlite(path), [store, ..]) => first_run::make_first_token(store, path)?,
        // Others use it too, and perhaps it cannot be reached yet.
        _ => None,
    };
    Ok(Opened {
        stores,
        reader: Store::open_beside(location, timeout)?,
        first_token,
    })
}

async fn serve(
    listener: TcpListener,
    mut connections: Connections,
    draining: Draining,
    mut writer_threads: WriterThreads,
    asked_to_end: &mut Signals,
    drain_timeout: Duration,
) -> anyhow::Result<()> {
    tokio::select! {
        () = connections.accept_from(&listener) => {}
        () = asked_to_end.next() => {}
        ended = writer_threads.ended() => {
            draining.begin();
            drop(listener);
            connections.finish(Instant::now() + FAILED_DRAIN_TIMEOUT).await;
            return ended.context(FAILED);
        }
    }
    tracing::info!("draining");
    draining.begin();
    let deadline = Instant::now() + drain_timeout;
    connections.accept_waiting(listener);
    tokio::select! {
        () = connections.drain(deadline) => {}
        () = asked_to_end.next() => tracing::warn!("asked again: connections are cut"),
        ended = writer_threads.ended() => return ended.context(FAILED),
    }
    // Nobody can reach the writer any more, so it commits what it holds and ends.
    drop(connections);
    let deadline = deadline.max(Instant::now() + LAST_COMMIT_TIMEOUT);
    tokio::select! {
        ended = writer_threads.ended() => ended.context(FAILED)?,
        () = sleep_until(deadline) => anyhow::bail!(STUCK),
        () = asked_to_end.next() => anyhow::bail!(STUCK),
    }
    tracing::info!("ended");
    Ok(())
}

const FAILED: &str = "the store can no longer be trusted; look at its disk, then start again";
const STUCK: &str = "the disk did not take in time what had not been acknowledged; look at it";

/// SIGTERM and ctrl-c.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> anyhow::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate()).context("cannot wait for SIGTERM")?,
            interrupt: signal(SignalKind::interrupt()).context("cannot wait for SIGINT")?,
        })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Every connection there is, and no more than there may be.
struct Connections {
    workers: Workers<Router>,
    deadlines: Deadlines,
    draining: Draining,
    slots: Arc<Semaphore>,
    tasks: JoinSet<()>,
    stop: watch::Sender<()>,
}

impl Connections {
    fn new(workers: Workers<Router>, deadlines: Deadlines, draining: Draining, max: usize) -> Self {
        Self {
            workers,
            deadlines,
            draining,
            slots: Arc::new(Semaphore::new(max)),
            tasks: JoinSet::new(),
            stop: watch::Sender::new(()),
        }
    }

    async fn accept_from(&mut self, listener: &TcpListener) {
        loop {
            let slot = Arc::clone(&self.slots).acquire_owned().await;
            let slot = slot.expect("the semaphore is never closed");
            let accepted = listener.accept().await;
            match accepted.and_then(|(stream, _)| stream.into_std()) {
                Ok(stream) => self.spawn(stream, slot),
                // The peer is gone already, or there are no more file descriptors for now.
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    sleep(Duration::from_millis(20)).await;
                }
            }
            while self.tasks.try_join_next().is_some() {}
        }
    }

    /// Closes the listener, but takes first what had connected before, as far as there is room.
    fn accept_waiting(&mut self, listener: TcpListener) {
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
        self.workers
            .spawn(&mut self.tasks, stream, async move |stream, router| {
                connection::serve(stream, router, deadlines, draining, stop).await;
                drop(slot);
            });
    }

    /// Lets those who are connected send a last request, then closes what is idle and waits for
    /// the rest.
    async fn drain(&mut self, deadline: Instant) {
        let grace = deadline.min(Instant::now() + LAST_REQUEST_GRACE);
        if timeout_at(grace, self.all_ended()).await.is_err() {
            self.finish(deadline).await;
        }
    }

    /// Closes what is idle and waits for the rest.
    async fn finish(&mut self, deadline: Instant) {
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

fn bind(address: SocketAddr) -> anyhow::Result<TcpSocket> {
    let socket = if address.is_ipv4() {
        TcpSocket::new_v4()
    } else {
        TcpSocket::new_v6()
    };
    socket
        .and_then(|socket| {
            socket.set_reuseaddr(true)?; // a restart need not wait for old connections to time out
            socket.bind(address)?;
            Ok(socket)
        })
        .with_context(|| cannot_listen(address))
}

fn cannot_listen(address: SocketAddr) -> String {
    format!("cannot listen on {address}; free that port or choose another --listen")
}

/// The address that a client on this machine uses.
fn reachable(address: SocketAddr) -> SocketAddr {
    let ip = match address {
        SocketAddr::V4(v4) if v4.ip().is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        SocketAddr::V6(v6) if v6.ip().is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        _ => address.ip(),
    };
    SocketAddr::new(ip, address.port())
}

/// Shells and service managers hand out few file descriptors and let us ask for more.
fn raise_open_files_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::debug!(%error, "cannot raise the limit of open files");
    }
}
