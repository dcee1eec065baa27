//! Limits for clients: connections, requests without a valid token, rate limits. Clients come from several addresses of 127.0.0.0/8.

use std::thread;
use std::time::Duration;

use crate::harness::{Client, Response, Server, add_request, run_ok, wait_until};

const BODY: &[u8] = br#"{"id":1,"name":"Fern"}"#;

fn from(last: u8, server: &Server) -> Client {
    Client::connect_from([127, 0, 0, last], server.address())
}

#[test]
fn an_address_has_a_quarter_of_the_connections() {
    let server = Server::start_with(&["--max-connections", "16"]);
    let token = server.token();
    let mut first: Vec<Client> = (0..4).map(|_| from(2, &server)).collect();
    for client in &mut first {
        assert_eq!(client.add(&token, BODY).status, 200);
    }
    let mut fifth = from(2, &server);
    assert_eq!(fifth.response().error(), 42902);
    assert!(fifth.is_closed());
    assert_eq!(from(3, &server).add(&token, BODY).status, 200);
    assert_eq!(server.metric("plantstore_connections_rejected_total"), 1);
    drop(first);
    wait_until("there is room again", || {
        let mut client = from(2, &server);
        client.try_send(add_request(&token, BODY));
        client
            .try_response()
            .is_some_and(|response| response.status == 200)
    });
}

#[test]
fn connections_without_a_token_cannot_keep_others_out() {
    let server = Server::start_with(&[
        "--max-connections",
        "16",
        "--max-connections-per-address",
        "16",
    ]);
    let token = server.token();
    let mut honest = from(2, &server);
    assert_eq!(honest.add(&token, BODY).status, 200);
    let mut attackers: Vec<Client> = Vec::new();
    for _ in 0..100 {
        let mut attacker = from(3, &server);
        attacker.try_send("GET / HTTP/1.1\r\nhost: x\r\n\r\n");
        attackers.push(attacker);
        // A client that connects now is served, and one that has authenticated is not disconnected.
        assert_eq!(from(4, &server).add(&token, BODY).status, 200);
        assert_eq!(honest.add(&token, BODY).status, 200);
    }
    assert!(server.metric("plantstore_connections") <= 16);
    assert!(server.metric("plantstore_connections_evicted_total") > 50);
}

#[test]
fn an_idle_connection_is_closed_for_a_new_one_and_a_busy_one_is_not() {
    let server = Server::start_with(&[
        "--max-connections",
        "2",
        "--max-connections-per-address",
        "2",
        // However slow the machine is, the busy connection stays.
        "--body-timeout",
        "10m",
        "--request-timeout",
        "10m",
    ]);
    let token = server.token();
    let mut busy = server.connect();
    assert_eq!(busy.add(&token, BODY).status, 200);
    busy.send(format!(
        "POST /plants HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\ncontent-type: application/json\r\n\
         expect: 100-continue\r\ncontent-length: {}\r\n\r\n",
        BODY.len()
    ));
    // The server waits for the body. Before it has read the headers, the connection is idle and may be closed.
    assert_eq!(busy.response().status, 100);
    let (most, rest) = BODY.split_at(5);
    busy.send(most);
    for _ in 0..10 {
        let mut idle = server.connect();
        assert_eq!(idle.add(&token, BODY).status, 200);
        let mut next = server.connect();
        assert_eq!(next.add(&token, BODY).status, 200);
        assert!(idle.is_closed());
    }
    busy.send(rest);
    assert_eq!(busy.response().status, 200);
}

fn reject(client: &mut Client) -> Response {
    client.request(
        "POST /plants",
        "authorization: Bearer unknown\r\ncontent-length: 0\r\n",
    )
}

