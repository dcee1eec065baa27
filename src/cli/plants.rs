//! `plantstore list`, `get` and `stats`. Plants that are damaged are reported and not shown.

use std::collections::HashMap;
use std::fmt::Write;
use std::sync::Arc;

use anyhow::bail;
use clap::Args;
use console::measure_text_width;
use indicatif::{HumanBytes, HumanCount};
use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;
use serde::Serialize;

use crate::cli::terminal::{
    PROBLEMS_SHOWN_MAX, Table, Unit, count, cut, fields, json_line, print, printable, progress_bar,
    table, terminal_columns,
};
use crate::config::{StoreSettings, duration};
use crate::logging::write_stderr;
use crate::plant::Plant;
use crate::store::{
    Cursor, DamagedPlant, DayCount, Filter, Mode, Statistics, Store, TagCount, TagFilter, TokenId,
};

/// Plants that are read and shown at a time: each may be long.
const PAGE_LEN: usize = 100;

/// Cursors in memory at a time, of 24 bytes each. A filtered list needs a scan for each of these pages.
const CURSORS_MAX: u32 = 1_000_000;

/// On a terminal no name, tag or token is cut to less than this.
const COLUMN_MIN: usize = 12;

/// On a terminal: the longest bar, and the widest tag.
const BAR_COLUMNS: u64 = 40;
const TAG_COLUMNS: usize = 40;

/// List plants, newest first
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  plantstore list --tag indoor --since 7d
  plantstore list --name fern --limit 10 --json
  plantstore list --until 2026-11-01 --untagged")]
pub(super) struct List {
    /// Only plants with this tag
    #[arg(long)]
    tag: Option<String>,

    /// Only plants without a tag
    #[arg(long, conflicts_with = "tag")]
    untagged: bool,

    /// Only plants whose name contains this text; ASCII letters are case-insensitive
    #[arg(long, value_name = "TEXT")]
    name: Option<String>,

    /// Only plants added at this time or later: 2026-11-01, 2026-11-01T12:00:00Z, or 7d for the last seven days
    #[arg(long, value_name = "TIME", value_parser = time)]
    since: Option<Timestamp>,

    /// Only plants added before this time
    #[arg(long, value_name = "TIME", value_parser = time)]
    until: Option<Timestamp>,

    /// Continue after this plant, as printed at the end of the previous page
    #[arg(long, value_name = "CURSOR")]
    cursor: Option<Cursor>,

    /// Maximum number of plants
    #[arg(long, value_name = "N", default_value = "50", value_parser = clap::value_parser!(u64).range(1..))]
    limit: u64,

    /// Print one JSON object per line
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    store: StoreSettings,
}

impl List {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let mut reader = PlantReader::open(&self.store)?;
        let mut table = None; // before the first page
        let mut before = self.cursor.unwrap_or(Cursor::END);
        let filter = Filter {
            since: self.since,
            until: self.until,
            tag: match self.tag {
                Some(tag) => Some(TagFilter::Equals(tag)),
                None => self.untagged.then_some(TagFilter::Untagged),
            },
            name_contains: self.name,
        };
        let mut left = self.limit;
        let has_more = loop {
            // One more than is shown, to know whether there are more.
            let len = u32::try_from(left.saturating_add(1)).unwrap_or(CURSORS_MAX);
            let len = len.min(CURSORS_MAX);
            let progress = progress_bar("reading", None, Unit::Items);
            let report = &mut |read| progress.inc(read as u64);
            let mut cursors = reader.store.find(&filter, before, len, report)?;
            drop(progress);
            let is_end = cursors.len() < len as usize;
            let has_more = cursors.len() as u64 > left;
            cursors.truncate(usize::try_from(left).unwrap_or(usize::MAX));
            for page in cursors.chunks(PAGE_LEN) {
                let ids: Vec<_> = page.iter().map(|cursor| cursor.id).collect();
                print_page(&reader.get(&ids)?, self.json, &mut table)?;
            }
            before = cursors.last().copied().unwrap_or(before);
            left -= cursors.len() as u64;
            if is_end || has_more {
                break has_more;
            }
        };
        if has_more {
            write_stderr(format!("more: the same with --cursor {before}\n"));
        } else if left == self.limit {
            print_page(&[], self.json, &mut table)?; // the header
            let is_unfiltered = filter.is_any() && self.cursor.is_none();
            let condition = if is_unfiltered { "" } else { " match" };
            write_stderr(format!("no plants{condition}\n"));
        }
        reader.finish()
    }
}

