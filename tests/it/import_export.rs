//! `plantstore import` and `export`: exact, repeatable, in bounded memory, with and without a running server.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::fs;
use std::io::{Read, Write as _};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use crate::harness::{
    Server, added_within_a_minute, directory, plants, plantstore, postgres, run, run_ok,
    wait_for_exit, wait_until,
};

/// Names and tags that are hard to preserve exactly, by id.
const ODD: &str = r#"{"id":1e3,"name":"\u0000\"a\", b; 'c'\t","tag":""}
{"id":-9223372036854775808,"name":"\ufeffx\r\ny\rz\n","tag":"\u001a0 \uD83C\uDF35"}
{"id":9223372036854775807,"name":""}
{"id":-1,"name":" e\u0301 \u202e","tag":"null"}
"#;

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// Standard error, without the line that reports a new store.
fn stderr_of(output: &Output) -> String {
    let stderr = text(&output.stderr);
    let created = stderr
        .split_once('\n')
        .filter(|(first, _)| first.starts_with("created the store "));
    created.map_or(stderr.clone(), |(_, rest)| rest.to_owned())
}

/// Imports this text; returns the output.
fn import(directory: &Path, name: &str, content: impl AsRef<[u8]>, flags: &[&str]) -> Output {
    fs::write(directory.join(name), content).expect("a file");
    run(directory, &[&["import", name], flags].concat())
}

fn import_ok(directory: &Path, name: &str, content: impl AsRef<[u8]>) -> String {
    let output = import(directory, name, content, &[]);
    assert!(output.status.success(), "{output:?}");
    text(&output.stdout)
}

fn many(ids: std::ops::Range<i64>) -> String {
    let mut lines = String::new();
    for id in ids {
        let _ = writeln!(lines, r#"{{"id":{id},"name":"plant {id}","tag":"many"}}"#);
    }
    lines
}

/// A command with pipes for all its streams.
fn piped(directory: &Path, arguments: &[&str]) -> Child {
    let mut command = plantstore(directory);
    let pipes = command.args(arguments).stdin(Stdio::piped());
    let child = pipes.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    child.expect("it starts")
}

/// The peak resident memory of a process so far.
fn peak_kib(child: &Child) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).expect("it runs");
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let peak = peak.expect("a peak").trim().trim_end_matches(" kB");
    peak.parse().expect("a number")
}

#[test]
fn an_export_imported_elsewhere_is_the_same_to_the_byte() {
    let here = directory();
    assert_eq!(
        import_ok(here.path(), "odd.ndjson", ODD),
        "added 4, replayed 0, conflict 0, invalid 0\n"
    );
    for name in ["a.ndjson", "a.csv"] {
        run_ok(here.path(), &["export", name]);
        let exported = fs::read(here.path().join(name)).expect("a file");
        let there = directory();
        import_ok(there.path(), name, &exported);
        assert_eq!(plants(there.path()), plants(here.path()), "{name}");
        let format = name.rsplit('.').next().expect("an ending");
        let again = run(there.path(), &["export", "--format", format]);
        assert_eq!(again.stdout, exported, "{name}");
    }
    let first = r#"{"id":-9223372036854775808,"name":""#;
    assert!(run_ok(here.path(), &["export"]).starts_with(first));
}

#[test]
fn a_second_import_reports_replays() {
    let directory = directory();
    for expected in [
        "added 10000, replayed 0, conflict 0, invalid 0\n",
        "added 0, replayed 10000, conflict 0, invalid 0\n",
    ] {
        assert_eq!(
            import_ok(directory.path(), "a.ndjson", many(0..10_000)),
            expected
        );
    }
    assert_eq!(plants(directory.path()).len(), 10_000);
}

const FAULTY: &str = "id,name,tag
1,Rose,
,Tulip,
2,Lily,
1,Carnation,
2,Lily,
x,,
3,Iris,\r
";

