//! `plantstore copy`: all tokens and plants from one store to another, of either kind, compared at the end. Tokens are matched
//! by their digest before anything is written, so that each plant refers to the same token in both stores. Running it again
//! continues an interrupted copy.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt::{self, Display};
use std::fs;

use anyhow::{Context, bail};
use clap::Args;

use crate::cli::terminal::{ProgressBar, count, counts};
use crate::config::StoreSettings;
use crate::fs::is_same_file;
use crate::store::{Location, Mode, OpenError, PlantRecord, Store, TokenId, TokenRecord};

/// Names and ids that an error message lists.
const LISTED_MAX: usize = 10;

/// Copy all plants and tokens to another store and compare the two
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  plantstore copy --to postgres://plants@db.example/plants")]
pub(super) struct Copy {
    #[command(flatten)]
    store: StoreSettings,

    /// Target store, created if it does not exist: sqlite:PATH or postgres://USER@HOST/DATABASE
    #[arg(long, value_name = "URL")]
    to: Location,

    /// Allow plants and tokens in the target that the source does not have
    #[arg(long)]
    force: bool,
}

impl Copy {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let (from, to) = (&self.store.location, &self.to);
        let is_same = match (from.file(), to.file()) {
            (Some(from), Some(to)) => is_same_file(fs::metadata(from), fs::metadata(to)),
            _ => from.to_string() == to.to_string(),
        };
        if is_same {
            bail!("{from} cannot be copied to itself; choose another --to");
        }
        let from = NamedStore::open(from, Mode::Read)?;
        let to = NamedStore::open(to, Mode::Create)?;
        Transfer::run(from, to, self.force)?.compare("copied and compared")
    }
}

/// A store, and its name in messages.
pub(super) struct NamedStore {
    pub(super) store: Store,
    pub(super) name: String,
}

impl NamedStore {
    pub(super) fn open(location: &Location, mode: Mode) -> Result<Self, OpenError> {
        Ok(Self {
            store: Store::open(location, mode)?,
            name: location.to_string(),
        })
    }
}

pub(super) struct Transfer {
    from: NamedStore,
    to: NamedStore,
    /// The target may contain plants and tokens of its own, which stay as they are. Otherwise it must be empty, or an earlier
    /// copy of the source.
    force: bool,
    /// The tokens of the source.
    tokens: Vec<TokenRecord>,
    /// The id in the target of each token of the source.
    ids: HashMap<TokenId, TokenId>,
}

impl Transfer {
    /// Inserts what the target lacks. Fails before anything is written if the two stores contradict each other.
    pub(super) fn run(from: NamedStore, to: NamedStore, force: bool) -> anyhow::Result<Self> {
        let mut transfer = Self {
            from,
            to,
            force,
            tokens: Vec::new(),
            ids: HashMap::new(),
        };
        let planned = transfer.plan_tokens()?;
        transfer.check_target()?;
        transfer.write_tokens(&planned)?;
        transfer.copy_plants()?;
        Ok(transfer)
    }

    fn copy_plants(&mut self) -> anyhow::Result<()> {
        let progress = ProgressBar::of_items("copying", self.from.store.count_plants()?);
        let mut next = Some(i64::MIN);
        while let Some(first) = next {
            let page = self.from.store.plants(&(first..=i64::MAX))?;
            next = page.next_id();
            let page = page.plants;
            let (Some(first), Some(last)) = (page.first(), page.last()) else {
                break;
            };
            // Incomplete if the target has further plants between these. Those that are missing here are not inserted again.
            let existing = self.to.store.plants(&(first.id..=last.id))?;
            let existing: HashSet<i64> = existing.plants.iter().map(|plant| plant.id).collect();
            let mut missing = Vec::new();
            for plant in page.iter().filter(|plant| !existing.contains(&plant.id)) {
                if !self.ids.contains_key(&plant.added_by) {
                    // The source is in use, and the token was created after the tokens were read.
                    self.copy_tokens()?;
                }
                missing.push(self.translated(plant)?);
            }
            self.to.store.insert_plants(&missing)?;
            progress.advance(page.len());
        }
        Ok(())
    }

    /// Brings the tokens of the target up to date: new ones, revocations, last use.
    pub(super) fn copy_tokens(&mut self) -> anyhow::Result<()> {
        let planned = self.plan_tokens()?;
        self.write_tokens(&planned)
    }

    /// Reads the tokens of both stores. Returns those of the source with the ids that they have, or get, in the target.
    fn plan_tokens(&mut self) -> anyhow::Result<Vec<TokenRecord>> {
        let existing = self.to.store.tokens()?;
        self.tokens = self.from.store.tokens()?;
        let (from, to) = (&self.from.name, &self.to.name);
        let known = ids_by_digest(&self.tokens, &existing);
        let conflicts = Sample::of(self.tokens.iter().filter_map(|token| {
            let is_known = known.contains_key(&token.id);
            let is_conflict = !is_known && existing.iter().any(|other| other.name == token.name);
            is_conflict.then_some(&token.name)
        }));
        if conflicts.count > 0 {
            bail!(
                "{from} and {to} have different tokens of the same name: {conflicts}; nothing was written; choose an empty \
                 store, or copy the plants alone with `plantstore export` and `plantstore import`"
            );
        }
        let others = Sample::of(existing.iter().filter_map(|other| {
            let is_known = self.tokens.iter().any(|token| token.digest == other.digest);
            (!is_known).then_some(&other.name)
        }));
        if !self.force && others.count > 0 {
            bail!(
                "{to} has tokens that {from} does not have: {others}; nothing was written; choose an empty store, or add to \
                 this one with --force"
            );
        }
        Ok(with_target_ids(&self.tokens, &existing))
    }

