//! Getting to a usable connection: the lock, the file and its directory entry, the pragmas, the
//! schema. Every pragma that durability rests on is read back, and none of this takes longer on a
//! larger store; only the log is read whole.

use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rusqlite::ffi::SQLITE_IOERR_SHMSIZE;
use rusqlite::{Connection, ErrorCode, OpenFlags, TransactionBehavior};

use crate::store::contract::Footprint;
use crate::store::error::OpenError;
use crate::store::sqlite::{files, log};

/// How long to wait for another process, such as `plantstore token create`, to end its
/// transaction.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// "Plnt": marks the file as ours (`file plantstore.db` shows it).
pub(super) const APPLICATION_ID: u32 = 0x506c_6e74;

/// The schema, a step a version. A step that has been released is never changed.
const MIGRATIONS: [&str; 3] = [
    include_str!("../../../migrations/sqlite/0001_plants_and_tokens.sql"),
    include_str!("../../../migrations/sqlite/0002_newest_first.sql"),
    include_str!("../../../migrations/sqlite/0003_batches.sql"),
];
const VERSION: u32 = 3;

/// The first version whose plants have a batch number.
const VERSION_WITH_BATCHES: u32 = 3;
const _: () = assert!(MIGRATIONS.len() == VERSION as usize);

/// Says that this process is the one that may serve or upgrade the store; ends with the process,
/// however that ends.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

/// A connection for the one server: up to date, and with nothing left in the log that is not
/// synced.
pub(super) fn exclusive(path: &Path) -> Result<(Connection, Lock), OpenError> {
    create(path)?;
    let mut connection = connect(path)?;
    let lock = take_lock(path)?;
    upgrade(&mut connection, path)?;
    sync_names(path)?;
    match checkpoint(&connection, "TRUNCATE") {
        Ok(true) => Ok((connection, lock)),
        Ok(false) => Err(OpenError::Held(path.display().to_string())),
        Err(source) => Err(unusable(path)(source)),
    }
}

/// A connection beside others. It upgrades the schema only while no server is running.
pub(super) fn shared(path: &Path) -> Result<Connection, OpenError> {
    if !path.exists() {
        return Err(OpenError::Missing(path.display().to_string()));
    }
    let mut connection = connect(path)?;
    if version(&connection, path)? < VERSION {
        let _lock = take_lock(path)?;
        upgrade(&mut connection, path)?;
    }
    sync_names(path)?;
    Ok(connection)
}

/// A connection for looking. A backup is not changed by that, and nothing is made beside it.
pub(super) fn to_read(path: &Path) -> Result<Connection, OpenError> {
    match shared(path) {
        Err(OpenError::AtRest(_)) => at_rest(path),
        other => other,
    }
}

/// A connection for looking at a backup, and at nothing else.
pub(super) fn at_rest(path: &Path) -> Result<Connection, OpenError> {
    let name = path.display().to_string();
    if !path.exists() {
        return Err(OpenError::NoFile(name));
    }
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags).map_err(unusable(path))?;
    match is_at_rest(&connection, path) {
        Ok(true) => {
            if version(&connection, path)? < VERSION_WITH_BATCHES {
                // A backup is never changed, so the missing column is added by a view that hides the table.
                let view = "PRAGMA temp_store = MEMORY;
                            CREATE TEMP VIEW plants AS SELECT *, 0 AS batch FROM main.plants";
                connection.execute_batch(view).map_err(unusable(path))?;
            }
            Ok(connection)
        }
        Ok(false) | Err(OpenError::NotOurs(_)) => Err(OpenError::NotABackup(name)),
        Err(error) => Err(error),
    }
}

/// Has all of a store in its one file, at rest, as a backup is. For this nobody else may have it open.
pub(super) fn lay_to_rest(path: &Path) -> Result<(), OpenError> {
    let connection = match connect(path) {
        Err(OpenError::AtRest(_)) => return Ok(()),
        other => other?,
    };
    match set_and_read_back(&connection, "journal_mode = DELETE", "delete", path) {
        Err(OpenError::Pragma { path, .. }) => Err(OpenError::Held(path)),
        other => other,
    }
}

/// The file of the database itself, to be synced.
pub(super) fn file(path: &Path) -> Result<File, OpenError> {
    File::open(path).map_err(failed_to("open", path))
}

