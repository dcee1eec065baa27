//! Startup, serving, drain: all modules are wired here. If a writer thread ends, the process ends; on SIGTERM or SIGINT it
//! completes the requests that it has accepted first.

mod bootstrap;
mod connection_limits;
mod listener;
mod ops_listener;
mod proxy_protocol;
mod runtimes;
mod sd_notify;
mod tls;

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow};
use tokio::net::{TcpListener, TcpSocket};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{Instant, sleep, sleep_until};
use tokio_rustls::TlsAcceptor;

use crate::auth::IdentityProvider;
use crate::config::Settings;
use crate::http;
use crate::http::error::ErrorKind;
use crate::metrics::Metrics;
use crate::ops::Ops;
use crate::shutdown::Shutdown;
use crate::store::{Location, Store};
use crate::version::VERSION;
use crate::writer::{Writer, WriterThreads};

use listener::Connections;
pub use runtimes::Runtimes;
use tls::Tls;

/// How long the responses may take after a fatal error of the store.
const FATAL_DRAIN_TIMEOUT: Duration = Duration::from_millis(700);

/// The least time for the final commit, when the drain timeout is over.
const FINAL_COMMIT_TIMEOUT: Duration = Duration::from_secs(1);

/// How much of its responses the kernel buffers for a client that does not read them; it allocates twice as much. By default these
/// are several megabytes for each connection.
const SEND_BUFFER_BYTES: u32 = 64 << 10;

/// Connections that the kernel queues until they are accepted.
const BACKLOG: u32 = 1024;

const FATAL: &str = "the server stopped because its store cannot be used any more";
const STUCK: &str =
    "the final commit timed out; unacknowledged plants may not be stored; check the disk";

/// Runs the service until a signal ends it or its store fails.
pub(crate) async fn run(settings: &Settings) -> anyhow::Result<()> {
    let terminate = signal(SignalKind::terminate()).context("cannot wait for SIGTERM")?;
    let interrupt = signal(SignalKind::interrupt()).context("cannot wait for SIGINT")?;
    let hangup = signal(SignalKind::hangup()).context("cannot wait for SIGHUP")?;
    let settings = Arc::new(Settings {
        max_connections: listener::max_connections(settings)?,
        ..settings.clone()
    });

    // Both ports are bound first, so that nothing is created if one is in use; the public one listens only when the store
    // is ready.
    let socket = bind(settings.listen, "--listen")?;
    let metrics = Arc::new(Metrics::new(ErrorKind::ALL.iter().map(|kind| kind.code())));
    let (tls, certificate_name) = Tls::start(&settings.tls, &metrics)?.unzip();
    let certificate_name = certificate_name.flatten();
    let provider = IdentityProvider::start(&settings.oidc, &metrics);
    let provider = provider.map_err(|cause| anyhow!("--oidc-issuer: {cause}"))?;
    let (phase, shutdown) = Shutdown::channel();
    let ops = Ops::new(
        Arc::clone(&metrics),
        Arc::clone(&settings),
        shutdown.clone(),
    );
    let ops_address = match settings.ops.ops_listen {
        Some(address) => {
            let tls = tls.as_ref().filter(|_| settings.ops.ops_tls);
            let tls = tls.map(|tls| tls.http1_acceptor());
            Some(start_ops(&ops, address, tls)?)
        }
        None => None,
    };

    let for_opening = Arc::clone(&settings);
    let open = tokio::task::spawn_blocking(move || open_stores(&for_opening));
    let (writers, tokens, first_token) = open.await??;
    let (writer, writer_threads) = Writer::spawn(
        writers,
        settings.max_queue,
        settings.store_timeout,
        Arc::clone(&metrics),
    );

    let (listener, address) = listen(socket, settings.listen, "--listen")?;
    ops.set_serving(writer.health_check());
    tracing::info!(
        version = VERSION,
        %address,
        ops_address = ops_address.map(tracing::field::display),
        store = %settings.store.location,
        "listening"
    );
    if tls.is_none() && !address.ip().is_loopback() && settings.trusted_proxy.is_empty() {
        tracing::warn!(
            "tokens and plants are sent without encryption: use --tls-cert and --tls-key, or listen on 127.0.0.1 behind a proxy \
             with TLS"
        );
    }
    if let Some(token_path) = first_token {
        let address = reachable(address);
        let origin = match &tls {
            Some(_) => tls::origin(address, certificate_name.as_deref()),
            None => format!("http://{address}"),
        };
        bootstrap::print_example_request(&token_path, &origin);
    }
    tokio::spawn(on_hangup(tls.clone(), hangup));

    let connections = Connections::new(
        Arc::clone(&settings),
        tls,
        writer,
        tokens,
        provider.as_ref(),
        metrics,
        (phase, shutdown),
    )?;
    tokio::spawn(http::report_suppressed_lines());
    sd_notify::ready(address);
    let (signals, timeout) = ([terminate, interrupt], settings.drain_timeout);
    let result = serve(listener, connections, writer_threads, signals, timeout).await;
    http::log_suppressed();
    result
}

