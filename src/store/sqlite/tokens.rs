//! Tokens in SQLite, written with their checksums.

use jiff::Timestamp;
use rusqlite::{Connection, Error, OptionalExtension, Transaction, params};

use crate::store::error::StoreError;
use crate::store::sqlite::rows::{self, token_checksum};
use crate::store::sqlite::{Sqlite, begin_write};
use crate::store::types::{
    TokenChanges, TokenEvent, TokenHistory, TokenId, TokenIndex, TokenRecord,
};
use crate::token::TokenDigest;

impl Sqlite {
    pub(crate) fn create_token(
        &mut self,
        token: &TokenRecord,
        user: &str,
    ) -> Result<bool, StoreError> {
        let transaction = begin_write(&mut self.connection)?;
        if let Some(other) = find_named(&transaction, &token.name)? {
            if other.digest == token.digest {
                return Ok(true);
            }
            let Some(name) = other.name_when_replaced() else {
                return Ok(false);
            };
            let renamed = TokenRecord {
                name: name.into(),
                ..other
            };
            update(&transaction, &renamed)?;
            record(&transaction, renamed.id, TokenEvent::Renamed, user)?;
        }
        insert(&transaction, token, TokenEvent::Created, user)?;
        transaction.commit()?;
        Ok(true)
    }

    pub(crate) fn rotate_token(
        &mut self,
        before: &TokenRecord,
        rotated: &TokenRecord,
        user: &str,
    ) -> Result<bool, StoreError> {
        let transaction = begin_write(&mut self.connection)?;
        let Some(now) = find(&transaction, &before.digest)?.filter(|now| now.revoked_at.is_none())
        else {
            return Ok(false);
        };
        let rotated = TokenRecord {
            last_used_at: now.last_used_at,
            ..rotated.clone()
        };
        update(&transaction, &rotated)?;
        record(&transaction, rotated.id, TokenEvent::Rotated, user)?;
        transaction.commit()?;
        Ok(true)
    }

    pub(crate) fn revoke_token(
        &mut self,
        name: &str,
        user: &str,
    ) -> Result<Option<bool>, StoreError> {
        let transaction = begin_write(&mut self.connection)?;
        let Some(token) = find_named(&transaction, name)? else {
            return Ok(None);
        };
        if token.revoked_at.is_some() {
            return Ok(Some(false));
        }
        let revoked = TokenRecord {
            revoked_at: Some(Timestamp::now()),
            ..token
        };
        update(&transaction, &revoked)?;
        record(&transaction, revoked.id, TokenEvent::Revoked, user)?;
        transaction.commit()?;
        Ok(Some(true))
    }

    pub(crate) fn has_tokens(&mut self) -> Result<bool, StoreError> {
        let sql = "SELECT EXISTS (SELECT 1 FROM tokens)";
        Ok(self.connection.query_row(sql, [], |row| row.get(0))?)
    }

    pub(crate) fn tokens(&mut self) -> Result<Vec<TokenRecord>, StoreError> {
        Ok(all(&self.connection)?)
    }

    pub(crate) fn token_history(&mut self) -> Result<Vec<TokenHistory>, StoreError> {
        let exists = "SELECT EXISTS (SELECT 1 FROM sqlite_schema WHERE name = 'token_events')";
        if !self.connection.query_row(exists, [], |row| row.get(0))? {
            return Ok(Vec::new()); // a backup of an older version
        }
        let sql = "SELECT token_events.*, name FROM token_events JOIN tokens ON tokens.id = token ORDER BY number";
        let mut select = self.connection.prepare_cached(sql)?;
        let history = select.query_map([], |row| {
            Ok(TokenHistory {
                at: rows::time(row.get("at")?)?,
                name: row.get("name")?,
                event: row.get("event")?,
                user: rows::added_column(row, "by_user")?,
            })
        })?;
        Ok(history.collect::<Result<_, _>>()?)
    }

    pub(crate) fn token_changes(&mut self, since: Option<i64>) -> Result<TokenChanges, StoreError> {
        let transaction = self.connection.transaction()?;
        let last_event = last_event(&transaction)?;
        let since = since.filter(|since| *since <= last_event);
        let sql = match since {
            None => "SELECT * FROM tokens WHERE ?1 IS NULL",
            Some(_) => {
                "SELECT * FROM tokens WHERE id IN (SELECT token FROM token_events WHERE number > ?1)"
            }
        };
        let mut changed = Vec::new();
        if since != Some(last_event) {
            let mut select = transaction.prepare_cached(sql)?;
            let mut rows = select.query([since])?;
            while let Some(row) = rows.next()? {
                match rows::token(row) {
                    Ok(token) => changed.push(token),
                    // It cannot be used; the others can.
                    Err(error) => {
                        tracing::warn!(%error, "a token is damaged; run `plantstore check`");
                    }
                }
            }
        }
        Ok(TokenChanges {
            is_complete: since.is_none(),
            changed,
            last_event,
        })
    }

