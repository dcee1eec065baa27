//! `plantstore copy`: all tokens and plants from one store to another, of either kind, compared at the end. Tokens are matched
//! by their digest before anything is written, so that each plant refers to the same token in both stores. Running it again
//! continues an interrupted copy.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt::Display;
use std::fs;

use anyhow::{Context, bail};
use clap::Args;

use crate::cli::terminal::Progress;
use crate::config::StoreSettings;
use crate::fs::is_same_file;
use crate::store::{Location, Mode, PlantRecord, Store, TokenId, TokenRecord};

#[derive(Debug, Args)]
pub(super) struct Copy {
    #[command(flatten)]
    store: StoreSettings,

    /// The target: sqlite:PATH or postgres://USER@HOST/DATABASE, created if it does not exist
    #[arg(long, value_name = "URL")]
    to: Location,

    /// Add to a target that has plants or tokens of its own
    #[arg(long)]
    force: bool,
}

impl Copy {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let (from, to) = (&self.store.store, &self.to);
        if is_same(from, to) {
            bail!("{from} cannot be copied to itself; choose another --to");
        }
        let mut from = Side {
            store: Store::open(from, Mode::Read)?,
            name: from.to_string(),
        };
        let mut to = Side {
            store: Store::open(to, Mode::Create)?,
            name: to.to_string(),
        };
        let target = if self.force {
            Target::Any
        } else {
            Target::Copy
        };
        let copied = copy(&mut from, &mut to, target)?.compare(&mut from, &mut to)?;
        let (plants, tokens) = (copied.plants, copied.tokens);
        eprintln!("copied and compared: plants {plants}, tokens {tokens}");
        copied.report_added_otherwise();
        Ok(())
    }
}

/// Whether two locations are one store: by any path, link or user.
fn is_same(from: &Location, to: &Location) -> bool {
    match (from.file(), to.file()) {
        (Some(from), Some(to)) => is_same_file(fs::metadata(from), fs::metadata(to)),
        _ => from.to_string() == to.to_string(),
    }
}

/// Plants in one transaction.
const PAGE_LEN: u32 = 1000;

/// Names and ids that an error message lists.
const LISTED_MAX: usize = 10;

/// A store, and its name in messages.
pub(super) struct Side {
    pub(super) store: Store,
    pub(super) name: String,
}

/// What the target may contain before the copy.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    /// Nothing that the source does not have: it is empty, or an earlier copy of the source.
    Copy,
    /// Plants and tokens of its own, which stay as they are.
    Any,
}

/// A copy, with the tokens that are known in both stores.
pub(super) struct Transfer {
    target: Target,
    /// As read from the source.
    tokens: Vec<TokenRecord>,
    /// The id in the target of each token of the source.
    ids: HashMap<TokenId, TokenId>,
}

/// What a copy contains.
pub(super) struct Copied {
    pub(super) plants: u64,
    pub(super) tokens: usize,
    /// Plants that the target already had from another token, or from another time.
    pub(super) added_otherwise: u64,
}

impl Copied {
    /// Says how many plants were left as they were in the target.
    pub(super) fn report_added_otherwise(&self) {
        if self.added_otherwise > 0 {
            eprintln!(
                "left as they were, because they had been added by another token or at another time: plants {}",
                self.added_otherwise
            );
        }
    }
}

/// Inserts what the target lacks. Fails before anything is written if the two stores contradict each other.
pub(super) fn copy(from: &mut Side, to: &mut Side, target: Target) -> anyhow::Result<Transfer> {
    let mut transfer = Transfer {
        target,
        tokens: Vec::new(),
        ids: HashMap::new(),
    };
    let planned = transfer.plan_tokens(from, to)?;
    transfer.check_target(from, to)?;
    transfer.write_tokens(to, &planned)?;

    let progress = Progress::of(from.store.count_plants()?, "copying");
    let mut next = Some(i64::MIN);
    while let Some(first) = next {
        let page = from.store.plants(&(first..=i64::MAX), PAGE_LEN)?;
        let (Some(first), Some(last)) = (page.first(), page.last()) else {
            break;
        };
        next = last.id.checked_add(1);
        let there = to.store.plants(&(first.id..=last.id), PAGE_LEN)?;
        let there: HashSet<i64> = there.iter().map(|plant| plant.id).collect();
        let mut missing = Vec::new();
        for plant in page.iter().filter(|plant| !there.contains(&plant.id)) {
            if !transfer.ids.contains_key(&plant.added_by) {
                // The source is in use, and the token was created after the tokens were read.
                transfer.copy_tokens(from, to)?;
            }
            missing.push(transfer.translated(plant, from)?);
        }
        to.store.insert_plants(&missing)?;
        progress.advance(page.len());
    }
    Ok(transfer)
}

impl Transfer {
    /// Brings the tokens of the target up to date: new ones, revocations, last use.
    pub(super) fn copy_tokens(&mut self, from: &mut Side, to: &mut Side) -> anyhow::Result<()> {
        let planned = self.plan_tokens(from, to)?;
        self.write_tokens(to, &planned)
    }

