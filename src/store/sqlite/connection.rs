//! What the modules of this engine do with any connection: checkpoints, and errors with their meaning.

use std::path::Path;
use std::time::Duration;

use rusqlite::config::DbConfig;
use rusqlite::ffi::SQLITE_IOERR_SHMSIZE;
use rusqlite::{Connection, ErrorCode};

use crate::store::error::OpenError;

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

/// Turns an error of SQLite into what is wrong with the store; an argument of `map_err`.
pub(super) fn unusable(store: &Path) -> impl FnOnce(rusqlite::Error) -> OpenError {
    let path = store.to_owned();
    move |source| {
        let error = source.sqlite_error();
        let is_shm_full = error.is_some_and(|error| error.extended_code == SQLITE_IOERR_SHMSIZE);
        match source.sqlite_error_code() {
            code if is_shm_full || code == Some(ErrorCode::DiskFull) => {
                let (path, advice) = (path.display(), "free some space and start again");
                OpenError::other(format!("the disk of the store {path} is full; {advice}"))
            }
            Some(ErrorCode::NotADatabase) => OpenError::NotOurs(path),
            Some(ErrorCode::CannotOpen | ErrorCode::ReadOnly | ErrorCode::PermissionDenied) => {
                let path = path.display();
                let advice =
                    "check that it is a file and that this user may write to it and its directory";
                OpenError::caused_by(source, format!("cannot open {path} for writing; {advice}"))
            }
            Some(ErrorCode::DatabaseBusy) => OpenError::InUse(path),
            _ => OpenError::Sqlite { path, source },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_insert_of_several_rows_needs_no_temporary_file() {
        let connection = Connection::open_in_memory().expect("memory");
        let sql = "SELECT EXISTS (SELECT 1 FROM pragma_compile_options WHERE compile_options = 'STMTJRNL_SPILL=-1')";
        let is_set = connection.query_row(sql, [], |row| row.get::<_, bool>(0));
        assert_eq!(
            is_set,
            Ok(true),
            "SQLite is built without .cargo/config.toml"
        );
    }
}
