//! Standard output, tables, progress bars and the escaping of text that is shown on a terminal.

use std::fs::{self, File};
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use anyhow::Context;
use indicatif::{ProgressBar, ProgressStyle};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::termios::tcgetwinsize;
use unicode_width::UnicodeWidthStr;

use crate::logging::is_unprintable;

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

pub(super) struct Progress(ProgressBar);

impl Progress {
    /// Of so many.
    pub(super) fn of(total: u64, what: &'static str) -> Self {
        let template = "{msg:10} {bar:30} {human_pos}/{human_len}  {per_sec}  {eta} left";
        Self::new(ProgressBar::new(total), template, what)
    }

    /// Of so many bytes, if that is known.
    pub(super) fn of_bytes(total: Option<u64>, what: &'static str) -> Self {
        let known = "{msg:10} {bar:30} {binary_bytes}/{binary_total_bytes}  {binary_bytes_per_sec}  {eta} left";
        let unknown = "{msg:10} {spinner} {binary_bytes}  {binary_bytes_per_sec}";
        let template = if total.is_some() { known } else { unknown };
        let bar = total.map_or_else(ProgressBar::no_length, ProgressBar::new);
        Self::new(bar, template, what)
    }

    /// Of nobody knows how many.
    pub(super) fn endless(what: &'static str) -> Self {
        let progress = Self::new(
            ProgressBar::no_length(),
            "{msg:10} {spinner} {elapsed}",
            what,
        );
        if !progress.0.is_hidden() {
            progress.0.enable_steady_tick(Duration::from_millis(100));
        }
        progress
    }

    /// Of plants, nobody knows how many.
    pub(super) fn counting(what: &'static str) -> Self {
        let template = "{msg:10} {human_pos}  {per_sec}";
        Self::new(ProgressBar::no_length(), template, what)
    }

    fn new(bar: ProgressBar, template: &str, what: &'static str) -> Self {
        let style = ProgressStyle::with_template(template).expect("a template that is known");
        Self(bar.with_message(what).with_style(style))
    }

    /// So many are done, of so many.
    pub(super) fn reach(&self, done: u64, total: u64) {
        self.0.set_length(total);
        self.0.set_position(done);
    }

    /// So many more are done.
    pub(super) fn advance(&self, done: usize) {
        self.0.inc(done as u64);
    }

    /// So many are done in all.
    pub(super) fn set(&self, done: u64) {
        self.0.set_position(done);
    }

    /// Says a line to a person, and leaves the bar where it is.
    pub(super) fn say(&self, line: &str) {
        self.0.suspend(|| eprintln!("{line}"));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// What stands for the rest of a text that was cut.
const CUT: char = '…';

/// Shown on one line, as it is but for what does not print. No two texts look the same.
pub(super) fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if c == '\\' || c.is_control() {
            shown.extend(c.escape_debug());
        } else if is_unprintable(c) {
            shown.extend(c.escape_unicode());
        } else {
            shown.push(c);
        }
    }
    shown
}

/// In columns.
pub(super) fn width(text: &str) -> usize {
    text.width()
}

/// Cut to so many columns.
pub(super) fn cut(text: &str, columns: usize) -> String {
    // Whatever is longer than this in characters is wider, or has more signs on top of each other than anybody reads.
    let near = text.char_indices().nth(columns.saturating_mul(4));
    let near = near.map_or(text, |(end, _)| &text[..end]);
    if near.len() == text.len() && width(text) <= columns {
        return text.to_owned();
    }
    let ends = near.char_indices().map(|(end, _)| end);
    let fits = |end: &usize| width(&near[..*end]) < columns;
    let end = ends.take_while(fits).last().unwrap_or_default();
    format!("{}{CUT}", &near[..end])
}

/// With spaces up to so many columns.
pub(super) fn padded(text: &str, columns: usize) -> String {
    let spaces = columns.saturating_sub(width(text));
    format!("{text}{:spaces$}", "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_people_write_is_shown_as_it_is() {
        for text in ["", "Monstera", "シダ", "سرخس", "fougère", "👩‍🌾", "a b"] {
            assert_eq!(printable(text), text);
        }
    }

    #[test]
    fn what_does_not_print_is_shown_as_an_escape() {
        for (text, shown) in [
            ("a\nb", r"a\nb"),
            ("a\\nb", r"a\\nb"),
            ("\0\t\r", r"\0\t\r"),
            ("\u{1b}[31mred", r"\u{1b}[31mred"),
            ("\u{9b}31m", r"\u{9b}31m"),
            ("\u{202e}nref", r"\u{202e}nref"),
            ("\u{2066}a\u{2069}", r"\u{2066}a\u{2069}"),
            ("a\u{2028}b", r"a\u{2028}b"),
            ("\u{feff}a\u{200b}", r"\u{feff}a\u{200b}"),
        ] {
            assert_eq!(printable(text), shown);
        }
    }

    #[test]
    fn a_cut_is_as_wide_as_it_may_be() {
        for (text, columns, expected) in [
            ("Monstera", 8, "Monstera"),
            ("Monstera", 7, "Monste…"),
            ("Monstera", 1, "…"),
            ("シダシダ", 8, "シダシダ"),
            ("シダシダ", 7, "シダシ…"),
            ("シダシダ", 6, "シダ…"),
            ("e\u{301}e\u{301}e\u{301}", 3, "e\u{301}e\u{301}e\u{301}"),
            ("e\u{301}e\u{301}e\u{301}", 2, "e\u{301}…"),
        ] {
            let cut = cut(text, columns);
            assert_eq!(cut, expected);
            assert!(width(&cut) <= columns);
        }
        let marks = "\u{301}".repeat(1_000_000);
        assert!(cut(&marks, 10).chars().count() <= 41);
        assert!(width(&cut(&"x".repeat(1_000_000), 10)) == 10);
    }

    #[test]
    fn wide_characters_are_padded_by_columns() {
        assert_eq!(padded("シダ", 6), "シダ  ");
        assert_eq!(padded("fern", 6), "fern  ");
        assert_eq!(padded("fern", 2), "fern");
    }
}
