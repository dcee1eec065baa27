//! `plantstore list`, `get` and `stats`: what is stored, read online or without a server.

use std::collections::HashMap;
use std::fmt::Write;
use std::sync::Arc;

use anyhow::bail;
use clap::Args;
use indicatif::{HumanBytes, HumanCount};
use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;
use serde::Serialize;

use crate::cli::terminal::{
    Progress, Table, Unit, cut, print, printable, table, terminal_columns, width,
};
use crate::config::{StoreSettings, duration};
use crate::logging::write_stderr;
use crate::plant::Plant;
use crate::store::{
    Cursor, DamagedPlant, Filter, Mode, PlantRecord, Statistics, Store, StoreError, TagFilter,
    TokenId,
};

/// Plants that are read and shown at a time: any of them may be long.
const PAGE_LEN: usize = 100;

/// Cursors that are kept in memory at a time, of 24 bytes each. A filtered list needs a scan for each of these.
const CURSORS_MAX: u32 = 1_000_000;

/// On a terminal no name, tag or token is cut to less than this.
const COLUMN_MIN: usize = 12;

#[derive(Debug, Args)]
pub(super) struct List {
    /// Only those with this tag
    #[arg(long)]
    tag: Option<String>,

    /// Only those without a tag
    #[arg(long, conflicts_with = "tag")]
    untagged: bool,

    /// Only those whose name contains this; A to Z match in either case
    #[arg(long, value_name = "PART")]
    name: Option<String>,

    /// Only those added since then: 2026-11-01, 2026-11-01T12:00:00Z, or 7d for the last seven days
    #[arg(long, value_name = "TIME", value_parser = moment)]
    since: Option<Timestamp>,

    /// Only those added before then; a time as for --since
    #[arg(long, value_name = "TIME", value_parser = moment)]
    until: Option<Timestamp>,

    /// Only those that come after this one, as the last line of a list names it, or that were added before this time
    #[arg(long, value_name = "PLANT", value_parser = before)]
    before: Option<Before>,

    /// How many at most
    #[arg(long, value_name = "N", default_value = "50", value_parser = clap::value_parser!(u64).range(1..))]
    limit: u64,

    /// One JSON object a line instead of a table
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    store: StoreSettings,
}

/// Where a list begins.
#[derive(Debug, Clone, Copy)]
enum Before {
    /// After this one.
    Plant(Cursor),
    /// With the plants that were added before this time.
    Time(Timestamp),
}

impl List {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let mut store = Store::open(&self.store.store, Mode::Read)?;
        let (mut before, until) = match self.before {
            Some(Before::Plant(cursor)) => (cursor, self.until),
            Some(Before::Time(time)) => {
                let until = self.until.map_or(time, |until| until.min(time));
                (Cursor::END, Some(until))
            }
            None => (Cursor::END, self.until),
        };
        let filter = Filter {
            since: self.since,
            until,
            tag: match self.tag {
                Some(tag) => Some(TagFilter::Equals(tag)),
                None => self.untagged.then_some(TagFilter::Untagged),
            },
            name_contains: self.name,
        };
        let mut listing = Listing::default();
        let mut sheet = Sheet::new(self.json);
        let mut left = self.limit;
        let has_more = loop {
            // One more than is shown, to know whether there are more.
            let len = u32::try_from(left.saturating_add(1)).unwrap_or(CURSORS_MAX);
            let len = len.min(CURSORS_MAX);
            let progress = Progress::new("reading", None, Unit::Items);
            let cursors = store.find(&filter, before, len, &mut |read| progress.advance(read))?;
            drop(progress);
            let (shown, more) = match usize::try_from(left) {
                Ok(left) if left < cursors.len() => cursors.split_at(left),
                _ => (&cursors[..], &[][..]),
            };
            for page in shown.chunks(PAGE_LEN) {
                let ids: Vec<_> = page.iter().map(|cursor| cursor.id).collect();
                sheet.print(&listing.of(&mut store, &ids)?)?;
            }
            before = shown.last().copied().unwrap_or(before);
            left -= shown.len() as u64;
            if !more.is_empty() || cursors.len() < len as usize {
                break !more.is_empty();
            }
        };
        sheet.end()?;
        if has_more {
            write_stderr(format!("more: the same with --before {before}\n"));
        }
        listing.end()
    }
}

/// What is printed, page by page.
struct Sheet {
    json: bool,
    /// Of the terminal.
    columns: Option<usize>,
    table: Table<5>,
    /// How wide names, tags and tokens may be; known once some were seen.
    widths: Option<[usize; 3]>,
}

