//! Plants and tokens in one SQLite file. Every commit is an fsync, and nothing that was not synced
//! is ever reported.

mod backup;
mod checkpoint;
mod clock;
mod file_identity;
mod open;
mod query;
mod rescue;
mod restore;
mod rows;
mod scan;
mod session;
mod statistics;
mod tally;
mod throttle;
mod tokens;
mod verify;
mod wal_check;
mod wal_limit;

use std::ops::{ControlFlow, RangeInclusive};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use jiff::Timestamp;
use rusqlite::config::DbConfig;
use rusqlite::hooks::Wal;
use rusqlite::{Connection, OptionalExtension, Transaction, TransactionBehavior, params};

pub use backup::BackupFile;
pub use open::footprint;
pub use restore::Restoration;

use crate::fs::{Content, open_existing, resolve_links};
use crate::plant::NewPlant;
use crate::store::Mode;
use crate::store::error::{OpenError, SaveError, StoreError, chain};
use crate::store::query::{Cursor, Days, Filter, Statistics, Walk};
use crate::store::sqlite::checkpoint::Checkpoints;
use crate::store::sqlite::clock::Clock;
use crate::store::sqlite::file_identity::FileIdentity;
use crate::store::sqlite::rows::PlantRow;
use crate::store::sqlite::session::{Session, State};
use crate::store::sqlite::wal_limit::WalLimit;
use crate::store::types::{
    Addition, Checked, Finding, Found, NewToken, Outcome, Page, PlantRecord, TokenId, TokenRecord,
};
use crate::token::TokenDigest;

/// While plants are copied in, the WAL is moved into the database when it has a quarter of its pages, or this many (64 MiB).
const WAL_SHARE: i32 = 4;
const WAL_PAGES_MAX: i32 = 16_384;

/// One connection to the database.
pub struct Sqlite {
    connection: Connection,
    /// Pages in the log after the last commit, kept by SQLite's hook.
    log_pages: Arc<AtomicI32>,
    /// Of one that adds much. Dropped after the connection, like everything below it: it has the file open.
    checkpoints: Option<Checkpoints>,
    files: Option<FileIdentity>,
    /// Of the one that serves.
    session: Option<Session>,
    clock: Clock,
    /// After a failed fsync nothing may be written any more: another one may claim success.
    has_failed: bool,
    wal_limit: WalLimit,
}

/// A session ends with its store, unless that has failed: then it is not dropped.
impl Drop for Sqlite {
    fn drop(&mut self) {
        if self.session.is_some() && !self.has_failed {
            // If that fails, the database needs its WAL or the lock file as after a kill.
            let _ = session::set_clean(&self.connection, true);
        }
    }
}

impl Sqlite {
    pub(crate) fn open(path: &Path, mode: Mode) -> Result<Self, OpenError> {
        match mode {
            Mode::Read => open::to_read(path).map(Self::new),
            Mode::ReadBackup => open::backup(path).map(Self::new),
            Mode::Write | Mode::ServeTokens { .. } => open::shared(path).map(Self::new),
            Mode::Create => {
                open::create(path)?;
                open::shared(path).map(Self::new)
            }
            Mode::FillBackup => backup::open_to_fill(path).map(Self::new),
            Mode::Serve { .. } => Self::open_exclusive(path),
            // The server that is running runs checkpoints only while it adds, so this connection runs its own.
            Mode::Import => match Self::open_exclusive(path) {
                Err(OpenError::Locked { .. }) => {
                    Self::with_checkpoints(open::shared(path)?, None, path)
                }
                opened => opened,
            },
        }
    }

    /// Whatever an earlier process left in the WAL is synced before this returns. Without that, a plant whose fsync was interrupted
    /// would be visible but not durable, and a replay would get a 200 that a power failure undoes.
    fn open_exclusive(path: &Path) -> Result<Self, OpenError> {
        let (connection, session) = open::exclusive(path)?;
        Self::with_checkpoints(connection, Some(session), path)
    }

    fn with_checkpoints(
        connection: Connection,
        session: Option<Session>,
        path: &Path,
    ) -> Result<Self, OpenError> {
        clock::compare_with(rows::newest(&connection).map_err(open::unusable(path))?);
        let mut store = Self::new(connection);
        store.session = session;
        if let Some(state) = State::read(&store.connection).map_err(open::unusable(path))? {
            let database = open::file(path)?;
            let files = FileIdentity::new(&store.connection, path, database, state.identity);
            store.files = Some(files.map_err(open::failed_to("look at the files of", path))?);
        }
        store.checkpoints = Some(Checkpoints::new(open::shared(path)?, open::file(path)?));
        Ok(store)
    }

