//! Plants as text for import and export: NDJSON and CSV. What is written is read back exactly, and neither direction keeps
//! more than one plant in memory.

mod csv;
mod ndjson;

use std::fmt::{self, Display};
use std::io::{self, BufRead, Read, Write};
use std::path::Path;

use clap::ValueEnum;

use crate::plant::{NewPlant, Plant};

pub(crate) use csv::spreadsheet_safe;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// One JSON object per line
    Ndjson,
    /// A header, and one plant per row
    Csv,
}

impl Format {
    /// The format that the name of a file implies.
    pub(crate) fn of(path: &Path) -> Self {
        let is_csv = path.extension().is_some_and(|extension| {
            ["csv", "tsv"]
                .iter()
                .any(|csv| extension.eq_ignore_ascii_case(csv))
        });
        if is_csv { Self::Csv } else { Self::Ndjson }
    }

    pub(crate) fn write_head(self, out: &mut impl Write) -> io::Result<()> {
        match self {
            Self::Ndjson => Ok(()),
            Self::Csv => csv::write_head(out),
        }
    }

    pub(crate) fn write_plant(
        self,
        out: &mut impl Write,
        id: i64,
        plant: &Plant,
    ) -> io::Result<()> {
        match self {
            Self::Ndjson => ndjson::write_plant(out, id, plant),
            Self::Csv => csv::write_plant(out, id, plant),
        }
    }
}

/// A line of NDJSON, or a row of CSV.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) text: Text,
    pub(crate) plant: Result<NewPlant, Rejection>,
}

/// Where an entry is, and its text with the end of the line if the reader keeps text.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Text {
    pub(crate) lines: Lines,
    pub(crate) raw: Vec<u8>,
    /// False if more of the same entry follows: one that is longer than any plant may be is returned in parts if its text is
    /// kept, so that memory stays bounded.
    pub(crate) is_end: bool,
}

/// Line numbers, counted from 1.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Lines {
    pub(crate) first: u64,
    pub(crate) last: u64,
}

impl Display for Lines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.first, self.last) {
            (first, last) if first == last => write!(f, "line {first}"),
            (first, last) => write!(f, "lines {first}-{last}"),
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Rejection {
    pub(crate) problem: String,
    /// How many lines that should have been plants are rejected with it.
    pub(crate) lines: u64,
}

/// Decodes one row at a time.
trait Decoder {
    /// Begins a new row.
    fn clear(&mut self);

    /// Takes the line with this number, or a part of it. True at the end of the row.
    fn take(&mut self, line: &[u8], number: u64) -> bool;

    /// Rejects the current row because it is longer than this, and keeps no more of it in memory.
    fn reject_longer_than(&mut self, bytes_max: usize);

    /// What the row is, as far as it has been read. An error concerns the whole input.
    fn row(&mut self, lines: Lines, is_end: bool) -> io::Result<Row>;
}

enum Row {
    Blank,
    Header,
    Plant(Result<NewPlant, Rejection>),
}

/// Starts a line that an import skips: the reason why the next line or row was rejected.
pub(crate) const COMMENT: &str = "#plantstore: ";

/// Recognises a comment also with the quote that a spreadsheet may have added.
fn is_comment(line: &[u8]) -> bool {
    let line = line.strip_prefix(b"\"").unwrap_or(line);
    line.starts_with(COMMENT.as_bytes())
}

const BOM: &[u8] = b"\xef\xbb\xbf";

/// The first bytes of files that are not UTF-8 text, and what to do about them.
const NON_TEXT_PREFIXES: [(&[u8], &str); 4] = [
    (b"\xff\xfe", "it is UTF-16; save it as UTF-8"),
    (b"\xfe\xff", "it is UTF-16; save it as UTF-8"),
    (b"\x1f\x8b", "it is compressed; unpack it first"),
    (
        b"PK\x03\x04",
        "it is a spreadsheet or an archive; save it as CSV",
    ),
];

/// Reads plants and rejects what is not one. Blank rows and comments are skipped.
pub(crate) struct Reader<R> {
    input: R,
    decoder: Box<dyn Decoder + Send>,
    bytes_max: usize,
    keeps_text: bool,
    pub(crate) bytes_read: u64,
    lines_read: u64,
    /// The text of the CSV header, if it has been read and text is kept.
    pub(crate) header: Vec<u8>,
    /// The lines and bytes of the current row that have been read.
    row_lines: Lines,
    row_bytes: usize,
    /// The last part returned was not the end of its row.
    is_within_row: bool,
    line: Vec<u8>,
}

impl<R: BufRead> Reader<R> {
    /// Rejects a plant of more than `bytes_max` bytes.
    pub(crate) fn new(input: R, format: Format, bytes_max: usize, keeps_text: bool) -> Self {
        Self {
            input,
            decoder: match format {
                Format::Ndjson => Box::new(ndjson::Ndjson::default()),
                Format::Csv => Box::new(csv::Csv::default()),
            },
            // A plant that the server has accepted is never written longer than it was sent, except for an id sent as `1e18`.
            bytes_max: bytes_max + 32,
            keeps_text,
            bytes_read: 0,
            lines_read: 0,
            header: Vec::new(),
            row_lines: Lines::default(),
            row_bytes: 0,
            is_within_row: false,
            line: Vec::new(),
        }
    }

