//! Where a request ends: requests that servers and proxies read in different ways, sent as raw bytes, directly and through nginx and
//! HAProxy. Each is followed by a request that must not be executed unless the first one was valid.

use std::thread::sleep;
use std::time::Duration;

use crate::harness::proxy::Proxy;
use crate::harness::{Client, Server};

/// What the service does with a case that is sent to it directly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    /// 200, and the request that follows is executed.
    Stored,
    /// 200, and the connection is closed after the response.
    StoredAndClosed,
    /// This error, and the connection is closed.
    Rejected(u64),
}
use Expected::{Rejected, Stored, StoredAndClosed};

struct Case {
    bytes: Vec<u8>,
    expected: Expected,
}

const MALFORMED: Expected = Rejected(40000);

/// A body of 22 bytes.
const BODY: &str = r#"{"id":1,"name":"Fern"}"#;

/// `TOKEN` is replaced, and so is `LENGTH`, by that of `BODY`.
const AUTH: &str = "Authorization: Bearer TOKEN\r\nContent-Type: application/json\r\n";

/// Request lines and `Host`, with the rest of a valid request.
const REQUEST_LINES: &[(&str, Expected)] = &[
    ("POST /plants HTTP/1.1\r\nHost: HOST\r\n", Stored),
    ("\r\nPOST /plants HTTP/1.1\r\nHost: HOST\r\n", Stored),
    ("\r\n\r\nPOST /plants HTTP/1.1\r\nHost: HOST\r\n", Stored),
    ("POST /plants HTTP/1.1\r\nhOsT:HOST\r\n", Stored),
    ("POST /plants HTTP/1.1\r\nHost: \t HOST \t\r\n", Stored),
    ("POST /plants HTTP/1.1\r\nHost: localhost:80\r\n", Stored),
    ("POST /plants HTTP/1.1\r\nHost: [::1]:80\r\n", Stored),
    ("POST /plants HTTP/1.1\r\nHost: [::1]\r\n", Stored),
    ("POST /plants HTTP/1.1\r\nHost: localhost:\r\n", Stored),
    ("POST /plants?x=y HTTP/1.1\r\nHost: HOST\r\n", Stored),
    ("POST http://HOST/plants HTTP/1.1\r\nHost: HOST\r\n", Stored),
    (
        "POST http://plants.example/plants HTTP/1.1\r\nHost: PLANTS.example\r\n",
        Stored,
    ),
    ("POST /plants HTTP/1.0\r\nHost: HOST\r\n", StoredAndClosed),
    ("POST /plants HTTP/1.0\r\n", StoredAndClosed),
    ("POST /plants HTTP/1.1\r\n", MALFORMED),
    ("POST /plants HTTP/1.1\r\nHost:\r\n", MALFORMED),
    (
        "POST /plants HTTP/1.1\r\nHost: HOST\r\nHost: HOST\r\n",
        MALFORMED,
    ),
    (
        "POST /plants HTTP/1.1\r\nHost: HOST\r\nHost: other\r\n",
        MALFORMED,
    ),
    (
        "POST /plants HTTP/1.0\r\nHost: HOST\r\nHost: other\r\n",
        MALFORMED,
    ),
    ("POST /plants HTTP/1.1\r\nHost: a b\r\n", MALFORMED),
    ("POST /plants HTTP/1.1\r\nHost: a/b\r\n", MALFORMED),
    ("POST /plants HTTP/1.1\r\nHost: a:x\r\n", MALFORMED),
    ("POST /plants HTTP/1.1\r\nHost: a:80:80\r\n", MALFORMED),
    ("POST /plants HTTP/1.1\r\nHost: :80\r\n", MALFORMED),
    ("POST /plants HTTP/1.1\r\nHost: [::1\r\n", MALFORMED),
    ("POST /plants HTTP/1.1\r\nHost: [::1]x\r\n", MALFORMED),
    ("POST /plants HTTP/1.1\r\nHost: []:80\r\n", MALFORMED),
    ("POST /plants HTTP/1.1\r\nHost: a]\r\n", MALFORMED),
    ("POST /plants HTTP/1.1\r\nHost: user@host\r\n", MALFORMED),
    ("POST /plants HTTP/1.1\r\nHost: a\"b\r\n", MALFORMED),
    ("POST /plants HTTP/1.1\r\nHost: a#b\r\n", MALFORMED),
    ("POST /plants HTTP/1.1\r\nHost: a?b\r\n", MALFORMED),
    ("POST /plants HTTP/1.1\r\nHost: a\\b\r\n", MALFORMED),
    ("POST /plants HTTP/1.1\r\nHost: \u{e9}\r\n", MALFORMED),
    ("POST /plants HTTP/1.1\r\nHost : HOST\r\n", MALFORMED),
    ("POST /plants HTTP/1.1\r\n Host: HOST\r\n", MALFORMED),
    (
        "POST http://other/plants HTTP/1.1\r\nHost: HOST\r\n",
        MALFORMED,
    ),
    (
        "POST http://HOST@other/plants HTTP/1.1\r\nHost: HOST\r\n",
        MALFORMED,
    ),
    ("POST http://HOST/plants HTTP/1.1\r\n", MALFORMED),
    ("POST  /plants HTTP/1.1\r\nHost: HOST\r\n", MALFORMED),
    ("POST /plants  HTTP/1.1\r\nHost: HOST\r\n", MALFORMED),
    ("POST\t/plants HTTP/1.1\r\nHost: HOST\r\n", MALFORMED),
    ("POST /plants\tHTTP/1.1\r\nHost: HOST\r\n", MALFORMED),
    (" POST /plants HTTP/1.1\r\nHost: HOST\r\n", MALFORMED),
    ("POST /pl ants HTTP/1.1\r\nHost: HOST\r\n", MALFORMED),
    ("POST /pl\0ants HTTP/1.1\r\nHost: HOST\r\n", MALFORMED),
    ("POST /pl\u{7f}ants HTTP/1.1\r\nHost: HOST\r\n", MALFORMED),
    ("PO\0ST /plants HTTP/1.1\r\nHost: HOST\r\n", MALFORMED),
    ("P(ST /plants HTTP/1.1\r\nHost: HOST\r\n", MALFORMED),
    ("POST /plants\r\nHost: HOST\r\n", MALFORMED),
    ("POST /plants HTTP/1.1 \r\nHost: HOST\r\n", MALFORMED),
    ("POST /plants HTTP/1.1\n", MALFORMED),
    ("POST /plants HTTP/1.1\nHost: HOST\r\n", MALFORMED),
    ("POST /plants HTTP/1.1\rHost: HOST\r\n", MALFORMED),
    ("POST /plants HTTP/1.1\r\r\nHost: HOST\r\n", MALFORMED),
    ("\nPOST /plants HTTP/1.1\r\nHost: HOST\r\n", MALFORMED),
    ("POST /plants HTTP/1.2\r\nHost: HOST\r\n", MALFORMED),
    ("POST /plants HTTP/2.0\r\nHost: HOST\r\n", MALFORMED),
    ("POST /plants HTTP/0.9\r\nHost: HOST\r\n", MALFORMED),
    ("POST /plants HTTP/11\r\nHost: HOST\r\n", MALFORMED),
    ("POST /plants HTTP/1.10\r\nHost: HOST\r\n", MALFORMED),
    ("POST /plants http/1.1\r\nHost: HOST\r\n", MALFORMED),
    ("POST /plants HTTPS/1.1\r\nHost: HOST\r\n", MALFORMED),
    ("POST plants HTTP/1.1\r\nHost: HOST\r\n", MALFORMED),
    ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nHost: HOST\r\n", MALFORMED),
    ("post /plants HTTP/1.1\r\nHost: HOST\r\n", Rejected(40500)),
    ("POST /plant HTTP/1.1\r\nHost: HOST\r\n", Rejected(40400)),
];

