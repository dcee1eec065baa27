//! Tokens in PostgreSQL. Each statement can be run again if its response was lost. What happens to a token is recorded in the same
//! statement.

use jiff::Timestamp;
use tokio_postgres::types::Type;

use crate::store::error::StoreError;
use crate::store::postgres::{Postgres, Values, rows};
use crate::store::types::{TokenChanges, TokenEvent, TokenId, TokenRecord};

const SELECT: &str = "SELECT id, name, digest, rate_limit, created_at, expires_at, revoked_at, last_used_at FROM plantstore.tokens";

const LAST_EVENT: &str = "SELECT coalesce(max(number), 0) FROM plantstore.token_events";

const INSERT: &str = "INSERT INTO plantstore.tokens
    (id, name, digest, rate_limit, created_at, expires_at, revoked_at, last_used_at)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8)";

/// A statement that changes a token, returns its id, and records the event if `is_new`, which sees the table as it was before the
/// statement. Of two that run at the same time, one finds its number taken and is run again: numbers are in the order of the commits.
fn recording(event: TokenEvent, change: &str, is_new: &str) -> String {
    let event = event.name();
    format!(
        "WITH changed AS ({change}), recorded AS (
           INSERT INTO plantstore.token_events (number, token, event, at)
           SELECT ({LAST_EVENT}) + 1, id, '{event}', now() FROM changed WHERE {is_new}
         )
         SELECT * FROM changed"
    )
}

impl Postgres {
    pub(crate) fn create_token(&mut self, token: &TokenRecord) -> Result<bool, StoreError> {
        // The same digest is this very token, stored by an attempt whose response was lost.
        let insert = format!(
            "{INSERT} ON CONFLICT (name) DO UPDATE SET name = excluded.name WHERE tokens.digest = excluded.digest RETURNING id"
        );
        let is_new = "NOT EXISTS (SELECT 1 FROM plantstore.tokens WHERE digest = $3)";
        self.insert_token(token, &recording(TokenEvent::Created, &insert, is_new))
    }

    /// True if the statement returns a row.
    fn insert_token(&mut self, token: &TokenRecord, sql: &str) -> Result<bool, StoreError> {
        let values: &Values<'_> = &[
            (&TokenId::of(&token.digest).0, Type::INT8),
            (&&*token.name, Type::TEXT),
            (&token.digest.0.as_slice(), Type::BYTEA),
            (&token.rate_limit.map(i64::from), Type::INT8),
            (&token.created_at, Type::TIMESTAMPTZ),
            (&token.expires_at, Type::TIMESTAMPTZ),
            (&token.revoked_at, Type::TIMESTAMPTZ),
            (&token.last_used_at, Type::TIMESTAMPTZ),
        ];
        Ok(!self.query(sql, values)?.is_empty())
    }

    pub(crate) fn revoke_token(&mut self, name: &str) -> Result<Option<bool>, StoreError> {
        let now = Timestamp::now();
        let revoke = "UPDATE plantstore.tokens SET revoked_at = coalesce(revoked_at, $2) WHERE name = $1 RETURNING id, revoked_at";
        let is_new = "NOT EXISTS (SELECT 1 FROM plantstore.tokens WHERE name = $1 AND revoked_at IS NOT NULL)";
        let sql = recording(TokenEvent::Revoked, revoke, is_new);
        let rows = self.query(&sql, &[(&name, Type::TEXT), (&now, Type::TIMESTAMPTZ)])?;
        let revoked_at = rows.first().map(|row| row.get::<_, Timestamp>(1));
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
    pub(crate) fn merge_tokens(&mut self, tokens: &[TokenRecord]) -> Result<(), StoreError> {
        let insert = format!("{INSERT} ON CONFLICT DO NOTHING RETURNING id");
        let insert = recording(TokenEvent::Copied, &insert, "TRUE");
        let update = "UPDATE plantstore.tokens SET
                        revoked_at = CASE WHEN revoked_at < $2 THEN revoked_at ELSE coalesce($2, revoked_at) END,
                        last_used_at = CASE WHEN last_used_at > $3 THEN last_used_at ELSE coalesce($3, last_used_at) END
                      WHERE digest = $1
                      RETURNING id";
        let is_new = "$2 IS NOT NULL
                      AND EXISTS (SELECT 1 FROM plantstore.tokens WHERE digest = $1 AND revoked_at IS NULL)";
        let update = recording(TokenEvent::Revoked, update, is_new);
        for token in tokens {
            self.insert_token(token, &insert)?;
            let values: &Values<'_> = &[
                (&token.digest.0.as_slice(), Type::BYTEA),
                (&token.revoked_at, Type::TIMESTAMPTZ),
                (&token.last_used_at, Type::TIMESTAMPTZ),
            ];
            self.query(&update, values)?;
        }
        Ok(())
    }
}
