//! A backup: everything that was there at one moment, copied page by page beside a running server into one file that
//! is at rest.

use std::path::Path;

use rusqlite::backup::{Backup, StepResult};
use rusqlite::ffi::SQLITE_IOERR_WRITE;
use rusqlite::{Connection, ErrorCode, OpenFlags};

use crate::fs::{AtomicFile, JournalMode, Replace, WriteError, failed_to};
use crate::store::error::{OpenError, SaveError};
use crate::store::sqlite::open;
use crate::store::sqlite::throttle::Pace;
use crate::store::types::Location;

/// Pages of 4 KiB between two rests, and how many times as long as the work these are: short, because the log grows.
const PAGES_A_STEP: i32 = 256;
const REST: u32 = 1;

/// A backup that is being made.
pub struct BackupFile(AtomicFile);

impl BackupFile {
    /// Begins a backup with this name, of a store in a file or elsewhere.
    pub fn begin(path: &Path, store: Option<&Path>, replace: bool) -> Result<Self, SaveError> {
        let replace = if replace {
            Replace::Backup
        } else {
            Replace::Nothing
        };
        Ok(Self(AtomicFile::create(path, replace, store)?))
    }

    /// The temporary file: a store to be filled, then one to be checked.
    pub fn location(&self) -> Location {
        Location::Sqlite(self.0.path().to_owned())
    }

    /// To be called once all is in it, and before it is read.
    pub fn settle(&self) -> Result<(), SaveError> {
        open::lay_to_rest(self.0.path())?;
        Ok(self.0.sync()?)
    }

    /// Gives it its name.
    pub fn finish(self) -> Result<(), SaveError> {
        Ok(self.0.persist()?)
    }
}

/// Copies all pages as they are at this moment, and tells how many of how many it has. A server adds meanwhile; only
/// its log cannot begin again before the end of this.
pub(super) fn copy_pages(
    source: &mut Connection,
    target: &BackupFile,
    tell: &mut dyn FnMut(u64, u64),
) -> Result<(), SaveError> {
    let file = &target.0;
    let mut copy = scratch(file.path())?;
    // SQLite begins a copy anew when somebody has written between two steps, and under load would never end; not
    // within one transaction.
    let moment = source.transaction()?;
    moment.query_row("SELECT count(*) FROM sqlite_schema", [], |_| Ok(()))?;
    let backup = Backup::new(&moment, &mut copy)?;
    let mut pace = Pace::new(REST);
    loop {
        let step = backup.step(PAGES_A_STEP).map_err(failed_writing(target))?;
        let progress = backup.progress();
        let [all, left] = [progress.pagecount, progress.remaining].map(|n| n.unsigned_abs().into());
        tell(all - left, all);
        match step {
            StepResult::Done => break,
            StepResult::More => {}
            _ => return Err(WriteError::InUse(file.path().display().to_string()).into()),
        }
        // A little now and then, instead of all at once: the server waits for the same disk.
        let synced = file.file().sync_data();
        synced.map_err(failed_to("sync", file.path()))?;
        pace.rest();
    }
    drop(backup);
    drop(moment);
    drop(copy);
    Ok(file.set_journal_mode(JournalMode::Rollback)?)
}

/// A connection to a new store in the temporary file of a backup. It needs no WAL: after a failure the file is deleted.
pub(super) fn open_to_fill(path: &Path) -> Result<Connection, OpenError> {
    let mut connection = scratch(path)?;
    open::upgrade(&mut connection, path)?;
    Ok(connection)
}

/// A connection to an empty file that is synced by us, and thrown away if anything goes wrong.
pub(super) fn scratch(path: &Path) -> Result<Connection, OpenError> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags).map_err(open::unusable(path))?;
    let pragmas =
        "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA locking_mode = EXCLUSIVE";
    connection
        .execute_batch(pragmas)
        .map_err(open::unusable(path))?;
    Ok(connection)
}

fn failed_writing(target: &BackupFile) -> impl FnOnce(rusqlite::Error) -> SaveError {
    let path = target.0.path().display().to_string();
    move |source| {
        let code = source.sqlite_error().map(|error| error.extended_code);
        let full = source.sqlite_error_code() == Some(ErrorCode::DiskFull);
        if full || code == Some(SQLITE_IOERR_WRITE) {
            SaveError::NoRoom { path, source }
        } else {
            source.into()
        }
    }
}
