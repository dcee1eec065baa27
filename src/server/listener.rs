//! The public listener: accepts connections up to the limit, hands each to a runtime, and at the end drains them without
//! losing a response. The limit is what the limit of open files leaves: connections must not use up the file descriptors
//! that the store and the private listener need.

use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::auth::{AuthFailures, IdentityProvider, KnownTokens, RuntimeTokens};
use crate::config::Settings;
use crate::http::client::Peer;
use crate::http::connection::ConnectionState;
use crate::http::http1::too_many_connections;
use crate::http::{self, AppState, Limits, http1, http2};
use crate::logging::LineLimit;
use crate::metrics::{HttpMetrics, Metrics};
use crate::server::connection_limits::{ConnectionLimits, Slot};
use crate::server::ops_listener;
use crate::server::proxy_protocol::read_client;
use crate::server::runtimes::Runtimes;
use crate::server::tls::{Accepted, Tls};
use crate::shutdown::{Phase, Shutdown};
use crate::store::{Location, Store};
use crate::writer::Writer;

/// While draining, how long a client with an open connection may take to send one more request, whose response asks to
/// close the connection. Closing at once could cross a request on its way.
const LAST_REQUEST_GRACE: Duration = Duration::from_millis(500);

const ACCEPT_RETRY: Duration = Duration::from_millis(20);
static ACCEPT_ERRORS: LineLimit = LineLimit::new(1, Duration::from_secs(10));

pub(super) struct Connections {
    runtimes: Runtimes,
    settings: Arc<Settings>,
    tls: Option<Arc<Tls>>,
    limits: Arc<ConnectionLimits>,
    metrics: Arc<Metrics>,
    /// Of connections that are rejected without a request.
    http_metrics: Arc<HttpMetrics>,
    tasks: JoinSet<()>,
    phase: watch::Sender<Phase>,
}

impl Connections {
    /// Starts the runtimes, each with a state of its own. They own the last clones of the writer.
    pub(super) fn new(
        settings: Arc<Settings>,
        tls: Option<Arc<Tls>>,
        writer: Writer,
        token_store: Store,
        provider: Option<&Arc<IdentityProvider>>,
        metrics: Arc<Metrics>,
        (phase, shutdown): (watch::Sender<Phase>, Shutdown),
    ) -> anyhow::Result<Self> {
        let tokens = KnownTokens::start(
            token_store,
            writer.clone(),
            Arc::clone(&metrics),
            settings.store_timeout,
            settings.rate_limit,
        );
        let body_bytes_max = settings.body.max_body_bytes;
        let limits = Arc::new(Limits {
            header_timeout: settings.header_timeout,
            body_timeout: settings.body_timeout,
            request_timeout: settings.request_timeout,
            idle_timeout: settings.idle_timeout,
            body_bytes_max,
            large_bodies: http::LargeBodies::new(body_bytes_max),
            trusted_proxies: settings.trusted_proxy.clone(),
            auth_failures: AuthFailures::new(settings.auth_failure_limit),
            cors_origins: settings.cors_origin.clone(),
        });
        let runtimes = Runtimes::start(|| AppState {
            writer: writer.for_this_runtime(),
            tokens: RuntimeTokens::new(&tokens, provider.map(Arc::clone)),
            metrics: metrics.for_runtime(),
            limits: Arc::clone(&limits),
            shutdown: shutdown.clone(),
        })?;
        drop(writer);
        let max = settings.max_connections;
        let per_address_max = settings.max_connections_per_address;
        let per_address_max = per_address_max.unwrap_or((max / 4).max(1));
        Ok(Self {
            runtimes,
            limits: ConnectionLimits::new(max, per_address_max, Arc::clone(&metrics)),
            settings,
            tls,
            http_metrics: metrics.for_runtime(),
            metrics,
            tasks: JoinSet::new(),
            phase,
        })
    }

    /// Accepts connections until it is dropped. At the limit, further ones wait until another one can be closed.
    pub(super) async fn accept_from(&mut self, listener: &TcpListener) {
        loop {
            if let Some((stream, address)) = accept(listener, "public").await
                && let Ok(stream) = stream.into_std()
            {
                let slot = self.limits.slot().await;
                self.spawn(stream, address.ip(), slot);
            }
            while self.tasks.try_join_next().is_some() {}
        }
    }

