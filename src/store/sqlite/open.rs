//! Opening a SQLite file: lock, file and directory entry, pragmas, schema. Every pragma that durability depends on is read back. None
//! of this takes longer on a larger store; only the WAL is read completely.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rusqlite::{Connection, OpenFlags, TransactionBehavior};

use crate::fs::{
    create_empty, database_of_sidecar, open_existing, orphan_of, sync_directory_of, with_suffix,
};
use crate::sqlite_format::{APPLICATION_ID, Content};
use crate::store::error::{OpenError, failed_to};
use crate::store::sqlite::connection::{
    BUSY_TIMEOUT, checkpoint, real, run_checkpoint_on_close, unusable,
};
use crate::store::sqlite::lock::{self, Lock, ServedStore};
use crate::store::sqlite::rows;
use crate::store::sqlite::wal_check::{Damage, check_wal};
use crate::store::types::FileSizes;

/// The schema, one step per version. A released step is never changed.
const MIGRATIONS: [&str; 4] = [
    include_str!("../../../migrations/sqlite/0001_plants_and_tokens.sql"),
    include_str!("../../../migrations/sqlite/0002_newest_first.sql"),
    include_str!("../../../migrations/sqlite/0003_batches.sql"),
    include_str!("../../../migrations/sqlite/0004_store.sql"),
];
const VERSION: u32 = 4;

/// The first version whose plants have a batch number.
const VERSION_WITH_BATCHES: u32 = 3;

/// The first version that says whether it is complete without a WAL.
const VERSION_WITH_STATE: u32 = 4;
const _: () = assert!(MIGRATIONS.len() == VERSION as usize);

/// Opens a store for its one server, with the schema up to date and nothing left in the WAL that is not synced.
pub(super) fn exclusive(path: &Path) -> Result<(Connection, ServedStore), OpenError> {
    create(path)?;
    let mut connection = connect(path)?;
    let lock = Lock::take(&real(path)?)?;
    run_checkpoint_on_close(&connection, false).map_err(unusable(path))?;
    upgrade(&mut connection, path)?;
    // This syncs the lock file before the WAL is truncated, so that a database without a WAL is known to be complete.
    let mut served = ServedStore::new(&connection, lock, path)?;
    sync_names(path)?;
    match checkpoint(&connection, "TRUNCATE") {
        Ok(true) => {}
        Ok(false) => return Err(OpenError::InUse(path.display().to_string())),
        Err(source) => return Err(unusable(path)(source)),
    }
    served.record_batch(rows::last_batch(&connection).map_err(unusable(path))?);
    lock::require_wal(&connection).map_err(unusable(path))?;
    run_checkpoint_on_close(&connection, true).map_err(unusable(path))?;
    Ok((connection, served))
}

/// Opens a store that other processes may have open too. Upgrades the schema only if no server is running.
pub(super) fn shared(path: &Path) -> Result<Connection, OpenError> {
    if !path.exists() {
        return Err(OpenError::Missing(path.display().to_string()));
    }
    let mut connection = connect(path)?;
    if version(&connection, path)? < VERSION {
        // Closed before the lock is released, as `Lock` says.
        drop(connection);
        let lock = Lock::take(&real(path)?)?;
        upgrade(&mut connect_unchecked(path)?, path)?;
        drop(lock);
        connection = connect(path)?;
    }
    sync_names(path)?;
    Ok(connection)
}

/// Opens a store, or a backup, which is not changed and gets no WAL.
pub(super) fn to_read(path: &Path) -> Result<Connection, OpenError> {
    match shared(path) {
        Err(OpenError::IsBackup(_)) => backup(path),
        other => other,
    }
}

