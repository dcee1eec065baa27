//! Tokens in PostgreSQL. Each statement can be run again if its response was lost.

use jiff::Timestamp;
use tokio_postgres::types::Type;

use crate::store::error::StoreError;
use crate::store::postgres::{Postgres, Values, rows};
use crate::store::types::{TokenId, TokenRecord};
use crate::token::TokenDigest;

const SELECT: &str = "SELECT id, name, digest, rate_limit, created_at, expires_at, revoked_at, last_used_at FROM plantstore.tokens";

const INSERT: &str = "INSERT INTO plantstore.tokens
    (id, name, digest, rate_limit, created_at, expires_at, revoked_at, last_used_at)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8)";

impl Postgres {
    pub(crate) fn create_token(&mut self, token: &TokenRecord) -> Result<bool, StoreError> {
        // The same digest is this very token, stored by an attempt whose response was lost.
        let on_conflict = "ON CONFLICT (name) DO UPDATE SET name = excluded.name WHERE tokens.digest = excluded.digest";
        let created = self.insert_token(token, on_conflict)?;
        Ok(created == 1)
    }

    fn insert_token(&mut self, token: &TokenRecord, on_conflict: &str) -> Result<u64, StoreError> {
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
        self.execute(&format!("{INSERT} {on_conflict}"), values)
    }

    pub(crate) fn revoke_token(&mut self, name: &str) -> Result<Option<bool>, StoreError> {
        let now = Timestamp::now();
        let sql = "UPDATE plantstore.tokens SET revoked_at = coalesce(revoked_at, $2) WHERE name = $1 RETURNING revoked_at";
        let rows = self.query(sql, &[(&name, Type::TEXT), (&now, Type::TIMESTAMPTZ)])?;
        let revoked_at = rows.first().map(|row| row.get::<_, Timestamp>(0));
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

    pub(crate) fn token(
        &mut self,
        digest: &TokenDigest,
    ) -> Result<Option<TokenRecord>, StoreError> {
        let digest = digest.0.as_slice();
        let rows = self.query(
            &format!("{SELECT} WHERE digest = $1"),
            &[(&digest, Type::BYTEA)],
        )?;
        rows.first().map(rows::token_record).transpose()
    }

    /// A token whose id or name another token has is left out.
    pub(crate) fn merge_tokens(&mut self, tokens: &[TokenRecord]) -> Result<(), StoreError> {
        let update = "UPDATE plantstore.tokens SET
                        revoked_at = CASE WHEN revoked_at < $2 THEN revoked_at ELSE coalesce($2, revoked_at) END,
                        last_used_at = CASE WHEN last_used_at > $3 THEN last_used_at ELSE coalesce($3, last_used_at) END
                      WHERE digest = $1";
        for token in tokens {
            self.insert_token(token, "ON CONFLICT DO NOTHING")?;
            let values: &Values<'_> = &[
                (&token.digest.0.as_slice(), Type::BYTEA),
                (&token.revoked_at, Type::TIMESTAMPTZ),
                (&token.last_used_at, Type::TIMESTAMPTZ),
            ];
            self.execute(update, values)?;
        }
        Ok(())
    }
}
