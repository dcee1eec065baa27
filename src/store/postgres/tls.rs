//! TLS to PostgreSQL through rustls: which certificates of a server are accepted, and which one is sent. Written here because it is short,
//! and the crate for it would be one more dependency that durability and security rest on.

use std::fs;
use std::future::Future;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::tls::{ChannelBinding, MakeTlsConnect, TlsConnect, TlsStream};
use tokio_rustls::TlsConnector;
pub(super) use tokio_rustls::client::TlsStream as Encrypted;
use tokio_rustls::rustls::client::danger::{
    HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier,
};
use tokio_rustls::rustls::client::{verify_server_cert_signed_by_trust_anchor, verify_server_name};
use tokio_rustls::rustls::crypto::{
    CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature,
};
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio_rustls::rustls::server::ParsedCertificate;
use tokio_rustls::rustls::version::{TLS12, TLS13};
use tokio_rustls::rustls::{
    ClientConfig, DigitallySignedStruct, Error, InconsistentKeys, RootCertStore, SignatureScheme,
};

use crate::store::error::OpenError;
use crate::store::postgres::channel_binding::server_end_point;
use crate::store::postgres::tls_options::{ClientFiles, Roots, TlsOptions, Verify};

/// The default is for connections with `sslmode=disable`.
#[derive(Clone, Default)]
pub(super) struct Tls(Option<Arc<ClientConfig>>);

impl Tls {
    /// Reads the files of the options.
    pub(super) fn load(options: &TlsOptions) -> Result<Self, OpenError> {
        let provider = Arc::new(ring::default_provider());
        let (roots, checks_name) = match &options.verify {
            Verify::Nothing => (None, false),
            Verify::Authority(roots) => (Some(read_roots(roots)?), false),
            Verify::AuthorityAndHostName(roots) => (Some(read_roots(roots)?), true),
        };
        let verifier = Verifier {
            roots,
            checks_name,
            provider: Arc::clone(&provider),
        };
        let versions = [
            options.versions.tls12.then_some(&TLS12),
            options.versions.tls13.then_some(&TLS13),
        ];
        let versions: Vec<_> = versions.into_iter().flatten().collect();
        let builder = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&versions)
            .map_err(|error| OpenError::caused_by(error, "cannot use TLS".into()))?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier));
        let mut config = match &options.client {
            None => builder.with_no_client_auth(),
            Some(files) => {
                let (chain, key) = read_client_files(files)?;
                let config = builder.with_client_auth_cert(chain, key);
                config.map_err(|error| cannot_use_key(files, error))?
            }
        };
        config.enable_sni = options.send_sni;
        Ok(Self(Some(Arc::new(config))))
    }
}

fn read_roots(roots: &Roots) -> Result<RootCertStore, OpenError> {
    let mut store = RootCertStore::empty();
    match roots {
        Roots::File(path) => {
            for certificate in read_certificates("sslrootcert", path)? {
                store.add(certificate).map_err(|error| {
                    let path = path.display();
                    let message = format!("cannot use a certificate in {path} (sslrootcert)");
                    OpenError::caused_by(error, message)
                })?;
            }
        }
        Roots::System => {
            let system = rustls_native_certs::load_native_certs();
            store.add_parsable_certificates(system.certs);
            if store.is_empty() {
                return Err(OpenError::other(
                    "sslrootcert=system: there are no CA certificates; install ca-certificates or set SSL_CERT_FILE"
                        .into(),
                ));
            }
        }
    }
    Ok(store)
}

fn read_client_files(
    files: &ClientFiles,
) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), OpenError> {
    let chain = read_certificates("sslcert", &files.certificate)?;
    let key = files.key.display();
    let text = read("sslkey", &files.key)?;
    let found = fs::metadata(&files.key);
    let found = found.map_err(|error| cannot_read("sslkey", &files.key, error))?;
    // The rule of libpq: a key of root may be readable for a group.
    let forbidden = if found.uid() == 0 { 0o037 } else { 0o077 };
    if found.mode() & forbidden != 0 {
        return Err(OpenError::other(format!(
            "other users have access to the private key {key} (sslkey); run `chmod 600 {key}`, or 640 if root owns it"
        )));
    }
    let key = PrivateKeyDer::from_pem_slice(&text).map_err(|error| match error {
        pem::Error::NoItemsFound => OpenError::other(format!(
            "there is no private key in {key} (sslkey); it must be a PEM file, and not encrypted"
        )),
        error => OpenError::caused_by(error, format!("{key} (sslkey) is not a valid PEM file")),
    })?;
    Ok((chain, key))
}

