//! Rows of cells, as RFC 4180 quotes them and as spreadsheets save them: the header names the columns, in any order. A cell
//! with nothing in it is no cell, and `""` is one that holds the empty string.

use std::io::{self, BufRead, Write};

use crate::exchange::source::{Entry, Source};
use crate::plant::{NewPlant, Plant};

const COLUMNS: [&str; 3] = ["id", "name", "tag"];

/// The first is what we write. Where a comma is the decimal point, spreadsheets write the second.
const SEPARATORS: [u8; 3] = [b',', b';', b'\t'];

/// In a row.
const CELLS_MAX: usize = 10_000;

/// Writes the header.
pub fn write_head(out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "{}", COLUMNS.join(","))
}

/// Writes one plant.
pub fn write_plant(out: &mut impl Write, id: i64, plant: &Plant) -> io::Result<()> {
    write!(out, "{id},")?;
    write_cell(out, &plant.name)?;
    out.write_all(b",")?;
    if let Some(tag) = &plant.tag {
        write_cell(out, tag)?;
    }
    out.write_all(b"\n")
}

fn write_cell(out: &mut impl Write, text: &str) -> io::Result<()> {
    let is_special = |byte: u8| byte == b'"' || byte < b' ' || SEPARATORS.contains(&byte);
    // Some programs drop spaces at the ends of a cell that is not quoted.
    if text.trim() == text && !text.is_empty() && !text.bytes().any(is_special) {
        return out.write_all(text.as_bytes());
    }
    write!(out, "\"{}\"", text.replace('"', "\"\""))
}

/// Takes the rows apart.
pub struct Decoder {
    bytes_max: usize,
    columns: Option<Columns>,
    row: Row,
    line: Vec<u8>,
}

/// Where the members of a plant stand in a row.
struct Columns {
    places: [Option<usize>; 3],
    len: usize,
}

impl Decoder {
    /// A row of more bytes than that is a problem.
    pub fn new(bytes_max: usize) -> Self {
        Self {
            bytes_max,
            columns: None,
            row: Row::new(SEPARATORS[0]),
            line: Vec::new(),
        }
    }

    /// The next plant. Rows with nothing in them are passed over.
    pub fn next(&mut self, source: &mut Source<impl BufRead>) -> io::Result<Option<Entry>> {
        while let Some(line) = self.read_row(source)? {
            match &self.columns {
                _ if self.row.is_blank() => {}
                Some(columns) => {
                    let plant = columns.plant(&mut self.row);
                    return Ok(Some(Entry { line, plant }));
                }
                None => {
                    let columns = Columns::named(&self.row).map_err(|problem| {
                        let problem = format!("line {line}: {problem}");
                        io::Error::new(io::ErrorKind::InvalidData, problem)
                    })?;
                    self.columns = Some(columns);
                }
            }
        }
        Ok(None)
    }

    /// Reads a row; gives the line where it begins, or none at the end.
    fn read_row(&mut self, source: &mut Source<impl BufRead>) -> io::Result<Option<u64>> {
        let begin = source.line();
        let mut bytes = 0;
        self.row.clear();
        loop {
            self.line.clear();
            let is_over = source.read_line(&mut self.line, self.bytes_max)?;
            if self.columns.is_none() && bytes == 0 {
                self.row.separator = separator_of(&self.line);
            }
            if self.line.is_empty() && is_over {
                if bytes == 0 {
                    return Ok(None);
                }
                self.row.end();
                return Ok(Some(begin));
            }
            bytes += self.line.len();
            if bytes > self.bytes_max {
                self.row
                    .give_up(format!("longer than {} bytes", self.bytes_max));
            }
            if self.row.take(&self.line) {
                return Ok(Some(begin));
            }
        }
    }
}

/// The one that stands most often in the header.
fn separator_of(header: &[u8]) -> u8 {
    let count = |separator: &u8| header.iter().filter(|&byte| byte == separator).count();
    let by_count = |a: &&u8, b: &&u8| count(a).cmp(&count(b));
    *SEPARATORS
        .iter()
        .rev()
        .max_by(by_count)
        .expect("there are three")
}

impl Columns {
    fn named(header: &Row) -> Result<Self, String> {
        if let Some(problem) = &header.problem {
            return Err(problem.clone());
        }
        let names: Vec<_> = header
            .cells
            .iter()
            .map(|cell| String::from_utf8_lossy(&cell.text).trim().to_lowercase())
            .collect();
        let mut places = [None; 3];
        for (column, place) in COLUMNS.iter().zip(&mut places) {
            let mut found = names.iter().enumerate().filter(|(_, name)| name == column);
            *place = found.next().map(|(place, _)| place);
            if found.next().is_some() {
                return Err(format!("the header has two columns `{column}`"));
            }
            if place.is_none() && *column != "tag" {
                return Err(format!(
                    "there is no column `{column}`; a CSV file begins with a header such as id,name,tag"
                ));
            }
        }
        let len = names.len();
        Ok(Self { places, len })
    }

