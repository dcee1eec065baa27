//! What the modules of this engine do with any connection or path: checkpoints, the real path of a file, and errors with their meaning.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::config::DbConfig;
use rusqlite::ffi::SQLITE_IOERR_SHMSIZE;
use rusqlite::{Connection, ErrorCode};

use crate::fs::resolve_links;
use crate::store::error::{OpenError, failed_to};

/// How long to wait for another process, such as `plantstore token create`, to end its transaction.
pub(super) const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// Runs a checkpoint. False if a reader prevented it from completing.
pub(super) fn checkpoint(connection: &Connection, mode: &str) -> Result<bool, rusqlite::Error> {
    connection.query_row(&format!("PRAGMA wal_checkpoint({mode})"), [], |row| {
        let busy: bool = row.get(0)?;
        Ok(!busy)
    })
}

/// SQLite runs a checkpoint and deletes the WAL when the last connection is closed. That must not happen while it is unknown whether
/// database and WAL are undamaged and belong together, nor after a failed fsync.
pub(super) fn run_checkpoint_on_close(
    connection: &Connection,
    run: bool,
) -> Result<(), rusqlite::Error> {
    let setting = DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE;
    connection.set_db_config(setting, !run).map(drop)
}

/// The path of the file itself, which need not exist yet: SQLite keeps its WAL next to that.
pub(super) fn real(path: &Path) -> Result<PathBuf, OpenError> {
    resolve_links(path).map_err(failed_to("find", path))
}

/// True if there is no file, or an empty one.
pub(super) fn is_empty(path: &Path) -> bool {
    fs::metadata(path).map_or(0, |found| found.len()) == 0
}

/// Turns an error of SQLite into what is wrong with the store; an argument of `map_err`.
pub(super) fn unusable(path: &Path) -> impl FnOnce(rusqlite::Error) -> OpenError {
    let path = path.display().to_string();
    let shared_memory = |error: &rusqlite::Error| {
        let code = error.sqlite_error().map(|error| error.extended_code);
        code == Some(SQLITE_IOERR_SHMSIZE)
    };
    move |source| match source.sqlite_error_code() {
        _ if shared_memory(&source) => OpenError::Full(path),
        Some(ErrorCode::NotADatabase) => OpenError::NotOurs(path),
        Some(ErrorCode::CannotOpen | ErrorCode::ReadOnly | ErrorCode::PermissionDenied) => {
            let advice =
                "check that it is a file and that this user may write to it and its directory";
            OpenError::caused_by(source, format!("cannot open {path} for writing; {advice}"))
        }
        Some(ErrorCode::DatabaseBusy) => OpenError::InUse(path),
        Some(ErrorCode::DiskFull) => OpenError::Full(path),
        _ => OpenError::Sqlite { path, source },
    }
}
