//! Reading plants from PostgreSQL: pages, exports, statistics, and `plantstore check`.

use std::collections::HashMap;
use std::future::Future;
use std::ops::ControlFlow;
use std::time::Duration;

use futures_util::{StreamExt, TryStreamExt};
use jiff::Timestamp;
use tokio::time::timeout;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::Type;
use tokio_postgres::{Client, Error, Row};

use crate::store::error::{Failure, StoreError};
use crate::store::postgres::rows::{PLANT_COLUMNS, decode, encode, plant_record, value};
use crate::store::postgres::{Postgres, Values};
use crate::store::query::{
    Cursor, Filter, Statistics, TAGS_MAX, TIME_MAX, TIME_MIN, TagCount, TagFilter,
};
use crate::store::types::{
    Checked, DamagedPlant, Finding, PAGE_BYTES_MAX, PAGE_LEN_MAX, PlantRecord, next_id,
};

/// With `{fence}` empty, along the index. With OFFSET 0, the engine cannot expect to find enough plants soon by walking along the
/// index, which would take very long for a rare tag. `translate` folds ASCII letters only, in every locale; `encode_part`
/// explains `$7` and `$8`.
const FIND: &str = "
    SELECT added_at, id FROM (
      SELECT added_at, id FROM plantstore.plants
      WHERE added_at >= $1 AND (added_at, id) < ($2, $3::BIGINT)
        AND ($5::TEXT IS NULL OR tag = $5) AND (NOT $6 OR tag IS NULL)
        AND ($7::TEXT IS NULL OR strpos(replace(
              translate(name, 'ABCDEFGHIJKLMNOPQRSTUVWXYZ', 'abcdefghijklmnopqrstuvwxyz'), $8, repeat(chr(26), 2)), $7) > 0)
      {fence}
    ) AS found
    ORDER BY added_at DESC, id DESC LIMIT $4::BIGINT";

/// The damaged plants that one statement of a check reads.
const CHECK_LEN: u32 = 1000;

const COUNTS: &str =
    "SELECT count(*), count(tag), (SELECT count(*) FROM plantstore.tokens) FROM plantstore.plants";

const COUNTS_BY_TAG: &str = "
    SELECT tag, count(*) FROM plantstore.plants WHERE tag IS NOT NULL
    GROUP BY tag ORDER BY count(*) DESC, min(id) LIMIT $1::BIGINT";

const COUNTS_BY_DAY: &str = "
    SELECT floor(extract(epoch FROM added_at) / 86400)::BIGINT, count(*) FROM plantstore.plants WHERE added_at >= $1 GROUP BY 1";

const SIZE: &str = "SELECT (pg_total_relation_size('plantstore.plants') + pg_total_relation_size('plantstore.tokens'))::BIGINT";

impl Postgres {
    pub(crate) fn count_plants(&mut self) -> Result<u64, StoreError> {
        let row = self.query_one("SELECT count(*) FROM plantstore.plants", &[])?;
        Ok(count(&row, 0))
    }

    pub(crate) fn last_id(&mut self) -> Result<Option<i64>, StoreError> {
        let row = self.query_one("SELECT max(id) FROM plantstore.plants", &[])?;
        Ok(row.get(0))
    }

    pub(crate) fn plants(&mut self, first: i64) -> Result<Vec<PlantRecord>, StoreError> {
        let rows = self.run(async |session| select_page(&session.client, first).await)?;
        rows.iter().map(plant_record).collect()
    }

    pub(crate) fn get(
        &mut self,
        ids: &[i64],
    ) -> Result<Vec<Result<PlantRecord, DamagedPlant>>, StoreError> {
        let sql = format!("SELECT {PLANT_COLUMNS} FROM plantstore.plants WHERE id = ANY($1)");
        let rows = self.query(&sql, &[(&ids, Type::INT8_ARRAY)])?;
        let plant = |row: &Row| {
            let id = row.get(0);
            (id, plant_record(row).map_err(|_| DamagedPlant { id }))
        };
        let mut plants: HashMap<i64, _> = rows.iter().map(plant).collect();
        Ok(ids.iter().filter_map(|id| plants.remove(id)).collect())
    }