#[test]
fn problems_are_reported_by_line_and_the_rest_is_stored() {
    let directory = directory();
    let output = import(directory.path(), "a.csv", FAULTY, &[]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        text(&output.stdout),
        "added 3, replayed 1, conflict 1, invalid 2\n"
    );
    assert_eq!(
        stderr_of(&output),
        "line 3: id: missing
line 5: id: belongs to a different plant
line 7: id: expected an integer, found text; name: missing
plantstore: 3 plants rejected; correct the input and run the command again\n"
    );
    let names: Vec<_> = plants(directory.path())
        .into_iter()
        .map(|(id, name, _)| (id, name))
        .collect();
    let expected = [(1, "Rose"), (2, "Lily"), (3, "Iris")];
    assert_eq!(names, expected.map(|(id, name)| (id, name.to_owned())));
}

#[test]
fn a_shifted_row_is_not_stored_as_another_plant() {
    let directory = directory();
    let file = "id,stock,name,tag,price\n\
                100,5,Fern,,9.99,\n\
                101,5,Ivy,,9.99\n\
                102,5,Rose,\n";
    let output = import(directory.path(), "a.csv", file, &[]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        text(&output.stdout),
        "added 1, replayed 0, conflict 0, invalid 2\n"
    );
    assert_eq!(
        stderr_of(&output),
        "line 2: 6 cells, and the header has 5; quote a cell that contains a separator
line 4: 4 cells, and the header has 5; a cell may be empty, but not left out
plantstore: 2 plants rejected; correct the input and run the command again\n"
    );
    assert_eq!(plants(directory.path()), [(101, "Ivy".to_owned(), None)]);
}

/// Lines 3 to 7 are one row because of the quote in line 3.
const STRAY_QUOTE: &str = "id,name,tag
1,Rose,
2,\"Tulip,
3,Lily,
4,Iris,
5,Aster,
6,\"Fern\",shade
7,Ivy,
";

#[test]
fn a_stray_quote_is_reported_with_the_lines_that_it_swallows() {
    let directory = directory();
    let output = import(directory.path(), "a.csv", STRAY_QUOTE, &[]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        text(&output.stdout),
        "added 2, replayed 0, conflict 0, invalid 5\n"
    );
    let said = stderr_of(&output);
    assert!(
        said.starts_with("lines 3-7: a cell continues after"),
        "{said}"
    );
    assert!(said.contains("5 plants rejected"), "{said}");

    let open = STRAY_QUOTE.replace("\"Fern\"", "Fern");
    let output = import(directory.path(), "a.csv", open, &[]);
    assert_eq!(
        text(&output.stdout),
        "added 0, replayed 1, conflict 0, invalid 6\n"
    );
    let said = stderr_of(&output);
    let expected = "lines 3-8: the quote opened in line 3 is never closed\n";
    assert!(said.starts_with(expected), "{said}");
}

