//! What there is to say of all plants, counted by the engine, which can do that in bounded memory.

use tokio_postgres::error::SqlState;

use crate::store::error::StoreError;
use crate::store::postgres::retry::Link;
use crate::store::postgres::text;
use crate::store::query::{Days, Statistics, TAGS_MAX};

const COUNTS: &str =
    "SELECT count(*), count(tag), (SELECT count(*) FROM plantstore.tokens) FROM plantstore.plants";

const TAGS: &str = "
    SELECT tag, count(*) FROM plantstore.plants WHERE tag IS NOT NULL
    GROUP BY tag ORDER BY count(*) DESC, min(id) LIMIT $1::BIGINT";

const DAYS: &str = "
    SELECT floor(extract(epoch FROM added_at) / 86400)::BIGINT, count(*) FROM plantstore.plants WHERE added_at >= $1 GROUP BY 1";

const SIZE: &str = "SELECT (pg_total_relation_size('plantstore.plants') + pg_total_relation_size('plantstore.tokens'))::BIGINT";

impl Link {
    /// What there is to say of all plants.
    pub async fn statistics(&mut self, days: Days) -> Result<Statistics, StoreError> {
        let mut all = Statistics::default();
        let count = |count: i64| u64::try_from(count).unwrap_or_default();

        let row = self.until_known(async |session| session.client.query_one(COUNTS, &[]).await);
        let row = row.await?;
        all.plants = count(row.get(0));
        all.without_tag = all.plants.saturating_sub(count(row.get(1)));
        all.tokens = count(row.get(2));

        let tags_max = i64::from(TAGS_MAX);
        let rows = self.until_known(async |session| session.client.query(TAGS, &[&tags_max]).await);
        for row in rows.await? {
            let tag = text::original(row.get(0));
            let tag =
                tag.ok_or_else(|| StoreError::Damaged("a tag is not what was stored".into()))?;
            all.tags.push((tag.into_owned(), count(row.get(1))));
        }

        let begin = days.begin();
        let rows = self.until_known(async |session| session.client.query(DAYS, &[&begin]).await);
        for row in rows.await? {
            all.count_day(days, row.get(0), count(row.get(1)));
        }

        all.database_bytes = self.size().await?;
        Ok(all)
    }

    /// What plants and tokens take on disk with their indexes; none, if the engine does not tell.
    async fn size(&mut self) -> Result<Option<u64>, StoreError> {
        let unknown = [
            SqlState::UNDEFINED_FUNCTION,
            SqlState::FEATURE_NOT_SUPPORTED,
        ];
        let size =
            self.until_known(
                async |session| match session.client.query_one(SIZE, &[]).await {
                    Ok(row) => Ok(row.get::<_, Option<i64>>(0)),
                    Err(error) if error.code().is_some_and(|code| unknown.contains(code)) => {
                        Ok(None)
                    }
                    Err(error) => Err(error),
                },
            );
        Ok(size.await?.and_then(|size| u64::try_from(size).ok()))
    }
}