/// Opens a backup, and nothing else, to read it.
pub(super) fn backup(path: &Path) -> Result<Connection, OpenError> {
    let name = path.display().to_string();
    if !path.exists() {
        return Err(OpenError::NoFile(name));
    }
    check_wal(&real(path)?, Damage::Accepted)?;
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags).map_err(unusable(path))?;
    match is_in_backup_mode(&connection, path) {
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

/// Makes a store a backup: all data in one file, in rollback-journal mode. No other process may have it open.
pub(super) fn switch_to_rollback_journal(path: &Path) -> Result<(), OpenError> {
    let connection = match connect(path) {
        Err(OpenError::IsBackup(_)) => return Ok(()),
        other => other?,
    };
    if version(&connection, path)? >= VERSION_WITH_STATE {
        lock::set_clean(&connection, true).map_err(unusable(path))?;
    }
    match set_and_read_back(&connection, "journal_mode = DELETE", path)?.as_str() {
        "delete" => Ok(()),
        _ => Err(OpenError::InUse(path.display().to_string())),
    }
}

/// Lets a store be opened from now on although transactions are missing.
pub(in crate::store) fn accept_loss(path: &Path) -> Result<(), OpenError> {
    if !path.exists() {
        return Err(OpenError::Missing(path.display().to_string()));
    }
    let real = real(path)?;
    check_no_orphan(&real)?;
    check_wal(&real, Damage::Accepted)?;
    let lock = Lock::take(&real)?;
    let mut connection = connect_unchecked(path)?;
    upgrade(&mut connection, path)?;
    lock::set_clean(&connection, true).map_err(unusable(path))?;
    lock.forget_batch();
    run_checkpoint_on_close(&connection, true).map_err(unusable(path))?;
    drop(connection);
    Ok(())
}

pub(super) fn file(path: &Path) -> Result<File, OpenError> {
    File::open(path).map_err(failed_to("open", path))
}

/// Creates an empty database file with mode 0600 if there is none, and makes its name survive a power failure. SQLite gives
/// its other files the same mode.
pub(super) fn create(path: &Path) -> Result<(), OpenError> {
    let real = real(path)?;
    if fs::metadata(&real).map_or(0, |found| found.len()) == 0 {
        check_no_orphan(&real)?;
        if let Some(database) = database_of_sidecar(&real) {
            return Err(OpenError::other(format!(
                "{} has the name of a file that belongs to the database {}; choose another --store",
                path.display(),
                database.display()
            )));
        }
        if lock::was_served(&real) {
            let lock = with_suffix(&real, "-lock");
            let (path, lock) = (path.display(), lock.display());
            return Err(OpenError::other(format!(
                "there is no database at {path}, but {lock} says that one was served here; \
                 move it back or restore a backup; to start with an empty store, delete {lock}"
            )));
        }
    }
    match create_empty(path, path) {
        Ok(true) => sync_names(path),
        Ok(false) => Ok(()),
        Err(error) => Err(failed_to("create", path)(error)),
    }
}

/// SQLite would delete the WAL of a database that is missing or empty.
fn check_no_orphan(real: &Path) -> Result<(), OpenError> {
    let Some(orphan) = orphan_of(real) else {
        return Ok(());
    };
    let (database, wal) = (real.display(), orphan.display());
    Err(OpenError::other(format!(
        "{database} is missing or empty, but {wal} holds transactions of it: creating a store here would destroy them; \
         move the database file back next to it, or move {wal} away together with its database"
    )))
}

/// Makes the names of the database and of its WAL survive a power failure. SQLite syncs the directory of a new WAL too, but ignores
/// the result.
fn sync_names(path: &Path) -> Result<(), OpenError> {
    sync_directory_of(&real(path)?).map_err(failed_to("sync the directory of", path))
}

pub(in crate::store) fn file_sizes(path: &Path) -> io::Result<FileSizes> {
    let path = path.canonicalize()?;
    let wal = fs::metadata(with_suffix(&path, "-wal"));
    Ok(FileSizes {
        database: fs::metadata(&path)?.len(),
        wal: wal.map_or(0, |wal| wal.len()),
    })
}

/// True if the header says that this is a backup.
pub(in crate::store) fn is_backup(path: &Path) -> bool {
    let file = real(path)
        .ok()
        .and_then(|path| open_existing(&path, false).ok());
    file.is_some_and(|file| Content::of(&file).is_ok_and(|content| content == Content::Backup))
}

/// Waits where SQLite does not, if two processes create one store at the same time.
fn connect(path: &Path) -> Result<Connection, OpenError> {
    let start = Instant::now();
    loop {
        match try_to_connect(path) {
            Err(OpenError::InUse(_)) if start.elapsed() < BUSY_TIMEOUT => {
                thread::sleep(Duration::from_millis(20));
            }
            done => return done,
        }
    }
}

fn try_to_connect(path: &Path) -> Result<Connection, OpenError> {
    let real = real(path)?;
    check_no_orphan(&real)?;
    check_one_name(&real)?;
    check_wal(&real, Damage::Rejected)?;
    let connection = connect_unchecked(path)?;
    lock::check_complete(&connection, &real)?;
    run_checkpoint_on_close(&connection, true).map_err(unusable(path))?;
    Ok(connection)
}

/// Connects without checking the WAL first, and without a checkpoint at the end.
fn connect_unchecked(path: &Path) -> Result<Connection, OpenError> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags).map_err(unusable(path))?;
    run_checkpoint_on_close(&connection, false).map_err(unusable(path))?;
    connection
        .busy_timeout(BUSY_TIMEOUT)
        .map_err(unusable(path))?;
    // Before anything is changed in a file that is not ours, or in a backup.
    if is_in_backup_mode(&connection, path)? {
        return Err(OpenError::IsBackup(path.display().to_string()));
    }
    if connection.is_readonly("main").map_err(unusable(path))? {
        let error = io::Error::from(io::ErrorKind::PermissionDenied);
        return Err(failed_to("write to", path)(error));
    }
    for (pragma, expected) in [
        ("journal_mode = WAL", "wal"),
        ("synchronous = FULL", "2"),
        // Tokens are never deleted, so a lookup for every plant would be wasted.
        ("foreign_keys = OFF", "0"),
        // `checkpoint.rs` runs checkpoints instead.
        ("wal_autocheckpoint = 0", "0"),
        // If a long reader, such as a backup, has made the WAL grow beyond this, it is truncated when it is reset: every command
        // reads all of it. Without readers it stays shorter.
        ("journal_size_limit = 33554432", "33554432"),
        // On macOS fsync does not flush the drive's own cache.
        ("fullfsync = ON", "1"),
        ("checkpoint_fullfsync = ON", "1"),
    ] {
        let found = set_and_read_back(&connection, pragma, path)?;
        if found != expected {
            return Err(OpenError::other(format!(
                "the store {} rejects `PRAGMA {pragma}` (its value is {found}), so a 200 would not mean on disk; move it to a local disk",
                path.display()
            )));
        }
    }
    Ok(connection)
}

