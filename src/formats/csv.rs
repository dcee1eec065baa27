//! CSV, quoted as in RFC 4180 and as spreadsheets save it: the header names the columns, in any order. The csv crate is not
//! used because it does not distinguish an empty cell (no tag) from a quoted one (an empty tag), nor report the lines that a
//! stray quote swallows.

use std::io::{self, BufRead, Write};

use crate::formats::{Entry, Lines, Part, Rejection, Source, Text, is_comment};
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
        if is_formula {
            format!("'{text}")
        } else {
            text.clone()
        }
    };
    Plant {
        name: safe(&plant.name),
        tag: plant.tag.as_ref().map(safe),
    }
}

#[derive(Default)]
pub(super) struct Decoder {
    bytes_max: usize,
    keeps_text: bool,
    columns: Option<Columns>,
    header: Vec<u8>,
    row: Row,
    /// The lines of the current row that have been read.
    lines: Lines,
    bytes: usize,
    /// The line where the last quoted cell starts.
    quote_line: u64,
    /// The text of the row, without the parts that have been returned.
    raw: Vec<u8>,
    /// The last part returned was not the end of its row.
    is_within: bool,
    line: Vec<u8>,
}

/// The positions of id, name and tag in a row.
struct Columns {
    positions: [Option<usize>; 3],
    len: usize,
}

impl Decoder {
    pub(super) fn new(bytes_max: usize, keeps_text: bool) -> Self {
        Self {
            bytes_max,
            keeps_text,
            ..Self::default()
        }
    }

    pub(super) fn header(&self) -> &[u8] {
        &self.header
    }

    /// The next plant. Blank rows and comments are skipped.
    pub(super) fn next(&mut self, source: &mut Source<impl BufRead>) -> io::Result<Option<Entry>> {
        loop {
            let is_start = !self.is_within;
            let Some(is_end) = self.read_row(source)? else {
                return Ok(None);
            };
            self.is_within = !is_end;
            let Some(columns) = &self.columns else {
                if !self.row.is_blank() {
                    let columns = Columns::named(&self.row).map_err(|problem| {
                        let problem = format!("{}: {problem}", self.lines);
                        io::Error::new(io::ErrorKind::InvalidData, problem)
                    })?;
                    self.columns = Some(columns);
                    self.header = std::mem::take(&mut self.raw);
                }
                continue;
            };
            let cells = self.row.cells.len();
            if self.row.is_blank() && (cells == 1 || cells == columns.len) {
                continue;
            }
            let plant = columns.plant(&mut self.row, self.lines);
            let text = Text {
                lines: self.lines,
                raw: std::mem::take(&mut self.raw),
                part: Part { is_start, is_end },
            };
            return Ok(Some(Entry { text, plant }));
        }
    }

    /// Reads a row to its end (true), or the next part of it if its text is kept (false). None at the end of the input.
    fn read_row(&mut self, source: &mut Source<impl BufRead>) -> io::Result<Option<bool>> {
        if !self.is_within {
            self.row.clear();
            self.raw.clear();
            self.bytes = 0;
        }
        loop {
            let number = source.line();
            self.line.clear();
            let is_line_end = source.read_line(&mut self.line, self.bytes_max)?;
            if self.bytes == 0 {
                self.lines.first = number;
                if self.columns.is_none() {
                    self.row.separator = separator_of(&self.line);
                }
                if is_comment(&self.line) {
                    if !is_line_end {
                        source.skip_line(&mut self.line, self.bytes_max)?;
                    }
                    continue;
                }
            }
            if self.line.is_empty() && is_line_end {
                if self.bytes == 0 {
                    return Ok(None);
                }
                self.row.end(self.quote_line);
                return Ok(Some(true));
            }
            self.lines.last = number;
            self.bytes += self.line.len();
            if self.keeps_text {
                self.raw.extend_from_slice(&self.line);
            }
            if self.bytes > self.bytes_max && self.row.problem.is_none() {
                let hint = match (self.row.state, self.quote_line) {
                    (State::Quoted, line) => {
                        format!("; the quote opened in line {line} may not be closed")
                    }
                    _ => String::new(),
                };
                let max = self.bytes_max;
                self.row.reject(format!("longer than {max} bytes{hint}"));
            }
            let quotes = self.row.quotes;
            let is_row_end = self.row.take(&self.line);
            if self.row.quotes != quotes {
                self.quote_line = number;
            }
            if is_row_end {
                return Ok(Some(true));
            }
            if self.raw.len() > self.bytes_max && self.columns.is_some() {
                return Ok(Some(false));
            }
        }
    }
}

/// The most frequent one in the header; the first one if there is a tie.
fn separator_of(header: &[u8]) -> u8 {
    let count = |separator: &u8| header.iter().filter(|&byte| byte == separator).count();
    let most = SEPARATORS.into_iter().rev().max_by_key(count);
    most.expect("the list is not empty")
}

