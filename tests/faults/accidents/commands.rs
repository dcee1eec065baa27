//! Mistakes on the command line: colliding tokens of two stores, output that cannot be written, misplaced passwords, malformed
//! CSV files, and a wrong clock.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use rusqlite::Connection;

use crate::accidents::{Case, Ran, Row};
use crate::harness::clock::Clock;
use crate::harness::{Server, plantstore};

pub fn rows() -> Vec<Row> {
    vec![
        Row::new(
            "copy between stores whose tokens collide",
            "tokens with the same name, with the same id, and with both; `copy` twice; source and target the same store",
            "every plant keeps the token that added it, or the copy fails before the first plant",
        )
        .case("same name and id", |case| copy_tokens(case, &["first"]))
        .case("same name", |case| copy_tokens(case, &["zero", "first"]))
        .case("same id", |case| copy_tokens(case, &["theirs"]))
        .case("same store", copy_to_itself),
        Row::new(
            "token whose output is lost",
            "`token create > /dev/full`, into a closed pipe, with standard output closed",
            "fails; there is no usable token and its name is free",
        )
        .case("/dev/full", |case| {
            let ran = case.shell("\"$0\" \"$@\" > /dev/full", &["token", "create", "app"]);
            token_is_free(case, &ran);
        })
        .case("closed output", |case| {
            let ran = case.shell("\"$0\" \"$@\" >&-", &["token", "create", "app"]);
            token_is_free(case, &ran);
        })
        .case("closed pipe", |case| {
            let (reader, writer) = std::io::pipe().expect("a pipe");
            drop(reader);
            let mut command = plantstore(case.dir());
            command.args(["token", "create", "app"]).stdout(writer);
            let code = command.status().expect("it runs").code();
            let said = "plantstore: ".to_owned();
            token_is_free(case, &Ran { code, said });
        }),
        Row::new(
            "output that cannot be written",
            "`export`, `list`, `token list`, `stats`, `check`, `man` and `openapi` to `/dev/full`; `backup -`",
            "fails; no file named `-` is made",
        )
        .case("/dev/full", full_output)
        .case("backup -", backup_to_stdout),
        Row::new(
            "password in a wrong place",
            "a PostgreSQL URL as an argument, as another option, as a file name, in the environment and in the configuration file",
            "fails; the password is not printed",
        )
        .case("usage errors", passwords),
        Row::new(
            "CSV that is not what it seems",
            "a stray quote; rows with more or fewer cells than the header; rejected rows corrected and imported again; names that a spreadsheet would evaluate",
            "every row is stored as it is or reported by its line; no row is stored as another plant",
        )
        .case("stray quote", stray_quote)
        .case("shifted rows", shifted_rows)
        .case("rejects", rejects)
        .case("formulas", formulas),
        Row::new(
            "damaged backup",
            "a backup with changed bytes; `check`, `restore`, `restore --force`",
            "fails, advises another backup, and the store is not changed",
        )
        .case("check and restore", damaged_backup),
        Row::new(
            "clock far ahead",
            "one add with the clock 50 years ahead, then the right time; libfaketime",
            "the jump is logged; later plants have the right time and stay in order",
        )
        .case("50 years", clock_ahead),
    ]
}

/// The digest of the token that added each plant.
pub fn adders(database: &Path) -> BTreeMap<i64, Vec<u8>> {
    let store = Connection::open(database).expect("a database");
    let sql = "SELECT p.id, t.digest FROM plants p LEFT JOIN tokens t ON t.id = p.added_by";
    let mut select = store.prepare(sql).expect("SQL");
    let rows = select.query_map([], |row| Ok((row.get(0)?, row.get(1).unwrap_or_default())));
    rows.expect("rows").map(|row| row.expect("a row")).collect()
}

