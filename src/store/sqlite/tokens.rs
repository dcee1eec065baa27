//! Tokens in SQLite, written with their checksums.

use jiff::Timestamp;
use rusqlite::{Connection, Error, OptionalExtension, Transaction, params};

use crate::store::error::StoreError;
use crate::store::sqlite::rows::{self, token_checksum};
use crate::store::sqlite::{Sqlite, begin_write};
use crate::store::types::TokenRecord;
use crate::token::TokenDigest;

impl Sqlite {
    pub(crate) fn create_token(&mut self, token: &TokenRecord) -> Result<bool, StoreError> {
        let transaction = begin_write(&mut self.connection)?;
        let is_taken = "SELECT EXISTS (SELECT 1 FROM tokens WHERE name = ?1)";
        if transaction.query_row(is_taken, [&token.name], |row| row.get(0))? {
            return Ok(false);
        }
        insert(&transaction, token)?;
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

    pub(crate) fn token(
        &mut self,
        digest: &TokenDigest,
    ) -> Result<Option<TokenRecord>, StoreError> {
        Ok(find(&self.connection, digest)?)
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
                }
                None => insert(&transaction, token)?,
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
fn insert(transaction: &Transaction<'_>, token: &TokenRecord) -> Result<(), Error> {
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
    transaction.execute(sql, values).map(drop)
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
