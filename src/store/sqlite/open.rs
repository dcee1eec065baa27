//! Opening a SQLite file: lock, file and directory entry, pragmas, schema. Every pragma that durability depends on is read back. None
//! of this takes longer on a larger store; only the WAL is read completely.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rusqlite::types::ValueRef;
use rusqlite::{Connection, OpenFlags, TransactionBehavior};

use crate::fs::{
    create_empty, database_of_sidecar, failed_to, if_exists, is_empty, open_existing, orphan_of,
    resolve_links, sync_directory_of, with_suffix,
};
use crate::sqlite_format::{APPLICATION_ID, Content};
use crate::store::error::OpenError;
use crate::store::sqlite::batches;
use crate::store::sqlite::connection::{
    BUSY_TIMEOUT, checkpoint, run_checkpoint_on_close, unusable,
};
use crate::store::sqlite::lock::{self, LastBatch, Lock};
use crate::store::sqlite::wal_check::{Damage, check_wal};
use crate::store::types::{FileSizes, Schema};

/// The schema, one step per version. A released step is never changed.
const MIGRATIONS: [&str; 7] = [
    include_str!("../../../migrations/sqlite/0001_plants_and_tokens.sql"),
    include_str!("../../../migrations/sqlite/0002_newest_first.sql"),
    include_str!("../../../migrations/sqlite/0003_batches.sql"),
    include_str!("../../../migrations/sqlite/0004_store.sql"),
    include_str!("../../../migrations/sqlite/0005_batches_table.sql"),
    include_str!("../../../migrations/sqlite/0006_token_events.sql"),
    include_str!("../../../migrations/sqlite/0007_rotation.sql"),
];
const VERSION: u32 = 7;

/// The first version whose plants have a batch number.
const VERSION_WITH_BATCHES: u32 = 3;

/// The first version that says whether it is complete without a WAL.
const VERSION_WITH_STATE: u32 = 4;

/// The first version with a table of batches.
const VERSION_WITH_BATCH_TABLE: u32 = 5;
const _: () = assert!(MIGRATIONS.len() == VERSION as usize);

/// Opens a store for its one server, with the schema up to date and nothing left in the WAL that is not synced.
pub(super) fn exclusive(path: &Path) -> Result<(Connection, Lock), OpenError> {
    let store = &create(path)?;
    let mut connection = connect(store)?;
    let mut lock = Lock::take(store)?;
    run_checkpoint_on_close(&connection, false).map_err(unusable(store))?;
    upgrade(&mut connection, store)?;
    // This syncs the lock file before the WAL is truncated, so that a database without a WAL is known to be complete.
    lock.record_store(&connection, store)?;
    sync_names(store)?;
    if !checkpoint(&connection, "TRUNCATE").map_err(unusable(store))? {
        return Err(OpenError::InUse(store.clone()));
    }
    lock.record_batch(batches::last(&connection).map_err(unusable(store))?);
    // From now on the database is incomplete without its WAL. The database file alone should say so; if a reader prevents that, a
    // later checkpoint does it.
    lock::set_clean(&connection, false)
        .and_then(|()| checkpoint(&connection, "PASSIVE"))
        .and_then(|_| run_checkpoint_on_close(&connection, true))
        .map_err(unusable(store))?;
    Ok((connection, lock))
}

/// Opens a store that other processes may have open too. Upgrades the schema only if no server is running.
pub(super) fn shared(path: &Path) -> Result<Connection, OpenError> {
    connect_shared(&existing(path)?)
}

/// The same, but creates the store if necessary.
pub(super) fn create_shared(path: &Path) -> Result<Connection, OpenError> {
    connect_shared(&create(path)?)
}

fn connect_shared(store: &Path) -> Result<Connection, OpenError> {
    let mut connection = connect(store)?;
    if version(&connection, store)? < VERSION {
        // Closed before the lock is released, as `Lock` says.
        drop(connection);
        let lock = Lock::take(store)?;
        upgrade(&mut connect_unchecked(store)?, store)?;
        drop(lock);
        connection = connect(store)?;
    }
    sync_names(store)?;
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
    let problem = if path.exists() { not_a_backup } else { no_file };
    let store = &existing(path).map_err(|_| problem(path))?;
    check_wal(store, Damage::Accepted)?;
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(store, flags).map_err(unusable(store))?;
    match is_in_backup_mode(&connection, store) {
        Ok(true) => {}
        Ok(false) | Err(OpenError::NotOurs(_)) => return Err(not_a_backup(path)),
        Err(error) => return Err(error),
    }
    // A backup is never changed. What an old one lacks is added by views: a column, by a view that hides the table, and a table.
    let version = version(&connection, store)?;
    let mut views = "PRAGMA temp_store = MEMORY;".to_owned();
    if version < VERSION_WITH_BATCHES {
        views += "CREATE TEMP VIEW plants AS SELECT *, 0 AS batch FROM main.plants;";
    }
    if version < VERSION_WITH_BATCH_TABLE {
        views += "CREATE TEMP VIEW batches AS
                  SELECT batch AS number, max(added_at) AS added_at, unhex(group_concat(printf('%016x', id), '')) AS ids
                  FROM plants WHERE batch <> 0 GROUP BY batch;";
    }
    connection.execute_batch(&views).map_err(unusable(store))?;
    Ok(connection)
}

