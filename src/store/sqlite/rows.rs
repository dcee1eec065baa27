//! Rows with their checksums. SQLite has no page checksums and returns whatever the disk has: without a checksum, a replay of a plant
//! that the disk has changed would be a conflict.

use std::sync::LazyLock;

use crc32fast::Hasher;
use jiff::Timestamp;
use rusqlite::types::{FromSql, Type};
use rusqlite::{Error, Row, Statement, params};

use crate::plant::{NewPlant, Plant};
use crate::store::types::{Addition, PlantRecord, PreviousSecret, TokenId, TokenRecord};
use crate::token::TokenDigest;

/// `SELECT` with the columns that `plant` reads.
macro_rules! select_plants {
    ($rest:literal) => {
        concat!(
            "SELECT id, name, tag, added_at, added_by, checksum, batch FROM plants ",
            $rest
        )
    };
}
pub(super) use select_plants;

/// Leaves a plant that exists.
pub(super) const INSERT_PLANT: &str =
    "INSERT INTO plants (id, name, tag, added_at, added_by, checksum, batch)
     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7) ON CONFLICT (id) DO NOTHING";

/// The rows of `INSERT_SEVERAL`. A statement has a fixed cost, which they share.
pub(super) const INSERT_LEN: usize = 16;

/// `INSERT_PLANT` for several rows of one batch. Parameters 1 and 2 are those that the rows have in common.
pub(super) static INSERT_SEVERAL: LazyLock<String> = LazyLock::new(|| {
    let row = |index| {
        let [id, name, tag, added_by, checksum] =
            std::array::from_fn(|column| parameter(index, column));
        format!("(?{id}, ?{name}, ?{tag}, ?1, ?{added_by}, ?{checksum}, ?2)")
    };
    let rows: Vec<_> = (0..INSERT_LEN).map(row).collect();
    format!(
        "INSERT INTO plants (id, name, tag, added_at, added_by, checksum, batch) VALUES {} ON CONFLICT (id) DO NOTHING",
        rows.join(", ")
    )
});

/// The number of a parameter of `INSERT_SEVERAL`.
fn parameter(row: usize, column: usize) -> usize {
    3 + row * 5 + column
}

/// A plant as it is stored.
#[derive(Clone, Copy)]
pub(super) struct PlantRow<'a> {
    pub(super) id: i64,
    pub(super) name: &'a str,
    pub(super) tag: Option<&'a str>,
    pub(super) added_at: i64,
    pub(super) added_by: i64,
    /// The number of the transaction that added it; 0 if it was copied, or stored by an older version.
    pub(super) batch: i64,
}

impl PlantRow<'_> {
    pub(super) fn checksum(&self) -> i32 {
        let mut hasher = Hasher::new();
        number(&mut hasher, self.id);
        text(&mut hasher, Some(self.name.as_bytes()));
        text(&mut hasher, self.tag.map(str::as_bytes));
        number(&mut hasher, self.added_at);
        number(&mut hasher, self.added_by);
        // Rows of older versions have a checksum without it.
        if self.batch != 0 {
            number(&mut hasher, self.batch);
        }
        // SQLite stores a signed 32-bit number in at most four bytes.
        hasher.finalize().cast_signed()
    }
}

impl<'a> PlantRow<'a> {
    pub(super) fn of(addition: &'a Addition, added_at: i64, batch: i64) -> Self {
        let NewPlant { id, plant } = &addition.plant;
        Self {
            id: *id,
            name: &plant.name,
            tag: plant.tag.as_deref(),
            added_at,
            added_by: addition.token.0,
            batch,
        }
    }
}

impl<'a> From<&'a PlantRecord> for PlantRow<'a> {
    fn from(record: &'a PlantRecord) -> Self {
        Self {
            id: record.id,
            name: &record.plant.name,
            tag: record.plant.tag.as_deref(),
            added_at: record.added_at.as_millisecond(),
            added_by: record.added_by.0,
            batch: 0,
        }
    }
}

/// Inserts `INSERT_LEN` rows with their checksums. Returns how many ids were free.
pub(super) fn insert_several<'a>(
    insert: &mut Statement<'_>,
    rows: impl Iterator<Item = PlantRow<'a>>,
) -> Result<usize, Error> {
    for (index, row) in rows.enumerate() {
        if index == 0 {
            insert.raw_bind_parameter(1, row.added_at)?;
            insert.raw_bind_parameter(2, row.batch)?;
        }
        insert.raw_bind_parameter(parameter(index, 0), row.id)?;
        insert.raw_bind_parameter(parameter(index, 1), row.name)?;
        insert.raw_bind_parameter(parameter(index, 2), row.tag)?;
        insert.raw_bind_parameter(parameter(index, 3), row.added_by)?;
        insert.raw_bind_parameter(parameter(index, 4), row.checksum())?;
    }
    insert.raw_execute()
}

