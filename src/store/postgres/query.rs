//! Reading plants from PostgreSQL: pages, exports, statistics, and `plantstore check`.

use std::collections::HashMap;
use std::future::Future;
use std::ops::{ControlFlow, RangeInclusive};
use std::pin::pin;
use std::time::Duration;

use futures_util::{StreamExt, TryStreamExt};
use jiff::Timestamp;
use tokio::time::timeout;
use tokio_postgres::error::SqlState;
use tokio_postgres::{Error, Row};

use crate::store::error::StoreError;
use crate::store::postgres::Postgres;
use crate::store::postgres::client::{Client, Param};
use crate::store::postgres::rows::{PLANT_COLUMNS, decode, encode, plant_record};
use crate::store::query::{Cursor, Days, Filter, Statistics, TAGS_MAX, Walk};
use crate::store::types::{Checked, Finding, Found, Page, PlantRecord};

/// What is wanted is tested on those that are read, so that no plan can make it read more.
const WALK: &str = "
    SELECT added_at, id, ($5::TEXT IS NULL OR coalesce(tag = $5, FALSE)) AND ($6::TEXT IS NULL OR strpos(name, $6) > 0)
    FROM plantstore.plants
    WHERE added_at >= $1 AND (added_at, id) < ($2, $3::BIGINT)
    ORDER BY added_at DESC, id DESC LIMIT $4::BIGINT";

/// Without OFFSET the engine could walk along the index here too, in the hope of finding enough of them soon.
const SEARCH: &str = "
    SELECT added_at, id FROM (
      SELECT added_at, id FROM plantstore.plants
      WHERE added_at >= $1 AND (added_at, id) < ($2, $3::BIGINT)
        AND ($5::TEXT IS NULL OR tag = $5) AND ($6::TEXT IS NULL OR strpos(name, $6) > 0)
      OFFSET 0
    ) AS found
    ORDER BY added_at DESC, id DESC LIMIT $4::BIGINT";

