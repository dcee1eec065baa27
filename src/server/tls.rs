//! TLS of the listeners. The certificate and its key are read again when their files change, and on SIGHUP; open connections
//! keep the one that they started with.

use std::fs::{self, File};
use std::io::{self, Read};
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, ensure};
use jiff::Timestamp;
use parking_lot::RwLock;
use tokio::net::TcpStream;
use tokio::signal::unix::Signal;
use tokio::time::sleep;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::{ClientHello, ResolvesServerCert};
use tokio_rustls::rustls::sign::CertifiedKey;
use tokio_rustls::rustls::{Error, InconsistentKeys, ServerConfig};
pub(super) use tokio_rustls::server::TlsStream;
use x509_cert::der::Decode;
use x509_cert::ext::pkix::SubjectAltName;
use x509_cert::ext::pkix::name::GeneralName;

use crate::config::TlsSettings;
use crate::metrics::Metrics;

const HTTP_2: &[u8] = b"h2";
const HTTP_1: &[u8] = b"http/1.1";

/// The first byte of every TLS connection: the type of a handshake record.
const HANDSHAKE: u8 = 22;

/// How often the files are looked at.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// A certificate that expires within this time is logged as a warning.
const EXPIRES_SOON: Duration = Duration::from_secs(14 * 86400);

/// Much larger than any certificate chain.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The certificate, and how connections use it.
pub(super) struct Tls {
    files: Files,
    current: Arc<CurrentCertificate>,
    config: Arc<ServerConfig>,
    metrics: Arc<Metrics>,
}

#[derive(Debug, Clone)]
struct Files {
    certificate: PathBuf,
    key: PathBuf,
}

/// What changes when a file is replaced or written to.
type FileState = Option<(u64, u64, i64, i64, u64)>;

/// A certificate and its key, as they were in the files.
struct Loaded {
    key: Arc<CertifiedKey>,
    valid_from: Timestamp,
    expires_at: Timestamp,
    /// A host name of the certificate.
    name: Option<String>,
}

#[derive(Debug)]
struct CurrentCertificate(RwLock<Arc<CertifiedKey>>);

impl ResolvesServerCert for CurrentCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0.read()))
    }
}

/// A connection after the start of its handshake.
pub(super) enum Accepted {
    Http1(Box<TlsStream<TcpStream>>),
    Http2(Box<TlsStream<TcpStream>>),
    /// The client does not use TLS.
    Plaintext(TcpStream),
}

impl Tls {
    /// None without a certificate. Also returns the name of the certificate, for an example.
    pub(super) fn start(
        settings: &TlsSettings,
        metrics: &Arc<Metrics>,
    ) -> anyhow::Result<Option<(Arc<Self>, Option<String>)>> {
        let (Some(certificate), Some(key)) = (&settings.tls_cert, &settings.tls_key) else {
            return Ok(None);
        };
        let files = Files {
            certificate: certificate.clone(),
            key: key.clone(),
        };
        let provider = Arc::new(ring::default_provider());
        let loaded = files.load(&provider)?;
        // The clock may be wrong, as on a machine that has just started and has not asked for the time.
        if !loaded.is_valid_yet() {
            let valid_from = loaded.valid_from;
            tracing::warn!(%valid_from, "the certificate is not valid yet; check the clock");
        }
        loaded.report(metrics);
        let current = Arc::new(CurrentCertificate(RwLock::new(loaded.key)));
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .context("cannot use TLS")?
            .with_no_client_auth();
        let mut config = config.with_cert_resolver(Arc::clone(&current) as _);
        config.alpn_protocols = vec![HTTP_2.to_vec(), HTTP_1.to_vec()];
        // Without state on the server, so that clients cannot fill it.
        config.ticketer = ring::Ticketer::new().context("cannot get random numbers")?;
        let tls = Self {
            files,
            current,
            config: Arc::new(config),
            metrics: Arc::clone(metrics),
        };
        Ok(Some((Arc::new(tls), loaded.name)))
    }

    /// Waits for the first byte of the client, and for its handshake.
    pub(super) async fn accept(&self, stream: TcpStream) -> io::Result<Accepted> {
        let mut first = [0];
        if stream.peek(&mut first).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if first != [HANDSHAKE] {
            return Ok(Accepted::Plaintext(stream));
        }
        let acceptor = TlsAcceptor::from(Arc::clone(&self.config));
        let stream = Box::new(acceptor.accept(stream).await?);
        Ok(match stream.get_ref().1.alpn_protocol() {
            Some(HTTP_2) => Accepted::Http2(stream),
            _ => Accepted::Http1(stream),
        })
    }

    /// For a listener that speaks HTTP/1.1 only.
    pub(super) fn http1_acceptor(&self) -> TlsAcceptor {
        let mut config = ServerConfig::clone(&self.config);
        config.alpn_protocols = vec![HTTP_1.to_vec()];
        TlsAcceptor::from(Arc::new(config))
    }

    /// Reads the files again when they have changed, or on a signal. If they cannot be used, the certificate stays.
    pub(super) async fn reload(self: Arc<Self>, mut hangup: Signal) {
        let mut loaded_state = self.files.state();
        let mut last_state = loaded_state;
        loop {
            let is_asked = tokio::select! {
                _ = hangup.recv() => true,
                () = sleep(LOOK_INTERVAL) => false,
            };
            let files = self.files.clone();
            // A look can block on a stuck disk.
            let Ok(state) = tokio::task::spawn_blocking(move || files.state()).await else {
                continue;
            };
            // Files that have changed since the last look may not be complete.
            let is_stable = std::mem::replace(&mut last_state, state) == state;
            if is_asked || (is_stable && state != loaded_state) {
                loaded_state = state;
                let tls = Arc::clone(&self);
                let _ = tokio::task::spawn_blocking(move || tls.load_again()).await;
            }
        }
    }