    /// True if another process may be adding as well.
    pub fn is_shared(&self) -> bool {
        self.session.is_none()
    }

    fn new(mut connection: Connection) -> Self {
        let log_pages = Arc::new(AtomicI32::new(0));
        let pages = Arc::clone(&log_pages);
        connection
            .wal_hook(Some(move |_: &mut Wal, in_log| {
                pages.store(in_log, Ordering::Relaxed);
                Ok(())
            }))
            .expect("a hook is accepted by a connection that is open");
        Self {
            connection,
            log_pages,
            checkpoints: None,
            files: None,
            session: None,
            clock: Clock::default(),
            has_failed: false,
            wal_limit: WalLimit::default(),
        }
    }

    /// Adds a batch of plants in one transaction: an outcome for each, in order, once all of it is
    /// on disk.
    /// With it goes when tokens were used.
    pub fn add(
        &mut self,
        batch: &[Addition],
        used: &[(TokenId, Timestamp)],
    ) -> Result<Vec<Outcome>, StoreError> {
        let added = self.try_add(batch, used);
        added.map_err(|error| self.note_failure(error))
    }

    fn try_add(
        &mut self,
        batch: &[Addition],
        used: &[(TokenId, Timestamp)],
    ) -> Result<Vec<Outcome>, StoreError> {
        let wal_frames = self.prepare_write()?;
        let transaction = write(&mut self.connection)?;
        let added_at = self.clock.now();
        // Assigned while this holds the write lock, so that batches are numbered in the order in which they are committed.
        let number = rows::last_batch(&transaction)?.saturating_add(1);
        if let Some(session) = &mut self.session {
            session.mark_wal(&transaction, wal_frames)?;
        }
        let mut outcomes = Vec::with_capacity(batch.len());
        {
            let mut insert = transaction.prepare_cached(rows::INSERT_PLANT)?;
            for Addition { plant, token } in batch {
                let row = PlantRow {
                    id: plant.id,
                    name: &plant.plant.name,
                    tag: plant.plant.tag.as_deref(),
                    added_at,
                    added_by: token.0,
                    batch: number,
                };
                let inserted = rows::insert(&mut insert, &row)?;
                outcomes.push(match inserted {
                    0 => compare(&transaction, plant)?,
                    _ => Outcome::Added,
                });
            }
        }
        for (token, used_at) in used {
            transaction.execute(
                "UPDATE tokens SET last_used_at = ?2 WHERE id = ?1",
                params![token.0, used_at.as_millisecond()],
            )?;
        }
        transaction.commit()?;
        if let Some(session) = &mut self.session
            && outcomes.contains(&Outcome::Added)
        {
            session.note(number);
        }
        Ok(outcomes)
    }

    /// Checks that the store can be used, with a write if one is due.
    pub fn probe(&mut self, is_write_due: bool) -> Result<(), StoreError> {
        let probed = self.try_probe(is_write_due);
        probed.map_err(|error| self.note_failure(error))
    }

    fn try_probe(&mut self, is_write_due: bool) -> Result<(), StoreError> {
        self.check_files(self.log_pages.load(Ordering::Relaxed))?;
        if is_write_due {
            self.rewrite()?;
        }
        Ok(())
    }

    /// Writes what is there already, and syncs it. (SQLite leaves out the update of a row to what it is; a
    /// number in the header it writes.)
    fn rewrite(&mut self) -> Result<(), StoreError> {
        self.prepare_write()?;
        let transaction = write(&mut self.connection)?;
        let version =
            transaction.pragma_query_value(None, "user_version", |row| row.get::<_, i64>(0))?;
        transaction.pragma_update(None, "user_version", version)?;
        Ok(transaction.commit()?)
    }

    /// To be called before each transaction: looks after the files and the WAL. Returns the length of the WAL in frames. Fails if
    /// the WAL is as long as it may be.
    fn prepare_write(&mut self) -> Result<i32, StoreError> {
        let mut wal_frames = self.log_pages.load(Ordering::Relaxed);
        let step = match &mut self.checkpoints {
            Some(checkpoints) => checkpoints.next_step(wal_frames)?,
            None => None,
        };
        // A checkpoint would fill up a file that was truncated, and the loss would be hard to see.
        if step.is_some()
            || self.wal_limit.is_reached(wal_frames)
            || self.files.as_ref().is_some_and(FileIdentity::is_due)
        {
            self.check_files(wal_frames)?;
        }
        if let (Some(step), Some(checkpoints)) = (step, &mut self.checkpoints) {
            checkpoints.run(step, &self.connection, wal_frames)?;
        }
        let connection = &self.connection;
        let reset = || match &mut self.checkpoints {
            Some(checkpoints) => checkpoints.reset(connection, wal_frames),
            None => checkpoint::reset(connection),
        };
        if self.wal_limit.enforce(wal_frames, connection, reset)? {
            wal_frames = 0;
            self.log_pages.store(wal_frames, Ordering::Relaxed);
        }
        Ok(wal_frames)
    }

