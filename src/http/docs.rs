//! The OpenAPI description as YAML and JSON, and the docs page, which `build.rs` generates from it. They are compiled in
//! and need no token; the page loads nothing from other hosts.

use std::sync::Arc;

use axum::Router;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG, IF_NONE_MATCH, LOCATION,
    REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use crate::http::AppState;

pub const OPENAPI_YAML: &str = include_str!("../../openapi.yaml");

const OPENAPI_JSON: &str = include_str!(concat!(env!("OUT_DIR"), "/openapi.json"));
const PAGE_HTML: &str = include_str!(concat!(env!("OUT_DIR"), "/page.html"));

/// Path, media type and content.
#[rustfmt::skip] // a table
const DOCUMENTS: [(&str, &str, &str); 6] = [
    ("/openapi.yaml", "application/yaml", OPENAPI_YAML),
    ("/openapi.json", "application/json", OPENAPI_JSON),
    ("/docs", "text/html; charset=utf-8", PAGE_HTML),
    ("/docs/page.css", "text/css; charset=utf-8", include_str!("docs/page.css")),
    ("/docs/page.js", "text/javascript; charset=utf-8", include_str!("docs/page.js")),
    ("/docs/icon.svg", "image/svg+xml", include_str!("docs/icon.svg")),
];

/// The page may load its own style, script and icon, and send requests to its own service; nothing else.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
    img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

pub(super) fn routes() -> Router<Arc<AppState>> {
    // The locations are relative, as all links of the page are: a reverse proxy may have added a prefix.
    let redirect =
        |location| get(async move || (StatusCode::TEMPORARY_REDIRECT, [(LOCATION, location)]));
    let mut routes = Router::new()
        .route("/", redirect("docs"))
        .route("/docs/", redirect("../docs"));
    for (path, media_type, text) in DOCUMENTS {
        let etag = format!("\"{:08x}\"", crc32fast::hash(text.as_bytes()));
        let document = async move |request: HeaderMap| response(media_type, text, &etag, &request);
        routes = routes.route(path, get(document));
    }
    routes
}

/// 200 or 304. Browsers revalidate each time, so that they never combine the page of one version with the script of
/// another.
fn response(media_type: &str, text: &'static str, etag: &str, request: &HeaderMap) -> Response {
    let headers = [
        (ETAG, etag),
        (CACHE_CONTROL, "no-cache"),
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
    ];
    if is_cached(etag, request) {
        return (StatusCode::NOT_MODIFIED, headers).into_response();
    }
    (headers, [(CONTENT_TYPE, media_type)], text).into_response()
}

/// A proxy that compresses turns the tag into a weak one.
fn is_cached(etag: &str, request: &HeaderMap) -> bool {
    let values = request.get_all(IF_NONE_MATCH).iter();
    values
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(|tag| tag.trim().trim_start_matches("W/"))
        .any(|tag| tag == "*" || tag == etag)
}
