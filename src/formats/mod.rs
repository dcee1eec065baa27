//! Plants as text, to be moved: NDJSON and CSV. What is written is read back exactly, whatever the strings hold, and neither
//! way keeps more than one plant in memory.

mod csv;
mod ndjson;

use std::fmt::{self, Display};
use std::io::{self, BufRead, Read, Write};
use std::path::Path;

use clap::ValueEnum;

use crate::plant::{NewPlant, Plant};

pub use csv::spreadsheet_safe;

/// How plants are written down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// One JSON object a line
    Ndjson,
    /// A header, and one plant a row
    Csv,
}

impl Format {
    /// What the name of a file says of it.
    pub fn of(path: &Path) -> Self {
        let is_csv = |ending: &std::ffi::OsStr| {
            ["csv", "tsv"]
                .iter()
                .any(|known| ending.eq_ignore_ascii_case(known))
        };
        match path.extension() {
            Some(ending) if is_csv(ending) => Self::Csv,
            _ => Self::Ndjson,
        }
    }

    /// What stands before the first plant.
    pub fn write_head(self, out: &mut impl Write) -> io::Result<()> {
        match self {
            Self::Ndjson => Ok(()),
            Self::Csv => csv::write_head(out),
        }
    }

    /// Writes one plant.
    pub fn write_plant(self, out: &mut impl Write, id: i64, plant: &Plant) -> io::Result<()> {
        match self {
            Self::Ndjson => ndjson::write_plant(out, id, plant),
            Self::Csv => csv::write_plant(out, id, plant),
        }
    }
}

/// Reads one plant after the other.
pub struct Reader<R> {
    source: Source<R>,
    kind: Kind,
}

enum Kind {
    Ndjson(ndjson::Decoder),
    Csv(Box<csv::Decoder>),
}

impl<R: BufRead> Reader<R> {
    #[cfg(test)]
    pub fn new(input: R, format: Format, bytes_max: usize) -> Self {
        Self::with_text(input, format, bytes_max, false)
    }

    /// The same. If it keeps the text, each entry has that of its line, or row.
    pub fn with_text(input: R, format: Format, bytes_max: usize, keeps_text: bool) -> Self {
        // What the service has taken is never written longer than it was sent, but for an id that was sent as `1e18`.
        let bytes_max = bytes_max + 32;
        Self {
            source: Source::new(input),
            kind: match format {
                Format::Ndjson => Kind::Ndjson(ndjson::Decoder::new(bytes_max, keeps_text)),
                Format::Csv => Kind::Csv(Box::new(csv::Decoder::new(bytes_max, keeps_text))),
            },
        }
    }

    /// The next of them. An error is one of all that is to be read, not of one plant.
    pub fn next_entry(&mut self) -> io::Result<Option<Entry>> {
        match &mut self.kind {
            Kind::Ndjson(decoder) => decoder.next(&mut self.source),
            Kind::Csv(decoder) => decoder.next(&mut self.source),
        }
    }

    /// The text before the first entry that belongs to each: the header, if it has been read and text is kept.
    pub fn header(&self) -> &[u8] {
        match &self.kind {
            Kind::Ndjson(_) => &[],
            Kind::Csv(decoder) => decoder.header(),
        }
    }

    /// How much has been read.
    pub fn bytes_read(&self) -> u64 {
        self.source.bytes_read()
    }
}

/// A line, or a row: a plant, or why it is none.
#[derive(Debug, PartialEq, Eq)]
pub struct Entry {
    /// Where it is.
    pub lines: Lines,
    /// What it is.
    pub plant: Result<NewPlant, Rejection>,
    /// Its text with its end, if the reader keeps that.
    pub raw: Vec<u8>,
    /// How much of its text that is.
    pub part: Part,
}

/// Lines of a file, counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Lines {
    /// The first.
    pub first: u64,
    /// The last, which may be the first.
    pub last: u64,
}

impl Display for Lines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.first, self.last) {
            (first, last) if first == last => write!(f, "line {first}"),
            (first, last) => write!(f, "lines {first}-{last}"),
        }
    }
}

/// Why a line, or a row, is no plant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejection {
    /// In words.
    pub problem: String,
    /// How many lines that should have been plants are lost with it.
    pub lines: u64,
}

/// The text of an entry that is longer than any plant may be is handed over in parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// All of it.
    Whole,
    /// Its beginning: the problem is known, but not where it ends.
    First,
    /// More of it.
    Next,
    /// The rest.
    Last,
}

/// Begins a line that an import passes over: it says why the next line, or row, was rejected.
pub const COMMENT: &str = "#plantstore: ";

/// Whether a line is such a comment, also as a spreadsheet may have saved it.
pub fn is_comment(line: &[u8]) -> bool {
    let line = line.strip_prefix(b"\"").unwrap_or(line);
    line.starts_with(COMMENT.as_bytes())
}

const BOM: &[u8] = b"\xef\xbb\xbf";

/// Beginnings of what is no text in UTF-8, and what to do about it.
const OTHERS: [(&[u8], &str); 4] = [
    (b"\xff\xfe", "it is UTF-16; save it as UTF-8"),
    (b"\xfe\xff", "it is UTF-16; save it as UTF-8"),
    (b"\x1f\x8b", "it is compressed; unpack it first"),
    (
        b"PK\x03\x04",
        "it is a spreadsheet or an archive; save it as CSV",
    ),
];

/// A text, and how far it has been read.
pub struct Source<R> {
    input: R,
    bytes_read: u64,
    lines_read: u64,
}

impl<R: BufRead> Source<R> {
    /// To be read from its start.
    pub fn new(input: R) -> Self {
        Self {
            input,
            bytes_read: 0,
            lines_read: 0,
        }
    }

    /// How much has been read.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read
    }

    /// The number of the line that is read next, counted from 1.
    pub fn line(&self) -> u64 {
        self.lines_read + 1
    }

    /// Appends the next line with its end, but not more than so many bytes. True once the line is over, or the text.
    pub fn read_line(&mut self, into: &mut Vec<u8>, max: usize) -> io::Result<bool> {
        let start = into.len();
        let is_first = self.bytes_read == 0;
        let read = (&mut self.input).take(max as u64).read_until(b'\n', into)?;
        self.bytes_read += read as u64;
        if is_first {
            let text = &into[start..];
            if let Some((_, problem)) = OTHERS.iter().find(|(other, _)| text.starts_with(other)) {
                return Err(io::Error::new(io::ErrorKind::InvalidData, *problem));
            }
            if text.starts_with(BOM) {
                into.drain(start..start + BOM.len());
            }
        }
        let is_over = into[start..].ends_with(b"\n");
        self.lines_read += u64::from(is_over);
        Ok(is_over || read < max)
    }

    /// Passes over the rest of a line of which a part has been read.
    pub fn skip_line(&mut self, buffer: &mut Vec<u8>, max: usize) -> io::Result<()> {
        loop {
            buffer.clear();
            if self.read_line(buffer, max)? {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests;
