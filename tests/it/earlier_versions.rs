//! Stores and backups of every schema version (`tests/fixtures/`) are opened by this version.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use rusqlite::Connection;
use tempfile::TempDir;

use crate::harness::{Server, directory, open, run, run_ok};

/// The schema version of SQLite stores that this plantstore makes.
const VERSION: u32 = 7;

/// The first version that had backups, and the first that had rotated tokens.
const VERSION_WITH_BACKUPS: u32 = 2;
const VERSION_WITH_ROTATION: u32 = 7;

/// The plants of every fixture, in the order of their ids.
const PLANTS: &str = r#"{"id":-3,"name":"\u0000 Säulenkaktus 🌵","tag":""}
{"id":1,"name":"Monstera"}
{"id":9223372036854775807,"name":"Fern","tag":"shade"}
"#;

/// The plant that is only in the WAL of a server that was killed.
const IN_THE_WAL: &str = r#"{"id":4,"name":"Orchid"}"#;

/// An unpacked fixture.
pub struct Fixture {
    version: u32,
    place: TempDir,
}

impl Fixture {
    pub fn all() -> impl Iterator<Item = Self> {
        (1..=VERSION).map(Self::unpack)
    }

    fn unpack(version: u32) -> Self {
        let root = env!("CARGO_MANIFEST_DIR");
        let archive = format!("{root}/tests/fixtures/schema-{version}.tar.gz");
        let place = directory();
        let tar = ["--no-same-owner", "-xzf", &archive];
        let status = Command::new("tar")
            .args(tar)
            .current_dir(place.path())
            .status();
        assert!(status.expect("tar runs").success(), "{archive}");
        let wal_len = |store| {
            let wal = place.path().join(store).join("plantstore.db-wal");
            wal.metadata().map_or(0, |wal| wal.len())
        };
        assert!(wal_len("killed") > 0, "{archive}");
        assert_eq!(wal_len("stopped"), 0, "{archive}");
        Self { version, place }
    }