#[test]
fn rejected_rows_can_be_corrected_and_imported() {
    let invalid = "{\"id\":1,\"name\":\"Rose\"}\n{\"id\":2}\n{\"id\":3,\"name\":\"Li\n\n{\"id\":1,\"name\":\"Ivy\"}";
    for (name, content, corrections, added) in [
        (
            "a.csv",
            FAULTY,
            &[
                ("\n,Tulip", "\n4,Tulip"),
                ("\n1,Car", "\n5,Car"),
                ("\nx,", "\n6,y"),
            ][..],
            3,
        ),
        ("quote.csv", STRAY_QUOTE, &[("\"Tulip", "Tulip")], 5),
        (
            "a.ndjson",
            invalid,
            &[
                ("2}", "2,\"name\":\"Tulip\"}"),
                ("Li", "Lily\"}"),
                ("{\"id\":1", "{\"id\":5"),
            ],
            3,
        ),
    ] {
        let directory = directory();
        let place = directory.path();
        let rejects = format!("rejects-{name}");
        let output = import(place, name, content, &["--rejects", &rejects]);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let said = stderr_of(&output);
        let expected =
            format!("rejected; correct {rejects} and run `plantstore import {rejects}`\n");
        assert!(said.ends_with(&expected), "{said}");
        let path = place.join(&rejects);
        assert_eq!(
            fs::metadata(&path).expect("a file").permissions().mode() & 0o777,
            0o600
        );
        let mut rejected = fs::read_to_string(&path).expect("a file");
        let reported = said.lines().filter(|line| line.starts_with("line")).count();
        let reasons = rejected
            .lines()
            .filter(|line| line.starts_with("#plantstore: line"));
        assert_eq!(reasons.count(), reported, "{rejected}");

        // Uncorrected rows are rejected again for the same reasons.
        let stored = plants(place);
        let again = run(place, &["import", &rejects]);
        assert_eq!(again.status.code(), Some(1), "{again:?}");
        assert!(
            text(&again.stdout).starts_with("added 0, replayed 0, "),
            "{again:?}"
        );
        assert_eq!(plants(place), stored);

        for (wrong, right) in corrections {
            assert_eq!(rejected.matches(wrong).count(), 1, "{wrong}: {rejected}");
            rejected = rejected.replace(wrong, right);
        }
        let corrected = import_ok(place, &rejects, rejected);
        assert_eq!(
            corrected,
            format!("added {added}, replayed 0, conflict 0, invalid 0\n")
        );
        let left: Vec<_> = crate::backup::files(place);
        assert!(!left.iter().any(|name| name.ends_with("-tmp")), "{left:?}");
    }
}

#[test]
fn rejected_rows_are_complete_however_long_they_are() {
    let directory = directory();
    let place = directory.path();
    let mut all = String::from("id,name,tag\n1,\"Rose,\n");
    for id in 2..5000 {
        let _ = writeln!(all, "{id},plant {id},");
    }
    let flags = [
        "--rejects",
        "r.txt",
        "--max-body-bytes",
        "2000",
        "--format",
        "csv",
    ];
    let output = import(place, "a.csv", &all, &flags);
    assert_eq!(
        text(&output.stdout),
        "added 0, replayed 0, conflict 0, invalid 4999\n"
    );
    let said = stderr_of(&output);
    assert!(
        said.starts_with("lines 2-5000: the quote opened in line 2"),
        "{said}"
    );
    assert!(
        said.ends_with("`plantstore import --format csv r.txt`\n"),
        "{said}"
    );
    let rejected = fs::read_to_string(place.join("r.txt")).expect("a file");
    let corrected = rejected.replace('"', "");
    let output = import(place, "r.txt", corrected, &["--format", "csv"]);
    assert_eq!(
        text(&output.stdout),
        "added 4999, replayed 0, conflict 0, invalid 0\n"
    );
}

