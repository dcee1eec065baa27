//! One JSON object per line, `{"id":…,"name":…,"tag":…}`, decoded as the server decodes a request body.

use std::io::{self, Write};

use serde::Serialize;

use crate::formats::{Decoder, Lines, Rejection, Row};
use crate::plant::{NewPlant, Plant};

#[derive(Serialize)]
struct Line<'a> {
    id: i64,
    #[serde(flatten)]
    plant: &'a Plant,
}

pub(super) fn write_plant(out: &mut impl Write, id: i64, plant: &Plant) -> io::Result<()> {
    serde_json::to_writer(&mut *out, &Line { id, plant })?;
    out.write_all(b"\n")
}

#[derive(Default)]
pub(super) struct Ndjson {
    line: Vec<u8>,
    problem: Option<String>,
}

impl Decoder for Ndjson {
    fn clear(&mut self) {
        self.line.clear();
        self.problem = None;
    }

    fn take(&mut self, line: &[u8], _: u64) -> bool {
        if self.problem.is_none() {
            self.line.extend_from_slice(line);
        }
        line.ends_with(b"\n")
    }

    fn reject_longer_than(&mut self, bytes_max: usize) {
        self.problem = Some(format!("longer than {bytes_max} bytes"));
    }

    fn row(&mut self, _: Lines, _: bool) -> io::Result<Row> {
        if self.problem.is_none() && self.line.trim_ascii().is_empty() {
            return Ok(Row::Blank);
        }
        let json = self.line.strip_suffix(b"\n").unwrap_or(&self.line);
        let plant = match &self.problem {
            Some(problem) => Err(problem.clone()),
            None => NewPlant::from_json(json).map_err(|invalid| {
                // Every line is line 1 for the JSON decoder.
                let problem = invalid.to_string();
                problem.replace(" at line 1 column", " at column")
            }),
        };
        Ok(Row::Plant(
            plant.map_err(|problem| Rejection { problem, lines: 1 }),
        ))
    }
}
