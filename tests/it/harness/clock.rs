//! A clock that can be set, for one process: libfaketime.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The time of a process, as libfaketime reads it: `+0`, `-400d`, `+50y`.
pub struct Clock(PathBuf);

impl Clock {
    pub fn new(directory: &Path) -> Self {
        Self(directory.join("clock"))
    }

    pub fn set(&self, time: &str) {
        let next = self.0.with_extension("next");
        fs::write(&next, time).expect("a file");
        fs::rename(next, &self.0).expect("a file");
    }

    /// Has a command see this clock. The monotonic clock stays as it is.
    pub fn apply_to(&self, command: &mut Command) {
        command
            .env("LD_PRELOAD", library())
            .env("FAKETIME_TIMESTAMP_FILE", &self.0)
            .env("FAKETIME_NO_CACHE", "1")
            .env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
    }
}

/// Debian keeps it in a directory named after the architecture.
fn library() -> PathBuf {
    let directories = fs::read_dir("/usr/lib").expect("/usr/lib");
    directories
        .map(|directory| {
            let directory = directory.expect("an entry").path();
            directory.join("faketime/libfaketimeMT.so.1")
        })
        .find(|library| library.exists())
        .expect("libfaketime is installed: make setup")
}
