//! HTTP/2 as a client may misuse it: floods of frames, streams without an end, clients that do not read. The other tests run over
//! HTTP/2 with TRANSPORT=http2.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::ServerName;
use rustls::{ClientConnection, StreamOwned};
use serde_json::Value;
use tempfile::TempDir;
use tokio_rustls::rustls;

use crate::harness::transport::Certificate;
use crate::harness::{PATIENCE, Server, directory, wait_until};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const PRIORITY: u8 = 2;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PUSH_PROMISE: u8 = 5;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;

const PROTOCOL_ERROR: u32 = 1;
const FRAME_SIZE_ERROR: u32 = 6;
const COMPRESSION_ERROR: u32 = 9;

const END_STREAM: u8 = 1;
const ACK: u8 = 1;
const END_HEADERS: u8 = 4;

struct Frame {
    kind: u8,
    flags: u8,
    stream: u32,
    payload: Vec<u8>,
}

/// A server with TLS, and its certificate.
struct Tls {
    server: Server,
    certificate: Certificate,
    _directory: TempDir,
}

fn start(arguments: &[&str]) -> Tls {
    let directory = directory();
    let certificate = Certificate::create(directory.path(), "server", 2);
    let tls = ["--tls-cert", "server.crt", "--tls-key", "server.key"];
    let server = Server::start_in(directory.path(), &[&tls, arguments].concat());
    Tls {
        server,
        certificate,
        _directory: directory,
    }
}

impl Tls {
    /// A connection before its preface.
    fn open(&self) -> Connection {
        let config = Arc::new(self.certificate.client_config(&["h2"]));
        let address = self.server.address();
        let client = ClientConnection::new(config, ServerName::from(address.ip()));
        let stream = TcpStream::connect(address).expect("a connection");
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
        stream.set_nodelay(true).expect("a socket");
        Connection(StreamOwned::new(client.expect("a client"), stream))
    }

    /// A connection after the settings of both sides.
    fn connect(&self) -> Connection {
        let mut connection = self.open();
        connection.send_bytes(PREFACE);
        connection.send(SETTINGS, 0, 0, &[]);
        connection.wait_for(|frame| frame.kind == SETTINGS && frame.flags == 0);
        connection.send(SETTINGS, ACK, 0, &[]);
        connection
    }

    fn metric(&self, name: &str) -> u64 {
        let metrics = self.server.ask("/metrics").body;
        let value = metrics
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.expect("a metric").parse().expect("a number")
    }

    fn add_headers(&self) -> Vec<u8> {
        let token = format!("Bearer {}", self.server.token());
        headers(&[
            (":method", "POST"),
            (":scheme", "https"),
            (":path", "/plants"),
            (":authority", "localhost"),
            ("authorization", &token),
            ("content-type", "application/json"),
        ])
    }

