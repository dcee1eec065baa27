//! The log: JSON lines unless it is a terminal, one line per request, without values or secrets of clients.

use serde_json::Value;

use crate::harness::{Client, Server, run_ok};

#[test]
fn a_request_is_one_line_with_all_fields() {
    let server = Server::start();
    let response = server.add(r#"{"id":1,"name":"a secret name"}"#);
    let line = server.wait_for_line(|line| line["path"] == "/plants");
    assert_eq!(line["level"], "INFO");
    assert_eq!(line["message"], "request");
    assert_eq!(line["method"], "POST");
    assert_eq!(line["status"], 200);
    assert_eq!(line["token_name"], "first");
    assert_eq!(line["error_code"], Value::Null);
    assert!(
        line["duration_us"]
            .as_u64()
            .is_some_and(|duration| duration > 0)
    );
    assert_eq!(line["request_id"].as_str(), response.header("x-request-id"));
    assert!(line["timestamp"].is_string());

    let response = server.add(r#"{"id":1,"name":"another secret name"}"#);
    assert_eq!(response.error(), 40009);
    let line = server.wait_for_line(|line| line["path"] == "/plants");
    assert_eq!(
        (&line["status"], &line["error_code"], &line["token_name"]),
        (&400.into(), &40009.into(), &"first".into())
    );

    let mut client = server.connect();
    client.request("GET /openapi.json?secret=1", "");
    let line = server.wait_for_line(|line| line["method"] == "GET");
    assert_eq!(line["path"], "/openapi.json");
    assert!(!server.everything_logged().contains("secret"));
}

#[test]
fn a_request_with_a_revoked_token_is_logged_with_its_name() {
    let server = Server::start();
    let token = run_ok(server.directory(), &["token", "create", "leaver"]);
    server.revoke("leaver", token.trim());
    let line = server.wait_for_line(|line| line["error_code"] == 40101);
    assert_eq!(line["token_name"], "leaver");
}

#[test]
fn the_trace_id_of_a_request_is_logged() {
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
fn a_valid_request_id_is_used_and_an_invalid_one_is_replaced() {
    let server = Server::start();
    let mut client = server.connect();
    let mut id_for = |header: &str| {
        let response = client.request("GET /", header);
        response.header("x-request-id").expect("an id").to_owned()
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
fn every_line_is_json_and_log_level_warn_logs_no_requests() {
    let mut server = Server::start();
    server.add_ok(r#"{"id":1,"name":"x"}"#);
    server.terminate();
    let directory = server.directory().to_owned();
    // The greeting of the first run is plain text; it is not printed again.
    let mut server_again = Server::start_in(&directory, &[]);
    server_again.add_ok(r#"{"id":1,"name":"x"}"#);
    server_again.wait_for_line(|line| line["status"] == 200);
    server_again.terminate();
    for line in server_again.everything_logged().lines() {
        let line: Value = serde_json::from_str(line).expect("JSON");
        for field in ["timestamp", "level", "target", "message"] {
            assert!(line[field].is_string(), "{field} in {line}");
        }
    }
    let mut quiet = Server::start_with_quiet_log_in(&directory);
    quiet.add_ok(r#"{"id":1,"name":"x"}"#);
    assert!(quiet.terminate().success());
    assert_eq!(quiet.everything_logged(), "");
}

/// Rejected requests on one connection, with the longest allowed paths.
fn flood(address: std::net::SocketAddr, requests: usize) {
    let path = "x".repeat(15_000);
    let mut client = Client::connect(address);
    for _ in 0..requests {
        let response = client.request(&format!("GET /flood/{path}"), "");
        assert_eq!(response.error(), 40400);
    }
}

/// With requests that only HTTP/1.1 has.
mod http1 {
    use super::*;

    #[test]
    fn a_flood_of_rejected_requests_is_rate_limited_in_the_log() {
        const FLOODS: usize = 4;
        const REQUESTS: usize = 1000;
        let mut server = Server::start();
        let token = server.token();
        let address = server.address();
        let started = std::time::Instant::now();
        let mut adds = Vec::new();
        std::thread::scope(|scope| {
            let floods: Vec<_> = (0..FLOODS)
                .map(|_| scope.spawn(move || flood(address, REQUESTS)))
                .collect();
            let mut client = server.connect();
            while adds.len() < 200 || floods.iter().any(|flood| !flood.is_finished()) {
                let body = format!(r#"{{"id":{},"name":"x"}}"#, adds.len());
                let response = client.add(&token, body.as_bytes());
                assert_eq!(response.status, 200);
                adds.push(response.header("x-request-id").expect("an id").to_owned());
            }
        });
        // Requests that are not HTTP, and rejected requests with a valid token.
        for _ in 0..200 {
            let mut client = server.connect();
            client.send("GARBAGE\r\n\r\n");
            assert_eq!(client.response().error(), 40000);
        }
        let limited = run_ok(
            server.directory(),
            &["token", "create", "limited", "--rate-limit", "1"],
        );
        let mut answered = 0;
        let mut client = None;
        for _ in 0..300 {
            let mut open = client.take().unwrap_or_else(|| server.connect());
            let response = open.add(limited.trim(), br#"{"id":0,"name":"x"}"#);
            answered += usize::from(response.status == 200);
            if response.header("connection") != Some("close") {
                client = Some(open);
            }
        }
        assert!(server.terminate().success());

        let logged = server.everything_logged();
        let lines = logged.lines();
        let lines: Vec<Value> = lines
            .filter_map(|line| serde_json::from_str(line).ok())
            .collect();
        let with = |test: &dyn Fn(&Value) -> bool| lines.iter().filter(|line| test(line)).count();
        for id in &adds {
            assert_eq!(with(&|line| line["request_id"] == id.as_str()), 1, "{id}");
        }
        let rejected = with(&|line| line["status"].as_u64() >= Some(400));
        let summaries = lines.iter().filter_map(|line| line["count"].as_u64());
        let (summaries, counts) = (summaries.clone().count(), summaries.sum::<u64>());
        assert!(summaries >= 1, "{logged}");
        let rejections = FLOODS * REQUESTS + 200 + 300 - answered;
        assert_eq!(rejected as u64 + counts, rejections as u64);
        assert_eq!(
            with(&|line| line["message"]
                == "log lines were dropped because the log was not read in time"),
            0
        );
        // 60 MB of requests become at most 100 short lines per second.
        let seconds = usize::try_from(started.elapsed().as_secs()).expect("a small number");
        assert!(rejected <= 100 * (seconds + 2), "{rejected}");
        let longest = logged.lines().filter(|line| line.contains("/flood/"));
        let longest = longest.map(str::len).max();
        assert!(longest < Some(1000), "{longest:?}");
    }

    #[test]
    fn client_values_are_truncated_and_escaped_in_the_log() {
        let server = Server::start();
        let mut client = server.connect();
        let mut logged = |method_and_path: String| {
            let response = client.request(&method_and_path, "");
            let id = response.header("x-request-id").expect("an id").to_owned();
            server.wait_for_line(|line| line["request_id"] == id.as_str())
        };
        let line = logged(format!("GET /{}", "x".repeat(255)));
        assert_eq!(line["path"], format!("/{}", "x".repeat(255)));
        let line = logged(format!("GET /{}", "x".repeat(256)));
        assert_eq!(line["path"], format!("/{}…", "x".repeat(255)));
        // Not within a UTF-8 sequence.
        let line = logged(format!("GET /{}", "シ".repeat(100)));
        assert_eq!(line["path"], format!("/{}…", "シ".repeat(85)));
        let line = logged(format!("{} /plants", "X".repeat(5000)));
        assert_eq!(line["method"], format!("{}…", "X".repeat(256)));

        let deceptive = "\u{85}\u{9b}31m\u{61c}\u{200e}\u{200f}\u{2028}\u{2029}\u{202a}\u{202e}\u{2066}\u{2069}\u{feff}";
        let line = logged(format!("GET /{deceptive}"));
        assert_eq!(line["path"], format!("/{deceptive}"));
        let everything = server.everything_logged();
        let printed = everything.replace('\n', "");
        let unprintable = |c: &char| c.is_control() || deceptive.replace("31m", "").contains(*c);
        assert_eq!(printed.chars().find(unprintable), None, "{everything}");
        assert!(everything.contains(r"\u202e") && everything.contains(r"\u009b"));
    }
}

/// With servers that are reached directly.
mod plaintext {
    use super::*;

    #[test]
    fn a_log_pipe_that_is_not_read_blocks_neither_requests_nor_the_shutdown() {
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
        // More than the buffer of a pipe.
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

    #[test]
    fn client_values_are_escaped_on_a_terminal() {
        let directory = crate::harness::directory();
        let port = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = port.local_addr().expect("an address");
        drop(port);
        let plain = crate::harness::plantstore(directory.path());
        let mut command = std::process::Command::new("script");
        for (name, value) in plain.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        let serve = format!(
            "{} serve --listen {address}",
            plain.get_program().to_str().expect("UTF-8")
        );
        // Exits with the server, which `timeout` stops at the latest.
        let mut child = command
            .args(["-qefc", &format!("timeout 60 {serve}"), "terminal.out"])
            .current_dir(directory.path())
            .stdin(std::process::Stdio::null())
            .stdout(std::process::Stdio::null())
            .spawn()
            .expect("script runs");
        let mut client = None;
        crate::harness::wait_until("it listens", || {
            client = Client::try_connect(address).ok();
            client.is_some()
        });
        let mut client = client.expect("a connection");
        let deceptive = "\u{85}\u{9b}31m\u{61c}\u{200e}\u{200f}\u{2028}\u{2029}\u{202a}\u{202e}\u{2066}\u{2069}\u{feff}";
        assert_eq!(
            client
                .request(&format!("GET /deceptive{deceptive}"), "")
                .status,
            404
        );
        let shown = || std::fs::read_to_string(directory.path().join("terminal.out"));
        let mut text = String::new();
        crate::harness::wait_until("the line is shown", || {
            text = shown().unwrap_or_default();
            text.contains("/deceptive")
        });
        let unprintable = |c: &char| deceptive.replace("31m", "").contains(*c);
        assert_eq!(text.chars().find(unprintable), None, "{text:?}");
        let _ = child.kill();
        let _ = child.wait();
    }
}
