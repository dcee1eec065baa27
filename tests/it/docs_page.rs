//! The served docs page: the whole contract, escaped, with security headers. Its behaviour in a browser is tested in
//! `tests/browser/`.

use std::collections::BTreeSet;

use plantstore::{ErrorKind, OPENAPI_JSON};
use serde_json::Value;

use crate::harness::{Client, Response, Server};

const FILES: [(&str, &str); 4] = [
    ("/docs", "text/html; charset=utf-8"),
    ("/docs/page.css", "text/css; charset=utf-8"),
    ("/docs/page.js", "text/javascript; charset=utf-8"),
    ("/docs/icon.svg", "image/svg+xml"),
];

const DESCRIPTIONS: [(&str, &str); 2] = [
    ("/openapi.json", "application/json"),
    ("/openapi.yaml", "application/yaml"),
];

/// The size limit of the page with its style, script and icon.
const BYTES_MAX: usize = 64 << 10;

fn ok(client: &mut Client, path: &str) -> Response {
    let response = client.request(&format!("GET {path}"), "");
    assert_eq!(response.status, 200, "{path}");
    response
}

#[test]
fn the_root_redirects_to_the_page_behind_any_path_prefix() {
    let server = Server::start();
    let mut client = server.connect();
    for (path, target) in [("/", "docs"), ("/docs/", "../docs"), ("/?x=y", "docs")] {
        for method in ["GET", "HEAD"] {
            let response = client.request(&format!("{method} {path}"), "");
            assert_eq!(response.status, 307, "{path}");
            assert_eq!(response.header("location"), Some(target), "{path}");
            assert!(response.header("x-request-id").is_some());
        }
    }
    // Every URL on the page is relative, too.
    let page = ok(&mut client, "/docs").body;
    for attribute in ["href=\"", "src=\""] {
        for address in page.split(attribute).skip(1) {
            assert!(!address.starts_with('/'), "{}", &address[..20]);
            assert!(!address.starts_with("http"), "{}", &address[..20]);
        }
    }
}

#[test]
fn every_file_has_a_content_type_and_security_headers() {
    let server = Server::start();
    let mut client = server.connect();
    for (path, media_type) in FILES.into_iter().chain(DESCRIPTIONS) {
        let response = ok(&mut client, path);
        for (header, value) in [
            ("content-type", media_type),
            (
                "content-security-policy",
                "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; \
                 base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
            ),
            ("x-content-type-options", "nosniff"),
            ("referrer-policy", "no-referrer"),
            ("cache-control", "no-cache"),
        ] {
            assert_eq!(response.header(header), Some(value), "{path}");
        }
    }
}

