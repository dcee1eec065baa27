//! The status page of the private listener, its numbers, and `plantstore status`. `tests/browser/` opens it in a browser.

use std::fs;
use std::process::Stdio;

use serde_json::Value;

use crate::harness::{
    Client, Server, directory, free_port, output, plantstore, run, run_ok, wait_for_exit,
    wait_until,
};

const BODY: &str = r#"{"id":1,"name":"Monstera","tag":"indoor"}"#;

fn points(server: &Server, query: &str) -> Value {
    let response = server.ask(&format!("/status.json?{query}"));
    assert_eq!(response.status, 200, "{response:?}");
    assert_eq!(response.header("content-type"), Some("application/json"));
    serde_json::from_str(&response.body).expect("JSON")
}

/// The sum of a line of a chart.
fn sum(points: &Value, chart: &str, line: &str) -> f64 {
    let charts = points["charts"].as_array().expect("charts");
    let chart = charts.iter().find(|found| found["id"] == chart);
    let lines = chart.expect("the chart")["lines"]
        .as_array()
        .expect("lines");
    let line = lines.iter().find(|found| found[0] == line);
    let values = line.map(|line| line[1].as_array().expect("values"));
    values.map_or(0.0, |values| values.iter().filter_map(Value::as_f64).sum())
}