/// Makes an empty file that only its owner can read, if there is none, and sees to it that a power
/// cut leaves it there. SQLite gives its other files the same mode.
pub(super) fn create(path: &Path) -> Result<(), OpenError> {
    match files::make(path, path) {
        Ok(true) => sync_names(path),
        Ok(false) => Ok(()),
        Err(error) => Err(failed_to("create", path)(error)),
    }
}

/// Empties the log into the database and syncs both. False when a reader was in the way.
pub(super) fn checkpoint(connection: &Connection, mode: &str) -> Result<bool, rusqlite::Error> {
    connection.query_row(&format!("PRAGMA wal_checkpoint({mode})"), [], |row| {
        let busy: bool = row.get(0)?;
        Ok(!busy)
    })
}

/// Makes the names of the database and of its log survive a power cut. SQLite syncs the directory of a new
/// log too, but does not look at the result.
fn sync_names(path: &Path) -> Result<(), OpenError> {
    sync_directory_of(&real(path)?).map_err(failed_to("sync the directory of", path))
}

/// The file itself, whatever way leads to it: SQLite keeps its log beside that. It need not be there yet.
pub(super) fn real(path: &Path) -> Result<PathBuf, OpenError> {
    let found = path.canonicalize().or_else(|error| match path.file_name() {
        Some(name) if error.kind() == io::ErrorKind::NotFound => {
            Ok(files::directory_of(path).canonicalize()?.join(name))
        }
        _ => Err(error),
    });
    found.map_err(failed_to("find", path))
}

/// Makes the entry of this file in its directory survive a power cut.
pub fn sync_directory_of(path: &Path) -> io::Result<()> {
    File::open(files::directory_of(path))?.sync_all()
}

/// The sizes of the database and of its log.
pub fn footprint(path: &Path) -> io::Result<Footprint> {
    let path = path.canonicalize()?;
    let log = fs::metadata(beside(&path, "-wal"));
    Ok(Footprint {
        database: fs::metadata(&path)?.len(),
        log: log.map_or(0, |log| log.len()),
    })
}

/// The file that SQLite, or we, keep beside the database.
pub(super) fn beside(database: &Path, suffix: &str) -> PathBuf {
    let mut path = database.as_os_str().to_owned();
    path.push(suffix);
    path.into()
}

/// Makes sure that nobody serves or upgrades the store, and nobody will.
pub(super) fn take_lock(path: &Path) -> Result<Lock, OpenError> {
    let path = &real(path)?;
    let lock_path = beside(path, "-lock");
    let mut file = files::make(&lock_path, path)
        .and_then(|_| files::open(&lock_path))
        .map_err(failed_to("open", &lock_path))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut pid = String::new();
            let known = file.read_to_string(&mut pid).is_ok() && !pid.trim().is_empty();
            return Err(OpenError::Locked {
                path: path.display().to_string(),
                pid: known.then(|| pid.trim().to_owned()),
            });
        }
        Err(TryLockError::Error(error)) => return Err(failed_to("lock", &lock_path)(error)),
    }
    // Only for the sentence that another process will print; the lock holds without it.
    let _ = file
        .set_len(0)
        .and_then(|()| writeln!(file, "{}", std::process::id()));
    Ok(Lock { _file: file })
}

/// Two processes that make one store at the same time are in each other's way for a moment in which
/// SQLite does not wait.
fn connect(path: &Path) -> Result<Connection, OpenError> {
    let begun = Instant::now();
    loop {
        match try_to_connect(path) {
            Err(OpenError::Held(_)) if begun.elapsed() < BUSY_TIMEOUT => {
                thread::sleep(Duration::from_millis(20));
            }
            done => return done,
        }
    }
}

