//! Where an export goes: standard output, a device or pipe, or a file that appears once it is complete.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Stdout, Write};
use std::path::Path;

use anyhow::Context;

use crate::fs::{AtomicFile, Replace};

/// Something to write to.
pub(super) enum Target {
    StandardOutput(Stdout),
    /// A device or a named pipe.
    Device(File),
    File(AtomicFile),
}

impl Target {
    /// `store` is the database that is exported, if that is a file: it is never written to.
    pub(super) fn open(path: &Path, store: Option<&Path>) -> anyhow::Result<Self> {
        if path == Path::new("-") {
            return Ok(Self::StandardOutput(io::stdout()));
        }
        match fs::metadata(path) {
            Ok(found) if !found.is_file() && !found.is_dir() => {
                let device = OpenOptions::new().write(true).open(path);
                let device = device.with_context(|| format!("cannot write {}", path.display()))?;
                Ok(Self::Device(device))
            }
            _ => Ok(Self::File(AtomicFile::create(
                path,
                Replace::RegularFile,
                store,
            )?)),
        }
    }

    pub(super) fn is_standard_output(&self) -> bool {
        matches!(self, Self::StandardOutput(_))
    }

    /// To be called when all is written.
    pub(super) fn finish(mut self) -> anyhow::Result<()> {
        self.flush()?;
        match self {
            Self::File(file) => Ok(file.persist()?),
            Self::StandardOutput(_) | Self::Device(_) => Ok(()),
        }
    }
}

impl Write for Target {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::StandardOutput(out) => out.write(bytes),
            Self::Device(file) => file.write(bytes),
            Self::File(file) => file.file().write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::StandardOutput(out) => out.flush(),
            Self::Device(file) => file.flush(),
            Self::File(file) => file.file().flush(),
        }
    }
}
