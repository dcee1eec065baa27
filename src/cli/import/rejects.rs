//! `import --rejects FILE`: the rows that were not stored, as they were, each after a comment with the reason. Once they are
//! corrected the file can be imported: an import passes over the comments.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::cli::import::batches::Problem;
use crate::exchange::{COMMENT, Part};
use crate::fs::sync_directory_of;

/// A new file that gets its name when it is complete.
pub(super) struct Rejects {
    path: PathBuf,
    unfinished: PathBuf,
    out: BufWriter<File>,
    is_empty: bool,
}

impl Rejects {
    /// Fails if there is a file of that name.
    pub(super) fn create(path: &Path) -> io::Result<Self> {
        if fs::symlink_metadata(path).is_ok() {
            return Err(ErrorKind::AlreadyExists.into());
        }
        let mut unfinished = path.as_os_str().to_owned();
        unfinished.push(format!(".{}.part", std::process::id()));
        let mut options = OpenOptions::new();
        let options = options.write(true).create_new(true).mode(0o600);
        let out = BufWriter::new(options.open(&unfinished)?);
        Ok(Self {
            path: path.to_owned(),
            unfinished: unfinished.into(),
            out,
            is_empty: true,
        })
    }

    /// Writes a row, or a part of it.
    pub(super) fn write(&mut self, header: &[u8], problem: &Problem) -> io::Result<()> {
        if self.is_empty {
            self.write_text(header, true)?;
            self.is_empty = false;
        }
        if matches!(problem.part, Part::Whole | Part::First) {
            let (lines, reason) = (problem.lines, &problem.rejection.problem);
            writeln!(self.out, "{COMMENT}{lines}: {reason}")?;
        }
        self.write_text(
            &problem.raw,
            matches!(problem.part, Part::Whole | Part::Last),
        )
    }

    /// The last line of a file may have no end.
    fn write_text(&mut self, text: &[u8], is_end: bool) -> io::Result<()> {
        self.out.write_all(text)?;
        if is_end && !text.is_empty() && !text.ends_with(b"\n") {
            self.out.write_all(b"\n")?;
        }
        Ok(())
    }

    /// Gives it its name. Without any row there is no file.
    pub(super) fn finish(mut self) -> io::Result<()> {
        if self.is_empty {
            return Ok(());
        }
        self.out.flush()?;
        self.out.get_ref().sync_all()?;
        fs::hard_link(&self.unfinished, &self.path)?;
        sync_directory_of(&self.path)
    }
}

impl Drop for Rejects {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.unfinished);
    }
}
