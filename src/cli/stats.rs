//! `plantstore stats`, beside a running server or without one.

use std::fmt::Write;

use anyhow::bail;
use clap::Args;
use indicatif::{HumanBytes, HumanCount};
use jiff::Timestamp;
use serde::Serialize;

use crate::cli::output::{print, table, terminal_columns};
use crate::cli::progress::Progress;
use crate::cli::text::{cut, printable};
use crate::config::StoreSettings;
use crate::store::{Days, Statistics, Store};

/// The longest bar.
const BAR_COLUMNS: u64 = 40;

/// A tag is cut to this on a terminal.
const TAG_COLUMNS: usize = 40;

#[derive(Debug, Args)]
pub(super) struct Stats {
    /// A JSON object instead of tables
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    store: StoreSettings,
}

impl Stats {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let mut store = Store::open(&self.store.store)?;
        let days = Days::until(Timestamp::now());
        let progress = Progress::counting("counted");
        let statistics = store.statistics(days, &mut |read| progress.advance(read))?;
        drop(progress);
        let summary = Summary::of(&statistics, days);
        print(&if self.json {
            format!("{}\n", serde_json::to_string(&summary)?)
        } else {
            summary.text(terminal_columns().is_some())
        })?;
        if statistics.damaged > 0 {
            let damaged = statistics.damaged;
            bail!(
                "the store is damaged, plants that are not what was stored: {damaged}; run `plantstore check`"
            );
        }
        Ok(())
    }
}

/// What is told, in the words of the JSON object.
#[derive(Serialize)]
struct Summary<'a> {
    plants: u64,
    without_tag: u64,
    tags: Vec<Tag<'a>>,
    /// Plants with a tag that is not among those.
    other_tags: u64,
    tokens: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    database_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    wal_bytes: Option<u64>,
    days: Vec<Day>,
    /// Plants that are dated after today.
    future: u64,
}

#[derive(Serialize)]
struct Tag<'a> {
    tag: &'a str,
    plants: u64,
}

#[derive(Serialize)]
struct Day {
    day: String,
    added: u64,
}

impl<'a> Summary<'a> {
    fn of(statistics: &'a Statistics, days: Days) -> Self {
        let tags = statistics.tags.iter();
        let tags: Vec<_> = tags
            .map(|(tag, plants)| Tag {
                tag,
                plants: *plants,
            })
            .collect();
        let told: u64 = tags.iter().map(|tag| tag.plants).sum();
        let others = statistics.without_tag + statistics.damaged + told;
        let day = |(day, added): (Timestamp, u64)| Day {
            day: day.strftime("%Y-%m-%d").to_string(),
            added,
        };
        Self {
            plants: statistics.plants,
            without_tag: statistics.without_tag,
            other_tags: statistics.plants.saturating_sub(others),
            tags,
            tokens: statistics.tokens,
            database_bytes: statistics.database_bytes,
            wal_bytes: statistics.wal_bytes,
            days: days.each().zip(statistics.days).map(day).collect(),
            future: statistics.future,
        }
    }

    /// For people; on a terminal with bars, and elsewhere with figures that are easy to take apart.
    fn text(&self, on_terminal: bool) -> String {
        let count = |number: u64| {
            let grouped = on_terminal.then(|| HumanCount(number).to_string());
            grouped.unwrap_or_else(|| number.to_string())
        };
        let bytes = |number: u64| {
            let rounded = on_terminal.then(|| HumanBytes(number).to_string());
            rounded.unwrap_or_else(|| format!("{number} bytes"))
        };
        let mut totals = vec![
            ["plants".to_owned(), count(self.plants)],
            ["without a tag".to_owned(), count(self.without_tag)],
            ["tokens".to_owned(), count(self.tokens)],
        ];
        let sizes = [("database", self.database_bytes), ("log", self.wal_bytes)];
        for (name, size) in sizes {
            totals.extend(size.map(|size| [name.to_owned(), bytes(size)]));
        }
        let mut text = table(totals);

        if !self.tags.is_empty() {
            let mut tags = vec![["TAG".to_owned(), "PLANTS".to_owned()]];
            for tag in &self.tags {
                let shown = printable(tag.tag);
                let shown = if on_terminal {
                    cut(&shown, TAG_COLUMNS)
                } else {
                    shown
                };
                tags.push([shown, count(tag.plants)]);
            }
            let _ = write!(text, "\n{}", table(tags));
        }
        if self.other_tags > 0 {
            let _ = writeln!(text, "other tags: {}", count(self.other_tags));
        }

        let most = self.days.iter().map(|day| day.added).max().unwrap_or(0);
        let mut days = vec![["DAY", "ADDED", ""].map(str::to_owned)];
        for day in &self.days {
            let bar = if on_terminal {
                bar(day.added, most)
            } else {
                String::new()
            };
            days.push([day.day.clone(), count(day.added), bar]);
        }
        let _ = write!(text, "\n{}", table(days));
        if self.future > 0 {
            let _ = writeln!(text, "dated in the future: {}", count(self.future));
        }
        text
    }
}

/// As long as its part of the most, to an eighth of a column; never nothing for something.
fn bar(part: u64, most: u64) -> String {
    const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let columns = u128::from(BAR_COLUMNS * 8) * u128::from(part) / u128::from(most.max(1));
    let eighths = usize::try_from(columns)
        .unwrap_or_default()
        .max(usize::from(part > 0));
    format!("{}{}", "█".repeat(eighths / 8), EIGHTHS[eighths % 8])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_as_long_as_its_part() {
        assert_eq!(bar(0, 0), "");
        assert_eq!(bar(0, 9), "");
        assert_eq!(bar(1, 1_000_000), "▏");
        assert_eq!(bar(500, 1000), "█".repeat(20));
        assert_eq!(bar(9, 9), "█".repeat(40));
        assert_eq!(bar(u64::MAX, u64::MAX).chars().count(), 40);
    }
}
