//! A settable clock for one process, with libfaketime.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The file with the offset of the clock in libfaketime's syntax: `+0`, `-400d`, `+50y`.
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

    /// Makes a command use this clock. The monotonic clock is not changed.
    pub fn apply_to(&self, command: &mut Command) {
        command
            .env("LD_PRELOAD", library())
            .env("FAKETIME_TIMESTAMP_FILE", &self.0)
            .env("FAKETIME_NO_CACHE", "1")
            .env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
    }
}

/// Debian installs it in a directory named after the architecture.
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
