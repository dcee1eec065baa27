//! CSV, quoted as in RFC 4180 and as spreadsheets save it: the header names the columns, in any order. The csv crate is not
//! used because it does not distinguish an empty cell (no tag) from a quoted one (an empty tag), nor report the lines that a
//! stray quote swallows.

use std::io::{self, Write};

use crate::formats::{Decoder, Lines, Rejection, Row};
use crate::plant::{NewPlant, Plant};

const COLUMNS: [&str; 3] = ["id", "name", "tag"];

/// The first is written. Spreadsheets write the second where a comma is the decimal point.
const SEPARATORS: [u8; 3] = [b',', b';', b'\t'];

const CELLS_MAX: usize = 10_000;

pub(super) fn write_head(out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "{}", COLUMNS.join(","))
}

pub(super) fn write_plant(out: &mut impl Write, id: i64, plant: &Plant) -> io::Result<()> {
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

/// Puts an apostrophe before a name or tag that a spreadsheet would evaluate as a formula. For reading only: an import would
/// take the apostrophe for a part of the name.
pub(crate) fn spreadsheet_safe(plant: &Plant) -> Plant {
    let safe = |text: &String| {
        // The last four are the full-width forms, which some programs evaluate too.
        let is_formula = text
            .trim_start_matches([' ', '\u{a0}'])
            .starts_with(['=', '+', '-', '@', '\t', '\r', '\n', '＝', '＋', '－', '＠']);
        let apostrophe = if is_formula { "'" } else { "" };
        format!("{apostrophe}{text}")
    };
    Plant {
        name: safe(&plant.name),
        tag: plant.tag.as_ref().map(safe),
    }
}

/// The row that is being read, and what the header says about all rows.
#[derive(Default)]
pub(super) struct Csv {
    /// None until the header has been read.
    columns: Option<Columns>,
    /// Determined from the header; 0 before it.
    separator: u8,
    /// None if there is nothing in a cell, not even quotes.
    cells: Vec<Option<Vec<u8>>>,
    /// The cell that is being read.
    cell: Option<Vec<u8>>,
    state: State,
    /// The line where the last quoted cell starts.
    quote_line: u64,
    problem: Option<String>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum State {
    #[default]
    CellStart,
    Plain,
    Quoted,
    /// After a quote within a quoted cell: its end, or the first of two quotes that stand for one.
    QuoteInQuoted,
    /// After the closing quote and a carriage return.
    Closed,
}

/// The positions of id, name and tag in a row.
struct Columns {
    positions: [Option<usize>; 3],
    len: usize,
}

impl Decoder for Csv {
    fn clear(&mut self) {
        self.cells.clear();
        self.cell = None;
        self.state = State::CellStart;
        self.problem = None;
        if self.columns.is_none() {
            self.separator = 0;
        }
    }

    fn take(&mut self, line: &[u8], number: u64) -> bool {
        if self.separator == 0 {
            self.separator = separator_of(line);
        }
        for &byte in line {
            match (self.state, byte) {
                (State::CellStart, b'"') => {
                    self.cell = Some(Vec::new());
                    self.quote_line = number;
                    self.state = State::Quoted;
                }
                (State::Quoted, b'"') => self.state = State::QuoteInQuoted,
                (State::Quoted, _) => self.push(byte, State::Quoted),
                (State::QuoteInQuoted, b'"') => self.push(b'"', State::Quoted),
                (_, b'\n') => {
                    self.end_row();
                    return true;
                }
                (_, byte) if byte == self.separator => self.end_cell(),
                (State::QuoteInQuoted, b'\r') => self.state = State::Closed,
                (State::QuoteInQuoted | State::Closed, _) => {
                    let problem = "a cell continues after its closing quote; write a quote within a cell twice";
                    self.reject(problem.to_owned());
                    self.state = State::Plain;
                }
                (State::CellStart | State::Plain, _) => self.push(byte, State::Plain),
            }
        }
        false
    }

    fn reject_longer_than(&mut self, bytes_max: usize) {
        let hint = match self.state {
            State::Quoted => format!(
                "; the quote opened in line {} may not be closed",
                self.quote_line
            ),
            _ => String::new(),
        };
        self.reject(format!("longer than {bytes_max} bytes{hint}"));
    }

    fn row(&mut self, lines: Lines, is_end: bool) -> io::Result<Row> {
        if is_end && self.state == State::Quoted {
            let line = self.quote_line;
            // More precise than that the row is too long.
            self.problem = Some(format!("the quote opened in line {line} is never closed"));
        }
        // Spreadsheets save empty rows as `,,`.
        let is_blank = self.problem.is_none() && self.cells.iter().all(Option::is_none);
        let Some(columns) = &self.columns else {
            if is_blank {
                return Ok(Row::Blank);
            }
            let columns = self.header().map_err(|problem| {
                io::Error::new(io::ErrorKind::InvalidData, format!("{lines}: {problem}"))
            })?;
            self.columns = Some(columns);
            return Ok(Row::Header);
        };
        let (cells, header) = (self.cells.len(), columns.len);
        if is_blank && (cells == 1 || cells == header) {
            return Ok(Row::Blank);
        }
        let malformed = match &self.problem {
            Some(problem) => Some(problem.clone()),
            None if cells != header => {
                let hint = if cells > header {
                    "quote a cell that contains a separator"
                } else {
                    "a cell may be empty, but not left out"
                };
                let plural = if cells == 1 { "" } else { "s" };
                Some(format!(
                    "{cells} cell{plural}, and the header has {header}; {hint}"
                ))
            }
            None => None,
        };
        Ok(Row::Plant(match malformed {
            // Each of its lines should have been a plant.
            Some(problem) => Err(Rejection {
                problem,
                lines: lines.last - lines.first + 1,
            }),
            None => columns
                .plant(&mut self.cells)
                .map_err(|problem| Rejection { problem, lines: 1 }),
        }))
    }
}

impl Csv {
    fn push(&mut self, byte: u8, state: State) {
        if self.problem.is_none() {
            self.cell.get_or_insert_default().push(byte);
        }
        self.state = state;
    }

    fn end_cell(&mut self) {
        let cell = self.cell.take();
        if self.cells.len() == CELLS_MAX {
            self.reject(format!("more than {CELLS_MAX} cells"));
        }
        if self.problem.is_none() {
            self.cells.push(cell);
        }
        self.state = State::CellStart;
    }

    fn end_row(&mut self) {
        if self.state == State::Plain
            && let Some(cell) = &mut self.cell
        {
            cell.pop_if(|last| *last == b'\r');
            self.cell.take_if(|cell| cell.is_empty());
        }
        self.end_cell();
    }

    /// Records the first problem and drops the cells. The row is still read to its end.
    fn reject(&mut self, problem: String) {
        self.problem.get_or_insert(problem);
        self.cells.clear();
        self.cell = None;
    }

    /// The columns that the current row names.
    fn header(&self) -> Result<Columns, String> {
        if let Some(problem) = &self.problem {
            return Err(problem.clone());
        }
        let name = |cell: &Option<Vec<u8>>| {
            let text = String::from_utf8_lossy(cell.as_deref().unwrap_or_default());
            text.trim().to_lowercase()
        };
        let names: Vec<_> = self.cells.iter().map(name).collect();
        let mut positions = [None; 3];
        for (column, position) in COLUMNS.iter().zip(&mut positions) {
            *position = names.iter().position(|name| name == column);
            if names.iter().filter(|name| *name == column).count() > 1 {
                return Err(format!("the header has two columns `{column}`"));
            }
            if position.is_none() && *column != "tag" {
                return Err(format!(
                    "there is no column `{column}`; a CSV file starts with a header such as id,name,tag"
                ));
            }
        }
        let len = names.len();
        Ok(Columns { positions, len })
    }
}

/// The most frequent one in the header; the first one if there is a tie.
fn separator_of(header: &[u8]) -> u8 {
    let count = |separator: &u8| header.iter().filter(|&byte| byte == separator).count();
    let most = SEPARATORS.into_iter().rev().max_by_key(count);
    most.expect("the list is not empty")
}

impl Columns {
    fn plant(&self, cells: &mut [Option<Vec<u8>>]) -> Result<NewPlant, String> {
        let mut text = |column: usize| {
            let cell = self.positions[column].and_then(|position| cells[position].take());
            let text = cell.map(String::from_utf8).transpose();
            text.map_err(|_| format!("{}: invalid UTF-8", COLUMNS[column]))
        };
        let (id, name, tag) = (text(0)?, text(1)?, text(2)?);
        NewPlant::from_cells(id.as_deref(), name, tag).map_err(|invalid| invalid.to_string())
    }
}
