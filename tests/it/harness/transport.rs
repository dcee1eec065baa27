//! How tests reach the public listener. By default directly; with `TRANSPORT=tls` or `TRANSPORT=http2` every server uses TLS, and
//! its address is that of a bridge in this process, which encrypts what a test sends, or translates it to HTTP/2. So one text
//! tests all three.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, OnceLock};
use std::task::{Context, Poll, ready};

use hyper::body::Incoming;
use hyper::header::{CONNECTION, HOST, TRANSFER_ENCODING};
use hyper::service::service_fn;
use hyper::{Request, Response, Uri, Version};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tempfile::TempDir;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::runtime::Runtime;
use tokio::task::AbortHandle;
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsConnector, rustls};

use super::clock::Clock;
use super::output;

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    Plain,
    Tls,
    Http2,
}

impl Transport {
    /// As in documents; none for HTTP/1.1 without TLS.
    pub fn name(self) -> Option<&'static str> {
        match self {
            Self::Plain => None,
            Self::Tls => Some("TLS"),
            Self::Http2 => Some("HTTP/2"),
        }
    }
}

pub fn transport() -> Transport {
    match std::env::var("TRANSPORT").as_deref() {
        Err(_) | Ok("") => Transport::Plain,
        Ok("tls") => Transport::Tls,
        Ok("http2") => Transport::Http2,
        Ok(other) => panic!("TRANSPORT={other}: expected tls or http2"),
    }
}

/// A certificate for 127.0.0.1 and localhost, and its key.
pub struct Certificate {
    pub cert: PathBuf,
    pub key: PathBuf,
}

impl Certificate {
    /// Creates the files in this directory.
    pub fn create(directory: &Path, name: &str, days: u32) -> Self {
        Self::create_at("+0", directory, name, days)
    }

    /// A certificate that was valid for two days, ten days ago.
    pub fn create_expired(directory: &Path, name: &str) -> Self {
        Self::create_at("-10d", directory, name, 2)
    }

    /// A certificate that will be valid in ten days.
    pub fn create_for_later(directory: &Path, name: &str) -> Self {
        Self::create_at("+10d", directory, name, 100)
    }

    fn create_at(time: &str, directory: &Path, name: &str, days: u32) -> Self {
        let certificate = Self {
            cert: directory.join(format!("{name}.crt")),
            key: directory.join(format!("{name}.key")),
        };
        let clock = Clock::new(directory);
        clock.set(time);
        let mut openssl = Command::new("openssl");
        clock.apply_to(&mut openssl);
        openssl
            .args(["req", "-x509", "-newkey", "ec", "-nodes", "-pkeyopt"])
            .args(["ec_paramgen_curve:P-256", "-subj", "/CN=plants"])
            .args(["-addext", "basicConstraints=critical,CA:FALSE", "-addext"])
            .args(["subjectAltName=IP:127.0.0.1,DNS:localhost", "-days"])
            .args([&days.to_string(), "-keyout"])
            .arg(&certificate.key)
            .arg("-out")
            .arg(&certificate.cert);
        let made = output(&mut openssl);
        let errors = String::from_utf8_lossy(&made.stderr);
        assert!(made.status.success(), "{errors}");
        certificate
    }

    /// A client that trusts this certificate only.
    pub fn client_config(&self, protocols: &[&str]) -> ClientConfig {
        let mut roots = RootCertStore::empty();
        let certificate = CertificateDer::from_pem_file(&self.cert).expect("a certificate");
        roots.add(certificate).expect("a certificate");
        let mut config = ClientConfig::builder()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let protocols = protocols.iter().map(|name| name.as_bytes().to_vec());
        config.alpn_protocols = protocols.collect();
        config
    }
}

/// The certificate of all servers with TRANSPORT.
pub fn certificate() -> &'static Certificate {
    static CERTIFICATE: OnceLock<(TempDir, Certificate)> = OnceLock::new();
    let (_, certificate) = CERTIFICATE.get_or_init(|| {
        let directory = super::directory();
        let certificate = Certificate::create(directory.path(), "server", 100);
        (directory, certificate)
    });
    certificate
}

/// Forwards connections until it is dropped.
pub struct Bridge {
    pub address: SocketAddr,
    task: AbortHandle,
}

