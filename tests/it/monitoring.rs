//! The private listener: liveness, readiness and metrics, checked with Prometheus' own tools and against docs, dashboard and
//! alerts.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::Value;

use crate::harness::transport::Certificate;
use crate::harness::{
    Client, Server, add_request, directory, plantstore, postgres, run_ok, wait_until,
};
use crate::markdown;

const PAGE: &str = include_str!("../../docs/monitoring.md");
const DASHBOARD: &str = include_str!("../../deploy/grafana-dashboard.json");
const ALERTS: &str = include_str!("../../deploy/prometheus-alerts.yml");

const BODY: &str = r#"{"id":1,"name":"x"}"#;

/// A scrape: values by name and labels, and the types.
struct Metrics {
    text: String,
    values: BTreeMap<String, f64>,
    types: BTreeMap<String, String>,
}

impl Metrics {
    fn of(server: &Server) -> Self {
        let response = server.ask("/metrics");
        assert_eq!(response.status, 200);
        let expected = "text/plain; version=0.0.4; charset=utf-8";
        assert_eq!(response.header("content-type"), Some(expected));
        let text = response.body;
        let samples = text.lines().filter(|line| !line.starts_with('#'));
        let values = samples.map(|line| {
            let (name, value) = line.rsplit_once(' ').expect("a value");
            (name.to_owned(), value.parse().expect("a number"))
        });
        let types = text.lines().filter_map(|line| {
            let (name, kind) = line.strip_prefix("# TYPE ")?.split_once(' ')?;
            Some((name.to_owned(), kind.to_owned()))
        });
        Self {
            values: values.collect(),
            types: types.collect(),
            text,
        }
    }

    #[track_caller]
    fn value(&self, name: &str) -> f64 {
        let value = self.values.get(name);
        *value.unwrap_or_else(|| panic!("no {name} in\n{}", self.text))
    }

    /// The names of the series, without labels.
    fn names(&self) -> BTreeSet<&str> {
        let names = self.values.keys().map(|name| name.split('{').next());
        names.map(|name| name.expect("a name")).collect()
    }
}

fn promtool(arguments: &[&str], input: &str) -> Output {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent();
    let ours: PathBuf = target.expect("target").join("tools/bin/promtool");
    let program = if ours.exists() {
        ours
    } else {
        "promtool".into()
    };
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("promtool runs; `make setup` gets it");
    let mut stdin = child.stdin.take().expect("a pipe");
    stdin.write_all(input.as_bytes()).expect("it reads");
    drop(stdin);
    child.wait_with_output().expect("it ends")
}

#[track_caller]
fn check_with_promtool(arguments: &[&str], input: &str) -> String {
    let output = promtool(arguments, input);
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success(), "{said}\n{input}");
    said
}

