//! What carries the bytes of a connection: TCP, or TLS 1.3 over it.

use std::io::{self, ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, ensure};
use mio::net::TcpStream;
use mio::{Interest, Poll, Token};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::version::TLS13;
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore};

pub struct Transport {
    socket: TcpStream,
    tls: Option<Box<ClientConnection>>,
}

/// A client that trusts one certificate, and offers one version of HTTP.
pub struct Tls(Arc<ClientConfig>);

impl Tls {
    pub fn new(certificate: &Path, protocol: &str) -> anyhow::Result<Self> {
        let mut roots = RootCertStore::empty();
        let certificate = CertificateDer::from_pem_file(certificate);
        roots.add(certificate.context("read the certificate")?)?;
        let mut config = ClientConfig::builder_with_protocol_versions(&[&TLS13])
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = vec![protocol.into()];
        Ok(Self(Arc::new(config)))
    }
}

impl Transport {
    /// Connects, with TLS until the end of the handshake.
    pub fn connect(
        address: SocketAddr,
        tls: Option<&Tls>,
        poll: &Poll,
        token: Token,
    ) -> anyhow::Result<Self> {
        // One after the other, so that no server's backlog overflows.
        let mut socket = std::net::TcpStream::connect(address).context("connect")?;
        socket.set_nodelay(true)?;
        let tls = match tls {
            Some(Tls(config)) => Some(Box::new(shake_hands(config, &mut socket)?)),
            None => None,
        };
        socket.set_nonblocking(true)?;
        let mut socket = TcpStream::from_std(socket);
        let interest = match tls {
            Some(_) => Interest::READABLE | Interest::WRITABLE,
            None => Interest::READABLE,
        };
        poll.registry().register(&mut socket, token, interest)?;
        Ok(Self { socket, tls })
    }

    /// Writes all bytes: TLS has a buffer for what the socket does not take. Without TLS a request is small, and the socket
    /// buffer is empty, so a partial write means that the connection is broken.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let Some(tls) = &mut self.tls else {
            return match self.socket.write(bytes)? {
                len if len == bytes.len() => Ok(()),
                _ => Err(ErrorKind::WriteZero.into()),
            };
        };
        tls.writer().write_all(bytes)?;
        self.send_rest()
    }

    /// Sends what the socket did not take before.
    pub fn send_rest(&mut self) -> io::Result<()> {
        let Some(tls) = &mut self.tls else {
            return Ok(());
        };
        while tls.wants_write() {
            match tls.write_tls(&mut self.socket) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Appends bytes that have arrived. False if there are none.
    pub fn read(&mut self, input: &mut Vec<u8>) -> io::Result<bool> {
        let before = input.len();
        loop {
            let read = match &mut self.tls {
                None => {
                    let mut buffer = [0; 4096];
                    let read = self.socket.read(&mut buffer);
                    read.inspect(|len| input.extend_from_slice(&buffer[..*len]))
                }
                Some(tls) => read_tls(tls, &mut self.socket, input),
            };
            match read {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(_) if input.len() > before => return Ok(true),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
    }
}

/// Reads from the socket, and appends what was encrypted in it. Returns how much was read, which may be a part of a record.
fn read_tls(
    tls: &mut ClientConnection,
    socket: &mut TcpStream,
    input: &mut Vec<u8>,
) -> io::Result<usize> {
    let len = tls.read_tls(socket)?;
    let state = tls.process_new_packets().map_err(io::Error::other)?;
    let plaintext_len = state.plaintext_bytes_to_read();
    if plaintext_len > 0 {
        let start = input.len();
        input.resize(start + plaintext_len, 0);
        tls.reader().read_exact(&mut input[start..])?;
    }
    Ok(len)
}

fn shake_hands(
    config: &Arc<ClientConfig>,
    socket: &mut std::net::TcpStream,
) -> anyhow::Result<ClientConnection> {
    let name = ServerName::try_from("localhost")?;
    let mut tls = ClientConnection::new(Arc::clone(config), name)?;
    // All requests of a connection are encrypted at once.
    tls.set_buffer_limit(None);
    while tls.is_handshaking() {
        tls.complete_io(socket).context("TLS handshake")?;
    }
    let protocol = tls.alpn_protocol();
    let is_offered = protocol == config.alpn_protocols.first().map(Vec::as_slice);
    ensure!(
        is_offered,
        "the server does not speak the version of HTTP that was asked for"
    );
    Ok(tls)
}