    /// Compares the plants that the target already has with those of the source.
    fn check_target(&mut self) -> anyhow::Result<()> {
        let count = self.to.store.count_plants()?;
        if count == 0 {
            return Ok(());
        }
        let ids = ids_by_digest(&self.tokens, &self.to.store.tokens()?);
        let progress = ProgressBar::of_items("checking", count);
        let same_token = |target, source| ids.get(&source) == Some(&target);
        let (from, to) = (&mut self.from, &mut self.to);
        let found = find_differences(&mut to.store, &mut from.store, &progress, same_token)?;
        let force = ", or add to this one with --force";
        let (problem, plants, advice) = if found.different.count > 0 {
            (
                "has other plants with the ids of plants in",
                found.different,
                "",
            )
        } else if self.force {
            return Ok(());
        } else if found.added_differently.count > 0 {
            let problem = "has plants that were added by another token or at another time in";
            (problem, found.added_differently, force)
        } else if found.missing.count > 0 {
            ("has plants that are not in", found.missing, force)
        } else {
            return Ok(());
        };
        bail!(
            "{} {problem} {}: {} (id {plants}); nothing was written; choose an empty store{advice}",
            to.name,
            from.name,
            plants.count
        );
    }

    /// Writes the tokens, and reads them back to learn their ids.
    fn write_tokens(&mut self, planned: &[TokenRecord]) -> anyhow::Result<()> {
        let to = &mut self.to;
        to.store
            .merge_tokens(planned)
            .with_context(|| format!("cannot write the tokens to {}", to.name))?;
        self.ids = ids_by_digest(&self.tokens, &to.store.tokens()?);
        let is_missing = |token: &&TokenRecord| !self.ids.contains_key(&token.id);
        if let Some(token) = self.tokens.iter().find(is_missing) {
            bail!(
                "token {} could not be created in {}, whose tokens have changed at the same time; run the command again",
                token.name,
                to.name
            );
        }
        Ok(())
    }

    /// A plant of the source as the target stores it.
    fn translated(&self, plant: &PlantRecord) -> anyhow::Result<PlantRecord> {
        let Some(added_by) = self.ids.get(&plant.added_by) else {
            bail!(
                "plant {} of {} was added by token {}, which does not exist; run `plantstore check`",
                plant.id,
                self.from.name,
                plant.added_by.0
            );
        };
        Ok(PlantRecord {
            added_by: *added_by,
            ..plant.clone()
        })
    }

    /// Verifies that the target has every plant and token of the source and, unless forced, nothing else. Reports `done`
    /// with the counts.
    pub(super) fn compare(mut self, done: &str) -> anyhow::Result<()> {
        let progress = ProgressBar::of_items("comparing", self.from.store.count_plants()?);
        let same_token = |source, target| self.ids.get(&source) == Some(&target);
        let (from, to) = (&mut self.from, &mut self.to);
        let found = find_differences(&mut from.store, &mut to.store, &progress, same_token)?;
        drop(progress);
        let (from_name, to_name) = (&from.name, &to.name);
        for (plants, problem, advice) in [
            (
                &found.different,
                "has other plants with the ids of plants in",
                "",
            ),
            (
                &found.missing,
                "is missing plants from",
                "; if they were added during the copy, stop the server and run the command again",
            ),
        ] {
            if plants.count > 0 {
                bail!(
                    "{to_name} {problem} {from_name}: {} (id {plants}){advice}",
                    plants.count
                );
            }
        }
        let added_differently = found.added_differently;
        if !self.force && added_differently.count > 0 {
            bail!(
                "{to_name} has plants that were added by another token or at another time in {from_name}: {} (id {added_differently})",
                added_differently.count
            );
        }
        let copies = to.store.tokens()?;
        for token in &self.tokens {
            let name = &token.name;
            let copy = copies.iter().find(|other| other.digest == token.digest);
            let copy = copy.with_context(|| format!("{to_name} is missing the token {name}"))?;
            if token.revoked_at.is_some() && copy.revoked_at.is_none() {
                bail!("token {name} is revoked in {from_name} and not in {to_name}");
            }
            if let Some(difference) = difference(token, copy) {
                eprintln!(
                    "token {name} of {from_name} {difference} in {to_name}; it was not changed"
                );
            }
        }
        let (plants, plants_copied) = (from.store.count_plants()?, to.store.count_plants()?);
        let (tokens, tokens_copied) = (self.tokens.len() as u64, copies.len() as u64);
        if !self.force && (plants_copied, tokens_copied) != (plants, tokens) {
            bail!(
                "{from_name} has {}; {to_name} has {}; if plants were added during the copy, stop the server and run the \
                 command again",
                counts(plants, tokens),
                counts(plants_copied, tokens_copied)
            );
        }
        eprintln!("{done}: {}", counts(plants, tokens));
        if added_differently.count > 0 {
            eprintln!(
                "left unchanged, because they had been added by another token or at another time: {}",
                count(added_differently.count as u64, "plant")
            );
        }
        Ok(())
    }
}

