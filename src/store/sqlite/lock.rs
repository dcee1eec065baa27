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

use rusqlite::Connection;
use rusqlite::Error::{self, QueryReturnedNoRows};

use crate::fs::{
    create_empty, failed_to, if_exists, is_empty, is_same_file, open_existing, with_suffix,
};
use crate::store::error::OpenError;
use crate::store::sqlite::batches;
use crate::store::sqlite::connection::unusable;
use crate::store::sqlite::file_identity::{FileId, has_id};

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

/// The last batch of a store according to its lock file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LastBatch {
    pub(super) identity: [u8; 16],
    batch: i64,
}

impl LastBatch {
    /// Reads the lock file of the store at this path. None if it does not say that a store was served here.
    pub(super) fn read(store: &Path) -> Option<Self> {
        let text = read_lock_file(store)?;
        let words: Vec<_> = text.lines().nth(1)?.split_ascii_whitespace().collect();
        let ["store", identity, "batch", batch] = words[..] else {
            return None;
        };
        Some(Self {
            identity: u128::from_str_radix(identity, 16).ok()?.to_be_bytes(),
            batch: batch.parse().ok()?,
        })
    }
}

/// Checks that the server of a store, if there is one, uses the file of shared memory at this path. With another one, neither process
/// would see the locks of the other, and both would write to the same place of the WAL.
pub(super) fn check_shared_memory(store: &Path) -> Result<(), OpenError> {
    let recorded = read_lock_file(store).and_then(|text| {
        let mut words = text.lines().nth(2)?.strip_prefix("shm ")?.split(' ');
        Some((words.next()?.parse().ok()?, words.next()?.parse().ok()?))
    });
    let Some(recorded) = recorded else {
        return Ok(());
    };
    let is_at_path = has_id(&with_suffix(store, "-shm"), recorded);
    if is_at_path || holder(store).is_none_or(|pid| !is_running(&pid)) {
        return Ok(());
    }
    // The server may have been killed, and its process id used again.
    if Lock::take_if_free(store).is_some() {
        return Ok(());
    }
    Err(OpenError::SharedMemoryReplaced(store.to_owned()))
}

fn read_lock_file(store: &Path) -> Option<String> {
    let file = open_existing(&with_suffix(store, "-lock"), false).ok()?;
    let mut text = String::new();
    file.take(1024).read_to_string(&mut text).ok()?;
    Some(text)
}

/// Checks that a database, with its WAL, has every transaction that was committed while it was served.
pub(super) fn check_complete(connection: &Connection, store: &Path) -> Result<(), OpenError> {
    // The lock file first: a server may go on.
    let last = LastBatch::read(store);
    let Some(state) = State::read(connection).map_err(unusable(store))? else {
        return Ok(());
    };
    let path = store.display();
    let problem = match last.filter(|last| last.identity == state.identity) {
        Some(last)
            if batches::last_before_upgrade(connection).map_err(unusable(store))? < last.batch =>
        {
            format!(
                "{path} lacks transactions that were committed while it was served: its WAL file was deleted or cut short, or an \
                 older copy was put in its place; put the missing file back or restore a backup; to go on without them, run \
                 `plantstore check --accept-loss`"
            )
        }
        None if !state.is_clean && is_empty(&with_suffix(store, "-wal")) => format!(
            "{path} was in use when it was copied or when its server was killed, and its WAL file {path}-wal is missing; put it \
             next to the database or restore a backup; to go on without it, run `plantstore check --accept-loss`"
        ),
        _ => return Ok(()),
    };
    Err(OpenError::other(problem))
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
    /// What the lock file says.
    last: Option<LastBatch>,
    /// The file of shared memory that the server uses, which the lock file names too.
    shared_memory: Option<FileId>,
}

impl Lock {
    /// Takes the lock on a store, which need not exist yet. The path is that of the file itself.
    pub(super) fn take(store: &Path) -> Result<Self, OpenError> {
        let path = with_suffix(store, "-lock");
        let file = open_lock_file(store).map_err(failed_to("open", &path))?;
        let database = if_exists(open_existing(store, true)).map_err(failed_to("open", store))?;
        let lock_both = || Ok(try_lock(&file)? && database.as_ref().map_or(Ok(true), try_lock)?);
        let start = Instant::now();
        while !lock_both().map_err(failed_to("lock", &path))? {
            // A command may be checking the WAL after a crash, which does not take long. It does not write its id.
            let holder = holder(store);
            if holder.as_ref().is_some_and(is_running) || start.elapsed() >= CHECK_TIMEOUT {
                let holder = holder.map(|pid| format!(" (process {pid})"));
                return Err(OpenError::Locked {
                    path: store.to_owned(),
                    holder: holder.unwrap_or_default(),
                });
            }
            thread::sleep(Duration::from_millis(10));
        }
        let lock = Self {
            file,
            _database: database,
            last: LastBatch::read(store),
            shared_memory: None,
        };
        lock.write();
        Ok(lock)
    }