pub(super) fn no_file(path: &Path) -> OpenError {
    OpenError::other(format!("there is no file {}", path.display()))
}

pub(super) fn not_a_backup(path: &Path) -> OpenError {
    let path = path.display();
    OpenError::other(format!(
        "{path} is not a backup; `plantstore backup` creates one of a store"
    ))
}

/// Makes a store a backup: all data in one file, in rollback-journal mode. No other process may have it open.
pub(super) fn switch_to_rollback_journal(store: &Path) -> Result<(), OpenError> {
    let connection = match connect(store) {
        Err(OpenError::IsBackup(_)) => return Ok(()),
        other => other?,
    };
    if version(&connection, store)? >= VERSION_WITH_STATE {
        lock::set_clean(&connection, true).map_err(unusable(store))?;
    }
    let mode = set_and_read_back(&connection, "journal_mode = DELETE").map_err(unusable(store))?;
    if mode == "delete" {
        Ok(())
    } else {
        Err(OpenError::InUse(store.to_owned()))
    }
}

/// Lets a store be opened from now on although transactions are missing.
pub(in crate::store) fn accept_loss(path: &Path) -> Result<(), OpenError> {
    let store = &existing(path)?;
    check_no_orphan(store)?;
    check_wal(store, Damage::Accepted)?;
    let mut lock = Lock::take(store)?;
    let mut connection = connect_unchecked(store)?;
    upgrade(&mut connection, store)?;
    lock::set_clean(&connection, true).map_err(unusable(store))?;
    lock.forget_batch(store)?;
    run_checkpoint_on_close(&connection, true).map_err(unusable(store))
}

/// The path of the file itself: SQLite keeps its WAL next to that. An empty file is no store: SQLite would make a new database of it.
fn existing(path: &Path) -> Result<PathBuf, OpenError> {
    let store = if_exists(resolve_links(path)).map_err(failed_to("find", path))?;
    let missing = || OpenError::Missing(path.to_owned());
    let store = store.ok_or_else(missing)?;
    if is_empty(&store) {
        check_no_orphan(&store)?;
        check_not_served(&store)?;
        return Err(missing());
    }
    Ok(store)
}

/// Checks that the lock file of a database that is missing or empty does not say that it was served.
fn check_not_served(store: &Path) -> Result<(), OpenError> {
    if LastBatch::read(store).is_none() {
        return Ok(());
    }
    let name = store.display();
    let state = if store.exists() {
        "is empty"
    } else {
        "is missing"
    };
    Err(OpenError::other(format!(
        "the database {name} {state}, but {name}-lock says that it was served here; move it back or restore a backup; to start \
         with an empty store, delete {name}-lock"
    )))
}

/// Creates an empty database file with mode 0600 if there is none. SQLite gives its other files the same mode. Returns the path of
/// the file itself.
pub(super) fn create(path: &Path) -> Result<PathBuf, OpenError> {
    let store = resolve_links(path).map_err(failed_to("find", path))?;
    let name = store.display();
    if is_empty(&store) {
        check_no_orphan(&store)?;
        if let Some(database) = database_of_sidecar(&store) {
            return Err(OpenError::other(format!(
                "{name} has the name of a file that belongs to the database {}; choose another --store",
                database.display()
            )));
        }
        check_not_served(&store)?;
    }
    create_empty(&store, &store).map_err(failed_to("create", path))?;
    Ok(store)
}

/// SQLite would delete the WAL of a database that is missing or empty.
fn check_no_orphan(store: &Path) -> Result<(), OpenError> {
    let Some(orphan) = orphan_of(store) else {
        return Ok(());
    };
    let (database, wal) = (store.display(), orphan.display());
    Err(OpenError::other(format!(
        "{database} is missing or empty, but {wal} holds transactions of it: creating a store here would destroy them; \
         move the database file back next to it, or move {wal} away together with its database"
    )))
}

/// Makes the names of the database and of its WAL survive a power failure. SQLite syncs the directory of a new WAL too, but ignores
/// the result.
fn sync_names(store: &Path) -> Result<(), OpenError> {
    Ok(sync_directory_of(store).map_err(failed_to("sync the directory of", store))?)
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
    let content = path.canonicalize().and_then(|path| content_of(&path));
    content.is_ok_and(|content| content == Content::Backup)
}

fn content_of(path: &Path) -> io::Result<Content> {
    Content::of(&open_existing(path, false)?)
}

