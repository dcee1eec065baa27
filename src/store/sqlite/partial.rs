//! A file in the making. Under its name it is found whole and synced, or not at all; what a process that was killed has
//! left of it is taken over by the next.

use std::fs::{self, File, Metadata, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use crate::store::error::SaveError;
use crate::store::sqlite::open::{self, beside};

/// What SQLite, or we, keep beside a database.
pub(super) const COMPANIONS: [&str; 4] = ["-wal", "-shm", "-journal", "-lock"];

/// Where the header of a database says whether there may be a log beside it, and how it says so.
const JOURNAL_MODE_AT: u64 = 18;
const AT_REST: [u8; 2] = [1, 1];
const WITH_LOG: [u8; 2] = [2, 2];

/// Writable by this process alone, and gone with this unless it was put in place.
pub(super) struct Partial {
    name: PathBuf,
    path: PathBuf,
    file: File,
}

impl Partial {
    /// Begins a file that will have this name. Whatever has that name stays until the end.
    pub(super) fn claim(name: PathBuf) -> Result<Self, SaveError> {
        let path = unfinished(&name);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            // A link that somebody else has put there would lead to a file of ours.
            .custom_flags(OFlags::NOFOLLOW.bits().cast_signed())
            .open(&path)
            .map_err(failed_to("create", &path))?;
        match file.try_lock() {
            // One that has just been put in place by the process that held the lock is a good file by now.
            Ok(()) if is_same(file.metadata(), fs::metadata(&path)) => {}
            Ok(()) | Err(TryLockError::WouldBlock) => {
                return Err(SaveError::InTheMaking(name.display().to_string()));
            }
            Err(TryLockError::Error(error)) => return Err(failed_to("lock", &path)(error)),
        }
        let partial = Self { name, path, file };
        partial.remove_companions();
        let emptied = partial.file.set_len(0);
        emptied.map_err(failed_to("empty", &partial.path))?;
        Ok(partial)
    }

    /// Where it is until it is whole.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// To be written to.
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// What is written is to be on disk. From there it will be read, as it will be one day when it matters.
    pub(super) fn sync(&self) -> Result<(), SaveError> {
        let synced = self.file.sync_all();
        synced.map_err(failed_to("sync", &self.path))?;
        #[cfg(target_os = "linux")]
        {
            use rustix::fs::{Advice, fadvise};
            // It is only advice.
            let _ = fadvise(&self.file, 0, None, Advice::DontNeed);
        }
        Ok(())
    }

    /// A database with all that it has in this one file: a backup.
    pub(super) fn mark_at_rest(&self) -> Result<(), SaveError> {
        self.mark(AT_REST)
    }

    /// A database that can be served.
    pub(super) fn mark_in_use(&self) -> Result<(), SaveError> {
        self.mark(WITH_LOG)
    }

    /// SQLite itself would make a log beside it for this, and has to be kept from it.
    fn mark(&self, mode: [u8; 2]) -> Result<(), SaveError> {
        let written = self.file.write_all_at(&mode, JOURNAL_MODE_AT);
        written.map_err(failed_to("write to", &self.path))
    }

    /// Gives it its name, for good.
    pub(super) fn put_in_place(self) -> Result<(), SaveError> {
        self.remove_companions();
        fs::rename(&self.path, &self.name).map_err(failed_to("put in place", &self.name))?;
        open::sync_directory_of(&self.name).map_err(failed_to("sync the directory of", &self.name))
    }

    fn remove_companions(&self) {
        for suffix in COMPANIONS {
            let _ = fs::remove_file(beside(&self.path, suffix));
        }
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if is_same(self.file.metadata(), fs::metadata(&self.path)) {
            self.remove_companions();
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// What a file is called until it is whole.
pub(super) fn unfinished(path: &Path) -> PathBuf {
    beside(path, "-partial")
}

/// Whether a file, looked at without SQLite, is a backup of ours.
///
/// No file may be looked at like this that the process has open through SQLite: closing it drops SQLite's locks.
pub(super) fn is_backup(file: &File) -> io::Result<bool> {
    let mut header = [0; 100];
    match file.read_exact_at(&mut header, 0) {
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(false),
        other => other?,
    }
    Ok(header.starts_with(b"SQLite format 3\0")
        && header[18..20] == AT_REST
        && header[68..72] == open::APPLICATION_ID.to_be_bytes())
}

/// Whether two names, or a name and an open file, are one file.
pub(super) fn is_same(one: io::Result<Metadata>, other: io::Result<Metadata>) -> bool {
    let both = one.ok().zip(other.ok());
    both.is_some_and(|(a, b)| (a.dev(), a.ino()) == (b.dev(), b.ino()))
}

pub(super) fn failed_to(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> SaveError {
    let path = path.display().to_string();
    move |source| SaveError::Io {
        action,
        path,
        source,
    }
}
