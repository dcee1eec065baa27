//! A batch of plants: one statement, or three if an id in it stands for several plants and belongs to one of them.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::LazyLock;
use std::time::Duration;

use jiff::Timestamp;
use tokio::time::timeout;

use crate::plant::Plant;
use crate::store::error::StoreError;
use crate::store::postgres::client::Param;
use crate::store::postgres::retry::Link;
use crate::store::postgres::{rows, text};
use crate::store::types::{Addition, Outcome, TokenId};

/// A replay is a write too: its commit waits for the standby, as that of the first time should have. Sorted, so
/// that two batches cannot wait for each other. Dated by the clock of the database, which is the same for all nodes.
///
/// `synchronous_commit` is set for this transaction alone: whatever the settings of the server, its role or a session that a
/// pooler shares become after they were checked, this commit is waited for.
const ADD: &str = "
    INSERT INTO plantstore.plants (id, name, tag, added_at, added_by)
    SELECT id, name, tag, now(), added_by
    FROM unnest($1::BIGINT[], $2::TEXT[], $3::TEXT[], $4::BIGINT[]) AS new (id, name, tag, added_by),
         set_config('synchronous_commit',
                    CASE current_setting('synchronous_commit') WHEN 'remote_apply' THEN 'remote_apply' ELSE 'on' END,
                    true)
    ORDER BY id
    ON CONFLICT (id) DO UPDATE SET name = excluded.name
    WHERE plants.name = excluded.name AND plants.tag IS NOT DISTINCT FROM excluded.tag
    RETURNING id, added_at = now()";

/// Writes the row of this node, which no other session has a reason to lock.
const PROBE: &str = "
    INSERT INTO plantstore.nodes (id, started_at, seen_at) VALUES ($1, now(), now())
    ON CONFLICT (id) DO UPDATE SET seen_at = excluded.seen_at
    RETURNING started_at = seen_at";

/// Deletes the rows of nodes that have ended, without waiting for anybody.
const FORGET_NODES: &str = "
    DELETE FROM plantstore.nodes WHERE id IN (
        SELECT id FROM plantstore.nodes WHERE seen_at < now() - INTERVAL '1 day' FOR UPDATE SKIP LOCKED
    )";

/// The number of this process among the nodes.
static NODE: LazyLock<i64> =
    LazyLock::new(|| getrandom::u64().map_or(1, |random| (random >> 1).cast_signed()));

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
        let mut stored = self.insert(first.values().copied()).await?;

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
            stored.extend(self.insert(again.into_iter()).await?);
        }

        let mut seen = HashSet::new();
        let outcome = |addition: &Addition| {
            let id = addition.plant.id;
            match stored.get(&id) {
                Some(is_new) if addition.plant.plant == first[&id].plant.plant => {
                    let is_first = seen.insert(id);
                    if is_first && *is_new {
                        Outcome::Added
                    } else {
                        Outcome::Replayed
                    }
                }
                _ => Outcome::Conflict,
            }
        };
        Ok(batch.iter().map(outcome).collect())
    }

    /// Stores plants with different ids. For each that is stored now just as given: whether this statement has added it. If
    /// the reply to an attempt is lost after its commit, the next attempt finds those plants there, and they count as already
    /// stored.
    async fn insert<'a>(
        &mut self,
        additions: impl Iterator<Item = &'a Addition>,
    ) -> Result<HashMap<i64, bool>, StoreError> {
        let (mut ids, mut names, mut tags, mut tokens) = (vec![], vec![], vec![], vec![]);
        for Addition { plant, token } in additions {
            ids.push(plant.id);
            names.push(text::stored(&plant.plant.name));
            tags.push(plant.plant.tag.as_deref().map(text::stored));
            tokens.push(token.0);
        }
        let rows = self
            .until_known(async |session| {
                let values: [&dyn Param; 4] = [&ids, &names, &tags, &tokens];
                session.client.query_again(ADD, &values).await
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
                Outcome::Replayed
            } else {
                Outcome::Conflict
            })
        };
        Ok(batch.iter().map(outcome).collect())
    }

    /// Those of these plants that are stored.
    async fn there(&mut self, ids: &[i64]) -> Result<HashMap<i64, Plant>, StoreError> {
        let sql = "SELECT id, name, tag FROM plantstore.plants WHERE id = ANY($1)";
        let rows = self
            .until_known(async |session| session.client.query(sql, &[&ids]).await)
            .await?;
        rows.iter().map(rows::plant).collect()
    }

    /// Writes the row of this node: who cannot commit a plant now fails here as well.
    pub async fn rewrite(&mut self) -> Result<(), StoreError> {
        let row =
            self.until_known(async |session| session.client.query_one(PROBE, &[&*NODE]).await);
        let is_first = row.await?.get(0);
        if is_first && let Some(session) = &self.session {
            let forgotten = session.client.execute(FORGET_NODES, &[]);
            if timeout(NOTE_TIMEOUT, forgotten).await.is_err() {
                self.session = None;
            }
        }
        Ok(())
    }

    /// Notes when tokens were used, if that is done at once: plants are waiting, and the next minute is noted again.
    pub async fn note_use(&mut self, used: &[(TokenId, Timestamp)]) {
        let sql = "UPDATE plantstore.tokens SET last_used_at = $2
                   WHERE id = $1 AND (last_used_at IS NULL OR last_used_at < $2)";
        for (token, used_at) in used {
            let Some(session) = &self.session else {
                return;
            };
            let values: [&dyn Param; 2] = [&token.0, used_at];
            let noted = session.client.execute(sql, &values);
            if !matches!(timeout(NOTE_TIMEOUT, noted).await, Ok(Ok(_))) {
                self.session = None;
            }
        }
    }
}
