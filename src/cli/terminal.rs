//! Standard output, tables, progress bars, and the escaping of text that is shown on a terminal.

use std::fmt::Arguments;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;

use anyhow::Context;
use console::{Alignment, Term, measure_text_width, pad_str, truncate_str};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};
use rustix::fs::{OFlags, fcntl_getfl};
use serde::Serialize;

use crate::logging::is_unprintable;

/// Problems that a command reports one by one; the rest is only counted.
pub(super) const PROBLEMS_SHOWN_MAX: u64 = 100;

/// A column is not padded any further: one long cell must not make every line long.
const PADDED_MAX: usize = 60;

pub(super) fn print(text: &str) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
        .context("cannot write to standard output")
}

/// Prints a line for the user on standard error. A command that has done its work does not fail because its log is full.
pub(super) fn print_message(text: Arguments) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Standard output as a file. Fails if it is closed or cannot be written to, which `print` does not notice.
pub(super) fn writable_stdout() -> io::Result<File> {
    let file = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    // The runtime of Rust opens /dev/null in place of a closed standard output, for reading and writing. A shell opens it
    // for writing alone.
    let access = fcntl_getfl(&file)? & OFlags::ACCMODE;
    let (found, null) = (file.metadata()?, fs::metadata("/dev/null"));
    let is_null = null.is_ok_and(|null| null.rdev() == found.rdev());
    if access == OFlags::RDONLY || (access == OFlags::RDWR && is_null) {
        return Err(io::Error::other("it is closed"));
    }
    Ok(file)
}

/// Syncs what it writes if standard output is a file.
pub(super) fn print_durably(text: &str) -> io::Result<()> {
    let mut stdout = writable_stdout()?;
    stdout.write_all(text.as_bytes())?;
    if stdout.metadata()?.is_file() {
        stdout.sync_all()?;
    }
    Ok(())
}

/// True if the reader of standard output has ended, as `head` does.
pub(super) fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<io::Error>();
    error.is_some_and(|error| error.kind() == ErrorKind::BrokenPipe)
}

/// None if standard output is not a terminal.
pub(super) fn terminal_columns() -> Option<usize> {
    let stdout = Term::stdout();
    stdout.is_term().then(|| stdout.size().1.into())
}

/// A number with its noun, such as `1 plant` or `2 plants`.
pub(super) fn count(number: u64, noun: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {noun}{plural}")
}

/// The counts that commands report, such as `1 plant, 2 tokens`.
pub(super) fn counts(plants: u64, tokens: u64) -> String {
    format!("{}, {}", count(plants, "plant"), count(tokens, "token"))
}

pub(super) fn json_line(value: &impl Serialize) -> serde_json::Result<String> {
    serde_json::to_string(value).map(|line| line + "\n")
}

pub(super) fn table<const N: usize>(
    head: [&str; N],
    rows: impl Iterator<Item = [String; N]>,
) -> String {
    let head = std::iter::once(head.map(str::to_owned));
    Table::new([usize::MAX; N]).rows(head.chain(rows).collect())
}

/// A line for each field that has a value.
pub(super) fn fields<const N: usize>(fields: [(&str, Option<String>); N]) -> String {
    let row = |(name, value): (&str, Option<String>)| Some([name.to_owned(), value?]);
    Table::new([usize::MAX; 2]).rows(fields.into_iter().filter_map(row).collect())
}

/// A table that is printed page by page: each column is as wide as its widest cell so far.
pub(super) struct Table<const N: usize> {
    widths: [usize; N],
    widths_max: [usize; N],
}

impl<const N: usize> Table<N> {
    /// Cells that are wider than this are cut.
    pub(super) fn new(widths_max: [usize; N]) -> Self {
        let widths = [0; N];
        Self { widths, widths_max }
    }

    pub(super) fn rows(&mut self, mut rows: Vec<[String; N]>) -> String {
        for row in &mut rows {
            for (column, cell) in row.iter_mut().enumerate() {
                *cell = cut(cell, self.widths_max[column]);
                self.widths[column] = measure_text_width(cell)
                    .min(PADDED_MAX)
                    .max(self.widths[column]);
            }
        }
        let line = |row: [String; N]| {
            let cells = row.iter().zip(self.widths);
            let cells = cells.map(|(cell, width)| pad_str(cell, width, Alignment::Left, None));
            let line = cells.collect::<Vec<_>>().join("  ");
            format!("{}\n", line.trim_end())
        };
        rows.into_iter().map(line).collect()
    }
}

/// What a progress bar counts.
#[derive(Clone, Copy)]
pub(super) enum Unit {
    Items,
    Bytes,
}

/// A progress bar on standard error, if that is a terminal; a spinner if the total is not known. It disappears when it is
/// dropped.
pub(super) fn progress_bar(what: &'static str, total: Option<u64>, unit: Unit) -> ProgressBar {
    let template = match (total, unit) {
        (None, Unit::Items) => "{msg:10} {spinner} {human_pos}  {elapsed}",
        (None, Unit::Bytes) => "{msg:10} {spinner} {bytes}  {elapsed}",
        (Some(_), Unit::Items) => {
            "{msg:10} {bar:30} {human_pos}/{human_len}  {per_sec:0}  {eta} left"
        }
        (Some(_), Unit::Bytes) => {
            "{msg:10} {bar:30} {bytes}/{total_bytes}  {bytes_per_sec}  {eta} left"
        }
    };
    let style = ProgressStyle::with_template(template).expect("the templates are valid");
    ProgressBar::with_draw_target(total, ProgressDrawTarget::stderr())
        .with_message(what)
        .with_style(style)
        .with_finish(ProgressFinish::AndClear)
}

/// The text on one line, with escapes for everything that would move the cursor, hide itself or reverse the line. Different
/// texts stay different.
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

/// Cuts a text that is wider than this.
pub(super) fn cut(text: &str, columns: usize) -> String {
    // A text with more characters than this is wider, or has more combining characters than anyone reads.
    let near = text.char_indices().nth(columns.saturating_mul(4));
    let near = near.map_or(text, |(end, _)| &text[..end]);
    truncate_str(near, columns, "…").into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printable_text_is_shown_as_it_is() {
        for text in ["", "Monstera", "シダ", "سرخس", "fougère", "👩‍🌾", "a b"] {
            assert_eq!(printable(text), text);
        }
    }

    #[test]
    fn unprintable_text_is_escaped() {
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
            ("e\u{301}e\u{301}e\u{301}", 2, "e…"),
        ] {
            let cut = cut(text, columns);
            assert_eq!(cut, expected);
            assert!(measure_text_width(&cut) <= columns);
        }
        let marks = "\u{301}".repeat(1_000_000);
        assert!(cut(&marks, 10).chars().count() <= 41);
        assert!(measure_text_width(&cut(&"x".repeat(1_000_000), 10)) == 10);
    }

    #[test]
    fn a_count_has_its_noun_in_the_singular_or_plural() {
        assert_eq!(counts(0, 1), "0 plants, 1 token");
        assert_eq!(counts(1, 2), "1 plant, 2 tokens");
    }

    #[test]
    fn wide_characters_are_padded_by_columns() {
        let row = |cells: [&str; 2]| cells.map(str::to_owned);
        let rows = vec![row(["シダ", "x"]), row(["fern", "x"]), row(["a", "x"])];
        let mut table = Table::new([usize::MAX; 2]);
        assert_eq!(table.rows(rows), "シダ  x\nfern  x\na     x\n");
    }
}
