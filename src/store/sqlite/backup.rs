//! Backups: a snapshot of the store is copied page by page, online, into one file in rollback-journal mode, which needs no other file;
//! and a backup is made a store again. A crash during a restore leaves the old store or the restored one, and the old one is kept under
//! another name.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use rusqlite::backup::{Backup, StepResult};
use rusqlite::ffi::{SQLITE_FULL, SQLITE_IOERR_WRITE};
use rusqlite::{Connection, OpenFlags};

use crate::fs::{
    AtomicFile, Replace, change_owner, failed_to, if_exists, in_use, is_empty, is_same_file,
    owner_of, resolve_links, sync_directory_of, with_suffix,
};
use crate::sqlite_format::{Content, JOURNAL_MODE_OFFSET, JOURNAL_MODE_ROLLBACK, JOURNAL_MODE_WAL};
use crate::store::error::{OpenError, StoreError};
use crate::store::sqlite::connection::unusable;
use crate::store::sqlite::lock::{Lock, State, set_clean};
use crate::store::sqlite::{Sqlite, open};
use crate::store::types::Location;

/// The pages of 4 KiB that are copied between two pauses, and how many times as long as the work a pause is. Pauses are short, because
/// the WAL grows until the copy is complete.
const PAGES_PER_STEP: i32 = 256;
const BACKUP_PAUSE: u32 = 1;

/// The steps of SQLite's virtual machine between two pauses, about a millisecond, and how many times as long as the work a pause is.
const STEPS_PER_PAUSE: i32 = 20_000;
const THROTTLED_PAUSE: u32 = 3;

/// The longest pause: a step that took long may have waited for another process.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// The bytes that a restore copies between two reports of its progress.
const CHUNK: u64 = 1 << 20;

impl Sqlite {
    pub(crate) fn copy_pages(
        &mut self,
        to: &AtomicFile,
        report: &mut dyn FnMut(u64, u64),
    ) -> Result<(), OpenError> {
        copy_pages(&mut self.connection, to, report)
    }

    pub(crate) fn throttle(&mut self) -> Result<(), StoreError> {
        let mut pause = throttle(THROTTLED_PAUSE);
        let handler = move || {
            pause();
            false // go on
        };
        let set = self
            .connection
            .progress_handler(STEPS_PER_PAUSE, Some(handler));
        Ok(set?)
    }
}

/// Copies all pages of a snapshot, and reports how many of how many are copied. Adds go on meanwhile; only the WAL cannot be reset.
pub(super) fn copy_pages(
    source: &mut Connection,
    target: &AtomicFile,
    report: &mut dyn FnMut(u64, u64),
) -> Result<(), OpenError> {
    let mut copy = open_scratch(target.path())?;
    // SQLite starts a copy again if another connection has written between two steps, and under load would never end; not
    // within one transaction.
    let snapshot = source.transaction().map_err(StoreError::from)?;
    snapshot
        .query_row("SELECT count(*) FROM sqlite_schema", [], |_| Ok(()))
        .map_err(StoreError::from)?;
    let backup = Backup::new(&snapshot, &mut copy).map_err(StoreError::from)?;
    let mut pause = throttle(BACKUP_PAUSE);
    loop {
        let step = backup.step(PAGES_PER_STEP);
        let step = step.map_err(failed_writing(target.path()))?;
        let progress = backup.progress();
        let [all, left] = [progress.pagecount, progress.remaining].map(|n| n.unsigned_abs().into());
        report(all - left, all);
        match step {
            StepResult::Done => break,
            StepResult::More => {}
            _ => return Err(in_use(target.path()).into()),
        }
        // A little after each step, instead of all at the end: the server waits for the same disk.
        let synced = target.file().sync_data();
        synced.map_err(failed_to("sync", target.path()))?;
        pause();
    }
    drop(backup);
    drop(snapshot);
    drop(copy);
    set_journal_mode(target, JOURNAL_MODE_ROLLBACK)
}

/// Writes the journal mode into the header of a database. (SQLite would create a WAL next to it for that.)
fn set_journal_mode(file: &AtomicFile, mode: [u8; 2]) -> Result<(), OpenError> {
    let written = file.file().write_all_at(&mode, JOURNAL_MODE_OFFSET);
    Ok(written.map_err(failed_to("write to", file.path()))?)
}

/// Opens a new store in the temporary file of a backup. It needs no WAL: after a failure the file is deleted.
pub(super) fn open_to_fill(path: &Path) -> Result<Connection, OpenError> {
    let mut connection = open_scratch(path)?;
    open::upgrade(&mut connection, path)?;
    Ok(connection)
}

/// Opens a file that is synced by us, and deleted if anything fails.
fn open_scratch(path: &Path) -> Result<Connection, OpenError> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags).map_err(unusable(path))?;
    let pragmas =
        "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA locking_mode = EXCLUSIVE";
    let set = connection.execute_batch(pragmas);
    set.map_err(unusable(path))?;
    Ok(connection)
}