    fn load_again(&self) {
        let loaded = self.files.load(self.config.crypto_provider());
        // The previous one is better than one that clients do not accept.
        let loaded = loaded.and_then(|loaded| {
            ensure!(
                loaded.is_valid_yet(),
                "cannot use the certificate in {}: it is valid only from {}",
                self.files.certificate.display(),
                loaded.valid_from
            );
            Ok(loaded)
        });
        match loaded {
            Ok(loaded) => {
                let expires_at = loaded.expires_at;
                tracing::info!(%expires_at, "the certificate was loaded again");
                loaded.report(&self.metrics);
                *self.current.0.write() = loaded.key;
            }
            Err(error) => tracing::error!(
                error = format!("{error:#}"),
                "the certificate cannot be loaded again; the previous one stays in use"
            ),
        }
    }
}

impl Files {
    fn state(&self) -> [FileState; 2] {
        [&self.certificate, &self.key].map(|path| {
            let found = fs::metadata(path).ok()?;
            Some((
                found.dev(),
                found.ino(),
                found.mtime(),
                found.mtime_nsec(),
                found.len(),
            ))
        })
    }

    fn load(&self, provider: &CryptoProvider) -> anyhow::Result<Loaded> {
        let (certificate, key) = (self.certificate.display(), self.key.display());
        let chain = read(&self.certificate)?;
        let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&chain).collect();
        let chain = chain.with_context(|| format!("{certificate} is not a valid PEM file"))?;
        let first = chain.first();
        let first = first.with_context(|| {
            format!("there is no certificate in {certificate}; it must be a PEM file")
        })?;
        let (valid_from, expires_at, name) = inspect(first)
            .with_context(|| format!("cannot use the certificate in {certificate}"))?;

        let private_key = PrivateKeyDer::from_pem_slice(&read(&self.key)?);
        let private_key = private_key.map_err(|error| match error {
            pem::Error::NoItemsFound => anyhow::anyhow!(
                "there is no private key in {key}; it must be a PEM file, and not encrypted"
            ),
            error => anyhow::anyhow!("{key} is not a valid PEM file: {error}"),
        })?;
        let loaded = CertifiedKey::from_der(chain, private_key, provider);
        let loaded = loaded.map_err(|error| match error {
            Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => anyhow::anyhow!(
                "the key in {key} is not the one of the certificate in {certificate}"
            ),
            error => anyhow::anyhow!("cannot use the key in {key}: {error}"),
        })?;
        if fs::metadata(&self.key).is_ok_and(|found| found.mode() & 0o007 != 0) {
            tracing::warn!("all users of this machine have access to {key}; run `chmod o= {key}`");
        }
        Ok(Loaded {
            key: Arc::new(loaded),
            valid_from,
            expires_at,
            name,
        })
    }
}

impl Loaded {
    fn is_valid_yet(&self) -> bool {
        self.valid_from <= Timestamp::now()
    }

    fn report(&self, metrics: &Metrics) {
        let expires_at = self.expires_at;
        let seconds = expires_at.as_second();
        metrics
            .certificate_expires_at
            .store(seconds, Ordering::Relaxed);
        if expires_at < Timestamp::now() + EXPIRES_SOON {
            tracing::warn!(%expires_at, "the certificate expires soon");
        }
    }
}

/// A regular file of a bounded size.
fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    let cannot_read = || format!("cannot read {}", path.display());
    let found = fs::metadata(path).with_context(cannot_read)?;
    ensure!(
        found.is_file() && found.len() <= FILE_BYTES_MAX,
        "{} is not a file of at most {FILE_BYTES_MAX} bytes",
        path.display()
    );
    let file = File::open(path).with_context(cannot_read)?;
    let mut bytes = Vec::new();
    let read = file.take(FILE_BYTES_MAX).read_to_end(&mut bytes);
    read.with_context(cannot_read)?;
    Ok(bytes)
}

/// From when to when a certificate is valid, and one of its names. An error if it has expired.
fn inspect(
    certificate: &CertificateDer<'_>,
) -> anyhow::Result<(Timestamp, Timestamp, Option<String>)> {
    let certificate = x509_cert::Certificate::from_der(certificate)?;
    let certificate = certificate.tbs_certificate();
    let validity = certificate.validity();
    let time = |time: x509_cert::time::Time| {
        let seconds = i64::try_from(time.to_unix_duration().as_secs())?;
        Ok::<_, anyhow::Error>(Timestamp::from_second(seconds)?)
    };
    let (from, to) = (time(validity.not_before)?, time(validity.not_after)?);
    ensure!(to > Timestamp::now(), "it has expired at {to}");
    let names = certificate.get_extension::<SubjectAltName>();
    let names = names.ok().flatten().map(|(_, names)| names.0);
    let name = names.into_iter().flatten().find_map(|name| match name {
        GeneralName::DnsName(name) if !name.as_str().contains('*') => Some(name.to_string()),
        _ => None,
    });
    Ok((from, to, name))
}

/// How clients on this machine can reach a listener.
pub(super) fn origin(address: SocketAddr, certificate_name: Option<&str>) -> String {
    match certificate_name {
        Some(name) => format!("https://{name}:{}", address.port()),
        None => format!("https://{address}"),
    }
}
