//! Corrupted files: the store does not open, or `plantstore check` reports the damage; no response is wrong.

use std::fs;
use std::path::Path;

use crate::harness::{Server, directory, run, run_ok};

const PLANT: &str = r#"{"id":7,"name":"Monstera deliciosa"}"#;

/// A cleanly stopped store with one plant: everything is in the database file.
fn a_store(directory: &Path) {
    let mut server = Server::start_in(directory, &[]);
    server.add_ok(PLANT);
    server.add_ok(r#"{"id":8,"name":"Fern"}"#);
    assert!(server.terminate().success());
}

/// Flips one bit of the first occurrence of a text in a file.
fn flip(file: &Path, text: &[u8]) {
    let mut bytes = fs::read(file).expect("a file");
    let at = bytes.windows(text.len()).position(|part| part == text);
    bytes[at.expect("such a text") + text.len() / 2] ^= 1;
    fs::write(file, bytes).expect("a file");
}

/// The output of `check` on a damaged store.
fn problems(directory: &Path) -> String {
    let output = run(directory, &["check"]);
    let text = String::from_utf8([output.stdout, output.stderr].concat()).expect("UTF-8");
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(!text.contains("panicked"), "{text}");
    text
}

#[test]
fn an_undamaged_store_passes_even_while_a_server_runs() {
    let server = Server::start();
    server.add_ok(PLANT);
    let said = run_ok(server.directory(), &["check"]);
    assert_eq!(said, "no damage found: 1 plant, 1 token\n");
}

#[test]
fn a_corrupted_plant_is_reported_and_its_replay_is_an_error() {
    let directory = directory();
    a_store(directory.path());
    flip(&directory.path().join("plantstore.db"), b"Monstera");
    let said = problems(directory.path());
    assert!(
        said.starts_with("plant 7: its checksum does not match\n"),
        "{said}"
    );
    assert!(said.contains("1 problem found; restore"), "{said}");

    let server = Server::start_in(directory.path(), &[]);
    let response = server.add(PLANT);
    assert_eq!(response.error(), 50000, "{response:?}");
    let line = server.wait_for_line(|line| line["error_code"] == 50000);
    assert!(line.to_string().contains("plantstore check"), "{line}");
    // Other plants can be added.
    server.add_ok(r#"{"id":8,"name":"Fern"}"#);
    server.add_ok(r#"{"id":9,"name":"Ivy"}"#);
}

#[test]
fn a_corrupted_token_does_not_authenticate_and_is_reported() {
    let directory = directory();
    a_store(directory.path());
    let token = run_ok(directory.path(), &["token", "create", "reader-of-logs"]);
    flip(&directory.path().join("plantstore.db"), b"reader-of-logs");
    let said = problems(directory.path());
    assert!(
        said.contains("token 2: its checksum does not match"),
        "{said}"
    );
    assert_eq!(
        run(directory.path(), &["token", "list"]).status.code(),
        Some(1)
    );
    let server = Server::start_in(directory.path(), &[]);
    let response = server.connect().add(token.trim(), PLANT.as_bytes());
    assert_eq!(response.error(), 40101, "{response:?}");
    server.wait_for_line(|line| line["message"] == "a token is damaged; run `plantstore check`");
    server.add_ok(PLANT);
}

#[test]
fn a_plant_without_the_token_that_added_it_is_reported() {
    let directory = directory();
    a_store(directory.path());
    let store = crate::harness::open(directory.path());
    store
        .execute_batch("PRAGMA foreign_keys = OFF; DELETE FROM tokens")
        .expect("SQL");
    drop(store);
    let said = problems(directory.path());
    assert!(
        said.contains("plant 7: added by token 1, which does not exist"),
        "{said}"
    );
}

#[test]
fn a_batch_that_lists_other_plants_than_were_added_is_reported() {
    for (change, problem, is_listed) in [
        (
            "UPDATE batches SET ids = x'0000000000000009' WHERE number = 1",
            "batches: they list 1 of 2 plants",
            true,
        ),
        (
            "UPDATE batches SET ids = x'00' WHERE number = 1",
            "batch 1: its list of plants is damaged",
            false,
        ),
        (
            "UPDATE batches SET added_at = added_at + 1 WHERE number = 1",
            "batches: they list 1 of 2 plants",
            true,
        ),
        (
            "DELETE FROM batches WHERE number = 1",
            "batches: they list 1 of 2 plants",
            true,
        ),
    ] {
        let directory = directory();
        a_store(directory.path());
        let store = crate::harness::open(directory.path());
        assert_eq!(store.execute(change, []).expect("SQL"), 1);
        drop(store);
        let said = problems(directory.path());
        assert!(said.starts_with(problem), "{change}: {said}");
        let output = run(directory.path(), &["list"]);
        assert_eq!(output.status.success(), is_listed, "{change}: {output:?}");
    }
}

#[test]
fn a_corrupted_page_is_reported() {
    let directory = directory();
    a_store(directory.path());
    let store = crate::harness::open(directory.path());
    for id in 100..1000 {
        let sql = "INSERT INTO plants SELECT ?1, name, tag, added_at, added_by, checksum, batch FROM plants WHERE id = 8";
        store.execute(sql, [id]).expect("SQL");
    }
    let root: u16 = store
        .query_row(
            "SELECT rootpage FROM sqlite_schema WHERE name = 'plants'",
            [],
            |row| row.get(0),
        )
        .expect("a page");
    store
        .query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()))
        .expect("a checkpoint");
    drop(store);
    let database = directory.path().join("plantstore.db");
    let mut bytes = fs::read(&database).expect("a file");
    let root = usize::from(root);
    bytes[(root - 1) * 4096 + 12..root * 4096].fill(0xff);
    fs::write(&database, bytes).expect("a file");
    let said = problems(directory.path());
    assert!(said.contains("structure: "), "{said}");
}

#[test]
fn a_truncated_database_does_not_open() {
    let directory = directory();
    a_store(directory.path());
    let database = directory.path().join("plantstore.db");
    let bytes = fs::read(&database).expect("a file");
    fs::write(&database, &bytes[..bytes.len() - 4096]).expect("a file");
    for command in [&["check"][..], &["serve", "--listen", "127.0.0.1:0"]] {
        let output = run(directory.path(), command);
        assert_eq!(output.status.code(), Some(1));
        let said = String::from_utf8(output.stderr).expect("UTF-8");
        assert!(said.contains("restore a backup"), "{said}");
    }
}

#[test]
fn a_wal_with_a_damaged_frame_in_the_middle_is_rejected_and_one_with_a_torn_end_is_not() {
    let directory = directory();
    let mut server = Server::start_in(directory.path(), &[]);
    for id in 0..5 {
        server.add_ok(format!(r#"{{"id":{id},"name":"plant number {id}"}}"#));
    }
    server.kill();
    let log = directory.path().join("plantstore.db-wal");
    let whole = fs::read(&log).expect("a log");
    flip(&log, b"plant number 2");
    for command in [
        &["check"][..],
        &["serve", "--listen", "127.0.0.1:0"],
        &["token", "list"],
    ] {
        let output = run(directory.path(), command);
        assert_eq!(output.status.code(), Some(1));
        let said = String::from_utf8(output.stderr).expect("UTF-8");
        assert!(said.contains("plantstore.db-wal is damaged"), "{said}");
    }
    // SQLite would ignore the whole WAL because of its header, and all frames after one with another salt.
    let frame = 24 + 4096;
    let third = 32 + 2 * frame;
    for (from, to) in [
        (17, 18),
        (0, 32),
        (third + 9, third + 10),
        (third, third + 4096),
    ] {
        let mut bytes = whole.clone();
        bytes[from..to].iter_mut().for_each(|byte| *byte = !*byte);
        fs::write(&log, &bytes).expect("a log");
        let said = problems(directory.path());
        assert!(said.contains("-wal is damaged"), "{from}: {said}");
        bytes[from..to].fill(0);
        fs::write(&log, &bytes).expect("a log");
        let said = problems(directory.path());
        assert!(said.contains("-wal is damaged"), "{from}: {said}");
    }

    // A power cut leaves a part of the last commit.
    fs::write(&log, &whole[..whole.len() - 100]).expect("a log");
    // After a kill the lock file shows that the commit was complete, so the WAL was truncated later.
    let said = problems(directory.path());
    assert!(said.contains("lacks transactions"), "{said}");
    fs::remove_file(directory.path().join("plantstore.db-lock")).expect("a lock file");
    let server = Server::start_in(directory.path(), &[]);
    assert_eq!(server.plants().len(), 4);
}

/// The WAL of a running server changes while a command reads it, so it may look damaged at any time.
#[test]
fn commands_do_not_check_the_wal_of_a_running_server() {
    let directory = directory();
    let mut server = Server::start_in(directory.path(), &[]);
    for id in 0..5 {
        server.add_ok(format!(r#"{{"id":{id},"name":"plant number {id}"}}"#));
    }
    // A partially written frame.
    flip(
        &directory.path().join("plantstore.db-wal"),
        b"plant number 2",
    );
    run_ok(directory.path(), &["token", "list"]);
    server.kill();
    let said = problems(directory.path());
    assert!(said.contains("plantstore.db-wal is damaged"), "{said}");
}
