//! The outcomes of adding plants without storing them: each is compared with the store and with those before it, which are kept in a
//! temporary database, so that memory use does not grow with their number.

use std::collections::HashMap;

use rusqlite::{Connection, params};

use crate::plant::{NewPlant, Plant};
use crate::store::Store;
use crate::store::error::StoreError;
use crate::store::types::{Addition, DamagedPlant, LOOKUP_LEN_MAX, Outcome};

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

    /// The outcome of each plant; `store` is none if it does not exist.
    pub fn add(
        &mut self,
        batch: &[Addition],
        mut store: Option<&mut Store>,
    ) -> Result<Vec<Outcome>, StoreError> {
        let transaction = self.scratch.transaction()?;
        let mut outcomes = Vec::with_capacity(batch.len());
        for additions in batch.chunks(LOOKUP_LEN_MAX) {
            let ids: Vec<_> = additions.iter().map(|addition| addition.plant.id).collect();
            let stored = match &mut store {
                Some(store) => store.get(&ids)?,
                None => Vec::new(),
            };
            let stored = stored.into_iter().map(|found| match found {
                Ok(record) => (record.id, Some(record.plant)),
                Err(DamagedPlant { id }) => (id, None),
            });
            let stored: HashMap<i64, Option<Plant>> = stored.collect();
            for Addition { plant, .. } in additions {
                outcomes.push(match stored.get(&plant.id) {
                    None => add(&transaction, plant)?,
                    Some(None) => Outcome::Damaged,
                    Some(Some(stored)) if *stored == plant.plant => Outcome::Replayed,
                    Some(Some(_)) => Outcome::Conflict,
                });
            }
        }
        transaction.commit()?;
        Ok(outcomes)
    }
}

fn add(scratch: &Connection, plant: &NewPlant) -> Result<Outcome, StoreError> {
    let (id, plant) = (plant.id, &plant.plant);
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
