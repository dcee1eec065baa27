//! Error responses that need no disk fault (those are in `faults`). `Response::error` checks what all of them have in common.

use crate::harness::{Server, run_ok};

const BODY: &[u8] = br#"{"id":1,"name":"x"}"#;

/// A request to add a plant with these header lines.
fn request(headers: &str, body: &str) -> String {
    let length = body.len();
    format!("POST /plants HTTP/1.1\r\nhost: x\r\n{headers}content-length: {length}\r\n\r\n{body}")
}

#[test]
fn a_body_that_is_not_json_is_40001_with_line_and_column() {
    let server = Server::start();
    for (body, place) in [
        (&b""[..], "it is empty"),
        (b"{\"id\":1,\n\"name\":\"x\"", "line 2 column 10"),
        (b"{\"id\":1,\"name\":\"\xff\"}", "line 1 column 17"),
        (b"\xef\xbb\xbf{\"id\":1,\"name\":\"x\"}", "line 1 column 1"),
        (b"{\"id\":1,\"name\":\"x\"} trailing", "line 1 column 21"),
    ] {
        let response = server.add(body);
        assert_eq!(response.error(), 40001);
        assert!(
            response.message().ends_with(&format!("{place}.")),
            "{}",
            response.message()
        );
    }
}

#[test]
fn a_body_that_is_no_plant_is_40002_and_names_every_problem_but_no_value() {
    let server = Server::start();
    let response = server.add(r#"{"name":12345,"tag":["secret"]}"#);
    assert_eq!(response.error(), 40002);
    let all = "id: missing; name: expected a string, found a number; tag: expected a string, found an array";
    assert_eq!(
        response.message(),
        format!("The body is not a plant: {all}.")
    );
}

#[test]
fn malformed_or_repeated_credentials_are_40003() {
    let server = Server::start();
    let token = server.token();
    for headers in [
        "authorization: Bearer\r\n".to_owned(),
        "authorization: Bearer  \r\n".to_owned(),
        "authorization: Bearer\tx\r\n".to_owned(),
        format!("authorization: Bearer {token} {token}\r\n"),
        format!("authorization: Bearer {token}, Bearer {token}\r\n"),
        "authorization: Bearer \u{fc}mlaut\r\n".to_owned(),
        "authorization: Bearer \"quoted\"\r\n".to_owned(),
        format!("authorization: Bearer {token}\r\nauthorization: Bearer {token}\r\n"),
        format!("authorization: Bearer {token}\r\nauthorization: Basic eDp5\r\n"),
    ] {
        let mut client = server.connect();
        client.send(request(
            &format!("{headers}content-type: application/json\r\n"),
            "{}",
        ));
        let response = client.response();
        assert_eq!(response.error(), 40003, "{headers:?}");
        let challenge = response.header("www-authenticate");
        assert_eq!(
            challenge,
            Some(r#"Bearer realm="plantstore", error="invalid_request""#)
        );
        assert!(!response.body.contains(&token));
    }
}

#[test]
fn the_body_limit_can_be_configured() {
    let server = Server::start_with(&["--max-body-bytes", "20"]);
    server.add_ok(r#"{"id":1,"name":"xx"}"#);
    assert_eq!(server.add(r#"{"id":1,"name":"xxx"}"#).error(), 40013);
}

#[test]
fn another_content_type_or_an_encoded_body_is_40015() {
    let server = Server::start();
    let token = server.token();
    let send = |headers: &str| {
        let mut client = server.connect();
        let body = r#"{"id":1,"name":"x"}"#;
        client.send(request(
            &format!("authorization: Bearer {token}\r\n{headers}"),
            body,
        ));
        client.response()
    };
    for headers in [
        "",
        "content-type: text/plain\r\n",
        "content-type: application/jsonx\r\n",
        "content-type: application/vnd.api+json\r\n",
        "content-type:\r\n",
        "content-type: application/json\r\ncontent-type: application/json\r\n",
        "content-type: application/json\r\ncontent-encoding: gzip\r\n",
    ] {
        assert_eq!(send(headers).error(), 40015, "{headers:?}");
    }
    for headers in [
        "content-type: application/json; charset=utf-8\r\n",
        "content-type: Application/JSON ;x=y\r\n",
        "content-type: application/json\r\ncontent-encoding: identity\r\n",
    ] {
        assert_eq!(send(headers).status, 200, "{headers:?}");
    }
}

#[test]
fn no_credentials_are_40100_with_a_challenge() {
    let server = Server::start();
    for headers in ["", "authorization: Basic eDp5\r\n", "authorization: \r\n"] {
        let mut client = server.connect();
        client.send(request(
            &format!("{headers}content-type: application/json\r\n"),
            "{}",
        ));
        let response = client.response();
        assert_eq!(response.error(), 40100, "{headers:?}");
        assert_eq!(
            response.header("www-authenticate"),
            Some(r#"Bearer realm="plantstore""#)
        );
    }
}

#[test]
fn unknown_and_revoked_tokens_are_40101_and_expired_ones_40102() {
    let server = Server::start();
    let directory = server.directory();
    run_ok(
        directory,
        &["token", "create", "old", "--expires-in", "1ms"],
    );
    let revoked = run_ok(directory, &["token", "create", "gone"]);
    server.revoke("gone", revoked.trim());
    let expired = run_ok(
        directory,
        &["token", "create", "brief", "--expires-in", "1ms"],
    );
    let stranger = run_ok(
        crate::harness::directory().path(),
        &["token", "create", "x"],
    );
    let mut mistyped = server.token();
    mistyped.pop();
    for (token, error) in [
        ("x", 40101),
        (mistyped.as_str(), 40101),
        (stranger.trim(), 40101),
        (revoked.trim(), 40101),
        (expired.trim(), 40102),
    ] {
        let response = server.connect().add(token, BODY);
        assert_eq!(response.error(), error);
        let challenge = response.header("www-authenticate");
        assert_eq!(
            challenge,
            Some(r#"Bearer realm="plantstore", error="invalid_token""#)
        );
        assert!(token.len() < 5 || !response.body.contains(token));
    }
}

#[test]
fn another_path_is_40400_and_another_method_40500_with_allow() {
    let server = Server::start();
    let mut client = server.connect();
    for path in [
        "/nothing",
        "/docs/nothing",
        "/plants/",
        "/plants/1",
        "/Plants",
        "/openapi",
        "//plants",
        "/plants%2f",
    ] {
        assert_eq!(
            client.request(&format!("GET {path}"), "").error(),
            40400,
            "{path}"
        );
    }
    for (request, allow) in [
        ("GET /plants", "POST"),
        ("PUT /plants", "POST"),
        ("DELETE /plants", "POST"),
        ("OPTIONS /plants", "POST"),
        ("BREW /plants", "POST"),
        ("POST /openapi.json", "GET,HEAD"),
        ("DELETE /openapi.yaml", "GET,HEAD"),
        ("POST /", "GET,HEAD"),
        ("POST /docs", "GET,HEAD"),
        ("PUT /docs/page.js", "GET,HEAD"),
    ] {
        let response = client.request(request, "");
        assert_eq!(response.error(), 40500, "{request}");
        assert_eq!(response.header("allow"), Some(allow), "{request}");
    }
}

#[test]
fn a_token_over_its_rate_limit_gets_42900_and_retry_after() {
    let server = Server::start();
    let token = run_ok(
        server.directory(),
        &["token", "create", "slow", "--rate-limit", "1"],
    );
    let responses: Vec<_> = (0..20)
        .map(|_| server.connect().add(token.trim(), BODY))
        .collect();
    assert_eq!(responses[0].status, 200);
    let rejected: Vec<_> = responses
        .iter()
        .filter(|response| response.status != 200)
        .collect();
    assert!(rejected.len() >= 10, "{responses:?}");
    for response in rejected {
        assert_eq!(response.error(), 42900);
        assert_eq!(response.header("retry-after"), Some("1"));
    }
    // The limit applies to that token only.
    assert_eq!(server.connect().add(&server.token(), BODY).status, 200);
}

/// What only HTTP/1.1 has; `http2.rs` has the rest.
mod http1 {
    use super::*;

    #[test]
    fn a_body_over_the_limit_is_40013_and_one_at_the_limit_is_not() {
        let server = Server::start();
        let token = server.token();
        let plant = |bytes: usize| {
            let around = r#"{"id":1,"name":""}"#.len();
            format!(r#"{{"id":1,"name":"{}"}}"#, "x".repeat(bytes - around))
        };
        assert_eq!(server.add(plant(1 << 20)).status, 200);

        // A client that sends its whole body before it reads gets the response, too.
        for bytes in [(1 << 20) + 1, 8 << 20] {
            let mut client = server.connect();
            client.send_add(&token, plant(bytes).as_bytes());
            let response = client.response();
            assert_eq!(response.error(), 40013);
            assert!(response.message().contains("1048576"));
        }

        let head = format!(
            "POST /plants HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\ncontent-type: application/json\r\n\
             transfer-encoding: chunked\r\n\r\n"
        );
        let mut client = server.connect();
        client.send(head);
        for _ in 0..17 {
            client.try_send(format!("10000\r\n{}\r\n", " ".repeat(0x10000)));
        }
        assert_eq!(client.response().error(), 40013);
    }

    #[test]
    fn a_request_that_is_not_http_is_40000() {
        let server = Server::start();
        for bytes in [
            "GARBAGE\r\n\r\n",
            "GET / HTTP/3.0\r\n\r\n",
            "GET / HTTP/1.1\r\nbad header\r\n\r\n",
            "G\u{1}T / HTTP/1.1\r\n\r\n",
            "POST /plants HTTP/1.1\r\ncontent-length: x\r\n\r\n",
            "POST /plants HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
            "POST /plants HTTP/1.1\r\ntransfer-encoding: gzip\r\n\r\n",
        ] {
            let mut client = server.connect();
            client.send(bytes);
            let response = client.response();
            assert_eq!(response.error(), 40000, "{bytes:?}");
            assert_eq!(response.header("connection"), Some("close"));
            assert!(client.is_closed());
        }
    }

    #[test]
    fn a_request_that_is_not_http_after_a_good_one_is_40000() {
        let server = Server::start();
        let mut client = server.connect();
        client.send("GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\nGARBAGE\r\n\r\n");
        assert_eq!(client.response().status, 200);
        assert_eq!(client.response().error(), 40000);

        let mut client = server.connect();
        client.send("GET /nothing HTTP/1.0\r\nconnection: keep-alive\r\n\r\n");
        assert_eq!(client.response().error(), 40400);
        client.send("GARBAGE\r\n\r\n");
        assert_eq!(client.response().error(), 40000);
    }

    #[test]
    fn a_body_with_broken_framing_is_40000() {
        let server = Server::start();
        let head = format!(
            "POST /plants HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\ncontent-type: application/json\r\n",
            server.token()
        );
        let mut client = server.connect();
        client.send(format!("{head}transfer-encoding: chunked\r\n\r\nxyz\r\n"));
        assert_eq!(client.response().error(), 40000);

        let mut client = server.connect();
        client.send(format!("{head}content-length: 100\r\n\r\n{{\"id\":1"));
        client.finish();
        assert_eq!(client.response().error(), 40000);
        assert_eq!(server.plants(), []);
    }

    #[test]
    fn credentials_are_checked_before_the_body_is_read() {
        let server = Server::start();
        let mut client = server.connect();
        // Without valid credentials neither the type nor the size of the body matters, and the server does not read it.
        client.send(
            "POST /plants HTTP/1.1\r\nhost: x\r\ncontent-type: text/plain\r\ncontent-length: 99999999\r\n\r\n",
        );
        let response = client.response();
        assert_eq!(response.error(), 40100);
        // The connection cannot be reused after an unread body, so the response closes it.
        assert_eq!(response.header("connection"), Some("close"));

        let mut client = server.connect();
        client.send(
            "POST /plants HTTP/1.1\r\nhost: x\r\nauthorization: Bearer x\r\nexpect: 100-continue\r\n\
             content-type: application/json\r\ncontent-length: 10\r\n\r\n",
        );
        assert_eq!(client.response().error(), 40101);
    }

    #[test]
    fn a_head_that_is_too_slow_is_40800() {
        let server = Server::start_with(&["--header-timeout", "1s"]);
        let mut client = server.connect();
        client.send("POST /plants HTTP/1.1\r\nhost:");
        assert_eq!(client.response().error(), 40800);
        assert!(client.is_closed());

        // Also for the second request of a connection.
        let mut client = server.connect();
        assert_eq!(client.add(&server.token(), BODY).status, 200);
        client.send("POST");
        assert_eq!(client.response().error(), 40800);
    }

    #[test]
    fn a_body_that_is_too_slow_is_40800() {
        let server = Server::start_with(&["--body-timeout", "200ms"]);
        let request = crate::harness::add_request(&server.token(), BODY);
        let mut client = server.connect();
        client.send(&request[..request.len() - 1]);
        assert_eq!(client.response().error(), 40800);
        assert!(client.is_closed());
        assert_eq!(server.plants(), []);
    }

    #[test]
    fn a_head_that_is_too_large_is_43100() {
        let server = Server::start();
        for request in [
            format!("GET / HTTP/1.1\r\nx: {}\r\n\r\n", "x".repeat(16 << 10)),
            format!("GET / HTTP/1.1\r\nx: {}\r\n\r\n", "x".repeat(300 << 10)),
            format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(100 << 10)),
            format!("GET / HTTP/1.1\r\n{}\r\n", "x: y\r\n".repeat(200)),
        ] {
            let mut client = server.connect();
            client.try_send(request);
            assert_eq!(client.response().error(), 43100);
        }
        let response = server
            .connect()
            .request("GET /nothing", &format!("x: {}\r\n", "x".repeat(15 << 10)));
        assert_eq!(response.error(), 40400);
    }
}
