//! The store. A batch is committed as one: when `Store::add` returns, every plant that it reports
//! as added, or as there already, is on disk; when it fails, its error says whether anything can
//! have been stored.

mod dry_run;
mod error;
mod postgres;
mod query;
mod sqlite;
mod types;

use std::ops::{ControlFlow, RangeInclusive};
use std::path::Path;
use std::time::Duration;

use jiff::Timestamp;

use crate::token::TokenDigest;

pub use dry_run::DryRun;
pub use error::{OpenError, SaveError, StoreError, WalFull, chain};
pub use query::{Cursor, Days, Filter, Statistics, Walk};
pub use sqlite::{BackupFile, Restoration};
pub use types::{
    Addition, Checked, Finding, Footprint, Found, Location, NewToken, Outcome, Page, PlantRecord,
    TokenId, TokenRecord,
};

use postgres::Postgres;
use sqlite::Sqlite;

/// How long a command may wait for one answer of a database, with all attempts: it may have much to count.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(600);

/// One connection to where plants and tokens are kept.
pub enum Store {
    /// In one file.
    Sqlite(Box<Sqlite>),
    /// In a database that others use as well.
    Postgres(Box<Postgres>),
}

/// None if the store is elsewhere, or cannot be looked at.
pub fn footprint(location: &Location) -> Option<Footprint> {
    match location {
        Location::Sqlite(path) => sqlite::footprint(path).ok(),
        Location::Postgres(_) => None,
    }
}

/// Whether the location is the file of a backup, as far as its header says. It must not be open in this process: SQLite would
/// lose its locks.
pub fn is_backup(location: &Location) -> bool {
    match location {
        Location::Sqlite(path) => sqlite::is_backup(path),
        Location::Postgres(_) => false,
    }
}

/// Has a store opened from now on although transactions are missing. Stores in other places are never refused for that.
pub fn accept_loss(location: &Location) -> Result<(), OpenError> {
    match location {
        Location::Sqlite(path) => sqlite::accept_loss(path),
        Location::Postgres(_) => Ok(()),
    }
}

impl Store {
    /// Opens a store that is there to look at it, beside servers or without any; or a backup, which is left as it is.
    pub fn open(location: &Location) -> Result<Self, OpenError> {
        match location {
            Location::Sqlite(path) => Sqlite::open_to_read(path).map(Self::sqlite),
            Location::Postgres(url) => Postgres::open(url, COMMAND_TIMEOUT).map(Self::postgres),
        }
    }

    /// Opens a store that is there to change something in it.
    pub fn open_to_change(location: &Location) -> Result<Self, OpenError> {
        match location {
            Location::Sqlite(path) => Sqlite::open(path).map(Self::sqlite),
            Location::Postgres(url) => Postgres::open(url, COMMAND_TIMEOUT).map(Self::postgres),
        }
    }

    /// Opens a backup to look at it.
    pub fn open_backup(path: &Path) -> Result<Self, OpenError> {
        Sqlite::open_backup(path).map(Self::sqlite)
    }

    /// Opens a new, empty store in a backup file, to be filled.
    pub fn open_to_fill(backup: &BackupFile) -> Result<Self, SaveError> {
        Sqlite::open_to_fill(backup).map(Self::sqlite)
    }

    /// Opens a store, making it if it is not there.
    pub fn open_or_create(location: &Location) -> Result<Self, OpenError> {
        match location {
            Location::Sqlite(path) => Sqlite::open_or_create(path).map(Self::sqlite),
            Location::Postgres(url) => {
                Postgres::open_or_create(url, COMMAND_TIMEOUT).map(Self::postgres)
            }
        }
    }

    /// Opens a store for a server, making it if it is not there: a connection for whoever adds. SQLite has one,
    /// whatever is asked for.
    pub fn open_to_serve(
        location: &Location,
        connections: usize,
        timeout: Duration,
    ) -> Result<Vec<Self>, OpenError> {
        match location {
            Location::Sqlite(path) => Ok(vec![Self::sqlite(Sqlite::open_to_serve(path)?)]),
            Location::Postgres(url) => (0..connections)
                .map(|_| Postgres::open_to_serve(url, timeout).map(Self::postgres))
                .collect(),
        }
    }

