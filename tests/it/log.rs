//! The log: JSON lines when it is no terminal, one a request, with what an operator needs and
//! nothing that a client would mind.

use serde_json::Value;

use crate::harness::{Client, Server, run_ok};

#[test]
fn a_request_is_one_line_with_all_that_is_known_of_it() {
    let server = Server::start();
    let answer = server.add(r#"{"id":1,"name":"a secret name"}"#);
    let line = server.wait_for_line(|line| line["path"] == "/plants");
    assert_eq!(line["level"], "INFO");
    assert_eq!(line["method"], "POST");
    assert_eq!(line["status"], 200);
    assert_eq!(line["token"], "first");
    assert_eq!(line["error"], Value::Null);
    assert!(
        line["duration_us"]
            .as_u64()
            .is_some_and(|duration| duration > 0)
    );
    assert_eq!(line["request_id"].as_str(), answer.header("x-request-id"));
    assert!(line["timestamp"].is_string());

    let answer = server.add(r#"{"id":1,"name":"another secret name"}"#);
    assert_eq!(answer.error(), 40009);
    let line = server.wait_for_line(|line| line["path"] == "/plants");
    assert_eq!(
        (&line["status"], &line["error"], &line["token"]),
        (&400.into(), &40009.into(), &"first".into())
    );

    let mut client = server.connect();
    client.send("GET /openapi.json?secret=1 HTTP/1.1\r\n\r\nGARBAGE\r\n\r\n");
    client.answer();
    client.answer();
    let line = server.wait_for_line(|line| line["method"] == "GET");
    assert_eq!(line["path"], "/openapi.json");
    server.wait_for_line(|line| line["error"] == 40000);
    assert!(!server.everything_logged().contains("secret"));
}

#[test]
fn a_revoked_token_is_logged_by_its_name() {
    let server = Server::start();
    let token = run_ok(server.directory(), &["token", "create", "leaver"]);
    run_ok(server.directory(), &["token", "revoke", "leaver"]);
    server.connect().add(token.trim(), b"{}");
    let line = server.wait_for_line(|line| line["error"] == 40101);
    assert_eq!(line["token"], "leaver");
}

#[test]
fn the_trace_of_a_request_is_in_its_line() {
    let server = Server::start();
    let mut client = server.connect();
    let ids = "4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7";
    client.request("GET /traced", &format!("traceparent: 00-{ids}-01\r\n"));
    let line = server.wait_for_line(|line| line["path"] == "/traced");
    assert_eq!(line["trace_id"], "4bf92f3577b34da6a3ce929d0e0e4736");
    assert_eq!(line["parent_id"], "00f067aa0ba902b7");

    client.request("GET /invalid", &format!("traceparent: ff-{ids}-01\r\n"));
    let line = server.wait_for_line(|line| line["path"] == "/invalid");
    assert_eq!(
        (&line["trace_id"], &line["parent_id"]),
        (&Value::Null, &Value::Null)
    );
}

#[test]
fn a_sane_request_id_is_taken_and_any_other_is_replaced() {
    let server = Server::start();
    let mut client = server.connect();
    let mut id_for = |header: &str| {
        let answer = client.request("GET /", header);
        answer.header("x-request-id").expect("an id").to_owned()
    };
    let long = "x".repeat(128);
    for sane in [
        "a",
        "01HZX-9_/.:+=@",
        "f81d4fae-7dec-11d0-a765-00a0c91e6bf6",
        &long,
    ] {
        assert_eq!(id_for(&format!("x-request-id: {sane}\r\n")), sane);
    }
    let mut made = std::collections::HashSet::new();
    for other in [
        "",
        "two words",
        "<script>",
        "\u{fc}",
        "{\"a\":1}",
        &format!("{long}x"),
    ] {
        let id = id_for(&format!("x-request-id: {other}\r\n"));
        assert!(
            id.len() == 16 && id.bytes().all(|byte| byte.is_ascii_hexdigit()),
            "{id}"
        );
        made.insert(id);
    }
    made.insert(id_for(""));
    assert_eq!(made.len(), 7);
}

#[test]
fn every_line_is_json_and_a_quiet_log_is_quiet() {
    let mut server = Server::start();
    server.add_ok(r#"{"id":1,"name":"x"}"#);
    server.terminate();
    let directory = server.directory().to_owned();
    // The greeting of the first run is for a person; it is not there the second time.
    let mut server_again = Server::start_in(&directory, &[]);
    server_again.add_ok(r#"{"id":1,"name":"x"}"#);
    server_again.wait_for_line(|line| line["status"] == 200);
    server_again.terminate();
    for line in server_again.everything_logged().lines() {
        let line: Value = serde_json::from_str(line).expect("JSON");
        assert!(line["timestamp"].is_string() && line["level"].is_string());
    }
    let mut quiet = Server::start_quietly_in(&directory);
    quiet.add_ok(r#"{"id":1,"name":"x"}"#);
    assert!(quiet.terminate().success());
    assert_eq!(quiet.everything_logged(), "");
}

#[test]
fn a_log_that_nobody_reads_holds_up_nothing_not_even_the_end() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = port.local_addr().expect("an address");
    drop(port);
    let second = crate::harness::directory();
    let mut child = crate::harness::plantstore(second.path())
        .args([
            "serve",
            "--listen",
            &address.to_string(),
            "--idle-timeout",
            "1s",
        ])
        .stderr(std::process::Stdio::piped()) // and never read
        .spawn()
        .expect("it starts");
    let mut client = None;
    crate::harness::wait_until("it listens", || {
        client = Client::try_connect(address).ok();
        client.is_some()
    });
    let mut client = client.expect("a connection");
    // More than a pipe holds.
    for _ in 0..2000 {
        assert_eq!(client.request("GET /nothing", "").status, 404);
    }
    drop(client);
    let killed = std::process::Command::new("kill")
        .arg(child.id().to_string())
        .status();
    assert!(killed.expect("kill runs").success());
    assert!(crate::harness::wait_for_exit(&mut child).success());
}