#[test]
fn failed_authentication_is_limited_for_each_address() {
    let server = Server::start_with(&["--auth-failure-limit", "3"]);
    let token = server.token();
    let codes: Vec<u64> = (0..20)
        .map(|_| reject(&mut from(2, &server)).error())
        .collect();
    assert_eq!(codes[..3], [40101; 3]);
    assert!(codes[3..].contains(&42901), "{codes:?}");
    let mut rejected = (0..20).map(|_| reject(&mut from(2, &server)));
    let rejected = rejected.find(|response| response.status == 429);
    let rejected = rejected.expect("one of twenty is too many");
    assert_eq!(rejected.header("retry-after"), Some("1"));
    let told = (Some("\"address\";q=3;w=1"), Some("\"address\";r=0;t=1"));
    assert_eq!(limits(&rejected), told);
    // Another address, and a known token from the same one, are not affected.
    assert_eq!(reject(&mut from(3, &server)).error(), 40101);
    assert_eq!(from(2, &server).add(&token, BODY).status, 200);
}

#[test]
fn a_revoked_token_is_no_valid_one() {
    let server = Server::start_with(&["--auth-failure-limit", "3"]);
    let token = run_ok(server.directory(), &["token", "create", "ci"]);
    let code = || {
        let mut client = from(2, &server);
        client.try_send(add_request(token.trim(), BODY));
        let response = client.response();
        if response.status == 200 {
            return 0;
        }
        response.error()
    };
    assert_eq!(code(), 0);
    run_ok(server.directory(), &["token", "revoke", "ci"]);
    wait_until("it is rejected", || code() == 40101);
    wait_until("it is rejected too often", || code() == 42901);
}

#[test]
fn a_new_token_works_at_once_and_unknown_ones_do_not_delay_it() {
    let server = Server::start_with(&["--auth-failure-limit", "off"]);
    let unknown = run_ok(
        crate::harness::directory().path(),
        &["token", "create", "x"],
    );
    for round in 0..20 {
        let mut attackers: Vec<_> = (0..50).map(|_| server.connect()).collect();
        for attacker in &mut attackers {
            attacker.send_add(unknown.trim(), BODY);
        }
        let name = format!("new-{round}");
        let token = run_ok(server.directory(), &["token", "create", &name]);
        assert_eq!(server.connect().add(token.trim(), BODY).status, 200);
        for mut attacker in attackers {
            assert_eq!(attacker.response().error(), 40101);
        }
    }
    // The number of queries does not depend on the number of requests.
    let readings = server.metric("plantstore_token_readings_total{result=\"ok\"}");
    assert!(readings < 50 * 20 / 2, "{readings}");
}

/// The quota and what is left of it.
fn limits(response: &Response) -> (Option<&str>, Option<&str>) {
    (
        response.header("ratelimit-policy"),
        response.header("ratelimit"),
    )
}

#[test]
fn a_limited_token_is_told_what_is_left() {
    let server = Server::start_with(&["--rate-limit", "7"]);
    let policy = Some("\"token\";q=7;w=1");
    let mut client = server.connect();
    let token = server.token();
    let first = client.add(&token, BODY);
    assert_eq!(first.status, 200);
    assert_eq!(limits(&first), (policy, Some("\"token\";r=6;t=1")));
    wait_until("the limit is reached", || {
        let response = client.add(&token, BODY);
        if response.status == 200 {
            return false;
        }
        assert_eq!(response.error(), 42900);
        assert_eq!(limits(&response), (policy, Some("\"token\";r=0;t=1")));
        assert_eq!(response.header("retry-after"), Some("1"));
        true
    });
    // A limit of its own takes precedence.
    let arguments = ["token", "create", "own", "--rate-limit", "100"];
    let own = run_ok(server.directory(), &arguments);
    let response = server.connect().add(own.trim(), BODY);
    assert_eq!(limits(&response).0, Some("\"token\";q=100;w=1"));
}

#[test]
fn a_token_without_a_limit_gets_no_headers_of_one() {
    let server = Server::start();
    assert_eq!(limits(&server.add(BODY)), (None, None));
}

#[test]
fn responses_are_not_stored_or_sniffed_and_name_no_server() {
    let server = Server::start();
    let mut client = server.connect();
    for response in [
        server.add(BODY),
        server.add(b"{}"),
        client.request("GET /plants", ""),
        client.request("GET /nothing", ""),
    ] {
        assert_eq!(response.header("cache-control"), Some("no-store"));
        assert_eq!(response.header("x-content-type-options"), Some("nosniff"));
        assert_eq!(response.header("server"), None);
        assert_eq!(response.header("access-control-allow-origin"), None);
    }
}

