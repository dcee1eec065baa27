//! One process at a time may serve a store: its lock, and the checks at the next start that all it wrote is still there.
//!
//! After each commit of new plants the batch number is written to the lock file. A database (with its WAL) whose last batch is lower
//! lacks transactions: its WAL was deleted, or an older copy was put in its place. A database that was copied away from a killed server
//! has no lock file; its table `store` says that it was not closed, and it needs its WAL.

use std::fmt::Write as _;
use std::fs::{self, File, TryLockError};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rusqlite::{Connection, Error};

use crate::fs::{create_empty, is_same_file, open_existing, with_suffix};
use crate::store::error::{OpenError, failed_to};
use crate::store::sqlite::connection::{checkpoint, is_empty, real, unusable};
use crate::store::sqlite::rows;

/// How long a command may take to check the WAL of a store that is not served.
const CHECK_TIMEOUT: Duration = Duration::from_secs(5);

/// The row of the table `store`.
#[derive(Debug, Clone, Copy)]
pub(super) struct State {
    pub(super) identity: [u8; 16],
    is_clean: bool,
    pub(super) wal_cycle: i64,
}

impl State {
    /// None if the schema is too old to have the table.
    pub(super) fn read(connection: &Connection) -> Result<Option<Self>, Error> {
        let exists = "SELECT EXISTS (SELECT 1 FROM sqlite_schema WHERE name = 'store')";
        if !connection.query_row(exists, [], |row| row.get(0))? {
            return Ok(None);
        }
        let select = "SELECT identity, clean, wal_cycle FROM store";
        let read = connection.query_row(select, [], |row| {
            Ok(Self {
                identity: row.get(0)?,
                is_clean: row.get(1)?,
                wal_cycle: row.get(2)?,
            })
        })?;
        Ok(Some(read))
    }
}

/// Records in the database whether it is complete without its WAL.
pub(super) fn set_clean(connection: &Connection, is_clean: bool) -> Result<(), Error> {
    let sql = "UPDATE store SET clean = ?1";
    connection.execute(sql, [is_clean]).map(drop)
}

/// Records in the database that it is incomplete without its WAL from now on.
pub(super) fn require_wal(connection: &Connection) -> Result<(), Error> {
    set_clean(connection, false)?;
    // So that the database file alone says so. If a reader prevents that, a later checkpoint does it.
    checkpoint(connection, "PASSIVE").map(drop)
}

/// The last batch of a store according to its lock file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LastBatch {
    pub(super) identity: [u8; 16],
    batch: i64,
}

impl LastBatch {
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_ascii_whitespace();
        let (Some("store"), Some(identity)) = (words.next(), words.next()) else {
            return None;
        };
        let (Some("batch"), Some(batch)) = (words.next(), words.next()) else {
            return None;
        };
        let identity = u128::from_str_radix(identity, 16).ok()?;
        Some(Self {
            identity: identity.to_be_bytes(),
            batch: batch.parse().ok()?,
        })
    }

    /// Reads the lock file of the store at this path.
    pub(super) fn read(store: &Path) -> Option<Self> {
        let text = read_text(&open_existing(&with_suffix(store, "-lock"), false).ok()?);
        Self::parse(text.lines().nth(1)?)
    }
}

fn read_text(file: &File) -> String {
    let mut text = String::new();
    let _ = file.take(1024).read_to_string(&mut text);
    text
}

/// True if the lock file at this path says that a store was served here.
pub(super) fn was_served(store: &Path) -> bool {
    LastBatch::read(store).is_some()
}

