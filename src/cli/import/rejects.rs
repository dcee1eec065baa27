//! `import --rejects FILE`: the rows that were not stored, as they were, each after a comment with the reason. Once they are
//! corrected the file can be imported: an import passes over the comments.

use std::io::{self, Write};
use std::path::Path;

use anyhow::bail;

use crate::cli::import::batches::Problem;
use crate::exchange::{COMMENT, Part};
use crate::fs::{AtomicFile, Replace, WriteError};

/// Bytes that are written at a time.
const BUFFER_LEN: usize = 64 << 10;

/// A new file that gets its name when it is complete.
pub(super) struct Rejects {
    file: AtomicFile,
    buffer: Vec<u8>,
    is_empty: bool,
}

impl Rejects {
    /// Fails if there is a file of that name. `store` is the database that is imported to, if that is a file.
    pub(super) fn create(path: &Path, store: Option<&Path>) -> anyhow::Result<Self> {
        let file = match AtomicFile::create(path, Replace::Nothing, store) {
            Err(WriteError::Exists(path)) => {
                bail!("{path} already exists; choose another name for --rejects")
            }
            created => created?,
        };
        Ok(Self {
            file,
            buffer: Vec::new(),
            is_empty: true,
        })
    }

    /// Writes a row, or a part of it.
    pub(super) fn write(&mut self, header: &[u8], problem: &Problem) -> io::Result<()> {
        if self.is_empty {
            self.push(header, true);
            self.is_empty = false;
        }
        if matches!(problem.part, Part::Whole | Part::First) {
            let (lines, reason) = (problem.lines, &problem.rejection.problem);
            writeln!(self.buffer, "{COMMENT}{lines}: {reason}")?;
        }
        let is_end = matches!(problem.part, Part::Whole | Part::Last);
        self.push(&problem.raw, is_end);
        if self.buffer.len() >= BUFFER_LEN {
            self.flush()?;
        }
        Ok(())
    }

    /// The last line of a file may have no end.
    fn push(&mut self, text: &[u8], is_end: bool) {
        self.buffer.extend_from_slice(text);
        if is_end && self.buffer.last().is_some_and(|last| *last != b'\n') {
            self.buffer.push(b'\n');
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.file().write_all(&self.buffer)?;
        self.buffer.clear();
        Ok(())
    }

    /// Gives it its name. Without any row there is no file.
    pub(super) fn finish(mut self) -> anyhow::Result<()> {
        if !self.is_empty {
            self.flush()?;
            self.file.persist()?;
        }
        Ok(())
    }
}
