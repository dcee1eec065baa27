//! Tokens in PostgreSQL. Each statement can be run again if its response was lost. What happens to a token is recorded in the same
//! statement.

use jiff::Timestamp;
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use crate::store::error::{StoreError, chain};
use crate::store::postgres::{Postgres, Values, rows};
use crate::store::types::{
    TokenChanges, TokenEvent, TokenHistory, TokenId, TokenIndex, TokenRecord,
};

const SELECT: &str =
    "SELECT id, name, digest, rate_limit, created_at, expires_at, revoked_at, last_used_at,
    rotated_at, previous_digest, previous_expires_at FROM plantstore.tokens";

const LAST_EVENT: &str = "SELECT coalesce(max(number), 0) FROM plantstore.token_events";

const INSERT: &str = "INSERT INTO plantstore.tokens
    (id, name, digest, rate_limit, created_at, expires_at, revoked_at, last_used_at, rotated_at, previous_digest, previous_expires_at)
    VALUES ($2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)";

/// All that can change of a token. The id is parameter 2.
const UPDATE: &str = "UPDATE plantstore.tokens SET
    name = $3, digest = $4, rate_limit = $5, created_at = $6, expires_at = $7, revoked_at = $8, last_used_at = $9, rotated_at = $10,
    previous_digest = $11, previous_expires_at = $12";

/// A statement that changes a token, returns its id, and records the event if `is_new`, which sees the table as it was before the
/// statement. Parameter 1 is the user. Of two that run at the same time, one finds its number taken and is run again: numbers are in the order of the commits.
fn recording(event: TokenEvent, change: &str, is_new: &str) -> String {
    let event = event.name();
    format!(
        "WITH changed AS ({change}), recorded AS (
           INSERT INTO plantstore.token_events (number, token, event, at, by_user)
           SELECT ({LAST_EVENT}) + 1, id, '{event}', now(), $1 FROM changed WHERE {is_new}
         )
         SELECT * FROM changed"
    )
}