#[test]
fn a_web_page_of_an_allowed_origin_may_add_plants() {
    let server = Server::start_with(&[
        "--cors-origin",
        "https://plants.example,http://localhost:3000",
    ]);
    let mut client = server.connect();
    let preflight = |origin: &str| {
        format!(
            "origin: {origin}\r\naccess-control-request-method: POST\r\naccess-control-request-headers: authorization\r\n"
        )
    };
    let allowed = client.request("OPTIONS /plants", &preflight("https://plants.example"));
    assert_eq!(allowed.status, 204);
    for (name, value) in [
        ("access-control-allow-origin", "https://plants.example"),
        ("access-control-allow-methods", "POST"),
        (
            "access-control-allow-headers",
            "authorization, content-type, traceparent, x-request-id",
        ),
        ("vary", "origin"),
    ] {
        assert_eq!(allowed.header(name), Some(value));
    }
    let error = client.request(
        "POST /plants",
        "origin: http://localhost:3000\r\ncontent-length: 0\r\n",
    );
    assert_eq!(error.error(), 40100);
    assert_eq!(
        error.header("access-control-allow-origin"),
        Some("http://localhost:3000")
    );
    for other in [
        "https://other.example",
        "http://plants.example",
        "https://plants.example:444",
        "null",
    ] {
        let rejected = client.request("OPTIONS /plants", &preflight(other));
        assert_eq!(rejected.error(), 40500, "{other}");
        assert_eq!(rejected.header("access-control-allow-origin"), None);
        assert_eq!(rejected.header("vary"), Some("origin"));
    }
}

#[test]
fn the_private_listener_rejects_names_that_a_web_page_could_point_at_it() {
    let server = Server::start_with(&["--ops-host", "plants.internal"]);
    for (host, status) in [
        ("127.0.0.1:9090", 200),
        ("[::1]:9090", 200),
        ("localhost", 200),
        ("plantstore:9090", 200),
        ("plants.internal:9090", 200),
        ("PLANTS.internal", 200),
        ("attacker.example:9090", 421),
        ("127.0.0.1.attacker.example", 421),
        ("attacker.example\r\nhost: localhost", 421),
    ] {
        let mut client = Client::connect(server.ops_address());
        client.send(format!("GET /healthz HTTP/1.1\r\nhost: {host}\r\n\r\n"));
        assert_eq!(client.response().status, status, "{host}");
    }
    let mut client = Client::connect(server.ops_address());
    client.send("GET /healthz HTTP/1.0\r\n\r\n");
    assert_eq!(client.response().status, 200);
}

#[test]
fn responses_that_are_not_read_take_little_memory_of_the_kernel() {
    let server = Server::start();
    let mut deaf = server.connect();
    let len = deaf.request("GET /openapi.json", "").body.len() as u64;
    let request = "GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n";
    deaf.try_send(request.repeat(2000));
    let responses = r#"plantstore_http_requests_total{status="200",error_code="none"}"#;
    let mut sent = 0;
    wait_until("no more is sent", || {
        thread::sleep(Duration::from_millis(300));
        let before = std::mem::replace(&mut sent, server.metric(responses));
        sent > 1 && sent == before
    });
    // With buffers of the size that the kernel chooses it is several megabytes.
    assert!(sent * len < 1 << 20, "{sent} responses of {len} bytes");
}

#[test]
fn a_client_that_reads_slowly_has_the_time_of_one_request() {
    let server = Server::start_with(&["--request-timeout", "1s", "--idle-timeout", "1h"]);
    let mut slow = server.connect();
    let request = "GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n";
    for _ in 0..20 {
        slow.try_send(request.repeat(1000));
    }
    wait_until("it is disconnected", || {
        server.metric("plantstore_connections") == 0
    });
}

#[test]
fn a_slow_body_has_the_time_of_one_request() {
    let server = Server::start_with(&["--request-timeout", "1s", "--body-timeout", "1h"]);
    let mut slow = server.connect();
    let request = add_request(&server.token(), BODY);
    slow.send(&request[..request.len() - 1]);
    assert_eq!(slow.response().error(), 40800);
    assert!(slow.is_closed());
}
