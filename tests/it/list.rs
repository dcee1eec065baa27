//! `plantstore list`, `get` and `stats` while the server runs.

use std::collections::HashSet;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::harness::{
    Server, directory, open, plant_checksum, plantstore, postgres, run, run_ok, wait_for_exit,
};

/// The lines of a command that prints JSON.
fn json_lines(directory: &Path, arguments: &[&str]) -> Vec<Value> {
    let printed = run_ok(directory, &[arguments, &["--json"]].concat());
    let line = |line| serde_json::from_str(line).expect("JSON");
    printed.lines().map(line).collect()
}

fn listed(directory: &Path, arguments: &[&str]) -> Vec<i64> {
    let lines = json_lines(directory, &[&["list"], arguments].concat());
    let id = |line: &Value| line["id"].as_i64().expect("an id");
    lines.iter().map(id).collect()
}

/// The error message of a command that fails.
fn failure(directory: &Path, arguments: &[&str]) -> String {
    let output = run(directory, arguments);
    let said = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {said}");
    assert!(!said.contains("panicked"), "{said}");
    said
}

/// Inserts ferns 1 to `len` into the database, all with the same time, a minute from now, and in one batch, by the first token.
fn grow(directory: &Path, len: i64) {
    if let Some(store) = postgres::store(directory) {
        let sql =
            "INSERT INTO plantstore.plants SELECT id, 'Fern ' || id, 'wild', $2, (SELECT min(id) FROM plantstore.tokens)
                   FROM generate_series(1, $1::BIGINT) AS id";
        let then = jiff::Timestamp::now() + jiff::SignedDuration::from_mins(1);
        return postgres::with_client(&store, async |client| {
            client.execute(sql, &[&len, &then]).await.expect("plants");
        });
    }
    let then = jiff::Timestamp::now().as_millisecond() + 60_000;
    let mut store = open(directory);
    let transaction = store.transaction().expect("a transaction");
    let sql = "INSERT INTO plants VALUES (?1, ?2, 'wild', ?3, 1, ?4, 1000000)";
    let mut insert = transaction.prepare(sql).expect("SQL");
    for id in 1..=len {
        let name = format!("Fern {id}");
        let checksum = plant_checksum(id, &name, "wild", then, 1, 1_000_000);
        let values = rusqlite::params![id, name, then, checksum];
        insert.execute(values).expect("a plant");
    }
    drop(insert);
    let sql = "INSERT INTO batches SELECT batch, max(added_at), unhex(group_concat(printf('%016x', id), ''))
               FROM plants WHERE batch = 1000000";
    transaction.execute(sql, []).expect("a batch");
    transaction.commit().expect("a commit");
}