/// Checks that a database, with its WAL, has every transaction that was committed while it was served.
pub(super) fn check_complete(connection: &Connection, store: &Path) -> Result<(), OpenError> {
    // The lock file first: a server may go on.
    let last = LastBatch::read(store);
    let state = State::read(connection).map_err(unusable(store))?;
    let Some(state) = state else {
        return Ok(());
    };
    let path = store.display();
    match last.filter(|last| last.identity == state.identity) {
        Some(last) => {
            let stored = rows::last_batch(connection).map_err(unusable(store))?;
            if stored < last.batch {
                return Err(OpenError::other(format!(
                    "{path} lacks transactions that were committed while it was served: its WAL file was deleted or cut short, or \
                     an older copy was put in its place; put the missing file back or restore a backup; to go on without them, run \
                     `plantstore check --accept-loss`"
                )));
            }
        }
        None if !state.is_clean && is_empty(&with_suffix(store, "-wal")) => {
            return Err(OpenError::other(format!(
                "{path} was in use when it was copied or when its server was killed, and its WAL file {path}-wal is missing; put it \
                 next to the database or restore a backup; to go on without it, run `plantstore check --accept-loss`"
            )));
        }
        None => {}
    }
    Ok(())
}

/// Excludes other servers, imports without a server, upgrades and restores for as long as it is held.
///
/// The lock file is locked, and so is the database itself: the first also excludes others while there is no database yet, the
/// second also holds if the lock file is deleted or the database is opened under another name. (These are `flock` locks;
/// SQLite's own are independent of them.)
#[derive(Debug)]
pub(super) struct Lock {
    file: File,
    /// Dropped only when this process has no connection to the database: closing a file releases SQLite's locks on it.
    _database: Option<File>,
}

impl Lock {
    /// Takes the lock on a store, which need not exist yet. The path is that of the file itself.
    pub(super) fn take(store: &Path) -> Result<Self, OpenError> {
        let path = with_suffix(store, "-lock");
        let file = create_empty(&path, store)
            .and_then(|_| open_existing(&path, true))
            .map_err(failed_to("open", &path))?;
        let database = match open_existing(store, true) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            opened => Some(opened.map_err(failed_to("open", store))?),
        };
        let start = Instant::now();
        while !lock_both(&file, database.as_ref()).map_err(failed_to("lock", &path))? {
            // A command may be checking the WAL after a crash, which does not take long. It does not write its id.
            if is_held_by_server(&path) || start.elapsed() >= CHECK_TIMEOUT {
                let holder = holder(&path).map(|pid| format!(" (process {pid})"));
                return Err(OpenError::Locked {
                    path: store.display().to_string(),
                    holder: holder.unwrap_or_default(),
                });
            }
            thread::sleep(Duration::from_millis(10));
        }
        let last = read_text(&file).lines().nth(1).and_then(LastBatch::parse);
        let lock = Self {
            file,
            _database: database,
        };
        lock.write(last);
        Ok(lock)
    }

    /// Takes the lock if it is free, without creating any file.
    pub(super) fn take_if_free(store: &Path) -> io::Result<Option<[Option<File>; 2]>> {
        let mut locked = [None, None];
        for (locked, path) in locked
            .iter_mut()
            .zip([with_suffix(store, "-lock"), store.to_owned()])
        {
            match open_existing(&path, true) {
                Ok(file) => match file.try_lock() {
                    Ok(()) => *locked = Some(file),
                    Err(_) => return Ok(None),
                },
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Some(locked))
    }

    /// Creates the lock file again if it was deleted or replaced, and returns true then: its content must outlive this process.
    fn recreate_file(&mut self, store: &Path) -> bool {
        let path = with_suffix(store, "-lock");
        if is_same_file(self.file.metadata(), fs::symlink_metadata(&path)) {
            return false;
        }
        let file = create_empty(&path, store).and_then(|_| open_existing(&path, true));
        match file {
            Ok(file) if file.try_lock().is_ok() => {
                tracing::warn!(file = %path.display(), "the lock file was deleted or replaced; it was created again");
                self.file = file;
                true
            }
            // The lock on the database still holds.
            _ => false,
        }
    }

    /// Accepts whatever database is at this path from now on as complete.
    pub(super) fn forget_batch(&self) {
        self.write(None);
    }

    /// Not synced: a batch number that a power failure undoes is not checked for.
    fn write(&self, last: Option<LastBatch>) {
        let mut text = format!("{:<20}\n", std::process::id());
        if let Some(LastBatch { identity, batch }) = last {
            let identity = u128::from_be_bytes(identity);
            // The text always has the same length, so that one write replaces all of it.
            let _ = writeln!(text, "store {identity:032x} batch {batch:020}");
        }
        let written = self.file.write_all_at(text.as_bytes(), 0);
        let written = written.and_then(|()| self.file.set_len(text.len() as u64));
        if let Err(error) = written {
            tracing::warn!(%error, "cannot write to the lock file");
        }
    }
}

