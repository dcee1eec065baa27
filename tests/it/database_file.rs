//! The SQLite database file: lock, permissions, schema versions, and the errors when it cannot be used.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::time::Duration;

use plantstore::{Addition, Location, Mode, NewPlant, Store, TokenId};
use rusqlite::Connection;

use crate::harness::{
    Server, directory, open, plant_checksum, plantstore, run, run_ok, wait_until,
};

/// The error message of a server that must not start.
fn refusal(directory: &Path, arguments: &[&str]) -> String {
    let arguments = [&["serve", "--listen", "127.0.0.1:0"], arguments].concat();
    let output = run(directory, &arguments);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
    stderr
}

#[test]
fn two_servers_cannot_share_a_store_but_commands_work_while_one_runs() {
    let mut server = Server::start();
    let sentence = refusal(server.directory(), &[]);
    assert!(
        sentence.contains("is in use by another plantstore"),
        "{sentence}"
    );
    assert!(
        sentence.contains(&format!("process {}", server.pid())),
        "{sentence}"
    );
    server.add_ok(r#"{"id":1,"name":"x"}"#);
    run_ok(server.directory(), &["token", "create", "online"]);
    run_ok(server.directory(), &["token", "list"]);
    // One lock per file, regardless of the path.
    std::os::unix::fs::symlink("plantstore.db", server.directory().join("link.db"))
        .expect("a link");
    let sentence = refusal(server.directory(), &["--store", "sqlite:link.db"]);
    assert!(
        sentence.contains("is in use by another plantstore"),
        "{sentence}"
    );
    // The lock is released with the process, even after SIGKILL.
    server.kill();
    let directory = server.directory().to_owned();
    Server::start_in(&directory, &[]).add_ok(r#"{"id":1,"name":"x"}"#);
}

#[test]
fn no_command_makes_a_new_store_of_an_empty_file() {
    let directory = directory();
    let place = directory.path();
    let mut server = Server::start_in(place, &[]);
    server.add_ok(r#"{"id":1,"name":"x"}"#);
    run_ok(place, &["backup", "good.backup"]);
    assert!(server.terminate().success());
    fs::write(place.join("a.ndjson"), r#"{"id":2,"name":"y"}"#).expect("a file");
    let lock = fs::read(place.join("plantstore.db-lock")).expect("a lock file");
    let backup = fs::read(place.join("good.backup")).expect("a backup");
    let commands: [&[&str]; 15] = [
        &["serve", "--listen", "127.0.0.1:0"],
        &["check"],
        &["check", "--accept-loss"],
        &["check", "plantstore.db"],
        &["list"],
        &["get", "1"],
        &["stats"],
        &["export"],
        &["import", "a.ndjson"],
        &["import", "--dry-run", "a.ndjson"],
        &["token", "list"],
        &["token", "create", "a"],
        &["backup", "--force", "good.backup"],
        &["copy", "--to", "sqlite:other.db"],
        &["migrate"],
    ];
    for content in ["", "\n"] {
        fs::write(place.join("plantstore.db"), content).expect("a file");
        for command in commands {
            let output = run(place, command);
            assert_eq!(output.status.code(), Some(1), "{command:?}: {output:?}");
            let said = String::from_utf8_lossy(&output.stderr);
            let is_told = said.contains("is empty, but") || said.contains("is not a");
            assert!(is_told, "{command:?}: {said}");
            let read = |name| fs::read(place.join(name)).expect("a file");
            assert_eq!(read("plantstore.db"), content.as_bytes(), "{command:?}");
            assert_eq!(read("good.backup"), backup, "{command:?}");
            if content.is_empty() {
                assert_eq!(read("plantstore.db-lock"), lock, "{command:?}");
            }
            assert!(!place.join("plantstore.db-wal").exists(), "{command:?}");
        }
        run_ok(place, &["restore", "--force", "good.backup"]);
        assert!(run_ok(place, &["list"]).contains('x'));
    }
}

#[test]
fn an_empty_backup_is_damaged_and_is_not_changed() {
    let directory = directory();
    let place = directory.path();
    for content in ["", "\n"] {
        fs::write(place.join("plants.backup"), content).expect("a file");
        for command in [&["check", "plants.backup"], &["restore", "plants.backup"]] {
            let output = run(place, command);
            assert_eq!(output.status.code(), Some(1), "{command:?}: {output:?}");
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(said.contains("plants.backup is"), "{command:?}: {said}");
            let names = fs::read_dir(place).expect("a directory").count();
            assert_eq!(names, 1, "{command:?}");
        }
        assert_eq!(
            fs::read_to_string(place.join("plants.backup")).expect("a file"),
            content
        );
    }
}

#[test]
fn a_command_does_not_use_another_shared_memory_file_than_the_server() {
    let mut server = Server::start();
    server.add_ok(r#"{"id":1,"name":"x"}"#);
    let directory = server.directory().to_owned();
    let shared_memory = directory.join("plantstore.db-shm");
    // While it is stopped, the server cannot notice that.
    server.signal("-STOP");
    fs::remove_file(&shared_memory).expect("a file");
    for is_replaced in [false, true] {
        if is_replaced {
            fs::write(&shared_memory, "").expect("a file");
        }
        for arguments in [&["token", "create", "late"][..], &["list"]] {
            let output = run(&directory, arguments);
            assert_eq!(output.status.code(), Some(1), "{output:?}");
            let sentence = String::from_utf8_lossy(&output.stderr);
            assert!(
                sentence.contains("plantstore.db-shm was moved, deleted or replaced"),
                "{sentence}"
            );
        }
    }
    server.signal("-CONT");
    assert!(!server.wait_for_exit().success());
    run_ok(&directory, &["token", "create", "later"]);
    assert_eq!(run_ok(&directory, &["export"]).lines().count(), 1);
    run_ok(&directory, &["check"]);
}

#[test]
fn every_file_is_accessible_to_its_owner_only() {
    let server = Server::start();
    server.add_ok(r#"{"id":1,"name":"x"}"#);
    let mut names = Vec::new();
    for file in fs::read_dir(server.directory()).expect("a directory") {
        let file = file.expect("a file");
        let mode = file.metadata().expect("metadata").mode() & 0o777;
        assert_eq!(mode, 0o600, "{}", file.path().display());
        names.push(file.file_name().into_string().expect("UTF-8"));
    }
    names.sort();
    let database = [
        "plantstore.db",
        "plantstore.db-lock",
        "plantstore.db-shm",
        "plantstore.db-wal",
    ];
    assert_eq!(names, [&database[..], &["plantstore.token"]].concat());
}

#[test]
fn a_new_store_and_its_directory_entry_are_synced() {
    let directory = directory();
    let strace = ["-e", "trace=openat,fsync,fdatasync", "-y"];
    let server = Server::start_under_strace(directory.path(), &strace, &[]);
    let root = directory.path().canonicalize().expect("a path");
    let of_directory = format!("<{}>)", root.display());
    let synced = |line: &str| line.contains("fsync(") && line.contains(&of_directory);
    wait_until("the directory is synced", || {
        server.trace().lines().any(synced)
    });
}

#[test]
fn a_store_of_a_newer_version_is_rejected() {
    let directory = directory();
    run_ok(directory.path(), &["token", "create", "x"]);
    open(directory.path())
        .pragma_update(None, "user_version", 99)
        .expect("a pragma");
    let sentence = refusal(directory.path(), &[]);
    assert!(
        sentence.contains("schema version 99") && sentence.contains("use the newer plantstore"),
        "{sentence}"
    );
    assert_eq!(
        run(directory.path(), &["token", "list"]).status.code(),
        Some(1)
    );
}

/// Creates a database of schema version 2 with SQL, with plants 3, 2 and 1 in the order of their timestamps, and a token.
fn version_2(path: &Path, journal_mode: &str) -> String {
    let elsewhere = directory();
    let token = run_ok(elsewhere.path(), &["token", "create", "first"]);
    let elsewhere = elsewhere.path().join("plantstore.db");
    let store = Connection::open(path).expect("a database");
    store
        .pragma_update(None, "journal_mode", journal_mode)
        .expect("a pragma");
    for sql in [
        include_str!("../../migrations/sqlite/0001_plants_and_tokens.sql"),
        include_str!("../../migrations/sqlite/0002_newest_first.sql"),
    ] {
        store.execute_batch(sql).expect("a schema");
    }
    for (pragma, value) in [("application_id", 0x506c_6e74), ("user_version", 2)] {
        store.pragma_update(None, pragma, value).expect("a pragma");
    }
    store
        .execute("ATTACH ?1 AS elsewhere", [elsewhere.to_str()])
        .expect("a database");
    store
        .execute(
            "INSERT INTO tokens SELECT id, name, digest, rate_limit, created_at, expires_at, revoked_at, last_used_at, checksum
             FROM elsewhere.tokens",
            [],
        )
        .expect("a token");
    for id in 1..=3 {
        let added_at = 1_700_000_000_000 - id;
        let values = rusqlite::params![
            id,
            added_at,
            plant_checksum(id, "Fern", "wild", added_at, 1, 0)
        ];
        let insert = "INSERT INTO plants VALUES (?1, 'Fern', 'wild', ?2, 1, ?3)";
        store.execute(insert, values).expect("a plant");
    }
    token.trim().to_owned()
}

fn listed(directory: &Path, arguments: &[&str]) -> Vec<i64> {
    let printed = run_ok(directory, &[&["list", "--json"], arguments].concat());
    let id = |line: &str| {
        let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
        line["id"].as_i64().expect("an id")
    };
    printed.lines().map(id).collect()
}

#[test]
fn a_store_of_the_previous_version_is_upgraded_and_keeps_its_order() {
    let directory = directory();
    let token = version_2(&directory.path().join("plantstore.db"), "wal");
    let server = Server::start_in(directory.path(), &[]);
    for id in [5, 4, 2] {
        let body = format!(r#"{{"id":{id},"name":"Fern","tag":"wild"}}"#);
        let response = server.connect().add(&token, body.as_bytes());
        assert_eq!(response.status, 200, "{response:?}");
    }
    assert_eq!(listed(directory.path(), &[]), [4, 5, 1, 2, 3]);
    assert_eq!(listed(directory.path(), &["--since", "1h"]), [4, 5]);
    // A page may end between plants of either version, and a cursor of the previous version is valid.
    for (limit, page) in [("1", vec![5, 1, 2, 3]), ("3", vec![2, 3])] {
        let first = run(directory.path(), &["list", "--limit", limit]);
        let hint = String::from_utf8(first.stderr).expect("UTF-8");
        let (_, position) = hint.trim().split_once("--cursor ").expect("a position");
        assert_eq!(listed(directory.path(), &["--cursor", position]), page);
    }
    let position = "2023-11-14T22:13:19.998Z/2";
    assert_eq!(listed(directory.path(), &["--cursor", position]), [3]);
    assert_eq!(
        run_ok(directory.path(), &["export"]).lines().count(),
        5,
        "all plants are exported"
    );
}

/// Version 4 had an index by batch instead of the table `batches`.
#[test]
fn the_batches_of_an_older_store_become_rows_and_its_backups_are_listed_alike() {
    let directory = directory();
    let server = Server::start_in(directory.path(), &[]);
    for id in [7, i64::MIN, i64::MAX, -1] {
        server.add_ok(format!(r#"{{"id":{id},"name":"Fern"}}"#));
    }
    let plants = (100..150).map(|id| format!(r#"{{"id":{id},"name":"Ivy"}}"#));
    let plants = plants.collect::<Vec<_>>().join("\n");
    fs::write(directory.path().join("ivy.ndjson"), plants).expect("a file");
    drop(server);
    run_ok(directory.path(), &["import", "ivy.ndjson"]);
    let before = listed(directory.path(), &[]);
    assert_eq!(before[..2], [149, 148]);
    assert_eq!(
        listed(directory.path(), &["--limit", "54"])[50..],
        [-1, i64::MAX, i64::MIN, 7]
    );

    let rows = |store: &Connection| -> Vec<(i64, i64, Vec<u8>)> {
        let sql = "SELECT number, added_at, ids FROM batches ORDER BY number";
        let mut select = store.prepare(sql).expect("SQL");
        let rows = select.query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)));
        rows.expect("rows").collect::<Result<_, _>>().expect("rows")
    };
    let store = open(directory.path());
    let batches = rows(&store);
    let earlier = "ALTER TABLE tokens DROP COLUMN rotated_at; ALTER TABLE tokens DROP COLUMN previous_digest;
                   ALTER TABLE tokens DROP COLUMN previous_expires_at; DROP TABLE token_events; DROP TABLE batches; DROP INDEX plants_without_batch;
                   CREATE INDEX plants_by_batch ON plants (batch, added_at);
                   PRAGMA user_version = 4";
    store.execute_batch(earlier).expect("SQL");
    store
        .execute(
            "VACUUM INTO ?1",
            [directory.path().join("old.backup").to_str()],
        )
        .expect("a copy");
    drop(store);
    assert_eq!(
        listed(directory.path(), &["--store", "sqlite:old.backup"]),
        before
    );
    run_ok(directory.path(), &["check", "old.backup"]);
    assert_eq!(listed(directory.path(), &[]), before);
    assert_eq!(rows(&open(directory.path())), batches);
    run_ok(directory.path(), &["check"]);
}

#[test]
fn a_backup_of_the_previous_version_is_read_and_restored_but_not_changed() {
    let directory = directory();
    let path = directory.path().join("old.backup");
    let token = version_2(&path, "delete");
    let before = fs::read(&path).expect("a file");

    let store = ["--store", "sqlite:old.backup"];
    assert_eq!(listed(directory.path(), &store), [1, 2, 3]);
    let filtered = [&["--tag", "wild", "--limit", "2"], &store[..]].concat();
    assert_eq!(listed(directory.path(), &filtered), [1, 2]);
    for (command, expected) in [
        (vec!["export"], r#"{"id":1,"name":"Fern","tag":"wild"}"#),
        (vec!["stats"], "plants    3\n"),
        (vec!["get", "2"], "name      Fern\n"),
    ] {
        let said = run_ok(directory.path(), &[&command[..], &store].concat());
        assert!(said.contains(expected), "{command:?}: {said}");
    }
    let said = run_ok(directory.path(), &["check", "old.backup"]);
    assert_eq!(said, "no damage found: 3 plants, 1 token\n");
    assert_eq!(fs::read(&path).expect("a file"), before);

    run_ok(
        directory.path(),
        &["restore", "old.backup", "--store", "sqlite:new.db"],
    );
    let new = ["--store", "sqlite:new.db"];
    let server = Server::start_in(directory.path(), &new);
    let response = server.connect().add(&token, br#"{"id":4,"name":"Fern"}"#);
    assert_eq!(response.status, 200, "{response:?}");
    assert_eq!(listed(directory.path(), &new), [4, 1, 2, 3]);
}

#[test]
fn files_of_other_programs_are_rejected_and_not_changed() {
    let directory = directory();
    let path = directory.path().join("plantstore.db");
    let theirs = Connection::open(&path).expect("a database");
    theirs
        .execute_batch("CREATE TABLE plants (id)")
        .expect("SQL");
    drop(theirs);
    let before = fs::read(&path).expect("a file");
    assert!(refusal(directory.path(), &[]).contains("not a database of plantstore"));
    assert_eq!(fs::read(&path).expect("a file"), before);
    let files = fs::read_dir(directory.path()).expect("a directory").count();
    assert_eq!(files, 1, "a file was left");

    fs::write(
        &path,
        "not a database, but long enough to be taken for one".repeat(100),
    )
    .expect("a file");
    let before = fs::read(&path).expect("a file");
    assert!(refusal(directory.path(), &[]).contains("not a database of plantstore"));
    assert_eq!(fs::read(&path).expect("a file"), before);
}

#[test]
fn an_unwritable_directory_is_a_one_line_error() {
    let directory = directory();
    let sentence = refusal(
        directory.path(),
        &["--store", "sqlite:nowhere/plantstore.db"],
    );
    assert!(
        sentence.contains("check that its directory exists"),
        "{sentence}"
    );

    fs::create_dir(directory.path().join("folder.db")).expect("a directory");
    let sentence = refusal(directory.path(), &["--store", "sqlite:folder.db"]);
    assert!(sentence.contains("check that it is a file"), "{sentence}");

    // As a user who may read but not write; root may do anything.
    run_ok(directory.path(), &["token", "create", "x"]);
    for file in fs::read_dir(directory.path()).expect("a directory") {
        let path = file.expect("a file").path();
        fs::set_permissions(path, fs::Permissions::from_mode(0o555)).expect("a mode");
    }
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o555)).expect("a mode");
    let mut command = plantstore(directory.path());
    command.args(["serve", "--listen", "127.0.0.1:0"]);
    if fs::metadata("/proc/self").expect("proc").uid() == 0 {
        command.uid(65534).gid(65534);
    }
    let output = command.output().expect("it runs");
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).expect("a mode");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let sentence = String::from_utf8(output.stderr).expect("UTF-8");
    assert!(sentence.contains("this user may write"), "{sentence}");
    assert_eq!(sentence.lines().count(), 1, "{sentence}");
}

#[test]
fn files_that_root_creates_in_a_store_belong_to_the_owner_of_the_store() {
    if fs::metadata("/proc/self").expect("proc").uid() != 0 {
        return; // needs root
    }
    let directory = directory();
    let owner = 65534;
    chown(directory.path(), Some(owner), Some(owner)).expect("root may");
    let start = || {
        let mut command = plantstore(directory.path());
        command.args(["serve", "--listen", "127.0.0.1:0"]);
        command.uid(owner).gid(owner);
        Server::start_command(command, directory.path())
    };
    // Before the server first ran: root creates the database, the WAL and the lock file.
    let token = run_ok(directory.path(), &["token", "create", "root"]);
    let mut server = start();
    let response = server
        .connect()
        .add(token.trim(), br#"{"id":1,"name":"x"}"#);
    assert_eq!(response.status, 200);
    run_ok(directory.path(), &["token", "create", "online"]);
    assert!(server.terminate().success());

    // After a clean stop, which deletes the WAL, and after a kill, which leaves it.
    run_ok(directory.path(), &["token", "create", "after"]);
    run_ok(directory.path(), &["check"]);
    let mut server = start();
    server.kill();
    run_ok(directory.path(), &["token", "revoke", "online"]);
    let mut server = start();
    let response = server
        .connect()
        .add(token.trim(), br#"{"id":2,"name":"x"}"#);
    assert_eq!(response.status, 200);
    for file in fs::read_dir(directory.path()).expect("a directory") {
        let file = file.expect("a file");
        let of = file.metadata().expect("metadata").uid();
        assert_eq!(of, owner, "{}", file.path().display());
    }
    server.kill();

    // Without a store, as after a disk was replaced.
    let elsewhere = crate::harness::directory();
    let backup = elsewhere.path().join("backup.db");
    let backup = backup.to_str().expect("UTF-8");
    run_ok(directory.path(), &["backup", backup]);
    for file in fs::read_dir(directory.path()).expect("a directory") {
        fs::remove_file(file.expect("a file").path()).expect("root may");
    }
    run_ok(directory.path(), &["restore", backup]);
    let server = start();
    let response = server
        .connect()
        .add(token.trim(), br#"{"id":3,"name":"x"}"#);
    assert_eq!(response.status, 200);
}

#[test]
fn a_symbolic_link_in_place_of_the_lock_file_is_not_followed() {
    let directory = directory();
    run_ok(directory.path(), &["token", "create", "x"]);
    let victim = directory.path().join("victim");
    fs::write(&victim, "theirs").expect("a file");
    let lock = directory.path().join("plantstore.db-lock");
    fs::remove_file(&lock).expect("a lock");
    std::os::unix::fs::symlink(&victim, &lock).expect("a link");
    let sentence = refusal(directory.path(), &[]);
    assert!(
        sentence.contains("cannot open") && sentence.contains("-lock"),
        "{sentence}"
    );
    assert_eq!(fs::read_to_string(&victim).expect("a file"), "theirs");
}

#[test]
fn a_read_only_command_creates_no_store() {
    let directory = directory();
    for arguments in [&["token", "list"][..], &["token", "revoke", "x"]] {
        let output = run(directory.path(), arguments);
        assert_eq!(output.status.code(), Some(1));
        assert!(String::from_utf8_lossy(&output.stderr).contains("there is no store"));
    }
    assert_eq!(
        fs::read_dir(directory.path()).expect("a directory").count(),
        0
    );
}

#[test]
fn the_wal_of_a_killed_server_is_checkpointed_before_the_next_server_listens() {
    let mut server = Server::start();
    server.add_ok(r#"{"id":1,"name":"x"}"#);
    let directory = server.directory().to_owned();
    server.kill();
    let log = directory.join("plantstore.db-wal");
    assert!(fs::metadata(&log).expect("a log").len() > 0);
    // Started, and killed again without a request.
    Server::start_in(&directory, &[]).kill();
    let copy = crate::harness::directory();
    let file = "plantstore.db";
    fs::copy(directory.join(file), copy.path().join(file)).expect("a copy without the WAL");
    assert_eq!(crate::harness::plants(copy.path()).len(), 1);
}

#[test]
fn the_wal_stays_short_while_plants_are_added() {
    let server = Server::start();
    let token = server.token();
    let mut client = server.connect();
    let name = "x".repeat(100_000);
    for id in 0..300 {
        let body = format!(r#"{{"id":{id},"name":"{name}"}}"#);
        assert_eq!(client.add(&token, body.as_bytes()).status, 200);
    }
    let size = |file: &str| {
        fs::metadata(server.directory().join(file))
            .expect("a file")
            .len()
    };
    assert!(size("plantstore.db") > 20 << 20);
    assert!(size("plantstore.db-wal") < 8 << 20);
}

#[test]
fn startup_reads_no_more_of_a_large_store_than_of_a_small_one() {
    let read_at_start = |directory: &Path| -> u64 {
        let mut server = Server::start_in(directory, &[]);
        let io = fs::read_to_string(format!("/proc/{}/io", server.pid())).expect("proc");
        server.kill();
        let line = io
            .lines()
            .find(|line| line.starts_with("rchar: "))
            .expect("rchar");
        line[7..].parse().expect("a number")
    };
    let directory = directory();
    run_ok(directory.path(), &["token", "create", "x"]);
    let small = read_at_start(directory.path());
    let fill = "INSERT INTO plants WITH RECURSIVE n(i) AS (VALUES (1) UNION ALL SELECT i + 1 FROM n WHERE i < 300000)
                SELECT i, 'a plant with a name of some length', 'tag', 0, 1, 0, 0 FROM n";
    open(directory.path()).execute_batch(fill).expect("plants");
    let fill = fill.replace(
        "INSERT INTO plants",
        "INSERT INTO tokens (name, digest, created_at, checksum)",
    );
    let fill = fill.replace(
        "SELECT i, 'a plant with a name of some length', 'tag', 0, 1, 0, 0",
        "SELECT 'token ' || i, randomblob(32), 0, 0",
    );
    open(directory.path()).execute_batch(&fill).expect("tokens");
    let large = read_at_start(directory.path());
    assert!(
        fs::metadata(directory.path().join("plantstore.db"))
            .expect("a file")
            .len()
            > 10 << 20
    );
    assert!(large < small + (256 << 10), "{small} bytes, then {large}");
}

#[test]
fn a_wal_that_is_reset_twice_in_a_row_belongs_to_its_database() {
    let directory = directory();
    let path = directory.path().join("plantstore.db");
    let location = Location::Sqlite(path.clone());
    let timeout = Duration::from_secs(60);
    let mut stores = Store::open_writers(&location, 1, timeout).expect("a store");
    let checkpoint = || {
        let connection = Connection::open(&path).expect("a connection");
        let passive = connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(()));
        passive.expect("a checkpoint");
    };
    let mut ids = 0..;
    let mut add = |len| {
        let additions = ids.by_ref().take(len).map(|id| {
            let body = format!(r#"{{"id":{id},"name":"{}"}}"#, "Monstera".repeat(200));
            let plant = NewPlant::from_json(body.as_bytes()).expect("a plant");
            let token = TokenId(1);
            Addition { plant, token }
        });
        let additions: Vec<_> = additions.collect();
        stores[0].add(&additions, &[]).expect("a batch");
    };
    // After a complete checkpoint, the next batch starts the WAL from its beginning.
    add(100);
    checkpoint();
    add(20);
    checkpoint();
    add(1);
    add(1);
    let copies = tempfile::tempdir().expect("a directory");
    for name in ["plantstore.db", "plantstore.db-wal", "plantstore.db-lock"] {
        let copy = copies.path().join(name);
        fs::copy(directory.path().join(name), copy).expect("a copy");
    }
    let copy = Location::Sqlite(copies.path().join("plantstore.db"));
    Store::open(&copy, Mode::Read).expect("its own WAL");
}
