//! One JSON object a line: `{"id":…,"name":…,"tag":…}`, decoded as the service decodes a body.

use std::io::{self, BufRead, Write};

use serde::Serialize;

use crate::formats::{Entry, Lines, Part, Rejection, Source, is_comment};
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
    keeps_text: bool,
    line: Vec<u8>,
    /// Within a line that is too long, of which a part has been handed over.
    is_within: bool,
}

impl Decoder {
    /// A line of more bytes than that is a problem.
    pub fn new(bytes_max: usize, keeps_text: bool) -> Self {
        Self {
            bytes_max,
            keeps_text,
            line: Vec::new(),
            is_within: false,
        }
    }

    /// The next plant. Lines with nothing in them, and comments, are passed over.
    pub fn next(&mut self, source: &mut Source<impl BufRead>) -> io::Result<Option<Entry>> {
        loop {
            let number = source.line();
            self.line.clear();
            let is_over = source.read_line(&mut self.line, self.bytes_max)?;
            if self.is_within {
                self.is_within = !is_over;
                let part = if is_over { Part::Last } else { Part::Next };
                return Ok(Some(self.too_long(number, part)));
            }
            if is_comment(&self.line) {
                if !is_over {
                    source.skip_line(&mut self.line, self.bytes_max)?;
                }
                continue;
            }
            if !is_over {
                if self.keeps_text {
                    self.is_within = true;
                    return Ok(Some(self.too_long(number, Part::First)));
                }
                source.skip_line(&mut self.line, self.bytes_max)?;
                return Ok(Some(self.too_long(number, Part::Whole)));
            }
            if self.line.is_empty() {
                return Ok(None);
            }
            if self.line.trim_ascii().is_empty() {
                continue;
            }
            // Each line is the first one to the decoder, so that says nothing.
            let json = self.line.strip_suffix(b"\n").unwrap_or(&self.line);
            let plant = NewPlant::from_json(json).map_err(|invalid| Rejection {
                problem: invalid
                    .to_string()
                    .replace(" at line 1 column", " at column"),
                lines: 1,
            });
            return Ok(Some(self.entry(number, plant, Part::Whole)));
        }
    }

    fn too_long(&mut self, number: u64, part: Part) -> Entry {
        let rejection = Rejection {
            problem: format!("longer than {} bytes", self.bytes_max),
            lines: 1,
        };
        self.entry(number, Err(rejection), part)
    }

    fn entry(&mut self, number: u64, plant: Result<NewPlant, Rejection>, part: Part) -> Entry {
        let raw = if self.keeps_text {
            std::mem::take(&mut self.line)
        } else {
            Vec::new()
        };
        Entry {
            lines: Lines {
                first: number,
                last: number,
            },
            plant,
            raw,
            part,
        }
    }
}
