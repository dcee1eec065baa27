//! Adding plants, and the probe, which is a write. A batch is one `INSERT`, or two if an id is taken. Only if the batch has
//! different plants with one id, and the first of them was not stored, two more statements find out whether another of them is
//! the stored one.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use tokio::time::timeout;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::Type;

use crate::plant::Plant;
use crate::store::error::{Failure, StoreError};
use crate::store::postgres::rows::encode;
use crate::store::postgres::{Postgres, Values};
use crate::store::types::{Addition, Outcome, PlantRecord, TokenId};

/// Sorted, so that two batches cannot wait for each other. Dated by the clock of the database, which is the same for all nodes.
///
/// Two settings are set for this transaction alone, whatever those of the server, its role or a session that a pooler shares become
/// after they were checked: this commit is waited for, and if that wait is cancelled, the server sends the warning that says so.
macro_rules! insert_batch {
    ($rest:literal) => {
        concat!(
            "INSERT INTO plantstore.plants (id, name, tag, added_at, added_by)
             SELECT id, name, tag, now(), added_by
             FROM unnest($1::BIGINT[], $2::TEXT[], $3::TEXT[], $4::BIGINT[]) AS new (id, name, tag, added_by),
                  set_config('synchronous_commit',
                             CASE current_setting('synchronous_commit') WHEN 'remote_apply' THEN 'remote_apply' ELSE 'on' END,
                             true) AS commits,
                  set_config('client_min_messages', 'warning', true) AS messages
             ORDER BY id ",
            $rest
        )
    };
}

/// Fails if an id is taken. Takes half of the time that the server needs for `ADD`.
const ADD_NEW: &str = insert_batch!("");

/// A replay is a write too: its commit waits for the standby, as that of the first time should have. Returns one row of arrays,
/// which takes less time to send and to read than a row per plant.
const ADD: &str = concat!(
    "WITH stored AS (",
    insert_batch!(
        "ON CONFLICT (id) DO UPDATE SET name = excluded.name
         WHERE plants.name = excluded.name AND plants.tag IS NOT DISTINCT FROM excluded.tag
         RETURNING id, added_at = now() AS is_new"
    ),
    ") SELECT coalesce(array_agg(id), '{}'), coalesce(array_agg(is_new), '{}') FROM stored"
);

/// For how long an id that was taken makes it likely that others are. The server logs an error for each failed `ADD_NEW`.
const TAKEN_IDS_INTERVAL: Duration = Duration::from_secs(10);

/// Without waiting for locks: a row that is locked is being written by another node, for the same reason. And without waiting for
/// a standby.
const RECORD_TOKEN_USES: &str = "
    WITH used AS (
        SELECT id, used_at, set_config('synchronous_commit', 'local', true) FROM plantstore.tokens
        JOIN unnest($1::BIGINT[], $2::TIMESTAMPTZ[]) AS new (token, used_at) ON id = token
        WHERE last_used_at IS NULL OR last_used_at < used_at FOR UPDATE OF tokens SKIP LOCKED
    )
    UPDATE plantstore.tokens SET last_used_at = used_at FROM used WHERE tokens.id = used.id";

/// Writes the row of this node, which no other session has a reason to lock.
const PROBE: &str = "
    INSERT INTO plantstore.nodes (id, started_at, seen_at) VALUES ($1, now(), now())
    ON CONFLICT (id) DO UPDATE SET seen_at = excluded.seen_at
    RETURNING started_at = seen_at";

/// Deletes the rows of nodes that have ended, without waiting for locks or for a standby.
const DELETE_OLD_NODES: &str = "
    WITH old AS (
        SELECT id, set_config('synchronous_commit', 'local', true) FROM plantstore.nodes
        WHERE seen_at < now() - INTERVAL '1 day' FOR UPDATE SKIP LOCKED
    )
    DELETE FROM plantstore.nodes WHERE id IN (SELECT id FROM old)";

/// The row of this process in the table of nodes.
static NODE: LazyLock<i64> =
    LazyLock::new(|| getrandom::u64().map_or(1, |random| (random >> 1).cast_signed()));

/// How long a probe tries to connect and to get a first response.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);

/// The time limit of statements that are optional.
const OPTIONAL_TIMEOUT: Duration = Duration::from_millis(500);

