//! `base-backup.sh` and `restore.sh` of `deploy/ha`: which backups and which WAL they keep, and what a recovery reads. The backups are made
//! by scripts in place of `pg_basebackup` and `pg_verifybackup`; the fault suite uses the real ones.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

use crate::harness::{directory, output};

const BASE_BACKUP: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/ha/base-backup.sh");
const RESTORE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/ha/restore.sh");

/// The machine with the backups of members `pg1` and `pg2`.
struct Backups(TempDir);

impl Backups {
    fn new() -> Self {
        let backups = Self(directory());
        for member in ["pg1", "pg2"] {
            fs::create_dir_all(backups.path("backups/wal").join(member)).expect("a directory");
        }
        fs::create_dir_all(backups.path("backups/base")).expect("a directory");
        fs::create_dir(backups.path("programs")).expect("a directory");
        let ours = backups.path("programs/pg_archivecleanup");
        symlink(installed("pg_archivecleanup"), ours).expect("a link");
        backups.program("pg_verifybackup", "test -f unfinished/backup_label");
        backups
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn program(&self, name: &str, script: &str) {
        let path = self.path("programs").join(name);
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).expect("a file");
        fs::set_permissions(path, Permissions::from_mode(0o755)).expect("a mode");
    }

    /// A backup of an earlier night, which begins at this segment.
    fn add(&self, name: &str, segment: &str) {
        let backup = self.path("backups/base").join(name);
        fs::create_dir(&backup).expect("a directory");
        fs::write(backup.join("backup_label"), label(segment)).expect("a file");
        fs::write(backup.join("standby.signal"), "").expect("a file");
        let settings = "primary_conninfo = 'host=pg1'\n";
        fs::write(backup.join("postgresql.auto.conf"), settings).expect("a file");
    }

    fn archive(&self, member: &str, files: &[&str]) {
        for file in files {
            let path = self.path("backups/wal").join(member).join(file);
            fs::write(path, format!("{file} of {member}")).expect("a file");
        }
    }

    fn archived(&self, member: &str) -> BTreeSet<String> {
        names(&self.path("backups/wal").join(member))
    }

    /// The names of the backups, without the file of the lock.
    fn names(&self) -> BTreeSet<String> {
        let mut names = names(&self.path("backups/base"));
        names.remove("lock");
        names
    }

    fn base_backup(&self, keep: &str) -> Command {
        let mut command = Command::new("sh");
        command.args([BASE_BACKUP, "backups"]);
        self.prepare(&mut command, keep);
        command
    }

    fn prepare(&self, command: &mut Command, keep: &str) {
        command
            .current_dir(self.0.path())
            .env("PG_BIN_DIR", self.path("programs"))
            .env("KEEP", keep)
            .env_remove("PGCONNECT_TIMEOUT");
    }

    /// Makes a backup that begins at this segment; returns its name.
    fn make(&self, keep: &str, segment: &str) -> String {
        let label = label(segment);
        let script = format!("mkdir unfinished && echo '{label}' >unfinished/backup_label");
        self.program("pg_basebackup", &script);
        let output = output(&mut self.base_backup(keep));
        assert!(output.status.success(), "{output:?}");
        let printed = String::from_utf8(output.stdout).expect("UTF-8");
        printed.trim_end().to_owned()
    }

    fn restore(&self, time: Option<&str>) -> Output {
        let mut command = Command::new("sh");
        command.current_dir(self.0.path());
        output(command.args([RESTORE, "backups", "restored"]).args(time))
    }

    /// Runs the command by which PostgreSQL gets a file during a recovery: its exit code, and what it has copied.
    fn recover(&self, file: &str) -> (Option<i32>, Option<String>) {
        let settings = fs::read_to_string(self.path("restored/postgresql.conf")).expect("a file");
        let command = settings
            .lines()
            .find_map(|line| line.strip_prefix("restore_command = '")?.strip_suffix('\''))
            .expect("a command");
        let command = command.replace("%f", file).replace("%p", "recovered");
        let mut shell = Command::new("sh");
        let output = output(shell.args(["-c", &command]).current_dir(self.0.path()));
        let recovered = self.path("recovered");
        let content = fs::read_to_string(&recovered).ok();
        let _ = fs::remove_file(recovered);
        (output.status.code(), content)
    }
}

fn label(segment: &str) -> String {
    format!("START WAL LOCATION: 0/28 (file {segment})\nCHECKPOINT LOCATION: 0/60")
}

fn names(directory: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(directory).expect("a directory");
    let names = entries.map(|entry| entry.expect("an entry").file_name());
    names
        .map(|name| name.into_string().expect("UTF-8"))
        .collect()
}

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