#[test]
fn what_the_server_does_is_in_the_charts_within_seconds() {
    let server = Server::start();
    server.add_ok(BODY);
    server.add_ok(BODY);
    assert_eq!(server.add(r#"{"id":1,"name":"Fern"}"#).error(), 40009);
    wait_until("the adds are in the charts", || {
        let points = points(&server, "interval_s=1");
        let is_there = |line| sum(&points, "adds", line) > 0.0;
        ["added", "replayed", "conflict"].into_iter().all(is_there)
            && sum(&points, "errors", "40009") > 0.0
            && sum(&points, "latency", "p99.9") > 0.0
            && sum(&points, "commits", "p50") > 0.0
            && sum(&points, "batches", "mean") > 0.0
            && sum(&points, "database", "file") > 0.0
            && sum(&points, "memory", "resident") > 0.0
    });
    wait_until("they are in the points of ten seconds", || {
        sum(&points(&server, "interval_s=10"), "adds", "added") > 0.0
    });
    assert_eq!(server.ask("/status.json?interval_s=7").status, 400);
}

#[test]
fn only_points_that_are_asked_for_are_sent() {
    let server = Server::start();
    wait_until("there are points", || {
        points(&server, "interval_s=1")["next"].as_u64() >= Some(3)
    });
    let all = points(&server, "interval_s=1");
    assert_eq!(all["first"], 0);
    let (times, next) = (
        all["times"].as_array().expect("times"),
        all["next"].as_u64(),
    );
    assert_eq!(Some(times.len() as u64), next);
    let rest = points(&server, "interval_s=1&first=2");
    assert_eq!((&rest["first"], &rest["times"][0]), (&2.into(), &times[2]));
    // As a page that was opened before the server was started again.
    let after_restart = points(&server, "interval_s=1&first=1000000");
    assert_eq!(after_restart["first"], 0);
}

#[test]
fn the_page_loads_only_its_own_files_and_shows_no_plants_and_no_tokens() {
    let server = Server::start();
    server.add_ok(BODY);
    for path in [
        "/",
        "/status.txt",
        "/status.json",
        "/status.css",
        "/status.js",
        "/status.svg",
    ] {
        let response = server.ask(path);
        assert_eq!(response.status, 200, "{path}");
        let policy = response
            .header("content-security-policy")
            .expect("a policy");
        assert!(policy.starts_with("default-src 'none'; "), "{policy}");
        assert!(!policy.contains("unsafe"), "{policy}");
        assert_eq!(response.header("x-content-type-options"), Some("nosniff"));
        assert_eq!(response.header("cache-control"), Some("no-store"));
        for secret in ["Monstera", "indoor", &server.token(), "plant_"] {
            assert!(!response.body.contains(secret), "{path} has {secret}");
        }
        assert!(!response.body.contains("style="), "{path}");
        let request =
            format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n");
        let mut client = Client::connect(server.ops_address());
        client.send(request.as_bytes());
        assert_eq!(client.response().status, 405, "{path}");
    }
}

#[test]
fn the_page_has_every_setting_and_the_newest_warnings() {
    let place = directory();
    // A warning at the start.
    let mut command = plantstore(place.path());
    command.args(["serve", "--listen", "0.0.0.0:0"]);
    let server = Server::start_command(command, place.path());
    server.wait_until_ready();
    let page = server.ask("/").body;
    let docs = fs::read_to_string("docs/configuration.md").expect("a file");
    let settings = docs.lines().filter_map(|line| {
        let (_, variable) = line.strip_prefix("| `--")?.split_once("| `PLANTSTORE_")?;
        Some(variable.split_once('`')?.0.to_lowercase())
    });
    // The file that has settings is not one.
    let settings: Vec<_> = settings.filter(|name| name != "config").collect();
    assert!(settings.len() > 20, "{settings:?}");
    for name in settings {
        assert!(
            page.contains(&format!("<th scope=\"row\">{name}</th>")),
            "{name}"
        );
    }
    assert!(page.contains("<td>0.0.0.0:0</td>"), "{page}");
    assert!(
        page.contains("tokens and plants are sent without encryption"),
        "{page}"
    );
    assert!(page.contains(r#"<p class="ready">Ready</p>"#), "{page}");
}

#[test]
fn the_command_prints_the_numbers_once_or_again_and_again() {
    let server = Server::start();
    server.add_ok(BODY);
    let url = format!("http://{}", server.ops_address());
    wait_until("the add is counted", || {
        let text = run_ok(server.directory(), &["status", &url]);
        assert!(text.starts_with("ready\nplantstore "), "{text}");
        // Outcomes that did not occur would fill a small terminal.
        assert!(!text.contains("Adds, conflict"), "{text}");
        let line = text.lines().find(|line| line.starts_with("Adds, added "));
        let hour = line.and_then(|line| line.split_whitespace().nth(4));
        hour.is_some_and(|cell| cell != "–" && cell != "0/s")
    });
    assert_eq!(server.add(r#"{"id":1,"name":"another"}"#).error(), 40009);
    wait_until("the conflict is counted", || {
        run_ok(server.directory(), &["status", &url]).contains("Adds, conflict")
    });
    let printed = server.directory().join("output");
    let mut watching = plantstore(server.directory())
        .args(["status", "--watch", &url])
        .stdout(Stdio::from(fs::File::create(&printed).expect("a file")))
        .spawn()
        .expect("it runs");
    wait_until("it prints them again", || {
        let text = fs::read_to_string(&printed).expect("a file");
        text.matches("Adds, added").count() >= 2
    });
    watching.kill().expect("it runs");
    wait_for_exit(&mut watching);
}

#[test]
fn without_a_server_the_command_fails_and_names_the_url() {
    let place = directory();
    let url = format!("http://127.0.0.1:{}", free_port());
    for arguments in [&["status", &url][..], &["status", "--watch", &url]] {
        let failed = run(place.path(), arguments);
        assert_eq!(failed.status.code(), Some(1));
        let message = String::from_utf8_lossy(&failed.stderr);
        assert!(
            message.contains(&url) && message.contains("--ops-listen"),
            "{message}"
        );
    }
    for invalid in ["ftp://127.0.0.1:9090", "http://user:secret@127.0.0.1:9090"] {
        let failed = run(place.path(), &["status", invalid]);
        assert_eq!(failed.status.code(), Some(2));
        let message = String::from_utf8_lossy(&failed.stderr);
        assert!(
            message.contains("expected a URL") && !message.contains("secret"),
            "{message}"
        );
    }
}

#[test]
fn without_a_url_the_command_uses_the_settings_of_the_server() {
    let server = Server::start();
    let address = server.ops_address().to_string();
    let directory = server.directory();
    fs::write(
        directory.join("plantstore.toml"),
        format!("ops_listen = {address:?}\n"),
    )
    .expect("a file");
    let status = |arguments: &[&str]| {
        let mut command = plantstore(directory);
        command.env_remove("PLANTSTORE_OPS_LISTEN");
        output(command.arg("status").args(arguments))
    };
    for arguments in [
        &[&*address][..],
        &["--ops-listen", &address],
        &["--config", "plantstore.toml"],
    ] {
        let output = status(arguments);
        assert!(output.stdout.starts_with(b"ready\n"), "{output:?}");
    }
    let off = status(&["--ops-listen", "off"]);
    let message = String::from_utf8_lossy(&off.stderr);
    assert!(message.contains("the private listener is off"), "{message}");
}
