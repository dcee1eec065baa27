//! The checker is shown to work: builds of the service, each with its durability broken in one place, run through the
//! same suite, which must report what is wrong with each.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::harness::BINARY_UNDER_TEST;

/// A break: its name, the file, what stands there and what is put in its place.
type Break = (&'static str, &'static str, &'static str, &'static str);

const BREAKS: [Break; 3] = [
    (
        "synchronous-off",
        "src/store/sqlite/open.rs",
        r#"("synchronous = FULL", "2")"#,
        r#"("synchronous = OFF", "0")"#,
    ),
    (
        "acknowledged-before-the-commit",
        "src/writer/batch.rs",
        "in_hand.begin(std::mem::take(&mut self.replies));",
        "let responses = self.additions.iter().map(|addition| Ok(addition.plant.plant.clone()));
        send_all(std::mem::take(&mut self.replies).into_iter().zip(responses));
        in_hand.begin(Vec::new());",
    ),
    (
        "no-checkpoint-at-the-start",
        "src/store/sqlite/open.rs",
        r#"    match checkpoint(&connection, "TRUNCATE") {
        Ok(true) => {}
        Ok(false) => return Err(OpenError::Held(path.display().to_string())),
        Err(source) => return Err(unusable(path)(source)),
    }
    session.note(rows::last_batch(&connection).map_err(unusable(path))?);
    session::require_wal(&connection).map_err(unusable(path))?;"#,
        "    session.note(0);",
    ),
];

/// A standby that is lost shows them.
const BREAKS_OF_POSTGRES: [Break; 2] = [
    (
        "warnings-ignored",
        "src/store/postgres/retry.rs",
        "session.has_warned()",
        "session.has_warned() && false",
    ),
    (
        "replays-that-write-nothing",
        "src/store/postgres/batch.rs",
        "INSERT INTO plantstore.plants (id, name, tag, added_at, added_by)
    SELECT id, name, tag, now(), added_by
    FROM unnest($1::BIGINT[], $2::TEXT[], $3::TEXT[], $4::BIGINT[]) AS new (id, name, tag, added_by),
         set_config('synchronous_commit',
                    CASE current_setting('synchronous_commit') WHEN 'remote_apply' THEN 'remote_apply' ELSE 'on' END,
                    true)
    ORDER BY id
    ON CONFLICT (id) DO UPDATE SET name = excluded.name
    WHERE plants.name = excluded.name AND plants.tag IS NOT DISTINCT FROM excluded.tag
    RETURNING id, added_at = now()",
        "WITH new AS (
        SELECT * FROM unnest($1::BIGINT[], $2::TEXT[], $3::TEXT[], $4::BIGINT[]) AS new (id, name, tag, added_by)
    ), added AS (
        INSERT INTO plantstore.plants (id, name, tag, added_at, added_by)
        SELECT id, name, tag, now(), added_by FROM new ORDER BY id
        ON CONFLICT (id) DO NOTHING RETURNING id, TRUE
    )
    SELECT * FROM added
    UNION ALL SELECT id, FALSE FROM plantstore.plants JOIN new USING (id)
    WHERE plants.name = new.name AND plants.tag IS NOT DISTINCT FROM new.tag",
    ),
];

/// Accidents to files show these: each with the case that must report it.
const BREAKS_OF_FILES: [(Break, &str); 2] = [
    (
        (
            "no-file-identity-check",
            "src/store/sqlite/mod.rs",
            "let Some(files) = &mut self.files else {",
            "let Some(files) = self.files.as_mut().filter(|_| false) else {",
        ),
        "database file deleted under a server: deleted",
    ),
    (
        (
            "no-orphan-wal-check",
            "src/store/sqlite/open.rs",
            "match orphan_of(real) {",
            "match orphan_of(real).filter(|_| false) {",
        ),
        "`serve`, database and lock file moved",
    ),
];

/// The breaks that the suite did not notice.
pub fn unnoticed(cuts: usize, seed: u64) -> Vec<String> {
    let power_cuts = format!("--cuts {cuts} --seed {seed}");
    let standby_losses = format!(
        "--postgres-only --standby-losses 1 --failovers 0 --connection-cuts 0 --rolling 0 --each 0 --seed {seed}"
    );
    let by_power_cuts = |broken: Break| {
        // Without that checkpoint a WAL has transactions of two sessions, which the next start notices.
        let expected = match broken.0 {
            "no-checkpoint-at-the-start" => "wrong: does not open",
            _ => "lost: ",
        };
        run(broken, power_cuts.split(' '), expected).err()
    };
    let by_standby_losses =
        |broken| run(broken, standby_losses.split(' '), "without a standby").err();
    let mut unnoticed: Vec<_> = BREAKS.into_iter().filter_map(by_power_cuts).collect();
    unnoticed.extend(BREAKS_OF_POSTGRES.into_iter().filter_map(by_standby_losses));
    unnoticed.extend(unnoticed_accidents());
    unnoticed
}

/// The same for the breaks that accidents to files show.
pub fn unnoticed_accidents() -> Vec<String> {
    let by_accident = |(broken, case)| {
        let arguments = ["--accidents-only", "--case", case];
        run(broken, arguments, "silent: ").err()
    };
    BREAKS_OF_FILES
        .into_iter()
        .filter_map(by_accident)
        .collect()
}

/// Runs the suite over a broken build; an error if it does not report this.
fn run<'a>(
    broken: Break,
    arguments: impl IntoIterator<Item = &'a str>,
    expected: &str,
) -> Result<(), String> {
    let (name, file, before, after) = broken;
    let binary = build(name, file, before, after);
    let output = Command::new(std::env::current_exe().expect("this program"))
        .args(arguments)
        .env(BINARY_UNDER_TEST, binary)
        .output()
        .expect("it runs");
    let printed = String::from_utf8_lossy(&output.stdout);
    let count = printed.matches(expected).count();
    println!("{name}: reported {count} times");
    if count == 0 || output.status.code() != Some(1) {
        let errors = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{name} was not noticed:\n{printed}{errors}"));
    }
    Ok(())
}

/// Builds a copy of the project with one place changed, beside the project's own build so that all
/// dependencies are there already.
fn build(name: &str, file: &str, before: &str, after: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .parent()
        .expect("target");
    let copy = target.join("broken").join(name);
    let _ = fs::remove_dir_all(&copy);
    for part in [".cargo", "build", "migrations", "src"] {
        copy_all(&root.join(part), &copy.join(part));
    }
    for part in ["Cargo.lock", "build.rs", "openapi.yaml"] {
        fs::copy(root.join(part), copy.join(part)).expect("a file");
    }
    let manifest = fs::read_to_string(root.join("Cargo.toml")).expect("a manifest");
    let manifest = manifest.split("[[").next().expect("a part");
    let binary = format!("[[bin]]\nname = \"{name}\"\npath = \"src/main.rs\"\n");
    fs::write(copy.join("Cargo.toml"), format!("{manifest}{binary}")).expect("a manifest");

    let source = fs::read_to_string(copy.join(file)).expect("a source");
    assert!(
        source.contains(before),
        "{file} has changed: there is nothing to break in it"
    );
    fs::write(copy.join(file), source.replace(before, after)).expect("a source");
    let built = Command::new(env!("CARGO"))
        .args([
            "build",
            "--quiet",
            "--locked",
            "--bin",
            name,
            "--target-dir",
        ])
        .arg(target)
        .current_dir(&copy)
        .status();
    assert!(built.expect("cargo runs").success());
    target.join("debug").join(name)
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
