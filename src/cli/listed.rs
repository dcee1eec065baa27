//! A plant as the commands show it: with the name of the token that added it. What is damaged is told and not shown.

use std::collections::HashMap;
use std::sync::Arc;

use anyhow::bail;
use serde::Serialize;

use crate::plant::Plant;
use crate::store::{Found, PlantRecord, Store, StoreError, TokenId};
use crate::telemetry::say;

/// After so many problems the rest is only counted.
const TOLD_MAX: u64 = 100;

/// A plant, and who added it.
pub(super) struct Listed {
    pub(super) plant: PlantRecord,
    /// None, if that token is not there any more: a disk has lost it.
    pub(super) added_by: Option<Arc<str>>,
}

/// In JSON.
#[derive(Serialize)]
struct Json<'a> {
    id: i64,
    #[serde(flatten)]
    plant: &'a Plant,
    added_at: String,
    added_by: Option<&'a str>,
}

impl Listed {
    /// On a line of its own.
    pub(super) fn json(&self) -> anyhow::Result<String> {
        let mut line = serde_json::to_string(&Json {
            id: self.plant.id,
            plant: &self.plant.plant,
            added_at: self.plant.added_at.to_string(),
            added_by: self.added_by.as_deref(),
        })?;
        line.push('\n');
        Ok(line)
    }
}

/// The names of tokens, and how much was found that is not what was stored.
#[derive(Default)]
pub(super) struct Listing {
    names: HashMap<TokenId, Option<Arc<str>>>,
    problems: u64,
}

impl Listing {
    /// The plants with these ids, without those that are damaged.
    pub(super) fn of(&mut self, store: &mut Store, ids: &[i64]) -> anyhow::Result<Vec<Listed>> {
        let mut all = Vec::with_capacity(ids.len());
        for found in store.found(ids)? {
            match found {
                Found::Plant(plant) => {
                    let added_by = self.name(store, plant.added_by)?;
                    if added_by.is_none() {
                        let (id, token) = (plant.id, plant.added_by.0);
                        self.tell(&format!(
                            "plant {id}: added by token {token}, which is not there"
                        ));
                    }
                    all.push(Listed { plant, added_by });
                }
                Found::Damaged(id) => self.tell(&format!("plant {id}: not what was stored")),
            }
        }
        Ok(all)
    }

    /// Whether all was well.
    pub(super) fn end(&self) -> anyhow::Result<()> {
        if self.problems > 0 {
            bail!("the store is damaged; run `plantstore check`");
        }
        Ok(())
    }

    fn tell(&mut self, problem: &str) {
        self.problems += 1;
        if self.problems <= TOLD_MAX {
            say(format!("{problem}\n"));
        }
    }

    fn name(&mut self, store: &mut Store, token: TokenId) -> Result<Option<Arc<str>>, StoreError> {
        if !self.names.contains_key(&token) {
            // Tokens can be made while we look.
            let tokens = store.tokens()?.into_iter();
            self.names
                .extend(tokens.map(|token| (token.id, Some(token.name))));
        }
        Ok(self.names.entry(token).or_default().clone())
    }
}