/// How a token differs in the two stores, apart from its state.
fn difference(token: &TokenRecord, copy: &TokenRecord) -> Option<String> {
    if token.name != copy.name {
        Some(format!("is named {}", copy.name))
    } else if token.expires_at != copy.expires_at {
        Some("has another expiry".to_owned())
    } else if token.rate_limit != copy.rate_limit {
        Some("has another rate limit".to_owned())
    } else {
        None
    }
}

/// The tokens with their ids in the target: the one of the same digest, or their own, or a free one.
pub(super) fn with_target_ids(
    tokens: &[TokenRecord],
    existing: &[TokenRecord],
) -> Vec<TokenRecord> {
    let known = ids_by_digest(tokens, existing);
    let mut used: HashSet<i64> = existing.iter().map(|token| token.id.0).collect();
    let mut with_id = |token: &TokenRecord| {
        let mut candidates = std::iter::once(token.id.0).chain(1..);
        let id = known.get(&token.id).copied().unwrap_or_else(|| {
            let free = candidates.find(|id| used.insert(*id));
            TokenId(free.expect("there are fewer tokens than ids"))
        });
        TokenRecord {
            id,
            ..token.clone()
        }
    };
    tokens.iter().map(&mut with_id).collect()
}

/// The ids in the target of the tokens that it has.
fn ids_by_digest(tokens: &[TokenRecord], existing: &[TokenRecord]) -> HashMap<TokenId, TokenId> {
    let ids: HashMap<_, _> = existing
        .iter()
        .map(|token| (token.digest, token.id))
        .collect();
    let id = |token: &TokenRecord| Some((token.id, *ids.get(&token.digest)?));
    tokens.iter().filter_map(id).collect()
}

/// The number of some items, and the first of them for a message.
#[derive(Default)]
struct Sample {
    count: usize,
    first: Vec<String>,
}

impl Sample {
    fn of(items: impl Iterator<Item = impl Display>) -> Self {
        let mut sample = Self::default();
        items.for_each(|item| sample.push(item));
        sample
    }

    fn push(&mut self, item: impl Display) {
        self.count += 1;
        if self.first.len() < LISTED_MAX {
            self.first.push(item.to_string());
        }
    }
}

impl Display for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.first.join(", "))?;
        match self.count - self.first.len() {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

/// Plants of one store that are not the same in another.
#[derive(Default)]
struct Differences {
    missing: Sample,
    /// Another name or tag.
    different: Sample,
    /// The same plant, but added by another token or at another time.
    added_differently: Sample,
}

/// Looks up each plant of `store` in `other`, reading both once in the order of their ids.
fn find_differences(
    store: &mut Store,
    other: &mut Store,
    progress: &ProgressBar,
    same_token: impl Fn(TokenId, TokenId) -> bool,
) -> anyhow::Result<Differences> {
    let mut found = Differences::default();
    let mut plants = Plants::of(store);
    let mut others = Plants::of(other);
    while let Some(plant) = plants.at_or_after(i64::MIN)? {
        match others.at_or_after(plant.id)? {
            Some(other) if other.id == plant.id => {
                if other.plant != plant.plant {
                    found.different.push(plant.id);
                } else if other.added_at != plant.added_at
                    || !same_token(plant.added_by, other.added_by)
                {
                    found.added_differently.push(plant.id);
                }
            }
            Some(other) => {
                found.missing.push(plant.id);
                others.page.push_front(other);
            }
            None => found.missing.push(plant.id),
        }
        progress.advance(1);
    }
    Ok(found)
}

/// The plants of a store by id, read a page at a time.
struct Plants<'a> {
    store: &'a mut Store,
    page: VecDeque<PlantRecord>,
    /// Where the next page begins; none after the last one.
    next: Option<i64>,
}

impl<'a> Plants<'a> {
    fn of(store: &'a mut Store) -> Self {
        Self {
            store,
            page: VecDeque::new(),
            next: Some(i64::MIN),
        }
    }

    /// Takes the next plant with this id or a larger one.
    fn at_or_after(&mut self, id: i64) -> anyhow::Result<Option<PlantRecord>> {
        while self.page.front().is_some_and(|plant| plant.id < id) {
            self.page.pop_front();
        }
        if self.page.is_empty()
            && let Some(next) = self.next
        {
            let page = self.store.plants(&(next.max(id)..=i64::MAX))?;
            self.next = page.next_id();
            self.page = page.plants.into();
        }
        Ok(self.page.pop_front())
    }
}
