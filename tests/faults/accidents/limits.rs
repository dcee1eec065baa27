//! Resources that clients and other programs could exhaust: the WAL, the log, file descriptors, connections.

use std::fs;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use rusqlite::Connection;

use crate::accidents::{Case, Row, within};
use crate::checker::Outcome;
use crate::harness::transport::{Transport, transport};
use crate::harness::{Client, PATIENCE, Server, copy_environment, plantstore};

/// Shorter than any timeout of the server.
const TIMEOUT: &str = "100s";
const LONG_BEFORE: Duration = Duration::from_secs(15);

pub fn rows() -> Vec<Row> {
    vec![
        Row::new(
            "long reader",
            "another program holds a read transaction under load; `--max-wal-bytes` is small",
            "the WAL stays below its limit, adds fail with 50302 and recover when the reader ends",
        )
        .case("reader", long_reader),
        Row::new(
            "log flood",
            "3,000 requests without a token and with paths of 15,000 bytes",
            "the log stays small, the rejected requests are counted, the line of an add is there",
        )
        .case("long paths", log_flood),
        Row::new(
            "more connections than file descriptors",
            "`ulimit -n 200`, 300 connections; 64 silent connections to the private listener",
            "`/readyz` responds, adds work when the others are gone",
        )
        .case("300 connections", few_descriptors)
        .case("silent connections", silent_connections),
        incomplete_requests(),
    ]
}

fn incomplete_requests() -> Row {
    let expected = "they are closed at once and the server exits with 0";
    let body = |case: &mut Case| {
        let head = "POST /plants HTTP/1.1\r\nhost: x\r\nauthorization: Bearer TOKEN\r\n";
        let body = "content-type: application/json\r\ncontent-length: 100\r\n\r\n{\"id\":";
        half_sent(case, &[head, body].concat());
    };
    let headers = |case: &mut Case| half_sent(case, "POST /plants HTTP/1.1\r\nhost: x\r\n");
    // Half of the headers cannot be translated to HTTP/2.
    let row = if transport() == Transport::Http2 {
        let done = "50 connections that have sent nothing, or half of a body, then SIGTERM";
        Row::new("incomplete requests at shutdown", done, expected)
    } else {
        let done = "50 connections that have sent nothing, half of the headers, or half of a body, then SIGTERM";
        Row::new("incomplete requests at shutdown", done, expected).case("headers", headers)
    };
    row.case("body", body)
        .case("nothing", |case| half_sent(case, ""))
}

fn long_reader(case: &mut Case) {
    let limit = 1 << 20;
    let server = case.serve(&["--max-wal-bytes", &limit.to_string()]);
    case.add(&server);
    let reader = Connection::open(case.path("plantstore.db")).expect("a database");
    let begin = "BEGIN; SELECT count(*) FROM plants";
    reader.execute_batch(begin).expect("a transaction");
    let mut load = case.load(4, 60); // more than twice the limit
    load.name_len = 8000;
    let history = load.start(server.address(), &server.token()).finish();
    let len = fs::metadata(case.path("plantstore.db-wal")).map_or(0, |wal| wal.len());
    let is_told = history.count(Outcome::Full) > 0;
    case.expect(is_told, "silent", "no add was answered with 50302");
    case.expect(
        len <= 2 * limit,
        "wrong",
        format!("the WAL has {len} bytes"),
    );
    case.history.append(history);
    drop(reader);
    let token = server.token();
    let body = br#"{"id":1,"name":"Fern"}"#;
    let recovers = within(LONG_BEFORE, || {
        server.connect().add(&token, body).status == 200
    });
    case.expect(
        recovers,
        "wrong",
        "adds do not work after the reader has ended",
    );
    case.history
        .note((1, "Fern".to_owned(), None), Outcome::Acknowledged);
    case.complete(&case.path("plantstore.db"));
    drop(server);
    case.serves_all();
}

fn log_flood(case: &mut Case) {
    let mut server = case.serve(&[]);
    case.add(&server);
    let path = "a".repeat(15_000);
    let request = format!("GET /{path} HTTP/1.1\r\nhost: x\r\n\r\n");
    let address = server.address();
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut client = Client::connect(address);
                for _ in 0..750 {
                    client.send(&request);
                    if client.try_response().is_none() {
                        client = Client::connect(address);
                    }
                }
            });
        }
    });
    let before = server.everything_logged().len();
    case.add(&server);
    assert!(server.terminate().success());
    // The last log lines may not have arrived yet.
    within(LONG_BEFORE, || {
        requests_in(&server.everything_logged()) == 3000
    });
    let log = server.everything_logged();
    let counted = requests_in(&log);
    case.expect(
        counted == 3000,
        "silent",
        format!("{counted} of 3000 requests are counted"),
    );
    let is_there = log[before..].contains("\"status\":200");
    case.expect(is_there, "silent", "the line of an add is missing");
    let longest = log.lines().map(str::len).max().unwrap_or_default();
    case.expect(
        longest < 2000,
        "wrong",
        format!("a line has {longest} bytes"),
    );
    case.expect(
        log.len() < 1_000_000,
        "wrong",
        format!("the log has {} bytes", log.len()),
    );
    drop(server);
    case.serves_all();
}

