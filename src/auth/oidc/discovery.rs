//! Reads the keys of an identity provider: its configuration (OpenID Connect Discovery), then the key set that this names.

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::auth::oidc::keys::{Jwks, KeySet};
use crate::config::is_secure_url;
use crate::http_client::HttpClient;

/// The most characters of an error.
const CAUSE_CHARS_MAX: usize = 400;

/// Sends requests to the provider.
pub(super) struct Discovery {
    issuer: String,
    client: HttpClient,
}

#[derive(Deserialize)]
struct Configuration {
    issuer: String,
    jwks_uri: String,
}

impl Discovery {
    pub(super) fn new(issuer: &str) -> Result<Self, String> {
        Ok(Self {
            issuer: issuer.to_owned(),
            client: HttpClient::new(issuer.starts_with("https:"))?,
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
        let response = self.client.get(url, "application/json").await;
        let parsed = response
            .and_then(|body| serde_json::from_slice(&body).map_err(|error| error.to_string()));
        parsed.map_err(|cause| format!("{url}: {cause}"))
    }
}