impl Sheet {
    fn new(json: bool) -> Self {
        Self {
            json,
            columns: terminal_columns(),
            table: Table::default(),
            widths: None,
        }
    }

    fn print(&mut self, plants: &[Listed]) -> anyhow::Result<()> {
        if self.json {
            let lines: Result<String, _> = plants.iter().map(Listed::json).collect();
            return print(&lines?);
        }
        let mut rows: Vec<_> = plants.iter().map(row).collect();
        if self.widths.is_none() {
            let head = ["ID", "NAME", "TAG", "ADDED", "BY"];
            rows.insert(0, head.map(str::to_owned));
        }
        let widths = self
            .widths
            .get_or_insert_with(|| widths(&rows, self.columns));
        for [_, name, tag, _, by] in &mut rows {
            for (cell, width) in [name, tag, by].into_iter().zip(*widths) {
                *cell = cut(cell, width);
            }
        }
        print(&self.table.rows(rows))
    }

    /// A table has a head, also without any plant.
    fn end(&mut self) -> anyhow::Result<()> {
        match self.widths {
            None => self.print(&[]),
            Some(_) => Ok(()),
        }
    }
}

fn row(listed: &Listed) -> [String; 5] {
    let plant = &listed.plant.plant;
    [
        listed.plant.id.to_string(),
        printable(&plant.name),
        plant.tag.as_deref().map(printable).unwrap_or_default(),
        listed
            .plant
            .added_at
            .strftime("%Y-%m-%d %H:%M:%S UTC")
            .to_string(),
        listed.added_by.as_deref().unwrap_or("-").to_owned(),
    ]
}

/// How wide names, tags and tokens may be, for all of a row to fit in so many columns.
fn widths(rows: &[[String; 5]], columns: Option<usize>) -> [usize; 3] {
    let Some(columns) = columns else {
        return [usize::MAX; 3];
    };
    let widest = |column: usize| {
        rows.iter()
            .map(|row| width(&row[column]))
            .max()
            .unwrap_or(0)
    };
    let [id, tag, time, by] = [0, 2, 3, 4].map(widest);
    let left = columns.saturating_sub(id + time + 4 * 2);
    let share = (left / 4).max(COLUMN_MIN);
    let (tag, by) = (tag.min(share), by.min(share));
    let name = left.saturating_sub(tag + by).max(COLUMN_MIN);
    [name, tag, by]
}

/// A time, or how long ago. What has no time zone is in UTC.
fn moment(text: &str) -> Result<Timestamp, String> {
    if let Ok(time) = text.parse() {
        return Ok(time);
    }
    if let Ok(time) = text.parse::<DateTime>()
        && let Ok(time) = TimeZone::UTC.to_timestamp(time)
    {
        return Ok(time);
    }
    let ago = duration(text)
        .map_err(|_| "expected a time such as 2026-11-01, 2026-11-01T12:00:00Z or 7d".to_owned())?;
    Ok(Timestamp::now()
        .saturating_sub(ago)
        .unwrap_or(Timestamp::MIN))
}

/// The position of a plant, or a time.
fn before(text: &str) -> Result<Before, String> {
    if text.contains('/') {
        text.parse().map(Before::Plant)
    } else {
        moment(text).map(Before::Time)
    }
}

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
        let mut store = Store::open(&self.store.store, Mode::Read)?;
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
        for found in store.get(ids)? {
            match found {
                Ok(plant) => {
                    let added_by = self.name(store, plant.added_by)?;
                    if added_by.is_none() {
                        let (id, token) = (plant.id, plant.added_by.0);
                        self.tell(&format!(
                            "plant {id}: added by token {token}, which is not there"
                        ));
                    }
                    all.push(Listed { plant, added_by });
                }
                Err(DamagedPlant { id }) => self.tell(&format!("plant {id}: not what was stored")),
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
            write_stderr(format!("{problem}\n"));
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
        let mut store = Store::open(&self.store.store, Mode::Read)?;
        let progress = Progress::new("counted", None, Unit::Items);
        let now = Timestamp::now();
        let statistics = store.statistics(now, &mut |read| progress.advance(read))?;
        drop(progress);
        let summary = Summary::of(&statistics);
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
    fn of(statistics: &'a Statistics) -> Self {
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
            days: statistics.days().map(day).collect(),
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
        let sizes = [("database", self.database_bytes), ("wal", self.wal_bytes)];
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