fn failed_writing(path: &Path) -> impl FnOnce(rusqlite::Error) -> OpenError {
    let advice = "free some space and run the command again";
    let message = format!("{} does not fit on the disk; {advice}", path.display());
    |source| match source.sqlite_error().map(|error| error.extended_code) {
        Some(SQLITE_FULL | SQLITE_IOERR_WRITE) => OpenError::caused_by(source, message),
        _ => StoreError::from(source).into(),
    }
}

/// Leaves time to a server on the same machine: returns a function to be called after each piece of work, which waits for a multiple of
/// the time that the work took.
fn throttle(factor: u32) -> impl FnMut() {
    let mut since = Instant::now();
    move || {
        thread::sleep((since.elapsed() * factor).min(PAUSE_MAX));
        since = Instant::now();
    }
}

/// A store that is being restored from a backup.
pub(crate) struct Restoration {
    file: AtomicFile,
    store: PathBuf,
    /// Held so that the store is not served meanwhile.
    lock: Lock,
}

impl Restoration {
    /// Copies a backup to a temporary file next to the store, and reports how many bytes of how many are copied.
    pub fn begin(
        backup: &Path,
        store: &Path,
        replace: Option<Replace>,
        report: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, OpenError> {
        let reject = |path: &Path, problem: &str| {
            let message = format!("{} {problem}; choose another name", path.display());
            Err(OpenError::other(message))
        };
        // Checked before it is opened: opening a named pipe would wait for a writer.
        let found = if_exists(fs::metadata(backup)).map_err(failed_to("read", backup))?;
        if !found.ok_or_else(|| open::no_file(backup))?.is_file() {
            return Err(open::not_a_backup(backup));
        }
        let from = File::open(backup).map_err(failed_to("read", backup))?;
        let real = resolve_links(store).map_err(failed_to("find", store))?;
        if is_same_file(from.metadata(), fs::metadata(&real)) {
            return reject(backup, "belongs to the store itself");
        }
        if real.is_dir() {
            return reject(store, "is not a regular file");
        }
        if Content::of(&from).map_err(failed_to("read", backup))? != Content::Backup {
            return Err(open::not_a_backup(backup));
        }
        let lock = Lock::take(&real)?;
        let file = AtomicFile::create(&real, replace, None)?;
        let size = from.metadata().map_err(failed_to("read", backup))?.len();
        let mut copied = 0;
        while let chunk @ 1.. = io::copy(&mut (&from).take(CHUNK), &mut file.file())
            .map_err(failed_to("copy the backup to", file.path()))?
        {
            copied += chunk;
            report(copied, size);
        }
        file.sync()?;
        Ok(Self {
            file,
            store: real,
            lock,
        })
    }

    /// The temporary file, still a backup, to be checked.
    pub fn location(&self) -> Location {
        Location::Sqlite(self.file.path().to_owned())
    }

    /// Puts it in place. Returns the name under which the store that was there is kept.
    pub fn finish(mut self) -> Result<Option<PathBuf>, OpenError> {
        let connection = open_scratch(self.file.path())?;
        let state = State::read(&connection).map_err(StoreError::from)?;
        if state.is_some() {
            set_clean(&connection, true).map_err(StoreError::from)?;
        }
        drop(connection);
        set_journal_mode(&self.file, JOURNAL_MODE_WAL)?;
        change_owner(self.file.file(), owner_of(&self.store));
        let now = Timestamp::now().strftime("%Y%m%dT%H%M%S.%3fZ");
        let kept = with_suffix(&self.store, &format!("-before-{now}"));
        let moved = move_sidecars_aside(&self.store, &kept)?;
        // The restored store may have an older state than the one that was served here.
        self.lock.forget_batch(&self.store)?;
        if self.store.exists() {
            self.file.persist_and_keep(&kept)?;
            return Ok(Some(kept));
        }
        self.file.persist()?;
        Ok(moved.then_some(kept))
    }
}

/// Moves the WAL and journal of the old store aside, since SQLite would apply them to the new one. True if there were any.
///
/// A sound store is first checkpointed completely, so that it is complete without its WAL. A damaged one cannot be: it is
/// kept together with its WAL.
fn move_sidecars_aside(store: &Path, kept: &Path) -> Result<bool, OpenError> {
    if !is_empty(store) {
        let checkpointed = open::switch_to_rollback_journal(store);
        if let Err(held @ OpenError::InUse(_)) = checkpointed {
            return Err(held);
        }
    }
    let mut found = false;
    for suffix in ["-wal", "-journal"] {
        let (there, aside) = (with_suffix(store, suffix), with_suffix(kept, suffix));
        let moved = if_exists(fs::rename(&there, &aside));
        found |= moved.map_err(failed_to("rename", &there))?.is_some();
    }
    // SQLite does not use the content of a file that an earlier process has left.
    let _ = fs::remove_file(with_suffix(store, "-shm"));
    sync_directory_of(store).map_err(failed_to("sync the directory of", store))?;
    Ok(found)
}