    fn plant(&self, row: &mut Row) -> Result<NewPlant, String> {
        if let Some(problem) = row.problem.take() {
            return Err(problem);
        }
        if row.cells.iter().skip(self.len).any(|cell| !cell.is_none()) {
            return Err(format!(
                "{} cells, and the header has {}; quote a cell that holds a separator",
                row.cells.len(),
                self.len
            ));
        }
        let mut text = |column: usize| {
            let place = self.places[column];
            let cell = place.and_then(|place| row.cells.get_mut(place));
            match cell.filter(|cell| !cell.is_none()) {
                None => Ok(None),
                Some(cell) => String::from_utf8(std::mem::take(&mut cell.text))
                    .map(Some)
                    .map_err(|_| format!("{}: invalid UTF-8", COLUMNS[column])),
            }
        };
        let (id, name, tag) = (text(0)?, text(1)?, text(2)?);
        NewPlant::from_cells(id.as_deref(), name, tag).map_err(|invalid| invalid.to_string())
    }
}

#[derive(Default)]
struct Cell {
    text: Vec<u8>,
    is_quoted: bool,
}

impl Cell {
    fn is_none(&self) -> bool {
        self.text.is_empty() && !self.is_quoted
    }
}

/// A row, as far as it has been read.
struct Row {
    separator: u8,
    cells: Vec<Cell>,
    /// The last cell, while it is being read.
    cell: Cell,
    at: At,
    problem: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum At {
    CellStart,
    Plain,
    Quoted,
    /// After a quote within a quoted cell: its end, or half of a quote that belongs to it.
    Quote,
    /// After that and the first half of the end of a line.
    Closed,
}

impl Row {
    fn new(separator: u8) -> Self {
        Self {
            separator,
            cells: Vec::new(),
            cell: Cell::default(),
            at: At::CellStart,
            problem: None,
        }
    }

    fn clear(&mut self) {
        self.cells.clear();
        self.cell = Cell::default();
        self.at = At::CellStart;
        self.problem = None;
    }

    /// Keeps no more of it, but reads on to its end.
    fn give_up(&mut self, problem: String) {
        self.problem.get_or_insert(problem);
        self.cells.clear();
        self.cell.text.clear();
    }

    /// Whether there is nothing in it: spreadsheets save such rows as `,,`.
    fn is_blank(&self) -> bool {
        self.problem.is_none() && self.cells.iter().all(Cell::is_none)
    }

    /// Takes the next line, or a part of it. True once the row is over.
    fn take(&mut self, line: &[u8]) -> bool {
        for &byte in line {
            match (self.at, byte) {
                (At::CellStart, b'"') => {
                    self.cell.is_quoted = true;
                    self.at = At::Quoted;
                }
                (At::Quoted, b'"') => self.at = At::Quote,
                (At::Quote, b'"') => {
                    self.keep(b'"');
                    self.at = At::Quoted;
                }
                (At::Quoted, _) => self.keep(byte),
                (_, b'\n') => {
                    self.end();
                    return true;
                }
                (_, byte) if byte == self.separator => self.end_cell(),
                (At::Quote, b'\r') => self.at = At::Closed,
                (At::Quote | At::Closed, _) => {
                    let problem =
                        "a cell goes on after its closing quote; write a quote within a cell twice";
                    self.give_up(problem.to_owned());
                    self.at = At::Plain;
                }
                (At::CellStart | At::Plain, _) => {
                    self.keep(byte);
                    self.at = At::Plain;
                }
            }
        }
        false
    }

    fn keep(&mut self, byte: u8) {
        if self.problem.is_none() {
            self.cell.text.push(byte);
        }
    }

    fn end_cell(&mut self) {
        let cell = std::mem::take(&mut self.cell);
        if self.cells.len() == CELLS_MAX {
            self.give_up(format!("more than {CELLS_MAX} cells"));
        }
        if self.problem.is_none() {
            self.cells.push(cell);
        }
        self.at = At::CellStart;
    }

    fn end(&mut self) {
        if self.at == At::Quoted {
            self.give_up("a quote is never closed".to_owned());
        }
        if self.at == At::Plain && self.cell.text.ends_with(b"\r") {
            self.cell.text.pop();
        }
        self.end_cell();
    }
}