/// The target has these tokens; the last one has added plants.
fn copy_tokens(case: &mut Case, tokens: &[&str]) {
    case.stopped();
    fs::write(case.path("more.csv"), "id,name\n1,Fern\n2,Ivy\n").expect("a file");
    let store = ["--store", "sqlite:other.db"];
    for name in tokens {
        case.succeeds(&[&["token", "create", name], &store[..]].concat());
    }
    let last = tokens.last().expect("a token");
    case.succeeds(&[&["import", "more.csv", "--token", last], &store[..]].concat());
    let (ours, theirs) = (
        adders(&case.path("plantstore.db")),
        adders(&case.path("other.db")),
    );
    for _ in 0..2 {
        case.count += 1;
        let ran = case.run(&["copy", "--to", "sqlite:other.db"]);
        let now = adders(&case.path("other.db"));
        let is_right =
            |(id, adder): (&i64, &Vec<u8>)| ours.get(id).or_else(|| theirs.get(id)) == Some(adder);
        let silent = if ran.code == Some(0) {
            "silent"
        } else {
            "wrong"
        };
        case.expect(
            now.iter().all(is_right),
            silent,
            "a plant has a wrong adder",
        );
        if ran.code == Some(0) {
            let all = ours.len() + theirs.len();
            case.expect(now.len() == all, "silent", "plants are missing");
        } else {
            case.expect_failure("copy", &ran, &["token"]);
            case.expect(
                now == theirs,
                "wrong",
                "the copy that failed has added plants",
            );
        }
    }
    case.complete(&case.path("plantstore.db"));
}

fn copy_to_itself(case: &mut Case) {
    case.stopped();
    let _ = case.run(&["copy", "--to", "sqlite:./plantstore.db"]);
    case.serves_all();
}

fn token_is_free(case: &mut Case, failed: &Ran) {
    case.expect_failure("token create", failed, &[]);
    let listed = case.run(&["token", "list", "--json"]).said;
    let is_active = listed.contains("\"app\"") && listed.contains("\"active\"");
    case.expect(!is_active, "silent", format!("an unknown token: {listed}"));
    case.succeeds(&["token", "create", "app"]);
}

fn full_output(case: &mut Case) {
    case.stopped();
    for arguments in [
        &["export"][..],
        &["export", "--format", "csv"],
        &["export", "/dev/full"],
        &["list"],
        &["list", "--json"],
        &["token", "list"],
        &["stats"],
        &["man"],
        &["openapi"],
        &["check"],
    ] {
        case.count += 1;
        let ran = case.shell("\"$0\" \"$@\" > /dev/full", arguments);
        case.expect_failure(&format!("{arguments:?}"), &ran, &[]);
    }
    case.complete(&case.path("plantstore.db"));
}

fn backup_to_stdout(case: &mut Case) {
    case.stopped();
    let ran = case.shell("\"$0\" \"$@\" > piped.db", &["backup", "-"]);
    case.expect(!case.path("-").exists(), "wrong", "a file named `-`");
    if ran.code == Some(0) {
        case.complete(&case.path("piped.db"));
    } else {
        case.expect_failure("backup -", &ran, &["-"]);
    }
}

fn passwords(case: &mut Case) {
    let url = "postgres://user:geheim@127.0.0.1:1/db";
    let assignment = format!("store = \"{url}\"\nlisten = \"{url}\"\n");
    fs::write(case.path("settings.toml"), assignment).expect("a file");
    fs::write(case.path("broken.toml"), format!("store = {url}\n")).expect("a file");
    let store = format!("--store={url}");
    let nowhere = format!("--listen={url}");
    for arguments in [
        &["serve", url][..],
        &["serve", &nowhere],
        &["serve", "--listen", url],
        &["serve", "--stroe", url],
        &["serve", &format!("--stroe={url}")],
        &["serve", &store, url],
        &["serve", "--max-queue", url],
        &["serve", "--log-level", url],
        &["serve", "--drain-timeout", url],
        &["serve", "--config", url],
        &["serve", "--config", "settings.toml"],
        &["serve", "--config", "broken.toml"],
        &["token", "create", url],
        &["token", "create", "app", "--rate-limit", url],
        &["token", "revoke", url],
        &["list", url],
        &["list", "--since", url],
        &["list", &store],
        &["get", url],
        &["stats", url],
        &["export", url],
        &["export", "--format", url],
        &["import", url],
        &["backup", url],
        &["restore", url],
        &["check", url],
        &["copy", url],
        &["copy", "--to", "postgres://user:geheim@[/db"],
        &["migrate", url],
        &["man", url],
        &["completions", url],
        &[url],
    ] {
        case.count += 1;
        let ran = case.run(arguments);
        case.expect(
            ran.code != Some(0),
            "silent",
            format!("{arguments:?} succeeds"),
        );
        let is_printed = ran.said.contains("geheim");
        case.expect(
            !is_printed,
            "wrong",
            format!("a password is printed: {}", ran.said),
        );
    }
    for variable in [
        "PLANTSTORE_LISTEN",
        "PLANTSTORE_OPS_LISTEN",
        "PLANTSTORE_MAX_QUEUE",
    ] {
        case.count += 1;
        let ran = case.shell(&format!("{variable}={url} exec \"$0\" \"$@\""), &["serve"]);
        case.expect(
            ran.code != Some(0),
            "silent",
            format!("{variable} is accepted"),
        );
        let is_printed = ran.said.contains("geheim");
        case.expect(
            !is_printed,
            "wrong",
            format!("a password is printed: {}", ran.said),
        );
    }
}