/// A request of every kind that a client can make without a fault.
fn make_traffic(server: &Server) {
    let token = server.token();
    let mut client = server.connect();
    assert_eq!(client.add(&token, BODY.as_bytes()).status, 200);
    assert_eq!(client.add(&token, BODY.as_bytes()).status, 200);
    assert_eq!(client.add(&token, br#"{"id":1,"name":"y"}"#).error(), 40009);
    assert_eq!(client.add(&token, b"{}").error(), 40002);
    assert_eq!(client.request("GET /nowhere", "").error(), 40400);
    assert_eq!(client.request("GET /openapi.json", "").status, 200);
    client.send("GARBAGE\r\n\r\n");
    assert_eq!(client.response().error(), 40000);
}

#[test]
fn the_private_listener_serves_health_and_readiness_and_no_plants() {
    let server = Server::start();
    server.wait_until_ready();
    for (path, status, body) in [
        ("/healthz", 200, "alive\n"),
        ("/readyz", 200, "ready\n"),
        (
            "/plants",
            404,
            "Not found; the paths are /, /status.txt, /status.json, /healthz, /readyz, /metrics.\n",
        ),
    ] {
        let response = server.ask(path);
        assert_eq!((response.status, &*response.body), (status, body), "{path}");
        assert_eq!(response.header("connection"), Some("close"), "{response:?}");
    }
    let mut client = Client::connect(server.ops_address());
    let response = client.request("POST /readyz", "content-length: 0\r\n");
    assert_eq!(
        (response.status, response.header("allow")),
        (405, Some("GET,HEAD"))
    );
    for path in ["/healthz", "/readyz", "/metrics"] {
        assert_eq!(
            server.connect().request(&format!("GET {path}"), "").status,
            404
        );
    }
}

#[test]
fn promtool_accepts_the_metrics() {
    let server = Server::start();
    make_traffic(&server);
    let metrics = Metrics::of(&server);
    let said = check_with_promtool(&["check", "metrics"], &metrics.text);
    assert_eq!(said, "");
    let broken = metrics.text.replace("_total", "_sum_of_all");
    assert!(!promtool(&["check", "metrics"], &broken).status.success());
}

#[test]
fn every_response_is_counted_by_status_and_error_including_those_of_hyper() {
    let server = Server::start();
    let request = |status, error| {
        format!("plantstore_http_requests_total{{status=\"{status}\",error_code=\"{error}\"}}")
    };
    let before = Metrics::of(&server);
    for (status, error) in [("200", "none"), ("400", "40009"), ("503", "50302")] {
        assert!(before.value(&request(status, error)).abs() < 0.5, "{error}");
    }
    make_traffic(&server);
    let after = Metrics::of(&server);
    let mut counted = 0.0;
    for (status, error, count) in [
        ("200", "none", 3.0),
        ("400", "40009", 1.0),
        ("400", "40002", 1.0),
        ("404", "40400", 1.0),
        ("400", "40000", 1.0),
    ] {
        let value = after.value(&request(status, error));
        assert!((value - count).abs() < 0.5, "{error}: {value}");
        counted += count;
    }
    let requests = after.values.iter();
    let all: f64 = requests
        .filter(|(name, _)| name.starts_with("plantstore_http_requests_total"))
        .map(|(_, value)| value)
        .sum();
    assert!((all - counted).abs() < 0.5, "{}", after.text);

    let took = |class| {
        let name = format!("plantstore_http_request_duration_seconds_count{{class=\"{class}\"}}");
        after.value(&name)
    };
    // Without a valid request there is no start time.
    assert_eq!((took("2xx"), took("4xx"), took("5xx")), (3.0, 3.0, 0.0));
    let all = "plantstore_http_request_duration_seconds_bucket{class=\"2xx\",le=\"+Inf\"}";
    assert!((after.value(all) - 3.0).abs() < 0.5);
}

#[test]
#[expect(
    clippy::float_cmp,
    clippy::cast_precision_loss,
    reason = "small whole numbers are exact"
)]
fn outcomes_commits_tokens_and_connections_are_counted() {
    let server = Server::start();
    make_traffic(&server);
    let _silent = server.connect();
    server.wait_for_connection();
    let metrics = Metrics::of(&server);
    let adds = |outcome| metrics.value(&format!("plantstore_adds_total{{outcome=\"{outcome}\"}}"));
    for (outcome, count) in [
        ("added", 1.0),
        ("replayed", 1.0),
        ("conflict", 1.0),
        ("damaged", 0.0),
        ("busy", 0.0),
        ("unavailable", 0.0),
        ("full", 0.0),
        ("unknown", 0.0),
        ("queue_full", 0.0),
    ] {
        assert_eq!(adds(outcome), count, "{outcome}");
    }
    assert_eq!(metrics.value("plantstore_batch_plants_sum"), 3.0);
    let commits = metrics.value("plantstore_batch_plants_count");
    assert_eq!(
        metrics.value("plantstore_commit_duration_seconds_count"),
        commits
    );
    assert!(metrics.value("plantstore_commit_duration_seconds_sum") > 0.0);
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.expect("after 1970").as_secs_f64();
    let age = now - metrics.value("plantstore_last_commit_timestamp_seconds");
    assert!((-1.0..60.0).contains(&age), "{age}");
    let age = now - metrics.value("process_start_time_seconds");
    assert!((-1.0..60.0).contains(&age), "{age}");

    assert_eq!(metrics.value("plantstore_ready"), 1.0);
    assert_eq!(metrics.value("plantstore_draining"), 0.0);
    assert_eq!(metrics.value("plantstore_queue_length"), 0.0);
    assert_eq!(metrics.value("plantstore_queue_length_max"), 16384.0);
    assert_eq!(metrics.value("plantstore_connections_max"), 16384.0);
    assert!(metrics.value("plantstore_connections") >= 1.0);
    assert!(metrics.value("plantstore_connections_accepted_total") >= 3.0);
    assert_eq!(metrics.value("plantstore_tokens"), 1.0);
    let readings = |result| {
        metrics.value(&format!(
            "plantstore_token_readings_total{{result=\"{result}\"}}"
        ))
    };
    assert!(readings("ok") >= 1.0);
    assert_eq!(readings("failed"), 0.0);

    assert!(metrics.value("process_cpu_seconds_total") > 0.0);
    assert!(metrics.value("process_resident_memory_bytes") > 1e6);
    assert!(metrics.value("process_open_fds") > 5.0);
    assert!(metrics.value("process_max_fds") > metrics.value("process_open_fds"));
    if !postgres::is_under_test() {
        let on_disk = fs::metadata(server.directory().join("plantstore.db"));
        let on_disk = on_disk.expect("a file").len();
        assert_eq!(metrics.value("plantstore_store_size_bytes"), on_disk as f64);
        assert!(metrics.value("plantstore_store_wal_size_bytes") > 4096.0);
    }
    drop(server.connect());
    wait_until("those who left are not counted", || {
        Metrics::of(&server).value("plantstore_connections") <= 1.0
    });
}