/// The plants of a statement that are stored now exactly as given.
enum Stored {
    /// All of them, and none was stored before.
    AllAdded,
    /// The ids, and whether they were added now.
    These(HashMap<i64, bool>),
}

impl Stored {
    fn into_map(self, sent: &[&Addition]) -> HashMap<i64, bool> {
        match self {
            Self::AllAdded => sent
                .iter()
                .map(|addition| (addition.plant.id, true))
                .collect(),
            Self::These(stored) => stored,
        }
    }
}

impl Postgres {
    /// Adds a batch of plants in one statement: an outcome for each, in order, once all of it is committed.
    pub(crate) fn add(
        &mut self,
        batch: &[Addition],
        token_uses: &[(TokenId, Timestamp)],
    ) -> Result<Vec<Outcome>, StoreError> {
        // A statement can contain an id only once: the first plant with an id is sent, and later ones are compared with it.
        let mut first: Vec<_> = batch.iter().collect();
        first.sort_by_key(|addition| addition.plant.id);
        first.dedup_by_key(|addition| addition.plant.id);
        let outcomes = match self.insert(&first)? {
            Stored::AllAdded if first.len() == batch.len() => vec![Outcome::Added; batch.len()],
            stored => {
                let outcomes = self.outcomes(batch, &first, stored);
                // Plants of the batch are stored by now.
                outcomes.map_err(|error| Failure::Unknown.because(error.cause))?
            }
        };
        if !token_uses.is_empty() {
            let (tokens, times): (Vec<_>, Vec<_>) =
                token_uses.iter().map(|(token, at)| (token.0, *at)).unzip();
            let values: &Values<'_> = &[
                (&tokens, Type::INT8_ARRAY),
                (&times, Type::TIMESTAMPTZ_ARRAY),
            ];
            self.execute_if_fast(RECORD_TOKEN_USES, values);
        }
        Ok(outcomes)
    }

    /// The outcomes of a batch in which some ids were taken, or given more than once. `first` are the plants that were sent.
    fn outcomes(
        &mut self,
        batch: &[Addition],
        first: &[&Addition],
        stored: Stored,
    ) -> Result<Vec<Outcome>, StoreError> {
        let mut stored = stored.into_map(first);
        let first = first.iter().map(|addition| (addition.plant.id, *addition));
        let mut first: BTreeMap<_, _> = first.collect();

        // If the first plant with an id is not the stored one, a later plant of the batch with that id may be.
        let others: Vec<_> = batch
            .iter()
            .filter(|addition| {
                let id = addition.plant.id;
                !stored.contains_key(&id) && addition.plant.plant != first[&id].plant.plant
            })
            .collect();
        if !others.is_empty() {
            let ids: Vec<_> = others.iter().map(|addition| addition.plant.id).collect();
            let existing = self.get(&ids)?.into_iter().flatten();
            let existing: HashMap<i64, Plant> =
                existing.map(|found| (found.id, found.plant)).collect();
            for other in others {
                if existing.get(&other.plant.id) == Some(&other.plant.plant) {
                    first.insert(other.plant.id, other);
                }
            }
            let again = first.values().copied();
            let again: Vec<_> = again
                .filter(|addition| ids.contains(&addition.plant.id))
                .collect();
            stored.extend(self.insert(&again)?.into_map(&again));
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

    /// Stores plants with different ids. Returns those that are stored now exactly as given, and whether they were added now. If the
    /// response to an attempt is lost after its commit, the next attempt finds those plants stored, and they count as replayed.
    fn insert(&mut self, additions: &[&Addition]) -> Result<Stored, StoreError> {
        let (mut ids, mut names, mut tags, mut tokens) = (vec![], vec![], vec![], vec![]);
        for Addition { plant, token } in additions {
            ids.push(plant.id);
            names.push(encode(&plant.plant.name));
            tags.push(plant.plant.tag.as_deref().map(encode));
            tokens.push(token.0);
        }
        let values: &Values<'_> = &[
            (&ids, Type::INT8_ARRAY),
            (&names, Type::TEXT_ARRAY),
            (&tags, Type::TEXT_ARRAY),
            (&tokens, Type::INT8_ARRAY),
        ];
        let is_taken_likely = |at: Instant| at.elapsed() < TAKEN_IDS_INTERVAL;
        let id_taken_at = Cell::new(self.id_taken_at.filter(|at| is_taken_likely(*at)));
        // One run for both statements: if the response to the first is lost, the second does not know that plants may be stored.
        let rows = self.run(async |session| {
            if id_taken_at.get().is_none() {
                match session.query_prepared(ADD_NEW, values).await {
                    Ok(_) => return Ok(None),
                    Err(error) if error.code() == Some(&SqlState::UNIQUE_VIOLATION) => {
                        id_taken_at.set(Some(Instant::now()));
                    }
                    Err(error) => return Err(error),
                }
            }
            session.query_prepared(ADD, values).await.map(Some)
        });
        self.id_taken_at = id_taken_at.get();
        let Some(rows) = rows? else {
            return Ok(Stored::AllAdded);
        };
        let row = rows.first().map(|row| (row.try_get(0), row.try_get(1)));
        let Some((Ok(ids), Ok(is_new))) = row else {
            return Err(Failure::Unknown.because("the database has returned no result of a batch"));
        };
        let (ids, is_new): (Vec<i64>, Vec<bool>) = (ids, is_new);
        Ok(Stored::These(ids.into_iter().zip(is_new).collect()))
    }

    /// Plants are waiting for this to return, so it is skipped if it takes long: it will be run again some time.
    fn execute_if_fast(&mut self, sql: &str, values: &Values<'_>) {
        self.block_on(async |client| {
            if let Some(session) = &client.session {
                let execute = session.client.execute_typed(sql, values);
                if !matches!(timeout(OPTIONAL_TIMEOUT, execute).await, Ok(Ok(_))) {
                    client.session = None;
                }
            }
        });
    }

    pub(crate) fn insert_plants(&mut self, plants: &[PlantRecord]) -> Result<(), StoreError> {
        let ids: Vec<_> = plants.iter().map(|record| record.id).collect();
        let names: Vec<_> = plants
            .iter()
            .map(|record| encode(&record.plant.name))
            .collect();
        let tags = plants.iter().map(|record| record.plant.tag.as_deref());
        let tags: Vec<_> = tags.map(|tag| tag.map(encode)).collect();
        let times: Vec<_> = plants.iter().map(|record| record.added_at).collect();
        let tokens: Vec<_> = plants.iter().map(|record| record.added_by.0).collect();
        let sql = "INSERT INTO plantstore.plants (id, name, tag, added_at, added_by)
                   SELECT * FROM unnest($1::BIGINT[], $2::TEXT[], $3::TEXT[], $4::TIMESTAMPTZ[], $5::BIGINT[])
                   ON CONFLICT (id) DO NOTHING";
        let values: &Values<'_> = &[
            (&ids, Type::INT8_ARRAY),
            (&names, Type::TEXT_ARRAY),
            (&tags, Type::TEXT_ARRAY),
            (&times, Type::TIMESTAMPTZ_ARRAY),
            (&tokens, Type::INT8_ARRAY),
        ];
        let inserted = self.execute(sql, values)?;
        if inserted < plants.len() as u64 {
            // An attempt whose response was lost, or whose wait for the standby was cancelled, may have stored the others.
            self.wait_for_standby()?;
        }
        Ok(())
    }

    /// Returns when the synchronous standby, if there is one, has everything that was committed before: it writes the row of this
    /// node, and the commit of that waits. True if there was no such row.
    pub(super) fn wait_for_standby(&mut self) -> Result<bool, StoreError> {
        Ok(self.query_one(PROBE, &[(&*NODE, Type::INT8)])?.get(0))
    }

    /// Checks that the database accepts writes, with a write to the row of this node.
    pub(crate) fn probe(&mut self, is_write_due: bool) -> Result<(), StoreError> {
        if !is_write_due {
            return Ok(());
        }
        // Only this is given up early. A write that waits for its standby keeps its backend until the standby is
        // back, so abandoning one every few seconds would use up the connections of the server.
        let timeout_before = self.client.timeout;
        self.client.timeout = timeout_before.min(PROBE_TIMEOUT);
        let reached = self.run(async |session| session.client.batch_execute("SELECT 1").await);
        self.client.timeout = timeout_before;
        reached.map_err(|error| match error.kind {
            Failure::Unknown => Failure::Unavailable.because(error.cause), // it wrote nothing
            _ => error,
        })?;
        if self.wait_for_standby()? {
            self.execute_if_fast(DELETE_OLD_NODES, &[]);
        }
        Ok(())
    }
}
