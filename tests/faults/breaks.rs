//! Mutation testing of the fault suite. The service is built once with several deliberate breaks, each active only if the
//! environment variable `BREAK` names it; the suite runs against each of them and has to report the damage.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use crate::harness::{BINARY_UNDER_TEST, output_within};

/// Names the active break in the environment of a broken build.
const BREAK: &str = "BREAK";

/// The timeout of the build and of a run of the suite.
const RUN_MAX: Duration = Duration::from_secs(3600);

struct Break {
    name: &'static str,
    file: &'static str,
    before: &'static str,
    /// Replaces `before`; has its effect only if `crate::is_broken(name)`.
    after: &'static str,
    /// The arguments of the suite that detects it.
    suite: Suite,
    /// What the suite has to print.
    expected: &'static str,
    /// The values of TRANSPORT with which it has to be detected.
    transports: &'static [&'static str],
}

const HTTP_1: &[&str] = &[""];
/// A suite that looks for responses in what the server sends has to find encrypted ones as well.
const ALL_TRANSPORTS: &[&str] = &["", "tls", "http2"];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Suite {
    PowerCuts,
    /// One run of one fault of PostgreSQL.
    Postgres(&'static str),
    /// One case of the accidents.
    Accident(&'static str),
}

const BREAKS: [Break; 8] = [
    Break {
        name: "synchronous-off",
        file: "src/store/sqlite/open.rs",
        before: r#"("synchronous = FULL", "2")"#,
        after: r#"if crate::is_broken("synchronous-off") {
            ("synchronous = OFF", "0")
        } else {
            ("synchronous = FULL", "2")
        }"#,
        suite: Suite::PowerCuts,
        expected: "lost: ",
        transports: HTTP_1,
    },
    Break {
        name: "acknowledged-before-the-commit",
        file: "src/writer/batch.rs",
        before: "let result = created.and_then(|()| self.write(store, is_write_due));",
        after: r#"if crate::is_broken("acknowledged-before-the-commit") {
            let plants = self.additions.iter().map(|addition| Ok(addition.plant.plant.clone()));
            reply_all(in_flight.take_replies().into_iter().zip(plants));
        }
        let result = created.and_then(|()| self.write(store, is_write_due));"#,
        suite: Suite::PowerCuts,
        expected: "lost: ",
        transports: ALL_TRANSPORTS,
    },
    Break {
        name: "no-checkpoint-at-the-start",
        file: "src/store/sqlite/open.rs",
        before: r#"    if !checkpoint(&connection, "TRUNCATE").map_err(unusable(store))? {"#,
        // A new store is left alone: its tables would be in the WAL only, which the check of the files takes for an accident.
        after: r#"    let is_new = fs::metadata(store).is_ok_and(|file| file.len() <= 4096);
    if crate::is_broken("no-checkpoint-at-the-start") && !is_new {
        lock.record_batch(0);
        run_checkpoint_on_close(&connection, true).map_err(unusable(store))?;
        return Ok((connection, lock));
    }
    if !checkpoint(&connection, "TRUNCATE").map_err(unusable(store))? {"#,
        suite: Suite::PowerCuts,
        // The WAL then has transactions of two sessions, which the next start rejects.
        expected: "wrong: does not open",
        transports: HTTP_1,
    },
    Break {
        name: "warnings-ignored",
        file: "src/store/postgres/retry.rs",
        before: "session.has_warned()",
        after: r#"session.has_warned() && !crate::is_broken("warnings-ignored")"#,
        suite: Suite::Postgres("standbys lost"),
        expected: "without a standby",
        transports: HTTP_1,
    },
    Break {
        name: "connections-that-stay-behind",
        file: "src/store/postgres/servers.rs",
        before: "timeline.is_some() && newest.is_some() && newest != timeline",
        after: r#"timeline.is_some() && newest.is_some() && newest != timeline
            && !crate::is_broken("connections-that-stay-behind")"#,
        suite: Suite::Postgres("stale primaries"),
        expected: "a token that is revoked is valid",
        transports: HTTP_1,
    },
    Break {
        name: "replays-that-write-nothing",
        file: "src/store/postgres/batch.rs",
        before: "session.query_prepared(ADD, values)",
        after: r#"session.query_prepared(if crate::is_broken("replays-that-write-nothing") {
            "WITH new AS (
                SELECT * FROM unnest($1::BIGINT[], $2::TEXT[], $3::TEXT[], $4::BIGINT[]) AS new (id, name, tag, added_by)
            ), added AS (
                INSERT INTO plantstore.plants (id, name, tag, added_at, added_by)
                SELECT id, name, tag, now(), added_by FROM new ORDER BY id
                ON CONFLICT (id) DO NOTHING RETURNING id, TRUE
            ), stored (id, is_new) AS (
                SELECT * FROM added
                UNION ALL SELECT id, FALSE FROM plantstore.plants JOIN new USING (id)
                WHERE plants.name = new.name AND plants.tag IS NOT DISTINCT FROM new.tag
            )
            SELECT coalesce(array_agg(id), '{}'), coalesce(array_agg(is_new), '{}') FROM stored"
        } else {
            ADD
        }, values)"#,
        suite: Suite::Postgres("standbys lost"),
        expected: "without a standby",
        transports: HTTP_1,
    },
    Break {
        name: "no-file-identity-check",
        file: "src/store/sqlite/mod.rs",
        before: "let Some(files) = &mut self.files else {",
        after: r#"let is_checked = !crate::is_broken("no-file-identity-check");
        let Some(files) = self.files.as_mut().filter(|_| is_checked) else {"#,
        suite: Suite::Accident("database file deleted under a server: deleted"),
        expected: "silent: ",
        transports: HTTP_1,
    },
    Break {
        name: "no-orphan-wal-check",
        file: "src/store/sqlite/open.rs",
        before: "let Some(orphan) = orphan_of(store) else {",
        after: r#"let orphan = orphan_of(store).filter(|_| !crate::is_broken("no-orphan-wal-check"));
    let Some(orphan) = orphan else {"#,
        suite: Suite::Accident("`serve`, database and lock file moved"),
        expected: "silent: ",
        transports: HTTP_1,
    },
];

/// Appended to the library of the broken build.
const IS_BROKEN: &str = r#"
fn is_broken(name: &str) -> bool {
    std::env::var_os("BREAK").is_some_and(|active| active == name)
}
"#;

/// Runs every suite that a break belongs to, at the same time: most of each run is waiting. The result names the breaks that were not
/// detected.
pub fn undetected(cuts: usize, seed: u64) -> Vec<String> {
    let binary = &build();
    thread::scope(|scope| {
        let runs: Vec<_> = BREAKS
            .iter()
            .flat_map(|broken| broken.transports.iter().map(move |over| (broken, over)))
            .map(|(broken, over)| scope.spawn(move || run(broken, over, binary, cuts, seed)))
            .collect();
        let results = runs.into_iter().map(|run| run.join().expect("no panic"));
        results.filter_map(Result::err).collect()
    })
}

/// Runs the suite with one break active; an error if the suite does not report it.
fn run(
    broken: &Break,
    transport: &str,
    binary: &Path,
    cuts: usize,
    seed: u64,
) -> Result<(), String> {
    let (cuts, seed) = (cuts.to_string(), seed.to_string());
    let arguments = match broken.suite {
        Suite::PowerCuts => vec!["--cuts", &cuts],
        Suite::Postgres(fault) => {
            let runs = "--postgres-only --failovers 1 --standby-losses 1 --only".split(' ');
            runs.chain([fault]).collect()
        }
        Suite::Accident(case) => vec!["--accidents-only", "--case", case],
    };
    let mut suite = Command::new(std::env::current_exe().expect("this program"));
    suite
        .args(arguments)
        .args(["--seed", &seed])
        .env(BINARY_UNDER_TEST, binary)
        .env(BREAK, broken.name)
        .env("TRANSPORT", transport);
    let output = output_within(RUN_MAX, &mut suite);
    let printed = String::from_utf8_lossy(&output.stdout);
    let count = printed.matches(broken.expected).count();
    let name = match transport {
        "" => broken.name.to_owned(),
        transport => format!("{} over {transport}", broken.name),
    };
    println!("{name}: reported {count} times");
    if count == 0 || output.status.code() != Some(1) {
        let errors = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{name} was not detected:\n{printed}{errors}"));
    }
    Ok(())
}

/// Builds a copy of the project with all breaks in it, in the project's own target directory and with the profile of this suite, for which
/// the dependencies are compiled already.
fn build() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .parent()
        .expect("target");
    let copy = target.join("broken");
    let _ = fs::remove_dir_all(&copy);
    for part in [".cargo", "build", "migrations", "src"] {
        copy_all(&root.join(part), &copy.join(part));
    }
    for part in ["Cargo.lock", "build.rs", "openapi.yaml"] {
        fs::copy(root.join(part), copy.join(part)).expect("a file");
    }
    let manifest = fs::read_to_string(root.join("Cargo.toml")).expect("a manifest");
    let manifest = manifest.split("[[").next().expect("a part");
    let binary = "[[bin]]\nname = \"plantstore-broken\"\npath = \"src/main.rs\"\n";
    fs::write(copy.join("Cargo.toml"), format!("{manifest}{binary}")).expect("a manifest");

    for Break {
        name,
        file,
        before,
        after,
        ..
    } in &BREAKS
    {
        let source = fs::read_to_string(copy.join(file)).expect("a source");
        assert!(
            source.contains(before),
            "{file} has changed: {name} does not apply"
        );
        fs::write(copy.join(file), source.replace(before, after)).expect("a source");
    }
    let library = copy.join("src/lib.rs");
    let source = fs::read_to_string(&library).expect("a source");
    fs::write(library, source + IS_BROKEN).expect("a source");

    let mut cargo = Command::new(env!("CARGO"));
    cargo
        .args(["build", "--quiet", "--locked", "--bins", "--target-dir"])
        .arg(target)
        .current_dir(&copy);
    let suite = std::env::current_exe().expect("this program");
    let is_release = suite.starts_with(target.join("release"));
    if is_release {
        cargo.arg("--release");
    }
    let built = output_within(RUN_MAX, &mut cargo);
    let errors = String::from_utf8_lossy(&built.stderr);
    assert!(built.status.success(), "{errors}");
    let profile = if is_release { "release" } else { "debug" };
    target.join(profile).join("plantstore-broken")
}

#[test]
fn every_break_applies_to_the_current_source() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for Break {
        name, file, before, ..
    } in &BREAKS
    {
        let source = fs::read_to_string(root.join(file)).expect("a source");
        assert!(source.contains(before), "{name} does not apply to {file}");
    }
}

fn copy_all(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a directory");
    for entry in fs::read_dir(from).expect("a directory") {
        let path = entry.expect("an entry").path();
        let copy = to.join(path.file_name().expect("a name"));
        if path.is_dir() {
            copy_all(&path, &copy);
        } else {
            fs::copy(&path, copy).expect("a file");
        }
    }
}
