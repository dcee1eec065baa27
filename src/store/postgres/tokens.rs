//! Tokens in PostgreSQL: each statement can be run again when its answer was lost.

use jiff::Timestamp;

use crate::store::error::StoreError;
use crate::store::postgres::client::Param;
use crate::store::postgres::retry::Link;
use crate::store::postgres::rows;
use crate::store::types::{NewToken, TokenRecord};
use crate::token::TokenDigest;

impl Link {
    /// Keeps a new token. False when the name is taken.
    pub async fn create_token(&mut self, token: &NewToken<'_>) -> Result<bool, StoreError> {
        let id = number(&token.digest);
        let rate_limit = token.rate_limit.map(i64::from);
        let now = Timestamp::now();
        // The same digest is this very token, stored by an attempt whose answer was lost.
        let sql =
            "INSERT INTO plantstore.tokens (id, name, digest, rate_limit, created_at, expires_at)
                   VALUES ($1, $2, $3, $4, $5, $6)
                   ON CONFLICT (name) DO UPDATE SET name = excluded.name
                   WHERE tokens.digest = excluded.digest";
        let digest: &[u8] = token.digest.as_bytes();
        let created = self.until_known(async |session| {
            let values: [&dyn Param; 6] = [
                &id,
                &token.name,
                &digest,
                &rate_limit,
                &now,
                &token.expires_at,
            ];
            session.client.execute(sql, &values).await
        });
        Ok(created.await? == 1)
    }

    /// Revokes a token for good. `None` when there is none of that name, `Some(false)` when it was
    /// revoked before.
    pub async fn revoke_token(&mut self, name: &str) -> Result<Option<bool>, StoreError> {
        let now = Timestamp::now();
        let sql = "UPDATE plantstore.tokens SET revoked_at = coalesce(revoked_at, $2) WHERE name = $1 RETURNING revoked_at";
        let row =
            self.until_known(async |session| session.client.query_opt(sql, &[&name, &now]).await);
        let revoked_at = row.await?.map(|row| row.get::<_, Timestamp>(0));
        Ok(revoked_at.map(|time| time.as_microsecond() == now.as_microsecond()))
    }

    /// Whether there is any token, revoked ones included.
    pub async fn has_tokens(&mut self) -> Result<bool, StoreError> {
        let sql = "SELECT EXISTS (SELECT 1 FROM plantstore.tokens)";
        let row = self.until_known(async |session| session.client.query_one(sql, &[]).await);
        Ok(row.await?.get(0))
    }

    /// Every token, oldest first.
    pub async fn tokens(&mut self) -> Result<Vec<TokenRecord>, StoreError> {
        let sql =
            "SELECT id, name, digest, rate_limit, created_at, expires_at, revoked_at, last_used_at
                   FROM plantstore.tokens ORDER BY created_at, id";
        let rows = self.until_known(async |session| session.client.query(sql, &[]).await);
        rows.await?.iter().map(rows::token_record).collect()
    }

    /// The token with this digest.
    pub async fn token(&mut self, digest: &TokenDigest) -> Result<Option<TokenRecord>, StoreError> {
        let digest: &[u8] = digest.as_bytes();
        let sql =
            "SELECT id, name, digest, rate_limit, created_at, expires_at, revoked_at, last_used_at
                   FROM plantstore.tokens WHERE digest = $1";
        let row = self.until_known(async |session| session.client.query_opt(sql, &[&digest]).await);
        row.await?.as_ref().map(rows::token_record).transpose()
    }
}

/// The number of a token: positive, and unlike any other, as its digest is.
fn number(digest: &TokenDigest) -> i64 {
    let (first, _) = digest.as_bytes().split_at(8);
    i64::from_be_bytes(first.try_into().expect("8 bytes")) & i64::MAX
}
