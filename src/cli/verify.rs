//! A store, or a backup, is read to its end, with a bar; what is wrong with it is told in words.

use std::path::{Path, PathBuf};

use clap::builder::{PathBufValueParser, TypedValueParser};
use rustix::process::nice;

use crate::cli::output::print;
use crate::cli::progress::Progress;
use crate::store::{Checked, Finding, Store};

/// After so many problems the rest is only counted.
const TOLD_MAX: usize = 100;

/// Whatever else the machine has to do goes before.
pub(super) fn step_back() {
    let _ = nice(19); // the least that can be asked for; without it a server has a little less
}

/// Parses the path of a backup, which `-` is not.
pub(super) fn backup_file() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(|path| {
        if path == Path::new("-") {
            Err(
                "a backup is checked by reading it again, so it must be a file; `plantstore export -` and \
                 `plantstore import -` use standard output and input",
            )
        } else {
            Ok(path)
        }
    })
}

/// What was read, and how many problems there are.
pub(super) fn verify(store: &mut Store) -> anyhow::Result<(Checked, usize)> {
    let mut problems = 0;
    let mut told = Ok(());
    let mut progress = Progress::endless("checking");
    let checked = store.check(&mut |finding| match finding {
        Finding::Plants(count) => progress = Progress::of(count, "checking"),
        Finding::Read(count) => progress.advance(count),
        Finding::Wrong(problem) => {
            problems += 1;
            if problems <= TOLD_MAX && told.is_ok() {
                told = print(&format!("{problem}\n"));
            }
        }
    })?;
    told?;
    Ok((checked, problems))
}