/// Headers of a request with a `Content-Length` of its own.
const HEADERS: &[(&str, Expected)] = &[
    ("X: y\r\n", Stored),
    ("X:\r\n", Stored),
    ("X: \u{e9}\r\n", Stored),
    ("X: a\tb\r\n", Stored),
    ("Connection: keep-alive\r\n", Stored),
    ("Connection: close\r\n", StoredAndClosed),
    (
        "Connection: keep-alive\r\nConnection: close\r\n",
        StoredAndClosed,
    ),
    (
        "Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n",
        Stored,
    ),
    ("X y\r\n", MALFORMED),
    (": y\r\n", MALFORMED),
    ("X : y\r\n", MALFORMED),
    ("X\t: y\r\n", MALFORMED),
    ("X[]: y\r\n", MALFORMED),
    ("\u{e9}: y\r\n", MALFORMED),
    ("X: a\0b\r\n", MALFORMED),
    ("X: a\u{1}b\r\n", MALFORMED),
    ("X: a\u{7f}b\r\n", MALFORMED),
    ("X: a\rb\r\n", MALFORMED),
    ("X: a\r\r\n", MALFORMED),
    ("X: a\n", MALFORMED),
    ("X: a\nY: b\r\n", MALFORMED),
    ("X: a\r\n b\r\n", MALFORMED),
    ("X: a\r\n\tb\r\n", MALFORMED),
    ("X: a\r\n Transfer-Encoding: chunked\r\n", MALFORMED),
    ("\0X: y\r\n", MALFORMED),
];