/// A time, or a duration back from now. Without a time zone it is in UTC.
fn time(text: &str) -> Result<Timestamp, String> {
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

/// Prints a page: JSON lines, or a part of a table whose columns keep the widths of the first page.
fn print_page(
    plants: &[ShownPlant],
    json: bool,
    table: &mut Option<Table<5>>,
) -> anyhow::Result<()> {
    if json {
        let lines: Result<String, _> = plants.iter().map(json_line).collect();
        return print(&lines?);
    }
    let mut rows: Vec<_> = plants.iter().map(ShownPlant::row).collect();
    if table.is_none() {
        let head = ["ID", "NAME", "TAG", "ADDED", "BY"];
        rows.insert(0, head.map(str::to_owned));
    }
    let table = table.get_or_insert_with(|| Table::new(widths(&rows)));
    print(&table.rows(rows))
}

/// The widths with which a row fits into the terminal: names, tags and tokens are cut.
fn widths(rows: &[[String; 5]]) -> [usize; 5] {
    let Some(columns) = terminal_columns() else {
        return [usize::MAX; 5];
    };
    let [id, _, tag, time, by] = std::array::from_fn(|column| {
        let cells = rows.iter().map(|row| measure_text_width(&row[column]));
        cells.max().unwrap_or(0)
    });
    let left = columns.saturating_sub(id + time + 4 * 2);
    let share = (left / 4).max(COLUMN_MIN);
    let (tag, by) = (tag.min(share), by.min(share));
    let name = left.saturating_sub(tag + by).max(COLUMN_MIN);
    [id, name, tag, time, by]
}

/// Show one plant, when it was added and by which token
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  plantstore get 42\n  plantstore get --json -7")]
pub(super) struct Get {
    /// Id of the plant
    #[arg(allow_negative_numbers = true)]
    id: i64,

    /// Print a JSON object
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    store: StoreSettings,
}

impl Get {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let mut reader = PlantReader::open(&self.store)?;
        let found = reader.get(&[self.id])?;
        let Some(plant) = found.first() else {
            reader.finish()?;
            bail!("there is no plant with the id {}", self.id);
        };
        print(&if self.json {
            json_line(plant)?
        } else {
            plant.lines()
        })?;
        reader.finish()
    }
}

#[derive(Serialize)]
struct ShownPlant {
    id: i64,
    #[serde(flatten)]
    plant: Plant,
    added_at: Timestamp,
    /// The name of the token; none if the token is missing because of damage.
    added_by: Option<String>,
}

impl ShownPlant {
    fn row(&self) -> [String; 5] {
        [
            self.id.to_string(),
            printable(&self.plant.name),
            self.plant.tag.as_deref().map(printable).unwrap_or_default(),
            self.added_at.strftime("%Y-%m-%d %H:%M:%S UTC").to_string(),
            self.added_by.as_deref().unwrap_or("-").to_owned(),
        ]
    }

    fn lines(&self) -> String {
        let [id, name, tag, _, added_by] = self.row();
        let added_at = self.added_at.strftime("%Y-%m-%d %H:%M:%S%.3f UTC");
        fields([
            ("id", Some(id)),
            ("name", Some(name)),
            ("tag", self.plant.tag.is_some().then_some(tag)),
            ("added at", Some(added_at.to_string())),
            ("added by", Some(added_by)),
        ])
    }
}

/// Reads plants with the names of their tokens, and reports damage.
struct PlantReader {
    store: Store,
    token_names: HashMap<TokenId, Arc<str>>,
    problems: u64,
}

impl PlantReader {
    fn open(settings: &StoreSettings) -> anyhow::Result<Self> {
        Ok(Self {
            store: Store::open(&settings.location, Mode::Read)?,
            token_names: HashMap::new(),
            problems: 0,
        })
    }