    /// Reads the tokens of both stores. Returns those of the source with the ids that they have, or get, in the target.
    fn plan_tokens(&mut self, from: &mut Side, to: &mut Side) -> anyhow::Result<Vec<TokenRecord>> {
        let there = to.store.tokens()?;
        self.tokens = from.store.tokens()?;
        let known = ids_by_digest(&self.tokens, &there);
        let is_conflict = |token: &&TokenRecord| {
            !known.contains_key(&token.id) && there.iter().any(|other| other.name == token.name)
        };
        let conflicts = self.tokens.iter().filter(is_conflict);
        let conflicts: Vec<_> = conflicts.map(|token| &token.name).collect();
        if !conflicts.is_empty() {
            bail!(
                "{} and {} have different tokens of the same name: {}; nothing was written; choose an empty \
                 store, or copy the plants alone with `plantstore export` and `plantstore import`",
                from.name,
                to.name,
                listed(&conflicts)
            );
        }
        if self.target == Target::Copy {
            let is_other = |other: &&TokenRecord| {
                !self.tokens.iter().any(|token| token.digest == other.digest)
            };
            let others: Vec<_> = there
                .iter()
                .filter(is_other)
                .map(|token| &token.name)
                .collect();
            if !others.is_empty() {
                bail!(
                    "{} has tokens that {} does not have: {}; nothing was written; choose an empty store, or add \
                     to this one with --force",
                    to.name,
                    from.name,
                    listed(&others)
                );
            }
        }
        Ok(with_target_ids(&self.tokens, &there))
    }

    /// Compares the plants that the target already has with those of the source.
    fn check_target(&mut self, from: &mut Side, to: &mut Side) -> anyhow::Result<()> {
        let count = to.store.count_plants()?;
        if count == 0 {
            return Ok(());
        }
        let there = to.store.tokens()?;
        self.ids = ids_by_digest(&self.tokens, &there);
        let progress = Progress::of(count, "checking");
        let same_token = |target, source| self.ids.get(&source) == Some(&target);
        let found = differences(&mut to.store, &mut from.store, &progress, same_token)?;
        let force = ", or add to this one with --force";
        let (problem, ids, advice) = match self.target {
            _ if !found.different.is_empty() => (
                "has other plants with the ids of plants in",
                found.different,
                "",
            ),
            Target::Copy if !found.added_otherwise.is_empty() => (
                "has plants added by another token, or at another time, than in",
                found.added_otherwise,
                force,
            ),
            Target::Copy if !found.missing.is_empty() => {
                ("has plants that are not in", found.missing, force)
            }
            _ => return Ok(()),
        };
        bail!(
            "{} {problem} {}: {ids}; nothing was written; choose an empty store{advice}",
            to.name,
            from.name
        );
    }

    /// Writes the tokens, and finds out by reading them back which one is which.
    fn write_tokens(&mut self, to: &mut Side, planned: &[TokenRecord]) -> anyhow::Result<()> {
        to.store
            .merge_tokens(planned)
            .with_context(|| format!("cannot write the tokens to {}", to.name))?;
        let there = to.store.tokens()?;
        self.ids = ids_by_digest(&self.tokens, &there);
        let is_missing = |token: &&TokenRecord| !self.ids.contains_key(&token.id);
        if let Some(token) = self.tokens.iter().find(is_missing) {
            bail!(
                "token {} could not be created in {}, whose tokens have changed meanwhile; run this again",
                token.name,
                to.name
            );
        }
        Ok(())
    }

    /// A plant of the source as the target stores it.
    fn translated(&self, plant: &PlantRecord, from: &Side) -> anyhow::Result<PlantRecord> {
        let Some(added_by) = self.ids.get(&plant.added_by) else {
            bail!(
                "plant {} of {} was added by token {}, which does not exist; run `plantstore check`",
                plant.id,
                from.name,
                plant.added_by.0
            );
        };
        Ok(PlantRecord {
            added_by: *added_by,
            ..plant.clone()
        })
    }

