//! What was done and what came of it: a row a fault, and a line that moves while it is being done.

use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicUsize, Ordering};

/// One fault.
pub struct Report {
    pub fault: &'static str,
    pub method: &'static str,
    pub runs: usize,
    pub acknowledged: usize,
    /// What was lost or wrong, in words.
    pub wrong: Vec<String>,
}

impl Report {
    pub fn new(fault: &'static str, method: &'static str) -> Self {
        Self {
            fault,
            method,
            runs: 0,
            acknowledged: 0,
            wrong: Vec::new(),
        }
    }

    pub fn add(&mut self, runs: usize, acknowledged: usize, wrong: Vec<String>) {
        self.runs += runs;
        self.acknowledged += acknowledged;
        self.wrong.extend(wrong);
    }

    /// A row of the table.
    pub fn row(&self) -> String {
        let Self {
            fault,
            method,
            runs,
            acknowledged,
            wrong,
        } = self;
        format!(
            "| {fault} | {method} | {runs} | {acknowledged} | {} |",
            wrong.len()
        )
    }
}

/// Counts steps; on a terminal it shows them.
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

    pub fn end(&self) {
        if std::io::stderr().is_terminal() {
            eprint!("\r{:100}\r", "");
        }
    }
}
