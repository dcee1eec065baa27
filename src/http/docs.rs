//! The OpenAPI description as YAML and JSON, and the docs page, which `build.rs` generates from it. They are compiled in
//! and need no token; the page loads nothing from other hosts.

use std::sync::{Arc, OnceLock};

use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG, IF_NONE_MATCH, LOCATION,
    REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get};
use sha2::{Digest, Sha256};

use crate::http::AppState;

pub const OPENAPI_YAML: &str = include_str!("../../openapi.yaml");

const OPENAPI_JSON: &str = include_str!(concat!(env!("OUT_DIR"), "/openapi.json"));
const PAGE_HTML: &str = include_str!(concat!(env!("OUT_DIR"), "/page.html"));

pub(super) static YAML: Document = Document::new("application/yaml", OPENAPI_YAML);
pub(super) static JSON: Document = Document::new("application/json", OPENAPI_JSON);
pub(super) static PAGE: Document = Document::new("text/html; charset=utf-8", PAGE_HTML);
pub(super) static STYLE: Document =
    Document::new("text/css; charset=utf-8", include_str!("docs/page.css"));
pub(super) static SCRIPT: Document = Document::new(
    "text/javascript; charset=utf-8",
    include_str!("docs/page.js"),
);
pub(super) static ICON: Document = Document::new("image/svg+xml", include_str!("docs/icon.svg"));

/// The page may load its own style, script and icon, and send requests to its own service; nothing else.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
    img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The location is relative, as all links of the page are: a reverse proxy may have added a prefix.
pub(super) async fn redirect_from_root() -> Response {
    (StatusCode::TEMPORARY_REDIRECT, [(LOCATION, "docs")]).into_response()
}

pub(super) async fn redirect_from_slash() -> Response {
    (StatusCode::TEMPORARY_REDIRECT, [(LOCATION, "../docs")]).into_response()
}

pub(super) struct Document {
    media_type: &'static str,
    text: &'static str,
    etag: OnceLock<HeaderValue>,
}

impl Document {
    const fn new(media_type: &'static str, text: &'static str) -> Self {
        Self {
            media_type,
            text,
            etag: OnceLock::new(),
        }
    }

    pub(super) fn route(&'static self) -> MethodRouter<Arc<AppState>> {
        get(async |request: HeaderMap| self.response(&request))
    }

    /// 200 or 304. Browsers revalidate each time, so that they never combine the page of one version with the script of
    /// another.
    fn response(&self, request: &HeaderMap) -> Response {
        let etag = self.etag.get_or_init(|| etag_of(self.text));
        let headers = [
            (ETAG, etag.clone()),
            (CACHE_CONTROL, HeaderValue::from_static("no-cache")),
            (CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY)),
            (X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
            (REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
        ];
        if is_cached(etag, request) {
            return (StatusCode::NOT_MODIFIED, headers).into_response();
        }
        let content_type = [(CONTENT_TYPE, HeaderValue::from_static(self.media_type))];
        (headers, content_type, self.text).into_response()
    }
}

fn etag_of(text: &str) -> HeaderValue {
    let digest = Sha256::digest(text);
    let start = digest.first_chunk().expect("a digest has 32 bytes");
    let tag = format!("\"{:016x}\"", u64::from_be_bytes(*start));
    HeaderValue::from_str(&tag).expect("hexadecimal digits in quotes are a header value")
}

/// A proxy that compresses turns the tag into a weak one.
fn is_cached(etag: &HeaderValue, request: &HeaderMap) -> bool {
    let values = request.get_all(IF_NONE_MATCH).iter();
    values
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(|tag| tag.trim().trim_start_matches("W/"))
        .any(|tag| tag == "*" || tag.as_bytes() == etag.as_bytes())
}