/// `Content-Length`, alone.
const LENGTHS: &[(&str, Expected)] = &[
    ("Content-Length: LENGTH\r\n", Stored),
    ("content-length:LENGTH\r\n", Stored),
    ("Content-Length: \t LENGTH \t\r\n", Stored),
    ("Content-Length: 000LENGTH\r\n", Stored),
    (
        "Content-Length: LENGTH\r\nContent-Length: LENGTH\r\n",
        MALFORMED,
    ),
    ("Content-Length: LENGTH\r\ncontent-length: 0\r\n", MALFORMED),
    ("Content-Length: 0\r\nContent-Length: LENGTH\r\n", MALFORMED),
    ("Content-Length: LENGTH, LENGTH\r\n", MALFORMED),
    ("Content-Length: LENGTH,\r\n", MALFORMED),
    ("Content-Length: LENGTH 0\r\n", MALFORMED),
    ("Content-Length: LENGTH;x\r\n", MALFORMED),
    ("Content-Length: +LENGTH\r\n", MALFORMED),
    ("Content-Length: -LENGTH\r\n", MALFORMED),
    ("Content-Length: 0x16\r\n", MALFORMED),
    ("Content-Length: 22.0\r\n", MALFORMED),
    ("Content-Length: 2_2\r\n", MALFORMED),
    ("Content-Length: 22e0\r\n", MALFORMED),
    ("Content-Length: \"22\"\r\n", MALFORMED),
    ("Content-Length: \u{b}22\r\n", MALFORMED),
    ("Content-Length: \u{c}22\r\n", MALFORMED),
    ("Content-Length: 22\0\r\n", MALFORMED),
    ("Content-Length: \u{662}\u{662}\r\n", MALFORMED),
    ("Content-Length:\r\n", MALFORMED),
    ("Content-Length : LENGTH\r\n", MALFORMED),
    (" Content-Length: LENGTH\r\n", MALFORMED),
    ("Content-Length: 2\r\n 2\r\n", MALFORMED),
    ("Content-Length: LENGTH\n", MALFORMED),
    ("Content-Length: 9223372036854775807\r\n", Rejected(40013)),
    ("Content-Length: 9223372036854775808\r\n", Rejected(40013)),
    ("Content-Length: 18446744073709551615\r\n", Rejected(40013)),
    ("Content-Length: 18446744073709551638\r\n", Rejected(40013)),
    (
        "Content-Length: 99999999999999999999999999\r\n",
        Rejected(40013),
    ),
    ("Content-Length: 1048577\r\n", Rejected(40013)),
];

