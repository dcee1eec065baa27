//! Assemble, serve, drain: the only wiring. Whatever ends the writer ends the process, and a
//! process that was asked to end answers what it has accepted first.

mod connections;
mod first_run;
mod open_files;
mod systemd;
mod workers;

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tokio::net::{TcpListener, TcpSocket};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{Instant, sleep_until};

use crate::config::{OpsListen, Settings};
use crate::http::error::Kind;
use crate::http::stream::Deadlines;
use crate::http::{self, BodyLimits, Draining, Tokens};
use crate::metrics::Metrics;
use crate::ops::{Limits, Ops};
use crate::store::{Location, Mode, Store};
use crate::version::VERSION;
use crate::writer::{Writer, WriterThreads};

use connections::Connections;
pub use workers::Workers;

/// How long the answers to those who wait may take once the store has failed.
const FAILED_DRAIN_TIMEOUT: Duration = Duration::from_millis(700);

/// How long the writer has for what it holds when the time for draining is over.
const LAST_COMMIT_TIMEOUT: Duration = Duration::from_secs(1);

/// Connections that the kernel keeps for us until they are accepted.
const BACKLOG: u32 = 1024;

/// Runs the service until it is asked to end, or until its store fails.
pub async fn run(settings: &Settings) -> anyhow::Result<()> {
    let mut asked_to_end = Signals::new()?;
    let settings = &Settings {
        max_connections: open_files::max_connections(settings)?,
        ..settings.clone()
    };

    // The ports are claimed first, so that nothing is made when one is taken; but nobody can connect
    // to the public one before the store is ready.
    let socket = bind(settings.listen, "--listen")?;
    let metrics = Arc::new(Metrics::new(Kind::ALL.iter().map(|kind| kind.number())));
    let (ops, ops_address) = let_watch(settings, Arc::clone(&metrics))?;
    let Opened {
        stores,
        reader,
        first_token,
    } = {
        let settings = settings.clone();
        tokio::task::spawn_blocking(move || open(&settings)).await??
    };
    let (writer, writer_threads) = Writer::spawn(
        stores,
        settings.max_queue,
        settings.store_timeout,
        Arc::clone(&metrics),
    );

    let listener = socket
        .listen(BACKLOG)
        .with_context(|| cannot_listen(settings.listen, "--listen"))?;
    ops.serving(writer.pulse());
    let address = listener.local_addr().context("cannot listen")?;
    tracing::info!(
        version = VERSION,
        %address,
        ops_address = ops_address.map(tracing::field::display),
        store = %settings.store.store,
        "listening"
    );
    if let Some(token_path) = first_token {
        first_run::greet(&token_path, reachable(address));
    }

    let draining = Draining::default();
    let connections = connections(settings, writer, reader, draining.clone(), metrics)?;
    let begin_to_end = move || {
        draining.begin();
        ops.draining();
    };
    systemd::ready(address);
    let ended = serve(
        listener,
        connections,
        begin_to_end,
        writer_threads,
        &mut asked_to_end,
        settings.drain_timeout,
    )
    .await;
    http::log_suppressed();
    ended
}

/// Whatever is between a connection and the writer.
fn connections(
    settings: &Settings,
    writer: Writer,
    reader: Store,
    draining: Draining,
    metrics: Arc<Metrics>,
) -> anyhow::Result<Connections> {
    let for_tokens = Arc::clone(&metrics);
    let tokens = Tokens::new(reader, writer.clone(), for_tokens, settings.store_timeout);
    let body_limits = BodyLimits {
        bytes_max: settings.body.max_body_bytes,
        timeout: settings.body_timeout,
    };
    let workers = Workers::start(|| {
        let answers = metrics.answers_of_a_worker();
        let router = http::router(http::Parts {
            writer: writer.for_this_runtime(),
            tokens: tokens.clone(),
            answers: Arc::clone(&answers),
            body_limits,
            draining: draining.clone(),
        });
        (router, answers)
    })?;
    drop((writer, tokens)); // the last of them ends the writer
    let deadlines = Deadlines {
        header: settings.header_timeout,
        idle: settings.idle_timeout,
    };
    Ok(Connections::new(
        workers,
        deadlines,
        draining,
        metrics,
        settings.max_connections,
    ))
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
    // The store gives up a little before the request does, so that the client gets its reason.
    let timeout = settings.store_timeout * 7 / 8;
    let mut stores = Store::open_writers(location, settings.store_connections, timeout)?;
    for store in &mut stores {
        store.limit_wal(settings.wal.max_wal_bytes);
    }
    let first_token = match (location, &mut stores[..]) {
        (Location::Sqlite(path), [store, ..]) => first_run::make_first_token(store, path)?,
        // Others use it too, and perhaps it cannot be reached yet.
        _ => None,
    };
    Ok(Opened {
        stores,
        reader: Store::open(location, Mode::ServeTokens { timeout })?,
        first_token,
    })
}

async fn serve(
    listener: TcpListener,
    mut connections: Connections,
    begin_to_end: impl Fn(),
    mut writer_threads: WriterThreads,
    asked_to_end: &mut Signals,
    drain_timeout: Duration,
) -> anyhow::Result<()> {
    tokio::select! {
        () = connections.accept_from(&listener) => {}
        () = asked_to_end.next() => {}
        ended = writer_threads.ended() => {
            begin_to_end();
            drop(listener);
            connections.finish(Instant::now() + FAILED_DRAIN_TIMEOUT).await;
            return ended.context(FAILED);
        }
    }
    tracing::info!("draining");
    systemd::stopping(drain_timeout);
    begin_to_end();
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

const FAILED: &str = "the server stopped because its store cannot be used any more";
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

/// Opens the private listener, if there is to be one. It ends with the process.
fn let_watch(
    settings: &Settings,
    metrics: Arc<Metrics>,
) -> anyhow::Result<(Ops, Option<SocketAddr>)> {
    let limits = Limits {
        connections: settings.max_connections,
        queue: settings.max_queue,
        wal_bytes: settings.wal.max_wal_bytes,
    };
    let ops = Ops::new(metrics, settings.store.store.clone(), limits);
    let OpsListen::On(address) = settings.ops_listen else {
        return Ok((ops, None));
    };
    // Before they listen, two sockets may have one address.
    anyhow::ensure!(
        address != settings.listen || address.port() == 0,
        "--listen and --ops-listen are both {address}; choose another --ops-listen"
    );
    let listener = bind(address, "--ops-listen")?
        .listen(BACKLOG)
        .with_context(|| cannot_listen(address, "--ops-listen"))?;
    let address = listener.local_addr().context("cannot listen")?;
    let listener = listener.into_std();
    listener
        .and_then(|listener| ops.clone().start(listener))
        .context("cannot start the private listener")?;
    Ok((ops, Some(address)))
}

fn bind(address: SocketAddr, setting: &str) -> anyhow::Result<TcpSocket> {
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
        .with_context(|| cannot_listen(address, setting))
}

fn cannot_listen(address: SocketAddr, setting: &str) -> String {
    format!("cannot listen on {address}; free that port or choose another {setting}")
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
