//! `plantstore list`, beside a running server or without one.

use clap::Args;
use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;

use crate::cli::listed::{Listed, Listing};
use crate::cli::newest::Newest;
use crate::cli::output::{Table, print, terminal_columns};
use crate::cli::text::{cut, printable, width};
use crate::config::{StoreSettings, duration};
use crate::store::{Cursor, Filter, Store};
use crate::telemetry::say;

/// Plants that are read and shown at a time: any of them may be long.
const PAGE_LEN: usize = 100;

/// On a terminal no name, tag or token is cut to less than this.
const COLUMN_MIN: usize = 12;

#[derive(Debug, Args)]
pub(super) struct List {
    /// Only those with this tag
    #[arg(long)]
    tag: Option<String>,

    /// Only those with this in their name, just as it is written
    #[arg(long, value_name = "PART")]
    name: Option<String>,

    /// Only those added since then: 2026-11-01, 2026-11-01T12:00:00Z, or 7d for the last seven days
    #[arg(long, value_name = "TIME", value_parser = moment)]
    since: Option<Timestamp>,

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
        let mut store = Store::open(&self.store.store)?;
        let (before, until) = match self.before {
            Some(Before::Plant(place)) => (place, Cursor::END),
            Some(Before::Time(time)) => (Cursor::END, Cursor::at(time)),
            None => (Cursor::END, Cursor::END),
        };
        let wanted = Filter {
            since: self.since.map_or(Cursor::FIRST, Cursor::at),
            until,
            before,
            tag: self.tag,
            name_part: self.name,
        };
        // One more, to know whether there are more.
        let mut newest = Newest::of(wanted.clone(), self.limit.saturating_add(1));
        let mut listing = Listing::default();
        let mut sheet = Sheet::new(self.json);
        let mut places = Vec::new().into_iter();
        let mut left = self.limit;
        let mut last = None;
        while left > 0 {
            if places.len() == 0 {
                places = newest.next_page(&mut store)?.into_iter();
            }
            let len = usize::try_from(left).unwrap_or(PAGE_LEN).min(PAGE_LEN);
            let page: Vec<_> = places.by_ref().take(len).collect();
            let Some(end) = page.last() else {
                break;
            };
            last = Some(*end);
            let ids: Vec<_> = page.iter().map(|place| place.id).collect();
            let mut plants = listing.of(&mut store, &ids)?;
            let found = plants.len();
            plants.retain(|listed| wanted.matches(&listed.plant.plant));
            // One that is damaged counts: there may be nothing else.
            left -= (ids.len() - (found - plants.len())) as u64;
            sheet.print(&plants)?;
        }
        sheet.end()?;
        if let Some(last) = last.filter(|_| left == 0) {
            // Of a rare kind, the next may be far away; then nobody waits only for knowing that.
            let more = match newest.is_over() {
                _ if places.len() > 0 => "more",
                true => "",
                false if !wanted.is_any() => "perhaps more",
                false if newest.next_page(&mut store)?.is_empty() => "",
                false => "more",
            };
            if !more.is_empty() {
                say(format!("{more}: the same with --before {last}\n"));
            }
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