/// Inserts a plant with its checksum. Returns 0 if the id is taken.
pub(super) fn insert(insert: &mut Statement<'_>, row: &PlantRow<'_>) -> Result<usize, Error> {
    insert.execute(params![
        row.id,
        row.name,
        row.tag,
        row.added_at,
        row.added_by,
        row.checksum(),
        row.batch
    ])
}

pub(super) fn plant_record(row: &Row<'_>) -> Result<PlantRecord, Error> {
    let found = plant(row).ok_or_else(|| damaged("the checksum of a plant does not match"))?;
    Ok(PlantRecord {
        id: found.id,
        plant: Plant {
            name: found.name.to_owned(),
            tag: found.tag.map(str::to_owned),
        },
        added_at: time(found.added_at)?,
        added_by: TokenId(found.added_by),
    })
}

/// None if its checksum does not match.
pub(super) fn plant<'a>(row: &'a Row<'_>) -> Option<PlantRow<'a>> {
    let number = |column| -> Option<i64> { row.get(column).ok() };
    let plant = PlantRow {
        id: number(0)?,
        name: row.get_ref(1).ok()?.as_str().ok()?,
        tag: row.get_ref(2).ok()?.as_str_or_null().ok()?,
        added_at: number(3)?,
        added_by: number(4)?,
        batch: number(6)?,
    };
    (number(5)? == i64::from(plant.checksum())).then_some(plant)
}

/// The checksum of a token, which leaves out its id and the time of its last use.
pub(super) fn token_checksum(token: &TokenRecord) -> i32 {
    let mut hasher = Hasher::new();
    text(&mut hasher, Some(token.name.as_bytes()));
    text(&mut hasher, Some(&token.digest.0));
    number(&mut hasher, token.created_at.as_millisecond());
    let optional = [
        token.rate_limit.map(i64::from),
        token.expires_at.map(Timestamp::as_millisecond),
        token.revoked_at.map(Timestamp::as_millisecond),
    ];
    for value in optional {
        hasher.update(&[u8::from(value.is_some())]);
        number(&mut hasher, value.unwrap_or_default());
    }
    // Rows of older versions have a checksum without it.
    if let Some(rotated_at) = token.rotated_at {
        let previous = token.previous_secret;
        number(&mut hasher, rotated_at.as_millisecond());
        text(
            &mut hasher,
            previous.as_ref().map(|secret| &secret.digest.0[..]),
        );
        let expires_at = previous.map_or(0, |secret| secret.expires_at.as_millisecond());
        number(&mut hasher, expires_at);
    }
    hasher.finalize().cast_signed()
}

/// Reads a row of `SELECT *`, and verifies its checksum.
pub(super) fn token(row: &Row<'_>) -> Result<TokenRecord, Error> {
    let optional_time = |column: &str| -> Result<Option<Timestamp>, Error> {
        let milliseconds: Option<i64> = added_column(row, column)?;
        milliseconds.map(time).transpose()
    };
    let previous_digest: Option<[u8; 32]> = added_column(row, "previous_digest")?;
    let previous_expires_at = optional_time("previous_expires_at")?;
    let previous_secret = previous_digest.zip(previous_expires_at);
    let token = TokenRecord {
        id: TokenId(row.get("id")?),
        name: row.get("name")?,
        digest: TokenDigest(row.get("digest")?),
        rate_limit: row.get("rate_limit")?,
        created_at: time(row.get("created_at")?)?,
        expires_at: optional_time("expires_at")?,
        revoked_at: optional_time("revoked_at")?,
        last_used_at: optional_time("last_used_at")?,
        rotated_at: optional_time("rotated_at")?,
        previous_secret: previous_secret.map(|(digest, expires_at)| PreviousSecret {
            digest: TokenDigest(digest),
            expires_at,
        }),
    };
    if row.get::<_, i32>("checksum")? != token_checksum(&token) {
        return Err(damaged("the checksum of a token does not match"));
    }
    Ok(token)
}

/// None if the column is missing: a backup of an older version is read as it is.
pub(super) fn added_column<T: FromSql>(row: &Row<'_>, name: &str) -> Result<Option<T>, Error> {
    match row.get(name) {
        Err(Error::InvalidColumnName(_)) => Ok(None),
        value => value,
    }
}

pub(super) fn time(milliseconds: i64) -> Result<Timestamp, Error> {
    Timestamp::from_millisecond(milliseconds).map_err(damaged)
}

fn damaged(reason: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::FromSqlConversionFailure(0, Type::Null, reason.into())
}

fn number(hasher: &mut Hasher, number: i64) {
    hasher.update(&number.to_le_bytes());
}

/// Adds a text after its length, so that no two rows have the same bytes. The length of a missing text differs from that of an empty one.
fn text(hasher: &mut Hasher, text: Option<&[u8]>) {
    let len = text.map_or(u64::MAX, |text| text.len() as u64);
    hasher.update(&len.to_le_bytes());
    hasher.update(text.unwrap_or_default());
}
