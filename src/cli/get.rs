//! `plantstore get`, beside a running server or without one.

use anyhow::bail;
use clap::Args;

use crate::cli::listed::{Listed, Listing};
use crate::cli::output::{print, table};
use crate::cli::text::printable;
use crate::config::StoreSettings;
use crate::store::Store;

#[derive(Debug, Args)]
pub(super) struct Get {
    /// The id of the plant
    #[arg(allow_negative_numbers = true)]
    id: i64,

    /// A JSON object instead of lines
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    store: StoreSettings,
}

impl Get {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let mut store = Store::open(&self.store.store)?;
        let mut listing = Listing::default();
        let found = listing.of(&mut store, &[self.id])?;
        let Some(listed) = found.first() else {
            listing.end()?;
            bail!("there is no plant with the id {}", self.id);
        };
        print(&if self.json {
            listed.json()?
        } else {
            lines(listed)
        })?;
        listing.end()
    }
}

fn lines(listed: &Listed) -> String {
    let plant = &listed.plant.plant;
    let mut rows = vec![
        ("id", listed.plant.id.to_string()),
        ("name", printable(&plant.name)),
    ];
    rows.extend(plant.tag.as_deref().map(|tag| ("tag", printable(tag))));
    let added_at = listed.plant.added_at.strftime("%Y-%m-%d %H:%M:%S%.3f UTC");
    rows.push(("added at", added_at.to_string()));
    let added_by = listed.added_by.as_deref().unwrap_or("-");
    rows.push(("added by", added_by.to_owned()));
    let rows = rows.into_iter().map(|(key, value)| [key.to_owned(), value]);
    table(rows.collect())
}