    /// Verifies that the target has every plant and token of the source and, unless it may have others, nothing else.
    pub(super) fn compare(&self, from: &mut Side, to: &mut Side) -> anyhow::Result<Copied> {
        let progress = Progress::of(from.store.count_plants()?, "comparing");
        let same_token = |source, target| self.ids.get(&source) == Some(&target);
        let found = differences(&mut from.store, &mut to.store, &progress, same_token)?;
        drop(progress);
        let (from_name, to_name) = (&from.name, &to.name);
        if !found.different.is_empty() {
            let ids = found.different;
            bail!("{to_name} has other plants than {from_name} with the same ids: {ids}");
        }
        if !found.missing.is_empty() {
            let ids = found.missing;
            bail!(
                "{to_name} lacks plants of {from_name}: {ids}; if they were added meanwhile, stop the service and run \
                 this again"
            );
        }
        if self.target == Target::Copy && !found.added_otherwise.is_empty() {
            let ids = found.added_otherwise;
            bail!(
                "{to_name} has plants added by another token, or at another time, than in {from_name}: {ids}"
            );
        }
        let there = to.store.tokens()?;
        for token in &self.tokens {
            let copy = there.iter().find(|other| other.digest == token.digest);
            let copy = copy.with_context(|| format!("{to_name} lacks the token {}", token.name))?;
            if token.revoked_at.is_some() && copy.revoked_at.is_none() {
                bail!(
                    "token {} is revoked in {from_name} and not in {to_name}",
                    token.name
                );
            }
            if let Some(note) = difference(token, copy) {
                eprintln!(
                    "token {} of {from_name} {note} in {to_name}; that stays",
                    token.name
                );
            }
        }
        let (plants, copied) = (from.store.count_plants()?, to.store.count_plants()?);
        if self.target == Target::Copy && (copied, there.len()) != (plants, self.tokens.len()) {
            bail!(
                "{from_name} has plants {plants}, tokens {}; {to_name} has plants {copied}, tokens {}; if plants were \
                 added meanwhile, stop the service and run this again",
                self.tokens.len(),
                there.len()
            );
        }
        Ok(Copied {
            plants,
            tokens: self.tokens.len(),
            added_otherwise: found.added_otherwise.count,
        })
    }
}

/// How one token differs in the two stores; its state may.
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
fn with_target_ids(tokens: &[TokenRecord], there: &[TokenRecord]) -> Vec<TokenRecord> {
    let known = ids_by_digest(tokens, there);
    let mut used: HashSet<i64> = there.iter().map(|token| token.id.0).collect();
    let mut with_id = |token: &TokenRecord| {
        let id = known.get(&token.id).copied().unwrap_or_else(|| {
            let is_free = |id: &i64| !used.contains(id);
            let mut ids = std::iter::once(token.id.0).chain(1..);
            let id = ids.find(is_free).expect("there are fewer tokens than ids");
            used.insert(id);
            TokenId(id)
        });
        TokenRecord {
            id,
            ..token.clone()
        }
    };
    tokens.iter().map(&mut with_id).collect()
}

/// The ids in the target of the tokens that it has.
fn ids_by_digest(tokens: &[TokenRecord], there: &[TokenRecord]) -> HashMap<TokenId, TokenId> {
    let there: HashMap<_, _> = there.iter().map(|token| (token.digest, token.id)).collect();
    let id = |token: &TokenRecord| Some((token.id, *there.get(&token.digest)?));
    tokens.iter().filter_map(id).collect()
}

/// How the plants of one store are found in another.
#[derive(Default)]
struct Differences {
    missing: Ids,
    /// Another name or tag.
    different: Ids,
    /// The same plant, but added by another token or at another time.
    added_otherwise: Ids,
}

/// The number of some plants, and the first of their ids.
#[derive(Default)]
struct Ids {
    count: u64,
    first: Vec<i64>,
}

impl Ids {
    fn push(&mut self, id: i64) {
        self.count += 1;
        if self.first.len() < LISTED_MAX {
            self.first.push(id);
        }
    }

    fn is_empty(&self) -> bool {
        self.count == 0
    }
}

impl Display for Ids {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ids: Vec<_> = self.first.iter().map(ToString::to_string).collect();
        write!(f, "{} (id {}", self.count, ids.join(", "))?;
        f.write_str(if self.count > self.first.len() as u64 {
            ", …)"
        } else {
            ")"
        })
    }
}

/// Looks up each plant of one store in another, reading both once in the order of their ids.
fn differences(
    of: &mut Store,
    within: &mut Store,
    progress: &Progress,
    same_token: impl Fn(TokenId, TokenId) -> bool,
) -> anyhow::Result<Differences> {
    let mut found = Differences::default();
    let mut of = Plants::of(of);
    let mut within = Plants::of(within);
    while let Some(plant) = of.at_or_after(i64::MIN)? {
        match within.at_or_after(plant.id)? {
            Some(other) if other.id == plant.id => {
                if other.plant != plant.plant {
                    found.different.push(plant.id);
                } else if other.added_at != plant.added_at
                    || !same_token(plant.added_by, other.added_by)
                {
                    found.added_otherwise.push(plant.id);
                }
            }
            Some(other) => {
                found.missing.push(plant.id);
                within.page.push_front(other);
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
            let page = self.store.plants(&(next.max(id)..=i64::MAX), PAGE_LEN)?;
            self.next = page.last().and_then(|last| last.id.checked_add(1));
            self.page = page.into();
        }
        Ok(self.page.pop_front())
    }
}

/// Names, the first of them if they are many.
fn listed<T: Display>(names: &[T]) -> String {
    let first: Vec<_> = names
        .iter()
        .take(LISTED_MAX)
        .map(ToString::to_string)
        .collect();
    match names.len().saturating_sub(LISTED_MAX) {
        0 => first.join(", "),
        more => format!("{} and {more} more", first.join(", ")),
    }
}