    /// `stopped` or `killed`.
    fn store(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    pub fn backup(&self) -> Option<PathBuf> {
        let backup = self.place.path().join("backup/plants.backup");
        assert_eq!(backup.exists(), self.version >= VERSION_WITH_BACKUPS);
        backup.exists().then_some(backup)
    }

    pub fn tokens(&self) -> u32 {
        3 + u32::from(self.version >= VERSION_WITH_ROTATION)
    }

    fn secret(&self, token: &str) -> String {
        let file = self.store("stopped").join(format!("{token}.token"));
        let secret = fs::read_to_string(file).expect("a token");
        secret.trim().to_owned()
    }

    /// The tokens work as they did, and plants can be added.
    pub fn serves(&self, server: &Server) {
        let version = self.version;
        let add =
            |token: &str, body: &str| server.connect().add(&self.secret(token), body.as_bytes());
        let replay = add("ci", r#"{"id":1,"name":"Monstera"}"#);
        assert_eq!(replay.status, 200, "version {version}: {replay:?}");
        let conflict = add("first", r#"{"id":1,"name":"Fern"}"#);
        assert_eq!(conflict.error(), 40009, "version {version}");
        let new = add("first", r#"{"id":5,"name":"Ivy"}"#);
        assert_eq!(new.status, 200, "version {version}: {new:?}");
        let revoked = add("gone", r#"{"id":6,"name":"Ivy"}"#);
        assert_eq!(revoked.error(), 40101, "version {version}");
        if version >= VERSION_WITH_ROTATION {
            let rotated = add("rotated", r#"{"id":5,"name":"Ivy"}"#);
            assert_eq!(rotated.status, 200, "version {version}: {rotated:?}");
        }
    }

    pub fn has_the_plants(&self, directory: &Path, more: &[&str]) {
        let sorted = |text: &str| {
            let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
            lines.sort();
            lines
        };
        let exported = run_ok(directory, &["export", "-"]);
        let expected = format!("{PLANTS}{}", more.join("\n"));
        assert_eq!(
            sorted(&exported),
            sorted(&expected),
            "version {}",
            self.version
        );
    }
}

fn user_version(directory: &Path) -> u32 {
    let version = open(directory).pragma_query_value(None, "user_version", |row| row.get(0));
    version.expect("a version")
}

#[test]
fn there_is_a_fixture_for_every_schema_version() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let steps = fs::read_dir(root.join("migrations/sqlite")).expect("migrations");
    assert_eq!(steps.count(), VERSION as usize);
    for fixture in Fixture::all() {
        assert_eq!(user_version(&fixture.store("stopped")), fixture.version);
        assert_eq!(user_version(&fixture.store("killed")), fixture.version);
    }
}

#[test]
fn a_store_of_every_version_is_served_and_has_its_plants_and_tokens() {
    for fixture in Fixture::all() {
        let store = fixture.store("stopped");
        let mut server = Server::start_in(&store, &[]);
        fixture.has_the_plants(&store, &[]);
        fixture.serves(&server);
        assert_eq!(server.terminate().code(), Some(0));
        assert_eq!(user_version(&store), VERSION);
        fixture.has_the_plants(&store, &[r#"{"id":5,"name":"Ivy"}"#]);
        let checked = run_ok(&store, &["check"]);
        let tokens = fixture.tokens();
        assert_eq!(
            checked,
            format!("no damage found: 4 plants, {tokens} tokens\n")
        );
    }
}

#[test]
fn a_store_of_every_version_whose_server_was_killed_has_the_plants_of_its_wal() {
    for fixture in Fixture::all() {
        let store = fixture.store("killed");
        let server = Server::start_in(&store, &[]);
        fixture.has_the_plants(&store, &[IN_THE_WAL]);
        fixture.serves(&server);
    }
}

#[test]
fn every_command_upgrades_a_store_of_every_version() {
    let commands: [&[&str]; 7] = [
        &["list"],
        &["get", "4"],
        &["stats"],
        &["check"],
        &["token", "list"],
        &["backup", "new.backup"],
        &["migrate"],
    ];
    for command in commands {
        for fixture in Fixture::all() {
            let store = fixture.store("killed");
            run_ok(&store, command);
            assert_eq!(user_version(&store), VERSION, "{command:?}");
            fixture.has_the_plants(&store, &[IN_THE_WAL]);
        }
    }
}

#[test]
fn a_backup_of_every_version_is_read_and_restored_and_not_changed() {
    for fixture in Fixture::all() {
        let Some(backup) = fixture.backup() else {
            continue;
        };
        let before = fs::read(&backup).expect("a backup");
        let file = backup.to_str().expect("UTF-8");
        let tokens = fixture.tokens();
        let counts = format!("no damage found: 3 plants, {tokens} tokens\n");
        let place = directory();
        assert_eq!(run_ok(place.path(), &["check", file]), counts);
        let store = format!("sqlite:{file}");
        let listed = run_ok(place.path(), &["list", "--store", &store]);
        assert!(listed.contains("Monstera"), "{listed}");
        let refused = run(place.path(), &["token", "create", "a", "--store", &store]);
        let sentence = String::from_utf8_lossy(&refused.stderr);
        assert!(
            sentence.contains("is a backup and is not changed"),
            "{sentence}"
        );

        run_ok(place.path(), &["restore", file]);
        assert_eq!(run_ok(place.path(), &["check"]), counts);
        fixture.has_the_plants(place.path(), &[]);
        fixture.serves(&Server::start_in(place.path(), &[]));
        assert_eq!(fs::read(&backup).expect("a backup"), before);
    }
}

#[test]
fn a_store_and_a_backup_of_the_next_version_are_rejected_with_the_documented_sentence() {
    let place = directory();
    let page = include_str!("../../docs/upgrading.md");
    let mut quotes = page.lines().filter_map(|line| line.strip_prefix("> "));
    let documented = quotes.next().expect("a quoted sentence");
    let root = place.path().canonicalize().expect("a path");
    run_ok(place.path(), &["token", "create", "a"]);
    run_ok(place.path(), &["backup", "plants.backup"]);
    for (file, commands) in [
        ("plantstore.db", [&["serve"][..], &["list"]]),
        (
            "plants.backup",
            [
                &["check", "plants.backup"],
                &["restore", "--force", "plants.backup"],
            ],
        ),
    ] {
        let path = root.join(file);
        let connection = Connection::open(&path).expect("a database");
        let set = connection.pragma_update(None, "user_version", VERSION + 1);
        set.expect("a pragma");
        drop(connection);
        let before = fs::read(&path).expect("a file");
        for command in commands {
            let rejected = run(place.path(), command);
            assert_eq!(rejected.status.code(), Some(1), "{command:?}");
            let printed = String::from_utf8_lossy(&rejected.stderr);
            let path = path.to_str().expect("UTF-8");
            // A restore reads a copy of the backup.
            if command[0] != "restore" {
                let expected = documented.replace("/var/lib/plantstore/plantstore.db", path) + "\n";
                assert_eq!(printed, expected, "{command:?}");
            }
            let reason = "has schema version 8 and this plantstore knows versions up to 7";
            assert!(printed.contains(reason), "{printed}");
            assert_eq!(fs::read(path).expect("a file"), before);
        }
    }
}
