//! Backup and restore on both stores: under load, while a server or a backup is killed, and into a store that exists.

use std::fs;
use std::ops::Range;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::harness::{
    Client, Server, directory, plants, plantstore, run, run_ok, wait_for_exit, wait_until,
};

/// The body of a plant, derived from its id.
fn body(id: i64) -> String {
    let tag = if id % 2 == 0 { r#","tag":"even""# } else { "" };
    let name = format!("{id} ").repeat(200);
    format!(r#"{{"id":{id},"name":"{name}"{tag}}}"#)
}

/// Adds plants over several connections while `work` runs. Records the ids of the acknowledged ones.
fn under_load<T>(server: &Server, acknowledged: &Mutex<Vec<i64>>, work: impl FnOnce() -> T) -> T {
    let over = AtomicBool::new(false);
    let (address, token) = (server.address(), &server.token());
    thread::scope(|scope| {
        for client in 0..4 {
            let over = &over;
            scope.spawn(move || {
                let mut connection = Client::connect(address);
                let mut id = client;
                while !over.load(Ordering::Relaxed) {
                    let response = connection.add(token, body(id).as_bytes());
                    assert_eq!(response.status, 200, "{response:?}");
                    acknowledged.lock().expect("no panic").push(id);
                    id += 4;
                }
            });
        }
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        over.store(true, Ordering::Relaxed);
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Adds large plants, which take long to copy.
pub fn add_large(server: &Server, ids: Range<i64>) {
    let token = server.token();
    let mut client = server.connect();
    let name = "x".repeat(100_000);
    for id in ids {
        let body = format!(r#"{{"id":{id},"name":"{name}"}}"#);
        assert_eq!(client.add(&token, body.as_bytes()).status, 200);
    }
}

/// A backup that is copying.
fn start_backup(directory: &Path, file: &str) -> Child {
    let mut command = plantstore(directory);
    command.args(["backup", file]).stderr(Stdio::piped());
    let backup = command.spawn().expect("it starts");
    let is_temporary = |name: &String| name.starts_with(file) && name.ends_with(".plantstore-tmp");
    wait_until("it copies", || files(directory).iter().any(is_temporary));
    backup
}

/// The names of the files in a directory.
pub fn files(directory: &Path) -> Vec<String> {
    let files = fs::read_dir(directory).expect("a directory");
    let name = |file: fs::DirEntry| file.file_name().into_string().expect("UTF-8");
    let mut names: Vec<_> = files.map(|file| name(file.expect("a file"))).collect();
    names.sort();
    names
}

#[test]
fn a_backup_under_load_has_every_plant_acknowledged_before_it_and_can_be_restored_and_served() {
    let server = Server::start();
    // Enough pages that plants are added between two steps of the copy.
    add_large(&server, -300..0);
    let acknowledged: Mutex<Vec<i64>> = Mutex::new((-300..0).collect());
    let count = || acknowledged.lock().expect("no panic").len();
    let (before, during) = under_load(&server, &acknowledged, || {
        wait_until("there are many plants", || count() >= 1300);
        let before = acknowledged.lock().expect("no panic").clone();
        run_ok(server.directory(), &["backup", "plants.backup"]);
        let during = count() - before.len();
        (before, during)
    });
    assert!(during > 0, "no plant was added while the backup was made");

    let backup = server.directory().join("plants.backup");
    let backup = backup.to_str().expect("UTF-8");
    let elsewhere = directory();
    run_ok(elsewhere.path(), &["restore", backup]);
    let all = server.plants();
    let restored = plants(elsewhere.path());
    for plant in &restored {
        assert!(all.binary_search(plant).is_ok(), "{plant:?}");
    }
    let ids: Vec<i64> = restored.iter().map(|plant| plant.0).collect();
    for id in before {
        assert!(ids.binary_search(&id).is_ok(), "plant {id} is not in it");
    }

    let second = Server::start_in(elsewhere.path(), &[]);
    let mut client = second.connect();
    let token = server.token();
    for id in [ids[300], ids[ids.len() - 1], -301] {
        let response = client.add(&token, body(id).as_bytes());
        assert_eq!(response.status, 200, "{response:?}");
    }
    let response = client.add(
        &token,
        format!(r#"{{"id":{},"name":"x"}}"#, ids[0]).as_bytes(),
    );
    assert_eq!(response.error(), 40009);
    assert_eq!(second.plants().len(), restored.len() + 1);
}

#[test]
fn killing_the_server_during_a_backup_does_not_harm_the_backup() {
    let mut server = Server::start();
    add_large(&server, 1000..1300);
    let mut backup = start_backup(server.directory(), "plants.backup");
    server.kill();
    assert!(wait_for_exit(&mut backup).success());
    let said = run_ok(server.directory(), &["check", "plants.backup"]);
    assert_eq!(said, "no damage found: 300 plants, 1 token\n");
    let directory = server.directory().to_owned();
    Server::start_in(&directory, &[]).add_ok(r#"{"id":1,"name":"x"}"#);
}

#[test]
fn a_killed_backup_leaves_no_file_and_the_next_one_is_complete() {
    let server = Server::start();
    add_large(&server, 1000..1300);
    let mut backup = start_backup(server.directory(), "plants.backup");
    backup.kill().expect("it was running");
    assert!(!wait_for_exit(&mut backup).success(), "it was too fast");
    assert!(!server.directory().join("plants.backup").exists());
    server.add_ok(r#"{"id":1,"name":"x"}"#);

    run_ok(server.directory(), &["backup", "plants.backup"]);
    let said = run_ok(server.directory(), &["check", "plants.backup"]);
    assert_eq!(said, "no damage found: 301 plants, 1 token\n");
    let files = files(server.directory());
    assert!(
        !files.iter().any(|name| name.contains("plantstore-tmp")),
        "{files:?}"
    );
}

#[test]
fn two_concurrent_backups_to_one_file_are_not_mixed() {
    let server = Server::start();
    add_large(&server, 1000..1300);
    let mut first = start_backup(server.directory(), "plants.backup");
    let second = run(server.directory(), &["backup", "plants.backup"]);
    assert_eq!(second.status.code(), Some(1));
    let said = String::from_utf8(second.stderr).expect("UTF-8");
    assert!(
        said.contains("is being written by another plantstore"),
        "{said}"
    );
    assert!(wait_for_exit(&mut first).success());
    run_ok(server.directory(), &["check", "plants.backup"]);
}

#[test]
fn an_existing_store_is_not_overwritten_without_force() {
    let mut server = Server::start();
    add_large(&server, 0..3);
    run_ok(server.directory(), &["backup", "plants.backup"]);
    server.kill();
    let rejected = run(server.directory(), &["restore", "plants.backup"]);
    assert_eq!(rejected.status.code(), Some(1));
    let said = String::from_utf8(rejected.stderr).expect("UTF-8");
    assert!(said.contains("--force"), "{said}");
    run_ok(server.directory(), &["restore", "plants.backup", "--force"]);
    assert_eq!(server.plants().len(), 3);
}