/// `Transfer-Encoding` of a request whose body is chunked. Most are from the permutations of the HTTP Request Smuggler of `PortSwigger`.
const ENCODINGS: &[(&str, Expected)] = &[
    ("Transfer-Encoding: chunked\r\n", StoredAndClosed),
    ("transfer-encoding:cHuNkEd\r\n", StoredAndClosed),
    ("Transfer-Encoding:\tchunked\t\r\n", StoredAndClosed),
    (
        "Transfer-Encoding: chunked\r\nContent-Length: LENGTH\r\n",
        MALFORMED,
    ),
    (
        "Content-Length: LENGTH\r\nTransfer-Encoding: chunked\r\n",
        MALFORMED,
    ),
    (
        "Content-Length: 0\r\nTransfer-Encoding: chunked\r\n",
        MALFORMED,
    ),
    (
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        MALFORMED,
    ),
    (
        "Transfer-Encoding: chunked\r\nTransfer-encoding: identity\r\n",
        MALFORMED,
    ),
    (
        "Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n",
        MALFORMED,
    ),
    (
        "Transfer-Encoding: x\r\nTransfer-encoding: chunked\r\n",
        MALFORMED,
    ),
    (
        "Transfer-Encoding: chunked\r\nTransfer-encoding: x\r\n",
        MALFORMED,
    ),
    ("Transfer-Encoding: chunked, chunked\r\n", MALFORMED),
    ("Transfer-Encoding: gzip, chunked\r\n", MALFORMED),
    ("Transfer-Encoding: identity, chunked\r\n", MALFORMED),
    ("Transfer-Encoding: chunked, identity\r\n", MALFORMED),
    ("Transfer-Encoding: chunked,\r\n", MALFORMED),
    ("Transfer-Encoding: ,chunked\r\n", MALFORMED),
    ("Transfer-Encoding: chunked;q=1\r\n", MALFORMED),
    ("Transfer-Encoding: xchunked\r\n", MALFORMED),
    ("Transfer-Encoding: chunk\r\n", MALFORMED),
    ("Transfer-Encoding: chunkedx\r\n", MALFORMED),
    ("Transfer-Encoding: \"chunked\"\r\n", MALFORMED),
    ("Transfer-Encoding: 'chunked'\r\n", MALFORMED),
    ("Transfer-Encoding: chunked\0\r\n", MALFORMED),
    ("Transfer-Encoding: \0chunked\r\n", MALFORMED),
    ("Transfer-Encoding: \u{b}chunked\r\n", MALFORMED),
    ("Transfer-Encoding:\u{c}chunked\r\n", MALFORMED),
    ("Transfer-Encoding:\u{a0}chunked\r\n", MALFORMED),
    ("Transfer-Encoding: \u{ff}chunked\r\n", MALFORMED),
    ("Transfer-Encoding: ch\u{212a}nked\r\n", MALFORMED),
    ("Transfer-Encoding: chunked\r\n\r\r\n", MALFORMED),
    ("Transfer-Encoding: chunked\r\r\n", MALFORMED),
    ("Transfer-Encoding: chunked\n", MALFORMED),
    ("Transfer-Encoding:\r\n chunked\r\n", MALFORMED),
    ("Transfer-Encoding:\n chunked\r\n", MALFORMED),
    ("Transfer-Encoding\r\n: chunked\r\n", MALFORMED),
    ("Transfer-Encoding : chunked\r\n", MALFORMED),
    ("Transfer-Encoding\t: chunked\r\n", MALFORMED),
    (" Transfer-Encoding: chunked\r\n", MALFORMED),
    ("\tTransfer-Encoding: chunked\r\n", MALFORMED),
    ("X: y\nTransfer-Encoding: chunked\r\n", MALFORMED),
    ("X: y\rTransfer-Encoding: chunked\r\n", MALFORMED),
    ("Transfer-Encoding:\r\n", MALFORMED),
    ("Transfer-Encoding: identity\r\n", MALFORMED),
    ("Transfer-Encoding: compress\r\n", MALFORMED),
    ("\u{0}Transfer-Encoding: chunked\r\n", MALFORMED),
];

/// Bodies of a request with `Transfer-Encoding: chunked`; `BODY` is replaced.
const CHUNKS: &[(&str, Expected)] = &[
    ("16\r\nBODY\r\n0\r\n\r\n", StoredAndClosed),
    ("0016\r\nBODY\r\n000\r\n\r\n", StoredAndClosed),
    (
        "1\r\n{\r\n15\r\n\"id\":1,\"name\":\"Fern\"}\r\n0\r\n\r\n",
        StoredAndClosed,
    ),
    ("16;x=y\r\nBODY\r\n0\r\n\r\n", StoredAndClosed),
    ("16\r\nBODY\r\n0\r\nX: y\r\n\r\n", StoredAndClosed),
    (
        "16\r\nBODY\r\n0\r\nContent-Length: 5\r\n\r\n",
        StoredAndClosed,
    ),
    ("0x16\r\nBODY\r\n0\r\n\r\n", MALFORMED),
    ("+16\r\nBODY\r\n0\r\n\r\n", MALFORMED),
    ("-16\r\nBODY\r\n0\r\n\r\n", MALFORMED),
    ("g\r\nBODY\r\n0\r\n\r\n", MALFORMED),
    ("\r\nBODY\r\n0\r\n\r\n", MALFORMED),
    (" 16\r\nBODY\r\n0\r\n\r\n", MALFORMED),
    ("16\nBODY\r\n0\r\n\r\n", MALFORMED),
    ("16\rBODY\r\n0\r\n\r\n", MALFORMED),
    ("16\r\nBODY\n0\r\n\r\n", MALFORMED),
    ("16\r\nBODY0\r\n\r\n", MALFORMED),
    ("16\r\nBODYx\r\n0\r\n\r\n", MALFORMED),
    ("16;\nBODY\r\n0\r\n\r\n", MALFORMED),
    ("16;x=\"\n\"\r\nBODY\r\n0\r\n\r\n", MALFORMED),
    ("16\0\r\nBODY\r\n0\r\n\r\n", MALFORMED),
    ("10000000000000016\r\nBODY\r\n0\r\n\r\n", MALFORMED),
    ("ffffffffffffffff\r\nBODY\r\n0\r\n\r\n", MALFORMED),
    ("100001\r\nBODY\r\n0\r\n\r\n", MALFORMED),
];