    /// Closes the listener, after accepting the connections in its backlog up to the limit.
    pub(super) fn accept_backlog(&mut self, listener: TcpListener) {
        // Without the runtime, which may not have been notified of the latest connections yet.
        let Ok(listener) = listener.into_std() else {
            return;
        };
        while let Some(slot) = self.limits.try_slot()
            && let Ok((stream, address)) = listener.accept()
            && stream.set_nonblocking(true).is_ok()
        {
            self.spawn(stream, address.ip(), slot);
        }
    }

    fn spawn(&mut self, stream: TcpStream, address: IpAddr, slot: Slot) {
        // Responses are written whole, so Nagle's algorithm would only delay them.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "cannot set TCP_NODELAY");
        }
        let peer = Peer::new(address, &self.settings.trusted_proxy);
        // The clients of a proxy share its address.
        let is_limited = !peer.is_trusted_proxy;
        let address_slot = is_limited.then(|| self.limits.address_slot(address));
        if let Some(None) = address_slot {
            let response = too_many_connections(&peer, &self.http_metrics);
            // One attempt: the client has not sent anything yet, so it fits into the buffer of the socket. With TLS it
            // could not read it without a handshake.
            if self.tls.is_none() {
                let _ = (&stream).write(&response);
            }
            return;
        }
        let connection = ConnectionState::new(peer, Arc::clone(&self.limits.authenticated));
        let start = ConnectionStart {
            proxy_protocol: self
                .settings
                .proxy_protocol
                .then(|| Arc::clone(&self.limits)),
            tls: self.tls.clone(),
            handshake_timeout: self.settings.tls.handshake_timeout,
            metrics: Arc::clone(&self.metrics),
        };
        let served = Arc::clone(&connection);
        // The slot comes last: when it is free, so is the rest.
        let held = (address_slot, self.metrics.connection(), slot);
        let task = self.runtimes.spawn(&mut self.tasks, |state| async move {
            if let Err(error) = start.serve(stream, served, state).await {
                tracing::debug!(%error, "cannot serve a connection");
            }
            drop(held);
        });
        self.limits.register(&connection, task);
    }

    /// From now on every response asks to close its connection, and the service is not ready.
    pub(super) fn start_draining(&self) {
        self.phase.send_replace(Phase::Draining);
    }

    /// Lets clients send a last request, then closes idle connections and waits for the others.
    pub(super) async fn drain(&mut self, deadline: Instant) {
        let grace = deadline.min(Instant::now() + LAST_REQUEST_GRACE);
        if timeout_at(grace, self.all_closed()).await.is_err() {
            self.close(deadline).await;
        }
    }

    /// Closes idle connections and waits for the others.
    pub(super) async fn close(&mut self, deadline: Instant) {
        self.phase.send_replace(Phase::Closing);
        if timeout_at(deadline, self.all_closed()).await.is_err() {
            tracing::warn!(
                connections = self.tasks.len(),
                "the drain timeout is over; open connections are closed"
            );
        }
    }

    async fn all_closed(&mut self) {
        while self.tasks.join_next().await.is_some() {}
    }
}

/// What precedes the first request of a connection.
struct ConnectionStart {
    /// With the PROXY protocol, every connection starts with the address of the client, and comes from a proxy.
    proxy_protocol: Option<Arc<ConnectionLimits>>,
    tls: Option<Arc<Tls>>,
    handshake_timeout: Duration,
    metrics: Arc<Metrics>,
}

