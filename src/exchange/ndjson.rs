//! One JSON object a line: `{"id":…,"name":…,"tag":…}`, decoded as the service decodes a body.

use std::io::{self, BufRead, Write};

use serde::Serialize;

use crate::exchange::source::{Entry, Source};
use crate::plant::{NewPlant, Plant};

#[derive(Serialize)]
struct Line<'a> {
    id: i64,
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    tag: Option<&'a str>,
}

/// Writes one plant.
pub fn write_plant(out: &mut impl Write, id: i64, plant: &Plant) -> io::Result<()> {
    let line = Line {
        id,
        name: &plant.name,
        tag: plant.tag.as_deref(),
    };
    serde_json::to_writer(&mut *out, &line)?;
    out.write_all(b"\n")
}

/// Takes the lines apart.
pub struct Decoder {
    bytes_max: usize,
    line: Vec<u8>,
}

impl Decoder {
    /// A line of more bytes than that is a problem.
    pub fn new(bytes_max: usize) -> Self {
        Self {
            bytes_max,
            line: Vec::new(),
        }
    }

    /// The next plant. Lines with nothing in them are passed over.
    pub fn next(&mut self, source: &mut Source<impl BufRead>) -> io::Result<Option<Entry>> {
        loop {
            let line = source.line();
            self.line.clear();
            let mut too_long = false;
            while !source.read_line(&mut self.line, self.bytes_max)? {
                too_long = true;
                self.line.clear();
            }
            let plant = if too_long {
                Err(format!("longer than {} bytes", self.bytes_max))
            } else if !self.line.trim_ascii().is_empty() {
                // Each line is the first one to the decoder, so that says nothing.
                NewPlant::from_json(self.line.strip_suffix(b"\n").unwrap_or(&self.line)).map_err(
                    |invalid| {
                        invalid
                            .to_string()
                            .replace(" at line 1 column", " at column")
                    },
                )
            } else if self.line.is_empty() {
                return Ok(None);
            } else {
                continue;
            };
            return Ok(Some(Entry { line, plant }));
        }
    }
}