fn cannot_use_key(files: &ClientFiles, error: Error) -> OpenError {
    let (key, certificate) = (files.key.display(), files.certificate.display());
    if matches!(
        error,
        Error::InconsistentKeys(InconsistentKeys::KeyMismatch)
    ) {
        return OpenError::other(format!(
            "the key in {key} (sslkey) is not the one of the certificate in {certificate} (sslcert)"
        ));
    }
    let message = format!(
        "cannot use the key in {key} (sslkey) with the certificate in {certificate} (sslcert)"
    );
    OpenError::caused_by(error, message)
}

/// At least one certificate, from a PEM file.
fn read_certificates(option: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>, OpenError> {
    let text = read(option, path)?;
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let path = path.display();
    let certificates = certificates.map_err(|error| {
        OpenError::caused_by(error, format!("{path} ({option}) is not a valid PEM file"))
    })?;
    if certificates.is_empty() {
        return Err(OpenError::other(format!(
            "there is no certificate in {path} ({option}); it must be a PEM file"
        )));
    }
    Ok(certificates)
}

fn read(option: &str, path: &Path) -> Result<Vec<u8>, OpenError> {
    fs::read(path).map_err(|error| cannot_read(option, path, error))
}

fn cannot_read(option: &str, path: &Path, error: io::Error) -> OpenError {
    OpenError::caused_by(error, format!("cannot read {} ({option})", path.display()))
}

/// Decides whether a server's certificate is accepted. The signature of the handshake is always verified: the server has the key of the
/// certificate that channel binding is about.
#[derive(Debug)]
struct Verifier {
    /// None with `sslmode=require`: any certificate is accepted.
    roots: Option<RootCertStore>,
    checks_name: bool,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if let Some(roots) = &self.roots {
            let certificate = ParsedCertificate::try_from(certificate)?;
            let algorithms = self.provider.signature_verification_algorithms.all;
            verify_server_cert_signed_by_trust_anchor(
                &certificate,
                roots,
                intermediates,
                now,
                algorithms,
            )?;
            if self.checks_name {
                verify_server_name(&certificate, name)?;
            }
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        let algorithms = &self.provider.signature_verification_algorithms;
        algorithms.supported_schemes()
    }
}

impl<S> MakeTlsConnect<S> for Tls
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    type Stream = Stream<Encrypted<S>>;
    type TlsConnect = Handshake;
    type Error = io::Error;

    fn make_tls_connect(&mut self, host: &str) -> io::Result<Handshake> {
        let Some(config) = &self.0 else {
            return Ok(Handshake(None));
        };
        let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
        let connector = TlsConnector::from(Arc::clone(config));
        Ok(Handshake(Some((connector, name))))
    }
}

/// None with `sslmode=disable`: there is no handshake.
pub(super) struct Handshake(Option<(TlsConnector, ServerName<'static>)>);

impl<S> TlsConnect<S> for Handshake
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    type Stream = Stream<Encrypted<S>>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Stream>> + Send>>;

    fn connect(self, stream: S) -> Self::Future {
        Box::pin(async move {
            let (connector, name) = self.0.ok_or(io::ErrorKind::Unsupported)?;
            let stream = connector.connect(name, stream).await?;
            let (_, connection) = stream.get_ref();
            let chain = connection.peer_certificates().unwrap_or_default();
            let end_point = chain.first().and_then(|first| server_end_point(first));
            Ok(Stream {
                inner: stream,
                end_point,
            })
        })
    }
}

/// A stream for the driver.
pub(super) struct Stream<S> {
    pub(super) inner: S,
    /// What SCRAM is bound to.
    pub(super) end_point: Option<Vec<u8>>,
}

impl<S: AsyncRead + AsyncWrite + Unpin> TlsStream for Stream<S> {
    fn channel_binding(&self) -> ChannelBinding {
        self.end_point
            .clone()
            .map_or_else(ChannelBinding::none, ChannelBinding::tls_server_end_point)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Stream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Stream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}