    /// The service works for others.
    fn works(&self) {
        let mut connection = self.connect();
        connection.send(HEADERS, END_HEADERS, 1, &self.add_headers());
        connection.send(DATA, END_STREAM, 1, br#"{"id":1,"name":"x"}"#);
        assert_eq!(connection.response(1), (200, r#"{"name":"x"}"#.to_owned()));
    }
}

struct Connection(StreamOwned<ClientConnection, TcpStream>);

impl Connection {
    fn send_bytes(&mut self, bytes: &[u8]) {
        let _ = self.0.write_all(bytes);
    }

    fn send(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        self.send_bytes(&frame(kind, flags, stream, payload));
    }

    /// None when the connection is closed.
    fn receive(&mut self) -> Option<Frame> {
        let mut header = [0; 9];
        let mut payload = Vec::new();
        let read = self.0.read_exact(&mut header).and_then(|()| {
            let len = u32::from_be_bytes([0, header[0], header[1], header[2]]);
            payload = vec![0; len as usize];
            self.0.read_exact(&mut payload)
        });
        if let Err(error) = read {
            let is_timeout = [ErrorKind::WouldBlock, ErrorKind::TimedOut].contains(&error.kind());
            assert!(!is_timeout, "nothing arrives");
            return None;
        }
        let [_, _, _, kind, flags, stream @ ..] = header;
        Some(Frame {
            kind,
            flags,
            stream: u32::from_be_bytes(stream) & (u32::MAX >> 1),
            payload,
        })
    }

    fn wait_for(&mut self, is_so: impl Fn(&Frame) -> bool) -> Frame {
        std::iter::from_fn(|| self.receive())
            .find(is_so)
            .expect("such a frame before the end")
    }

    /// The status and the body of a response without Huffman coding in its status.
    fn response(&mut self, stream: u32) -> (u16, String) {
        let head = self.wait_for(|frame| frame.kind == HEADERS && frame.stream == stream);
        let mut body = Vec::new();
        let mut is_end = head.flags & END_STREAM != 0;
        while !is_end {
            let data = self.wait_for(|frame| frame.kind == DATA && frame.stream == stream);
            body.extend_from_slice(&data.payload);
            is_end = data.flags & END_STREAM != 0;
        }
        let body = String::from_utf8(body).expect("text");
        (status(&head.payload), body)
    }

    /// Reads until the server closes the connection; the error code of its GOAWAY.
    fn ends(&mut self) -> Option<u32> {
        let mut code = None;
        while let Some(frame) = self.receive() {
            if frame.kind == GOAWAY {
                code = frame.payload[4..8].try_into().ok().map(u32::from_be_bytes);
            }
        }
        code
    }
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let len = u32::try_from(payload.len()).expect("short").to_be_bytes();
    let head = [&len[1..], &[kind, flags], &stream.to_be_bytes()].concat();
    [&head, payload].concat()
}

/// HPACK without tables and Huffman codes.
fn headers(fields: &[(&str, &str)]) -> Vec<u8> {
    let text = |text: &str| {
        let mut prefix = Vec::new();
        let mut rest = text.len();
        if rest >= 127 {
            prefix.push(127);
            rest -= 127;
            while rest >= 128 {
                prefix.push(u8::try_from(rest % 128).expect("a byte") | 128);
                rest /= 128;
            }
        }
        prefix.push(u8::try_from(rest).expect("a byte"));
        [&prefix, text.as_bytes()].concat()
    };
    let field = |(name, value): &(&str, &str)| [vec![0], text(name), text(value)].concat();
    fields.iter().flat_map(field).collect()
}

/// The status is the first field, and one of the static table or a literal.
fn status(block: &[u8]) -> u16 {
    // Updates of the table size come first.
    let block = &block[block
        .iter()
        .take_while(|byte| **byte & 0xe0 == 0x20)
        .count()..];
    if let indexed @ 0x88..=0x8e = block[0] {
        return [200, 204, 206, 304, 400, 404, 500][usize::from(indexed - 0x88)];
    }
    let is_huffman = block[1] & 0x80 != 0;
    let text = &block[2..];
    if is_huffman {
        digits(text)
    } else {
        text_number(&text[..3])
    }
}

fn text_number(text: &[u8]) -> u16 {
    let text = std::str::from_utf8(text).expect("digits");
    text.parse().expect("a status")
}

/// Three digits in the Huffman code of HPACK: 0 to 2 have five bits, the others six.
fn digits(bytes: &[u8]) -> u16 {
    let bits = bytes
        .iter()
        .take(3)
        .fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte));
    let mut left = 24;
    (0..3).fold(0, |number, _| {
        let short = bits >> (left - 5) & 31;
        let digit = if short < 3 {
            left -= 5;
            short
        } else {
            left -= 6;
            (bits >> left & 63) - 0x19 + 3
        };
        number * 10 + u16::try_from(digit).expect("a digit")
    })
}

#[test]
fn a_plant_is_added_and_errors_have_their_bodies() {
    let tls = start(&[]);
    tls.works();
    let mut connection = tls.connect();
    let get = headers(&[
        (":method", "GET"),
        (":scheme", "https"),
        (":path", "/nowhere"),
        (":authority", "localhost"),
    ]);
    connection.send(HEADERS, END_HEADERS | END_STREAM, 1, &get);
    let (status, body) = connection.response(1);
    let body: Value = serde_json::from_str(&body).expect("JSON");
    assert_eq!((status, &body["error"]), (404, &40400.into()));
}

#[test]
fn requests_on_one_connection_do_not_wait_for_each_other() {
    let tls = start(&[]);
    let mut connection = tls.connect();
    connection.send(HEADERS, END_HEADERS, 1, &tls.add_headers());
    connection.send(HEADERS, END_HEADERS, 3, &tls.add_headers());
    connection.send(DATA, END_STREAM, 3, br#"{"id":3,"name":"x"}"#);
    assert_eq!(connection.response(3).0, 200);
    connection.send(DATA, END_STREAM, 1, br#"{"id":1,"name":"x"}"#);
    assert_eq!(connection.response(1).0, 200);
}

#[test]
fn headers_above_the_limit_are_43100() {
    let tls = start(&[]);
    let mut connection = tls.connect();
    let long = "x".repeat(17_000);
    let block = headers(&[
        (":method", "GET"),
        (":scheme", "https"),
        (":path", "/docs"),
        (":authority", "localhost"),
        ("x-long", &long),
    ]);
    let (first, second) = block.split_at(16_000);
    connection.send(HEADERS, END_STREAM, 1, first);
    connection.send(CONTINUATION, END_HEADERS, 1, second);
    let (status, body) = connection.response(1);
    assert_eq!(status, 431);
    assert!(body.contains("43100"), "{body}");
    // Much more than that is not read.
    connection.send(HEADERS, END_STREAM, 3, first);
    for _ in 0..100 {
        connection.send(CONTINUATION, 0, 3, &block[..16_000]);
    }
    connection.ends();
    tls.works();
}

/// A server that closes no connection because of time.
fn start_patient() -> Tls {
    start(&[
        "--header-timeout",
        "10m",
        "--body-timeout",
        "10m",
        "--request-timeout",
        "10m",
        "--idle-timeout",
        "10m",
    ])
}

/// Sends many frames: the server closes the connection and counts it, and others are not affected.
fn flood(tls: &Tls, frames: impl Fn(u32) -> Vec<u8>) {
    let before = floods(tls);
    let mut connection = tls.connect();
    for number in 0..20_000 {
        if connection.0.write_all(&frames(number)).is_err() {
            break;
        }
    }
    connection.ends();
    drop(connection);
    wait_until("it is counted", || floods(tls) == before + 1);
    tls.works();
}

fn floods(tls: &Tls) -> u64 {
    tls.metric("plantstore_http2_floods_total")
}

#[test]
fn settings_pings_priorities_and_window_updates_without_end_close_the_connection() {
    let tls = start_patient();
    flood(&tls, |_| frame(SETTINGS, 0, 0, &[0, 3, 0, 0, 0, 100]));
    flood(&tls, |_| frame(PING, 0, 0, &[0; 8]));
    flood(&tls, |_| frame(PRIORITY, 0, 3, &[0, 0, 0, 0, 1]));
    flood(&tls, |_| frame(WINDOW_UPDATE, 0, 0, &[0, 0, 0, 1]));
}

#[test]
fn invalid_frames_are_not_logged_one_by_one() {
    let tls = start_patient();
    flood(&tls, |_| frame(PING, ACK, 0, &[1; 8]));
    let log = tls.server.everything_logged();
    assert!(!log.contains("PING"), "{log}");
}

#[test]
fn a_client_that_goes_on_after_the_end_of_its_connection_is_disconnected() {
    let tls = start_patient();
    let mut connection = tls.connect();
    connection.send(SETTINGS, 0, 3, &[]);
    connection.wait_for(|frame| frame.kind == GOAWAY);
    let ping = frame(PING, 0, 0, &[0; 8]).repeat(1000);
    let mut writes = (0..5000).map(|_| connection.0.write_all(&ping));
    assert!(writes.any(|written| written.is_err()));
}

#[test]
fn streams_that_are_reset_at_once_close_the_connection() {
    let tls = start_patient();
    let block = tls.add_headers();
    flood(&tls, |number| {
        let stream = 2 * number + 1;
        let request = frame(HEADERS, END_HEADERS, stream, &block);
        [request, frame(RST_STREAM, 0, stream, &[0, 0, 0, 8])].concat()
    });
}

#[test]
fn pieces_of_headers_and_bodies_without_end_close_the_connection() {
    let tls = start_patient();
    let block = tls.add_headers();
    let headers_first =
        |number, first: Vec<u8>, next: Vec<u8>| if number == 0 { first } else { next };
    flood(&tls, |number| {
        let first = frame(HEADERS, 0, 1, &block);
        headers_first(number, first, frame(CONTINUATION, 0, 1, &[]))
    });
    flood(&tls, |number| {
        let first = frame(HEADERS, END_HEADERS, 1, &block);
        headers_first(number, first, frame(DATA, 0, 1, b" "))
    });
}

#[test]
fn a_client_that_uses_a_connection_for_long_is_no_flood() {
    let tls = start(&[]);
    let block = tls.add_headers();
    let mut connection = tls.connect();
    for number in 0..1000 {
        let stream = 2 * number + 1;
        connection.send(HEADERS, END_HEADERS, stream, &block);
        connection.send(WINDOW_UPDATE, 0, 0, &[0, 0, 0, 100]);
        connection.send(PING, 0, 0, &[0; 8]);
        connection.send(DATA, 0, stream, br#"{"id":1,"#);
        connection.send(DATA, 0, stream, br#""name":"x"}"#);
        connection.send(DATA, END_STREAM, stream, &[]);
        assert_eq!(connection.response(stream).0, 200, "{number}");
    }
    assert_eq!(tls.metric("plantstore_http2_floods_total"), 0);
}

#[test]
fn more_streams_than_allowed_are_refused() {
    let tls = start(&[]);
    let block = tls.add_headers();
    let mut connection = tls.connect();
    for number in 0..300 {
        connection.send(HEADERS, END_HEADERS, 2 * number + 1, &block);
    }
    let refused = connection.wait_for(|frame| frame.kind == RST_STREAM);
    assert_eq!(refused.payload, [0, 0, 0, 7]);
    assert!(refused.stream > 2 * 250, "{}", refused.stream);
    connection.send(DATA, END_STREAM, 1, br#"{"id":1,"name":"x"}"#);
    assert_eq!(connection.response(1).0, 200);
}

#[test]
fn frames_that_a_client_must_not_send_end_the_connection_with_an_error() {
    let tls = start(&[]);
    let block = tls.add_headers();
    for (bytes, code) in [
        (frame(DATA, 0, 0, b"x"), PROTOCOL_ERROR),
        (frame(HEADERS, END_HEADERS, 0, &block), PROTOCOL_ERROR),
        (frame(HEADERS, END_HEADERS, 2, &block), PROTOCOL_ERROR),
        (frame(PUSH_PROMISE, END_HEADERS, 1, &block), PROTOCOL_ERROR),
        (frame(CONTINUATION, END_HEADERS, 1, &block), PROTOCOL_ERROR),
        (frame(PING, 0, 1, &[0; 8]), PROTOCOL_ERROR),
        (frame(PING, 0, 0, &[0; 7]), FRAME_SIZE_ERROR),
        (frame(SETTINGS, 0, 0, &[0; 5]), FRAME_SIZE_ERROR),
        (frame(SETTINGS, ACK, 0, &[0; 6]), FRAME_SIZE_ERROR),
        (frame(WINDOW_UPDATE, 0, 0, &[0; 4]), PROTOCOL_ERROR),
        (frame(RST_STREAM, 0, 1, &[0; 4]), PROTOCOL_ERROR),
        (frame(DATA, 0, 1, &vec![0; 16_385]), FRAME_SIZE_ERROR),
        (frame(HEADERS, END_HEADERS, 1, &[0x80]), COMPRESSION_ERROR),
    ] {
        let mut connection = tls.connect();
        connection.send_bytes(&bytes);
        // The general code may be used in place of a specific one.
        let found = connection.ends();
        let expected = [Some(code), Some(PROTOCOL_ERROR)];
        assert!(expected.contains(&found), "{found:?} {:?}", &bytes[..9]);
    }
    let mut no_preface = tls.open();
    no_preface.send_bytes(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n");
    no_preface.ends();
    tls.works();
}

#[test]
fn a_request_that_http2_does_not_allow_is_reset() {
    let tls = start(&[]);
    let pseudo = [
        (":method", "POST"),
        (":scheme", "https"),
        (":path", "/plants"),
        (":authority", "localhost"),
    ];
    for extra in [
        ("connection", "close"),
        ("transfer-encoding", "chunked"),
        ("Upper-Case", "x"),
        (":unknown", "x"),
        ("te", "gzip"),
    ] {
        let mut connection = tls.connect();
        let block = headers(&[&pseudo[..], &[extra]].concat());
        connection.send(HEADERS, END_HEADERS | END_STREAM, 1, &block);
        let reset = connection.wait_for(|frame| [RST_STREAM, GOAWAY].contains(&frame.kind));
        let code = &reset.payload[reset.payload.len().min(8) - 4..][..4];
        assert_ne!(code, [0; 4], "{extra:?}");
    }
    // More data than the length says.
    let mut connection = tls.connect();
    let mut block = tls.add_headers();
    block.extend(headers(&[("content-length", "3")]));
    connection.send(HEADERS, END_HEADERS, 1, &block);
    connection.send(DATA, END_STREAM, 1, br#"{"id":9,"name":"x"}"#);
    connection.wait_for(|frame| frame.kind == RST_STREAM);
    assert!(tls.server.plants().is_empty());
    // The host of the request is not certain.
    let mut connection = tls.connect();
    let mut block = tls.add_headers();
    block.extend(headers(&[("host", "elsewhere")]));
    connection.send(HEADERS, END_HEADERS, 1, &block);
    connection.send(DATA, END_STREAM, 1, br#"{"id":9,"name":"x"}"#);
    assert_eq!(connection.response(1).0, 400);
}

#[test]
fn a_silent_client_and_an_idle_one_are_disconnected() {
    let tls = start(&["--header-timeout", "500ms", "--idle-timeout", "700ms"]);
    let mut silent = tls.connect();
    assert_eq!(silent.ends(), Some(0));
    let mut half = tls.connect();
    half.send(HEADERS, 0, 1, &tls.add_headers());
    assert_eq!(half.ends(), Some(0));
    let mut idle = tls.connect();
    idle.send(HEADERS, END_HEADERS, 1, &tls.add_headers());
    idle.send(DATA, END_STREAM, 1, br#"{"id":1,"name":"x"}"#);
    assert_eq!(idle.response(1).0, 200);
    assert_eq!(idle.ends(), Some(0));
}

#[test]
fn a_body_that_does_not_arrive_is_40800_and_others_go_on() {
    let tls = start(&["--body-timeout", "400ms"]);
    let mut connection = tls.connect();
    connection.send(HEADERS, END_HEADERS, 1, &tls.add_headers());
    connection.send(DATA, 0, 1, b"{");
    let (status, body) = connection.response(1);
    assert_eq!(status, 408);
    assert!(body.contains("40800"), "{body}");
    connection.send(HEADERS, END_HEADERS, 3, &tls.add_headers());
    connection.send(DATA, END_STREAM, 3, br#"{"id":1,"name":"x"}"#);
    assert_eq!(connection.response(3).0, 200);
}

#[test]
fn a_client_that_does_not_read_its_responses_is_disconnected() {
    let tls = start(&["--request-timeout", "1s", "--idle-timeout", "2s"]);
    let mut connection = tls.connect();
    // No window for the bodies of responses.
    connection.send(SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 0]);
    let get = headers(&[
        (":method", "GET"),
        (":scheme", "https"),
        (":path", "/openapi.json"),
        (":authority", "localhost"),
    ]);
    for number in 0..10 {
        connection.send(HEADERS, END_HEADERS | END_STREAM, 2 * number + 1, &get);
    }
    connection.ends();
    tls.works();
}

#[test]
fn a_drain_completes_requests_and_closes_the_connection() {
    let mut tls = start(&[]);
    let mut connection = tls.connect();
    connection.send(HEADERS, END_HEADERS, 1, &tls.add_headers());
    connection.send(PING, 0, 0, &[7; 8]);
    connection.wait_for(|frame| frame.kind == PING);
    tls.server.signal("-TERM");
    connection.wait_for(|frame| frame.kind == GOAWAY);
    connection.send(DATA, END_STREAM, 1, br#"{"id":1,"name":"x"}"#);
    assert_eq!(connection.response(1).0, 200);
    connection.ends();
    assert!(tls.server.wait_for_exit().success());
    assert_eq!(tls.server.plants().len(), 1);
}

#[test]
fn a_client_that_ignores_the_drain_does_not_delay_it() {
    let mut tls = start(&["--drain-timeout", "60s"]);
    let mut connection = tls.connect();
    connection.send(PING, 0, 0, &[7; 8]);
    connection.wait_for(|frame| frame.kind == PING);
    let started = std::time::Instant::now();
    assert!(tls.server.terminate().success());
    assert!(started.elapsed() < Duration::from_secs(50));
}
