//! Plants as text, to be moved: NDJSON and CSV. What is written is read back exactly, whatever the strings hold, and neither
//! way keeps more than one plant in memory.

mod csv;
mod ndjson;
mod source;

use std::io::{self, BufRead, Write};
use std::path::Path;

use clap::ValueEnum;

use crate::exchange::source::Source;
use crate::plant::Plant;

pub use csv::spreadsheet_safe;
pub use source::{COMMENT, Entry, Lines, Part, Rejection};

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
    /// A plant of more bytes than that is rejected.
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

#[cfg(test)]
mod tests;
