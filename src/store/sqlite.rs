//! Plants and tokens in one SQLite file. Every commit is an fsync, and nothing that was not synced
//! is ever reported.

mod backup;
mod check;
mod checkpoints;
mod cut;
mod files;
mod log;
mod open;
mod pace;
mod partial;
mod restore;
mod rows;
mod scan;
mod search;
mod statistics;
mod tally;
mod tokens;

use std::fs::{self, File};
use std::ops::{ControlFlow, RangeInclusive};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use jiff::Timestamp;
use rusqlite::config::DbConfig;
use rusqlite::hooks::Wal;
use rusqlite::{Connection, OptionalExtension, Transaction, TransactionBehavior, params};

pub use backup::BackupFile;
use open::Lock;
pub use open::{footprint, sync_directory_of};
pub use restore::Restoration;

use crate::plant::NewPlant;
use crate::store::contract::{
    Addition, Checked, Finding, Found, NewToken, Outcome, Page, PlantRecord, TokenId, TokenRecord,
};
use crate::store::error::{OpenError, SaveError, StoreError};
use crate::store::search::{Days, Place, Statistics, Walk, Wanted};
use crate::store::sqlite::checkpoints::Checkpoints;
use crate::store::sqlite::rows::PlantRow;
use crate::token::TokenDigest;

/// One connection to the database.
pub struct Sqlite {
    connection: Connection,
    /// Pages in the log after the last commit, kept by SQLite's hook.
    log_pages: Arc<AtomicI32>,
    /// Of one that adds much. Dropped after the connection: it has the file open.
    checkpoints: Option<Checkpoints>,
    /// Of the one that serves.
    lock: Option<Lock>,
}

impl Sqlite {
    /// Opens a store that is there, beside a server or without one.
    pub fn open(path: &Path) -> Result<Self, OpenError> {
        Ok(Self::new(open::shared(path)?))
    }

    /// Opens a store that is there to look at it, or a backup, which is left as it is.
    pub fn open_to_read(path: &Path) -> Result<Self, OpenError> {
        Ok(Self::new(open::to_read(path)?))
    }

    /// Opens a backup to look at it.
    pub fn open_backup(path: &Path) -> Result<Self, OpenError> {
        Ok(Self::new(open::at_rest(path)?))
    }

    /// Opens a store, making it if it is not there.
    pub fn open_or_create(path: &Path) -> Result<Self, OpenError> {
        open::create(path)?;
        Self::open(path)
    }

    /// Opens the store for the one server that may use it while it holds the lock, making it if it
    /// is not there.
    ///
    /// Whatever an earlier process left in the log is synced before this returns. Without that, a
    /// plant whose fsync was cut short would be visible but not durable, and sending it again
    /// would get a 200 that a power cut undoes.
    pub fn open_to_serve(path: &Path) -> Result<Self, OpenError> {
        let (connection, lock) = open::exclusive(path)?;
        Self::with_checkpoints(connection, Some(lock), path)
    }

    /// Opens the store to add much, making it if it is not there: in place of a server if there is none, or else beside
    /// it. The log is ours to move either way, because a server does so only while it adds.
    pub fn open_to_import(path: &Path) -> Result<Self, OpenError> {
        match Self::open_to_serve(path) {
            Err(OpenError::Locked { .. }) => {
                Self::with_checkpoints(open::shared(path)?, None, path)
            }
            done => done,
        }
    }

    fn with_checkpoints(
        connection: Connection,
        lock: Option<Lock>,
        path: &Path,
    ) -> Result<Self, OpenError> {
        let checkpoints = Checkpoints::new(open::shared(path)?, open::file(path)?);
        Ok(Self {
            checkpoints: Some(checkpoints),
            lock,
            ..Self::new(connection)
        })
    }