    /// Makes sure that the path still leads to the files that are open. If it does not, what is in them is saved as far as
    /// possible, and nothing may be acknowledged any more.
    fn check_files(&mut self, wal_frames: i32) -> Result<(), StoreError> {
        let Some(files) = &mut self.files else {
            return Ok(());
        };
        let checked = files.check(&self.connection, wal_frames);
        if let Some(session) = &mut self.session {
            session.keep_lock_file(files.path());
        }
        checked.map_err(|accident| {
            let rescued = rescue::rescue(&mut self.connection, files, &accident);
            StoreError::Fatal(format!("{accident}; {rescued}").into())
        })
    }

    /// If SQLite has failed because of an accident to the files, the accident is the reason to give.
    fn note_failure(&mut self, error: StoreError) -> StoreError {
        let StoreError::Fatal(cause) = error else {
            return error;
        };
        self.has_failed = true;
        let wal_frames = self.log_pages.load(Ordering::Relaxed);
        let accident = match &mut self.files {
            Some(files) if cause.is::<rusqlite::Error>() => {
                files.check(&self.connection, wal_frames).err()
            }
            _ => None,
        };
        StoreError::Fatal(match accident {
            Some(accident) => format!("{accident}: {}", chain(cause.as_ref())).into(),
            None => cause,
        })
    }

    /// Rejects adds while the WAL is longer than this because a reader keeps it from being reset.
    pub fn limit_wal(&mut self, bytes_max: u64) {
        self.wal_limit = WalLimit::new(bytes_max);
    }

    /// What each plant is to the one that has its id; none where the id is free.
    pub fn compare(&mut self, batch: &[Addition]) -> Result<Vec<Option<Outcome>>, StoreError> {
        let outcome = |addition: &Addition| compare(&self.connection, &addition.plant).optional();
        Ok(batch.iter().map(outcome).collect::<Result<_, _>>()?)
    }

    /// Keeps a new token. False when the name is taken.
    pub fn create_token(&mut self, token: &NewToken<'_>) -> Result<bool, StoreError> {
        Ok(tokens::create(write(&mut self.connection)?, token)?)
    }

    /// Revokes a token for good. `None` when there is none of that name, `Some(false)` when it was
    /// revoked before.
    pub fn revoke_token(&mut self, name: &str) -> Result<Option<bool>, StoreError> {
        Ok(tokens::revoke(write(&mut self.connection)?, name)?)
    }

    /// Whether there is any token, revoked ones included.
    pub fn has_tokens(&mut self) -> Result<bool, StoreError> {
        let sql = "SELECT EXISTS (SELECT 1 FROM tokens)";
        Ok(self.connection.query_row(sql, [], |row| row.get(0))?)
    }

    /// Every token, oldest first.
    pub fn tokens(&mut self) -> Result<Vec<TokenRecord>, StoreError> {
        let mut select = self
            .connection
            .prepare_cached("SELECT * FROM tokens ORDER BY id")?;
        let tokens = select
            .query_map([], rows::token)?
            .collect::<Result<_, _>>()?;
        Ok(tokens)
    }

    /// The token with this digest.
    pub fn token(&mut self, digest: &TokenDigest) -> Result<Option<TokenRecord>, StoreError> {
        let mut select = self
            .connection
            .prepare_cached("SELECT * FROM tokens WHERE digest = ?1")?;
        Ok(select
            .query_row([digest.as_bytes()], rows::token)
            .optional()?)
    }

    /// How many plants there are.
    pub fn count_plants(&mut self) -> Result<u64, StoreError> {
        let sql = "SELECT count(*) FROM plants";
        let count: i64 = self.connection.query_row(sql, [], |row| row.get(0))?;
        Ok(count.unsigned_abs())
    }

    /// The plants with ids of this range, by id, as many as fit in a page.
    pub fn plants(
        &mut self,
        ids: &RangeInclusive<i64>,
        page_len: u32,
    ) -> Result<Vec<PlantRecord>, StoreError> {
        let mut select = self.connection.prepare_cached(rows::SELECT_RANGE)?;
        let values = params![ids.start(), ids.end(), page_len];
        let plants = select
            .query_map(values, rows::plant_record)?
            .collect::<Result<_, _>>()?;
        Ok(plants)
    }

    /// Hands over all plants of one moment, by id, a page at a time, until that is enough.
    pub fn export(
        &mut self,
        hand_over: &mut dyn FnMut(&Page) -> ControlFlow<()>,
    ) -> Result<(), StoreError> {
        scan::export(&self.connection, hand_over)
    }

