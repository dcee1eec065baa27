//! The result of each fault as a row of a table in docs/reliability.md, and a progress bar on a terminal.

use std::any::Any;
use std::fs;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::harness::transport::transport;
use crate::harness::{HANG, output};

/// The result of one fault.
pub struct Report {
    pub fault: &'static str,
    pub method: &'static str,
    pub runs: usize,
    pub acknowledged: usize,
    /// Violations; each starts with `lost: `, `wrong: ` or `hang: `.
    pub wrong: Vec<String>,
    /// A measured value in addition to the counts.
    pub note: String,
}

/// The header of the table.
pub const HEAD: &str = "| fault | method | runs | acknowledged | lost | wrong | hangs |\n|---|---|---|---|---|---|---|";

impl Report {
    pub fn new(fault: &'static str, method: &'static str) -> Self {
        Self {
            fault,
            method,
            runs: 0,
            acknowledged: 0,
            wrong: Vec::new(),
            note: String::new(),
        }
    }

    pub fn add(&mut self, runs: usize, acknowledged: usize, wrong: Vec<String>) {
        self.runs += runs;
        self.acknowledged += acknowledged;
        self.wrong.extend(wrong);
    }

    /// A row of the table.
    pub fn row(&self) -> String {
        let count = |what: &str| {
            let so = self.wrong.iter().filter(|wrong| wrong.contains(what));
            so.count()
        };
        let hangs = count("hang: ");
        let lost = count("lost: ");
        let method = match transport().name() {
            Some(transport) => format!("{}, clients over {transport}", self.method),
            None => self.method.to_owned(),
        };
        let columns = [
            self.fault.to_owned(),
            match self.note.as_str() {
                "" => method,
                note => format!("{method}; {note}"),
            },
            thousands(self.runs),
            thousands(self.acknowledged),
            lost.to_string(),
            count("wrong: ").to_string(),
            hangs.to_string(),
        ];
        format!("| {} |", columns.join(" | "))
    }
}

/// The violation that a panic stands for: a wait that timed out, or a check that failed.
pub fn violation_of_panic(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    let text = text.unwrap_or("a panic");
    let kind = if text.contains(HANG) { "hang" } else { "wrong" };
    format!("{kind}: {text}")
}

/// 1234567 → 1,234,567
pub fn thousands(number: usize) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Replaces a table of a page, between the two comments that name it, and adds the date and the commit.
pub fn publish(page: &Path, table: &str, seed: u64, head: &str, rows: &[String]) {
    let [begin, end] = ["begin", "end"].map(|edge| format!("<!-- {table}: {edge} -->"));
    let text = fs::read_to_string(page).expect("the page");
    let (before, rest) = text.split_once(&begin).expect("where the table begins");
    let (_, after) = rest.split_once(&end).expect("where the table ends");
    let day = printed("date", &["-u", "+%Y-%m-%d"]);
    let commit = printed("git", &["rev-parse", "--short", "HEAD"]);
    let changed = printed("git", &["status", "--porcelain", "--untracked-files=no"]);
    // A table that this run has published already is not a change.
    let is_page = |line: &str| line.ends_with("docs/reliability.md");
    let changed = if changed.lines().all(is_page) {
        ""
    } else {
        ", with changes"
    };
    let rows = rows.join("\n");
    let table = format!("Run on {day}, commit {commit}{changed}, seed {seed}.\n\n{head}\n{rows}\n");
    fs::write(page, format!("{before}{begin}\n{table}{end}{after}")).expect("the page");
}

fn printed(program: &str, arguments: &[&str]) -> String {
    let mut command = Command::new(program);
    command
        .args(arguments)
        .current_dir(env!("CARGO_MANIFEST_DIR"));
    let output = output(&mut command);
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// A progress bar; shown on a terminal only.
pub struct Progress {
    name: &'static str,
    total: usize,
    done: AtomicUsize,
}

impl Progress {
    pub fn new(name: &'static str, total: usize) -> Self {
        Self {
            name,
            total,
            done: AtomicUsize::new(0),
        }
    }

    pub fn step(&self) {
        let done = self.done.fetch_add(1, Ordering::Relaxed) + 1;
        let every = (self.total / 200).max(1);
        if std::io::stderr().is_terminal() && done.is_multiple_of(every) {
            let bar = "#".repeat(30 * done.min(self.total) / self.total.max(1));
            eprint!("\r{:40} [{bar:30}] {done} of {}", self.name, self.total);
            let _ = std::io::stderr().flush();
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if std::io::stderr().is_terminal() {
            eprint!("\r{:100}\r", "");
        }
    }
}