/// A program of the newest installed version of PostgreSQL.
fn installed(name: &str) -> PathBuf {
    let versions = fs::read_dir("/usr/lib/postgresql").expect("PostgreSQL: `make setup`");
    let programs = versions.map(|version| version.expect("an entry").path().join("bin").join(name));
    let newest = programs.filter(|program| program.exists()).max();
    newest.expect("PostgreSQL is installed: `make setup`")
}

fn printed(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

fn failure(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    String::from_utf8(output.stderr.clone()).expect("UTF-8")
}

#[test]
fn the_newest_backups_are_kept_with_the_wal_that_they_need() {
    let backups = Backups::new();
    backups.add("2026-01-01T03:00:00Z", "000000010000000000000010");
    backups.add("2026-01-02T03:00:00Z", "000000010000000000000020");
    backups.archive(
        "pg1",
        &[
            "00000001000000000000000F",
            "00000001000000000000001F",
            "000000010000000000000020",
        ],
    );
    backups.archive(
        "pg2",
        &[
            "00000002.history",
            "00000001000000000000001F.partial",
            "00000002000000000000001F",
            "000000020000000000000020",
        ],
    );
    let new = backups.make("2", "000000020000000000000030");
    assert_eq!(backups.names(), set(&["2026-01-02T03:00:00Z", &new]));
    assert_eq!(backups.archived("pg1"), set(&["000000010000000000000020"]));
    assert_eq!(
        backups.archived("pg2"),
        set(&["00000002.history", "000000020000000000000020"])
    );
}

/// The new timeline of a restored cluster begins at a lower position than backups that are still kept.
#[test]
fn wal_of_newer_backups_is_kept_after_a_restore_to_an_earlier_time() {
    let backups = Backups::new();
    backups.add("2026-01-03T03:00:00Z", "000000010000000000000090");
    backups.add("2026-01-04T03:00:00Z", "000000020000000000000062");
    backups.archive(
        "pg1",
        &["00000001000000000000005F", "000000010000000000000090"],
    );
    let needed = [
        "00000002.history",
        "000000020000000000000062",
        "000000020000000000000070",
    ];
    backups.archive("pg2", &needed);
    backups.make("3", "000000020000000000000070");
    assert_eq!(backups.archived("pg1"), set(&["000000010000000000000090"]));
    assert_eq!(backups.archived("pg2"), set(&needed));
}

#[test]
fn nothing_is_deleted_without_a_new_backup() {
    let backups = Backups::new();
    let nights = [
        ("2026-01-01T03:00:00Z", "000000010000000000000010"),
        ("2026-01-02T03:00:00Z", "000000010000000000000020"),
    ];
    for (night, segment) in nights {
        backups.add(night, segment);
    }
    let files = ["000000010000000000000001", "000000010000000000000011"];
    backups.archive("pg1", &files);
    let unchanged = |command: &mut Command, reason: &str| {
        let said = failure(&output(command));
        assert!(said.contains(reason), "{said}");
        assert_eq!(backups.names(), set(&nights.map(|(night, _)| night)));
        assert_eq!(backups.archived("pg1"), set(&files));
    };

    backups.program("pg_basebackup", "mkdir unfinished; exit 1");
    unchanged(&mut backups.base_backup("1"), "pg_basebackup failed");

    backups.program("pg_basebackup", "mkdir unfinished");
    unchanged(&mut backups.base_backup("1"), "the backup is damaged");

    let mut locked = Command::new("flock");
    locked.args(["backups/base/lock", "sh", BASE_BACKUP, "backups"]);
    backups.prepare(&mut locked, "1");
    unchanged(&mut locked, "another backup is running");

    for keep in ["0", "-1", "x"] {
        unchanged(&mut backups.base_backup(keep), "KEEP");
    }
}

#[test]
fn no_wal_is_deleted_if_a_backup_does_not_name_its_first_segment() {
    let backups = Backups::new();
    backups.add("2026-01-02T03:00:00Z", "000000010000000000000020");
    let label = backups.path("backups/base/2026-01-02T03:00:00Z/backup_label");
    fs::write(label, "").expect("a file");
    backups.archive("pg1", &["000000010000000000000001"]);
    let script = "mkdir unfinished && touch unfinished/backup_label";
    backups.program("pg_basebackup", script);
    let said = failure(&output(&mut backups.base_backup("2")));
    assert!(said.contains("no WAL was deleted"), "{said}");
    assert_eq!(backups.archived("pg1"), set(&["000000010000000000000001"]));
}

#[test]
fn a_host_that_does_not_respond_is_passed_over() {
    let backups = Backups::new();
    backups.program("pg_basebackup", "echo \"$PGCONNECT_TIMEOUT\" >&2; exit 1");
    let said = failure(&output(&mut backups.base_backup("2")));
    assert!(said.starts_with("10\n"), "{said}");
}

#[test]
fn the_newest_backup_before_the_time_is_restored() {
    let restored = |time, expected: &str| {
        let backups = Backups::new();
        backups.add("2026-01-01T03:00:00Z", "000000010000000000000010");
        backups.add("2026-01-02T03:00:00Z", "000000010000000000000020");
        backups.archive(
            "pg1",
            &["000000010000000000000020", "000000010000000000000021"],
        );
        backups.archive("pg2", &["000000010000000000000020"]);
        assert_eq!(printed(&backups.restore(time)), expected);
        let files = names(&backups.path("restored"));
        let expected = [
            "backup_label",
            "pg_hba.conf",
            "postgresql.auto.conf",
            "postgresql.conf",
            "recovery.signal",
        ];
        assert_eq!(files, set(&expected));
        let member = fs::read_to_string(backups.path("restored/postgresql.auto.conf"));
        assert_eq!(member.expect("a file"), "");
        // That of the cluster may require TLS, or exclude this machine.
        let hba = fs::read_to_string(backups.path("restored/pg_hba.conf")).expect("a file");
        let lines = "host all all 127.0.0.0/8 scram-sha-256\nhost all all ::1/128 scram-sha-256\n";
        assert_eq!(hba, lines);
        fs::read_to_string(backups.path("restored/postgresql.conf")).expect("a file")
    };
    let settings = restored(
        None,
        "restored: backup 2026-01-02T03:00:00Z, to be recovered to the end of the archived WAL, 000000010000000000000021\n",
    );
    assert!(!settings.contains("recovery_target_time"), "{settings}");
    let settings = restored(
        Some("2026-01-02 04:30:00.25+01:30"),
        "restored: backup 2026-01-01T03:00:00Z, to be recovered to 2026-01-02 03:00:00.250000+00\n",
    );
    let target = "recovery_target_time = '2026-01-02 03:00:00.250000+00'";
    assert!(settings.contains(target), "{settings}");
    restored(
        Some("2026-01-02 03:00:01Z"),
        "restored: backup 2026-01-02T03:00:00Z, to be recovered to 2026-01-02 03:00:01.000000+00\n",
    );

    let backups = Backups::new();
    backups.add("2026-01-01T03:00:00Z", "000000010000000000000010");
    let said = failure(&backups.restore(Some("2026-01-01 03:00:00Z")));
    assert!(said.contains("there is no backup"), "{said}");
    let said = failure(&backups.restore(Some("yesterday's")));
    assert!(said.contains("not a time"), "{said}");
    let said = failure(&backups.restore(Some("tomorrow")));
    assert!(said.contains("is in the future"), "{said}");
}

#[test]
fn recovery_reads_the_wal_of_all_members_and_stops_where_a_new_timeline_begins() {
    let backups = Backups::new();
    backups.add("2026-01-01T03:00:00Z", "000000010000000000000010");
    backups.archive(
        "pg1",
        &["000000010000000000000011", "000000010000000000000012"],
    );
    backups.archive(
        "pg2",
        &[
            "00000002.history",
            "000000010000000000000010",
            "000000010000000000000011.partial",
        ],
    );
    let said = printed(&backups.restore(None));
    assert!(said.ends_with("WAL, 00000002.history\n"), "{said}");
    let recovered = |file, content: &str| {
        assert_eq!(backups.recover(file), (Some(0), Some(content.to_owned())));
    };
    recovered("00000002.history", "00000002.history of pg2");
    recovered(
        "000000010000000000000010",
        "000000010000000000000010 of pg2",
    );
    // Member pg1 has written the rest of this segment after pg2 was promoted.
    recovered(
        "000000010000000000000011",
        "000000010000000000000011.partial of pg2",
    );
    assert_eq!(backups.recover("000000010000000000000013"), (Some(1), None));
}

/// PostgreSQL takes exit code 1 for the end of the WAL, and one above 125 for an error.
#[test]
fn recovery_fails_if_archived_wal_cannot_be_read() {
    let backups = Backups::new();
    backups.add("2026-01-01T03:00:00Z", "000000010000000000000010");
    printed(&backups.restore(None));
    // A directory cannot be copied as a file, also by root.
    fs::create_dir(backups.path("backups/wal/pg1/000000010000000000000010")).expect("a directory");
    assert_eq!(
        backups.recover("000000010000000000000010"),
        (Some(255), None)
    );

    fs::remove_dir_all(backups.path("backups/wal")).expect("the archives");
    assert_eq!(
        backups.recover("000000010000000000000010"),
        (Some(255), None)
    );
    fs::remove_dir_all(backups.path("restored")).expect("a directory");
    let said = failure(&backups.restore(None));
    assert!(said.contains("backups/wal cannot be read"), "{said}");
}