    /// Looks at so many of the newest plants of a time, for those that are wanted.
    pub fn walk(&mut self, wanted: &Filter, len: u32) -> Result<Walk, StoreError> {
        Ok(query::walk(&self.connection, wanted, len)?)
    }

    /// Looks at every plant: where so many of the newest stand that are wanted. Tells how many it has read.
    pub fn search(
        &mut self,
        wanted: &Filter,
        len: u32,
        read: &mut dyn FnMut(usize),
    ) -> Result<Vec<Cursor>, StoreError> {
        Ok(query::search(&self.connection, wanted, len as usize, read)?)
    }

    /// The plants with these ids, in this order, without those that are not there.
    pub fn found(&mut self, ids: &[i64]) -> Result<Vec<Found>, StoreError> {
        Ok(query::found(&self.connection, ids)?)
    }

    /// What there is to say of all plants. Tells how many it has read.
    pub fn statistics(
        &mut self,
        days: Days,
        read: &mut dyn FnMut(usize),
    ) -> Result<Statistics, StoreError> {
        Ok(statistics::statistics(&self.connection, days, read)?)
    }

    /// Keeps plants of another store as they are; leaves what is there.
    pub fn insert_plants(&mut self, plants: &[PlantRecord]) -> Result<(), StoreError> {
        self.prepare_write()?;
        let transaction = write(&mut self.connection)?;
        {
            let mut insert = transaction.prepare_cached(rows::INSERT_PLANT)?;
            for record in plants {
                rows::insert(&mut insert, &PlantRow::from(record))?;
            }
        }
        transaction.commit()?;
        self.keep_wal_short()
    }

    /// Runs a checkpoint once the WAL is long in comparison with the database: the plants of one transaction can be on many pages.
    fn keep_wal_short(&mut self) -> Result<(), StoreError> {
        let wal_pages = self.log_pages.load(Ordering::Relaxed);
        let pages = self
            .connection
            .pragma_query_value(None, "page_count", |row| row.get::<_, i32>(0))?;
        if wal_pages > (pages / WAL_SHARE).min(WAL_PAGES_MAX) {
            checkpoint::move_log(&self.connection)?;
        }
        Ok(())
    }

    /// Inserts tokens of another store, and merges the state of those that are there already.
    pub fn merge_tokens(&mut self, tokens: &[TokenRecord]) -> Result<(), StoreError> {
        Ok(tokens::merge(write(&mut self.connection)?, tokens)?)
    }

    /// Reads everything, and tells in words what is not as it was stored.
    pub fn check(&mut self, tell: &mut dyn FnMut(Finding)) -> Result<Checked, StoreError> {
        // A disk in doubt is looked at and not written to: the end of this process must not empty the log.
        self.connection
            .set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
        Ok(verify::check(&self.connection, tell)?)
    }

    /// Copies everything as it is at this moment, and tells how many pages of how many it has.
    pub fn copy_pages(
        &mut self,
        to: &BackupFile,
        tell: &mut dyn FnMut(u64, u64),
    ) -> Result<(), SaveError> {
        backup::copy_pages(&mut self.connection, to, tell)
    }

    /// From now on whatever takes long leaves most of the time to others.
    pub fn throttle(&mut self) -> Result<(), StoreError> {
        Ok(throttle::throttle(&mut self.connection)?)
    }
}

/// Begins a transaction that holds the write lock from the start, so that it cannot fail half-way for want of it.
fn write(connection: &mut Connection) -> Result<Transaction<'_>, StoreError> {
    Ok(connection.transaction_with_behavior(TransactionBehavior::Immediate)?)
}

/// Has a store opened from now on although transactions are missing.
pub fn accept_loss(path: &Path) -> Result<(), OpenError> {
    open::accept_loss(path)
}

/// Whether this is a backup, as far as its header says.
pub fn is_backup(path: &Path) -> bool {
    let file = resolve_links(path).and_then(|path| open_existing(&path, false));
    let content = file.and_then(|file| Content::of(&file));
    content.is_ok_and(|content| content == Content::Backup)
}

/// What a plant is to the one that has its id already.
fn compare(connection: &Connection, plant: &NewPlant) -> Result<Outcome, rusqlite::Error> {
    let mut select = connection.prepare_cached(rows::SELECT_PLANT)?;
    select.query_row([plant.id], |row| {
        let plant = &plant.plant;
        Ok(match rows::plant(row) {
            Some(stored) if stored.name == plant.name && stored.tag == plant.tag.as_deref() => {
                Outcome::Replayed
            }
            Some(_) => Outcome::Conflict,
            None => Outcome::Damaged,
        })
    })
}
