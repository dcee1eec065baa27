//! Errors of the store, by their consequence for a plant: not stored (and why), or unknown. Each variant has one meaning, which the error
//! code of the response keeps.

use std::error::Error;
use std::iter;
use std::path::PathBuf;

use rusqlite::ffi::SQLITE_IOERR_WRITE;

use crate::fs::FileError;

/// The error of the engine or of the operating system.
pub type Cause = Box<dyn Error + Send + Sync>;

/// An error with its sources, in one line. An error whose text is the end of its source's is left out: SQLite's
/// "database is locked" has the source "Error code 5: database is locked".
pub(crate) fn chain(error: &(dyn Error + 'static)) -> String {
    let mut texts: Vec<String> = Vec::new();
    for error in iter::successors(Some(error), |&error| error.source()) {
        let text = error.to_string();
        texts.pop_if(|last| text.ends_with(&**last));
        texts.push(text);
    }
    texts.join(": ")
}

/// Why an operation failed.
#[derive(Debug, thiserror::Error)]
#[error("{kind}")]
pub struct StoreError {
    pub kind: Failure,
    #[source]
    pub cause: Cause,
}

/// What an error means for a plant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// Nothing was stored: another process has locked the store, the queue is full, or a commit before it is stuck.
    #[error("the store is busy")]
    Busy,
    /// Nothing was stored: there is no connection to the database, and none could be made in time.
    #[error("the store cannot be reached")]
    Unavailable,
    /// Nothing was stored: the database rejects the connection or the statement, or the file system rejects the write, until the operator
    /// changes something.
    #[error("the store cannot be used")]
    Unusable,
    /// Nothing was stored: the disk is full, or the WAL has reached its limit.
    #[error("the disk is full, or the WAL has reached its limit")]
    Full,
    /// Data was read that is not what was stored.
    #[error("the store is damaged; run `plantstore check`")]
    Damaged,
    /// The batch may or may not be stored; sending the same batch again is safe.
    #[error("the store did not confirm a write, which may or may not be stored")]
    Unknown,
    /// The batch may or may not be stored, and this process must not use the store again: after a failed fsync the page cache can differ
    /// from the disk.
    #[error("a fatal error of the store")]
    Fatal,
}

impl Failure {
    pub(crate) fn because(self, cause: impl Into<Cause>) -> StoreError {
        StoreError {
            kind: self,
            cause: cause.into(),
        }
    }
}

/// Nothing is written: the WAL has reached its limit.
#[derive(Debug, thiserror::Error)]
#[error(
    "the WAL has reached its limit of {bytes_max} bytes (--max-wal-bytes); a read transaction of {held_by} keeps it from being reset"
)]
pub(crate) struct WalFull {
    pub bytes_max: u64,
    /// The processes that have a read transaction open, such as `process 4711 (sqlite3)`.
    pub held_by: String,
}

impl From<rusqlite::Error> for StoreError {
    fn from(error: rusqlite::Error) -> Self {
        use rusqlite::ErrorCode::{ConstraintViolation, DatabaseBusy, DatabaseLocked, DiskFull};
        let kind = match error.sqlite_error() {
            None => Failure::Damaged, // a value that plantstore did not write
            Some(sqlite) => match sqlite.code {
                DiskFull => Failure::Full,
                // A constraint is violated if another process has inserted the same row since it was looked up.
                DatabaseBusy | DatabaseLocked | ConstraintViolation => Failure::Busy,
                // A quota, for one. Unlike a failed sync, a failed write is known to have failed: the WAL
                // has no commit without its last frame.
                _ if sqlite.extended_code == SQLITE_IOERR_WRITE => Failure::Unusable,
                _ => Failure::Fatal,
            },
        };
        kind.because(error)
    }
}

/// Why a store cannot be opened, backed up or restored. Each message says what to do; callers tell some of the reasons apart.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("there is no store at {0}; `plantstore serve` creates one")]
    Missing(PathBuf),
    #[error(
        "the store {path} is in use by another plantstore{holder}; stop that one, or choose another --store"
    )]
    Locked {
        path: PathBuf,
        /// Such as ` (process 4711)`; empty if it is unknown.
        holder: String,
    },
    #[error("{0} is not a database of plantstore; choose another --store")]
    NotOurs(PathBuf),
    #[error(
        "the store {path} has schema version {found} and this plantstore knows versions up to {known}; \
         use the newer plantstore that made it"
    )]
    Newer {
        path: String,
        found: i64,
        known: i64,
    },
    #[error("the store {0} is being used by another program; end that program and start again")]
    InUse(PathBuf),
    #[error(
        "{0}-shm was moved, deleted or replaced while a server uses the store; the server exits when it notices that; then try again"
    )]
    SharedMemoryReplaced(PathBuf),
    #[error(
        "{0} is a backup and is not changed; `plantstore restore {0} --store …` creates a store from it"
    )]
    IsBackup(PathBuf),
    #[error("cannot use the store {path}; if it is damaged, restore a backup")]
    Sqlite {
        path: PathBuf,
        source: rusqlite::Error,
    },
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the database {database} cannot be reached; check that it runs, and --store")]
    Unreachable { database: String, source: Cause },
    #[error("the database {database} must not be used: {problem}")]
    Unsafe { database: String, problem: String },
    #[error(
        "the database {database} does not have the tables of plantstore yet; run `plantstore migrate` with a role that may create them"
    )]
    NotMigrated {
        database: String,
        /// The schema version of an earlier plantstore, if there is one.
        found: Option<i64>,
    },
    #[error(
        "cannot create the tables in the database {database}; run `plantstore migrate` with a role that may"
    )]
    Migration {
        database: String,
        source: tokio_postgres::Error,
    },
    #[error("{message}")]
    Other {
        message: String,
        source: Option<Cause>,
    },
}

impl OpenError {
    pub(super) fn other(message: String) -> Self {
        let source = None;
        Self::Other { message, source }
    }

    pub(super) fn caused_by(source: impl Into<Cause>, message: String) -> Self {
        let source = Some(source.into());
        Self::Other { message, source }
    }
}

#[cfg(test)]
mod tests {
    use rusqlite::Error;
    use rusqlite::ffi::{self, SQLITE_BUSY};

    use super::{StoreError, chain};

    #[test]
    fn an_error_is_not_written_twice_when_its_source_has_the_same_text() {
        let busy = ffi::Error::new(SQLITE_BUSY);
        let error = Error::SqliteFailure(busy, Some("database is locked".to_owned()));
        assert_eq!(
            chain(&StoreError::from(error)),
            "the store is busy: Error code 5: database is locked"
        );
    }
}
