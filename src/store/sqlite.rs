//! Plants and tokens in one SQLite file. Every commit is an fsync, and nothing that was not synced
//! is ever reported.

mod open;

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use jiff::Timestamp;
use rusqlite::hooks::Wal;
use rusqlite::types::Type;
use rusqlite::{Connection, OptionalExtension, Row, Transaction, TransactionBehavior, params};

pub use open::{Lock, sync_directory_of};

use crate::plant::NewPlant;
use crate::store::contract::{Addition, Location, NewToken, Outcome, TokenId, TokenRecord};
use crate::store::error::{OpenError, StoreError};
use crate::token::TokenDigest;

/// The log is emptied into the database whenever it has grown by this many pages of 4 KiB.
const LOG_PAGES_MAX: i32 = 1000;

/// One connection to the database.
pub struct Sqlite {
    connection: Connection,
    /// Pages in the log after the last commit, kept by SQLite's hook.
    log_pages: Arc<AtomicI32>,
    log_pages_checkpointed: i32,
}

impl Sqlite {
    /// Opens a store that is there, beside a server or without one.
    pub fn open(location: &Location) -> Result<Self, OpenError> {
        Ok(Self::new(open::shared(&location.path)?))
    }

    /// Opens a store, making it if it is not there.
    pub fn open_or_create(location: &Location) -> Result<Self, OpenError> {
        open::create(&location.path)?;
        Self::open(location)
    }

