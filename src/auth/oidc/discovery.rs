//! Reads the keys of an identity provider: its configuration (OpenID Connect Discovery), then the key set that this names. A short HTTP
//! client on the HTTP and TLS stack of the server: two requests an hour need no pool, redirects or cookies.

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::header::{ACCEPT, CONNECTION, HOST, USER_AGENT};
use hyper::{Request, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::auth::oidc::keys::{Jwks, KeySet};
use crate::config::is_secure_url;
use crate::version::VERSION;

/// For each of the two responses.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);
const RESPONSE_BYTES_MAX: usize = 1 << 20;

/// The most characters of an error.
const CAUSE_CHARS_MAX: usize = 400;

/// Sends requests to the provider.
pub(super) struct Discovery {
    issuer: String,
    tls: TlsConnector,
}

#[derive(Deserialize)]
struct Configuration {
    issuer: String,
    jwks_uri: String,
}

impl Discovery {
    /// Trusts the certificate authorities of the system, or those in `SSL_CERT_FILE` and `SSL_CERT_DIR`.
    pub(super) fn new(issuer: &str) -> Result<Self, String> {
        let mut roots = RootCertStore::empty();
        let system = rustls_native_certs::load_native_certs();
        roots.add_parsable_certificates(system.certs);
        if roots.is_empty() && issuer.starts_with("https:") {
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
            issuer: issuer.to_owned(),
            tls: Arc::new(config).into(),
        })
    }

    /// The error is short, although the provider may have written a part of it.
    pub(super) async fn read_keys(&self) -> Result<KeySet, String> {
        let read = self.try_read_keys().await;
        read.map_err(|cause| cause.chars().take(CAUSE_CHARS_MAX).collect())
    }

    async fn try_read_keys(&self) -> Result<KeySet, String> {
        let issuer = self.issuer.trim_end_matches('/');
        let url = format!("{issuer}/.well-known/openid-configuration");
        let configuration: Configuration = self.get(&url).await?;
        if configuration.issuer != self.issuer {
            return Err(format!(
                "{url}: the issuer there is {:?}, not {:?}",
                configuration.issuer, self.issuer
            ));
        }
        let url = &configuration.jwks_uri;
        let is_as_secure = url.starts_with("https:") || self.issuer.starts_with("http:");
        if !is_secure_url(url) || !is_as_secure || url.contains('@') {
            return Err(format!("jwks_uri is {url:?}, not an https:// URL"));
        }
        Ok(KeySet::new(self.get::<Jwks>(url).await?))
    }

    async fn get<T: DeserializeOwned>(&self, url: &str) -> Result<T, String> {
        let response = match timeout(RESPONSE_TIMEOUT, self.request(url)).await {
            Ok(response) => response,
            Err(_) => Err(format!("no response within {RESPONSE_TIMEOUT:?}")),
        };
        let parsed = response.and_then(|body| serde_json::from_slice(&body).map_err(text));
        parsed.map_err(|cause| format!("{url}: {cause}"))
    }

    async fn request(&self, url: &str) -> Result<Bytes, String> {
        let url: Uri = url.parse().map_err(text)?;
        let is_https = url.scheme_str() == Some("https");
        let host = url.host().ok_or("there is no host")?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let port = url.port_u16().unwrap_or(if is_https { 443 } else { 80 });
        let stream = TcpStream::connect((host, port)).await.map_err(text)?;
        if !is_https {
            return exchange(stream, &url).await;
        }
        let name = ServerName::try_from(host.to_owned()).map_err(text)?;
        let stream = self.tls.connect(name, stream).await.map_err(text)?;
        exchange(stream, &url).await
    }
}

async fn exchange<S>(stream: S, url: &Uri) -> Result<Bytes, String>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(text)?;
    // Aborts the task when it is dropped.
    let mut task = JoinSet::new();
    task.spawn(connection);
    let request = Request::get(url.path_and_query().map_or("/", |path| path.as_str()))
        .header(HOST, url.authority().map_or("", |host| host.as_str()))
        .header(ACCEPT, "application/json")
        .header(USER_AGENT, format!("plantstore/{VERSION}"))
        .header(CONNECTION, "close")
        .body(Empty::<Bytes>::new())
        .map_err(text)?;
    let response = sender.send_request(request).await.map_err(text)?;
    let status = response.status();
    if status != StatusCode::OK {
        return Err(format!("the response is {status}"));
    }
    let body = Limited::new(response.into_body(), RESPONSE_BYTES_MAX);
    Ok(body.collect().await.map_err(text)?.to_bytes())
}

fn text(error: impl Display) -> String {
    error.to_string()
}