impl Postgres {
    pub(crate) fn create_token(
        &mut self,
        token: &TokenRecord,
        user: &str,
    ) -> Result<bool, StoreError> {
        let named = self.query(
            &format!("{SELECT} WHERE name = $1"),
            &[(&&*token.name, Type::TEXT)],
        )?;
        if let Some(other) = named.first() {
            let other = rows::token_record(other)?;
            if other.digest == token.digest {
                self.wait_for_standby()?;
                return Ok(true);
            }
            if let Some(name) = other.name_when_replaced() {
                let name = name.into();
                self.update_token(&TokenRecord { name, ..other }, TokenEvent::Renamed, user)?;
            }
        }
        let insert = format!("{INSERT} ON CONFLICT DO NOTHING RETURNING id");
        let insert = recording(TokenEvent::Created, &insert, "TRUE");
        let id = TokenId::of(&token.digest);
        if self.write_token(token, id, &insert, user)? {
            return Ok(true);
        }
        // This very token may be stored: by an attempt whose response was lost, or by another node.
        let sql = "SELECT 1 FROM plantstore.tokens WHERE name = $1 AND digest = $2";
        let values: &Values<'_> = &[
            (&&*token.name, Type::TEXT),
            (&token.digest.0.as_slice(), Type::BYTEA),
        ];
        let is_stored = !self.query(sql, values)?.is_empty();
        if is_stored {
            self.wait_for_standby()?;
        }
        Ok(is_stored)
    }

    pub(crate) fn rotate_token(
        &mut self,
        before: &TokenRecord,
        rotated: &TokenRecord,
        user: &str,
    ) -> Result<bool, StoreError> {
        debug_assert!(rotated.previous_secret.map(|it| it.digest) == Some(before.digest));
        // With the new secret it was rotated by an attempt whose response was lost.
        let update = format!(
            "{UPDATE} WHERE id = $2 AND digest IN ($11, $4) AND revoked_at IS NULL RETURNING id"
        );
        let is_new = "EXISTS (SELECT 1 FROM plantstore.tokens WHERE digest = $11)";
        let update = recording(TokenEvent::Rotated, &update, is_new);
        self.write_token(rotated, rotated.id, &update, user)
    }

    /// Writes all columns of a token; a change of another process at the same time is overwritten.
    fn update_token(
        &mut self,
        token: &TokenRecord,
        event: TokenEvent,
        user: &str,
    ) -> Result<bool, StoreError> {
        let update = format!("{UPDATE} WHERE id = $2 RETURNING id");
        // An attempt whose response was lost may have changed all of it.
        let is_new = "EXISTS (SELECT 1 FROM plantstore.tokens WHERE id = $2
            AND (name <> $3 OR digest <> $4 OR (revoked_at IS NULL AND $8 IS NOT NULL)))";
        self.write_token(token, token.id, &recording(event, &update, is_new), user)
    }

    /// True if the statement returns a row.
    fn write_token(
        &mut self,
        token: &TokenRecord,
        id: TokenId,
        sql: &str,
        user: &str,
    ) -> Result<bool, StoreError> {
        let previous = token.previous_secret;
        let previous_digest = previous.as_ref().map(|secret| secret.digest.0.as_slice());
        let values: &Values<'_> = &[
            (&user, Type::TEXT),
            (&id.0, Type::INT8),
            (&&*token.name, Type::TEXT),
            (&token.digest.0.as_slice(), Type::BYTEA),
            (&token.rate_limit.map(i64::from), Type::INT8),
            (&token.created_at, Type::TIMESTAMPTZ),
            (&token.expires_at, Type::TIMESTAMPTZ),
            (&token.revoked_at, Type::TIMESTAMPTZ),
            (&token.last_used_at, Type::TIMESTAMPTZ),
            (&token.rotated_at, Type::TIMESTAMPTZ),
            (&previous_digest, Type::BYTEA),
            (&previous.map(|secret| secret.expires_at), Type::TIMESTAMPTZ),
        ];
        Ok(!self.query(sql, values)?.is_empty())
    }

    pub(crate) fn revoke_token(
        &mut self,
        name: &str,
        user: &str,
    ) -> Result<Option<bool>, StoreError> {
        let now = Timestamp::now();
        let revoke = "UPDATE plantstore.tokens SET revoked_at = coalesce(revoked_at, $3) WHERE name = $2 RETURNING id, revoked_at";
        let is_new = "NOT EXISTS (SELECT 1 FROM plantstore.tokens WHERE name = $2 AND revoked_at IS NOT NULL)";
        let sql = recording(TokenEvent::Revoked, revoke, is_new);
        let values: &Values<'_> = &[
            (&user, Type::TEXT),
            (&name, Type::TEXT),
            (&now, Type::TIMESTAMPTZ),
        ];
        let rows = self.query(&sql, values)?;
        let revoked_at = rows.first().map(|row| rows::value::<Timestamp>(row, 1));
        let revoked_at = revoked_at.transpose()?;
        Ok(revoked_at.map(|time| time.as_microsecond() == now.as_microsecond()))
    }

    pub(crate) fn has_tokens(&mut self) -> Result<bool, StoreError> {
        let sql = "SELECT EXISTS (SELECT 1 FROM plantstore.tokens)";
        Ok(self.query_one(sql, &[])?.get(0))
    }

    pub(crate) fn tokens(&mut self) -> Result<Vec<TokenRecord>, StoreError> {
        let rows = self.query(&format!("{SELECT} ORDER BY created_at, id"), &[])?;
        rows.iter().map(rows::token_record).collect()
    }

    /// What `plantstore check` reports about tokens that cannot be read.
    pub(super) fn damaged_tokens(&mut self) -> Result<Vec<String>, StoreError> {
        let rows = self.query(&format!("{SELECT} ORDER BY id"), &[])?;
        let problem = |row: &Row| {
            let error = rows::token_record(row).err()?;
            let id = rows::value::<i64>(row, "id").unwrap_or_default();
            Some(format!("token {id}: {}", chain(&*error.cause)))
        };
        Ok(rows.iter().filter_map(problem).collect())
    }

    pub(crate) fn token_history(&mut self) -> Result<Vec<TokenHistory>, StoreError> {
        let sql = "SELECT at, name, event, by_user FROM plantstore.token_events
                   JOIN plantstore.tokens ON tokens.id = token ORDER BY number";
        let history = |row: &Row| {
            Ok(TokenHistory {
                at: rows::value(row, 0)?,
                name: rows::value::<&str>(row, 1)?.into(),
                event: rows::value(row, 2)?,
                user: rows::value(row, 3)?,
            })
        };
        self.query(sql, &[])?.iter().map(history).collect()
    }

    pub(crate) fn token_changes(&mut self, since: Option<i64>) -> Result<TokenChanges, StoreError> {
        // What is committed between the two queries is read again next time.
        let last_event: i64 = self.query_one(LAST_EVENT, &[])?.get(0);
        let since = since.filter(|since| *since <= last_event);
        let rows = match since {
            None => self.query(SELECT, &[])?,
            Some(since) if since == last_event => Vec::new(),
            Some(since) => {
                let sql = format!(
                    "{SELECT} WHERE id IN (SELECT token FROM plantstore.token_events WHERE number > $1)"
                );
                self.query(&sql, &[(&since, Type::INT8)])?
            }
        };
        let usable = |row| match rows::token_record(row) {
            Ok(token) => Some(token),
            // It cannot be used; the others can.
            Err(error) => {
                tracing::warn!(%error, "a token is damaged; run `plantstore check`");
                None
            }
        };
        Ok(TokenChanges {
            is_complete: since.is_none(),
            changed: rows.iter().filter_map(usable).collect(),
            last_event,
        })
    }

    /// A token whose id or name another token has is left out.
    pub(crate) fn merge_tokens(
        &mut self,
        tokens: &[TokenRecord],
        user: &str,
    ) -> Result<(), StoreError> {
        let existing = self.tokens()?;
        let existing = TokenIndex::new(&existing);
        let note_use = "UPDATE plantstore.tokens SET last_used_at = $2 WHERE id = $1 AND coalesce(last_used_at < $2, TRUE)";
        let mut new = Vec::new();
        for token in tokens {
            let Some(before) = existing.find(token) else {
                new.push(token);
                continue;
            };
            let merged = before.merged_with(token);
            if let Some(event) = TokenEvent::of_merge(before, &merged) {
                self.update_token(&merged, event, user)?;
            } else if merged.last_used_at > before.last_used_at {
                let values: &Values<'_> = &[
                    (&merged.id.0, Type::INT8),
                    (&merged.last_used_at, Type::TIMESTAMPTZ),
                ];
                self.query(note_use, values)?;
            }
        }
        // After those that exist, which may have got other names.
        let insert = format!("{INSERT} ON CONFLICT DO NOTHING RETURNING id");
        let insert = recording(TokenEvent::Copied, &insert, "TRUE");
        for token in new {
            if !self.write_token(token, TokenId::of(&token.digest), &insert, user)? {
                self.wait_for_standby()?;
            }
        }
        Ok(())
    }
}
