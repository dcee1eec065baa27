//! `plantstore copy`: all tokens and plants from one store to another, of either kind, compared at the end. Tokens are matched
//! by their secrets before anything is written, so that each plant refers to the same token in both stores. Running it again
//! continues an interrupted copy.

use std::collections::HashMap;
use std::fmt::{self, Display};
use std::fs;

use anyhow::{Context, anyhow, bail};
use clap::Args;
use indicatif::ProgressBar;

use crate::cli::terminal::{Unit, count, counts, print_message, progress_bar};
use crate::config::StoreSettings;
use crate::fs::is_same_file;
use crate::store::{
    DamagedPlant, LOOKUP_LEN_MAX, Location, Mode, OpenError, PlantRecord, Store, TokenId,
    TokenIndex, TokenRecord, next_id,
};
use crate::user::current_user;

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
        transfer.read_tokens()?;
        transfer.check_target()?;
        transfer.write_tokens()?;
        transfer.copy_plants()?;
        Ok(transfer)
    }

    fn copy_plants(&mut self) -> anyhow::Result<()> {
        let count = self.from.store.count_plants()?;
        let progress = progress_bar("copying", Some(count), Unit::Items);
        let last = self.from.store.last_id()?;
        let mut next = last.and(Some(i64::MIN));
        while let Some(first) = next {
            let mut page = self.from.store.plants(first)?;
            next = next_id(&page).filter(|&next| Some(next) <= last);
            for plant in &mut page {
                if !self.ids.contains_key(&plant.added_by) {
                    // The source is in use, and the token was created after the tokens were read.
                    self.copy_tokens()?;
                }
                let Some(added_by) = self.ids.get(&plant.added_by) else {
                    bail!(
                        "plant {} of {} was added by token {}, which does not exist; run `plantstore check`",
                        plant.id,
                        self.from.name,
                        plant.added_by.0
                    );
                };
                plant.added_by = *added_by;
            }
            self.to.store.insert_plants(&page)?;
            progress.inc(page.len() as u64);
        }
        Ok(())
    }

    /// Brings the tokens of the target up to date: new ones, revocations, last use.
    pub(super) fn copy_tokens(&mut self) -> anyhow::Result<()> {
        self.read_tokens()?;
        self.write_tokens()
    }

    /// Reads the tokens of the source, and compares them with those of the target.
    fn read_tokens(&mut self) -> anyhow::Result<()> {
        let existing = self.to.store.tokens()?;
        self.tokens = self.from.store.tokens()?;
        let (from, to) = (&self.from.name, &self.to.name);
        let (ours, theirs) = (TokenIndex::new(&self.tokens), TokenIndex::new(&existing));
        let conflicts = Sample::of(self.tokens.iter().filter_map(|token| {
            let other = theirs.named(&token.name)?;
            let is_same = theirs.find(token).is_some_and(|same| same.id == other.id);
            // Revoked since it was copied, and its name used again: it will get the name that it has in the source.
            let is_renamed = ours.find(other).is_some_and(|same| same.name != other.name);
            (!is_same && !is_renamed).then_some(&token.name)
        }));
        if conflicts.count > 0 {
            bail!(
                "{from} and {to} have different tokens of the same name: {conflicts}; nothing was written; choose an empty \
                 store, or copy the plants alone with `plantstore export` and `plantstore import`"
            );
        }
        let others = Sample::of(existing.iter().filter_map(|other| {
            let is_known = ours.find(other).is_some();
            (!is_known).then_some(&other.name)
        }));
        if !self.force && others.count > 0 {
            bail!(
                "{to} has tokens that {from} does not have: {others}; nothing was written; choose an empty store, or add to \
                 this one with --force"
            );
        }
        Ok(())
    }

    /// Compares the plants that the target already has with those of the source.
    fn check_target(&mut self) -> anyhow::Result<()> {
        let count = self.to.store.count_plants()?;
        if count == 0 {
            return Ok(());
        }
        let ids = ids_in(&self.to.store.tokens()?, &self.tokens);
        let progress = progress_bar("checking", Some(count), Unit::Items);
        let same_token = |target, source| ids.get(&source) == Some(&target);
        let found = find_differences(&mut self.to, &mut self.from, &progress, same_token)?;
        let (from, to) = (&self.from.name, &self.to.name);
        let nothing = "; nothing was written; choose an empty store";
        found.reject_different(from, to, nothing)?;
        if !self.force {
            let advice = format!("{nothing}, or add to this one with --force");
            found.reject_added_differently(from, to, &advice)?;
            let missing = &found.missing;
            missing.reject(&format!("{to} has plants that are not in {from}"), &advice)?;
        }
        Ok(())
    }

    /// Writes the tokens, and reads them back to learn their ids.
    fn write_tokens(&mut self) -> anyhow::Result<()> {
        let to = &mut self.to;
        to.store
            .merge_tokens(&self.tokens, &current_user())
            .with_context(|| format!("cannot write the tokens to {}", to.name))?;
        self.ids = ids_in(&to.store.tokens()?, &self.tokens);
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

    /// Verifies that the target has every plant and token of the source and, unless forced, nothing else. Reports `done`
    /// with the counts.
    pub(super) fn compare(mut self, done: &str) -> anyhow::Result<()> {
        let count_before = self.from.store.count_plants()?;
        let progress = progress_bar("comparing", Some(count_before), Unit::Items);
        let same_token = |source, target| self.ids.get(&source) == Some(&target);
        let (from, to) = (&mut self.from, &mut self.to);
        let found = find_differences(from, to, &progress, same_token)?;
        drop(progress);
        let (from_name, to_name) = (&from.name, &to.name);
        found.reject_different(from_name, to_name, "")?;
        found.missing.reject(
            &format!("{to_name} is missing plants from {from_name}"),
            "; if they were added during the copy, stop the server and run the command again",
        )?;
        if !self.force {
            found.reject_added_differently(from_name, to_name, "")?;
        }
        let copies = to.store.tokens()?;
        let index = TokenIndex::new(&copies);
        for token in &self.tokens {
            let name = &token.name;
            let copy = index.find(token);
            let copy = copy.with_context(|| format!("{to_name} is missing the token {name}"))?;
            if token.revoked_at.is_some() && copy.revoked_at.is_none() {
                bail!("token {name} is revoked in {from_name} and not in {to_name}");
            }
            for (member, is_different) in [
                ("name", token.name != copy.name),
                ("expiry", token.expires_at != copy.expires_at),
                ("rate limit", token.rate_limit != copy.rate_limit),
            ] {
                if is_different {
                    print_message(format_args!(
                        "token {name} of {from_name} has another {member} in {to_name}; it was not changed"
                    ));
                }
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
        print_message(format_args!("{done}: {}", counts(plants, tokens)));
        if let unchanged @ 1.. = found.added_differently.count {
            print_message(format_args!(
                "left unchanged, because they had been added by another token or at another time: {}",
                count(unchanged as u64, "plant")
            ));
        }
        Ok(())
    }
}

/// The ids of tokens in the target, for those that it has.
fn ids_in(target: &[TokenRecord], tokens: &[TokenRecord]) -> HashMap<TokenId, TokenId> {
    let target = TokenIndex::new(target);
    let id = |token: &TokenRecord| Some((token.id, target.find(token)?.id));
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

    fn reject(&self, problem: &str, advice: &str) -> anyhow::Result<()> {
        match self.count {
            0 => Ok(()),
            count => bail!("{problem}: {count} (id {self}){advice}"),
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

impl Differences {
    fn reject_different(&self, from: &str, to: &str, advice: &str) -> anyhow::Result<()> {
        let problem = format!("{to} has other plants with the ids of plants in {from}");
        self.different.reject(&problem, advice)
    }

    fn reject_added_differently(&self, from: &str, to: &str, advice: &str) -> anyhow::Result<()> {
        let added = "has plants that were added by another token or at another time in";
        self.added_differently
            .reject(&format!("{to} {added} {from}"), advice)
    }
}

/// Looks up each plant of `store` in `other`.
fn find_differences(
    store: &mut NamedStore,
    other: &mut NamedStore,
    progress: &ProgressBar,
    same_token: impl Fn(TokenId, TokenId) -> bool,
) -> anyhow::Result<Differences> {
    let mut found = Differences::default();
    let last = store.store.last_id()?;
    let mut next = last.and(Some(i64::MIN));
    while let Some(first) = next {
        let page = store.store.plants(first)?;
        next = next_id(&page).filter(|&next| Some(next) <= last);
        for plants in page.chunks(LOOKUP_LEN_MAX) {
            let ids: Vec<_> = plants.iter().map(|plant| plant.id).collect();
            let others = other.store.get(&ids)?.into_iter();
            let others: HashMap<i64, PlantRecord> = others
                .map(|plant| plant.map(|plant| (plant.id, plant)))
                .collect::<Result<_, _>>()
                .map_err(|DamagedPlant { id }| {
                    anyhow!(
                        "plant {id} of {} is damaged; run `plantstore check`",
                        other.name
                    )
                })?;
            for plant in plants {
                let differing = match others.get(&plant.id) {
                    None => &mut found.missing,
                    Some(other) if other.plant != plant.plant => &mut found.different,
                    Some(other)
                        if other.added_at != plant.added_at
                            || !same_token(plant.added_by, other.added_by) =>
                    {
                        &mut found.added_differently
                    }
                    Some(_) => continue,
                };
                differing.push(plant.id);
            }
            progress.inc(plants.len() as u64);
        }
    }
    Ok(found)
}