/// Waits where SQLite does not: if two processes create one store at the same time, and until a server has noticed that its files were
/// replaced.
fn connect(store: &Path) -> Result<Connection, OpenError> {
    let start = Instant::now();
    loop {
        match try_to_connect(store) {
            Err(OpenError::InUse(_) | OpenError::SharedMemoryReplaced(_))
                if start.elapsed() < BUSY_TIMEOUT =>
            {
                thread::sleep(Duration::from_millis(20));
            }
            done => return done,
        }
    }
}

fn try_to_connect(store: &Path) -> Result<Connection, OpenError> {
    check_no_orphan(store)?;
    check_one_name(store)?;
    check_wal(store, Damage::Rejected)?;
    lock::check_shared_memory(store)?;
    let connection = connect_unchecked(store)?;
    lock::check_complete(&connection, store)?;
    run_checkpoint_on_close(&connection, true).map_err(unusable(store))?;
    Ok(connection)
}

/// Connects without checking the WAL first, and without a checkpoint at the end.
fn connect_unchecked(store: &Path) -> Result<Connection, OpenError> {
    // SQLite would make a new database of a file with one byte.
    if fs::metadata(store).is_ok_and(|found| found.len() == 1) {
        return Err(OpenError::NotOurs(store.to_owned()));
    }
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(store, flags).map_err(unusable(store))?;
    run_checkpoint_on_close(&connection, false)
        .and_then(|()| connection.busy_timeout(BUSY_TIMEOUT))
        .map_err(unusable(store))?;
    // Before anything is changed in a file that is not ours, or in a backup.
    if is_in_backup_mode(&connection, store)? {
        return Err(OpenError::IsBackup(store.to_owned()));
    }
    if connection.is_readonly("main").map_err(unusable(store))? {
        let error = io::Error::from(io::ErrorKind::PermissionDenied);
        return Err(failed_to("write to", store)(error).into());
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
        // 16 MB: random ids in ten million plants need the inner pages of the tree, of about 2 MB, and more of the others.
        ("cache_size = -16000", "-16000"),
        // On macOS fsync does not flush the drive's own cache.
        ("fullfsync = ON", "1"),
        ("checkpoint_fullfsync = ON", "1"),
    ] {
        let found = set_and_read_back(&connection, pragma).map_err(unusable(store))?;
        if found != expected {
            return Err(OpenError::other(format!(
                "the store {} rejects `PRAGMA {pragma}` (its value is {found}), so a 200 would not mean on disk; move it to a \
                 local disk",
                store.display()
            )));
        }
    }
    Ok(connection)
}

/// Sets a pragma such as `journal_mode = WAL`, and returns the value that it has then.
fn set_and_read_back(connection: &Connection, pragma: &str) -> Result<String, rusqlite::Error> {
    connection.execute_batch(&format!("PRAGMA {pragma}"))?;
    let (name, _) = pragma.split_once(' ').unwrap_or((pragma, ""));
    connection.pragma_query_value(None, name, |row| {
        Ok(match row.get_ref(0)? {
            ValueRef::Integer(number) => number.to_string(),
            other => other.as_str().unwrap_or_default().to_owned(),
        })
    })
}

/// SQLite names the WAL after the database: opened under two names, a database has two, and each destroys what the other
/// protects. A name with a lock file is the one that the store is served under. (Then this process may have the database
/// open, and must not open it here.)
fn check_one_name(store: &Path) -> Result<(), OpenError> {
    let names = fs::metadata(store).map_or(1, |found| found.nlink());
    if names == 1 || with_suffix(store, "-lock").exists() {
        return Ok(());
    }
    match content_of(store) {
        Ok(Content::Store) => {
            let problem = format!(
                "{} has more than one name (hard link), and SQLite would keep a WAL for each; \
                 use the name under which it was served, or remove the others",
                store.display()
            );
            Err(OpenError::other(problem))
        }
        _ => Ok(()),
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

/// True for a backup. A store is in WAL mode as soon as it exists; a backup is not, so that it is read without any other file.
fn is_in_backup_mode(connection: &Connection, store: &Path) -> Result<bool, OpenError> {
    let version = version(connection, store)?;
    let mode = connection.pragma_query_value(None, "journal_mode", |row| row.get::<_, String>(0));
    Ok(version > 0 && mode.map_err(unusable(store))? != "wal")
}

/// None if there is no store, or an empty file.
pub(in crate::store) fn schema(path: &Path) -> Result<Option<Schema>, OpenError> {
    if !path.exists() {
        return Ok(None);
    }
    let store = &existing(path)?;
    let found = version(&connect(store)?, store)?;
    Ok((found > 0).then_some(Schema {
        version: found.into(),
        is_current: found == VERSION,
    }))
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
        return Err(OpenError::NotOurs(path.to_owned()));
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
