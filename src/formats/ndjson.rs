//! One JSON object per line, `{"id":…,"name":…,"tag":…}`, decoded as the server decodes a request body.

use std::io::{self, BufRead, Write};

use serde::Serialize;

use crate::formats::{Entry, Lines, Part, Rejection, Source, Text, is_comment};
use crate::plant::{NewPlant, Plant};

#[derive(Serialize)]
struct Line<'a> {
    id: i64,
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    tag: Option<&'a str>,
}

pub(super) fn write_plant(out: &mut impl Write, id: i64, plant: &Plant) -> io::Result<()> {
    let line = Line {
        id,
        name: &plant.name,
        tag: plant.tag.as_deref(),
    };
    serde_json::to_writer(&mut *out, &line)?;
    out.write_all(b"\n")
}

pub(super) struct Decoder {
    bytes_max: usize,
    keeps_text: bool,
    line: Vec<u8>,
    /// The last part returned was not the end of its line.
    is_within: bool,
}

impl Decoder {
    pub(super) fn new(bytes_max: usize, keeps_text: bool) -> Self {
        Self {
            bytes_max,
            keeps_text,
            line: Vec::new(),
            is_within: false,
        }
    }

    /// The next plant. Blank lines and comments are skipped.
    pub(super) fn next(&mut self, source: &mut Source<impl BufRead>) -> io::Result<Option<Entry>> {
        loop {
            let number = source.line();
            self.line.clear();
            let mut is_end = source.read_line(&mut self.line, self.bytes_max)?;
            let is_start = !self.is_within;
            let is_skipped = is_start && is_comment(&self.line);
            let is_too_long = !(is_start && is_end);
            if !is_end && (is_skipped || !self.keeps_text) {
                source.skip_line(&mut self.line, self.bytes_max)?;
                is_end = true;
            }
            if !is_too_long && self.line.is_empty() {
                return Ok(None);
            }
            if is_skipped || !is_too_long && self.line.trim_ascii().is_empty() {
                continue;
            }
            let plant = if is_too_long {
                let problem = format!("longer than {} bytes", self.bytes_max);
                Err(Rejection { problem, lines: 1 })
            } else {
                self.plant()
            };
            self.is_within = !is_end;
            let mut raw = Vec::new();
            if self.keeps_text {
                std::mem::swap(&mut raw, &mut self.line);
            }
            let text = Text {
                lines: Lines {
                    first: number,
                    last: number,
                },
                raw,
                part: Part { is_start, is_end },
            };
            return Ok(Some(Entry { text, plant }));
        }
    }

    fn plant(&self) -> Result<NewPlant, Rejection> {
        let json = self.line.strip_suffix(b"\n").unwrap_or(&self.line);
        NewPlant::from_json(json).map_err(|invalid| {
            // Every line is line 1 for the JSON decoder.
            let problem = invalid
                .to_string()
                .replace(" at line 1 column", " at column");
            Rejection { problem, lines: 1 }
        })
    }
}