impl Columns {
    fn named(header: &Row) -> Result<Self, String> {
        if let Some(problem) = &header.problem {
            return Err(problem.clone());
        }
        let name = |cell: &Option<Vec<u8>>| {
            let text = String::from_utf8_lossy(cell.as_deref().unwrap_or_default());
            text.trim().to_lowercase()
        };
        let names: Vec<_> = header.cells.iter().map(name).collect();
        let mut positions = [None; 3];
        for (column, position) in COLUMNS.iter().zip(&mut positions) {
            let mut found = names.iter().enumerate().filter(|(_, name)| name == column);
            *position = found.next().map(|(position, _)| position);
            if found.next().is_some() {
                return Err(format!("the header has two columns `{column}`"));
            }
            if position.is_none() && *column != "tag" {
                return Err(format!(
                    "there is no column `{column}`; a CSV file starts with a header such as id,name,tag"
                ));
            }
        }
        let len = names.len();
        Ok(Self { positions, len })
    }

    fn plant(&self, row: &mut Row, lines: Lines) -> Result<NewPlant, Rejection> {
        let malformed = |problem| Rejection {
            problem,
            lines: lines.last - lines.first + 1,
        };
        if let Some(problem) = &row.problem {
            return Err(malformed(problem.clone()));
        }
        if row.cells.len() != self.len {
            let hint = if row.cells.len() > self.len {
                "quote a cell that contains a separator"
            } else {
                "a cell may be empty, but not left out"
            };
            let (cells, header) = (row.cells.len(), self.len);
            let plural = if cells == 1 { "" } else { "s" };
            return Err(malformed(format!(
                "{cells} cell{plural}, and the header has {header}; {hint}"
            )));
        }
        self.read(row)
            .map_err(|problem| Rejection { problem, lines: 1 })
    }

    fn read(&self, row: &mut Row) -> Result<NewPlant, String> {
        let mut text = |column: usize| {
            let cell = self.positions[column].and_then(|position| row.cells[position].take());
            let text = cell.map(String::from_utf8).transpose();
            text.map_err(|_| format!("{}: invalid UTF-8", COLUMNS[column]))
        };
        let (id, name, tag) = (text(0)?, text(1)?, text(2)?);
        NewPlant::from_cells(id.as_deref(), name, tag).map_err(|invalid| invalid.to_string())
    }
}

#[derive(Default)]
struct Row {
    /// Set when the header is read.
    separator: u8,
    /// None if there is nothing in a cell, not even quotes.
    cells: Vec<Option<Vec<u8>>>,
    /// The cell that is being read.
    cell: Vec<u8>,
    is_quoted: bool,
    state: State,
    /// The number of cells that started with a quote.
    quotes: usize,
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

impl Row {
    fn clear(&mut self) {
        self.cells.clear();
        self.cell.clear();
        self.is_quoted = false;
        self.state = State::CellStart;
        self.problem = None;
    }

    /// Records the problem and drops the cells. The row is still read to its end.
    fn reject(&mut self, problem: String) {
        self.problem.get_or_insert(problem);
        self.cells.clear();
        self.cell.clear();
    }

    /// Spreadsheets save empty rows as `,,`.
    fn is_blank(&self) -> bool {
        self.problem.is_none() && self.cells.iter().all(Option::is_none)
    }

    /// Takes the next line, or a part of it. True at the end of the row.
    fn take(&mut self, line: &[u8]) -> bool {
        for &byte in line {
            match (self.state, byte) {
                (State::CellStart, b'"') => {
                    self.quotes += 1;
                    self.is_quoted = true;
                    self.state = State::Quoted;
                }
                (State::Quoted, b'"') => self.state = State::QuoteInQuoted,
                (State::QuoteInQuoted, b'"') => {
                    self.push(b'"');
                    self.state = State::Quoted;
                }
                (State::Quoted, _) => self.push(byte),
                (_, b'\n') => {
                    self.end(0);
                    return true;
                }
                (_, byte) if byte == self.separator => self.end_cell(),
                (State::QuoteInQuoted, b'\r') => self.state = State::Closed,
                (State::QuoteInQuoted | State::Closed, _) => {
                    let problem = "a cell continues after its closing quote; write a quote within a cell twice";
                    self.reject(problem.to_owned());
                    self.state = State::Plain;
                }
                (State::CellStart | State::Plain, _) => {
                    self.push(byte);
                    self.state = State::Plain;
                }
            }
        }
        false
    }

    fn push(&mut self, byte: u8) {
        if self.problem.is_none() {
            self.cell.push(byte);
        }
    }

    fn end_cell(&mut self) {
        let cell = std::mem::take(&mut self.cell);
        let is_quoted = std::mem::take(&mut self.is_quoted);
        if self.cells.len() == CELLS_MAX {
            self.reject(format!("more than {CELLS_MAX} cells"));
        }
        if self.problem.is_none() {
            self.cells
                .push((is_quoted || !cell.is_empty()).then_some(cell));
        }
        self.state = State::CellStart;
    }

    fn end(&mut self, quote_line: u64) {
        if self.state == State::Quoted {
            self.problem = None; // more precise than that the row is too long
            self.reject(format!(
                "the quote opened in line {quote_line} is never closed"
            ));
        }
        if self.state == State::Plain && self.cell.ends_with(b"\r") {
            self.cell.pop();
        }
        self.end_cell();
    }
}