fn stray_quote(case: &mut Case) {
    case.stopped();
    let rows = "id,name\n1,Fern\n2,\"Ivy\n3,Rose\n4,Palm\n5,\"Moss\"\n6,Oak\n";
    fs::write(case.path("rows.csv"), rows).expect("a file");
    let ran = case.run(&["import", "--rejects", "rejects.csv", "rows.csv"]);
    case.expect(ran.code != Some(0), "silent", "rows are swallowed");
    // The quote opens in line 3; the next stored row shows where it ends.
    let has_lines = ["3", "6"].iter().all(|line| ran.said.contains(line));
    case.expect(
        has_lines,
        "wrong",
        format!("no lines are named: {}", ran.said),
    );
    let stored = case.run(&["export"]).said;
    for (id, name) in [(2, "Ivy"), (3, "Rose"), (4, "Palm"), (5, "Moss")] {
        let is_stored = stored.contains(&format!("{{\"id\":{id},\"name\":\"{name}"));
        let rejects = fs::read_to_string(case.path("rejects.csv")).unwrap_or_default();
        let is_reported = rejects.contains(name);
        case.expect(
            is_stored || is_reported,
            "silent",
            format!("{name} is in no file"),
        );
    }
}

fn shifted_rows(case: &mut Case) {
    case.stopped();
    for row in [
        "100,5,Fern,,9.99,",
        "100,5,Fern,9.99",
        "5,Fern,,9.99",
        ",100,5,Fern,,9.99",
    ] {
        case.count += 1;
        let rows = format!("sku,id,name,tag,price\n{row}\n");
        fs::write(case.path("rows.csv"), rows).expect("a file");
        let ran = case.run(&["import", "--rejects", "rejects.csv", "rows.csv"]);
        case.expect(
            ran.code != Some(0),
            "silent",
            format!("{row} is accepted: {}", ran.said),
        );
    }
    case.complete(&case.path("plantstore.db"));
}

/// Rejected rows can be corrected and imported.
fn rejects(case: &mut Case) {
    case.stopped();
    fs::write(
        case.path("rows.csv"),
        "id,name,tag\n1,Fern,a\nx,Ivy,b\n3,,c\n",
    )
    .expect("a file");
    let ran = case.run(&["import", "--rejects", "rejects.csv", "rows.csv"]);
    case.expect(ran.code != Some(0), "silent", "invalid rows are accepted");
    let rejects = fs::read_to_string(case.path("rejects.csv")).unwrap_or_default();
    let is_complete = rejects.contains("Ivy") && rejects.contains(",c");
    case.expect(
        is_complete,
        "silent",
        format!("rows are missing: {rejects:?}"),
    );
    let corrected = rejects
        .replace("x,Ivy", "2,Ivy")
        .replace("3,,c", "3,Rose,c");
    fs::write(case.path("corrected.csv"), corrected).expect("a file");
    case.succeeds(&["import", "corrected.csv"]);
    let stored = case.run(&["export"]).said;
    for plant in [
        r#""id":2,"name":"Ivy","tag":"b""#,
        r#""id":3,"name":"Rose","tag":"c""#,
    ] {
        case.expect(
            stored.contains(plant),
            "wrong",
            format!("{plant} is not stored"),
        );
    }
}

