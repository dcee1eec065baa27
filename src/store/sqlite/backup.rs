//! A backup: everything that was there at one moment, copied page by page beside a running server into one file that
//! is at rest.

use std::fs::{self, File};
use std::path::Path;

use rusqlite::backup::{Backup, StepResult};
use rusqlite::ffi::SQLITE_IOERR_WRITE;
use rusqlite::{Connection, ErrorCode, OpenFlags};

use crate::store::contract::Location;
use crate::store::error::SaveError;
use crate::store::sqlite::open::{self, beside};
use crate::store::sqlite::pace::Pace;
use crate::store::sqlite::partial::{
    COMPANIONS, Partial, failed_to, is_backup, is_same, unfinished,
};

/// Pages of 4 KiB between two rests, and how many times as long as the work these are: short, because the log grows.
const PAGES_A_STEP: i32 = 256;
const REST: u32 = 1;

/// A backup in the making.
pub struct BackupFile {
    partial: Partial,
    path: String,
    replace: bool,
}

impl BackupFile {
    /// Begins a backup that will have this name, of a store that is a file or is not.
    pub fn begin(path: &Path, store: Option<&Path>, replace: bool) -> Result<Self, SaveError> {
        let real = open::real(path)?;
        let path = path.display().to_string();
        if let Some(store) = store {
            let store = open::real(store)?;
            if [&real, &unfinished(&real)]
                .iter()
                .any(|path| belongs_to(path, &store))
            {
                return Err(SaveError::OwnFile(path));
            }
        }
        match fs::metadata(&real) {
            Err(_) => {}
            Ok(found) if !found.is_file() => return Err(SaveError::NotAFile(path)),
            Ok(_) if !replace => return Err(SaveError::Exists(path)),
            Ok(found) => {
                let file = File::open(&real).map_err(failed_to("read", &real))?;
                if found.len() > 0 && !is_backup(&file).map_err(failed_to("read", &real))? {
                    return Err(SaveError::NotReplaced(path));
                }
            }
        }
        Ok(Self {
            partial: Partial::claim(real)?,
            path,
            replace,
        })
    }

    /// Where it is until it is whole.
    pub fn location(&self) -> Location {
        Location::Sqlite(self.partial.path().to_owned())
    }

    /// A connection to a new store in it, to be filled plant by plant. It needs no WAL: after a failure the file is deleted.
    pub(super) fn fill(&self) -> Result<Connection, SaveError> {
        let path = self.partial.path();
        let mut connection = scratch(path)?;
        open::upgrade(&mut connection, path)?;
        Ok(connection)
    }

    /// To be called once all is in it, and before it is read.
    pub fn settle(&self) -> Result<(), SaveError> {
        open::lay_to_rest(self.partial.path())?;
        self.partial.sync()
    }

    /// Gives it its name.
    pub fn finish(self) -> Result<(), SaveError> {
        if !self.replace && Path::new(&self.path).exists() {
            return Err(SaveError::Exists(self.path));
        }
        self.partial.put_in_place()
    }
}

/// Copies all pages as they are at this moment, and tells how many of how many it has. A server adds meanwhile; only
/// its log cannot begin again before the end of this.
pub(super) fn copy_pages(
    source: &mut Connection,
    target: &BackupFile,
    tell: &mut dyn FnMut(u64, u64),
) -> Result<(), SaveError> {
    let partial = &target.partial;
    let mut copy = scratch(partial.path())?;
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
            _ => return Err(SaveError::InTheMaking(target.path.clone())),
        }
        // A little now and then, instead of all at once: the server waits for the same disk.
        let synced = partial.file().sync_data();
        synced.map_err(failed_to("sync", partial.path()))?;
        pace.rest();
    }
    drop(backup);
    drop(moment);
    drop(copy);
    partial.mark_at_rest()
}

/// A connection to an empty file that is synced by us, and thrown away if anything goes wrong.
fn scratch(path: &Path) -> Result<Connection, SaveError> {
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
    let path = target.path.clone();
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

/// Whether a file is the store, or one that is or would be kept beside it.
fn belongs_to(path: &Path, store: &Path) -> bool {
    path == store
        || COMPANIONS
            .iter()
            .any(|suffix| path == beside(store, suffix))
        || is_same(fs::metadata(path), fs::metadata(store))
}
