//! A wrong clock affects only the timestamps of plants that are added meanwhile.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::Stdio;

use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

use crate::harness::clock::Clock;
use crate::harness::{Server, directory, plantstore, run, run_ok, wait_for_exit};

fn start(clock: &Clock, directory: &Path) -> Server {
    let mut command = plantstore(directory);
    command.args(["serve", "--listen", "127.0.0.1:0"]);
    clock.apply_to(&mut command);
    Server::start_command(command, directory)
}

fn add(server: &Server, id: i64) {
    server.add_ok(format!(r#"{{"id":{id},"name":"Fern","tag":"wild"}}"#));
}

fn listed(directory: &Path, arguments: &[&str]) -> Vec<i64> {
    let printed = run_ok(directory, &[&["list", "--json"], arguments].concat());
    let id = |line: &str| {
        let line: Value = serde_json::from_str(line).expect("JSON");
        line["id"].as_i64().expect("an id")
    };
    printed.lines().map(id).collect()
}

/// The time since a plant was added, by its timestamp.
fn age(directory: &Path, id: i64) -> SignedDuration {
    let shown = run_ok(directory, &["get", &id.to_string(), "--json"]);
    let shown: Value = serde_json::from_str(&shown).expect("JSON");
    let added_at = shown["added_at"].as_str().expect("a time");
    let added_at: Timestamp = added_at.parse().expect("RFC 3339");
    Timestamp::now().duration_since(added_at)
}

fn lines_with(server: &Server, message: &str) -> usize {
    let logged = server.everything_logged();
    logged.lines().filter(|line| line.contains(message)).count()
}

#[test]
fn a_clock_that_was_fifty_years_ahead_for_one_add_affects_no_other_plant() {
    let directory = directory();
    let here = directory.path();
    let clock = Clock::new(here);
    clock.set("+0");
    let mut server = start(&clock, here);
    let jumped = |line: &Value| {
        let message = line["message"].as_str().unwrap_or_default();
        message.starts_with("the clock has jumped")
    };
    add(&server, 9);
    clock.set("+50y");
    add(&server, 5);
    let line = server.wait_for_line(jumped);
    assert_eq!(line["level"], "WARN", "{line}");
    clock.set("+0");
    add(&server, 7);
    server.wait_for_line(jumped);
    add(&server, 3);
    assert!(server.terminate().success());
    assert_eq!(
        lines_with(&server, "the clock has jumped"),
        2,
        "{}",
        server.everything_logged()
    );

    let minute = SignedDuration::from_mins(1);
    for id in [9, 7, 3] {
        let age = age(here, id);
        assert!(age.abs() < minute, "{id}: {age:?}");
    }
    assert!(age(here, 5) < SignedDuration::from_hours(-24 * 365 * 49));

    // In the order in which they were added.
    assert_eq!(listed(here, &[]), [3, 7, 5, 9]);
    assert_eq!(listed(here, &["--tag", "wild"]), [3, 7, 5, 9]);
    let mut pages = Vec::new();
    let mut before = "9999-01-01T00:00:00Z/0/9223372036854775807".to_owned();
    for _ in 0..4 {
        let output = run(
            here,
            &["list", "--limit", "1", "--json", "--cursor", &before],
        );
        let page: Value = serde_json::from_slice(&output.stdout).expect("one plant");
        pages.push(page["id"].as_i64().expect("an id"));
        let hint = String::from_utf8(output.stderr).expect("UTF-8");
        if let Some((_, position)) = hint.trim().split_once("--cursor ") {
            position.clone_into(&mut before);
        }
    }
    assert_eq!(pages, [3, 7, 5, 9]);
    // By their timestamps.
    let in_ten_years = (Timestamp::now() + SignedDuration::from_hours(24 * 3650)).to_string();
    for filter in [&[][..], &["--tag", "wild"]] {
        let listed = |arguments: &[&str]| listed(here, &[arguments, filter].concat());
        assert_eq!(listed(&["--since", "1h"]), [3, 7, 5, 9]);
        assert_eq!(listed(&["--since", &in_ten_years]), [5]);
        assert_eq!(listed(&["--until", &in_ten_years]), [3, 7, 9]);
        assert_eq!(
            listed(&["--since", "1h", "--until", &in_ten_years]),
            [3, 7, 9]
        );
    }
    assert_eq!(run_ok(here, &["export"]).lines().count(), 4);
    let stats: Value = serde_json::from_str(&run_ok(here, &["stats", "--json"])).expect("JSON");
    let of_days = stats["days"].as_array().expect("days").iter();
    let of_days: i64 = of_days
        .map(|day| day["added"].as_i64().expect("a count"))
        .sum();
    assert_eq!((of_days, &stats["future"]), (3, &Value::from(1)), "{stats}");
    let stats = run_ok(here, &["stats"]);
    assert!(stats.ends_with("dated in the future: 1\n"), "{stats}");
}

#[test]
fn opening_a_store_with_timestamps_in_the_future_logs_a_warning() {
    let directory = directory();
    let clock = Clock::new(directory.path());
    clock.set("+0");
    let server = start(&clock, directory.path());
    add(&server, 1);
    drop(server);
    for (time, warnings) in [("+2d", 0), ("+0", 1)] {
        clock.set(time);
        let mut server = start(&clock, directory.path());
        add(&server, 2);
        assert!(server.terminate().success());
        let logged = server.everything_logged();
        let found = lines_with(&server, "the newest plants are dated in the future");
        assert_eq!(found, warnings, "{time}: {logged}");
        assert_eq!(lines_with(&server, "the clock has jumped"), 0, "{logged}");
    }
}

#[test]
fn an_export_is_a_snapshot_even_if_the_clock_is_set_back_meanwhile() {
    let directory = directory();
    let here = directory.path();
    let clock = Clock::new(here);
    clock.set("+0");
    let server = start(&clock, here);
    let plants = (0..20_000).fold(String::new(), |lines, id| {
        lines + &format!("{{\"id\":{id},\"name\":\"plant {id}\"}}\n")
    });
    fs::write(here.join("plants.ndjson"), &plants).expect("a file");
    run_ok(here, &["import", "plants.ndjson"]);
    let mut command = plantstore(here);
    let mut export = command
        .arg("export")
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut output = export.stdout.take().expect("a pipe");
    let mut exported = vec![0];
    output
        .read_exact(&mut exported)
        .expect("the export has started");
    // The rest is larger than the buffer of a pipe.
    for (time, ids) in [("-1d", [-1, 1_000_000]), ("+1d", [-2, 1_000_001])] {
        clock.set(time);
        for id in ids {
            add(&server, id);
        }
    }
    output.read_to_end(&mut exported).expect("the rest");
    assert!(wait_for_exit(&mut export).success());
    let exported = String::from_utf8(exported).expect("UTF-8");
    let others: Vec<_> = exported
        .lines()
        .filter(|line| line.contains("Fern"))
        .collect();
    assert_eq!(others, [""; 0]);
    assert!(exported == plants, "{} lines", exported.lines().count());
}

#[test]
fn a_plant_with_a_corrupted_batch_number_is_not_silently_left_out_of_an_export() {
    let mut server = Server::start();
    for id in 1..=3 {
        add(&server, id);
    }
    assert!(server.terminate().success());
    // The record of plant 3 ends with its checksum and the batch number 3, in one byte; the header precedes the name.
    let path = server.directory().join("plantstore.db");
    let mut database = fs::read(&path).expect("a file");
    let found = database.windows(9).position(|part| part == b"\x01Fernwild");
    let sizes = found.expect("the row");
    let batch = sizes + 9 + 6 + usize::from(database[sizes - 1]);
    assert_eq!(database[batch], 3);
    database[batch] = 99;
    fs::write(&path, database).expect("a file");

    for arguments in [&["export"][..], &["check"]] {
        let output = run(server.directory(), arguments);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
    }
}