#[test]
fn head_gets_the_response_of_get_without_the_body() {
    let server = Server::start();
    for (path, _) in FILES.into_iter().chain(DESCRIPTIONS) {
        let text = ok(&mut server.connect(), path).body;
        let mut client = server.connect();
        client.send(format!(
            "HEAD {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        ));
        let head = client.everything();
        let length = format!("content-length: {}\r\n", text.len());
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
        assert!(head.contains(&length), "{head}");
        assert!(head.ends_with("\r\n\r\n"), "{head}");
    }
}

#[test]
fn a_cached_file_is_revalidated_with_its_etag() {
    let server = Server::start();
    let mut client = server.connect();
    let mut tags = BTreeSet::new();
    for (path, _) in FILES.into_iter().chain(DESCRIPTIONS) {
        let tag = ok(&mut client, path);
        let tag = tag.header("etag").expect("a tag").to_owned();
        for known in [
            tag.clone(),
            format!("W/{tag}"),
            format!("\"x\", {tag}"),
            "*".to_owned(),
        ] {
            let header = format!("if-none-match: {known}\r\n");
            let response = client.request(&format!("GET {path}"), &header);
            assert_eq!((response.status, &*response.body), (304, ""), "{path}");
            assert_eq!(response.header("etag"), Some(&*tag));
        }
        let response = client.request(
            &format!("GET {path}"),
            "if-none-match: \"of-another-version\"\r\n",
        );
        assert_eq!(response.status, 200, "{path}");
        assert!(tags.insert(tag), "{path} has the tag of another file");
    }
}

#[test]
fn the_page_is_small() {
    let server = Server::start();
    let mut client = server.connect();
    let bytes: usize = FILES
        .iter()
        .map(|(path, _)| ok(&mut client, path).body.len())
        .sum();
    assert!(bytes < BYTES_MAX, "{bytes} bytes");
}

#[test]
fn the_headings_are_the_ones_that_api_readers_know() {
    let page = ok(&mut Server::start().connect(), "/docs").body;
    let headings = page.split("<h3").skip(1).map(|rest| {
        let text = rest.split_once('>').expect("a tag").1;
        text.split('<').next().expect("a text").trim()
    });
    let headings: Vec<_> = headings.collect();
    for heading in ["Authentication", "Request body", "Responses", "Errors"] {
        assert!(headings.contains(&heading), "{headings:?}");
    }
}

#[test]
fn the_page_has_every_error_of_the_catalogue() {
    let page = ok(&mut Server::start().connect(), "/docs").body;
    for kind in ErrorKind::ALL {
        let number = kind.code();
        assert!(
            page.contains(&format!("<div id=\"error-{number}\"><dt>{number}</dt>")),
            "{number}"
        );
    }
    assert_eq!(page.matches("id=\"error-").count(), ErrorKind::ALL.len());
}

/// The visible text: between the tags, unescaped.
fn text_of(page: &str) -> String {
    let pieces = page
        .split('<')
        .map(|piece| piece.split_once('>').map_or("", |(_, text)| text));
    let text: String = pieces.collect();
    [
        ("`", ""),
        ("&lt;", "<"),
        ("&gt;", ">"),
        ("&quot;", "\""),
        ("&#39;", "'"),
        ("&amp;", "&"),
    ]
    .into_iter()
    .fold(text, |text, (from, to)| text.replace(from, to))
}

/// Every text, name and number of the contract.
fn said(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(members) => {
            for (name, value) in members {
                match name.as_str() {
                    "$ref" | "identifier" => {}
                    "properties" | "headers" if value.is_object() => {
                        found.extend(value.as_object().expect("just seen").keys().cloned());
                        said(value, found);
                    }
                    _ => said(value, found),
                }
            }
        }
        Value::Array(items) => items.iter().for_each(|item| said(item, found)),
        Value::String(text) => found.push(text.replace('`', "")),
        Value::Number(number) => found.push(number.to_string()),
        _ => {}
    }
}

#[test]
fn the_page_contains_the_whole_contract() {
    let page = ok(&mut Server::start().connect(), "/docs").body;
    let text = text_of(&page);
    let mut contract: Value = serde_json::from_str(OPENAPI_JSON).expect("JSON");
    // For tools that read the description.
    for (place, name) in [
        ("", "tags"),
        ("/info", "contact"),
        ("/paths/~1plants/post", "tags"),
    ] {
        let found = contract.pointer_mut(place).and_then(Value::as_object_mut);
        found.expect("an object").remove(name).expect(name);
    }
    // Names that only connect the parts of the description.
    contract["components"]["headers"] = contract["components"]["headers"]
        .as_object()
        .expect("headers")
        .values()
        .cloned()
        .collect();
    let schemas = contract["components"]["schemas"]
        .as_object()
        .expect("schemas")
        .clone();
    let mut sentences: Vec<String> = schemas.keys().cloned().collect();
    said(&contract, &mut sentences);
    assert!(sentences.len() > 100);
    let operation_id = contract["paths"]["/plants"]["post"]["operationId"]
        .as_str()
        .expect("a name");
    assert!(page.contains(&format!("id=\"{operation_id}\"")));
    for sentence in sentences {
        // A type is shown as a word, an object as its members, and the server URL is that of the page.
        let elsewhere = ["object", "/", operation_id, "http"].contains(&&*sentence);
        assert!(elsewhere || text.contains(&sentence), "{sentence}");
    }
}

#[test]
fn code_in_the_contract_is_code_on_the_page() {
    let page = ok(&mut Server::start().connect(), "/docs").body;
    for (text, html) in [
        (
            "(`id`, `name` and `tag` equal)",
            "(<code>id</code>, <code>name</code> and <code>tag</code> equal)",
        ),
        (
            "sent as `Authorization: Bearer <token>`. The",
            "sent as <code>Authorization: Bearer &lt;token&gt;</code>. The",
        ),
    ] {
        assert!(OPENAPI_JSON.contains(text), "{text}");
        assert!(page.contains(html), "{html}");
    }
}
