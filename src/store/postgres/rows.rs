//! Rows of PostgreSQL as records.

use jiff::Timestamp;
use tokio_postgres::Row;

use crate::plant::Plant;
use crate::store::error::StoreError;
use crate::store::postgres::text;
use crate::store::types::{PlantRecord, TokenId, TokenRecord};
use crate::token::TokenDigest;

/// Of `id, name, tag, added_at, added_by`.
pub fn plant_record(row: &Row) -> Result<PlantRecord, StoreError> {
    let (id, plant) = plant(row)?;
    Ok(PlantRecord {
        id,
        plant,
        added_at: to_the_millisecond(row.get(3)),
        added_by: TokenId(row.get(4)),
    })
}

/// Of `id, name, tag`.
pub fn plant(row: &Row) -> Result<(i64, Plant), StoreError> {
    let original = |stored: &str| match text::original(stored) {
        Some(text) => Ok(text.into_owned()),
        None => Err(StoreError::Damaged("a plant is not what was stored".into())),
    };
    let tag: Option<&str> = row.get(2);
    let plant = Plant {
        name: original(row.get(1))?,
        tag: tag.map(original).transpose()?,
    };
    Ok((row.get(0), plant))
}

/// Of all columns, by name.
pub fn token_record(row: &Row) -> Result<TokenRecord, StoreError> {
    let damaged = || StoreError::Damaged("a token is not what was stored".into());
    let digest: &[u8] = row.get("digest");
    let digest = digest.try_into().map_err(|_| damaged())?;
    let rate_limit: Option<i64> = row.get("rate_limit");
    let time = |column| {
        row.get::<_, Option<Timestamp>>(column)
            .map(to_the_millisecond)
    };
    Ok(TokenRecord {
        id: TokenId(row.get("id")),
        name: row.get::<_, &str>("name").into(),
        digest: TokenDigest::from_bytes(digest),
        rate_limit: rate_limit
            .map(|limit| u32::try_from(limit).map_err(|_| damaged()))
            .transpose()?,
        created_at: to_the_millisecond(row.get("created_at")),
        expires_at: time("expires_at"),
        revoked_at: time("revoked_at"),
        last_used_at: time("last_used_at"),
    })
}

/// As precise as records are.
fn to_the_millisecond(time: Timestamp) -> Timestamp {
    Timestamp::from_millisecond(time.as_millisecond()).unwrap_or(time)
}
