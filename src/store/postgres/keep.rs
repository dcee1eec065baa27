//! Plants and tokens of another store, kept as they are: with who added them, and when.

use crate::store::error::StoreError;
use crate::store::postgres::client::Param;
use crate::store::postgres::retry::Link;
use crate::store::postgres::text;
use crate::store::types::{PlantRecord, TokenRecord};

impl Link {
    /// Keeps plants as they are; leaves what is there.
    pub async fn insert_plants(&mut self, plants: &[PlantRecord]) -> Result<(), StoreError> {
        let column = |value: fn(&PlantRecord) -> i64| plants.iter().map(value).collect::<Vec<_>>();
        let (ids, tokens) = (column(|plant| plant.id), column(|plant| plant.added_by.0));
        let times: Vec<_> = plants.iter().map(|plant| plant.added_at).collect();
        let names: Vec<_> = plants
            .iter()
            .map(|plant| text::stored(&plant.plant.name))
            .collect();
        let tag = |plant: &PlantRecord| {
            plant
                .plant
                .tag
                .as_deref()
                .map(|tag| text::stored(tag).into_owned())
        };
        let tags: Vec<_> = plants.iter().map(tag).collect();
        let sql = "INSERT INTO plantstore.plants (id, name, tag, added_at, added_by)
                   SELECT * FROM unnest($1::BIGINT[], $2::TEXT[], $3::TEXT[], $4::TIMESTAMPTZ[], $5::BIGINT[])
                   ON CONFLICT (id) DO NOTHING";
        let kept = self.until_known(async |session| {
            let values: [&dyn Param; 5] = [&ids, &names, &tags, &times, &tokens];
            session.client.execute(sql, &values).await
        });
        kept.await.map(drop)
    }

    /// Inserts tokens, and merges the state of those that are there already by their digest. One whose id or name another
    /// token has is left out. Each statement can be run again when its reply was lost.
    pub async fn merge_tokens(&mut self, tokens: &[TokenRecord]) -> Result<(), StoreError> {
        for token in tokens {
            let insert = "INSERT INTO plantstore.tokens
                            (id, name, digest, rate_limit, created_at, expires_at, revoked_at, last_used_at)
                          VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
                          ON CONFLICT DO NOTHING";
            let update = "UPDATE plantstore.tokens SET
                            revoked_at = CASE WHEN revoked_at < $2 THEN revoked_at ELSE coalesce($2, revoked_at) END,
                            last_used_at = CASE WHEN last_used_at > $3 THEN last_used_at ELSE coalesce($3, last_used_at) END
                          WHERE digest = $1";
            let digest: &[u8] = token.digest.as_bytes();
            let rate_limit = token.rate_limit.map(i64::from);
            let inserted = self.until_known(async |session| {
                let values: [&dyn Param; 8] = [
                    &token.id.0,
                    &&*token.name,
                    &digest,
                    &rate_limit,
                    &token.created_at,
                    &token.expires_at,
                    &token.revoked_at,
                    &token.last_used_at,
                ];
                session.client.execute(insert, &values).await
            });
            inserted.await?;
            let updated = self.until_known(async |session| {
                let values: [&dyn Param; 3] = [&digest, &token.revoked_at, &token.last_used_at];
                session.client.execute(update, &values).await
            });
            updated.await?;
        }
        Ok(())
    }
}
