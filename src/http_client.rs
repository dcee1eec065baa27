//! A short HTTP client on the HTTP and TLS stack of the server, for single requests: no pool, redirects or cookies.

use std::fmt::Display;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::header::{ACCEPT, CONNECTION, HOST, USER_AGENT};
use hyper::{Request, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{self, CertificateError, ClientConfig, RootCertStore};

use crate::version::VERSION;

const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);
const RESPONSE_BYTES_MAX: usize = 1 << 20;

pub(crate) struct HttpClient {
    tls: TlsConnector,
}

impl HttpClient {
    /// For `https:`, trusts the certificate authorities of the system, or those in `SSL_CERT_FILE` and `SSL_CERT_DIR`.
    pub(crate) fn new(is_https: bool) -> Result<Self, String> {
        let mut roots = RootCertStore::empty();
        if is_https {
            let system = rustls_native_certs::load_native_certs();
            roots.add_parsable_certificates(system.certs);
        }
        if roots.is_empty() && is_https {
            return Err(
                "there are no CA certificates: install ca-certificates or set SSL_CERT_FILE"
                    .to_owned(),
            );
        }
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Self {
            tls: Arc::new(config).into(),
        })
    }

    /// The body of the response, if its status is 200.
    pub(crate) async fn get(&self, url: &str, media_type: &str) -> Result<Bytes, String> {
        match timeout(RESPONSE_TIMEOUT, self.request(url, media_type)).await {
            Ok(response) => response,
            Err(_) => Err(format!("no response within {RESPONSE_TIMEOUT:?}")),
        }
    }

    async fn request(&self, url: &str, media_type: &str) -> Result<Bytes, String> {
        let url: Uri = url.parse().map_err(text)?;
        let is_https = url.scheme_str() == Some("https");
        let host = url.host().ok_or("there is no host")?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let port = url.port_u16().unwrap_or(if is_https { 443 } else { 80 });
        let stream = TcpStream::connect((host, port)).await.map_err(text)?;
        if !is_https {
            return exchange(stream, &url, media_type).await;
        }
        let name = ServerName::try_from(host.to_owned()).map_err(text)?;
        let stream = self.tls.connect(name, stream).await;
        let stream = stream.map_err(|error| handshake_problem(&error))?;
        exchange(stream, &url, media_type).await
    }
}

async fn exchange<S>(stream: S, url: &Uri, media_type: &str) -> Result<Bytes, String>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(text)?;
    // Aborts the task when it is dropped.
    let mut task = JoinSet::new();
    task.spawn(connection);
    let request = Request::get(url.path_and_query().map_or("/", |path| path.as_str()))
        .header(HOST, url.authority().map_or("", |host| host.as_str()))
        .header(ACCEPT, media_type)
        .header(USER_AGENT, format!("plantstore/{VERSION}"))
        .header(CONNECTION, "close")
        .body(Empty::<Bytes>::new())
        .map_err(text)?;
    let response = sender.send_request(request).await.map_err(|error| {
        if error.is_parse() {
            "the response is not HTTP; it may be TLS, for which the URL begins with https:"
                .to_owned()
        } else {
            error.to_string()
        }
    })?;
    let status = response.status();
    if status != StatusCode::OK {
        return Err(format!("the response is {status}"));
    }
    let body = Limited::new(response.into_body(), RESPONSE_BYTES_MAX);
    Ok(body.collect().await.map_err(text)?.to_bytes())
}

/// What to do about a failed handshake.
fn handshake_problem(error: &io::Error) -> String {
    let cause = error.get_ref().and_then(|cause| cause.downcast_ref());
    match cause {
        // The second one if an authority has the key of another algorithm.
        Some(rustls::Error::InvalidCertificate(
            CertificateError::UnknownIssuer
            | CertificateError::UnsupportedSignatureAlgorithmForPublicKeyContext { .. },
        )) => {
            "the certificate is not from a CA that this machine trusts; set SSL_CERT_FILE to the certificate of its CA"
                .to_owned()
        }
        Some(rustls::Error::InvalidMessage(_)) => {
            "the response is not TLS; it may be HTTP, for which the URL begins with http:".to_owned()
        }
        _ => error.to_string(),
    }
}

fn text(error: impl Display) -> String {
    error.to_string()
}