fn cases() -> Vec<Case> {
    let post = "POST /plants HTTP/1.1\r\nHost: HOST\r\n";
    let case = |text: String, expected| {
        let text = text.replace("LENGTH", &BODY.len().to_string());
        // `é` and the like are single bytes on the wire.
        let bytes = text.chars().flat_map(|c| match u8::try_from(u32::from(c)) {
            Ok(byte) => vec![byte],
            Err(_) => c.to_string().into_bytes(),
        });
        Case {
            bytes: bytes.collect(),
            expected,
        }
    };
    let lines = REQUEST_LINES.iter().map(|(line, expected)| {
        case(
            format!("{line}{AUTH}Content-Length: LENGTH\r\n\r\n{BODY}"),
            *expected,
        )
    });
    let headers = HEADERS.iter().map(|(header, expected)| {
        case(
            format!("{post}{AUTH}{header}Content-Length: LENGTH\r\n\r\n{BODY}"),
            *expected,
        )
    });
    let lengths = LENGTHS
        .iter()
        .map(|(header, expected)| case(format!("{post}{AUTH}{header}\r\n{BODY}"), *expected));
    let encodings = ENCODINGS.iter().map(|(header, expected)| {
        case(
            format!("{post}{AUTH}{header}\r\n16\r\n{BODY}\r\n0\r\n\r\n"),
            *expected,
        )
    });
    let chunks = CHUNKS.iter().map(|(chunks, expected)| {
        let chunks = chunks.replace("BODY", BODY);
        case(
            format!("{post}{AUTH}Transfer-Encoding: chunked\r\n\r\n{chunks}"),
            *expected,
        )
    });
    lines
        .chain(headers)
        .chain(lengths)
        .chain(encodings)
        .chain(chunks)
        .collect()
}

