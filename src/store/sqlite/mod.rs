//! Plants and tokens in one SQLite file. Every commit is an fsync, and nothing that was not synced is ever reported as stored.

mod backup;
mod batches;
mod checkpoint;
mod clock;
mod connection;
mod file_identity;
mod lock;
mod open;
mod query;
mod rows;
mod tokens;
mod verify;
mod wal_check;
mod wal_limit;

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use jiff::Timestamp;
use rusqlite::hooks::Wal;
use rusqlite::{Connection, Transaction, TransactionBehavior, params};

pub(crate) use backup::Restoration;
pub(super) use open::{accept_loss, file_sizes, is_backup, schema};
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use wal_check::inspect_bytes as inspect_wal;

use crate::fs::failed_to;
use crate::plant::NewPlant;
use crate::store::Mode;
use crate::store::error::{Failure, OpenError, StoreError, chain};
use crate::store::sqlite::checkpoint::Checkpointer;
use crate::store::sqlite::clock::Clock;
use crate::store::sqlite::connection::unusable;
use crate::store::sqlite::file_identity::FileIdentity;
use crate::store::sqlite::lock::{Lock, State};
use crate::store::sqlite::rows::{PlantRow, select_plants};
use crate::store::sqlite::wal_limit::WalLimit;
use crate::store::types::{Addition, Outcome, PlantRecord, TokenId};

/// While plants are copied in, a checkpoint runs when the WAL has a quarter as many pages as the database, or this many (64 MiB).
const WAL_SHARE: i32 = 4;
const WAL_FRAMES_MAX: i32 = 16_384;

/// One connection to the database.
pub struct Sqlite {
    connection: Connection,
    /// The length of the WAL after the last commit, from SQLite's hook.
    wal_frames: Arc<AtomicI32>,
    /// Present in `Serve` and `Import`. Dropped after the connection, like all fields below, because it has the file open.
    checkpointer: Option<Checkpointer>,
    /// Present in `Serve` and `Import`.
    files: Option<FileIdentity>,
    /// Present in `Serve`, and in `Import` if no server is running.
    lock: Option<Lock>,
    /// True if a batch has raised the number of the WAL's cycle since the WAL was reset: it is raised once.
    is_wal_marked: bool,
    clock: Clock,
    /// After a failed fsync nothing may be written any more: another one may claim success.
    has_failed: bool,
    wal_limit: WalLimit,
}

impl Drop for Sqlite {
    fn drop(&mut self) {
        if self.lock.is_some() && !self.has_failed {
            // If that fails, the next start needs the WAL or the lock file, as after a kill.
            let _ = lock::set_clean(&self.connection, true);
        }
    }
}

impl Sqlite {
    pub(crate) fn open(path: &Path, mode: Mode) -> Result<Self, OpenError> {
        match mode {
            Mode::Read => open::to_read(path).map(Self::new),
            Mode::ReadBackup => open::backup(path).map(Self::new),
            Mode::Write | Mode::ServeTokens { .. } => open::shared(path).map(Self::new),
            Mode::Create => open::create_shared(path).map(Self::new),
            Mode::FillBackup => backup::open_to_fill(path).map(Self::new),
            Mode::Serve { .. } => Self::open_exclusive(path),
            // The server that is running runs checkpoints only while it adds, so this connection runs its own.
            Mode::Import => match Self::open_exclusive(path) {
                Err(OpenError::Locked { .. }) => {
                    Self::with_checkpoints(open::create_shared(path)?, None, path)
                }
                opened => opened,
            },
        }
    }

    /// Whatever an earlier process left in the WAL is synced before this returns. Without that, a plant whose fsync was interrupted
    /// would be visible but not durable, and a replay would get a 200 that a power failure undoes.
    fn open_exclusive(path: &Path) -> Result<Self, OpenError> {
        let (connection, lock) = open::exclusive(path)?;
        Self::with_checkpoints(connection, Some(lock), path)
    }

    fn with_checkpoints(
        connection: Connection,
        lock: Option<Lock>,
        path: &Path,
    ) -> Result<Self, OpenError> {
        clock::compare_with(batches::newest(&connection).map_err(unusable(path))?);
        let mut store = Self::new(connection);
        store.lock = lock;
        if let Some(state) = State::read(&store.connection).map_err(unusable(path))? {
            let files = FileIdentity::new(&store.connection, path, state.identity);
            let files = files.map_err(failed_to("read the files of", path))?;
            if let Some(lock) = &mut store.lock {
                lock.record_shared_memory(files.shared_memory_id());
            }
            store.files = Some(files);
        }
        let database = File::open(path).map_err(failed_to("open", path))?;
        store.checkpointer = Some(Checkpointer::new(open::shared(path)?, database));
        Ok(store)
    }

    /// True if another process may be adding as well.
    pub(crate) fn is_shared(&self) -> bool {
        self.lock.is_none()
    }

