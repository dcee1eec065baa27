//! The store: SQLite or PostgreSQL behind one enum, so that each operation is declared once, here, and implemented once per engine.
//! A batch is committed as a whole: when `Store::add` returns, every plant that it reports as added or replayed is on disk; when it
//! fails, its error says whether anything can have been stored.

mod dry_run;
mod error;
mod postgres;
mod query;
mod sqlite;
mod types;

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use jiff::Timestamp;

use crate::fs::AtomicFile;

pub(crate) use dry_run::DryRun;
pub(crate) use error::{Failure, OpenError, StoreError, WalFull, chain};
pub(crate) use query::{Cursor, DayCount, Filter, Statistics, TagCount, TagFilter};
pub(crate) use sqlite::Restoration;
pub use types::{Addition, Location, Outcome, PreviousSecret, TokenId, TokenRecord};
pub(crate) use types::{
    Checked, DamagedPlant, FileSizes, Finding, LOOKUP_LEN_MAX, PlantRecord, Schema, TokenChanges,
    TokenHistory, TokenIndex, next_id,
};

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use sqlite::inspect_wal;

use postgres::Postgres;
use sqlite::Sqlite;

/// What a store is opened for. Unless a variant says otherwise, a server may be running, and the store must exist. An older schema of a
/// SQLite store that no server uses is upgraded in every mode; a backup is never changed.
#[derive(Debug, Clone, Copy)]
pub enum Mode {
    /// Reads a store or a backup; a backup is not changed.
    Read,
    /// Reads a backup; a store is an error.
    ReadBackup,
    /// Makes small changes, such as revoking a token.
    Write,
    /// Like `Write`, but creates the store if necessary, and upgrades the schema of a PostgreSQL database.
    Create,
    /// Adds many plants. Creates the store if necessary. In SQLite this locks the store as a server does, unless a server is running.
    Import,
    /// Adds plants as a server. Creates the store if necessary. A SQLite store has one server at a time. A PostgreSQL database that
    /// cannot be reached yet is not an error; every operation waits for it.
    Serve {
        /// The time limit of each operation, with all attempts; PostgreSQL only.
        timeout: Duration,
    },
    /// Looks up tokens, in a process that has opened the store with `Serve`.
    ServeTokens {
        /// The same as in `Serve`.
        timeout: Duration,
    },
    /// Fills the empty temporary file of a backup, without a WAL and without syncs.
    FillBackup,
}

/// One connection to a store.
pub enum Store {
    Sqlite(Box<Sqlite>),
    Postgres(Box<Postgres>),
}

/// None if the store is not a file of this machine, or cannot be read.
pub(crate) fn file_sizes(location: &Location) -> Option<FileSizes> {
    sqlite::file_sizes(location.file()?).ok()
}

/// True if the location is the file of a backup according to its header. It must not be open in this process: SQLite would lose its
/// locks.
pub(crate) fn is_backup(location: &Location) -> bool {
    location.file().is_some_and(sqlite::is_backup)
}

/// None if there is no store, or an empty one.
pub(crate) fn schema(location: &Location) -> Result<Option<Schema>, OpenError> {
    match location {
        Location::Sqlite(path) => sqlite::schema(path),
        Location::Postgres(url) => {
            let (version, is_current) = match Postgres::open(url, Mode::Read) {
                Err(OpenError::NotMigrated { found, .. }) => (found, false),
                opened => opened.map(|_| (Some(postgres::schema::VERSION), true))?,
            };
            Ok(version.map(|version| Schema {
                version,
                is_current,
            }))
        }
    }
}

/// Lets a store be opened from now on although transactions are missing. PostgreSQL is never rejected for that.
pub(crate) fn accept_loss(location: &Location) -> Result<(), OpenError> {
    location.file().map_or(Ok(()), sqlite::accept_loss)
}

impl Store {
    pub fn open(location: &Location, mode: Mode) -> Result<Self, OpenError> {
        Ok(match location {
            Location::Sqlite(path) => Self::Sqlite(Box::new(Sqlite::open(path, mode)?)),
            Location::Postgres(url) => Self::Postgres(Box::new(Postgres::open(url, mode)?)),
        })
    }