impl Drop for Bridge {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A bridge to a server, unless tests connect directly.
pub fn bridge(server: SocketAddr) -> Option<Bridge> {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    let transport = transport();
    let protocols = match transport {
        Transport::Plain => return None,
        Transport::Tls => ["http/1.1"],
        Transport::Http2 => ["h2"],
    };
    let runtime = RUNTIME.get_or_init(|| Runtime::new().expect("a runtime"));
    let connector = TlsConnector::from(Arc::new(certificate().client_config(&protocols)));
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0"));
    let listener = listener.expect("a port");
    let address = listener.local_addr().expect("an address");
    let forward = async move {
        while let Ok((client, _)) = listener.accept().await {
            let connector = connector.clone();
            tokio::spawn(async move {
                // A server that cannot be reached is one that closes the connection.
                let Ok(server) = connect(&client, server, &connector).await else {
                    return;
                };
                match transport {
                    Transport::Http2 => translate(client, server).await,
                    _ => encrypt(client, server).await,
                }
            });
        }
    };
    let task = runtime.spawn(forward).abort_handle();
    Some(Bridge { address, task })
}

/// From the address of the client.
async fn connect(
    client: &TcpStream,
    server: SocketAddr,
    connector: &TlsConnector,
) -> io::Result<TlsStream<Counted>> {
    client.set_nodelay(true)?;
    let client = client.peer_addr()?;
    let socket = TcpSocket::new_v4()?;
    socket.bind((client.ip(), 0).into())?;
    let stream = socket.connect(server).await?;
    stream.set_nodelay(true)?;
    let name = ServerName::from(server.ip());
    let connection = Arc::new(Connection {
        port: stream.local_addr()?.port(),
        bytes: AtomicU64::new(0),
        requests: AtomicU64::new(0),
    });
    let known = (client, Arc::clone(&connection));
    CONNECTIONS.lock().expect("no panic").extend([known]);
    connector
        .connect(name, Counted { stream, connection })
        .await
}

/// A connection of a bridge to the server.
#[derive(Debug)]
struct Connection {
    port: u16,
    /// How many bytes were received.
    bytes: AtomicU64,
    /// How many requests were sent (HTTP/2).
    requests: AtomicU64,
}

/// By the address of the client.
static CONNECTIONS: LazyLock<Mutex<HashMap<SocketAddr, Arc<Connection>>>> =
    LazyLock::new(Mutex::default);

/// None without a bridge.
fn connection_of(client: SocketAddr) -> Option<Arc<Connection>> {
    let connections = CONNECTIONS.lock().expect("no panic");
    connections.get(&client).cloned()
}

/// How much of a connection to the server a bridge has received when a client has read a response: with that, the response can
/// be found in a record of what the server sends, although it is encrypted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// The port of the bridge.
    pub port: u16,
    pub bytes: u64,
}

/// What was received for this client; none without a bridge.
pub fn received(client: SocketAddr) -> Option<Received> {
    let connection = connection_of(client)?;
    Some(Received {
        port: connection.port,
        bytes: connection.bytes.load(Ordering::SeqCst),
    })
}

/// How many requests of this client were sent to the server; none without translation to HTTP/2. After the server has announced
/// that it closes the connection (GOAWAY), no more are sent.
pub fn requests_sent(client: SocketAddr) -> Option<u64> {
    let connection = connection_of(client).filter(|_| transport() == Transport::Http2)?;
    Some(connection.requests.load(Ordering::SeqCst))
}

/// Counts what it reads.
struct Counted {
    stream: TcpStream,
    connection: Arc<Connection>,
}

impl AsyncRead for Counted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        let read = buffer.filled().len() - before;
        self.connection
            .bytes
            .fetch_add(read as u64, Ordering::SeqCst);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Counted {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

async fn encrypt(mut client: TcpStream, mut server: TlsStream<Counted>) {
    let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
}

async fn translate(client: TcpStream, server: TlsStream<Counted>) {
    let sent_over = Arc::clone(&server.get_ref().0.connection);
    let builder = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
    let Ok((sender, connection)) = builder.handshake(TokioIo::new(server)).await else {
        return;
    };
    let connection = tokio::spawn(connection);
    let sent_over = &sent_over;
    let service = service_fn(|request: Request<Incoming>| {
        let mut sender = sender.clone();
        async move {
            sender.ready().await?;
            sent_over.requests.fetch_add(1, Ordering::SeqCst);
            let response = sender.send_request(as_http2(request)).await;
            let response = response.inspect_err(|error| {
                if is_unsent(error) {
                    sent_over.requests.fetch_sub(1, Ordering::SeqCst);
                }
            });
            Ok::<_, hyper::Error>(as_http1(response?))
        }
    });
    let translation = hyper::server::conn::http1::Builder::new()
        .half_close(true)
        .auto_date_header(false)
        .serve_connection(TokioIo::new(client), service);
    let mut translation = std::pin::pin!(translation);
    tokio::select! {
        _ = &mut translation => {}
        _ = connection => {
            translation.as_mut().graceful_shutdown();
            let _ = translation.await;
        }
    }
}

/// Whether a request has failed because the server had announced, before it read the request, that it closes the connection. Such
/// a request is not handled (RFC 9113, section 6.8). hyper does not export the type of this error.
fn is_unsent(error: &hyper::Error) -> bool {
    error.is_canceled() || format!("{error:?}").contains("GoAway(b\"\", NO_ERROR, Remote)")
}

fn as_http2(mut request: Request<Incoming>) -> Request<Incoming> {
    let host = request.headers_mut().remove(HOST);
    let host = host.and_then(|host| host.to_str().map(str::to_owned).ok());
    let mut parts = request.uri().clone().into_parts();
    parts.scheme = Some("https".parse().expect("a scheme"));
    parts.authority = host.and_then(|host| host.parse().ok());
    if let Ok(uri) = Uri::from_parts(parts) {
        *request.uri_mut() = uri;
    }
    for name in [CONNECTION, TRANSFER_ENCODING] {
        request.headers_mut().remove(name);
    }
    *request.version_mut() = Version::HTTP_2;
    request
}

fn as_http1(mut response: Response<Incoming>) -> Response<Incoming> {
    *response.version_mut() = Version::HTTP_11;
    response
}