/// A request that must be executed only after a valid one.
fn follow_up(token: &str, id: usize) -> String {
    let body = format!(r#"{{"id":{id},"name":"follow-up"}}"#);
    let length = body.len();
    let auth = AUTH.replace("TOKEN", token);
    format!("POST /plants HTTP/1.1\r\nHost: HOST\r\n{auth}Content-Length: {length}\r\n\r\n{body}")
}

fn replaced(bytes: &[u8], from: &str, to: &str) -> Vec<u8> {
    let mut result = Vec::new();
    let mut rest = bytes;
    while let Some(at) = rest
        .windows(from.len())
        .position(|window| window == from.as_bytes())
    {
        result.extend_from_slice(&rest[..at]);
        result.extend_from_slice(to.as_bytes());
        rest = &rest[at + from.len()..];
    }
    result.extend_from_slice(rest);
    result
}

/// The end of a connection through a proxy, which may not respond any more after half of it is closed.
const LAST: &str = "GET /nothing HTTP/1.1\r\nHost: HOST\r\nConnection: close\r\n\r\n";

/// A case and the request that follows it.
fn with_follow_up(case: &Case, token: &str, id: usize) -> Vec<u8> {
    let mut bytes = replaced(&case.bytes, "TOKEN", token);
    bytes.extend_from_slice(follow_up(token, id).as_bytes());
    replaced(&bytes, "HOST", "plants.example")
}

#[test]
fn every_case_has_a_definite_response_and_nothing_is_smuggled() {
    check_every_case(|client, bytes| client.try_send(bytes));
}

/// The pieces may arrive together; that makes no difference.
#[test]
fn every_case_has_the_same_response_if_its_first_line_arrives_earlier() {
    check_every_case(|client, bytes| {
        let line_end = bytes.iter().position(|byte| *byte == b'\n');
        let (first, rest) = bytes.split_at(line_end.map_or(0, |end| end + 1));
        client.try_send(first);
        sleep(Duration::from_millis(2));
        client.try_send(rest);
    });
}

fn check_every_case(send: impl Fn(&mut Client, &[u8])) {
    let server = Server::start();
    let token = server.token();
    let cases = cases();
    let documented = include_str!("../../docs/security.md");
    let count = format!("sends {} requests", cases.len());
    assert!(documented.contains(&count), "{count}");
    let mut wrong = Vec::new();
    for (number, case) in cases.iter().enumerate() {
        let mut client = Client::connect(server.address());
        send(&mut client, &with_follow_up(case, &token, 1000 + number));
        client.finish();
        let received = client.everything();
        let responses = received.replace("HTTP/1.0 ", "HTTP/1.1 ");
        let responses: Vec<_> = responses.split("HTTP/1.1 ").skip(1).collect();
        let is_stored = |response: &str| response.starts_with("200 ");
        let has_error = |response: &str, code: u64| response.contains(&format!("\"error\":{code}"));
        let is_right = match (case.expected, &responses[..]) {
            (Stored, [first, second]) => is_stored(first) && is_stored(second),
            (StoredAndClosed, [only]) => is_stored(only),
            (Rejected(code), [only]) => has_error(only, code),
            _ => false,
        };
        if !is_right {
            let text = String::from_utf8_lossy(&case.bytes);
            wrong.push(format!(
                "{text:?}\n  expected {:?}, got {received:?}",
                case.expected
            ));
        }
    }
    assert!(
        wrong.is_empty(),
        "{} of {}:\n{}",
        wrong.len(),
        cases.len(),
        wrong.join("\n")
    );
    let executed: Vec<_> = server
        .plants()
        .iter()
        .map(|(id, ..)| *id)
        .filter(|id| *id >= 1000)
        .collect();
    let expected: Vec<_> = (1000..)
        .zip(&cases)
        .filter(|(_, case)| case.expected == Stored)
        .map(|(id, _)| id)
        .collect();
    assert_eq!(executed, expected);
}

/// A proxy may reject more than the service, or pass on what it has corrected. But whatever it passes on, both agree on where it ends: a
/// request is executed only if the client gets the response to it, and the next client gets the response to its own request.
fn nothing_is_smuggled_through(server: &Server, proxy: &Proxy) {
    let token = server.token();
    let mut answered = Vec::new();
    for (number, case) in cases().iter().enumerate() {
        let id = 1000 + number;
        let mut bytes = with_follow_up(case, &token, id);
        bytes.extend_from_slice(&replaced(LAST.as_bytes(), "HOST", "plants.example"));
        let mut client = Client::connect(proxy.address);
        client.try_send(bytes);
        let received = client.everything();
        if received.contains("follow-up") {
            answered.push(i64::try_from(id).expect("small"));
        }
        let mut victim = Client::connect(proxy.address);
        let body = format!(r#"{{"id":{},"name":"victim {number}"}}"#, 5000 + number);
        let response = victim.add(&token, body.as_bytes());
        let text = String::from_utf8_lossy(&case.bytes);
        assert_eq!(
            response.body,
            format!(r#"{{"name":"victim {number}"}}"#),
            "after {text:?}"
        );
    }
    let plants = server.plants();
    let executed = plants
        .iter()
        .map(|(id, ..)| *id)
        .filter(|id| (1000..5000).contains(id));
    assert_eq!(executed.collect::<Vec<_>>(), answered);
    assert!(!answered.is_empty());
}

#[test]
fn nginx_and_the_service_agree_on_where_a_request_ends() {
    let server = Server::start_with(&["--trusted-proxy", "127.0.0.1"]);
    nothing_is_smuggled_through(&server, &Proxy::plain_nginx(&server));
}

#[test]
fn haproxy_and_the_service_agree_on_where_a_request_ends() {
    let server = Server::start_with(&["--trusted-proxy", "127.0.0.1"]);
    nothing_is_smuggled_through(&server, &Proxy::plain_haproxy(&server, |config| config));
}