    /// Locks those of the two files that exist, the lock file first. None if that fails.
    pub(super) fn take_if_free(store: &Path) -> Option<[Option<File>; 2]> {
        let lock = |path: &Path| match if_exists(open_existing(path, true)).ok()? {
            Some(file) => file.try_lock().ok().map(|()| Some(file)),
            None => Some(None),
        };
        Some([lock(&with_suffix(store, "-lock"))?, lock(store)?])
    }

    /// Writes to the lock file, and syncs, which store is served here. Its batch number stays: the last batch of the database may not
    /// be durable yet.
    pub(super) fn record_store(
        &mut self,
        connection: &Connection,
        store: &Path,
    ) -> Result<(), OpenError> {
        let state = State::read(connection).and_then(|found| found.ok_or(QueryReturnedNoRows));
        let identity = state.map_err(unusable(store))?.identity;
        let last = self.last.filter(|last| last.identity == identity);
        self.last = last.or(Some(LastBatch { identity, batch: 0 }));
        self.write();
        let synced = self.file.sync_all();
        Ok(synced.map_err(failed_to("sync", &with_suffix(store, "-lock")))?)
    }

    /// Writes the number of a batch that is durable now to the lock file.
    pub(super) fn record_batch(&mut self, batch: i64) {
        if let Some(last) = &mut self.last {
            last.batch = batch;
        }
        // Only the number, of the same length as before.
        let text = format!("{batch:020}");
        let _ = self.file.write_all_at(text.as_bytes(), BATCH_OFFSET);
    }

    /// Writes to the lock file which file of shared memory the server uses.
    pub(super) fn record_shared_memory(&mut self, id: FileId) {
        self.shared_memory = Some(id);
        self.write();
    }

    /// Accepts whatever database is at this path from now on as complete.
    pub(super) fn forget_batch(&mut self, store: &Path) -> Result<(), OpenError> {
        self.last = None;
        let written = self.try_to_write();
        Ok(written.map_err(failed_to("write to", &with_suffix(store, "-lock")))?)
    }

    /// Creates the lock file again if it was deleted or replaced: its content must outlive this process.
    pub(super) fn ensure_file(&mut self, store: &Path) {
        let path = with_suffix(store, "-lock");
        if is_same_file(self.file.metadata(), fs::symlink_metadata(&path)) {
            return;
        }
        // If that fails, the lock on the database still holds.
        if let Ok(file) = open_lock_file(store)
            && file.try_lock().is_ok()
        {
            tracing::warn!(file = %path.display(), "the lock file was deleted or replaced; it was created again");
            self.file = file;
            self.write();
        }
    }

    fn write(&self) {
        if let Err(error) = self.try_to_write() {
            tracing::warn!(%error, "cannot write to the lock file");
        }
    }

    /// Not synced: a batch number that a power failure undoes is not checked for.
    fn try_to_write(&self) -> io::Result<()> {
        let mut text = format!("{:<20}\n", std::process::id());
        if let Some(LastBatch { identity, batch }) = self.last {
            let identity = u128::from_be_bytes(identity);
            // It always has the same length, so that the number can be replaced.
            let _ = writeln!(text, "store {identity:032x} batch {batch:020}");
        }
        if let Some((device, inode)) = self.shared_memory {
            let _ = writeln!(text, "shm {device} {inode}");
        }
        self.file.write_all_at(text.as_bytes(), 0)?;
        self.file.set_len(text.len() as u64)
    }
}

/// The position of the batch number in the lock file.
const BATCH_OFFSET: u64 = 21 + "store  batch ".len() as u64 + 32;

/// Creates the lock file if necessary.
fn open_lock_file(store: &Path) -> io::Result<File> {
    let path = with_suffix(store, "-lock");
    create_empty(&path, store)?;
    open_existing(&path, true)
}

fn try_lock(file: &File) -> io::Result<bool> {
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

fn is_running(pid: &String) -> bool {
    Path::new("/proc").join(pid).exists()
}

/// The process id in a lock file.
fn holder(store: &Path) -> Option<String> {
    let text = read_lock_file(store)?;
    let pid = text.lines().next()?.trim();
    pid.parse::<u32>().ok().map(|pid| pid.to_string())
}