    /// Opens a store to add much, beside servers or without any, making it if it is not there.
    pub fn open_to_import(location: &Location) -> Result<Self, OpenError> {
        match location {
            Location::Sqlite(path) => Sqlite::open_to_import(path).map(Self::sqlite),
            Location::Postgres(_) => Self::open_or_create(location),
        }
    }

    /// Opens a store that is served, to ask it questions.
    pub fn open_beside(location: &Location, timeout: Duration) -> Result<Self, OpenError> {
        match location {
            Location::Sqlite(path) => Sqlite::open(path).map(Self::sqlite),
            Location::Postgres(url) => Postgres::open_to_serve(url, timeout).map(Self::postgres),
        }
    }

    fn sqlite(store: Sqlite) -> Self {
        Self::Sqlite(Box::new(store))
    }

    fn postgres(store: Postgres) -> Self {
        Self::Postgres(Box::new(store))
    }

    /// Adds a batch of plants: an outcome for each, in order, once all of it is on disk. With it goes when tokens
    /// were used.
    pub fn add(
        &mut self,
        batch: &[Addition],
        used: &[(TokenId, Timestamp)],
    ) -> Result<Vec<Outcome>, StoreError> {
        match self {
            Self::Sqlite(store) => store.add(batch, used),
            Self::Postgres(store) => store.add(batch, used),
        }
    }

    /// Checks that the store can be used. Called about once a second while serving, idle or not, so it must be cheap;
    /// if `is_write_due`, it commits a write that changes nothing, which fails whenever an add would.
    pub fn probe(&mut self, is_write_due: bool) -> Result<(), StoreError> {
        match self {
            Self::Sqlite(store) => store.probe(is_write_due),
            Self::Postgres(store) => store.probe(is_write_due),
        }
    }

    /// True if the connection to the database was closed, as far as is known without using it.
    pub fn is_disconnected(&mut self) -> bool {
        match self {
            Self::Sqlite(_) => false,
            Self::Postgres(store) => store.is_disconnected(),
        }
    }

    /// Rejects adds while the WAL of a SQLite store is longer than this because a reader keeps it from being reset.
    pub fn limit_wal(&mut self, bytes_max: u64) {
        match self {
            Self::Sqlite(store) => store.limit_wal(bytes_max),
            Self::Postgres(_) => {}
        }
    }

    /// Whether somebody else may have to wait while we add.
    pub fn keeps_others_waiting(&self) -> bool {
        match self {
            Self::Sqlite(store) => store.is_beside_another(),
            Self::Postgres(_) => false,
        }
    }

    /// What each plant is to the one that has its id; none where the id is free.
    pub fn compare(&mut self, batch: &[Addition]) -> Result<Vec<Option<Outcome>>, StoreError> {
        match self {
            Self::Sqlite(store) => store.compare(batch),
            Self::Postgres(store) => store.compare(batch),
        }
    }

    /// Hands over all plants of one moment, by id, a page at a time, until that is enough. What is added meanwhile is not
    /// among them, and does not wait.
    pub fn export(
        &mut self,
        hand_over: &mut dyn FnMut(&Page) -> ControlFlow<()>,
    ) -> Result<(), StoreError> {
        match self {
            Self::Sqlite(store) => store.export(hand_over),
            Self::Postgres(store) => store.export(hand_over),
        }
    }

    /// Keeps a new token. False when the name is taken.
    pub fn create_token(&mut self, token: &NewToken<'_>) -> Result<bool, StoreError> {
        match self {
            Self::Sqlite(store) => store.create_token(token),
            Self::Postgres(store) => store.create_token(token),
        }
    }

    /// Revokes a token for good. `None` when there is none of that name, `Some(false)` when it was
    /// revoked before.
    pub fn revoke_token(&mut self, name: &str) -> Result<Option<bool>, StoreError> {
        match self {
            Self::Sqlite(store) => store.revoke_token(name),
            Self::Postgres(store) => store.revoke_token(name),
        }
    }

    /// Whether there is any token, revoked ones included.
    pub fn has_tokens(&mut self) -> Result<bool, StoreError> {
        match self {
            Self::Sqlite(store) => store.has_tokens(),
            Self::Postgres(store) => store.has_tokens(),
        }
    }

    /// Every token, oldest first.
    pub fn tokens(&mut self) -> Result<Vec<TokenRecord>, StoreError> {
        match self {
            Self::Sqlite(store) => store.tokens(),
            Self::Postgres(store) => store.tokens(),
        }
    }

