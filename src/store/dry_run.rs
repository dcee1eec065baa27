//! The outcomes of adding plants without storing them: each is compared with the store and with those before it, which are kept in a
//! temporary database, so that memory use does not grow with their number.

use rusqlite::{Connection, params};

use crate::store::error::StoreError;
use crate::store::types::{Addition, Outcome};

/// The plants that would have been stored by now.
pub(crate) struct DryRun {
    scratch: Connection,
}

impl DryRun {
    pub fn new() -> Result<Self, StoreError> {
        let scratch = Connection::open("")?;
        scratch.execute_batch(
            "PRAGMA journal_mode = OFF;
             PRAGMA synchronous = OFF;
             CREATE TABLE plants (id INTEGER PRIMARY KEY, name TEXT NOT NULL, tag TEXT) STRICT",
        )?;
        Ok(Self { scratch })
    }

    /// The outcome of each plant; `stored` is that of `Store::compare`.
    pub fn add(
        &mut self,
        batch: &[Addition],
        stored: Vec<Option<Outcome>>,
    ) -> Result<Vec<Outcome>, StoreError> {
        let transaction = self.scratch.transaction()?;
        let mut outcomes = Vec::with_capacity(batch.len());
        for (addition, stored) in batch.iter().zip(stored) {
            outcomes.push(match stored {
                Some(outcome) => outcome,
                None => add(&transaction, addition)?,
            });
        }
        transaction.commit()?;
        Ok(outcomes)
    }
}

fn add(scratch: &Connection, addition: &Addition) -> Result<Outcome, StoreError> {
    let (id, plant) = (addition.plant.id, &addition.plant.plant);
    let insert =
        "INSERT INTO plants (id, name, tag) VALUES (?1, ?2, ?3) ON CONFLICT (id) DO NOTHING";
    let values = params![id, plant.name, plant.tag];
    if scratch.prepare_cached(insert)?.execute(values)? == 1 {
        return Ok(Outcome::Added);
    }
    let select = "SELECT name = ?2 AND tag IS ?3 FROM plants WHERE id = ?1";
    let is_same = scratch
        .prepare_cached(select)?
        .query_row(values, |row| row.get(0))?;
    Ok(if is_same {
        Outcome::Replayed
    } else {
        Outcome::Conflict
    })
}