#[test]
fn a_draining_node_is_alive_and_not_ready() {
    let mut server = Server::start();
    let request = add_request(&server.token(), BODY.as_bytes());
    let (most, rest) = request.split_at(request.len() - 5);
    let mut half_way = server.connect();
    half_way.send(most);
    server.wait_for_connection();
    server.wait_until_ready();

    server.signal("-TERM");
    server.wait_for_line(|line| line["message"] == "draining");
    let response = server.ask("/readyz");
    assert_eq!(
        (response.status, &*response.body),
        (503, "not ready: draining\n")
    );
    assert_eq!(server.ask("/healthz").status, 200);
    let metrics = Metrics::of(&server);
    assert!(metrics.text.contains("\nplantstore_ready 0\n"));
    assert!(metrics.text.contains("\nplantstore_draining 1\n"));
    half_way.send(rest);
    assert_eq!(half_way.response().status, 200);
    assert_eq!(server.wait_for_exit().code(), Some(0));
}

#[test]
fn a_probe_changes_nothing() {
    let server = Server::start();
    let token = server.token();
    let stored = || {
        (
            run_ok(server.directory(), &["token", "list", "--json"]),
            server.plants(),
        )
    };
    let before = stored();
    server.wait_until_ready();
    assert!(Metrics::of(&server).value("plantstore_last_commit_timestamp_seconds") > 0.0);
    assert_eq!(stored(), before);
    assert!(run_ok(server.directory(), &["check"]).starts_with("no damage"));
    assert_eq!(server.connect().add(&token, BODY.as_bytes()).status, 200);
}

#[test]
fn silent_connections_to_the_private_listener_do_not_block_others() {
    let server = Server::start();
    // Waiting for the timeout of each would take minutes.
    let mut silent: Vec<_> = (0..450)
        .map(|number| {
            let mut client = Client::connect(server.ops_address());
            if number % 2 == 0 {
                client.send("GET /readyz HTTP/1.1\r\nhost:");
            }
            client
        })
        .collect();
    for path in ["/healthz", "/readyz", "/metrics"] {
        assert_eq!(server.ask(path).status, 200, "{path}");
    }
    // The oldest connections were closed without a response.
    assert!(silent[0].is_closed() && silent[1].is_closed());
}

/// A server with a limit of open files.
fn with_open_files(limit: u32, directory: &Path) -> Command {
    let plain = plantstore(directory);
    let mut command = Command::new("prlimit");
    for (name, value) in plain.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command
        .arg(format!("--nofile={limit}:{limit}"))
        .arg(plain.get_program())
        .args(["serve", "--listen", "127.0.0.1:0"])
        .current_dir(directory)
        .stdin(Stdio::null());
    command
}