    /// Fails, and changes nothing, if another token has the id or the name of one of them.
    pub(crate) fn merge_tokens(
        &mut self,
        tokens: &[TokenRecord],
        user: &str,
    ) -> Result<(), StoreError> {
        let transaction = begin_write(&mut self.connection)?;
        let existing = all(&transaction)?;
        let existing = TokenIndex::new(&existing);
        let mut new = Vec::new();
        for token in tokens {
            let Some(before) = existing.find(token) else {
                new.push(token);
                continue;
            };
            let merged = before.merged_with(token);
            if merged != *before {
                update(&transaction, &merged)?;
            }
            if let Some(event) = TokenEvent::of_merge(before, &merged) {
                record(&transaction, merged.id, event, user)?;
            }
        }
        // After those that exist, which may have got other names.
        for token in new {
            insert(&transaction, token, TokenEvent::Copied, user)?;
        }
        Ok(transaction.commit()?)
    }
}

fn all(connection: &Connection) -> Result<Vec<TokenRecord>, Error> {
    let mut select = connection.prepare_cached("SELECT * FROM tokens ORDER BY id")?;
    let tokens = select.query_map([], rows::token)?;
    tokens.collect()
}

fn find_named(connection: &Connection, name: &str) -> Result<Option<TokenRecord>, Error> {
    let sql = "SELECT * FROM tokens WHERE name = ?1";
    connection.query_row(sql, [name], rows::token).optional()
}

fn find(connection: &Connection, digest: &TokenDigest) -> Result<Option<TokenRecord>, Error> {
    let sql = "SELECT * FROM tokens WHERE digest = ?1";
    let mut select = connection.prepare_cached(sql)?;
    let token = select.query_row([digest.0], rows::token);
    token.optional()
}

/// SQLite assigns the id.
fn insert(
    transaction: &Transaction<'_>,
    token: &TokenRecord,
    event: TokenEvent,
    user: &str,
) -> Result<(), Error> {
    let sql = "INSERT INTO tokens
        (name, digest, rate_limit, created_at, expires_at, revoked_at, last_used_at, checksum,
         rotated_at, previous_digest, previous_expires_at)
        VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)";
    let previous = token.previous_secret;
    let values = params![
        token.name,
        token.digest.0,
        token.rate_limit,
        token.created_at.as_millisecond(),
        token.expires_at.map(Timestamp::as_millisecond),
        token.revoked_at.map(Timestamp::as_millisecond),
        token.last_used_at.map(Timestamp::as_millisecond),
        token_checksum(token),
        token.rotated_at.map(Timestamp::as_millisecond),
        previous.map(|secret| secret.digest.0),
        previous.map(|secret| secret.expires_at.as_millisecond()),
    ];
    transaction.execute(sql, values)?;
    let id = TokenId(transaction.last_insert_rowid());
    record(transaction, id, event, user)
}

/// Records what happens to a token. Transactions that write follow one another, so numbers are in the order of their commits.
fn record(
    transaction: &Transaction<'_>,
    token: TokenId,
    event: TokenEvent,
    user: &str,
) -> Result<(), Error> {
    let sql =
        "INSERT INTO token_events (number, token, event, at, by_user) VALUES (?1, ?2, ?3, ?4, ?5)";
    let now = Timestamp::now().as_millisecond();
    let number = last_event(transaction)? + 1;
    let values = params![number, token.0, event.name(), now, user];
    transaction.execute(sql, values).map(drop)
}

fn last_event(connection: &Connection) -> Result<i64, Error> {
    let sql = "SELECT coalesce(max(number), 0) FROM token_events";
    let mut select = connection.prepare_cached(sql)?;
    select.query_row([], |row| row.get(0))
}

/// Updates what can change of a token.
fn update(transaction: &Transaction<'_>, token: &TokenRecord) -> Result<(), Error> {
    let sql = "UPDATE tokens SET name = ?2, digest = ?3, expires_at = ?4, revoked_at = ?5, last_used_at = ?6,
        rotated_at = ?7, previous_digest = ?8, previous_expires_at = ?9, checksum = ?10 WHERE id = ?1";
    let previous = token.previous_secret;
    let values = params![
        token.id.0,
        token.name,
        token.digest.0,
        token.expires_at.map(Timestamp::as_millisecond),
        token.revoked_at.map(Timestamp::as_millisecond),
        token.last_used_at.map(Timestamp::as_millisecond),
        token.rotated_at.map(Timestamp::as_millisecond),
        previous.map(|secret| secret.digest.0),
        previous.map(|secret| secret.expires_at.as_millisecond()),
        token_checksum(token),
    ];
    transaction.execute(sql, values).map(drop)
}