    fn new(mut connection: Connection) -> Self {
        let wal_frames = Arc::new(AtomicI32::new(0));
        let after_commit = Arc::clone(&wal_frames);
        connection
            .wal_hook(Some(move |_: &mut Wal, frames| {
                after_commit.store(frames, Ordering::Relaxed);
                Ok(())
            }))
            .expect("an open connection accepts a hook");
        Self {
            connection,
            wal_frames,
            checkpointer: None,
            files: None,
            lock: None,
            is_wal_marked: false,
            clock: Clock::default(),
            has_failed: false,
            wal_limit: WalLimit::default(),
        }
    }

    pub(crate) fn add(
        &mut self,
        batch: &[Addition],
        token_uses: &[(TokenId, Timestamp)],
    ) -> Result<Vec<Outcome>, StoreError> {
        let added = self.try_add(batch, token_uses);
        added.map_err(|error| self.note_failure(error))
    }

    fn try_add(
        &mut self,
        batch: &[Addition],
        token_uses: &[(TokenId, Timestamp)],
    ) -> Result<Vec<Outcome>, StoreError> {
        let wal_frames = self.prepare_write()?;
        let transaction = begin_write(&mut self.connection)?;
        let added_at = self.clock.now();
        // Assigned while this holds the write lock, so that batches are numbered in the order in which they are committed.
        let number = batches::last(&transaction)?.saturating_add(1);
        let is_mark_due = self.lock.is_some() && !self.is_wal_marked;
        if is_mark_due {
            // The WAL has started from its beginning: the identity of the store is written to it.
            transaction.execute("UPDATE store SET wal_cycle = wal_cycle + 1", [])?;
        }
        let outcomes = insert(&transaction, batch, added_at, number)?;
        let added = batch.iter().zip(&outcomes);
        let mut added = added
            .filter(|(_, outcome)| **outcome == Outcome::Added)
            .peekable();
        let has_added = added.peek().is_some();
        if has_added {
            let ids = added.map(|(addition, _)| addition.plant.id);
            batches::insert(&transaction, number, added_at, ids)?;
        }
        for (token, used_at) in token_uses {
            transaction.execute(
                "UPDATE tokens SET last_used_at = ?2 WHERE id = ?1",
                params![token.0, used_at.as_millisecond()],
            )?;
        }
        transaction.commit()?;
        // This batch itself may be the first in a WAL that was reset.
        self.is_wal_marked = is_mark_due || (self.is_wal_marked && !self.has_restarted(wal_frames));
        if let Some(lock) = &mut self.lock
            && has_added
        {
            lock.record_batch(number);
        }
        Ok(outcomes)
    }

    pub(crate) fn probe(&mut self, is_write_due: bool) -> Result<(), StoreError> {
        let mut probed = self.check_files(self.wal_frames.load(Ordering::Relaxed));
        if is_write_due {
            probed = probed.and_then(|()| self.write_probe());
        }
        probed.map_err(|error| self.note_failure(error))
    }

    /// Writes a number in the header again, and syncs it. (SQLite skips the update of a row to its own value.)
    fn write_probe(&mut self) -> Result<(), StoreError> {
        let wal_frames = self.prepare_write()?;
        let transaction = begin_write(&mut self.connection)?;
        let version =
            transaction.pragma_query_value(None, "user_version", |row| row.get::<_, i64>(0))?;
        transaction.pragma_update(None, "user_version", version)?;
        transaction.commit()?;
        self.is_wal_marked &= !self.has_restarted(wal_frames);
        Ok(())
    }

    /// True if the WAL has started from its beginning since it had this length.
    fn has_restarted(&self, wal_frames: i32) -> bool {
        self.wal_frames.load(Ordering::Relaxed) < wal_frames
    }

    /// To be called before each transaction: checks the files, and runs the checkpoint that is due. Returns the length of the WAL in
    /// frames. Fails if the WAL has reached its limit.
    fn prepare_write(&mut self) -> Result<i32, StoreError> {
        let mut wal_frames = self.wal_frames.load(Ordering::Relaxed);
        let step = match &mut self.checkpointer {
            Some(checkpointer) => checkpointer.next_step(wal_frames)?,
            None => None,
        };
        // A checkpoint would fill up a file that was truncated, and the loss would be hard to see.
        if step.is_some()
            || self.wal_limit.is_reached(wal_frames)
            || self.files.as_ref().is_some_and(FileIdentity::is_due)
        {
            self.check_files(wal_frames)?;
        }
        if let (Some(step), Some(checkpointer)) = (step, &mut self.checkpointer) {
            checkpointer.run(step, &self.connection, wal_frames)?;
        }
        let connection = &self.connection;
        let reset = || match &mut self.checkpointer {
            Some(checkpointer) => checkpointer.reset(connection, wal_frames),
            None => checkpoint::reset(connection),
        };
        if self.wal_limit.enforce(wal_frames, connection, reset)? {
            wal_frames = 0;
            self.wal_frames.store(wal_frames, Ordering::Relaxed);
            self.is_wal_marked = false;
        }
        Ok(wal_frames)
    }