    /// The token with this digest.
    pub fn token(&mut self, digest: &TokenDigest) -> Result<Option<TokenRecord>, StoreError> {
        match self {
            Self::Sqlite(store) => store.token(digest),
            Self::Postgres(store) => store.token(digest),
        }
    }

    /// How many plants there are.
    pub fn count_plants(&mut self) -> Result<u64, StoreError> {
        match self {
            Self::Sqlite(store) => store.count_plants(),
            Self::Postgres(store) => store.count_plants(),
        }
    }

    /// The plants with ids of this range, by id, as many as fit in a page.
    pub fn plants(
        &mut self,
        ids: RangeInclusive<i64>,
        page_len: u32,
    ) -> Result<Vec<PlantRecord>, StoreError> {
        match self {
            Self::Sqlite(store) => store.plants(&ids, page_len),
            Self::Postgres(store) => store.plants(&ids, page_len),
        }
    }

    /// Looks at so many of the newest plants of a time, for those that are wanted: along the index, so that it
    /// takes no longer in a larger store.
    pub fn walk(&mut self, wanted: &Filter, len: u32) -> Result<Walk, StoreError> {
        match self {
            Self::Sqlite(store) => store.walk(wanted, len),
            Self::Postgres(store) => store.walk(wanted, len),
        }
    }

    /// Looks at every plant: where so many of the newest stand that are wanted. Tells now and then how many more
    /// it has read, if it knows.
    pub fn search(
        &mut self,
        wanted: &Filter,
        len: u32,
        read: &mut dyn FnMut(usize),
    ) -> Result<Vec<Cursor>, StoreError> {
        match self {
            Self::Sqlite(store) => store.search(wanted, len, read),
            Self::Postgres(store) => store.search(wanted, len),
        }
    }

    /// The plants with these ids, in this order, without those that are not there.
    pub fn found(&mut self, ids: &[i64]) -> Result<Vec<Found>, StoreError> {
        match self {
            Self::Sqlite(store) => store.found(ids),
            Self::Postgres(store) => store.found(ids),
        }
    }

    /// What there is to say of all plants. Tells now and then how many more it has read, if it knows.
    pub fn statistics(
        &mut self,
        days: Days,
        read: &mut dyn FnMut(usize),
    ) -> Result<Statistics, StoreError> {
        match self {
            Self::Sqlite(store) => store.statistics(days, read),
            Self::Postgres(store) => store.statistics(days),
        }
    }

    /// Keeps plants of another store as they are; leaves what is there.
    pub fn insert_plants(&mut self, plants: &[PlantRecord]) -> Result<(), StoreError> {
        match self {
            Self::Sqlite(store) => store.insert_plants(plants),
            Self::Postgres(store) => store.insert_plants(plants),
        }
    }

    /// Inserts tokens of another store. One that is there already, by its digest, stays as it is but for its state: it is
    /// revoked if it is revoked in either store, and was last used when it was last used in either.
    pub fn merge_tokens(&mut self, tokens: &[TokenRecord]) -> Result<(), StoreError> {
        match self {
            Self::Sqlite(store) => store.merge_tokens(tokens),
            Self::Postgres(store) => store.merge_tokens(tokens),
        }
    }

    /// Reads everything, and tells in words what is not as it was stored.
    pub fn check(&mut self, tell: &mut dyn FnMut(Finding)) -> Result<Checked, StoreError> {
        match self {
            Self::Sqlite(store) => store.check(tell),
            Self::Postgres(store) => store.check(tell),
        }
    }

    /// Copies everything as it is at this moment, and tells how many pages of how many it has. False, and nothing is
    /// done, if there are no pages to copy.
    pub fn copy_pages(
        &mut self,
        to: &BackupFile,
        tell: &mut dyn FnMut(u64, u64),
    ) -> Result<bool, SaveError> {
        match self {
            Self::Sqlite(store) => store.copy_pages(to, tell).map(|()| true),
            Self::Postgres(_) => Ok(false),
        }
    }

    /// From now on whatever takes long leaves most of the time to others.
    pub fn throttle(&mut self) -> Result<(), StoreError> {
        match self {
            Self::Sqlite(store) => store.throttle(),
            Self::Postgres(_) => Ok(()), // the time is another machine's
        }
    }
}