    /// Opens the connections over which a server adds plants: always one for SQLite, which has one writer at a time.
    pub fn open_writers(
        location: &Location,
        connections: usize,
        timeout: Duration,
    ) -> Result<Vec<Self>, OpenError> {
        let mode = Mode::Serve { timeout };
        let mut stores = vec![Self::open(location, mode)?];
        while let Some(Self::Postgres(last)) = stores.last()
            && stores.len() < connections
        {
            let another = last.another(mode)?;
            stores.push(Self::Postgres(Box::new(another)));
        }
        Ok(stores)
    }

    /// Opens the connection over which a server reads tokens. It always uses the same database server as this one.
    pub fn open_tokens(&self, location: &Location, timeout: Duration) -> Result<Self, OpenError> {
        let mode = Mode::ServeTokens { timeout };
        match self {
            Self::Sqlite(_) => Self::open(location, mode),
            Self::Postgres(store) => Ok(Self::Postgres(Box::new(store.another(mode)?))),
        }
    }

    /// How often this process has moved from one database server to another. What was read before may be out of date.
    pub(crate) fn moves(&self) -> Arc<AtomicU64> {
        match self {
            Self::Sqlite(_) => Arc::default(),
            Self::Postgres(store) => store.moves(),
        }
    }

    /// True if the connection to the database was closed, as far as is known without using it.
    pub(crate) fn is_disconnected(&mut self) -> bool {
        match self {
            Self::Sqlite(_) => false,
            Self::Postgres(store) => store.is_disconnected(),
        }
    }

    /// Rejects adds while the WAL of a SQLite store is longer than this because a reader keeps it from being reset.
    pub(crate) fn limit_wal(&mut self, bytes_max: u64) {
        if let Self::Sqlite(store) = self {
            store.limit_wal(bytes_max);
        }
    }

    /// True if adds of another process may have to wait for ours.
    pub(crate) fn is_shared(&self) -> bool {
        match self {
            Self::Sqlite(store) => store.is_shared(),
            Self::Postgres(_) => false,
        }
    }

    /// Copies a snapshot of the database page by page, and reports how many pages of how many are copied. Returns false, and copies
    /// nothing, for PostgreSQL.
    pub(crate) fn copy_pages(
        &mut self,
        to: &AtomicFile,
        report: &mut dyn FnMut(u64, u64),
    ) -> Result<bool, OpenError> {
        match self {
            Self::Sqlite(store) => store.copy_pages(to, report).map(|()| true),
            Self::Postgres(_) => Ok(false),
        }
    }

    /// Makes long operations of this connection leave most of the CPU time to others. PostgreSQL schedules its own work.
    pub(crate) fn throttle(&mut self) -> Result<(), StoreError> {
        match self {
            Self::Sqlite(store) => store.throttle(),
            Self::Postgres(_) => Ok(()),
        }
    }
}

/// Calls the method of the engine behind a store.
macro_rules! on_engine {
    ($store:expr, $engine:ident => $call:expr) => {
        match $store {
            Store::Sqlite($engine) => $call,
            Store::Postgres($engine) => $call,
        }
    };
}

/// The operations that both engines implement as methods of the same name.
impl Store {
    /// Adds a batch of plants: an outcome for each, in order, once all of it is on disk. `token_uses` is when tokens were last used.
    pub fn add(
        &mut self,
        batch: &[Addition],
        token_uses: &[(TokenId, Timestamp)],
    ) -> Result<Vec<Outcome>, StoreError> {
        on_engine!(self, store => store.add(batch, token_uses))
    }

    /// Checks that the store can be used. Called about once a second while serving, idle or not, so it must be cheap; if
    /// `is_write_due`, it commits a write that changes nothing, which fails whenever an add would.
    pub(crate) fn probe(&mut self, is_write_due: bool) -> Result<(), StoreError> {
        on_engine!(self, store => store.probe(is_write_due))
    }

    /// Creates a token, unless it exists; SQLite gives it a shorter id. False if the name is taken by another one that is not revoked;
    /// a revoked one is renamed.
    pub fn create_token(&mut self, token: &TokenRecord, user: &str) -> Result<bool, StoreError> {
        on_engine!(self, store => store.create_token(token, user))
    }

    /// Replaces the secret of a token. False if the token is not as it was, because it was rotated or revoked at the same time.
    pub(crate) fn rotate_token(
        &mut self,
        before: &TokenRecord,
        rotated: &TokenRecord,
        user: &str,
    ) -> Result<bool, StoreError> {
        on_engine!(self, store => store.rotate_token(before, rotated, user))
    }

