//! Where an export goes. A file is written beside its place, synced, and renamed: one that is there is whole, also after a power
//! cut.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Stdout, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::store::sync_directory_of;

/// Something to write to.
pub(super) enum Target {
    StandardOutput(Stdout),
    /// What is no file: a device, or a pipe with a name.
    Device(File),
    File(Part),
}

/// A file on its way.
pub(super) struct Part {
    file: File,
    path: PathBuf,
    place: PathBuf,
}

impl Target {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        if path == Path::new("-") {
            return Ok(Self::StandardOutput(io::stdout()));
        }
        // A link stays one: what it leads to is replaced.
        let place = match fs::metadata(path) {
            Ok(there) if there.is_dir() => return Err(io::ErrorKind::IsADirectory.into()),
            Ok(there) if !there.is_file() => {
                return OpenOptions::new().write(true).open(path).map(Self::Device);
            }
            Ok(_) => path.canonicalize()?,
            Err(_) => path.to_owned(),
        };
        let mut part = OsString::from(&place);
        part.push(format!(".{}.part", std::process::id()));
        let path = PathBuf::from(part);
        let mut options = OpenOptions::new();
        // As private as the store.
        let options = options.write(true).create(true).truncate(true).mode(0o600);
        let file = options.open(&path)?;
        Ok(Self::File(Part { file, path, place }))
    }

    pub(super) fn is_standard_output(&self) -> bool {
        matches!(self, Self::StandardOutput(_))
    }

    /// All is written.
    pub(super) fn finish(mut self) -> io::Result<()> {
        self.flush()?;
        if let Self::File(part) = &self {
            part.file.sync_all()?;
            fs::rename(&part.path, &part.place)?;
            sync_directory_of(&part.place)?;
        }
        Ok(())
    }
}

impl Write for Target {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::StandardOutput(out) => out.write(bytes),
            Self::Device(file) => file.write(bytes),
            Self::File(part) => part.file.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::StandardOutput(out) => out.flush(),
            Self::Device(file) => file.flush(),
            Self::File(part) => part.file.flush(),
        }
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // Nothing is there any more after the rename.
        let _ = fs::remove_file(&self.path);
    }
}
