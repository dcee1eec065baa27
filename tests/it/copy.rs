//! `plantstore copy` and `restore --force` into a store that has tokens and plants: each plant keeps the token that added it,
//! and conflicting stores are not changed.

use std::fmt::Write as _;
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::process::Output;

use rusqlite::Connection;
use serde_json::Value;
use tempfile::TempDir;

use crate::harness::{directory, postgres, run, run_ok};

/// Adds plants as added by this token, which is created unless it exists.
fn add(place: &Path, store: &str, token: &str, ids: Range<i64>) {
    let listed = run(place, &["token", "list", "--json", "--store", store]);
    let name = format!(r#""name":"{token}""#);
    if !String::from_utf8_lossy(&listed.stdout).contains(&name) {
        run_ok(place, &["token", "create", token, "--store", store]);
    }
    let mut lines = String::new();
    for id in ids {
        let _ = writeln!(lines, r#"{{"id":{id},"name":"plant {id} of {token}"}}"#);
    }
    fs::write(place.join("add.ndjson"), lines).expect("a file");
    let arguments = ["import", "add.ndjson", "--token", token, "--store", store];
    run_ok(place, &arguments);
}

/// Each plant with the token that added it, by id.
fn plants(place: &Path, store: &str) -> Vec<(i64, String, String)> {
    let arguments = ["list", "--json", "--limit", "99999", "--store", store];
    let listed = run_ok(place, &arguments);
    let plant = |line: &str| {
        let plant: Value = serde_json::from_str(line).expect("JSON");
        let text = |member: &str| plant[member].as_str().expect("a string").to_owned();
        (
            plant["id"].as_i64().expect("an id"),
            text("name"),
            text("added_by"),
        )
    };
    let mut plants: Vec<_> = listed.lines().map(plant).collect();
    plants.sort();
    plants
}

fn expected(plants: &[(&str, Range<i64>)]) -> Vec<(i64, String, String)> {
    let of = |(token, ids): &(&str, Range<i64>)| {
        let token = (*token).to_owned();
        let ids = ids.clone();
        ids.map(move |id| (id, format!("plant {id} of {token}"), token.clone()))
    };
    let mut all: Vec<_> = plants.iter().flat_map(of).collect();
    all.sort();
    all
}

fn tokens(place: &Path, store: &str) -> Vec<Value> {
    let listed = run_ok(place, &["token", "list", "--json", "--store", store]);
    let tokens = listed.lines().map(serde_json::from_str);
    tokens.collect::<Result<_, _>>().expect("JSON")
}

fn state(place: &Path, store: &str, token: &str) -> String {
    let tokens = tokens(place, store);
    let found = tokens.iter().find(|found| found["name"] == token);
    let found = found.expect("a token of that name");
    found["state"].as_str().expect("a state").to_owned()
}

/// The plants and tokens of a store, as the commands print them.
fn everything(place: &Path, store: &str) -> (Vec<(i64, String, String)>, Vec<Value>) {
    (plants(place, store), tokens(place, store))
}

fn copy(place: &Path, from: &str, to: &str, flags: &[&str]) -> Output {
    run(
        place,
        &[&["copy", "--store", from, "--to", to], flags].concat(),
    )
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs a copy that must succeed.
fn copied(place: &Path, from: &str, to: &str, flags: &[&str]) -> String {
    let output = copy(place, from, to, flags);
    assert!(output.status.success(), "{}", said(&output));
    said(&output)
}

/// The error message of a copy that must fail and not change the target.
fn rejected(place: &Path, from: &str, to: &str, flags: &[&str]) -> String {
    let before = everything(place, to);
    let output = copy(place, from, to, flags);
    let said = said(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(said.contains("nothing was written"), "{said}");
    assert_eq!(everything(place, to), before, "{said}");
    said
}

/// Two stores with a token each: in files, both have the id 1.
struct Pair {
    place: TempDir,
    from: String,
    to: String,
    /// With PostgreSQL databases.
    _others: Vec<TempDir>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Sqlite,
    Postgres,
}

fn pair(from: Kind, to: Kind) -> Pair {
    let mut others = Vec::new();
    let mut store = |kind, file: &str| {
        if kind == Kind::Sqlite {
            return format!("sqlite:{file}.db");
        }
        let other = directory();
        let url = postgres::store(other.path()).expect("scripts/with-postgres runs this");
        others.push(other);
        url
    };
    let (from, to) = (store(from, "from"), store(to, "to"));
    let place = directory();
    add(place.path(), &from, "alice", 0..1500);
    add(place.path(), &to, "bob", 5000..5010);
    Pair {
        place,
        from,
        to,
        _others: others,
    }
}

fn tokens_with_the_same_id_stay_two_tokens(from: Kind, to: Kind) {
    let pair = pair(from, to);
    let (place, from, to) = (pair.place.path(), &pair.from, &pair.to);

    let said = rejected(place, from, to, &[]);
    assert!(said.contains("tokens that"), "{said}");
    assert!(said.contains("bob"), "{said}");
    assert!(said.contains("--force"), "{said}");

    let said = copied(place, from, to, &["--force"]);
    assert_eq!(said, "copied and compared: 1500 plants, 1 token\n");
    let both = [("alice", 0..1500), ("bob", 5000..5010)];
    assert_eq!(plants(place, to), expected(&both));
    assert_eq!(tokens(place, to).len(), 2);

    // The token has another id in the target and is identified by its digest.
    add(place, from, "alice", 6000..6100);
    copied(place, from, to, &["--force"]);
    let both = [
        ("alice", 0..1500),
        ("alice", 6000..6100),
        ("bob", 5000..5010),
    ];
    assert_eq!(plants(place, to), expected(&both));
    assert_eq!(tokens(place, to).len(), 2);
    copied(place, to, "sqlite:again.db", &[]);
    assert_eq!(plants(place, "sqlite:again.db"), expected(&both));
    run_ok(place, &["check", "--store", to]);
    run_ok(place, &["check", "--store", "sqlite:again.db"]);
}

fn different_tokens_of_one_name_stop_a_copy_before_it_writes(from: Kind, to: Kind) {
    let pair = pair(from, to);
    let (place, from, to) = (pair.place.path(), &pair.from, &pair.to);
    add(place, from, "ci", 2000..2005);
    add(place, to, "ci", 7000..7005);
    for flags in [&[][..], &["--force"]] {
        let said = rejected(place, from, to, flags);
        assert!(said.contains("of the same name: ci;"), "{said}");
        assert!(said.contains("plantstore export"), "{said}");
    }
}

fn a_revocation_in_either_store_holds_in_the_target(from: Kind, to: Kind) {
    let pair = pair(from, to);
    let (place, from, to) = (pair.place.path(), &pair.from, &pair.to);
    add(place, from, "carol", 2000..2005);
    copied(place, from, to, &["--force"]);
    let revoke = |token, store| run_ok(place, &["token", "revoke", token, "--store", store]);
    revoke("alice", to);
    revoke("carol", from);
    copied(place, from, to, &["--force"]);
    assert_eq!(state(place, from, "alice"), "active");
    for (token, expected) in [
        ("alice", "revoked"),
        ("carol", "revoked"),
        ("bob", "active"),
    ] {
        assert_eq!(state(place, to, token), expected, "{token}");
    }
    let used = tokens(place, to);
    assert!(used.iter().all(|token| token["last_used_at"].is_string()));
    run_ok(place, &["check", "--store", to]);
}

fn a_token_that_was_rotated_or_whose_name_was_used_again_is_the_same_in_the_target(
    from: Kind,
    to: Kind,
) {
    let pair = pair(from, to);
    let (place, from, to) = (pair.place.path(), &pair.from, &pair.to);
    add(place, from, "carol", 2000..2005);
    copied(place, from, to, &["--force"]);
    for _ in 0..2 {
        let rotate = ["token", "rotate", "alice", "--overlap", "0"];
        run_ok(place, &[&rotate[..], &["--store", from]].concat());
    }
    run_ok(place, &["token", "revoke", "carol", "--store", from]);
    run_ok(place, &["token", "create", "carol", "--store", from]);
    add(place, from, "alice", 6000..6005);
    add(place, from, "carol", 7000..7005);
    for _ in 0..2 {
        copied(place, from, to, &["--force"]);
        let found = plants(place, to);
        assert_eq!(found.len(), 1500 + 5 + 10 + 5 + 5);
        for (id, _, token) in &found {
            match id {
                2000..2005 => assert!(token.starts_with("carol (revoked "), "{id}: {token}"),
                7000..7005 => assert_eq!(token, "carol", "{id}"),
                5000..5010 => assert_eq!(token, "bob", "{id}"),
                _ => assert_eq!(token, "alice", "{id}"),
            }
        }
        let rotated_at = |store: &str| {
            let tokens = tokens(place, store);
            let alice = tokens.iter().find(|token| token["name"] == "alice");
            alice.expect("a token")["rotated_at"].clone()
        };
        assert_eq!(rotated_at(to), rotated_at(from));
        assert_eq!(state(place, to, "carol"), "active");
        run_ok(place, &["check", "--store", to]);
    }
}

fn plants_that_contradict_each_other_stop_a_copy_before_it_writes(from: Kind, to: Kind) {
    let pair = pair(from, to);
    let (place, from, to) = (pair.place.path(), &pair.from, &pair.to);
    // Plant 5000 differs between the stores.
    add(place, from, "alice", 5000..5002);
    let said = rejected(place, from, to, &["--force"]);
    assert!(said.contains("other plants with the ids"), "{said}");
    assert!(said.contains("2 (id 5000, 5001)"), "{said}");
}

/// A page that is limited by its size has fewer plants than one that is limited by their number.
fn large_plants_are_copied(from: Kind, to: Kind) {
    let pair = pair(from, to);
    let (place, from, to) = (pair.place.path(), &pair.from, &pair.to);
    let mut lines = String::new();
    for id in 3000..3012 {
        let name = id.to_string().repeat(if id % 3 == 0 { 200_000 } else { 1 });
        let _ = writeln!(lines, r#"{{"id":{id},"name":"{name}"}}"#);
    }
    fs::write(place.join("large.ndjson"), lines).expect("a file");
    run_ok(
        place,
        &[
            "import",
            "large.ndjson",
            "--token",
            "alice",
            "--store",
            from,
        ],
    );
    let said = copied(place, from, to, &["--force"]);
    assert_eq!(said, "copied and compared: 1512 plants, 1 token\n");
    let mut all = plants(place, from);
    all.extend(expected(&[("bob", 5000..5010)]));
    all.sort();
    assert!(plants(place, to) == all, "the copies differ");
}

macro_rules! in_every_direction {
    ($($fact:ident: $sqlite:ident, $to_postgres:ident, $from_postgres:ident;)*) => { $(
        #[test]
        fn $sqlite() {
            $fact(Kind::Sqlite, Kind::Sqlite);
        }

        #[test]
        #[ignore = "scripts/with-postgres runs it"]
        fn $to_postgres() {
            $fact(Kind::Sqlite, Kind::Postgres);
        }

        #[test]
        #[ignore = "scripts/with-postgres runs it"]
        fn $from_postgres() {
            $fact(Kind::Postgres, Kind::Sqlite);
        }
    )* };
}

in_every_direction! {
    tokens_with_the_same_id_stay_two_tokens:
        tokens_with_the_same_id_stay_two_tokens_between_files,
        tokens_with_the_same_id_stay_two_tokens_on_the_way_to_postgresql,
        tokens_with_the_same_id_stay_two_tokens_on_the_way_from_postgresql;
    different_tokens_of_one_name_stop_a_copy_before_it_writes:
        different_tokens_of_one_name_stop_a_copy_between_files_before_it_writes,
        different_tokens_of_one_name_stop_a_copy_to_postgresql_before_it_writes,
        different_tokens_of_one_name_stop_a_copy_from_postgresql_before_it_writes;
    a_revocation_in_either_store_holds_in_the_target:
        a_revocation_in_either_file_holds_in_the_target,
        a_revocation_in_either_store_holds_in_postgresql,
        a_revocation_in_either_store_holds_in_a_file_copied_from_postgresql;
    a_token_that_was_rotated_or_whose_name_was_used_again_is_the_same_in_the_target:
        a_token_that_was_rotated_or_whose_name_was_used_again_is_the_same_in_a_copied_file,
        a_token_that_was_rotated_or_whose_name_was_used_again_is_the_same_in_postgresql,
        a_token_that_was_rotated_or_whose_name_was_used_again_is_the_same_in_a_file_from_postgresql;
    plants_that_contradict_each_other_stop_a_copy_before_it_writes:
        plants_that_contradict_each_other_stop_a_copy_between_files_before_it_writes,
        plants_that_contradict_each_other_stop_a_copy_to_postgresql_before_it_writes,
        plants_that_contradict_each_other_stop_a_copy_from_postgresql_before_it_writes;
    large_plants_are_copied:
        large_plants_are_copied_between_files,
        large_plants_are_copied_to_postgresql,
        large_plants_are_copied_from_postgresql;
}

/// Runs a statement on a database file.
fn sql(place: &Path, file: &str, statement: &str) {
    let store = Connection::open(place.join(file)).expect("the database");
    let statement = format!("PRAGMA foreign_keys = OFF; {statement}");
    store.execute_batch(&statement).expect("SQL");
}

#[test]
fn an_interrupted_copy_is_continued() {
    let place = directory();
    let place = place.path();
    let (from, to) = ("sqlite:from.db", "sqlite:to.db");
    add(place, from, "alice", 0..2500);
    add(place, from, "carol", 2500..2600);
    copied(place, from, to, &[]);
    for loss in [
        "DELETE FROM plants WHERE id % 3 = 0",
        "DELETE FROM plants WHERE id > 700",
        "DELETE FROM plants; DELETE FROM tokens WHERE name = 'carol'",
        "DELETE FROM plants; DELETE FROM tokens",
    ] {
        sql(place, "to.db", loss);
        copied(place, from, to, &[]);
        let all = [("alice", 0..2500), ("carol", 2500..2600)];
        assert_eq!(plants(place, to), expected(&all), "{loss}");
    }
}

#[test]
fn plants_that_the_source_lacks_stop_a_copy_unless_it_is_forced() {
    let place = directory();
    let place = place.path();
    let (from, to) = ("sqlite:from.db", "sqlite:to.db");
    add(place, from, "alice", 0..10);
    copied(place, from, to, &[]);
    add(place, to, "alice", 20..23);
    add(place, from, "alice", 10..20);
    let said = rejected(place, from, to, &[]);
    assert!(said.contains("3 (id 20, 21, 22)"), "{said}");
    copied(place, from, to, &["--force"]);
    assert_eq!(plants(place, to), expected(&[("alice", 0..23)]));
}

#[test]
fn a_plant_that_both_stores_have_keeps_the_token_that_added_it_to_each() {
    let place = directory();
    let place = place.path();
    let (from, to) = ("sqlite:from.db", "sqlite:to.db");
    add(place, from, "alice", 0..4);
    run_ok(place, &["token", "create", "bob", "--store", to]);
    // The same plants, added with the token bob.
    let arguments = ["import", "add.ndjson", "--token", "bob", "--store", to];
    run_ok(place, &arguments);
    let said = rejected(place, from, to, &[]);
    assert!(said.contains("bob"), "{said}");
    let said = copied(place, from, to, &["--force"]);
    assert!(said.contains("left unchanged"), "{said}");
    assert!(said.ends_with(": 4 plants\n"), "{said}");
    let by_bob = |(id, name, _)| (id, name, "bob".to_owned());
    let expected: Vec<_> = expected(&[("alice", 0..4)])
        .into_iter()
        .map(by_bob)
        .collect();
    assert_eq!(plants(place, to), expected);
}

#[test]
fn a_plant_of_an_unknown_token_is_not_copied() {
    let place = directory();
    let place = place.path();
    add(place, "sqlite:from.db", "alice", 0..3);
    add(place, "sqlite:from.db", "carol", 3..5);
    sql(place, "from.db", "DELETE FROM tokens WHERE name = 'carol'");
    let output = copy(place, "sqlite:from.db", "sqlite:to.db", &[]);
    assert_eq!(output.status.code(), Some(1));
    let said = said(&output);
    assert!(said.contains("plant 3 of sqlite:from.db"), "{said}");
    assert!(said.contains("plantstore check"), "{said}");
    assert_eq!(plants(place, "sqlite:to.db"), []);
}

#[test]
fn a_store_is_not_copied_to_itself_under_another_name() {
    let place = directory();
    let place = place.path();
    add(place, "sqlite:from.db", "alice", 0..3);
    std::os::unix::fs::symlink("from.db", place.join("link.db")).expect("a link");
    for to in ["sqlite:from.db", "sqlite:./from.db", "sqlite:link.db"] {
        let output = copy(place, "sqlite:from.db", to, &[]);
        assert_eq!(output.status.code(), Some(1), "{to}");
        assert!(said(&output).contains("to itself"), "{}", said(&output));
    }
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn a_backup_restored_into_a_database_in_use_keeps_the_token_of_each_plant() {
    let Pair {
        place,
        from,
        to,
        _others,
    } = pair(Kind::Sqlite, Kind::Postgres);
    let place = place.path();
    run_ok(place, &["backup", "plants.backup", "--store", &from]);
    let restore = |flags: &[&str]| {
        let arguments = ["restore", "plants.backup", "--store", &to];
        run(place, &[&arguments[..], flags].concat())
    };
    let before = everything(place, &to);
    let output = restore(&[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("is not empty"), "{}", said(&output));
    assert_eq!(everything(place, &to), before);
    for _ in 0..2 {
        let output = restore(&["--force"]);
        assert!(output.status.success(), "{}", said(&output));
        let both = [("alice", 0..1500), ("bob", 5000..5010)];
        assert_eq!(plants(place, &to), expected(&both));
    }
    // A token that was revoked since the backup stays revoked.
    run_ok(place, &["token", "revoke", "alice", "--store", &to]);
    assert!(restore(&["--force"]).status.success());
    assert_eq!(state(place, &to, "alice"), "revoked");

    let elsewhere = directory();
    let other = postgres::store(elsewhere.path()).expect("a database");
    add(place, &other, "alice", 8000..8003);
    let before = everything(place, &other);
    let arguments = ["restore", "plants.backup", "--force", "--store", &other];
    let output = run(place, &arguments);
    assert_eq!(output.status.code(), Some(1));
    let said = said(&output);
    assert!(said.contains("of the same name: alice;"), "{said}");
    assert_eq!(everything(place, &other), before);
}
