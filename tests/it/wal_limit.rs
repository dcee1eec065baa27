//! A long read transaction lets the WAL grow only up to a limit. Adds are rejected there, and accepted again when it ends.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::thread;

use rusqlite::Connection;
use serde_json::Value;

use crate::harness::{Server, directory, open, plantstore, run_ok, wait_for_exit, wait_until};

const LIMIT: u64 = 1 << 20;
const SMALL_LIMIT: [&str; 2] = ["--max-wal-bytes", "1048576"];
/// More than one transaction of these tests writes.
const ONE_BATCH: u64 = 1 << 20;

fn wal_bytes(directory: &Path) -> u64 {
    let wal = fs::metadata(directory.join("plantstore.db-wal"));
    wal.expect("a WAL").len()
}

/// Opens a read transaction.
fn read(directory: &Path) -> Connection {
    let reader = open(directory);
    reader
        .execute_batch("BEGIN; SELECT count(*) FROM plants")
        .expect("SQL");
    reader
}

fn plant(id: i64) -> String {
    format!(r#"{{"id":{id},"name":"{}"}}"#, "x".repeat(20_000))
}

/// Adds plants until one is rejected; returns the number of accepted ones.
fn add_until_rejected(server: &Server, first: i64) -> i64 {
    let token = server.token();
    let mut client = server.connect();
    for id in first.. {
        let response = client.add(&token, plant(id).as_bytes());
        if response.status != 200 {
            assert_eq!(response.error(), 50302, "{response:?}");
            assert_eq!(response.header("retry-after"), Some("1"));
            return id - first;
        }
        assert!(wal_bytes(server.directory()) < LIMIT + ONE_BATCH, "{id}");
    }
    unreachable!("the WAL has a limit")
}

fn says(line: &Value, message: &str) -> bool {
    let said = line["message"].as_str().unwrap_or_default();
    said.starts_with(message)
}

fn count(server: &Server, message: &str) -> usize {
    let logged = server.everything_logged();
    let lines = logged
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok());
    lines.filter(|line| says(line, message)).count()
}

const HALF: &str = "the WAL has reached half of its limit";
const ALL: &str = "the WAL has reached its limit";
const RESET: &str = "the WAL was reset; adds are accepted again";

#[test]
fn at_its_limit_adds_are_rejected_until_the_reader_ends() {
    let server = Server::start_with(&SMALL_LIMIT);
    server.add_ok(plant(-1));
    let mut next = 0;
    for round in 1..=2 {
        let reader = read(server.directory());
        let added = add_until_rejected(&server, next);
        assert!(added > 10, "{added}");
        let rejected = next + added;
        for _ in 0..5 {
            assert_eq!(server.add(plant(rejected)).error(), 50302);
        }
        assert_eq!(server.ask("/readyz").status, 503);
        let line = server.wait_for_line(|line| says(line, ALL));
        assert_eq!(line["level"], "WARN");
        // No rejected plant is stored, and every acknowledged one is.
        let stored = i64::try_from(server.plants().len()).expect("few");
        assert_eq!(stored, rejected + 1);

        reader.execute_batch("COMMIT").expect("SQL");
        server.add_ok(plant(rejected));
        server.wait_for_line(|line| says(line, RESET));
        assert!(wal_bytes(server.directory()) < LIMIT / 4);
        server.wait_until_ready();
        for message in [HALF, ALL, RESET] {
            assert_eq!(count(&server, message), round, "{message}");
        }
        next = rejected + 1;
    }
    // Without a reader the limit is not reached, and there is no warning.
    for id in next..next + 300 {
        server.add_ok(plant(id));
    }
    assert_eq!(count(&server, HALF), 2);
    assert!(wal_bytes(server.directory()) < LIMIT + ONE_BATCH);
}

#[test]
fn the_warning_names_the_reading_process() {
    let server = Server::start_with(&SMALL_LIMIT);
    server.add_ok(plant(-1));
    let mut sqlite = Command::new("sqlite3")
        .arg(server.directory().join("plantstore.db"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("sqlite3 is installed: make setup");
    let mut input = sqlite.stdin.take().expect("a pipe");
    let output = sqlite.stdout.as_mut().expect("a pipe");
    writeln!(input, "BEGIN; SELECT count(*) FROM plants;").expect("it reads");
    let mut line = [0; 2];
    std::io::Read::read_exact(output, &mut line).expect("it answers");
    assert_eq!(&line, b"1\n");

    add_until_rejected(&server, 0);
    let held_by = format!("process {} (sqlite3)", sqlite.id());
    for message in [HALF, ALL] {
        let line = server.wait_for_line(|line| says(line, message));
        assert_eq!(line["held_by"], held_by, "{line}");
    }
    sqlite.kill().expect("it runs");
    wait_for_exit(&mut sqlite);
    server.add_ok(plant(1_000_000));
    server.wait_for_line(|line| says(line, RESET));
}

#[test]
fn an_import_waits_for_the_reader_to_end() {
    let directory = directory();
    let here = directory.path();
    run_ok(here, &["token", "create", "x"]);
    let mut command = plantstore(here);
    command.args(["import", "-"]).args(SMALL_LIMIT);
    let said = fs::File::create(here.join("said")).expect("a file");
    let mut import = command
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(said)
        .spawn()
        .expect("it starts");
    let mut input = import.stdin.take().expect("a pipe");
    let (go_on, gone_on) = channel();
    let sender = thread::spawn(move || {
        for id in 0..600 {
            // More than one batch, so that the first is stored before the reader starts.
            if id == 200 {
                gone_on.recv().expect("a reader");
            }
            writeln!(input, "{}", plant(id)).expect("it reads");
        }
    });
    wait_until("the import has started", || {
        !crate::harness::plants(here).is_empty()
    });
    let reader = read(here);
    go_on.send(()).expect("a sender");
    let said = || fs::read_to_string(here.join("said")).expect("a file");
    wait_until("it waits", || {
        said().contains("waiting: the WAL has reached its limit of 1048576 bytes")
    });
    assert!(
        said().contains(&format!("process {}", std::process::id())),
        "{}",
        said()
    );
    reader.execute_batch("COMMIT").expect("SQL");
    sender.join().expect("all is sent");
    assert!(wait_for_exit(&mut import).success());
    assert_eq!(crate::harness::plants(here).len(), 600);
    assert_eq!(said().matches("waiting").count(), 1, "{}", said());
}