    /// Opens the store for the one server that may use it while it holds the lock, making it if it
    /// is not there.
    ///
    /// Whatever an earlier process left in the log is synced before this returns. Without that, a
    /// plant whose fsync was cut short would be visible but not durable, and sending it again
    /// would get a 200 that a power cut undoes.
    pub fn open_to_serve(location: &Location) -> Result<(Self, Lock), OpenError> {
        let (connection, lock) = open::exclusive(&location.path)?;
        Ok((Self::new(connection), lock))
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
            log_pages_checkpointed: 0,
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
        let now = Timestamp::now().as_millisecond();
        let transaction = self.write()?;
        let mut outcomes = Vec::with_capacity(batch.len());
        {
            let mut insert = transaction.prepare_cached(
                "INSERT INTO plants (id, name, tag, added_at, added_by) VALUES (?1, ?2, ?3, ?4, ?5)
                 ON CONFLICT (id) DO NOTHING",
            )?;
            for Addition { plant, token } in batch {
                let NewPlant { id, plant: rest } = plant;
                let inserted = insert.execute(params![id, rest.name, rest.tag, now, token.0])?;
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

    /// Moves the log into the database when it has become long. To be called between batches.
    ///
    /// SQLite would do this by itself inside a commit, but it would keep a failed fsync to itself
    /// as well: the next attempt would seem to succeed, the log would be overwritten, and the
    /// plants in it would be gone.
    pub fn checkpoint_if_long(&mut self) -> Result<(), StoreError> {
        let pages = self.log_pages.load(Ordering::Relaxed);
        if pages < self.log_pages_checkpointed {
            self.log_pages_checkpointed = 0; // the log has started again from its beginning
        }
        if pages - self.log_pages_checkpointed < LOG_PAGES_MAX {
            return Ok(());
        }
        self.log_pages_checkpointed = pages;
        // A reader in the way, or a full disk, leaves the rest for next time.
        match open::checkpoint(&self.connection, "PASSIVE").map_err(StoreError::from) {
            Ok(_) | Err(StoreError::Full(_) | StoreError::Busy(_)) => Ok(()),
            Err(failed) => Err(failed),
        }
    }

    /// Keeps a new token. False when the name is taken.
    pub fn create_token(&mut self, token: &NewToken<'_>) -> Result<bool, StoreError> {
        let transaction = self.write()?;
        let inserted = transaction.execute(
            "INSERT INTO tokens (name, digest, rate_limit, created_at, expires_at) VALUES (?1, ?2, ?3, ?4, ?5)
             ON CONFLICT (name) DO NOTHING",
            params![
                token.name,
                token.digest.as_bytes(),
                token.rate_limit,
                Timestamp::now().as_millisecond(),
                token.expires_at.map(Timestamp::as_millisecond),
            ],
        )?;
        transaction.commit()?;
        Ok(inserted == 1)
    }

    /// Revokes a token for good. `None` when there is none of that name, `Some(false)` when it was
    /// revoked before.
    pub fn revoke_token(&mut self, name: &str) -> Result<Option<bool>, StoreError> {
        let transaction = self.write()?;
        let revoked = transaction.execute(
            "UPDATE tokens SET revoked_at = ?2 WHERE name = ?1 AND revoked_at IS NULL",
            params![name, Timestamp::now().as_millisecond()],
        )?;
        let known = transaction
            .query_row("SELECT 1 FROM tokens WHERE name = ?1", [name], |_| Ok(()))
            .optional()?;
        transaction.commit()?;
        Ok(known.map(|()| revoked == 1))
    }

    /// Whether there is any token, revoked ones included.
    pub fn has_tokens(&self) -> Result<bool, StoreError> {
        let sql = "SELECT EXISTS (SELECT 1 FROM tokens)";
        Ok(self.connection.query_row(sql, [], |row| row.get(0))?)
    }

    /// Every token, oldest first.
    pub fn tokens(&self) -> Result<Vec<TokenRecord>, StoreError> {
        let mut select = self
            .connection
            .prepare_cached("SELECT * FROM tokens ORDER BY id")?;
        let tokens = select
            .query_map([], token_record)?
            .collect::<Result<_, _>>()?;
        Ok(tokens)
    }

    /// The token with this digest.
    pub fn token(&self, digest: &TokenDigest) -> Result<Option<TokenRecord>, StoreError> {
        let mut select = self
            .connection
            .prepare_cached("SELECT * FROM tokens WHERE digest = ?1")?;
        Ok(select
            .query_row([digest.as_bytes()], token_record)
            .optional()?)
    }

    /// Begins a transaction that holds the write lock from the start, so that it cannot fail
    /// half-way for want of it.
    fn write(&mut self) -> Result<Transaction<'_>, StoreError> {
        Ok(self
            .connection
            .transaction_with_behavior(TransactionBehavior::Immediate)?)
    }
}

/// What a plant is to the one that has its id already.
fn compare(transaction: &Transaction<'_>, plant: &NewPlant) -> Result<Outcome, StoreError> {
    let mut select = transaction.prepare_cached("SELECT name, tag FROM plants WHERE id = ?1")?;
    let same = select.query_row([plant.id], |row| {
        let name = row.get_ref(0)?.as_str()? == plant.plant.name;
        let tag = row.get_ref(1)?.as_str_or_null()? == plant.plant.tag.as_deref();
        Ok(name && tag)
    })?;
    Ok(if same {
        Outcome::AlreadyThere
    } else {
        Outcome::Taken
    })
}

fn token_record(row: &Row<'_>) -> Result<TokenRecord, rusqlite::Error> {
    // A time that makes no sense must not be taken for none: that would be "never".
    let time = |column: &str| -> Result<Option<Timestamp>, rusqlite::Error> {
        let milliseconds: Option<i64> = row.get(column)?;
        milliseconds
            .map(Timestamp::from_millisecond)
            .transpose()
            .map_err(|error| {
                rusqlite::Error::FromSqlConversionFailure(0, Type::Integer, error.into())
            })
    };
    Ok(TokenRecord {
        id: TokenId(row.get("id")?),
        name: row.get("name")?,
        digest: TokenDigest::from_bytes(row.get("digest")?),
        rate_limit: row.get("rate_limit")?,
        created_at: time("created_at")?.unwrap_or_default(),
        expires_at: time("expires_at")?,
        revoked_at: time("revoked_at")?,
        last_used_at: time("last_used_at")?,
    })
}
