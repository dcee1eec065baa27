//! Everything from one store to another, whatever kinds they are. Tokens first, so that every plant knows who added it;
//! what is there already is compared and not sent again, so that it can be run again at any time.

use anyhow::{Context, bail};

use crate::cli::progress::Progress;
use crate::store::{PlantRecord, Store, TokenRecord};

/// Plants in one transaction.
const PAGE_LEN: u32 = 1000;

/// A store, and what to call it.
pub(super) struct Side {
    pub(super) store: Store,
    pub(super) name: String,
}

/// Brings what is missing. The tokens that were there when it began.
pub(super) fn copy(from: &mut Side, to: &mut Side) -> anyhow::Result<Vec<TokenRecord>> {
    let tokens = from.store.tokens()?;
    to.store
        .keep_tokens(&tokens)
        .with_context(|| format!("{} has other tokens; copy to a store of its own", to.name))?;
    let progress = Progress::of(from.store.count_plants()?, "copying");
    each_page(&mut from.store, &progress, |page| {
        let missing = missing(page, &mut to.store)?;
        Ok(to.store.keep_plants(&missing)?)
    })?;
    Ok(tokens)
}

/// Makes sure that both have the same, and nothing else. How many plants and tokens that is.
pub(super) fn compare(
    from: &mut Side,
    to: &mut Side,
    tokens: &[TokenRecord],
) -> anyhow::Result<(u64, usize)> {
    let progress = Progress::of(from.store.count_plants()?, "comparing");
    each_page(&mut from.store, &progress, |page| {
        match missing(page, &mut to.store)?.first() {
            Some(plant) => bail!("{} has another plant with id {}", to.name, plant.id),
            None => Ok(()),
        }
    })?;
    let there = to.store.tokens()?;
    if let Some(token) = tokens.iter().find(|token| !there.contains(token)) {
        bail!("token {} is not the same in {}", token.name, to.name);
    }
    let (plants, copied) = (from.store.count_plants()?, to.store.count_plants()?);
    if (copied, there.len()) != (plants, tokens.len()) {
        bail!(
            "{} has plants {plants}, tokens {}; {} has plants {copied}, tokens {}; \
             if plants were added meanwhile, stop the service and run this again",
            from.name,
            tokens.len(),
            to.name,
            there.len()
        );
    }
    Ok((copied, there.len()))
}

/// Hands over all plants, by id, a page at a time.
fn each_page(
    source: &mut Store,
    progress: &Progress,
    mut work: impl FnMut(&[PlantRecord]) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut next = Some(i64::MIN);
    while let Some(first) = next {
        let page = source.plants(first..=i64::MAX, PAGE_LEN)?;
        let Some(last) = page.last() else {
            break;
        };
        next = last.id.checked_add(1);
        work(&page)?;
        progress.advance(page.len());
    }
    Ok(())
}

/// Those of a page that are not in the target just as they are.
fn missing(page: &[PlantRecord], target: &mut Store) -> anyhow::Result<Vec<PlantRecord>> {
    let (Some(first), Some(last)) = (page.first(), page.last()) else {
        return Ok(Vec::new());
    };
    // If there are more than that, some are not ours; that is seen when all are counted.
    let there = target.plants(first.id..=last.id, PAGE_LEN)?;
    let mut there = there.iter().peekable();
    let mut missing = Vec::new();
    for plant in page {
        while there.next_if(|other| other.id < plant.id).is_some() {}
        if there.next_if(|other| *other == plant).is_none() {
            missing.push(plant.clone());
        }
    }
    Ok(missing)
}
