//! Backup and restore with SQLite files: rejected inputs, files that are never overwritten, and crashes.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Instant;

use crate::backup::{add_large, files};
use crate::harness::{PATIENCE, Server, directory, open, plants, plantstore, run, run_ok};

const PLANT: &str = r#"{"id":7,"name":"Monstera deliciosa"}"#;

/// The one-line error message of a command that must fail.
fn error(directory: &Path, arguments: &[&str]) -> String {
    sentence(&run(directory, arguments))
}

fn sentence(output: &Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
    stderr
}

/// Runs a command as an unprivileged user: root may do anything.
fn as_nobody(directory: &Path, arguments: &[&str]) -> Output {
    let mut command = plantstore(directory);
    command.args(arguments);
    if fs::metadata("/proc/self").expect("proc").uid() == 0 {
        command.uid(65534).gid(65534);
    }
    command.output().expect("it runs")
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("a mode");
}

/// Runs a command under `strace` with an injected fault.
fn with_fault(directory: &Path, fault: &str, arguments: &[&str]) -> Output {
    let plain = plantstore(directory);
    let calls = fault.split(':').next().expect("calls");
    let output = Command::new("strace")
        .args(["-f", "-qq", "-o", "strace.out", "-e"])
        .arg(format!("trace={calls}"))
        .arg("-e")
        .arg(format!("inject={fault}"))
        .arg(plain.get_program())
        .args(arguments)
        .current_dir(directory)
        .output();
    let _ = fs::remove_file(directory.join("strace.out"));
    output.expect("strace runs")
}

fn ids(directory: &Path) -> Vec<i64> {
    plants(directory).into_iter().map(|plant| plant.0).collect()
}