/// Opens the connections to the store: one per writer thread, and one for reading tokens. Also the path of the first token,
/// if it was created.
fn open_stores(settings: &Settings) -> anyhow::Result<(Vec<Store>, Store, Option<PathBuf>)> {
    let location = &settings.store.location;
    // Shorter than the timeout of the request, so that the client gets the store's reason.
    let timeout = settings.store_timeout * 7 / 8;
    let mut writers = Store::open_writers(location, settings.store_connections, timeout)?;
    for store in &mut writers {
        store.limit_wal(settings.wal.max_wal_bytes);
    }
    let first_token = match (location, &mut writers[..]) {
        (Location::Sqlite(path), [store, ..]) => bootstrap::create_first_token(store, path)?,
        // Other nodes may use a PostgreSQL database too, and it may be unavailable now.
        _ => None,
    };
    let tokens = writers[0].open_tokens(location, timeout)?;
    Ok((writers, tokens, first_token))
}

async fn serve(
    listener: TcpListener,
    mut connections: Connections,
    mut writer_threads: WriterThreads,
    mut signals: Signals,
    drain_timeout: Duration,
) -> anyhow::Result<()> {
    tokio::select! {
        () = connections.accept_from(&listener) => {}
        () = next_signal(&mut signals) => {}
        ended = writer_threads.ended() => {
            connections.start_draining();
            drop(listener);
            connections.close(Instant::now() + FATAL_DRAIN_TIMEOUT).await;
            return ended.context(FATAL);
        }
    }
    tracing::info!("draining");
    sd_notify::stopping(drain_timeout);
    connections.start_draining();
    let deadline = Instant::now() + drain_timeout;
    connections.accept_backlog(listener);
    tokio::select! {
        () = connections.drain(deadline) => {}
        () = next_signal(&mut signals) => tracing::warn!("second signal: open connections are closed"),
        ended = writer_threads.ended() => return ended.context(FATAL),
    }
    // This drops the last `Writer`: the threads commit what is queued and end.
    drop(connections);
    let deadline = deadline.max(Instant::now() + FINAL_COMMIT_TIMEOUT);
    tokio::select! {
        ended = writer_threads.ended() => ended.context(FATAL)?,
        () = sleep_until(deadline) => anyhow::bail!(STUCK),
        () = signal_and_timeout(&mut signals) => anyhow::bail!(STUCK),
    }
    tracing::info!("stopped");
    Ok(())
}

/// SIGHUP never ends the server.
async fn on_hangup(tls: Option<Arc<Tls>>, mut hangup: Signal) {
    if let Some(tls) = tls {
        tls.reload(hangup).await;
    } else {
        while hangup.recv().await.is_some() {
            tracing::info!("SIGHUP: there is no certificate to load again");
        }
    }
}

/// SIGTERM and SIGINT.
type Signals = [Signal; 2];

async fn next_signal([terminate, interrupt]: &mut Signals) {
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}

/// A further signal leaves the least time for the final commit.
async fn signal_and_timeout(signals: &mut Signals) {
    next_signal(signals).await;
    sleep(FINAL_COMMIT_TIMEOUT).await;
}

fn start_ops(
    ops: &Arc<Ops>,
    address: SocketAddr,
    tls: Option<TlsAcceptor>,
) -> anyhow::Result<SocketAddr> {
    let socket = bind(address, "--ops-listen")?;
    let (listener, address) = listen(socket, address, "--ops-listen")?;
    let started = ops_listener::start(listener, Arc::clone(ops), tls);
    started.context("cannot start the private listener")?;
    Ok(address)
}

fn bind(address: SocketAddr, setting: &str) -> anyhow::Result<TcpSocket> {
    let socket = if address.is_ipv4() {
        TcpSocket::new_v4()
    } else {
        TcpSocket::new_v6()
    };
    let bound = socket.and_then(|socket| {
        socket.set_reuseaddr(true)?; // a restart does not wait for old connections to time out
        socket.set_send_buffer_size(SEND_BUFFER_BYTES)?; // of the connections that it accepts
        socket.bind(address)?;
        Ok(socket)
    });
    bound.map_err(|error| cannot_listen(error, address, setting))
}

/// The listener and its address, which has a port even if `address` has none.
fn listen(
    socket: TcpSocket,
    address: SocketAddr,
    setting: &str,
) -> anyhow::Result<(TcpListener, SocketAddr)> {
    let listener = socket.listen(BACKLOG);
    let listener = listener.map_err(|error| cannot_listen(error, address, setting))?;
    let address = listener.local_addr().context("cannot listen")?;
    Ok((listener, address))
}

fn cannot_listen(error: io::Error, address: SocketAddr, setting: &str) -> anyhow::Error {
    let advice = match error.kind() {
        io::ErrorKind::AddrNotAvailable => "this machine does not have that address;",
        io::ErrorKind::PermissionDenied => "ports below 1024 need privileges;",
        _ => "free that port or",
    };
    let message = format!("cannot listen on {address}; {advice} choose another {setting}");
    anyhow::Error::new(error).context(message)
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