    pub(crate) fn find(
        &mut self,
        filter: &Filter,
        before: Cursor,
        limit: u32,
        _: &mut dyn FnMut(usize),
    ) -> Result<Vec<Cursor>, StoreError> {
        let (since, until) = filter.time_range();
        let (before, before_id) = (before.microsecond, before.id).min((until, i64::MIN));
        let [since, before] = [since, before]
            .map(|time| Timestamp::from_microsecond(time).expect("clamped to valid times"));
        let (tag, is_untagged) = match &filter.tag {
            Some(TagFilter::Equals(tag)) => (Some(encode(tag)), false),
            Some(TagFilter::Untagged) => (None, true),
            None => (None, false),
        };
        let part = filter.name_contains.as_deref().map(encode_part);
        let (part, escape) = part.unzip();
        let values: &Values<'_> = &[
            (&since, Type::TIMESTAMPTZ),
            (&before, Type::TIMESTAMPTZ),
            (&before_id, Type::INT8),
            (&i64::from(limit), Type::INT8),
            (&tag, Type::TEXT),
            (&is_untagged, Type::BOOL),
            (&part, Type::TEXT),
            (&escape.unwrap_or_default(), Type::TEXT),
        ];
        let fence = if filter.is_by_time() { "" } else { "OFFSET 0" };
        let sql = FIND.replace("{fence}", fence);
        self.run(async |session| {
            let rows = session
                .client
                .query_typed_raw(&sql, values.iter().cloned())
                .await?;
            let cursor = |row: Row| {
                let time: Timestamp = row.try_get(0)?;
                Ok(Cursor {
                    batch: 0,
                    microsecond: time.as_microsecond(),
                    id: row.try_get(1)?,
                })
            };
            rows.map(|row| row.and_then(cursor)).try_collect().await
        })
    }

    pub(crate) fn statistics(
        &mut self,
        now: Timestamp,
        _: &mut dyn FnMut(usize),
    ) -> Result<Statistics, StoreError> {
        let mut all = Statistics::until(now);
        let row = self.query_one(COUNTS, &[])?;
        all.plants = count(&row, 0);
        all.untagged = all.plants.saturating_sub(count(&row, 1));
        all.tokens = count(&row, 2);
        let mut tags = Vec::new();
        for row in self.query(COUNTS_BY_TAG, &[(&i64::from(TAGS_MAX), Type::INT8)])? {
            let tag = decode(row.get(0));
            tags.push(TagCount {
                tag: tag.ok_or_else(|| {
                    Failure::Damaged.because("a tag has text that plantstore did not write")
                })?,
                plants: count(&row, 1),
            });
        }
        all.set_tags(tags);
        let first_day = all.first_day_start();
        for row in self.query(COUNTS_BY_DAY, &[(&first_day, Type::TIMESTAMPTZ)])? {
            all.count_day(value(&row, 0)?, count(&row, 1));
        }
        all.database_bytes = self.size()?;
        Ok(all)
    }

    /// The size of plants and tokens on disk with their indexes; none if the engine does not tell.
    fn size(&mut self) -> Result<Option<u64>, StoreError> {
        let size = self.run(async |session| {
            let row = session.client.query_typed_one(SIZE, &[]).await;
            match row.as_ref().map_err(Error::code) {
                Err(Some(&(SqlState::UNDEFINED_FUNCTION | SqlState::FEATURE_NOT_SUPPORTED))) => {
                    Ok(None)
                }
                _ => row.map(|row| row.get::<_, Option<i64>>(0)),
            }
        })?;
        Ok(size.and_then(|size| u64::try_from(size).ok()))
    }

    /// Reads in one transaction, which ends if its connection is lost, so nothing is retried.
    pub(crate) fn export(
        &mut self,
        visit: &mut dyn FnMut(&[PlantRecord]) -> ControlFlow<()>,
    ) -> Result<(), StoreError> {
        self.block_on(async |client| {
            let time_limit = client.timeout;
            let session = match timeout(time_limit, client.session()).await {
                Ok(session) => session.map_err(|error| Failure::Unavailable.because(error))?,
                Err(elapsed) => return Err(Failure::Unavailable.because(elapsed)),
            };
            let exported = export(&session.client, time_limit, visit).await;
            client.session = None; // ends the transaction
            exported
        })
    }

    pub(crate) fn check(&mut self, report: &mut dyn FnMut(Finding)) -> Result<Checked, StoreError> {
        let sql = format!(
            "SELECT plants.id, 'plant ' || plants.id::TEXT || CASE
               WHEN tokens.id IS NULL THEN ': added by token ' || added_by::TEXT || ', which does not exist'
               WHEN added_at NOT BETWEEN $3 AND $4 THEN ': a time that plantstore did not write'
               ELSE ': text that plantstore did not write'
             END
             FROM plantstore.plants LEFT JOIN plantstore.tokens ON tokens.id = plants.added_by
             WHERE plants.id >= $1
               AND (tokens.id IS NULL OR plants.name ~ $2 OR plants.tag ~ $2 OR added_at NOT BETWEEN $3 AND $4)
             ORDER BY plants.id LIMIT {CHECK_LEN}"
        );
        let invalid_escape = "\u{1a}([^01]|$)";
        let [earliest, latest] = [TIME_MIN, TIME_MAX]
            .map(|time| Timestamp::from_microsecond(time).expect("they are valid"));
        let mut next = Some(i64::MIN);
        while let Some(first) = next {
            let values: &Values<'_> = &[
                (&first, Type::INT8),
                (&invalid_escape, Type::TEXT),
                (&earliest, Type::TIMESTAMPTZ),
                (&latest, Type::TIMESTAMPTZ),
            ];
            let rows = self.query(&sql, values)?;
            next = rows
                .last()
                .and_then(|row| row.get::<_, i64>(0).checked_add(1));
            for row in rows {
                report(Finding::Problem(row.get(1)));
            }
        }
        for problem in self.damaged_tokens()? {
            report(Finding::Problem(problem));
        }
        let row = self.query_one(COUNTS, &[])?;
        Ok(Checked {
            plants: count(&row, 0),
            tokens: count(&row, 2),
        })
    }
}

