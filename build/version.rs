//! The commit for `--version`. Git is asked again only when the commit or an input of the binary changes, so that it causes no
//! additional build.

use std::path::Path;
use std::process::Command;
use std::{env, fs};

/// The inputs of the binary; if one differs from the commit, the version is marked as dirty.
const INPUTS: [&str; 8] = [
    ".cargo",
    "Cargo.lock",
    "Cargo.toml",
    "build",
    "build.rs",
    "migrations",
    "openapi.yaml",
    "src",
];

/// Sets `BUILT_VERSION`, `BUILT_COMMIT` and `BUILT_COMMIT_DATE` for `env!`. A build without the repository can set the commit
/// with the variable `PLANTSTORE_COMMIT`. (The names differ because cargo passes the variables that are set here to tests, and
/// a build within a test would find its commit changed.)
pub fn set_variables() {
    println!("cargo::rerun-if-env-changed=PLANTSTORE_COMMIT");
    let given = env::var("PLANTSTORE_COMMIT").unwrap_or_default();
    let given = given.lines().next().unwrap_or_default().trim().to_owned();
    let commit = Some(given)
        .filter(|given| !given.is_empty())
        .or_else(commit);
    let number = env::var("CARGO_PKG_VERSION").expect("cargo sets it");
    let version = match &commit {
        Some(commit) => format!("{number} ({commit})"),
        None => number,
    };
    let commit = commit.unwrap_or_default();
    let (hash, date) = commit.split_once(' ').unwrap_or((&commit, ""));
    println!("cargo::rustc-env=BUILT_VERSION={version}");
    println!("cargo::rustc-env=BUILT_COMMIT={hash}");
    println!("cargo::rustc-env=BUILT_COMMIT_DATE={date}");
}

/// `abcdef123456 2026-11-15`, with `-dirty` after the hash if an input was changed. None if the repository is another one, such
/// as one in which an archive of the source was unpacked.
fn commit() -> Option<String> {
    let root = fs::canonicalize(env::var_os("CARGO_MANIFEST_DIR")?).ok()?;
    let repository = git(&["rev-parse", "--show-toplevel"])?;
    if fs::canonicalize(repository).ok()? != root {
        return None;
    }
    // A path that does not exist would rerun the build script every time.
    let paths = ["HEAD", "logs/HEAD"].map(str::to_owned);
    let branch = git(&["rev-parse", "--symbolic-full-name", "HEAD"]);
    let paths = paths.into_iter().chain(branch);
    let paths = paths.filter_map(|path| git(&["rev-parse", "--git-path", &path]));
    let inputs = INPUTS.map(str::to_owned);
    for path in paths.chain(inputs).filter(|path| Path::new(path).exists()) {
        println!("cargo::rerun-if-changed={path}");
    }
    let commit = git(&["log", "-1", "--abbrev=12", "--format=%h %cs"])?;
    let (hash, date) = commit.split_once(' ')?;
    let changed = git(&[&["status", "--porcelain", "--"][..], &INPUTS].concat())?;
    let dirty = if changed.is_empty() { "" } else { "-dirty" };
    Some(format!("{hash}{dirty} {date}"))
}

/// The output of git, if it succeeds. It takes no locks that other git commands would wait for.
fn git(arguments: &[&str]) -> Option<String> {
    let mut git = Command::new("git");
    let output = git
        .arg("--no-optional-locks")
        .args(arguments)
        .output()
        .ok()?;
    let said = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| said.trim_end().to_owned())
}