#[test]
fn the_limit_of_open_files_limits_connections_and_reserves_descriptors_for_the_rest() {
    let directory = directory();
    // Each core has a runtime, which needs four descriptors.
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let limit = u32::try_from(192 + 4 * cores).expect("a small number");
    let server = Server::start_command(with_open_files(limit, directory.path()), directory.path());
    let token = server.token();
    let logged = server.everything_logged();
    let warning = logged
        .lines()
        .find(|line| line.contains("--max-connections"));
    let warning = warning.unwrap_or_else(|| panic!("no warning in\n{logged}"));
    let warning: Value = serde_json::from_str(warning).expect("JSON");
    assert_eq!(warning["level"], "WARN");
    let room = warning["max_connections"].as_u64().expect("a number");
    assert!((20..180).contains(&room), "{room}");
    let message = warning["message"].as_str().expect("a message");
    for number in ["16384", &limit.to_string(), &room.to_string()] {
        assert!(message.contains(number), "{message}");
    }
    let max = Metrics::of(&server).value("plantstore_connections_max");
    assert!((max - f64::from(u32::try_from(room).expect("small"))).abs() < 0.5);

    let add = |client: &mut Client, id: usize| {
        let body = format!(r#"{{"id":{id},"name":"x"}}"#);
        client.add(&token, body.as_bytes()).status
    };
    // From several addresses, because each has a limit of its own.
    let connect = |number: u16| {
        let source = [127, 0, 0, 2 + u8::try_from(number % 20).expect("small")];
        Client::connect_from(source, server.address())
    };
    let mut connected: Vec<_> = (0..300).map(connect).collect();
    for (id, client) in connected.iter_mut().rev().take(10).enumerate() {
        assert_eq!(add(client, id), 200);
    }
    let metrics = Metrics::of(&server);
    assert!(metrics.value("plantstore_connections") <= max);
    assert!(metrics.value("process_open_fds") < f64::from(limit));
    let _silent: Vec<_> = (0..64)
        .map(|_| Client::connect(server.ops_address()))
        .collect();
    for path in ["/healthz", "/readyz", "/metrics"] {
        assert_eq!(server.ask(path).status, 200, "{path}");
    }
    // Waiting connections are served, and files can still be opened.
    let mut last = connected.pop().expect("a client");
    drop(connected);
    assert_eq!(add(&mut last, 999), 200);
    assert!(!server.everything_logged().contains("cannot accept"));
}

#[test]
fn a_limit_of_open_files_that_is_too_low_for_any_connection_is_an_error() {
    let directory = directory();
    let nowhere = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
    let command = with_open_files(60, directory.path());
    let mut server = Server::spawn(command, directory.path(), nowhere);
    assert_eq!(server.wait_for_exit().code(), Some(1));
    let mut said = String::new();
    wait_until("it says why", || {
        said = server.everything_logged();
        said.contains("plantstore:")
    });
    assert!(
        said.contains("the limit of open files is 60") && said.contains("ulimit -n"),
        "{said}"
    );
}

/// Words that look like the name of a metric.
fn figures_in(text: &str) -> BTreeSet<&str> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    let of_ours = |word: &&str| word.starts_with("plantstore_") || word.starts_with("process_");
    words.filter(of_ours).collect()
}

/// All expressions of a dashboard, as Grafana would send them.
fn expressions(dashboard: &Value) -> Vec<String> {
    match dashboard {
        Value::Object(members) => {
            let mut found: Vec<_> = members.values().flat_map(expressions).collect();
            if let Some(Value::String(expression)) = members.get("expr") {
                found.push(expression.replace("$__rate_interval", "1m"));
            }
            found
        }
        Value::Array(items) => items.iter().flat_map(expressions).collect(),
        _ => Vec::new(),
    }
}