    /// Whether another process may be adding as well.
    pub fn is_beside_another(&self) -> bool {
        self.lock.is_none()
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
            lock: None,
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
        self.move_log()?;
        let transaction = self.write()?;
        // With the write lock in hand, and never before what is stored, whoever stored it: whoever reads up to a moment
        // that is over has read all that there will ever be of it (`cut.rs`).
        let now = Timestamp::now()
            .as_millisecond()
            .max(rows::newest(&transaction)?);
        let mut outcomes = Vec::with_capacity(batch.len());
        {
            let mut insert = transaction.prepare_cached(rows::INSERT_PLANT)?;
            for Addition { plant, token } in batch {
                let row = PlantRow {
                    id: plant.id,
                    name: &plant.plant.name,
                    tag: plant.plant.tag.as_deref(),
                    added_at: now,
                    added_by: token.0,
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
        Ok(outcomes)
    }

    /// Writes what is there already, and syncs it. (SQLite leaves out the update of a row to what it is; a
    /// number in the header it writes.)
    pub fn rewrite(&mut self) -> Result<(), StoreError> {
        self.move_log()?;
        let transaction = self.write()?;
        let version =
            transaction.pragma_query_value(None, "user_version", |row| row.get::<_, i64>(0))?;
        transaction.pragma_update(None, "user_version", version)?;
        Ok(transaction.commit()?)
    }

    /// Between two transactions.
    fn move_log(&mut self) -> Result<(), StoreError> {
        match &mut self.checkpoints {
            Some(checkpoints) => {
                checkpoints.proceed(&self.connection, self.log_pages.load(Ordering::Relaxed))
            }
            None => Ok(()),
        }
    }

    /// What each plant is to the one that has its id; none where the id is free.
    pub fn compare(&mut self, batch: &[Addition]) -> Result<Vec<Option<Outcome>>, StoreError> {
        let outcome = |addition: &Addition| compare(&self.connection, &addition.plant).optional();
        Ok(batch.iter().map(outcome).collect::<Result<_, _>>()?)
    }

    /// Keeps a new token. False when the name is taken.
    pub fn create_token(&mut self, token: &NewToken<'_>) -> Result<bool, StoreError> {
        Ok(tokens::create(self.write()?, token)?)
    }

    /// Revokes a token for good. `None` when there is none of that name, `Some(false)` when it was
    /// revoked before.
    pub fn revoke_token(&mut self, name: &str) -> Result<Option<bool>, StoreError> {
        Ok(tokens::revoke(self.write()?, name)?)
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
        cut::export(&mut self.connection, hand_over)
    }

    /// Looks at so many of the newest plants of a time, for those that are wanted.
    pub fn walk(&mut self, wanted: &Wanted, len: u32) -> Result<Walk, StoreError> {
        Ok(search::walk(&self.connection, wanted, len)?)
    }

    /// Looks at every plant: where so many of the newest stand that are wanted. Tells how many it has read.
    pub fn search(
        &mut self,
        wanted: &Wanted,
        len: u32,
        read: &mut dyn FnMut(usize),
    ) -> Result<Vec<Place>, StoreError> {
        Ok(search::search(
            &self.connection,
            wanted,
            len as usize,
            read,
        )?)
    }

    /// The plants with these ids, in this order, without those that are not there.
    pub fn found(&mut self, ids: &[i64]) -> Result<Vec<Found>, StoreError> {
        Ok(search::found(&self.connection, ids)?)
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
    pub fn keep_plants(&mut self, plants: &[PlantRecord]) -> Result<(), StoreError> {
        let transaction = self.write()?;
        {
            let mut insert = transaction.prepare_cached(rows::INSERT_PLANT)?;
            for record in plants {
                rows::insert(&mut insert, &PlantRow::from(record))?;
            }
        }
        Ok(transaction.commit()?)
    }

    /// Inserts tokens of another store, and merges the state of those that are there already.
    pub fn merge_tokens(&mut self, tokens: &[TokenRecord]) -> Result<(), StoreError> {
        Ok(tokens::merge(self.write()?, tokens)?)
    }

    /// Reads everything, and tells in words what is not as it was stored.
    pub fn check(&mut self, tell: &mut dyn FnMut(Finding)) -> Result<Checked, StoreError> {
        // A disk in doubt is looked at and not written to: the end of this process must not empty the log.
        self.connection
            .set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
        Ok(check::check(&self.connection, tell)?)
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
    pub fn give_way(&mut self) -> Result<(), StoreError> {
        Ok(pace::give_way(&mut self.connection)?)
    }

    /// Begins a transaction that holds the write lock from the start, so that it cannot fail
    /// half-way for want of it.
    fn write(&mut self) -> Result<Transaction<'_>, StoreError> {
        Ok(self
            .connection
            .transaction_with_behavior(TransactionBehavior::Immediate)?)
    }
}

/// Whether this is a backup, as far as its header says.
pub fn is_backup(path: &Path) -> bool {
    let is_file = fs::metadata(path).is_ok_and(|found| found.is_file());
    is_file && File::open(path).is_ok_and(|file| partial::is_backup(&file).unwrap_or(false))
}

/// What a plant is to the one that has its id already.
fn compare(connection: &Connection, plant: &NewPlant) -> Result<Outcome, rusqlite::Error> {
    let mut select = connection.prepare_cached(rows::SELECT_PLANT)?;
    select.query_row([plant.id], |row| {
        let plant = &plant.plant;
        Ok(match rows::plant(row) {
            Some(stored) if stored.name == plant.name && stored.tag == plant.tag.as_deref() => {
                Outcome::AlreadyThere
            }
            Some(_) => Outcome::Taken,
            None => Outcome::Damaged,
        })
    })
}