/// Locks the lock file, and the database if it exists. False, and nothing is locked, if another process has locked one of them.
fn lock_both(file: &File, database: Option<&File>) -> io::Result<bool> {
    if !try_lock(file)? {
        return Ok(false);
    }
    let is_locked = database.map_or(Ok(true), try_lock)?;
    if !is_locked {
        file.unlock()?;
    }
    Ok(is_locked)
}

fn try_lock(file: &File) -> io::Result<bool> {
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// True if the process whose id is in the lock file is running.
fn is_held_by_server(path: &Path) -> bool {
    holder(path).is_some_and(|pid| Path::new("/proc").join(pid).exists())
}

/// The process id in a lock file.
fn holder(path: &Path) -> Option<String> {
    let text = read_text(&open_existing(path, false).ok()?);
    let pid = text.lines().next()?.trim();
    (!pid.is_empty() && pid.bytes().all(|byte| byte.is_ascii_digit())).then(|| pid.to_owned())
}

/// A store that this process serves.
#[derive(Debug)]
pub(super) struct ServedStore {
    lock: Lock,
    last: LastBatch,
    /// Frames in the WAL after the last batch.
    wal_frames: i32,
}

impl ServedStore {
    /// Writes to the lock file, and syncs, which store is served here. Its batch number stays: the last batch of the database may not
    /// be durable yet.
    pub(super) fn new(
        connection: &Connection,
        lock: Lock,
        store: &Path,
    ) -> Result<Self, OpenError> {
        let unusable = || unusable(store);
        let state = State::read(connection).map_err(unusable())?;
        let state = state
            .ok_or(Error::QueryReturnedNoRows)
            .map_err(unusable())?;
        let last = LastBatch::read(&real(store)?).filter(|last| last.identity == state.identity);
        let last = last.unwrap_or(LastBatch {
            identity: state.identity,
            batch: 0,
        });
        lock.write(Some(last));
        let synced = lock.file.sync_all();
        synced.map_err(failed_to("sync", &with_suffix(store, "-lock")))?;
        Ok(Self {
            lock,
            last,
            wal_frames: i32::MAX,
        })
    }

    /// To be called in each transaction. If the WAL has started from its beginning, the identity of the store is written to it.
    pub(super) fn mark_wal(&self, connection: &Connection, wal_frames: i32) -> Result<(), Error> {
        if wal_frames < self.wal_frames {
            connection.execute("UPDATE store SET wal_cycle = wal_cycle + 1", [])?;
        }
        Ok(())
    }

    /// To be called when that transaction is committed. A mark that was rolled back is written again.
    pub(super) fn wal_is_marked(&mut self, wal_frames: i32) {
        self.wal_frames = wal_frames;
    }

    /// Writes the number of a batch that is durable now to the lock file.
    pub(super) fn record_batch(&mut self, batch: i64) {
        self.last.batch = batch;
        // Only the number, of the same length as before.
        let text = format!("{batch:020}");
        let _ = self.lock.file.write_all_at(text.as_bytes(), BATCH_OFFSET);
    }

    /// Creates the lock file again if it was deleted.
    pub(super) fn ensure_lock_file(&mut self, store: &Path) {
        if self.lock.recreate_file(store) {
            self.lock.write(Some(self.last));
        }
    }
}

/// The position of the batch number in the lock file.
const BATCH_OFFSET: u64 = 21 + "store  batch ".len() as u64 + 32;