/// SQLite names the WAL after the database: opened under two names, a database has two, and each destroys what the other
/// protects. A name with a lock file is the one that the store is served under. (Then this process may have the database
/// open, and must not open it here.)
fn check_one_name(real: &Path) -> Result<(), OpenError> {
    let names = fs::metadata(real).map_or(1, |found| found.nlink());
    if names == 1 || with_suffix(real, "-lock").exists() {
        return Ok(());
    }
    let content = open_existing(real, false).and_then(|file| Content::of(&file));
    match content {
        Ok(Content::Store) => Err(OpenError::other(format!(
            "{} has more than one name (hard link), and SQLite would keep a WAL for each; \
             use the name under which it was served, or remove the others",
            real.display()
        ))),
        _ => Ok(()),
    }
}

fn set_and_read_back(
    connection: &Connection,
    pragma: &str,
    path: &Path,
) -> Result<String, OpenError> {
    connection
        .execute_batch(&format!("PRAGMA {pragma}"))
        .map_err(unusable(path))?;
    let name = pragma
        .split(' ')
        .next()
        .expect("split always yields one part");
    connection
        .query_row(&format!("PRAGMA {name}"), [], |row| {
            row.get_ref(0).map(|value| match value {
                rusqlite::types::ValueRef::Integer(number) => number.to_string(),
                other => other.as_str().unwrap_or_default().to_owned(),
            })
        })
        .map_err(unusable(path))
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

/// True for a backup. A store is in WAL mode as soon as it exists; a backup is not, so that it is read without any other file.
fn is_in_backup_mode(connection: &Connection, path: &Path) -> Result<bool, OpenError> {
    let version = version(connection, path)?;
    let mode: String = connection
        .query_row("PRAGMA journal_mode", [], |row| row.get(0))
        .map_err(unusable(path))?;
    Ok(version > 0 && mode != "wal")
}

/// None if there is no store, or an empty file.
pub(in crate::store) fn schema_version(path: &Path) -> Result<Option<i64>, OpenError> {
    if !path.exists() {
        return Ok(None);
    }
    let found = version(&connect(path)?, path)?;
    Ok((found > 0).then_some(found.into()))
}

/// The version of the schema, 0 for an empty file.
fn version(connection: &Connection, path: &Path) -> Result<u32, OpenError> {
    // One statement, so that it sees all of a schema that another process creates, or nothing.
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