#[test]
fn a_list_shows_the_newest_first_with_their_tokens() {
    let server = Server::start();
    server.add_ok(r#"{"id":7,"name":"Monstera","tag":"indoor"}"#);
    let ci = run_ok(server.directory(), &["token", "create", "ci"]);
    let body = br#"{"id":-3,"name":"Fern \"lace\""}"#;
    assert_eq!(server.connect().add(ci.trim(), body).status, 200);

    let lines = json_lines(server.directory(), &["list"]);
    let added_at = lines[0]["added_at"].as_str().expect("a time");
    let added_at: jiff::Timestamp = added_at.parse().expect("RFC 3339");
    assert!((jiff::Timestamp::now() - added_at).get_seconds() < 60);
    assert_eq!(
        lines,
        [
            json!({"id": -3, "name": "Fern \"lace\"", "added_at": lines[0]["added_at"], "added_by": "ci"}),
            json!({"id": 7, "name": "Monstera", "tag": "indoor", "added_at": lines[1]["added_at"], "added_by": "first"}),
        ]
    );
    let table = run_ok(server.directory(), &["list"]);
    let rows: Vec<_> = table.lines().collect();
    assert_eq!(rows.len(), 3, "{table}");
    assert!(
        rows[0].starts_with("ID  NAME         TAG     ADDED "),
        "{table}"
    );
    assert!(
        rows[1].starts_with("-3  Fern \"lace\"          2"),
        "{table}"
    );
    assert!(rows[2].starts_with("7   Monstera     indoor  2"), "{table}");
    assert!(rows[2].ends_with(" UTC  first"), "{table}");
}

#[test]
fn pages_follow_each_other_without_a_gap_or_a_repetition() {
    let server = Server::start();
    server.token();
    for id in [5, -9, 12, 3, i64::MAX, i64::MIN, 0] {
        server.add_ok(format!(r#"{{"id":{id},"name":"Ivy","tag":"a"}}"#));
    }
    for filter in [&[][..], &["--tag", "a"]] {
        let mut seen = Vec::new();
        let mut before: Option<String> = None;
        loop {
            let mut arguments = [&["list", "--limit", "3", "--json"], filter].concat();
            if let Some(before) = &before {
                arguments.extend(["--cursor", before]);
            }
            let output = run(server.directory(), &arguments);
            assert!(output.status.success(), "{output:?}");
            let page = String::from_utf8(output.stdout).expect("UTF-8");
            for line in page.lines() {
                let line: Value = serde_json::from_str(line).expect("JSON");
                seen.push(line["id"].as_i64().expect("an id"));
            }
            let hint = String::from_utf8(output.stderr).expect("UTF-8");
            let Some((more, place)) = hint.trim().split_once(": the same with --cursor ") else {
                assert_eq!(hint, "");
                break;
            };
            assert_eq!(more, "more");
            before = Some(place.to_owned());
            assert!(seen.len() < 10, "{seen:?}");
        }
        assert_eq!(seen, [0, i64::MIN, i64::MAX, 3, 12, -9, 5], "{filter:?}");
    }
    // A page with all plants has no next page.
    let output = run(server.directory(), &["list", "--limit", "7"]);
    assert!(output.stderr.is_empty(), "{output:?}");
}

#[test]
fn a_list_has_the_plants_that_match_its_filters() {
    let server = Server::start();
    server.add_ok(r#"{"id":1,"name":"Monstera deliciosa","tag":"indoor"}"#);
    server.add_ok(r#"{"id":2,"name":"monstera","tag":"Indoor"}"#);
    server.add_ok(r#"{"id":3,"name":"100 % fern"}"#);
    server.add_ok(r#"{"id":4,"name":"a\u0000b","tag":""}"#);
    server.add_ok(r#"{"id":5,"name":"\u001a","tag":"\u0000"}"#);
    let listed = |arguments: &[&str]| listed(server.directory(), arguments);
    assert_eq!(listed(&["--tag", "indoor"]), [1]);
    assert_eq!(listed(&["--tag", ""]), [4]);
    assert_eq!(listed(&["--name", "onstera"]), [2, 1]);
    assert_eq!(listed(&["--name", "MONstera"]), [2, 1]);
    assert_eq!(listed(&["--name", "onstera", "--tag", "Indoor"]), [2]);
    assert_eq!(listed(&["--untagged"]), [3]);
    assert_eq!(listed(&["--untagged", "--name", "monstera"]), [0; 0]);
    assert_eq!(listed(&["--name", ""]), [5, 4, 3, 2, 1]);
    // No character is special, and the escapes of the stored form do not match.
    assert_eq!(listed(&["--name", "%"]), [3]);
    assert_eq!(listed(&["--name", "_"]), [0; 0]);
    assert_eq!(listed(&["--name", "0"]), [3]);
    assert_eq!(listed(&["--name", "1"]), [3]);
    assert_eq!(listed(&["--name", "\u{1a}"]), [5]);
    server.add_ok(r#"{"id":6,"name":"0\u00001\u001a É"}"#);
    assert_eq!(listed(&["--name", "0"]), [6, 3]);
    assert_eq!(listed(&["--name", "1\u{1a}"]), [6]);
    assert_eq!(listed(&["--name", "0\u{1a}"]), [0; 0]);
    assert_eq!(listed(&["--name", "\u{1a} É"]), [6]);
    assert_eq!(listed(&["--name", "é"]), [0; 0]);

    assert_eq!(listed(&["--since", "1h"]).len(), 6);
    assert_eq!(listed(&["--since", "2026-01-01"]).len(), 6);
    assert_eq!(listed(&["--since", "2026-01-01T00:00:00Z"]).len(), 6);
    assert_eq!(listed(&["--since=-004800-01-01"]).len(), 6);
    assert_eq!(listed(&["--since", "9999-01-01"]), [0; 0]);
    assert_eq!(listed(&["--until", "2026-01-01"]), [0; 0]);
    assert_eq!(listed(&["--until", "9999-12-30T20:00:00Z"]).len(), 6);
    let third = &json_lines(server.directory(), &["get", "3"])[0]["added_at"];
    let third = third.as_str().expect("a time");
    assert!(listed(&["--since", third]).contains(&3));
    assert!(!listed(&["--until", third]).contains(&3));
    assert!(!listed(&["--until", third, "--name", "fern"]).contains(&3));
}

#[test]
fn an_empty_list_says_so_on_standard_error() {
    let server = Server::start();
    server.token();
    let list = |arguments: &[&str]| {
        let output = run(server.directory(), &[&["list"], arguments].concat());
        assert!(output.status.success(), "{output:?}");
        (
            String::from_utf8(output.stdout).expect("UTF-8"),
            String::from_utf8(output.stderr).expect("UTF-8"),
        )
    };
    assert_eq!(list(&["--json"]), (String::new(), "no plants\n".to_owned()));
    let (table, said) = list(&[]);
    assert_eq!((table.lines().count(), &*said), (1, "no plants\n"));
    server.add_ok(r#"{"id":1,"name":"Fern"}"#);
    assert_eq!(list(&["--json"]).1, "");
    for filter in [
        &["--tag", "x"][..],
        &["--name", "ivy"],
        &["--since", "9999-01-01"],
        &["--until", "2026-01-01"],
        &["--cursor", "2026-01-01T00:00:00Z/0"],
    ] {
        let (found, said) = list(&[filter, &["--json"]].concat());
        assert_eq!((&*found, &*said), ("", "no plants match\n"), "{filter:?}");
    }
}

#[test]
fn rare_plants_are_found_among_many_others() {
    let server = Server::start();
    server.token();
    for id in [-1, -2, -3] {
        server.add_ok(format!(r#"{{"id":{id},"name":"Orchid","tag":"rare"}}"#));
    }
    server.add_ok(r#"{"id":-4,"name":"Fern"}"#);
    grow(server.directory(), 30_000);
    let listed = |arguments: &[&str]| listed(server.directory(), arguments);
    assert_eq!(listed(&["--tag", "rare"]), [-3, -2, -1]);
    assert_eq!(listed(&["--tag", "rare", "--limit", "2"]), [-3, -2]);
    assert_eq!(listed(&["--name", "Orchid", "--since", "1h"]), [-3, -2, -1]);
    assert_eq!(listed(&["--name", "Orchid", "--since", "1ms"]), [0; 0]);
    assert_eq!(
        listed(&["--name", "Fern 17", "--limit", "2"]),
        [17_999, 17_998]
    );
    let all = listed(&["--name", "7", "--limit", "1000000"]);
    let expected: Vec<_> = (1..=30_000)
        .rev()
        .filter(|id: &i64| id.to_string().contains('7'))
        .collect();
    assert_eq!(all, expected);
    let few = listed(&["--name", "77", "--limit", "1000000"]);
    let expected: Vec<_> = (1..=30_000)
        .rev()
        .filter(|id: &i64| id.to_string().contains("77"))
        .collect();
    assert_eq!(few, expected);
    // All have the same time: pages end within it.
    let mut seen = HashSet::new();
    let mut before = "9999-01-01T00:00:00Z/0/9223372036854775807".to_owned();
    for _ in 0..5 {
        let arguments = ["list", "--limit", "7000", "--cursor", &before, "--json"];
        let output = run(server.directory(), &arguments);
        let page = String::from_utf8(output.stdout).expect("UTF-8");
        for line in page.lines() {
            let line: Value = serde_json::from_str(line).expect("JSON");
            assert!(seen.insert(line["id"].as_i64()));
        }
        let hint = String::from_utf8(output.stderr).expect("UTF-8");
        if let Some((_, place)) = hint.trim().split_once("--cursor ") {
            place.clone_into(&mut before);
        }
    }
    assert_eq!(seen.len(), 30_004);
}

#[test]
fn control_characters_are_escaped_in_tables() {
    let server = Server::start();
    let bodies = [
        r#"{"id":1,"name":"two\nlines\r\n","tag":"\t"}"#,
        r#"{"id":2,"name":"\u0000\u001b[31mred\u001b]0;title\u0007\u009b1m\u007f"}"#,
        r#"{"id":3,"name":"\u202enref\u2066\u2028\u200f","tag":"\u001b[2J"}"#,
        r#"{"id":4,"name":"シダ","tag":"森"}"#,
    ];
    for body in bodies {
        server.add_ok(body);
    }
    let table = run_ok(server.directory(), &["list"]);
    let rows: Vec<_> = table.lines().collect();
    assert_eq!(rows.len(), 5, "{table}");
    assert!(rows[4].contains(r"two\nlines\r\n"), "{table}");
    assert!(rows[3].contains(r"\0\u{1b}[31mred"), "{table}");
    assert!(rows[2].contains(r"\u{202e}nref\u{2066}"), "{table}");
    let mut shown = table.clone();
    for id in ["1", "2", "3", "4"] {
        shown += &run_ok(server.directory(), &["get", id]);
    }
    shown += &run_ok(server.directory(), &["stats"]);
    let breaks =
        |c: char| (c.is_control() && c != '\n') || "\u{202e}\u{2066}\u{2028}\u{200f}".contains(c);
    assert!(!shown.contains(breaks), "{shown}");
    // Wide characters take two columns: the tags are aligned.
    let column = |row: &str, text: &str| -> usize {
        let before = row.split(text).next().expect("a part");
        before
            .chars()
            .map(|c| if c < '\u{3000}' { 1 } else { 2 })
            .sum()
    };
    assert_eq!(column(rows[0], "TAG"), column(rows[1], "森"), "{table}");
    assert_eq!(column(rows[0], "ADDED"), column(rows[1], "20"), "{table}");
    // JSON output is not escaped.
    let lines = json_lines(server.directory(), &["list"]);
    assert_eq!(lines[3]["name"], "two\nlines\r\n");
}

#[test]
fn rows_are_cut_to_the_width_of_a_terminal_only() {
    let server = Server::start();
    let (long, wide) = ("x".repeat(300), "森".repeat(300));
    server.add_ok(format!(r#"{{"id":1,"name":"{long}"}}"#));
    server.add_ok(format!(r#"{{"id":2,"name":"{wide}","tag":"{wide}"}}"#));
    let seen = |columns: u16, command: &str| {
        let plain = plantstore(server.directory());
        let program = plain.get_program().display();
        let script = format!("stty cols {columns}; '{program}' {command}");
        let mut on_terminal = Command::new("script");
        for (name, value) in plain.get_envs() {
            if let Some(value) = value {
                on_terminal.env(name, value);
            }
        }
        on_terminal
            .args(["-qec", &script, "/dev/null"])
            .current_dir(server.directory())
            .stdin(Stdio::null());
        let output = on_terminal.output().expect("script runs");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    for columns in [80_u16, 120] {
        let table = seen(columns, "list");
        for row in table.lines() {
            let width: usize = row
                .trim_end()
                .chars()
                .map(|c| if c < '\u{3000}' { 1 } else { 2 })
                .sum();
            assert!(width <= columns.into(), "{width} in {columns}: {table}");
        }
        assert_eq!(table.matches('…').count(), 3, "{table}");
    }
    let stats = seen(80, "stats");
    assert!(
        stats.contains("  2      ████") && stats.contains("KiB"),
        "{stats}"
    );
    let table = run_ok(server.directory(), &["list"]);
    assert!(table.contains(&long) && table.contains(&wide), "{table}");
}

#[test]
fn get_shows_a_plant_with_its_token_and_time() {
    let server = Server::start();
    server.add_ok(r#"{"id":-9223372036854775808,"name":"Monstera","tag":"indoor"}"#);
    server.add_ok(r#"{"id":5,"name":"Fern"}"#);
    let shown = run_ok(server.directory(), &["get", "-9223372036854775808"]);
    let lines: Vec<_> = shown.lines().collect();
    assert_eq!(
        lines[..3],
        [
            "id        -9223372036854775808",
            "name      Monstera",
            "tag       indoor"
        ]
    );
    assert!(
        lines[3].starts_with("added at  20") && lines[3].ends_with(" UTC"),
        "{shown}"
    );
    assert_eq!(lines[4..], ["added by  first"]);
    let after = run_ok(server.directory(), &["get", "--", "-9223372036854775808"]);
    assert_eq!(after, shown);
    let fern = &json_lines(server.directory(), &["get", "5"])[0];
    assert_eq!(
        *fern,
        json!({"id": 5, "name": "Fern", "added_at": fern["added_at"], "added_by": "first"})
    );

    let said = failure(server.directory(), &["get", "6"]);
    assert_eq!(said, "plantstore: there is no plant with the id 6\n");
    for id in ["x", "1.5", "9223372036854775808", ""] {
        assert_eq!(
            run(server.directory(), &["get", id]).status.code(),
            Some(2),
            "{id}"
        );
    }
}

#[test]
fn statistics_count_plants_by_tag_and_by_day() {
    let server = Server::start();
    run_ok(server.directory(), &["token", "create", "ci"]);
    server.token();
    let stats = || json_lines(server.directory(), &["stats"]).remove(0);
    let empty = stats();
    assert_eq!(empty["plants"], 0);
    assert_eq!(empty["tags"], json!([]));
    assert_eq!(empty["tokens"], 2);

    let mut id = 0;
    for (tag, plants) in [("indoor", 4), ("\u{0}", 3), ("", 2)] {
        for _ in 0..plants {
            id += 1;
            server.add_ok(json!({"id": id, "name": "x", "tag": tag}).to_string());
        }
    }
    for number in 0..9 {
        id += 1;
        server.add_ok(json!({"id": id, "name": "x", "tag": format!("t{number}")}).to_string());
    }
    server.add_ok(r#"{"id":100,"name":"x"}"#);
    let found = stats();
    assert_eq!(found["plants"], 19);
    assert_eq!(found["untagged"], 1);
    let tags = found["tags"].as_array().expect("tags");
    assert_eq!(tags.len(), 10);
    assert_eq!(
        tags[..3],
        [
            json!({"tag": "indoor", "plants": 4}),
            json!({"tag": "\u{0}", "plants": 3}),
            json!({"tag": "", "plants": 2})
        ]
    );
    assert_eq!(found["other_tags"], 2);
    let days = found["days"].as_array().expect("days");
    assert_eq!(days.len(), 14);
    let added: u64 = days
        .iter()
        .map(|day| day["added"].as_u64().expect("a number"))
        .sum();
    assert_eq!(added, 19);
    assert!(found["database_bytes"].as_u64().expect("a size") > 4096);
    assert_eq!(found["wal_bytes"].is_u64(), !postgres::is_under_test());

    let text = run_ok(server.directory(), &["stats"]);
    assert!(
        text.starts_with("plants    19\nuntagged  1\ntokens    2\n"),
        "{text}"
    );
    assert!(
        text.contains("\nTAG     PLANTS\nindoor  4\n\\0      3\n"),
        "{text}"
    );
    assert!(text.contains("\nother tags: 2\n"), "{text}");
    assert!(text.contains("\nDAY         ADDED\n20"), "{text}");
    assert!(!text.contains('█'), "{text}");
}

#[test]
fn a_damaged_plant_is_reported_and_not_shown() {
    if postgres::is_under_test() {
        return; // which has checksums of its own
    }
    let server = Server::start();
    server.add_ok(r#"{"id":7,"name":"Monstera","tag":"indoor"}"#);
    server.add_ok(r#"{"id":8,"name":"Fern","tag":"wild"}"#);
    let sql = "UPDATE plants SET name = 'Monstero' WHERE id = 7";
    open(server.directory()).execute(sql, []).expect("SQL");

    for filter in [&[][..], &["--name", "n"]] {
        let output = run(server.directory(), &[&["list"], filter].concat());
        assert_eq!(output.status.code(), Some(1));
        let table = String::from_utf8(output.stdout).expect("UTF-8");
        assert!(
            table.contains("Fern") && !table.contains("Monster"),
            "{table}"
        );
        let said = String::from_utf8(output.stderr).expect("UTF-8");
        assert_eq!(
            said,
            "plant 7: damaged\nplantstore: the store is damaged; run `plantstore check`\n"
        );
    }
    let said = failure(server.directory(), &["get", "7"]);
    assert!(said.starts_with("plant 7: damaged\n"), "{said}");
    run_ok(server.directory(), &["get", "8"]);
    let said = failure(server.directory(), &["stats"]);
    assert!(
        said.contains("1 damaged plant found; run `plantstore check`"),
        "{said}"
    );

    // A damaged plant counts towards the page, so that a store of only damaged plants has an end.
    server.add_ok(r#"{"id":9,"name":"Ivy"}"#);
    let sql = "UPDATE plants SET tag = 'x' WHERE id = 9";
    open(server.directory()).execute(sql, []).expect("SQL");
    let output = run(server.directory(), &["list", "--limit", "1"]);
    assert_eq!(
        output.stdout.iter().filter(|byte| **byte == b'\n').count(),
        1
    );
    let said = String::from_utf8(output.stderr).expect("UTF-8");
    assert!(said.starts_with("plant 9: damaged\nmore: "), "{said}");
    assert_eq!(said.lines().count(), 3, "{said}");

    let sql = "PRAGMA foreign_keys = OFF; DELETE FROM tokens";
    open(server.directory()).execute_batch(sql).expect("SQL");
    let said = failure(server.directory(), &["get", "8"]);
    assert!(
        said.contains("plant 8: added by token 1, which does not exist"),
        "{said}"
    );
}

#[test]
fn a_closed_pipe_is_not_an_error() {
    let server = Server::start();
    server.token();
    grow(server.directory(), 10_000);
    for format in [&[][..], &["--json"]] {
        let mut command = plantstore(server.directory());
        command.args(["list", "--limit", "10000"]).args(format);
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        let mut first = String::new();
        let mut stdout = BufReader::new(child.stdout.take().expect("a pipe"));
        stdout.read_line(&mut first).expect("a line");
        drop(stdout);
        assert!(!first.is_empty());
        let mut said = String::new();
        let mut stderr = child.stderr.take().expect("a pipe");
        std::io::Read::read_to_string(&mut stderr, &mut said).expect("UTF-8");
        assert_eq!(said, "");
        assert!(wait_for_exit(&mut child).success());
    }
}

#[test]
fn invalid_arguments_are_usage_errors_and_create_no_store() {
    let directory = directory();
    for arguments in [
        &["list", "--limit", "0"][..],
        &["list", "--limit", "-1"],
        &["list", "--since", "soon"],
        &["list", "--since", ""],
        &["list", "--cursor", "x/y"],
        &["list", "--cursor", "2026-11-15"],
        &["list", "--cursor", "2026-11-15T12:00:00Z/"],
        &["get"],
        &["stats", "now"],
    ] {
        let output = run(directory.path(), arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
    }
    for arguments in [&["list"][..], &["get", "1"], &["stats"]] {
        let said = failure(directory.path(), arguments);
        let why = ["there is no store", "does not have the tables"];
        assert!(why.iter().any(|why| said.contains(why)), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
    assert!(!directory.path().join("plantstore.db").exists());
}
