//! Plants by time, newest first: along the index, or by a look at every plant. What is asked for is compared as it is
//! stored, so that a few may be found that only look alike there; whoever reads them sees that.

use std::collections::HashMap;

use futures_util::TryStreamExt;
use jiff::Timestamp;
use tokio_postgres::Row;

use crate::store::error::StoreError;
use crate::store::postgres::client::Param;
use crate::store::postgres::retry::Link;
use crate::store::postgres::{rows, text};
use crate::store::query::{Cursor, Filter, Walk};
use crate::store::types::Found;

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

impl Link {
    /// Looks at so many of the newest plants of a time, for those that are wanted.
    pub async fn walk(&mut self, wanted: &Filter, len: u32) -> Result<Walk, StoreError> {
        let values = Values::of(wanted, len);
        let rows = self
            .until_known(async |session| session.client.query(WALK, &values.all()).await)
            .await?;
        let looked_at = rows.len() as u64;
        let all_read = looked_at < u64::from(len);
        Ok(Walk {
            looked_at,
            last: rows.last().filter(|_| !all_read).map(place),
            found: rows.iter().filter(|row| row.get(2)).map(place).collect(),
        })
    }

    /// Looks at every plant: where so many of the newest stand that are wanted.
    pub async fn search(&mut self, wanted: &Filter, len: u32) -> Result<Vec<Cursor>, StoreError> {
        let values = Values::of(wanted, len);
        self.until_known(async |session| {
            let rows = session.client.query_raw(SEARCH, &values.all()).await?;
            rows.map_ok(|row| place(&row)).try_collect().await
        })
        .await
    }

    /// The plants with these ids, in this order, without those that are not there.
    pub async fn found(&mut self, ids: &[i64]) -> Result<Vec<Found>, StoreError> {
        let sql =
            "SELECT id, name, tag, added_at, added_by FROM plantstore.plants WHERE id = ANY($1)";
        let rows = self
            .until_known(async |session| session.client.query(sql, &[&ids]).await)
            .await?;
        let found = |row: &Row| {
            let id = row.get(0);
            let found = rows::plant_record(row).map_or(Found::Damaged(id), Found::Plant);
            (id, found)
        };
        let mut found: HashMap<i64, _> = rows.iter().map(found).collect();
        Ok(ids.iter().filter_map(|id| found.remove(id)).collect())
    }
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
        let stored =
            |text: &Option<String>| text.as_deref().map(|text| text::stored(text).into_owned());
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
