//! What is there to be read, compiled in: the contract as YAML and as JSON, and the docs page, which
//! `build.rs` makes from it. None of it needs a token, and nothing of the page comes from elsewhere.

use std::sync::OnceLock;

use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG, IF_NONE_MATCH, LOCATION,
    REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};

/// The contract.
pub const OPENAPI_YAML: &str = include_str!("../../openapi.yaml");

const OPENAPI_JSON: &str = include_str!(concat!(env!("OUT_DIR"), "/openapi.json"));
const PAGE_HTML: &str = include_str!(concat!(env!("OUT_DIR"), "/page.html"));

static YAML: Document = Document::new("application/yaml", OPENAPI_YAML);
static JSON: Document = Document::new("application/json", OPENAPI_JSON);
static PAGE: Document = Document::new("text/html; charset=utf-8", PAGE_HTML);
static STYLE: Document = Document::new("text/css; charset=utf-8", include_str!("docs/page.css"));
static SCRIPT: Document = Document::new(
    "text/javascript; charset=utf-8",
    include_str!("docs/page.js"),
);
static ICON: Document = Document::new("image/svg+xml", include_str!("docs/icon.svg"));

/// The page may load its own style, script and icon, and send to its own service; nothing else.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
    img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// `GET /openapi.yaml`.
pub async fn openapi_yaml(asked: HeaderMap) -> Response {
    YAML.answer(&asked)
}

/// `GET /openapi.json`.
pub async fn openapi_json(asked: HeaderMap) -> Response {
    JSON.answer(&asked)
}

/// `GET /docs`.
pub async fn page(asked: HeaderMap) -> Response {
    PAGE.answer(&asked)
}

/// `GET /docs/page.css`.
pub async fn style(asked: HeaderMap) -> Response {
    STYLE.answer(&asked)
}

/// `GET /docs/page.js`.
pub async fn script(asked: HeaderMap) -> Response {
    SCRIPT.answer(&asked)
}

/// `GET /docs/icon.svg`.
pub async fn icon(asked: HeaderMap) -> Response {
    ICON.answer(&asked)
}

/// `GET /`. The address is relative, as all of the page's are: a proxy may have put a prefix before it.
pub async fn to_page() -> Response {
    (StatusCode::TEMPORARY_REDIRECT, [(LOCATION, "docs")]).into_response()
}

/// `GET /docs/`, as people type it.
pub async fn up_to_page() -> Response {
    (StatusCode::TEMPORARY_REDIRECT, [(LOCATION, "../docs")]).into_response()
}

/// A text of the binary.
struct Document {
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

    /// The text, or that it has not changed. A browser asks each time: it never puts the page of one
    /// version together with the script of another.
    fn answer(&self, asked: &HeaderMap) -> Response {
        let etag = self.etag.get_or_init(|| etag_of(self.text));
        let headers = [
            (ETAG, etag.clone()),
            (CACHE_CONTROL, HeaderValue::from_static("no-cache")),
            (CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY)),
            (X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
            (REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
        ];
        if is_known(etag, asked) {
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

/// Whether the client has it already. A proxy that compresses makes the tag a weak one.
fn is_known(etag: &HeaderValue, asked: &HeaderMap) -> bool {
    let given = asked.get_all(IF_NONE_MATCH).iter();
    given
        .filter_map(|given| given.to_str().ok())
        .flat_map(|given| given.split(','))
        .map(|tag| tag.trim().trim_start_matches("W/"))
        .any(|tag| tag == "*" || tag.as_bytes() == etag.as_bytes())
}