#[test]
fn a_file_for_rejected_rows_must_be_new() {
    let directory = directory();
    let place = directory.path();
    fs::write(place.join("there.csv"), "as it was").expect("a file");
    std::os::unix::fs::symlink("nowhere", place.join("link.csv")).expect("a link");
    for (rejects, code, expected) in [
        ("there.csv", 1, "there.csv already exists; choose"),
        ("a.csv", 1, "a.csv already exists; choose"),
        ("link.csv", 1, "link.csv is a symbolic link"),
        (".", 1, ". is not a regular file"),
        (
            "nowhere/r.csv",
            1,
            "cannot find the directory of nowhere/r.csv",
        ),
        ("-", 2, "expected a file"),
    ] {
        let output = import(place, "a.csv", FAULTY, &["--rejects", rejects]);
        assert_eq!(output.status.code(), Some(code), "{rejects}: {output:?}");
        assert!(stderr_of(&output).contains(expected), "{output:?}");
        assert!(output.stdout.is_empty(), "{output:?}");
    }
    assert_eq!(
        fs::read_to_string(place.join("there.csv")).expect("a file"),
        "as it was"
    );
    let store = ["--store", "sqlite:plantstore.db"];
    for own in ["plantstore.db", "plantstore.db-wal"] {
        let flags = [&["--rejects", own], &store[..]].concat();
        let output = import(place, "a.csv", FAULTY, &flags);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(
            stderr_of(&output).contains("belongs to the store"),
            "{output:?}"
        );
    }
    let flags = ["--rejects", "r.csv", "--strict"];
    let output = import(place, "a.csv", FAULTY, &flags);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    if !postgres::is_under_test() {
        assert!(!place.join("plantstore.db").exists());
    }

    // Without rejected rows no file is created.
    let good = "id,name\n1,Rose\n";
    assert!(
        import(place, "good.csv", good, &["--rejects", "r.csv"])
            .status
            .success()
    );
    assert!(!place.join("r.csv").exists());
    // A dry run writes the rows that would be rejected.
    let output = import(place, "a.csv", FAULTY, &["--rejects", "r.csv", "--dry-run"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(place.join("r.csv").exists());
    assert_eq!(plants(place).len(), 1);
}

#[test]
fn an_export_for_spreadsheets_has_no_formulas() {
    let directory = directory();
    let place = directory.path();
    let formulas = "{\"id\":-1,\"name\":\"=HYPERLINK(\\\"http://x\\\")\",\"tag\":\"@a\"}\n{\"id\":2,\"name\":\"Fern\"}\n";
    import_ok(place, "a.ndjson", formulas);
    let export = |flags: &[&str]| run_ok(place, &[&["export", "--format", "csv"], flags].concat());
    let exact = "id,name,tag\n-1,\"=HYPERLINK(\"\"http://x\"\")\",@a\n2,Fern,\n";
    assert_eq!(export(&[]), exact);
    let safe = exact.replace("\"=", "\"'=").replace("@a", "'@a");
    assert_eq!(export(&["--spreadsheet-safe"]), safe);
    let output = run(place, &["export", "--spreadsheet-safe"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr_of(&output).contains("--format csv"), "{output:?}");
    assert!(output.stdout.is_empty());
}

#[test]
fn a_strict_import_stores_the_plants_before_the_first_problem() {
    for (file, stored, problem) in [
        (FAULTY.to_owned(), 1, "line 3: id: missing"),
        (
            FAULTY.replace(",Tulip", "4,Tulip"),
            3,
            "line 5: id: belongs to a different plant",
        ),
    ] {
        let directory = directory();
        let output = import(directory.path(), "a.csv", &file, &["--strict"]);
        assert_eq!(output.status.code(), Some(1));
        assert_eq!(plants(directory.path()).len(), stored, "{file}");
        let expected = format!(
            "{problem}\nplantstore: stopped at the first problem (--strict); correct it and run the command again\n"
        );
        assert_eq!(stderr_of(&output), expected);
    }
    let directory = directory();
    let output = import(directory.path(), "a.ndjson", many(0..9000), &["--strict"]);
    assert!(output.status.success(), "{output:?}");
    // After the first problem it does not wait for more input.
    let mut child = piped(directory.path(), &["import", "--strict", "-"]);
    let mut input = child.stdin.take().expect("a pipe");
    input.write_all(b"{}\n").expect("it reads");
    assert_eq!(wait_for_exit(&mut child).code(), Some(1));
}

#[test]
fn after_a_hundred_problems_the_rest_is_counted() {
    let directory = directory();
    let output = import(directory.path(), "a.ndjson", "{}\n".repeat(9000), &[]);
    assert_eq!(output.status.code(), Some(1));
    let reported = stderr_of(&output);
    let reported: Vec<_> = reported.lines().collect();
    assert_eq!(reported.len(), 102);
    assert_eq!(reported[99], "line 100: id: missing; name: missing");
    assert_eq!(reported[100], "and 8900 more problems");
    assert!(
        reported[101].contains("9000 plants rejected"),
        "{}",
        reported[101]
    );
}

/// More plants than are looked up at a time.
#[test]
fn a_dry_run_compares_every_plant_with_the_stored_one() {
    let directory = directory();
    let rows = |ids: std::ops::Range<u32>, name: &str| -> String {
        let rows: Vec<_> = ids.map(|id| format!("{id},{name}\n")).collect();
        rows.concat()
    };
    let stored = rows(0..250, "Fern");
    import_ok(directory.path(), "a.csv", format!("id,name\n{stored}"));
    let more = rows(100..240, "Fern") + &rows(240..250, "Ivy") + &rows(250..300, "Fern");
    let more = format!("id,name\n{more}");
    let dry = import(directory.path(), "b.csv", &more, &["--dry-run"]);
    assert_eq!(
        text(&dry.stdout),
        "dry run: added 50, replayed 140, conflict 10, invalid 0\n"
    );
    assert_eq!(plants(directory.path()).len(), 250);
}

#[test]
fn a_dry_run_reports_the_same_and_stores_nothing() {
    let directory = directory();
    let dry = import(directory.path(), "a.csv", FAULTY, &["--dry-run"]);
    let files = fs::read_dir(directory.path()).expect("a directory").count();
    assert_eq!(files, 1, "a store was made");
    import_ok(directory.path(), "b.csv", "id,name\n3,Iris\n4,Aster\n");
    let dry_online = import(directory.path(), "a.csv", FAULTY, &["--dry-run"]);
    assert_eq!(plants(directory.path()).len(), 2);
    let real = import(directory.path(), "a.csv", FAULTY, &[]);
    for (output, summary) in [
        (
            &dry,
            "dry run: added 3, replayed 1, conflict 1, invalid 2\n",
        ),
        (
            &dry_online,
            "dry run: added 2, replayed 2, conflict 1, invalid 2\n",
        ),
        (&real, "added 2, replayed 2, conflict 1, invalid 2\n"),
    ] {
        assert_eq!(text(&output.stdout), summary);
        assert_eq!(output.status.code(), Some(1));
    }
    let reported = stderr_of(&real)
        .replace("plants rejected", "plants would be rejected")
        .replace("the command again", "the command without --dry-run");
    assert_eq!(stderr_of(&dry), reported);
    assert_eq!(stderr_of(&dry_online), reported);
    let arguments = ["--dry-run", "--rejects", "rejected.csv"];
    let with_rejects = import(directory.path(), "a.csv", FAULTY, &arguments);
    assert!(
        stderr_of(&with_rejects).contains("the input and run the command without --dry-run"),
        "{with_rejects:?}"
    );
}

#[test]
fn imported_plants_belong_to_a_token_without_access() {
    let server = Server::start();
    let here = server.directory();
    server.add_ok(r#"{"id":1,"name":"x"}"#);
    import_ok(here, "a.ndjson", many(1000..1003));
    let flags = ["--token", "first"];
    assert!(
        import(here, "b.ndjson", many(2000..2001), &flags)
            .status
            .success()
    );
    let names: Vec<_> = added_within_a_minute(here)
        .into_iter()
        .map(|(_, name)| name)
        .collect();
    assert_eq!(names, ["first", "import", "import", "import", "first"]);
    let listed = run_ok(here, &["token", "list", "--json"]);
    let imported = listed.lines().find(|line| line.contains(r#""import""#));
    let imported = imported.expect("the token");
    assert!(imported.contains(r#""state":"revoked""#), "{imported}");
    assert!(!imported.contains(r#""last_used_at":null"#), "{imported}");

    let secret = server.token();
    let output = import(here, "a.ndjson", "", &["--token", &secret]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr_of(&output).contains("the name of a token"));
}

#[test]
fn the_token_of_an_import_is_revoked_from_the_start() {
    let mut killed_with_token = 0;
    for moment in 1.. {
        let directory = directory();
        fs::write(directory.path().join("a.ndjson"), many(0..3)).expect("a file");
        let store = ["--store", "sqlite:plantstore.db"];
        run_ok(directory.path(), &[&["migrate"], &store[..]].concat());
        let kill = format!("inject=fdatasync:signal=KILL:when={moment}");
        let output = import_under_strace(directory.path(), &["-e", "trace=fdatasync", "-e", &kill]);
        let list = [&["token", "list", "--json"], &store[..]].concat();
        let listed = run_ok(directory.path(), &list);
        assert!(!listed.contains("active"), "killed at {moment}: {listed}");
        if output.status.success() {
            break;
        }
        killed_with_token += listed.lines().count();
    }
    assert!(killed_with_token > 0);
}

#[test]
fn an_import_that_was_killed_can_be_run_again() {
    let directory = directory();
    let all = many(0..40_000);
    fs::write(directory.path().join("all.ndjson"), &all).expect("a file");
    run_ok(directory.path(), &["migrate"]);
    let mut child = piped(directory.path(), &["import", "-"]);
    let mut input = child.stdin.take().expect("a pipe");
    input
        .write_all(&all.as_bytes()[..all.len() / 2])
        .expect("it reads");
    wait_until("some are stored", || plants(directory.path()).len() > 5_000);
    child.kill().expect("it runs");
    child.wait().expect("a child");
    drop(input);
    let stored = plants(directory.path()).len();
    assert!(stored < 40_000);
    let again = run_ok(directory.path(), &["import", "all.ndjson"]);
    let expected = format!(
        "added {}, replayed {stored}, conflict 0, invalid 0\n",
        40_000 - stored
    );
    assert_eq!(again, expected);
    assert_eq!(run_ok(directory.path(), &["export"]), all);
    run_ok(directory.path(), &["check"]);
}

#[test]
fn memory_does_not_grow_with_the_number_of_plants() {
    // Two thirds of the size of the plants: the memory of a batch varies between stores and runs.
    const PEAK_KIB_MAX: u64 = 96 << 10;
    const PLANTS: usize = 1500;
    let directory = directory();
    let mut child = piped(directory.path(), &["import", "-"]);
    let mut input = child.stdin.take().expect("a pipe");
    let name = "x".repeat(100_000);
    let mut line = |id: usize| writeln!(input, r#"{{"id":{id},"name":"{name}"}}"#);
    (0..PLANTS).try_for_each(&mut line).expect("it reads");
    let peak = peak_kib(&child);
    drop(input);
    assert!(wait_for_exit(&mut child).success());
    assert!(peak < PEAK_KIB_MAX, "{peak} KiB");

    let mut child = piped(directory.path(), &["export"]);
    let mut output = child.stdout.take().expect("a pipe");
    let mut most = vec![0; PLANTS * name.len() - 1_000_000];
    output.read_exact(&mut most).expect("an export");
    let peak = peak_kib(&child);
    drop(most);
    let rest = std::io::copy(&mut output, &mut std::io::sink()).expect("an export");
    assert!(rest > 1_000_000);
    assert!(wait_for_exit(&mut child).success());
    assert!(peak < PEAK_KIB_MAX, "{peak} KiB");
}

#[test]
fn an_export_is_a_snapshot_and_does_not_block_adds() {
    let server = Server::start();
    let here = server.directory();
    import_ok(here, "a.ndjson", many(0..20_000));
    let mut child = piped(here, &["export"]);
    let mut output = child.stdout.take().expect("a pipe");
    let mut exported = vec![0];
    output
        .read_exact(&mut exported)
        .expect("the export has started");
    // The rest of the export is larger than the buffer of a pipe; plants are added before and after the exported ids.
    let name = "x".repeat(100_000);
    let token = server.token();
    let mut client = server.connect();
    for id in 0..300 {
        let id = if id % 2 == 0 { -1 - id } else { 1_000_000 + id };
        let body = format!(r#"{{"id":{id},"name":"{name}"}}"#);
        assert_eq!(client.add(&token, body.as_bytes()).status, 200);
    }
    if !postgres::is_under_test() {
        let log = fs::metadata(here.join("plantstore.db-wal")).expect("a log");
        assert!(log.len() < 12 << 20, "{} bytes", log.len());
    }
    output.read_to_end(&mut exported).expect("the rest");
    assert!(wait_for_exit(&mut child).success());
    assert_eq!(text(&exported), many(0..20_000));
}

#[test]
fn an_import_leaves_a_running_server_its_share() {
    let server = Server::start();
    let here = server.directory();
    server.add_ok(r#"{"id":7,"name":"first come"}"#);
    fs::write(here.join("a.ndjson"), many(0..30_000)).expect("a file");
    let mut child = piped(here, &["import", "a.ndjson"]);
    let token = server.token();
    let mut client = server.connect();
    let mut added = 0;
    while child.try_wait().expect("a child").is_none() || added < 10 {
        let body = format!(r#"{{"id":{},"name":"x"}}"#, 1_000_000 + added);
        assert_eq!(client.add(&token, body.as_bytes()).status, 200);
        added += 1;
    }
    let output = child.wait_with_output().expect("a child");
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr_of(&output).starts_with("line 8: id: belongs to a different plant\n"));
    assert_eq!(
        text(&output.stdout),
        "added 29999, replayed 0, conflict 1, invalid 0\n"
    );
    assert_eq!(plants(here).len(), 30_000 + added);
    if !postgres::is_under_test() {
        let log = fs::metadata(here.join("plantstore.db-wal")).expect("a log");
        assert!(log.len() < 16 << 20, "{} bytes", log.len());
    }
}

#[test]
fn an_exported_file_is_complete_or_absent() {
    let directory = directory();
    import_ok(directory.path(), "a.ndjson", many(0..20_000));
    let place = directory.path().join("out.ndjson");
    let parts = || {
        let names = fs::read_dir(directory.path()).expect("a directory");
        let names = names.map(|entry| entry.expect("an entry").file_name());
        let part = |name: &std::ffi::OsString| name.to_string_lossy().ends_with(".plantstore-tmp");
        names.filter(part).count()
    };
    fs::write(&place, "as it was").expect("a file");
    // Into a full pipe, so that the export does not finish.
    let fifo = directory.path().join("fifo");
    assert!(
        Command::new("mkfifo")
            .arg(&fifo)
            .status()
            .expect("mkfifo")
            .success()
    );
    let failed = run(directory.path(), &["export", "nowhere/out.ndjson"]);
    assert_eq!(failed.status.code(), Some(1));
    assert!(stderr_of(&failed).contains("cannot find the directory of nowhere/out.ndjson"));
    assert_eq!(
        run(directory.path(), &["export", "."]).status.code(),
        Some(1)
    );
    assert_eq!(fs::read_to_string(&place).expect("a file"), "as it was");

    let output = run(directory.path(), &["export", "out.ndjson"]);
    assert!(output.status.success() && output.stdout.is_empty());
    assert_eq!(stderr_of(&output), "exported 20000 plants\n");
    assert_eq!(fs::read_to_string(&place).expect("a file"), many(0..20_000));
    let mode = fs::metadata(&place).expect("a file").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(parts(), 0);

    // A special file is not replaced.
    let mut child = piped(directory.path(), &["export", "fifo"]);
    let exported = fs::read_to_string(&fifo).expect("a pipe");
    assert!(wait_for_exit(&mut child).success());
    assert_eq!(exported, many(0..20_000));
    let still = fs::metadata(&fifo).expect("a pipe");
    assert!(!still.is_file());
}

#[test]
fn an_export_to_a_closed_pipe_is_not_an_error() {
    let directory = directory();
    import_ok(directory.path(), "a.ndjson", many(0..20_000));
    let mut child = piped(directory.path(), &["export"]);
    let mut output = child.stdout.take().expect("a pipe");
    output.read_exact(&mut [0; 10]).expect("a beginning");
    drop(output);
    let output = child.wait_with_output().expect("a child");
    assert!(output.status.success(), "{output:?}");
    assert!(output.stderr.is_empty(), "{output:?}");
}

#[test]
fn unreadable_input_is_an_error_with_a_reason() {
    let directory = directory();
    run_ok(directory.path(), &["migrate"]);
    for (arguments, code, expected) in [
        (
            &["import", "missing.csv"][..],
            1,
            "cannot read missing.csv: No such file",
        ),
        (&["import", "."], 1, "cannot read .: is a directory"),
        (&["import"], 2, "<FILE>"),
        (
            &["import", "-", "--format", "xml"],
            2,
            "possible values: ndjson, csv",
        ),
        (&["import", "-", "--token", "a b"], 2, "letters, digits"),
        (&["import", "-", "--format", "csv"], 0, ""),
    ] {
        let output = run(directory.path(), arguments);
        assert_eq!(
            output.status.code(),
            Some(code),
            "{arguments:?}: {output:?}"
        );
        assert!(stderr_of(&output).contains(expected), "{output:?}");
    }
    let output = import(directory.path(), "a.csv", "1,Rose\n", &[]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        stderr_of(&output),
        "plantstore: cannot read a.csv to the end: line 1: there is no column `id`; \
         a CSV file starts with a header such as id,name,tag\n"
    );
    let missing = run(
        directory.path(),
        &["export", "--store", "sqlite:missing.db"],
    );
    assert_eq!(missing.status.code(), Some(1));
    assert!(stderr_of(&missing).contains("there is no store"));
}

/// An import under `strace`, which can make its system calls fail.
fn import_under_strace(directory: &Path, strace: &[&str]) -> Output {
    let mut command = Command::new("strace");
    command
        .args(["-f", "-q", "-y", "-o", "strace.out"])
        .args(strace);
    command.arg(plantstore(directory).get_program());
    command.args(["import", "a.ndjson", "--store", "sqlite:plantstore.db"]);
    command
        .current_dir(directory)
        .output()
        .expect("strace runs")
}

#[test]
fn an_import_reports_nothing_after_a_failed_fsync() {
    let directory = directory();
    fs::write(directory.path().join("a.ndjson"), many(0..100)).expect("a file");
    let store = ["--store", "sqlite:plantstore.db"];
    run_ok(directory.path(), &[&["migrate"], &store[..]].concat());
    for when in ["2+", "3+", "4+"] {
        let inject = format!("inject=fdatasync:error=EIO:when={when}");
        let output =
            import_under_strace(directory.path(), &["-e", "trace=fdatasync", "-e", &inject]);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(output.stdout.is_empty(), "{output:?}");
        let trace = fs::read_to_string(directory.path().join("strace.out")).expect("a trace");
        // SQLite syncs the directory of a new WAL as well; the store has done that already.
        let of = |file: &str| trace.find(&format!("{file}>) = -1 EIO"));
        let failed = of("plantstore.db-wal").or(of("plantstore.db"));
        let failed = failed.expect("the failed sync");
        assert!(!trace[failed..].contains("sync("), "{trace}");
    }
}

#[test]
fn a_replay_is_synced_before_it_is_reported() {
    let directory = directory();
    fs::write(directory.path().join("a.ndjson"), many(0..100)).expect("a file");
    for _ in 0..2 {
        let output = import_under_strace(directory.path(), &["-e", "trace=write,fdatasync"]);
        assert!(output.status.success(), "{output:?}");
    }
    let trace = fs::read_to_string(directory.path().join("strace.out")).expect("a trace");
    let claimed = trace.find("replayed 100").expect("the summary");
    let synced = trace[..claimed]
        .lines()
        .any(|line| line.contains("fdatasync(") && line.contains("plantstore.db-wal"));
    assert!(synced, "{trace}");
}

#[test]
fn ids_are_each_exported_once() {
    let directory = directory();
    import_ok(directory.path(), "a.ndjson", many(-3000..3000));
    let exported = run_ok(directory.path(), &["export", "--format", "csv"]);
    let ids: HashSet<_> = exported
        .lines()
        .skip(1)
        .map(|line| line.split(',').next().expect("an id"))
        .collect();
    assert_eq!((ids.len(), exported.lines().count()), (6000, 6001));
}
