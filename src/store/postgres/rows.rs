//! Rows of PostgreSQL as records. PostgreSQL text holds any character but U+0000, so that is stored as U+001A '0', and U+001A itself
//! as U+001A '1'; every other text is stored as it is.

use std::borrow::Cow;
use std::fmt;

use jiff::Timestamp;
use tokio_postgres::Row;
use tokio_postgres::row::RowIndex;
use tokio_postgres::types::FromSql;

use crate::plant::Plant;
use crate::store::error::{Failure, StoreError};
use crate::store::types::{PlantRecord, PreviousSecret, TokenId, TokenRecord};
use crate::token::TokenDigest;

/// The columns that `plant_record` reads.
pub(super) const PLANT_COLUMNS: &str = "id, name, tag, added_at, added_by";

pub(super) fn plant_record(row: &Row) -> Result<PlantRecord, StoreError> {
    let decode = |stored| {
        decode(stored).ok_or_else(|| {
            Failure::Damaged.because("a plant has text that plantstore did not write")
        })
    };
    let tag: Option<&str> = value(row, 2)?;
    Ok(PlantRecord {
        id: value(row, 0)?,
        plant: Plant {
            name: decode(value(row, 1)?)?,
            tag: tag.map(decode).transpose()?,
        },
        added_at: to_the_millisecond(value(row, 3)?),
        added_by: TokenId(value(row, 4)?),
    })
}

pub(super) fn token_record(row: &Row) -> Result<TokenRecord, StoreError> {
    let damaged = || Failure::Damaged.because("a token has text that plantstore did not write");
    let digest: &[u8] = value(row, "digest")?;
    let digest = digest.try_into().map_err(|_| damaged())?;
    let rate_limit: Option<i64> = value(row, "rate_limit")?;
    let rate_limit = rate_limit.map(u32::try_from);
    let time = |column| {
        let time: Option<Timestamp> = value(row, column)?;
        Ok::<_, StoreError>(time.map(to_the_millisecond))
    };
    let previous_digest: Option<&[u8]> = value(row, "previous_digest")?;
    let previous_digest = previous_digest.map(TryInto::try_into).transpose();
    let previous_digest = previous_digest.map_err(|_| damaged())?;
    let previous_secret = previous_digest.zip(time("previous_expires_at")?);
    Ok(TokenRecord {
        id: TokenId(value(row, "id")?),
        name: value::<&str>(row, "name")?.into(),
        digest: TokenDigest(digest),
        rate_limit: rate_limit.transpose().map_err(|_| damaged())?,
        created_at: to_the_millisecond(value(row, "created_at")?),
        expires_at: time("expires_at")?,
        revoked_at: time("revoked_at")?,
        last_used_at: time("last_used_at")?,
        rotated_at: time("rotated_at")?,
        previous_secret: previous_secret.map(|(digest, expires_at)| PreviousSecret {
            digest: TokenDigest(digest),
            expires_at,
        }),
    })
}

/// A value of a row. One that plantstore cannot have written, such as the time `infinity`, is damage.
pub(super) fn value<'a, T: FromSql<'a>>(
    row: &'a Row,
    column: impl RowIndex + fmt::Display,
) -> Result<T, StoreError> {
    let value = row.try_get(column);
    value.map_err(|error| Failure::Damaged.because(error))
}

/// Records have milliseconds, as in SQLite.
fn to_the_millisecond(time: Timestamp) -> Timestamp {
    Timestamp::from_millisecond(time.as_millisecond()).unwrap_or(time)
}

const ESCAPE: char = '\u{1a}';

/// The text as it is stored.
pub(super) fn encode(text: &str) -> Cow<'_, str> {
    if !text.contains(['\0', ESCAPE]) {
        return Cow::Borrowed(text);
    }
    let escaped = text.replace(ESCAPE, "\u{1a}1");
    Cow::Owned(escaped.replace('\0', "\u{1a}0"))
}

/// The text that was stored; none if it was not stored by plantstore.
pub(super) fn decode(stored: &str) -> Option<String> {
    let mut parts = stored.split(ESCAPE);
    let mut text = parts.next()?.to_owned();
    for part in parts {
        text.push(match part.chars().next()? {
            '0' => '\0',
            '1' => ESCAPE,
            _ => return None,
        });
        text.push_str(&part[1..]);
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_people_write_is_stored_as_it_is() {
        for text in [
            "",
            "Monstera",
            "Ficus \"lyrata\"",
            "C:\\plants",
            "🌱\u{301}",
        ] {
            assert_eq!(encode(text), text);
        }
    }

    proptest! {
        #[test]
        fn every_string_comes_back_and_none_holds_a_nul(text in "[\0\u{1a}01a🌱]*") {
            let stored = encode(&text);
            prop_assert!(!stored.contains('\0'));
            let back = decode(&stored);
            prop_assert_eq!(back.as_deref(), Some(&*text));
        }
    }
}