/// Names that a spreadsheet would evaluate are escaped by `export --spreadsheet-safe`.
fn formulas(case: &mut Case) {
    fs::write(
        case.path("rows.csv"),
        "id,name\n1,=1+1\n2,@SUM(A1)\n3,Fern\n",
    )
    .expect("a file");
    case.succeeds(&["import", "rows.csv"]);
    case.succeeds(&["export", "--spreadsheet-safe", "out.csv"]);
    let safe = fs::read_to_string(case.path("out.csv")).unwrap_or_default();
    for name in ["'=1+1", "'@SUM(A1)", ",Fern"] {
        case.expect(
            safe.contains(name),
            "silent",
            format!("{name} is not in {safe}"),
        );
    }
    case.succeeds(&["export", "plain.csv"]);
    case.succeeds(&["import", "plain.csv", "--store", "sqlite:again.db"]);
    let again = ["export", "--store", "sqlite:again.db"];
    let (before, after) = (case.run(&["export"]).said, case.run(&again).said);
    case.expect(
        before == after,
        "silent",
        "the plain export does not give the same plants",
    );
}

fn damaged_backup(case: &mut Case) {
    case.stopped();
    case.succeeds(&["backup", "backup.db"]);
    let mut content = fs::read(case.path("backup.db")).expect("a file");
    let at = content
        .windows(5)
        .position(|bytes| bytes == b"alone")
        .expect("a name");
    content[at] ^= 1;
    fs::write(case.path("backup.db"), content).expect("a file");
    for arguments in [
        &["check", "backup.db"][..],
        &["check", "--store", "sqlite:backup.db"],
        &["restore", "backup.db", "--store", "sqlite:new.db"],
        &["restore", "--force", "backup.db"],
    ] {
        case.count += 1;
        let ran = case.run(arguments);
        let what = format!("{arguments:?}");
        case.expect(ran.code != Some(0), "silent", format!("{what} succeeds"));
        let advises = ran.said.contains("restore a backup");
        case.expect(
            !advises,
            "wrong",
            format!("{what} advises a backup: {}", ran.said),
        );
    }
    case.serves_all();
}

/// `list --json` gives the newest first.
fn listed(case: &Case, arguments: &[&str]) -> Vec<(i64, String)> {
    let printed = case.run(&[&["list", "--json", "--limit", "1000"], arguments].concat());
    let lines = printed.said.lines().filter(|line| line.starts_with('{'));
    let plant = |line: &str| {
        let plant: serde_json::Value = serde_json::from_str(line).expect("JSON");
        let time = plant["added_at"].as_str().expect("a time");
        (plant["id"].as_i64().expect("an id"), time.to_owned())
    };
    lines.map(plant).collect()
}

fn clock_ahead(case: &mut Case) {
    let clock = Clock::new(case.dir());
    clock.set("+0");
    let mut command = plantstore(case.dir());
    command.args(["serve", "--listen", "127.0.0.1:0"]);
    clock.apply_to(&mut command);
    let server = Server::start_command(command, case.dir());
    case.add(&server);
    clock.set("+50y");
    case.add(&server);
    clock.set("+0");
    let future = listed(case, &[]).len();
    case.add(&server);
    let said = server.everything_logged();
    case.expect(said.contains("clock"), "silent", "the jump is not logged");
    drop(server);
    let server = case.serve(&[]);
    case.add(&server);
    drop(server);
    let all = listed(case, &[]);
    let this_year = &all[all.len() - 1].1[..4];
    let later = &all[..all.len() - future];
    let is_right = later.iter().all(|(_, time)| time.starts_with(this_year));
    case.expect(is_right, "silent", "later plants are dated in the future");
    let mut runs: Vec<_> = all.iter().map(|(id, _)| id >> 32).collect();
    runs.dedup();
    let in_order = runs.is_sorted_by(|a, b| a > b);
    case.expect(
        in_order,
        "wrong",
        format!("plants are out of order: {runs:?}"),
    );
    let recent = listed(case, &["--since", "1h"]);
    let has_all = later.iter().all(|plant| recent.contains(plant));
    case.expect(has_all, "silent", "`list --since 1h` misses plants");
    case.complete(&case.path("plantstore.db"));
    case.serves_all();
}