/// A directory with a backup of plant 7, and a store with 7, 8 and 9 whose server was killed: 9 is only in the WAL.
fn a_backup_and_a_newer_store(directory: &Path) {
    let mut server = Server::start_in(directory, &[]);
    server.add_ok(PLANT);
    run_ok(directory, &["backup", "plants.backup"]);
    server.add_ok(r#"{"id":8,"name":"Fern"}"#);
    server.kill();
    let mut server = Server::start_in(directory, &[]);
    server.add_ok(r#"{"id":9,"name":"Ivy"}"#);
    server.kill();
    let log = fs::metadata(directory.join("plantstore.db-wal"));
    assert!(log.expect("a log").len() > 0);
}

#[test]
fn only_a_backup_is_overwritten_and_only_with_force() {
    let server = Server::start();
    let place = server.directory();
    server.add_ok(PLANT);
    run_ok(place, &["backup", "plants.backup"]);
    let first = fs::read(place.join("plants.backup")).expect("a file");
    server.add_ok(r#"{"id":8,"name":"Fern"}"#);
    let said = error(place, &["backup", "plants.backup"]);
    assert!(said.contains("plants.backup already exists"), "{said}");
    assert_eq!(
        fs::read(place.join("plants.backup")).expect("a file"),
        first
    );
    run_ok(place, &["backup", "--force", "plants.backup"]);
    let said = run_ok(place, &["check", "plants.backup"]);
    assert_eq!(said, "no damage found: 2 plants, 1 token\n");

    fs::write(place.join("notes.txt"), "Dear gardener").expect("a file");
    run_ok(
        place,
        &["token", "create", "x", "--store", "sqlite:other.db"],
    );
    for theirs in ["notes.txt", "other.db"] {
        let said = error(place, &["backup", "--force", theirs]);
        assert!(
            said.contains("is not a backup, so it is not replaced"),
            "{said}"
        );
    }
    assert_eq!(
        fs::read_to_string(place.join("notes.txt")).expect("a file"),
        "Dear gardener"
    );
}

#[test]
fn a_backup_is_never_written_to_the_files_of_the_store() {
    let server = Server::start();
    let place = server.directory();
    server.add_ok(PLANT);
    std::os::unix::fs::symlink("plantstore.db", place.join("link.db")).expect("a link");
    fs::hard_link(place.join("plantstore.db"), place.join("hard.db")).expect("a link");
    let own =
        ["", "-wal", "-shm", "-lock", "-journal"].map(|suffix| format!("plantstore.db{suffix}"));
    for own in own
        .iter()
        .map(String::as_str)
        .chain(["./link.db", "hard.db"])
    {
        let said = error(place, &["backup", "--force", own]);
        assert!(
            said.contains("belongs to the store itself"),
            "{own}: {said}"
        );
    }
    server.add_ok(r#"{"id":8,"name":"Fern"}"#);
    run_ok(place, &["check"]);
}

#[test]
fn an_unwritable_target_is_a_one_line_error() {
    let server = Server::start();
    let place = server.directory();
    server.add_ok(PLANT);
    fs::create_dir(place.join("folder")).expect("a directory");
    let said = error(place, &["backup", "folder"]);
    assert!(said.contains("folder is not a regular file"), "{said}");
    let said = error(place, &["backup", "--force", "/dev/null"]);
    assert!(said.contains("/dev/null is not a regular file"), "{said}");
    let said = error(place, &["backup", "nowhere/plants.backup"]);
    assert!(said.contains("check that its directory exists"), "{said}");
    for (fault, expected) in [
        ("pwrite64:error=ENOSPC:when=20+", "does not fit on the disk"),
        ("fsync:error=EIO", "cannot sync"),
        ("renameat2:error=EACCES", "cannot rename a finished file"),
    ] {
        add_large(&server, 100..103);
        let said = sentence(&with_fault(place, fault, &["backup", "plants.backup"]));
        assert!(said.contains(expected), "{fault}: {said}");
        let left = files(place);
        assert!(
            !left.iter().any(|name| name.starts_with("plants.backup")),
            "{left:?}"
        );
    }
    let nowhere = directory();
    let said = error(nowhere.path(), &["backup", "plants.backup"]);
    assert!(said.contains("there is no store"), "{said}");
    assert_eq!(files(nowhere.path()), [""; 0]);
}

#[test]
fn a_backup_is_one_file_readable_by_its_owner_only_and_no_command_changes_it() {
    let server = Server::start();
    server.add_ok(PLANT);
    let elsewhere = directory();
    let place = elsewhere.path();
    let backup = place.join("plants.backup");
    let name = backup.to_str().expect("UTF-8");
    run_ok(server.directory(), &["backup", name]);
    assert_eq!(files(place), ["plants.backup"]);
    assert_eq!(fs::metadata(&backup).expect("a file").mode() & 0o777, 0o600);
    let before = fs::read(&backup).expect("a file");
    assert!(before.starts_with(b"SQLite format 3\0"));
    assert_eq!(&before[68..72], b"Plnt");

    let store = &format!("sqlite:{name}")[..];
    let sound = "no damage found: 1 plant, 1 token\n";
    assert_eq!(run_ok(place, &["check", name]), sound);
    assert_eq!(run_ok(place, &["check", "--store", store]), sound);
    run_ok(place, &["token", "list", "--store", store]);
    assert_eq!(
        run_ok(place, &["export", "--store", store]),
        format!("{PLANT}\n")
    );
    fs::create_dir(place.join("copy")).expect("a directory");
    fs::write(place.join("copy/one.csv"), "id,name\n1,Fern\n").expect("a file");
    let to = "sqlite:copy/plantstore.db";
    run_ok(place, &["copy", "--store", store, "--to", to]);
    for change in [
        &["serve", "--listen", "127.0.0.1:0"][..],
        &["token", "create", "x"],
        &["token", "revoke", "first"],
        &["migrate"],
        &["import", "copy/one.csv"],
    ] {
        let said = error(place, &[change, &["--store", store]].concat());
        assert!(
            said.contains("is a backup and is not changed"),
            "{change:?}: {said}"
        );
    }
    assert_eq!(files(place), ["copy", "plants.backup"]);
    assert_eq!(fs::read(&backup).expect("a file"), before);

    // In a read-only directory.
    set_mode(&backup, 0o444);
    set_mode(place, 0o555);
    let output = as_nobody(place, &["check", name]);
    set_mode(place, 0o755);
    assert_eq!(String::from_utf8_lossy(&output.stdout), sound, "{output:?}");
}

#[test]
fn a_damaged_backup_or_another_file_is_not_restored() {
    let server = Server::start();
    server.add_ok(PLANT);
    run_ok(server.directory(), &["backup", "plants.backup"]);
    let backup = fs::read(server.directory().join("plants.backup")).expect("a file");
    let place = directory();
    let place = place.path();
    let file = place.join("plants.backup");
    let restore = |bytes: &[u8]| {
        fs::write(&file, bytes).expect("a file");
        let said =
            String::from_utf8(run(place, &["restore", "plants.backup"]).stderr).expect("UTF-8");
        assert_eq!(
            files(place),
            ["plants.backup", "plantstore.db-lock"],
            "{said}"
        );
        said
    };
    let mut flipped = backup.clone();
    let at = flipped
        .windows(8)
        .position(|part| part == b"Monstera")
        .expect("a plant");
    flipped[at] ^= 1;
    let said = restore(&flipped);
    assert!(
        said.contains("plants.backup is damaged: 1 problem found; nothing was changed"),
        "{said}"
    );
    let said = restore(&backup[..backup.len() - 4096]);
    assert!(said.contains("damaged"), "{said}");
    for bytes in [&[][..], b"Dear gardener", &[0; 4096], &backup[..50]] {
        let said = restore(bytes);
        assert!(said.contains("plants.backup is not a backup"), "{said}");
    }
    let said = error(place, &["restore", "missing.backup"]);
    assert!(said.contains("there is no file missing.backup"), "{said}");
    let said = error(place, &["restore", "."]);
    assert!(said.contains(". is not a backup"), "{said}");
    let made = Command::new("mkfifo").arg(place.join("pipe")).status();
    assert!(made.expect("mkfifo runs").success());
    let said = error(place, &["restore", "pipe"]);
    assert!(said.contains("pipe is not a backup"), "{said}");
    // A store that may be in use is not a backup.
    let store = server.directory().join("plantstore.db");
    let said = error(place, &["restore", store.to_str().expect("UTF-8")]);
    assert!(
        said.contains("is not a backup; `plantstore backup` creates one"),
        "{said}"
    );
}

#[test]
fn a_backup_is_a_file_and_not_a_stream() {
    let server = Server::start();
    let place = server.directory();
    for command in ["backup", "restore", "check"] {
        let output = run(place, &[command, "-"]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains("must be a file"), "{said}");
        assert!(said.contains("plantstore export"), "{said}");
    }
    let output = run(place, &["check", "--store", "sqlite:-"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(!files(place).contains(&"-".to_owned()));
}

#[test]
fn the_error_about_a_damaged_backup_suggests_another_backup() {
    let directory = directory();
    let place = directory.path();
    let mut server = Server::start_in(place, &[]);
    server.add_ok(PLANT);
    run_ok(place, &["backup", "plants.backup"]);
    assert!(server.terminate().success());
    let backup = fs::read(place.join("plants.backup")).expect("a file");
    let store = fs::read(place.join("plantstore.db")).expect("a file");
    let at = |bytes: &[u8]| bytes.windows(8).position(|part| part == b"Monstera");
    let flipped = |bytes: &[u8]| {
        let mut bytes = bytes.to_vec();
        let at = at(&bytes).expect("a plant");
        bytes[at] ^= 1;
        bytes
    };
    // Page 1 starts with the file header, followed by the schema table.
    let wiped = |bytes: &[u8], range: std::ops::Range<usize>| {
        let mut bytes = bytes.to_vec();
        bytes[range].fill(0xff);
        bytes
    };
    let check = |file: &str, bytes: &[u8]| {
        fs::write(place.join(file), bytes).expect("a file");
        sentence(&run(place, &["check", file]))
    };
    for damaged in [
        flipped(&backup),
        backup[..backup.len() - 4096].to_vec(),
        wiped(&backup, 100..200),
        wiped(&backup, 0..16),
    ] {
        let said = check("plants.backup", &damaged);
        assert!(!said.contains("restore a backup"), "{said}");
        assert!(said.contains("plants.backup"), "{said}");
        assert!(said.contains("damaged"), "{said}");
        assert!(said.contains("do not rely on"), "{said}");
        assert!(said.contains("`plantstore backup`"), "{said}");
        let store = ["--force", "--store", "sqlite:other.db"];
        let restore = [&["restore", "plants.backup"], &store[..]].concat();
        let said = String::from_utf8(run(place, &restore).stderr).expect("UTF-8");
        assert!(!said.contains("restore a backup"), "{said}");
        assert!(!said.contains("partial"), "{said}");
        assert!(!place.join("other.db").exists(), "{said}");
    }
    for damaged in [flipped(&store), wiped(&store, 100..200)] {
        let said = check("plantstore.db", &damaged);
        assert!(said.contains("restore a backup"), "{said}");
    }
    fs::write(place.join("notes.txt"), "Dear gardener").expect("a file");
    let said = error(place, &["check", "notes.txt"]);
    assert!(
        said.contains("notes.txt is not a store or a backup"),
        "{said}"
    );
    assert!(!said.contains("--store"), "{said}");
    let made = Command::new("mkfifo").arg(place.join("fifo")).status();
    assert!(made.expect("mkfifo runs").success());
    assert_eq!(run(place, &["check", "fifo"]).status.code(), Some(1));
    let said = error(place, &["check", "missing.backup"]);
    assert!(said.contains("there is no file missing.backup"), "{said}");
}

#[test]
fn a_damaged_store_is_not_backed_up() {
    let directory = directory();
    let place = directory.path();
    let mut server = Server::start_in(place, &[]);
    server.add_ok(PLANT);
    assert!(server.terminate().success());
    run_ok(place, &["backup", "plants.backup"]);
    let good = fs::read(place.join("plants.backup")).expect("a file");
    let mut bytes = fs::read(place.join("plantstore.db")).expect("a file");
    let at = bytes
        .windows(8)
        .position(|part| part == b"Monstera")
        .expect("a plant");
    bytes[at] ^= 1;
    fs::write(place.join("plantstore.db"), bytes).expect("a file");
    let output = run(place, &["backup", "--force", "plants.backup"]);
    assert_eq!(output.stdout, b"plant 7: its checksum does not match\n");
    assert!(sentence(&output).contains("no backup was made"));
    assert_eq!(fs::read(place.join("plants.backup")).expect("a file"), good);
}

#[test]
fn a_store_in_use_is_not_replaced() {
    let server = Server::start();
    let place = server.directory();
    server.add_ok(PLANT);
    run_ok(place, &["backup", "plants.backup"]);
    for force in [&[][..], &["--force"]] {
        let said = error(place, &[&["restore", "plants.backup"], force].concat());
        assert!(
            said.contains("is in use by another plantstore (process"),
            "{said}"
        );
    }
    server.add_ok(r#"{"id":8,"name":"Fern"}"#);
    let directory = place.to_owned();
    let mut server = server;
    server.kill();

    let said = error(&directory, &["restore", "plants.backup"]);
    assert!(said.contains("plantstore.db already exists"), "{said}");
    // A reading process prevents a restore as well: when it exits, SQLite would delete the WAL of the next server.
    let reader = open(&directory);
    reader
        .execute_batch("BEGIN; SELECT count(*) FROM plants")
        .expect("SQL");
    let said = error(&directory, &["restore", "--force", "plants.backup"]);
    assert!(said.contains("is being used by another program"), "{said}");
    drop(reader);
    assert_eq!(ids(&directory), [7, 8]);
    let said = error(&directory, &["restore", "--force", "plantstore.db"]);
    assert!(said.contains("belongs to the store itself"), "{said}");
}

#[test]
fn a_replaced_store_is_kept_complete_and_its_wal_is_not_applied_to_the_new_one() {
    let directory = directory();
    let place = directory.path();
    a_backup_and_a_newer_store(place);
    let output = run(place, &["restore", "--force", "plants.backup"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    let kept = files(place)
        .into_iter()
        .find(|name| name.contains("-before-"));
    let kept = kept.expect("the old store");
    assert!(said.contains(&kept), "{said}");
    assert_eq!(ids(place), [7]);
    let server = Server::start_in(place, &[]);
    server.add_ok(r#"{"id":9,"name":"another"}"#);
    assert_eq!(ids(place), [7, 9]);
    drop(server);

    // And restore the old store.
    assert_eq!(
        run_ok(place, &["check", &kept]),
        "no damage found: 3 plants, 1 token\n"
    );
    fs::create_dir(place.join("again")).expect("a directory");
    let again = "sqlite:again/plantstore.db";
    run_ok(place, &["restore", &kept, "--store", again]);
    assert_eq!(ids(&place.join("again")), [7, 8, 9]);
}

#[test]
fn a_damaged_store_is_replaced_and_kept_with_its_wal() {
    let directory = directory();
    let place = directory.path();
    a_backup_and_a_newer_store(place);
    let mut server = Server::start_in(place, &[]);
    add_large(&server, 100..105);
    server.kill();
    let log = place.join("plantstore.db-wal");
    let mut bytes = fs::read(&log).expect("a log");
    bytes[..32].fill(0xff);
    fs::write(&log, &bytes).expect("a log");
    let said = error(place, &["check"]);
    assert!(said.contains("plantstore.db-wal is damaged"), "{said}");
    run_ok(place, &["restore", "--force", "plants.backup"]);
    assert_eq!(ids(place), [7]);
    let kept: Vec<_> = files(place)
        .into_iter()
        .filter(|name| name.contains("-before-"))
        .collect();
    assert_eq!(kept.len(), 2, "{kept:?}");
    assert!(kept[1].ends_with("-wal"), "{kept:?}");
    assert_eq!(fs::read(place.join(&kept[1])).expect("a file"), bytes);
    Server::start_in(place, &[]).add_ok(PLANT);
}

#[test]
fn a_restore_that_is_killed_at_any_time_leaves_the_old_store_or_the_new_one() {
    let origin = directory();
    a_backup_and_a_newer_store(origin.path());
    let (mut olds, mut news) = (0, 0);
    for call in [
        "pwrite64",
        "ftruncate",
        "fsync",
        "fdatasync",
        "unlink",
        "rename",
        "renameat2",
        "write",
    ] {
        for moment in 1.. {
            let directory = directory();
            let place = directory.path();
            for file in files(origin.path())
                .iter()
                .filter(|name| !name.ends_with("-shm"))
            {
                fs::copy(origin.path().join(file), place.join(file)).expect("a copy");
            }
            let fault = format!("{call}:signal=KILL:when={moment}");
            let restore = with_fault(place, &fault, &["restore", "--force", "plants.backup"]);
            run_ok(place, &["check"]);
            match ids(place)[..] {
                [7, 8, 9] => olds += 1,
                [7] => news += 1,
                ref other => panic!("killed at {call} {moment}: {other:?}"),
            }
            if restore.status.success() {
                break;
            }
            run_ok(place, &["restore", "--force", "plants.backup"]);
            assert_eq!(ids(place), [7]);
            let left = files(place);
            assert!(
                !left.iter().any(|name| name.contains("plantstore-tmp")),
                "{left:?}"
            );
            assert!(moment < 100, "it does not end");
        }
    }
    assert!(olds > 10 && news > 10, "{olds} and {news}");
}

#[test]
fn a_wal_that_grew_under_a_long_reader_is_truncated_afterwards_and_adds_continue() {
    let server = Server::start();
    let reader = open(server.directory());
    reader
        .execute_batch("BEGIN; SELECT count(*) FROM plants")
        .expect("SQL");
    add_large(&server, 1000..1500);
    let log = server.directory().join("plantstore.db-wal");
    let size = || fs::metadata(&log).expect("a log").len();
    assert!(size() > 48 << 20, "{} bytes", size());
    reader.execute_batch("COMMIT").expect("SQL");
    let end = Instant::now() + PATIENCE;
    for id in 0.. {
        add_large(&server, id..id + 1);
        if size() <= 32 << 20 {
            break;
        }
        assert!(Instant::now() < end, "{} bytes", size());
    }
}