async fn export(
    client: &Client,
    time_limit: Duration,
    visit: &mut dyn FnMut(&[PlantRecord]) -> ControlFlow<()>,
) -> Result<(), StoreError> {
    let begin = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY";
    within(time_limit, client.batch_execute(begin)).await?;
    let mut next = Some(i64::MIN);
    while let Some(first) = next {
        let rows = within(time_limit, select_page(client, first)).await?;
        let page = rows.iter().map(plant_record);
        let page = page.collect::<Result<Vec<_>, _>>()?;
        next = next_id(&page);
        if visit(&page).is_break() {
            break;
        }
    }
    Ok(())
}

async fn within<T>(
    time_limit: Duration,
    statement: impl Future<Output = Result<T, Error>>,
) -> Result<T, StoreError> {
    match timeout(time_limit, statement).await {
        Ok(result) => result.map_err(|error| Failure::Unavailable.because(error)),
        Err(elapsed) => Err(Failure::Unavailable.because(elapsed)),
    }
}

/// The rows of a page. The database limits its size, so that nothing beyond it is sent.
async fn select_page(client: &Client, first: i64) -> Result<Vec<Row>, Error> {
    let sql = format!(
        "SELECT {PLANT_COLUMNS} FROM (
           SELECT candidates.*, sum(bytes) OVER (ORDER BY id) - bytes AS bytes_before FROM (
             SELECT {PLANT_COLUMNS}, octet_length(name) + coalesce(octet_length(tag), 0) AS bytes
             FROM plantstore.plants WHERE id >= $1 ORDER BY id LIMIT {PAGE_LEN_MAX}
           ) AS candidates
         ) AS page
         WHERE bytes_before < {PAGE_BYTES_MAX} ORDER BY id"
    );
    client.query_typed(&sql, &[(&first, Type::INT8)]).await
}

fn count(row: &Row, column: usize) -> u64 {
    u64::try_from(row.get::<_, i64>(column)).unwrap_or_default()
}

/// Encodes the text of a name filter for `FIND`: `$7` is the text in lower case and escaped as in a stored name, `$8` an escape to
/// replace. A stored escape ends with the digit 0 or 1, which a text that begins with the same digit must not match. So that escape is
/// replaced by two escape characters, in the text here and in the stored name by `FIND`.
fn encode_part(part: &str) -> (String, String) {
    let part = encode(&part.to_ascii_lowercase()).into_owned();
    match part.chars().next() {
        Some(digit @ ('0' | '1')) => {
            let escape = format!("\u{1a}{digit}");
            (part.replace(&escape, "\u{1a}\u{1a}"), escape)
        }
        _ => (part, "\u{1a}\u{1a}".to_owned()), // replaces nothing
    }
}