fn try_to_connect(path: &Path) -> Result<Connection, OpenError> {
    let log = beside(&real(path)?, "-wal");
    if log::is_damaged(&log).map_err(failed_to("read", &log))? {
        return Err(OpenError::LogDamaged(log.display().to_string()));
    }
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags).map_err(unusable(path))?;
    connection
        .busy_timeout(BUSY_TIMEOUT)
        .map_err(unusable(path))?;
    // Before anything is changed in a file that is not ours, or at rest.
    if is_at_rest(&connection, path)? {
        return Err(OpenError::AtRest(path.display().to_string()));
    }
    if connection.is_readonly("main").map_err(unusable(path))? {
        let error = io::Error::from(io::ErrorKind::PermissionDenied);
        return Err(failed_to("write to", path)(error));
    }
    for (pragma, expected) in [
        ("journal_mode = WAL", "wal"),
        ("synchronous = FULL", "2"),
        // Tokens are never deleted, so there is nothing to look up for every plant.
        ("foreign_keys = OFF", "0"),
        // `checkpoints.rs` says why.
        ("wal_autocheckpoint = 0", "0"),
        // What a long reader, such as a backup, made the log grow beyond this is cut off when it begins again: every
        // command reads all of it. Without readers it stays shorter.
        ("journal_size_limit = 33554432", "33554432"),
        // The drive's own cache, on the one system where fsync leaves it out.
        ("fullfsync = ON", "1"),
        ("checkpoint_fullfsync = ON", "1"),
    ] {
        set_and_read_back(&connection, pragma, expected, path)?;
    }
    Ok(connection)
}

fn set_and_read_back(
    connection: &Connection,
    pragma: &'static str,
    expected: &str,
    path: &Path,
) -> Result<(), OpenError> {
    connection
        .execute_batch(&format!("PRAGMA {pragma}"))
        .map_err(unusable(path))?;
    let name = pragma
        .split(' ')
        .next()
        .expect("split always yields one part");
    let found = connection
        .query_row(&format!("PRAGMA {name}"), [], |row| {
            row.get_ref(0).map(|value| match value {
                rusqlite::types::ValueRef::Integer(number) => number.to_string(),
                other => other.as_str().unwrap_or_default().to_owned(),
            })
        })
        .map_err(unusable(path))?;
    if found == expected {
        Ok(())
    } else {
        Err(OpenError::Pragma {
            path: path.display().to_string(),
            pragma,
            found,
        })
    }
}

pub(super) fn upgrade(connection: &mut Connection, path: &Path) -> Result<(), OpenError> {
    let mut from = version(connection, path)?;
    while from < VERSION {
        let step = MIGRATIONS[from as usize];
        from += 1;
        connection
            .transaction_with_behavior(TransactionBehavior::Immediate)
            .and_then(|transaction| {
                transaction.execute_batch(step)?;
                transaction.pragma_update(None, "application_id", APPLICATION_ID)?;
                transaction.pragma_update(None, "user_version", from)?;
                transaction.commit()
            })
            .map_err(unusable(path))?;
    }
    Ok(())
}

/// Whether it is a backup. Every store is in WAL mode from its first moment; a backup is not, so that nothing beside
/// it is needed to read it.
fn is_at_rest(connection: &Connection, path: &Path) -> Result<bool, OpenError> {
    let version = version(connection, path)?;
    let mode: String = connection
        .query_row("PRAGMA journal_mode", [], |row| row.get(0))
        .map_err(unusable(path))?;
    Ok(version > 0 && mode != "wal")
}

/// The version of the schema, 0 for an empty file.
fn version(connection: &Connection, path: &Path) -> Result<u32, OpenError> {
    // One statement, so that it sees another process make all of the schema, or nothing.
    let sql = "SELECT application_id, user_version, (SELECT count(*) FROM sqlite_schema)
               FROM pragma_application_id, pragma_user_version";
    let (application_id, found, tables): (i64, i64, i64) = connection
        .query_row(sql, [], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))
        .map_err(unusable(path))?;
    let empty = (application_id, found, tables) == (0, 0, 0);
    if application_id != i64::from(APPLICATION_ID) && !empty {
        return Err(OpenError::NotOurs(path.display().to_string()));
    }
    match u32::try_from(found) {
        Ok(found) if found <= VERSION => Ok(found),
        _ => Err(OpenError::Newer {
            path: path.display().to_string(),
            found,
            known: VERSION.into(),
        }),
    }
}

fn failed_to(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> OpenError {
    let path = path.display().to_string();
    move |source| OpenError::Io {
        action,
        path,
        source,
    }
}

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
            OpenError::NotWritable { path, source }
        }
        Some(ErrorCode::DatabaseBusy) => OpenError::Held(path),
        Some(ErrorCode::DiskFull) => OpenError::Full(path),
        _ => OpenError::Sqlite { path, source },
    }
}
