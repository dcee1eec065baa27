//! A batch of plants: one statement, or three if an id in it stands for several plants and belongs to one of them.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use jiff::Timestamp;
use tokio::time::timeout;
use tokio_postgres::types::ToSql;

use crate::plant::Plant;
use crate::store::contract::{Addition, Outcome, TokenId};
use crate::store::error::StoreError;
use crate::store::postgres::link::Link;
use crate::store::postgres::{rows, text};

/// A replay is a write too: its commit waits for the standby, as that of the first time should have. Sorted, so
/// that two batches cannot wait for each other.
const ADD: &str = "
    INSERT INTO plants (id, name, tag, added_at, added_by)
    SELECT id, name, tag, $4::TIMESTAMPTZ, added_by
    FROM unnest($1::BIGINT[], $2::TEXT[], $3::TEXT[], $5::BIGINT[]) AS new (id, name, tag, added_by)
    ORDER BY id
    ON CONFLICT (id) DO UPDATE SET name = excluded.name
    WHERE plants.name = excluded.name AND plants.tag IS NOT DISTINCT FROM excluded.tag
    RETURNING id, added_at";

/// For what is good to have and not waited for.
const NOTE_TIMEOUT: Duration = Duration::from_millis(500);

impl Link {
    /// Adds plants: an outcome for each, in order, once all of them are committed.
    pub async fn add(&mut self, batch: &[Addition]) -> Result<Vec<Outcome>, StoreError> {
        // Of several plants with one id the first is sent, and the others are compared with it.
        let mut first = BTreeMap::new();
        for addition in batch {
            first.entry(addition.plant.id).or_insert(addition);
        }
        let now = Timestamp::from_microsecond(Timestamp::now().as_microsecond())
            .expect("now is within the range");
        let mut stored = self.insert(first.values().copied(), now).await?;

        // Where the first was not the one that is stored, another may be.
        let others: Vec<_> = batch
            .iter()
            .filter(|addition| {
                let id = addition.plant.id;
                !stored.contains_key(&id) && addition.plant.plant != first[&id].plant.plant
            })
            .collect();
        if !others.is_empty() {
            let ids: Vec<_> = others.iter().map(|addition| addition.plant.id).collect();
            let there = self.there(&ids).await?;
            for other in others {
                if there.get(&other.plant.id) == Some(&other.plant.plant) {
                    first.insert(other.plant.id, other);
                }
            }
            let again = first.values().copied();
            let again: Vec<_> = again
                .filter(|addition| ids.contains(&addition.plant.id))
                .collect();
            stored.extend(self.insert(again.into_iter(), now).await?);
        }

        let mut seen = HashSet::new();
        let outcome = |addition: &Addition| {
            let id = addition.plant.id;
            match stored.get(&id) {
                Some(added_at) if addition.plant.plant == first[&id].plant.plant => {
                    let is_first = seen.insert(id);
                    if is_first && *added_at == now {
                        Outcome::Added
                    } else {
                        Outcome::AlreadyThere
                    }
                }
                _ => Outcome::Taken,
            }
        };
        Ok(batch.iter().map(outcome).collect())
    }

    /// Stores plants with different ids; tells since when those are there that are stored now just as given.
    async fn insert<'a>(
        &mut self,
        additions: impl Iterator<Item = &'a Addition>,
        now: Timestamp,
    ) -> Result<HashMap<i64, Timestamp>, StoreError> {
        let (mut ids, mut names, mut tags, mut tokens) = (vec![], vec![], vec![], vec![]);
        for Addition { plant, token } in additions {
            ids.push(plant.id);
            names.push(text::stored(&plant.plant.name));
            tags.push(plant.plant.tag.as_deref().map(text::stored));
            tokens.push(token.0);
        }
        let rows = self
            .until_known(async |session| {
                let add = session.add(ADD).await?;
                session
                    .client
                    .query(add, &[&ids, &names, &tags, &now, &tokens])
                    .await
            })
            .await?;
        Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
    }

    /// What each plant is to the one that has its id; none where the id is free.
    pub async fn compare(
        &mut self,
        batch: &[Addition],
    ) -> Result<Vec<Option<Outcome>>, StoreError> {
        let ids: Vec<_> = batch.iter().map(|addition| addition.plant.id).collect();
        let there = self.there(&ids).await?;
        let outcome = |addition: &Addition| {
            let stored = there.get(&addition.plant.id)?;
            Some(if *stored == addition.plant.plant {
                Outcome::AlreadyThere
            } else {
                Outcome::Taken
            })
        };
        Ok(batch.iter().map(outcome).collect())
    }

    /// Those of these plants that are stored.
    async fn there(&mut self, ids: &[i64]) -> Result<HashMap<i64, Plant>, StoreError> {
        let sql = "SELECT id, name, tag FROM plants WHERE id = ANY($1)";
        let rows = self
            .until_known(async |session| session.client.query(sql, &[&ids]).await)
            .await?;
        rows.iter().map(rows::plant).collect()
    }

    /// Writes a row as it is. A store without tokens has nobody who could add anything.
    pub async fn rewrite(&mut self) -> Result<(), StoreError> {
        let sql = "UPDATE tokens SET name = name WHERE id = (SELECT min(id) FROM tokens)";
        self.until_known(async |session| session.client.execute(sql, &[]).await)
            .await
            .map(drop)
    }

    /// Notes when tokens were used, if that is done at once: plants are waiting, and the next minute is noted again.
    pub async fn note_use(&mut self, used: &[(TokenId, Timestamp)]) {
        let sql = "UPDATE tokens SET last_used_at = $2
                   WHERE id = $1 AND (last_used_at IS NULL OR last_used_at < $2)";
        for (token, used_at) in used {
            let Some(session) = &self.session else {
                return;
            };
            let values: [&(dyn ToSql + Sync); 2] = [&token.0, used_at];
            let noted = session.client.execute(sql, &values);
            if !matches!(timeout(NOTE_TIMEOUT, noted).await, Ok(Ok(_))) {
                self.session = None;
            }
        }
    }
}
