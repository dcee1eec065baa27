//! `plantstore copy`: everything from one store to another. Tokens first, so that every plant knows who added it;
//! what is there already is compared and not sent again, so that it can be run again at any time.

use anyhow::{Context, bail};
use clap::Args;

use crate::cli::progress::Progress;
use crate::config::StoreSettings;
use crate::store::{Location, PlantRecord, Store};

/// Plants in one transaction.
const PAGE_LEN: u32 = 1000;

#[derive(Debug, Args)]
pub(super) struct Copy {
    #[command(flatten)]
    store: StoreSettings,

    /// Where to: sqlite:PATH or postgres://USER@HOST/DATABASE, made if it is not there
    #[arg(long, value_name = "URL")]
    to: Location,
}

impl Copy {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let (from, to) = (&self.store.store, &self.to);
        if from == to {
            bail!("{from} cannot be copied to itself; choose another --to");
        }
        let mut source = Store::open(from)?;
        let mut target = Store::open_or_create(to)?;
        let tokens = source.tokens()?;
        target
            .keep_tokens(&tokens)
            .with_context(|| format!("{to} has other tokens; copy to a store of its own"))?;
        let plants = source.count_plants()?;
        each_page(&mut source, &Progress::of(plants, "copying"), |page| {
            let missing = missing(page, &mut target)?;
            Ok(target.keep_plants(&missing)?)
        })?;
        each_page(
            &mut source,
            &Progress::of(plants, "comparing"),
            |page| match missing(page, &mut target)?.first() {
                Some(plant) => bail!("{to} has another plant with id {}", plant.id),
                None => Ok(()),
            },
        )?;

        let there = target.tokens()?;
        if let Some(token) = tokens.iter().find(|token| !there.contains(token)) {
            bail!("token {} is not the same in {to}", token.name);
        }
        let (plants, copied) = (source.count_plants()?, target.count_plants()?);
        if (copied, there.len()) != (plants, tokens.len()) {
            bail!(
                "{from} has plants {plants}, tokens {}; {to} has plants {copied}, tokens {}; \
                 if plants were added meanwhile, stop the service and run this again",
                tokens.len(),
                there.len()
            );
        }
        eprintln!(
            "copied and compared: plants {copied}, tokens {}",
            there.len()
        );
        Ok(())
    }
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