impl ConnectionStart {
    async fn serve(
        self,
        stream: TcpStream,
        connection: Arc<ConnectionState>,
        state: Arc<AppState>,
    ) -> io::Result<()> {
        let mut stream = tokio::net::TcpStream::from_std(stream)?;
        let peer = &connection.peer;
        let mut address_slot = None;
        if let Some(limits) = &self.proxy_protocol {
            if !peer.is_trusted_proxy {
                return Err(io::Error::other("it does not come from a --trusted-proxy"));
            }
            let client = Box::pin(read_client(&mut stream));
            if let Some(client) = timeout(state.limits.header_timeout, client).await?? {
                peer.set_proxied(client);
                address_slot = limits.address_slot(client);
                if address_slot.is_none() {
                    let response = too_many_connections(peer, &state.metrics);
                    return match self.tls {
                        None => stream.try_write(&response).map(drop),
                        Some(_) => Ok(()),
                    };
                }
            }
        }
        // Each part in a box: a future has room for all that it may await, and the task that runs it has that room twice.
        match &self.tls {
            None => Box::pin(http1::serve(stream, state, connection, http::handle)).await,
            Some(tls) => {
                let handshake = Box::pin(tls.accept(stream));
                let shaken = timeout(self.handshake_timeout, handshake).await;
                let accepted = shaken.map_err(io::Error::from).flatten();
                let accepted = accepted.inspect_err(|_| self.metrics.handshakes_failed.add(1))?;
                serve_accepted(accepted, state, connection).await;
            }
        }
        drop(address_slot);
        Ok(())
    }
}

async fn serve_accepted(
    accepted: Accepted,
    state: Arc<AppState>,
    connection: Arc<ConnectionState>,
) {
    if !matches!(accepted, Accepted::Plaintext(_)) {
        connection.set_encrypted();
    }
    match accepted {
        Accepted::Http1(stream) => {
            Box::pin(http1::serve(stream, state, connection, http::handle)).await;
        }
        Accepted::Http2(stream) => {
            Box::pin(http2::serve(stream, state, connection, http::handle)).await;
        }
        Accepted::Plaintext(stream) => {
            Box::pin(http1::serve(stream, state, connection, http::require_tls)).await;
        }
    }
}

/// None after an error, which is logged at most once in ten seconds: the client has disconnected already, or there are no
/// file descriptors left.
pub(super) async fn accept(
    listener: &TcpListener,
    name: &'static str,
) -> Option<(tokio::net::TcpStream, SocketAddr)> {
    match listener.accept().await {
        Ok(accepted) => Some(accepted),
        Err(error) => {
            if ACCEPT_ERRORS.admit(Instant::now().into_std()) {
                tracing::warn!(%error, listener = name, "cannot accept a connection");
            }
            sleep(ACCEPT_RETRY).await;
            None
        }
    }
}

/// File descriptors for standard streams, listeners, database files (each several times), `/proc`, and what libraries
/// open.
const BASE_FDS: usize = 48;

/// Two for epoll, one to wake it, one for signals.
const FDS_PER_RUNTIME: usize = 4;

/// A runtime, and the sockets of an old and a new connection.
const FDS_PER_DATABASE_CONNECTION: usize = FDS_PER_RUNTIME + 4;

/// The configured limit of connections, or less if the limit of open files does not allow it. An error if it allows none.
pub(super) fn max_connections(settings: &Settings) -> anyhow::Result<usize> {
    let configured = settings.max_connections;
    let Some(limit) = raised_fd_limit() else {
        return Ok(configured);
    };
    let reserve = reserved_fds(settings);
    let room = limit.saturating_sub(reserve);
    anyhow::ensure!(
        room > 0,
        "the limit of open files is {limit}, and the server needs more than {reserve}; \
         raise it (`ulimit -n`, or LimitNOFILE= of a systemd unit)"
    );
    if configured > room {
        tracing::warn!(
            max_connections = room,
            "--max-connections is {configured}, but the limit of open files is {limit}, which leaves room for {room}; \
             raise that limit (`ulimit -n`, or LimitNOFILE= of a systemd unit), or lower --max-connections"
        );
    }
    Ok(configured.min(room))
}

/// File descriptors for everything but connections to the public listener.
fn reserved_fds(settings: &Settings) -> usize {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let database_connections = match settings.store.location {
        Location::Sqlite(_) => 0,
        Location::Postgres(_) => settings.store_connections + 1,
    };
    // The main thread and that of the private listener have a runtime too.
    BASE_FDS
        + ops_listener::CONNECTIONS_MAX
        + (cores + 2) * FDS_PER_RUNTIME
        + database_connections * FDS_PER_DATABASE_CONNECTION
}

/// The limit of open files, after raising the soft to the hard limit. None if there is no limit.
fn raised_fd_limit() -> Option<usize> {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::debug!(%error, "cannot raise the limit of open files");
    }
    let limit = getrlimit(Resource::Nofile).current?;
    Some(usize::try_from(limit).unwrap_or(usize::MAX))
}