    /// The next plant or rejection. An error concerns the whole input.
    pub(crate) fn next_entry(&mut self) -> io::Result<Option<Entry>> {
        while let Some(text) = self.read_row()? {
            match self.decoder.row(text.lines, text.is_end)? {
                Row::Blank => {}
                Row::Header => self.header = text.raw,
                Row::Plant(plant) => return Ok(Some(Entry { text, plant })),
            }
        }
        Ok(None)
    }

    /// Reads a row to its end, or the next part of it if its text is kept. None at the end of the input.
    fn read_row(&mut self) -> io::Result<Option<Text>> {
        if !self.is_within_row {
            self.decoder.clear();
            self.row_bytes = 0;
        }
        let mut raw = Vec::new();
        loop {
            let number = self.lines_read + 1;
            self.read_line()?;
            if self.row_bytes == 0 {
                self.row_lines.first = number;
                if is_comment(&self.line) {
                    while !self.line.is_empty() && !self.line.ends_with(b"\n") {
                        self.read_line()?;
                    }
                    continue;
                }
            }
            let is_end = if !self.line.is_empty() {
                self.row_lines.last = number;
                self.row_bytes += self.line.len();
                if self.row_bytes > self.bytes_max {
                    self.decoder.reject_longer_than(self.bytes_max);
                }
                if self.keeps_text {
                    raw.extend_from_slice(&self.line);
                }
                self.decoder.take(&self.line, number)
            } else if self.row_bytes > 0 {
                // The last line may have no newline.
                self.decoder.take(b"\n", number);
                true
            } else {
                return Ok(None);
            };
            if is_end || raw.len() > self.bytes_max {
                self.is_within_row = !is_end;
                return Ok(Some(Text {
                    lines: self.row_lines,
                    raw,
                    is_end,
                }));
            }
        }
    }

    /// Reads the next line with its end, but at most `bytes_max` bytes; nothing at the end of the input.
    fn read_line(&mut self) -> io::Result<()> {
        self.line.clear();
        let mut input = (&mut self.input).take(self.bytes_max as u64);
        let read = input.read_until(b'\n', &mut self.line)?;
        if self.bytes_read == 0 {
            let mut prefixes = NON_TEXT_PREFIXES.iter();
            if let Some((_, problem)) = prefixes.find(|(prefix, _)| self.line.starts_with(prefix)) {
                return Err(io::Error::new(io::ErrorKind::InvalidData, *problem));
            }
            if self.line.starts_with(BOM) {
                self.line.drain(..BOM.len());
            }
        }
        self.bytes_read += read as u64;
        self.lines_read += u64::from(self.line.ends_with(b"\n"));
        Ok(())
    }
}

#[cfg(test)]
mod tests;