    /// Revokes a token for good. None if there is no token of that name; false if it was revoked before.
    pub(crate) fn revoke_token(
        &mut self,
        name: &str,
        user: &str,
    ) -> Result<Option<bool>, StoreError> {
        on_engine!(self, store => store.revoke_token(name, user))
    }

    /// What was done to tokens, oldest first.
    pub(crate) fn token_history(&mut self) -> Result<Vec<TokenHistory>, StoreError> {
        on_engine!(self, store => store.token_history())
    }

    /// True if there is any token, revoked ones included.
    pub(crate) fn has_tokens(&mut self) -> Result<bool, StoreError> {
        on_engine!(self, store => store.has_tokens())
    }

    /// Every token, oldest first.
    pub(crate) fn tokens(&mut self) -> Result<Vec<TokenRecord>, StoreError> {
        on_engine!(self, store => store.tokens())
    }

    /// The tokens that were created, revoked or copied since an event; all of them if none is given, or one that is not there.
    pub(crate) fn token_changes(&mut self, since: Option<i64>) -> Result<TokenChanges, StoreError> {
        on_engine!(self, store => store.token_changes(since))
    }

    /// Inserts tokens of another store, with ids of this one. A token that exists already keeps everything but its state: it is
    /// revoked if it is revoked in either store, was last used when it was last used in either, and has the latest secret.
    pub(crate) fn merge_tokens(
        &mut self,
        tokens: &[TokenRecord],
        user: &str,
    ) -> Result<(), StoreError> {
        on_engine!(self, store => store.merge_tokens(tokens, user))
    }

    pub(crate) fn count_plants(&mut self) -> Result<u64, StoreError> {
        on_engine!(self, store => store.count_plants())
    }

    /// The greatest id of a plant. What reads a store in use page by page stops there; otherwise it might never reach the end.
    pub(crate) fn last_id(&mut self) -> Result<Option<i64>, StoreError> {
        on_engine!(self, store => store.last_id())
    }

    /// A page of plants, by id, from this id on. Empty only if there are no more.
    pub(crate) fn plants(&mut self, first: i64) -> Result<Vec<PlantRecord>, StoreError> {
        match self {
            Self::Sqlite(store) => store.plants(first, i64::MAX),
            Self::Postgres(store) => store.plants(first),
        }
    }

    /// Inserts plants of another store as they are; leaves those that exist.
    pub(crate) fn insert_plants(&mut self, plants: &[PlantRecord]) -> Result<(), StoreError> {
        on_engine!(self, store => store.insert_plants(plants))
    }

    /// Passes on all plants of one snapshot, by id, a page at a time, until `visit` breaks. Adds go on meanwhile.
    pub(crate) fn export(
        &mut self,
        visit: &mut dyn FnMut(&[PlantRecord]) -> ControlFlow<()>,
    ) -> Result<(), StoreError> {
        on_engine!(self, store => store.export(visit))
    }

    /// The positions of the newest plants before a cursor that match the filter, newest first. Along the index if the filter is by time
    /// alone, otherwise by a scan of all plants, which reports now and then how many more it has read.
    pub(crate) fn find(
        &mut self,
        filter: &Filter,
        before: Cursor,
        limit: u32,
        read: &mut dyn FnMut(usize),
    ) -> Result<Vec<Cursor>, StoreError> {
        on_engine!(self, store => store.find(filter, before, limit, read))
    }

    /// The plants with these ids, in this order, without those that do not exist.
    pub(crate) fn get(
        &mut self,
        ids: &[i64],
    ) -> Result<Vec<Result<PlantRecord, DamagedPlant>>, StoreError> {
        on_engine!(self, store => store.get(ids))
    }

    /// Counts all plants. SQLite reports now and then how many more it has read.
    pub(crate) fn statistics(
        &mut self,
        now: Timestamp,
        read: &mut dyn FnMut(usize),
    ) -> Result<Statistics, StoreError> {
        on_engine!(self, store => store.statistics(now, read))
    }

    /// Reads everything, and reports whatever is not as it was stored.
    pub(crate) fn check(&mut self, report: &mut dyn FnMut(Finding)) -> Result<Checked, StoreError> {
        on_engine!(self, store => store.check(report))
    }
}