#[test]
fn the_dashboard_uses_existing_metrics_only() {
    let directory = directory();
    // Over PostgreSQL some are missing.
    let server = Server::start_in(directory.path(), &["--store", "sqlite:plantstore.db"]);
    let page = Metrics::of(&server);
    let names = page.names();
    let dashboard: Value = serde_json::from_str(DASHBOARD).expect("JSON");
    let expressions = expressions(&dashboard);
    assert!(expressions.len() >= 15, "{expressions:?}");
    let mut rules = "groups:\n- name: dashboard\n  rules:\n".to_owned();
    for expression in &expressions {
        // A node that is down stays, and other jobs do not appear.
        let selectors = expression.matches('{').count();
        let with_both = expression
            .matches(r#"job=~"$job",instance=~"$instance""#)
            .count();
        assert_eq!(with_both, selectors, "{expression}");
        for name in figures_in(expression) {
            assert!(names.contains(name), "{name} in {expression}");
        }
        let quoted = Value::from(expression.as_str()).to_string();
        rules += "  - record: dashboard:expression\n    labels:\n      expression: ";
        rules += &quoted;
        rules += "\n    expr: ";
        rules += &quoted;
        rules += "\n";
    }
    let file = directory.path().join("rules.yml");
    fs::write(&file, rules).expect("a file");
    let file = file.to_str().expect("UTF-8");
    check_with_promtool(&["check", "rules", "--lint=none", file], "");

    let panels = dashboard["panels"].as_array().expect("panels");
    let ids: BTreeSet<_> = panels.iter().map(|panel| panel["id"].as_u64()).collect();
    assert_eq!(ids.len(), panels.len(), "a panel has an id of its own");
}

/// A server with TLS has metrics that others do not have.
fn with_tls(directory: &Path, arguments: &[&str]) -> Server {
    Certificate::create(directory, "server", 100);
    let tls = ["--tls-cert", "server.crt", "--tls-key", "server.key"];
    Server::start_in(directory, &[&tls, arguments].concat())
}

#[test]
fn the_alerts_use_existing_metrics_only() {
    let directory = directory();
    let page = Metrics::of(&with_tls(
        directory.path(),
        &["--store", "sqlite:plantstore.db"],
    ));
    let names = page.names();
    for name in figures_in(ALERTS) {
        assert!(names.contains(name), "{name}");
    }
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/prometheus-alerts.yml");
    let said = check_with_promtool(&["check", "rules", file], "");
    assert!(said.contains("rules found"), "{said}");
}

#[test]
fn the_page_says_what_to_do_about_every_alert() {
    let rows: Vec<_> = PAGE
        .lines()
        .filter(|line| line.starts_with("| `"))
        .collect();
    for line in ALERTS.lines() {
        if let Some(name) = line.trim().strip_prefix("- alert: ") {
            let quoted = format!("`{name}`");
            assert!(rows.iter().any(|row| row.contains(&quoted)), "{name}");
        }
    }
}

#[test]
fn the_page_lists_every_metric_with_its_type_and_no_other() {
    let directory = directory();
    let server = with_tls(directory.path(), &[]);
    let listed = PAGE.lines().filter_map(|line| {
        let mut cells = line.strip_prefix("| `")?.split('|').map(str::trim);
        let name = cells.next()?.trim_matches('`');
        if !name.starts_with("plantstore_") && !name.starts_with("process_") {
            return None; // a row of another table
        }
        let kind = cells.next()?;
        let only_sqlite = cells.next()?.contains("(SQLite)");
        let is_there = !(only_sqlite && postgres::is_under_test());
        is_there.then(|| (name.to_owned(), kind.to_owned()))
    });
    let listed: BTreeMap<_, _> = listed.collect();
    assert_eq!(listed, Metrics::of(&server).types);
}

#[test]
fn the_prometheus_configuration_on_the_page_is_valid() {
    let directory = directory();
    let config = directory.path().join("prometheus.yml");
    let example = markdown::block(PAGE, "Prometheus", "yaml");
    fs::write(&config, example).expect("a file");
    fs::write(directory.path().join("prometheus-alerts.yml"), ALERTS).expect("a file");
    let config = config.to_str().expect("UTF-8");
    check_with_promtool(&["check", "config", config], "");
}
