//! The OpenAPI description as YAML and JSON, and the docs page, which `build.rs` generates from it. They are compiled in
//! and need no token; the page loads nothing from other hosts.

use http_body_util::Full;
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, ETAG, HeaderValue, IF_NONE_MATCH, LOCATION};
use hyper::{HeaderMap, Method, StatusCode};

use crate::http::Response;
use crate::http::error::{ApiError, ErrorKind};
use crate::web_page::{ICON, SECURITY_HEADERS};

pub(crate) const OPENAPI_YAML: &str = include_str!("../../openapi.yaml");

/// For tools that do not support OpenAPI 3.1. The description uses one feature that 3.0 does not have: the identifier
/// of a licence.
pub(crate) fn openapi_3_0() -> String {
    OPENAPI_YAML
        .replacen("openapi: 3.1.0\n", "openapi: 3.0.3\n", 1)
        .replacen(
            "    identifier: MIT\n",
            "    url: https://opensource.org/license/mit\n",
            1,
        )
}

pub const OPENAPI_JSON: &str = include_str!(concat!(env!("OUT_DIR"), "/openapi.json"));
const PAGE_HTML: &str = include_str!(concat!(env!("OUT_DIR"), "/page.html"));

/// Path, media type and content.
#[rustfmt::skip] // a table
const DOCUMENTS: [(&str, &str, &str); 6] = [
    ("/openapi.yaml", "application/yaml", OPENAPI_YAML),
    ("/openapi.json", "application/json", OPENAPI_JSON),
    ("/docs", "text/html; charset=utf-8", PAGE_HTML),
    ("/docs/page.css", "text/css; charset=utf-8", concat!(include_str!("../palette.css"), include_str!("docs/page.css"))),
    ("/docs/page.js", "text/javascript; charset=utf-8", include_str!("docs/page.js")),
    ("/docs/icon.svg", "image/svg+xml", ICON),
];

/// Locations are relative, as all links of the page are: a reverse proxy may have added a prefix.
const REDIRECTS: [(&str, &str); 2] = [("/", "docs"), ("/docs/", "../docs")];

pub(super) fn respond(
    method: &Method,
    path: &str,
    request: &HeaderMap,
) -> Result<Response, ApiError> {
    let document = DOCUMENTS.iter().find(|(at, ..)| *at == path);
    let redirect = REDIRECTS.iter().find(|(at, _)| *at == path);
    if document.is_none() && redirect.is_none() {
        return Err(ErrorKind::NotFound.into());
    }
    if ![Method::GET, Method::HEAD].contains(method) {
        return Err(ApiError::method_not_allowed("GET,HEAD"));
    }
    let mut response = Response::default();
    if let Some((_, location)) = redirect {
        *response.status_mut() = StatusCode::TEMPORARY_REDIRECT;
        let location = HeaderValue::from_static(location);
        response.headers_mut().insert(LOCATION, location);
    }
    if let Some((_, media_type, text)) = document {
        respond_with(&mut response, media_type, text, request);
    }
    Ok(response)
}

/// 200 or 304. Browsers revalidate each time, so that they never combine the page of one version with the script of
/// another.
fn respond_with(
    response: &mut Response,
    media_type: &'static str,
    text: &'static str,
    request: &HeaderMap,
) {
    let etag = format!("\"{:08x}\"", crc32fast::hash(text.as_bytes()));
    let headers = response.headers_mut();
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    for (name, value) in SECURITY_HEADERS {
        headers.insert(name, HeaderValue::from_static(value));
    }
    let value = HeaderValue::from_str(&etag).expect("hexadecimal digits are a header value");
    headers.insert(ETAG, value);
    if is_cached(&etag, request) {
        *response.status_mut() = StatusCode::NOT_MODIFIED;
    } else {
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(media_type));
        *response.body_mut() = Full::from(text);
    }
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
