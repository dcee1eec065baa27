//! HTTP/2 as a client may misuse it: floods of frames, streams without an end, clients that do not read. The other tests run over
//! HTTP/2 with TRANSPORT=http2; `http2_conformance` has the rules of the standard.

use std::io::Write;
use std::time::Duration;

use serde_json::Value;

use crate::harness::http2::{
    ACK, CONTINUATION, DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, PING, PRIORITY, RST_STREAM,
    SETTINGS, Tls, WINDOW_UPDATE, frame, headers, start,
};
use crate::harness::wait_until;

/// The headers of a request without a token.
fn request(method: &str, path: &str) -> Vec<u8> {
    headers(&[
        (":method", method),
        (":scheme", "https"),
        (":path", path),
        (":authority", "localhost"),
    ])
}

#[test]
fn a_plant_is_added_and_errors_have_their_bodies() {
    let tls = start(&[]);
    tls.works();
    let mut connection = tls.connect();
    let get = request("GET", "/nowhere");
    connection.send(HEADERS, END_HEADERS | END_STREAM, 1, &get);
    let (status, body) = connection.response(1);
    let body: Value = serde_json::from_str(&body).expect("JSON");
    assert_eq!((status, &body["error"]), (404, &40400.into()));
}

#[test]
fn a_response_to_head_has_no_body() {
    let tls = start(&[]);
    let mut connection = tls.connect();
    let paths = ["/docs", "/openapi.json", "/nowhere", "/plants", "/"];
    for ((path, status), stream) in paths
        .into_iter()
        .zip([200, 200, 404, 405, 307])
        .zip((1..).step_by(2))
    {
        let head = request("HEAD", path);
        connection.send(HEADERS, END_HEADERS | END_STREAM, stream, &head);
        assert_eq!(
            connection.response(stream),
            (status, String::new()),
            "{path}"
        );
    }
}

#[test]
fn a_stream_is_not_reset_while_its_client_sends_a_body_after_the_response() {
    let tls = start(&[]);
    let mut connection = tls.connect();
    let post = request("POST", "/plants");
    connection.send(HEADERS, END_HEADERS, 1, &post);
    assert_eq!(connection.response(1).0, 401);
    connection.send(PING, 0, 0, &[0; 8]);
    let next = connection.wait_for(|frame| [PING, RST_STREAM].contains(&frame.kind));
    assert_eq!(next.kind, PING);
    connection.send(DATA, END_STREAM, 1, br#"{"id":1,"name":"x"}"#);
    // But not forever.
    let mut connection = tls.connect();
    connection.send(HEADERS, END_HEADERS, 1, &post);
    assert_eq!(connection.response(1).0, 401);
    let reset = connection.wait_for(|frame| frame.kind == RST_STREAM);
    assert_eq!(reset.payload, [0; 4]);
    tls.works();
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
    tls.server.metric("plantstore_http2_floods_total")
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
    assert_eq!(tls.server.metric("plantstore_http2_floods_total"), 0);
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
fn a_request_whose_length_or_host_is_not_certain_adds_nothing() {
    let tls = start(&[]);
    // More data than the length says.
    let mut connection = tls.connect();
    let mut block = tls.add_headers();
    block.extend(headers(&[("content-length", "3")]));
    connection.send(HEADERS, END_HEADERS, 1, &block);
    connection.send(DATA, END_STREAM, 1, br#"{"id":9,"name":"x"}"#);
    connection.wait_for(|frame| frame.kind == RST_STREAM);
    // Two hosts.
    let mut connection = tls.connect();
    let mut block = tls.add_headers();
    block.extend(headers(&[("host", "elsewhere")]));
    connection.send(HEADERS, END_HEADERS, 1, &block);
    connection.send(DATA, END_STREAM, 1, br#"{"id":9,"name":"x"}"#);
    assert_eq!(connection.response(1).0, 400);
    assert!(tls.server.plants().is_empty());
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