/// The plants that one statement of an export reads: some servers end statements that take long.
const EXPORT_LEN: i64 = 10_000;

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

    pub(crate) fn plants(
        &mut self,
        ids: &RangeInclusive<i64>,
        limit: u32,
    ) -> Result<Vec<PlantRecord>, StoreError> {
        let sql = format!(
            "SELECT {PLANT_COLUMNS} FROM plantstore.plants WHERE id BETWEEN $1 AND $2 ORDER BY id LIMIT $3"
        );
        let rows = self.query(&sql, &[ids.start(), ids.end(), &i64::from(limit)])?;
        rows.iter().map(plant_record).collect()
    }

    pub(crate) fn walk(&mut self, wanted: &Filter, len: u32) -> Result<Walk, StoreError> {
        let values = Values::of(wanted, len);
        let rows = self.query(WALK, &values.all())?;
        let looked_at = rows.len() as u64;
        let all_read = looked_at < u64::from(len);
        Ok(Walk {
            looked_at,
            last: rows.last().filter(|_| !all_read).map(place),
            found: rows.iter().filter(|row| row.get(2)).map(place).collect(),
        })
    }

    pub(crate) fn search(
        &mut self,
        wanted: &Filter,
        len: u32,
        _: &mut dyn FnMut(usize),
    ) -> Result<Vec<Cursor>, StoreError> {
        let values = Values::of(wanted, len);
        self.run(async |session| {
            let rows = session.client.query_raw(SEARCH, &values.all()).await?;
            rows.map_ok(|row| place(&row)).try_collect().await
        })
    }

    pub(crate) fn found(&mut self, ids: &[i64]) -> Result<Vec<Found>, StoreError> {
        let sql = format!("SELECT {PLANT_COLUMNS} FROM plantstore.plants WHERE id = ANY($1)");
        let rows = self.query(&sql, &[&ids])?;
        let found = |row: &Row| {
            let id = row.get(0);
            let found = plant_record(row).map_or(Found::Damaged(id), Found::Plant);
            (id, found)
        };
        let mut found: HashMap<i64, _> = rows.iter().map(found).collect();
        Ok(ids.iter().filter_map(|id| found.remove(id)).collect())
    }

    pub(crate) fn statistics(
        &mut self,
        days: Days,
        _: &mut dyn FnMut(usize),
    ) -> Result<Statistics, StoreError> {
        let mut all = Statistics::default();
        let row = self.query_one(COUNTS, &[])?;
        all.plants = count(&row, 0);
        all.without_tag = all.plants.saturating_sub(count(&row, 1));
        all.tokens = count(&row, 2);
        for row in self.query(COUNTS_BY_TAG, &[&i64::from(TAGS_MAX)])? {
            let tag = decode(row.get(0));
            let tag =
                tag.ok_or_else(|| StoreError::Damaged("a tag is not what was stored".into()))?;
            all.tags.push((tag.into_owned(), count(&row, 1)));
        }
        for row in self.query(COUNTS_BY_DAY, &[&days.begin()])? {
            all.count_day(days, row.get(0), count(&row, 1));
        }
        all.database_bytes = self.size()?;
        Ok(all)
    }

    /// The size of plants and tokens on disk with their indexes; none if the engine does not tell.
    fn size(&mut self) -> Result<Option<u64>, StoreError> {
        let unknown = [
            SqlState::UNDEFINED_FUNCTION,
            SqlState::FEATURE_NOT_SUPPORTED,
        ];
        let size = self.run(
            async |session| match session.client.query_one(SIZE, &[]).await {
                Ok(row) => Ok(row.get::<_, Option<i64>>(0)),
                Err(error) if error.code().is_some_and(|code| unknown.contains(code)) => Ok(None),
                Err(error) => Err(error),
            },
        )?;
        Ok(size.and_then(|size| u64::try_from(size).ok()))
    }

    /// In one transaction, which is lost with its connection: nothing is tried again.
    pub(crate) fn export(
        &mut self,
        visit: &mut dyn FnMut(&Page) -> ControlFlow<()>,
    ) -> Result<(), StoreError> {
        self.block_on(async |client| {
            let timeout = client.timeout;
            let session = client.session().await;
            let session = session.map_err(|error| StoreError::Unavailable(error.into()))?;
            let exported = export(&session.client, timeout, visit).await;
            client.session = None; // ends the transaction
            exported
        })
    }

    pub(crate) fn check(&mut self, report: &mut dyn FnMut(Finding)) -> Result<Checked, StoreError> {
        let sql = "SELECT plants.id, plants.added_by, tokens.id IS NULL
                   FROM plantstore.plants LEFT JOIN plantstore.tokens ON tokens.id = plants.added_by
                   WHERE tokens.id IS NULL OR plants.name ~ $1 OR plants.tag ~ $1
                   ORDER BY plants.id LIMIT 1000";
        let invalid_escape = "\u{1a}([^01]|$)";
        for row in self.query(sql, &[&invalid_escape])? {
            let (id, token): (i64, i64) = (row.get(0), row.get(1));
            report(Finding::Wrong(if row.get(2) {
                format!("plant {id}: added by token {token}, which is not there")
            } else {
                format!("plant {id}: not what was stored")
            }));
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
    visit: &mut dyn FnMut(&Page) -> ControlFlow<()>,
) -> Result<(), StoreError> {
    let begin = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY";
    within(time_limit, client.batch_execute(begin)).await?;
    let sql = format!(
        "SELECT {PLANT_COLUMNS} FROM plantstore.plants WHERE id >= $1 ORDER BY id LIMIT $2"
    );
    let mut next = Some(i64::MIN);
    while let Some(first) = next {
        let values: [&dyn Param; 2] = [&first, &EXPORT_LEN];
        let rows = within(time_limit, client.query_raw(&sql, &values)).await?;
        let mut rows = pin!(rows.fuse());
        next = None;
        loop {
            let mut page = Page::default();
            while !page.is_full()
                && let Some(row) = within(time_limit, rows.try_next()).await?
            {
                page.push(plant_record(&row)?);
            }
            if page.plants.is_empty() {
                break;
            }
            next = page.next_id();
            if visit(&page).is_break() {
                return Ok(());
            }
        }
    }
    Ok(())
}

async fn within<T>(
    time_limit: Duration,
    statement: impl Future<Output = Result<T, Error>>,
) -> Result<T, StoreError> {
    match timeout(time_limit, statement).await {
        Ok(result) => result.map_err(|error| StoreError::Unknown(error.into())),
        Err(elapsed) => Err(StoreError::Unknown(elapsed.into())),
    }
}

fn count(row: &Row, column: usize) -> u64 {
    u64::try_from(row.get::<_, i64>(column)).unwrap_or_default()
}

/// Of both statements.
struct Values {
    since: Timestamp,
    before: Timestamp,
    before_id: i64,
    len: i64,
    tag: Option<String>,
    name_part: Option<String>,
}

impl Values {
    fn of(wanted: &Filter, len: u32) -> Self {
        let before = Cursor {
            batch: 0,
            ..wanted.before
        };
        let before = before.min(wanted.until);
        let stored = |text: &Option<String>| text.as_deref().map(|text| encode(text).into_owned());
        Self {
            since: wanted.since.time(),
            before: before.time(),
            before_id: before.id,
            len: i64::from(len),
            tag: stored(&wanted.tag),
            name_part: stored(&wanted.name_part),
        }
    }

    fn all(&self) -> [&dyn Param; 6] {
        [
            &self.since,
            &self.before,
            &self.before_id,
            &self.len,
            &self.tag,
            &self.name_part,
        ]
    }
}

/// Of `added_at, id`.
fn place(row: &Row) -> Cursor {
    Cursor {
        batch: 0,
        microsecond: row.get::<_, Timestamp>(0).as_microsecond(),
        id: row.get(1),
    }
}
