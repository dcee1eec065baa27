//! Tokens in SQLite, written with their checksums.

use jiff::Timestamp;
use rusqlite::{Connection, Error, OptionalExtension, Transaction, params};

use crate::store::error::StoreError;
use crate::store::sqlite::rows::{self, token_checksum};
use crate::store::sqlite::{Sqlite, begin_write};
use crate::store::types::{TokenChanges, TokenEvent, TokenId, TokenRecord};
use crate::token::TokenDigest;

impl Sqlite {
    pub(crate) fn create_token(&mut self, token: &TokenRecord) -> Result<bool, StoreError> {
        let transaction = begin_write(&mut self.connection)?;
        let is_taken = "SELECT EXISTS (SELECT 1 FROM tokens WHERE name = ?1)";
        if transaction.query_row(is_taken, [&token.name], |row| row.get(0))? {
            return Ok(false);
        }
        insert(&transaction, token, TokenEvent::Created)?;
        transaction.commit()?;
        Ok(true)
    }

    pub(crate) fn revoke_token(&mut self, name: &str) -> Result<Option<bool>, StoreError> {
        let transaction = begin_write(&mut self.connection)?;
        let sql = "SELECT * FROM tokens WHERE name = ?1";
        let known = transaction.query_row(sql, [name], rows::token).optional()?;
        let Some(token) = known else {
            return Ok(None);
        };
        if token.revoked_at.is_some() {
            return Ok(Some(false));
        }
        let revoked = TokenRecord {
            revoked_at: Some(Timestamp::now()),
            ..token
        };
        update_state(&transaction, &revoked)?;
        record(&transaction, revoked.id, TokenEvent::Revoked)?;
        transaction.commit()?;
        Ok(Some(true))
    }

    pub(crate) fn has_tokens(&mut self) -> Result<bool, StoreError> {
        let sql = "SELECT EXISTS (SELECT 1 FROM tokens)";
        Ok(self.connection.query_row(sql, [], |row| row.get(0))?)
    }

    pub(crate) fn tokens(&mut self) -> Result<Vec<TokenRecord>, StoreError> {
        let sql = "SELECT * FROM tokens ORDER BY id";
        let mut select = self.connection.prepare_cached(sql)?;
        let tokens = select.query_map([], rows::token)?;
        Ok(tokens.collect::<Result<_, _>>()?)
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
    pub(crate) fn merge_tokens(&mut self, tokens: &[TokenRecord]) -> Result<(), StoreError> {
        let transaction = begin_write(&mut self.connection)?;
        for token in tokens {
            match find(&transaction, &token.digest)? {
                Some(known) => {
                    let revoked_at = [known.revoked_at, token.revoked_at].into_iter().flatten();
                    let merged = TokenRecord {
                        revoked_at: revoked_at.min(),
                        last_used_at: known.last_used_at.max(token.last_used_at),
                        ..known
                    };
                    update_state(&transaction, &merged)?;
                    if merged.revoked_at != known.revoked_at {
                        record(&transaction, merged.id, TokenEvent::Revoked)?;
                    }
                }
                None => insert(&transaction, token, TokenEvent::Copied)?,
            }
        }
        Ok(transaction.commit()?)
    }
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
) -> Result<(), Error> {
    let sql = "INSERT INTO tokens
        (name, digest, rate_limit, created_at, expires_at, revoked_at, last_used_at, checksum)
        VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)";
    let values = params![
        token.name,
        token.digest.0,
        token.rate_limit,
        token.created_at.as_millisecond(),
        token.expires_at.map(Timestamp::as_millisecond),
        token.revoked_at.map(Timestamp::as_millisecond),
        token.last_used_at.map(Timestamp::as_millisecond),
        token_checksum(token),
    ];
    transaction.execute(sql, values)?;
    let id = TokenId(transaction.last_insert_rowid());
    record(transaction, id, event)
}

/// Records what happens to a token. Transactions that write follow one another, so numbers are in the order of their commits.
fn record(transaction: &Transaction<'_>, token: TokenId, event: TokenEvent) -> Result<(), Error> {
    let sql = "INSERT INTO token_events (number, token, event, at) VALUES (?1, ?2, ?3, ?4)";
    let now = Timestamp::now().as_millisecond();
    let number = last_event(transaction)? + 1;
    let values = params![number, token.0, event.name(), now];
    transaction.execute(sql, values).map(drop)
}

fn last_event(connection: &Connection) -> Result<i64, Error> {
    let sql = "SELECT coalesce(max(number), 0) FROM token_events";
    let mut select = connection.prepare_cached(sql)?;
    select.query_row([], |row| row.get(0))
}

/// Updates what can change of a token.
fn update_state(transaction: &Transaction<'_>, token: &TokenRecord) -> Result<(), Error> {
    let sql = "UPDATE tokens SET revoked_at = ?2, last_used_at = ?3, checksum = ?4 WHERE id = ?1";
    let values = params![
        token.id.0,
        token.revoked_at.map(Timestamp::as_millisecond),
        token.last_used_at.map(Timestamp::as_millisecond),
        token_checksum(token),
    ];
    transaction.execute(sql, values).map(drop)
}