    /// The plants with these ids, without those that are damaged.
    fn get(&mut self, ids: &[i64]) -> anyhow::Result<Vec<ShownPlant>> {
        let mut plants = Vec::with_capacity(ids.len());
        for found in self.store.get(ids)? {
            let record = match found {
                Ok(record) => record,
                Err(DamagedPlant { id }) => {
                    self.report(&format!("plant {id}: damaged"));
                    continue;
                }
            };
            let token = record.added_by;
            if !self.token_names.contains_key(&token) {
                // Tokens may have been created since they were read.
                let tokens = self.store.tokens()?.into_iter();
                self.token_names = tokens.map(|token| (token.id, token.name)).collect();
            }
            let added_by = self.token_names.get(&token).map(ToString::to_string);
            if added_by.is_none() {
                let (id, token) = (record.id, token.0);
                self.report(&format!(
                    "plant {id}: added by token {token}, which does not exist"
                ));
            }
            plants.push(ShownPlant {
                id: record.id,
                plant: record.plant,
                added_at: record.added_at,
                added_by,
            });
        }
        Ok(plants)
    }

    fn report(&mut self, problem: &str) {
        self.problems += 1;
        if self.problems <= PROBLEMS_SHOWN_MAX {
            write_stderr(format!("{problem}\n"));
        }
    }

    fn finish(&self) -> anyhow::Result<()> {
        if self.problems > 0 {
            bail!("the store is damaged; run `plantstore check`");
        }
        Ok(())
    }
}

/// Count plants by tag and by day, and show the disk usage
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  plantstore stats\n  plantstore stats --json")]
pub(super) struct Stats {
    /// Print a JSON object
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    store: StoreSettings,
}

impl Stats {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let mut store = Store::open(&self.store.location, Mode::Read)?;
        let progress = progress_bar("counting", None, Unit::Items);
        let report = &mut |read| progress.inc(read as u64);
        let statistics = store.statistics(Timestamp::now(), report)?;
        drop(progress);
        print(&if self.json {
            json_line(&statistics)?
        } else {
            text(&statistics, terminal_columns().is_some())
        })?;
        match statistics.damaged {
            0 => Ok(()),
            damaged => {
                let plants = count(damaged, "damaged plant");
                bail!("the store is damaged: {plants} found; run `plantstore check`")
            }
        }
    }
}

/// The text has bars and rounded sizes on a terminal, and plain numbers elsewhere.
fn text(statistics: &Statistics, on_terminal: bool) -> String {
    let shown = |rich: String, plain: String| if on_terminal { rich } else { plain };
    let count = |number: u64| shown(HumanCount(number).to_string(), number.to_string());
    let bytes = |number: u64| shown(HumanBytes(number).to_string(), format!("{number} bytes"));
    let mut text = fields([
        ("plants", Some(count(statistics.plants))),
        ("untagged", Some(count(statistics.untagged))),
        ("tokens", Some(count(statistics.tokens))),
        ("database", statistics.database_bytes.map(bytes)),
        ("wal", statistics.wal_bytes.map(bytes)),
    ]);
    if !statistics.tags.is_empty() {
        let tag_columns = if on_terminal { TAG_COLUMNS } else { usize::MAX };
        let row = |tag: &TagCount| [cut(&printable(&tag.tag), tag_columns), count(tag.plants)];
        let rows = statistics.tags.iter().map(row);
        text += "\n";
        text += &table(["TAG", "PLANTS"], rows);
    }
    if statistics.other_tags > 0 {
        let _ = writeln!(text, "other tags: {}", count(statistics.other_tags));
    }
    let days = &statistics.days;
    let most = days.iter().map(|day| day.added).max().unwrap_or(0);
    let row = |day: &DayCount| {
        let bar = shown(bar(day.added, most), String::new());
        [day.day.to_string(), count(day.added), bar]
    };
    text += "\n";
    text += &table(["DAY", "ADDED", ""], days.iter().map(row));
    if statistics.future > 0 {
        let _ = writeln!(text, "dated in the future: {}", count(statistics.future));
    }
    text
}

/// A bar whose length is to `BAR_COLUMNS` as `part` is to `most`, in steps of an eighth of a column; at least one step unless `part` is 0.
fn bar(part: u64, most: u64) -> String {
    const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let share = u128::from(BAR_COLUMNS * 8) * u128::from(part) / u128::from(most.max(1));
    let eighths = usize::try_from(share).expect("at most all columns");
    let eighths = eighths.max(usize::from(part > 0));
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
