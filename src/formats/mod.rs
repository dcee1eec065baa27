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
    /// How much of the entry `raw` is.
    pub(crate) part: Part,
}

/// Line numbers, counted from 1.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
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

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rejection {
    pub(crate) problem: String,
    /// How many lines that should have been plants are rejected with it.
    pub(crate) lines: u64,
}

/// An entry that is longer than any plant may be is returned in parts if its text is kept, so that memory stays bounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) is_start: bool,
    pub(crate) is_end: bool,
}

pub(crate) struct Reader<R> {
    source: Source<R>,
    decoder: Decoder,
}

enum Decoder {
    Ndjson(ndjson::Decoder),
    Csv(Box<csv::Decoder>),
}

impl<R: BufRead> Reader<R> {
    /// Rejects a plant of more than `bytes_max` bytes.
    pub(crate) fn new(input: R, format: Format, bytes_max: usize, keeps_text: bool) -> Self {
        // A plant that the server has accepted is never written longer than it was sent, except for an id sent as `1e18`.
        let bytes_max = bytes_max + 32;
        Self {
            source: Source {
                input,
                bytes_read: 0,
                lines_read: 0,
            },
            decoder: match format {
                Format::Ndjson => Decoder::Ndjson(ndjson::Decoder::new(bytes_max, keeps_text)),
                Format::Csv => Decoder::Csv(Box::new(csv::Decoder::new(bytes_max, keeps_text))),
            },
        }
    }

    /// An error concerns the whole input, not one plant.
    pub(crate) fn next_entry(&mut self) -> io::Result<Option<Entry>> {
        match &mut self.decoder {
            Decoder::Ndjson(decoder) => decoder.next(&mut self.source),
            Decoder::Csv(decoder) => decoder.next(&mut self.source),
        }
    }

    /// The text of the CSV header, if it has been read and text is kept.
    pub(crate) fn header(&self) -> &[u8] {
        match &self.decoder {
            Decoder::Ndjson(_) => &[],
            Decoder::Csv(decoder) => decoder.header(),
        }
    }

    pub(crate) fn bytes_read(&self) -> u64 {
        self.source.bytes_read
    }
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

/// Text that is read line by line, with a limit for each line.
struct Source<R> {
    input: R,
    bytes_read: u64,
    lines_read: u64,
}

impl<R: BufRead> Source<R> {
    /// The number of the line that is read next, counted from 1.
    fn line(&self) -> u64 {
        self.lines_read + 1
    }

    /// Appends the next line with its end, but at most `max` bytes. True at the end of the line or of the text.
    fn read_line(&mut self, into: &mut Vec<u8>, max: usize) -> io::Result<bool> {
        let start = into.len();
        let is_first = self.bytes_read == 0;
        let read = (&mut self.input).take(max as u64).read_until(b'\n', into)?;
        self.bytes_read += read as u64;
        if is_first {
            let text = &into[start..];
            if let Some((_, problem)) = NON_TEXT_PREFIXES
                .iter()
                .find(|(prefix, _)| text.starts_with(prefix))
            {
                return Err(io::Error::new(io::ErrorKind::InvalidData, *problem));
            }
            if text.starts_with(BOM) {
                into.drain(start..start + BOM.len());
            }
        }
        let is_end = into[start..].ends_with(b"\n");
        self.lines_read += u64::from(is_end);
        Ok(is_end || read < max)
    }

    /// Skips the rest of a line.
    fn skip_line(&mut self, buffer: &mut Vec<u8>, max: usize) -> io::Result<()> {
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