    /// Checks that the path still leads to the files that are open. If it does not, their content is saved as far as possible, and
    /// nothing may be acknowledged any more.
    fn check_files(&mut self, wal_frames: i32) -> Result<(), StoreError> {
        let Some(files) = &mut self.files else {
            return Ok(());
        };
        let checked = files.check(&self.connection, wal_frames);
        if let Some(lock) = &mut self.lock {
            lock.ensure_file(files.path());
        }
        checked.map_err(|problem| {
            let rescued = file_identity::rescue(&mut self.connection, files, &problem);
            Failure::Fatal.because(format!("{problem}; {rescued}"))
        })
    }

    /// If SQLite has failed because of what happened to the files, the error says that.
    fn note_failure(&mut self, error: StoreError) -> StoreError {
        if error.kind != Failure::Fatal {
            return error;
        }
        self.has_failed = true;
        let wal_frames = self.wal_frames.load(Ordering::Relaxed);
        let problem = match &mut self.files {
            Some(files) if error.cause.is::<rusqlite::Error>() => {
                files.check(&self.connection, wal_frames).err()
            }
            _ => None,
        };
        match problem {
            Some(problem) => Failure::Fatal.because(format!("{problem}: {}", chain(&*error.cause))),
            None => error,
        }
    }

    pub(crate) fn limit_wal(&mut self, bytes_max: u64) {
        self.wal_limit = WalLimit::new(bytes_max);
    }

    pub(crate) fn insert_plants(&mut self, plants: &[PlantRecord]) -> Result<(), StoreError> {
        self.prepare_write()?;
        let transaction = begin_write(&mut self.connection)?;
        {
            let mut insert = transaction.prepare_cached(rows::INSERT_PLANT)?;
            for record in plants {
                rows::insert(&mut insert, &PlantRow::from(record))?;
            }
        }
        transaction.commit()?;
        self.keep_wal_short()
    }

    /// Runs a checkpoint once the WAL is long compared with the database: the plants of one transaction can be on many pages.
    fn keep_wal_short(&mut self) -> Result<(), StoreError> {
        let wal_frames = self.wal_frames.load(Ordering::Relaxed);
        let pages = self
            .connection
            .pragma_query_value(None, "page_count", |row| row.get::<_, i32>(0))?;
        if wal_frames > (pages / WAL_SHARE).min(WAL_FRAMES_MAX) {
            checkpoint::passive(&self.connection)?;
        }
        Ok(())
    }
}

/// Begins a transaction that holds the write lock from the start, so that it cannot fail later because another process has it.
fn begin_write(connection: &mut Connection) -> Result<Transaction<'_>, StoreError> {
    Ok(connection.transaction_with_behavior(TransactionBehavior::Immediate)?)
}

/// Inserts the plants of a batch whose ids are free, several with one statement.
fn insert(
    transaction: &Transaction<'_>,
    batch: &[Addition],
    added_at: i64,
    number: i64,
) -> Result<Vec<Outcome>, rusqlite::Error> {
    let row = |addition| PlantRow::of(addition, added_at, number);
    let mut outcomes = Vec::with_capacity(batch.len());
    let chunks = batch.chunks_exact(rows::INSERT_LEN);
    let rest = chunks.remainder();
    if batch.len() >= rows::INSERT_LEN {
        let mut insert = transaction.prepare_cached(&rows::INSERT_SEVERAL)?;
        for chunk in chunks {
            let start = outcomes.len();
            if rows::insert_several(&mut insert, chunk.iter().map(row))? == chunk.len() {
                outcomes.resize(start + chunk.len(), Outcome::Added);
                continue;
            }
            // Some ids were taken: by a plant that was stored before, or by one before it in this batch.
            for (index, addition) in (start..).zip(chunk) {
                let id = addition.plant.id;
                let is_first = || batch[..index].iter().all(|other| other.plant.id != id);
                let (stored_in, outcome) = compare(transaction, &addition.plant)?;
                outcomes.push(match outcome {
                    Outcome::Damaged => Outcome::Damaged,
                    _ if stored_in == number && is_first() => Outcome::Added,
                    outcome => outcome,
                });
            }
        }
    }
    let mut insert = transaction.prepare_cached(rows::INSERT_PLANT)?;
    for addition in rest {
        outcomes.push(match rows::insert(&mut insert, &row(addition))? {
            0 => compare(transaction, &addition.plant)?.1,
            _ => Outcome::Added,
        });
    }
    Ok(outcomes)
}

/// The outcome of adding a plant whose id is taken, and the number of the batch that took it. An error if it is not taken.
fn compare(connection: &Connection, plant: &NewPlant) -> Result<(i64, Outcome), rusqlite::Error> {
    let mut select = connection.prepare_cached(select_plants!("WHERE id = ?1"))?;
    select.query_row([plant.id], |row| {
        let plant = &plant.plant;
        Ok(match rows::plant(row) {
            Some(stored) if stored.name == plant.name && stored.tag == plant.tag.as_deref() => {
                (stored.batch, Outcome::Replayed)
            }
            Some(stored) => (stored.batch, Outcome::Conflict),
            None => (0, Outcome::Damaged),
        })
    })
}
