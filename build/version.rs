//! Which commit is built, for `--version`. What is said of it is true without building anything twice: this is asked
//! again when the commit changes, or what goes into the binary, and then it has to be built anyway.

use std::path::Path;
use std::process::Command;
use std::{env, fs};

/// What goes into the binary. If none of it differs from the commit, the commit says all.
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

/// Sets `BUILT_VERSION`, `BUILT_COMMIT` and `BUILT_COMMIT_DATE` for `env!`. Whoever builds without the repository can say
/// what the commit is, in the variable `PLANTSTORE_COMMIT`; otherwise nothing is said of it. (That is another name:
/// cargo hands what is set here on to tests, and a build within one would find its commit changed.)
pub fn tell() {
    println!("cargo::rerun-if-env-changed=PLANTSTORE_COMMIT");
    let told = env::var("PLANTSTORE_COMMIT").unwrap_or_default();
    let told = told.lines().next().unwrap_or_default().trim().to_owned();
    let commit = Some(told).filter(|told| !told.is_empty()).or_else(commit);
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

/// `abcdef123456 2026-11-15`, with `-dirty` after the first word if something was changed since. Nothing where this is
/// no repository of ours, such as one that only holds the directory of an unpacked archive.
fn commit() -> Option<String> {
    let root = fs::canonicalize(env::var_os("CARGO_MANIFEST_DIR")?).ok()?;
    let repository = git(&["rev-parse", "--show-toplevel"])?;
    if fs::canonicalize(repository).ok()? != root {
        return None;
    }
    // A path that is not there would be asked for again every time.
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

/// What git says, if there is a git and it goes well. Nobody else's work is held up for it.
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
