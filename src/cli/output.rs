//! What a command says on standard output: whole, or not at all; and tables.

use std::fs::{self, File};
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;

use anyhow::Context;
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::termios::tcgetwinsize;

use crate::cli::text::{padded, width};

/// A column is not padded any further: one long cell must not make every line long.
const PADDED_MAX: usize = 60;

/// If nobody knows.
const TERMINAL_COLUMNS: usize = 80;

/// Writes all of it, or says that it could not.
pub(super) fn print(text: &str) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
        .context("cannot write to standard output")
}

/// Writes all of it, to a file durably. Fails also if standard output is closed, which `print` does not notice.
pub(super) fn print_durably(text: &str) -> io::Result<()> {
    let stdout = io::stdout();
    let file = File::from(stdout.as_fd().try_clone_to_owned()?);
    let found = file.metadata()?;
    // The runtime of Rust opens /dev/null in place of a closed standard output, for reading and writing. A shell opens it
    // for writing alone.
    let access = fcntl_getfl(&file)? & OFlags::ACCMODE;
    let null = fs::metadata("/dev/null");
    if access == OFlags::RDWR && null.is_ok_and(|null| null.rdev() == found.rdev()) {
        return Err(io::Error::other("it is closed"));
    }
    let mut stdout = stdout.lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()?;
    if found.is_file() {
        file.sync_all()?;
    }
    Ok(())
}

/// Whether it was our reader who had enough, as `head` has.
pub(super) fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<io::Error>();
    error.is_some_and(|error| error.kind() == ErrorKind::BrokenPipe)
}

/// How wide the terminal is that standard output goes to, if it goes to one.
pub(super) fn terminal_columns() -> Option<usize> {
    let stdout = io::stdout();
    stdout.is_terminal().then(|| match tcgetwinsize(&stdout) {
        Ok(size) if size.ws_col > 0 => size.ws_col.into(),
        _ => TERMINAL_COLUMNS,
    })
}

/// Columns as wide as their widest cell.
pub(super) fn table<const N: usize>(rows: Vec<[String; N]>) -> String {
    Table::default().rows(rows)
}

/// A table that grows: columns stay as wide as they are, or become wider.
pub(super) struct Table<const N: usize> {
    widths: [usize; N],
}

impl<const N: usize> Default for Table<N> {
    fn default() -> Self {
        Self { widths: [0; N] }
    }
}

impl<const N: usize> Table<N> {
    /// Some rows of it.
    pub(super) fn rows(&mut self, rows: Vec<[String; N]>) -> String {
        for row in &rows {
            for (column, cell) in self.widths.iter_mut().zip(row) {
                *column = width(cell).min(PADDED_MAX).max(*column);
            }
        }
        let line = |row: [String; N]| {
            let cells = row.iter().zip(self.widths);
            let cells = cells.map(|(cell, width)| padded(cell, width));
            let line = cells.collect::<Vec<_>>().join("  ");
            format!("{}\n", line.trim_end())
        };
        rows.into_iter().map(line).collect()
    }
}