/// Requests with a long path: the logged ones, and the counted ones.
fn requests_in(log: &str) -> u64 {
    let count = |line: &str| {
        let line: serde_json::Value = serde_json::from_str(line).unwrap_or_default();
        let is_one = line["path"]
            .as_str()
            .is_some_and(|path| path.starts_with("/aaa"));
        line["count"].as_u64().unwrap_or(u64::from(is_one))
    };
    log.lines().map(count).sum()
}

fn few_descriptors(case: &mut Case) {
    const CONNECTIONS: u64 = 300;
    let plain = plantstore(case.dir());
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 200 && exec \"$0\" \"$@\""]);
    command.arg(plain.get_program()).current_dir(case.dir());
    copy_environment(&plain, &mut command);
    command.args([
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--ops-listen",
        "127.0.0.1:0",
    ]);
    let mut server = Server::start_command(command, case.dir());
    case.add(&server);
    let before = server.metric("plantstore_connections_accepted_total");
    let mut clients: Vec<_> = (0..CONNECTIONS)
        .map(|_| Client::connect(server.address()))
        .collect();
    for client in &mut clients {
        client.try_send("GET / HTTP/1.1\r\n");
    }
    let started = Instant::now();
    let status = server.ask("/readyz").status;
    case.expect(status == 200, "wrong", format!("/readyz is {status}"));
    let elapsed = started.elapsed();
    case.expect(
        elapsed < LONG_BEFORE,
        "wrong",
        format!("/readyz took {elapsed:?}"),
    );
    let log = server.everything_logged();
    case.expect(log.lines().count() < 500, "wrong", "the log is flooded");
    let is_warned = log.contains("max-connections") || log.contains("max_connections");
    case.expect(is_warned, "silent", "the limit is not in the log");
    drop(clients);
    // Until the server has accepted and closed the last one, connections from this address are beyond their limit.
    let are_gone = within(LONG_BEFORE, || {
        let accepted = server.metric("plantstore_connections_accepted_total");
        let rejected = server.metric("plantstore_connections_rejected_total");
        accepted + rejected >= before + CONNECTIONS && server.metric("plantstore_connections") == 0
    });
    case.expect(are_gone, "wrong", "connections stay open");
    case.add(&server);
    server.kill();
    case.serves_all();
}

fn silent_connections(case: &mut Case) {
    let server = case.serve(&["--header-timeout", TIMEOUT, "--idle-timeout", TIMEOUT]);
    let silent: Vec<_> = (0..64)
        .map(|_| Client::connect(server.ops_address()))
        .collect();
    let started = Instant::now();
    let status = server.ask("/readyz").status;
    let elapsed = started.elapsed();
    case.expect(status == 200, "wrong", format!("/readyz is {status}"));
    case.expect(
        elapsed < LONG_BEFORE,
        "wrong",
        format!("/readyz took {elapsed:?}"),
    );
    drop(silent);
    case.add(&server);
    drop(server);
    case.complete(&case.path("plantstore.db"));
}

fn half_sent(case: &mut Case, part: &str) {
    let timeouts = [
        "--header-timeout",
        "--body-timeout",
        "--idle-timeout",
        "--drain-timeout",
    ];
    let arguments: Vec<_> = timeouts.iter().flat_map(|flag| [*flag, TIMEOUT]).collect();
    let mut server = case.serve(&arguments);
    case.add(&server);
    let mut clients: Vec<_> = (0..50).map(|_| server.connect()).collect();
    let part = part.replace("TOKEN", &server.token());
    for client in &mut clients {
        client.send(&part);
    }
    server.wait_for_connection();
    server.signal("-TERM");
    let has_ended = within(LONG_BEFORE, || server.has_ended());
    case.expect(
        has_ended,
        "wrong",
        format!("it runs {LONG_BEFORE:?} after SIGTERM"),
    );
    if has_ended {
        let code = server.wait_for_exit().code();
        case.expect(code == Some(0), "wrong", format!("it ended with {code:?}"));
    }
    drop(server);
    assert!(LONG_BEFORE < PATIENCE);
    case.serves_all();
}
