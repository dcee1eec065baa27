//! Reads every plant, by id, in short transactions. A long transaction would keep the WAL from being reset for as long as it runs.

use std::ops::{ControlFlow, RangeInclusive};
use std::time::{Duration, Instant};

use rusqlite::{Connection, Error, OptionalExtension, params};

use crate::store::error::StoreError;
use crate::store::sqlite::rows::{self, SELECT_FROM, plant_record};
use crate::store::types::Page;

/// About the time of one turn. Plants can be long or short, and disks fast or slow.
const TURN: Duration = Duration::from_millis(50);

/// Of one turn.
const PLANTS_MIN: u32 = 16;
const PLANTS_MAX: u32 = 1 << 17;

/// Hands over all ids, a range a turn, and tells after each but the last how many more plants were in it. What is added
/// meanwhile may be among them or not.
pub(super) fn each_range(
    connection: &Connection,
    read: &mut dyn FnMut(usize),
    mut work: impl FnMut(RangeInclusive<i64>) -> Result<(), Error>,
) -> Result<(), Error> {
    // Steps over plants without reading them: a small part of what the rest takes.
    let sql = "SELECT id FROM plants WHERE id >= ?1 ORDER BY id LIMIT 1 OFFSET ?2";
    let mut skip = connection.prepare_cached(sql)?;
    let mut first = i64::MIN;
    let mut plants = 1024;
    loop {
        let begun = Instant::now();
        let next: Option<i64> = skip
            .query_row(params![first, plants], |row| row.get(0))
            .optional()?;
        let Some(next) = next else {
            return work(first..=i64::MAX);
        };
        work(first..=next - 1)?;
        read(plants as usize);
        first = next;
        plants = match begun.elapsed() {
            short if short < TURN => (plants * 2).min(PLANTS_MAX),
            _ => (plants / 2).max(PLANTS_MIN),
        };
    }
}

/// Passes on all plants of one point in time, a page at a time, until `hand_over` breaks.
///
/// Plants are never changed or deleted, and each transaction that adds plants has a higher batch number than all before it. So the
/// plants up to the highest batch number at the start are all there, and nothing is added to them. (Plants that `plantstore copy`
/// inserts meanwhile have batch number 0 and may be exported or not.)
pub(super) fn export(
    connection: &Connection,
    hand_over: &mut dyn FnMut(&Page) -> ControlFlow<()>,
) -> Result<(), StoreError> {
    let cutoff = rows::last_batch(connection)?;
    let mut next = Some(i64::MIN);
    while let Some(first) = next {
        let page = page(connection, first, cutoff)?;
        next = page.next_id();
        if hand_over(&page).is_break() {
            break;
        }
    }
    Ok(())
}

/// Reads every plant and skips those after the cutoff here instead of in SQL, so that a plant whose batch number is damaged is
/// an error and not left out.
fn page(connection: &Connection, first: i64, cutoff: i64) -> Result<Page, StoreError> {
    let mut select = connection.prepare_cached(SELECT_FROM)?;
    let mut rows = select.query([first])?;
    let mut page = Page::default();
    while !page.is_full()
        && let Some(row) = rows.next()?
    {
        let plant = plant_record(row)?;
        if row.get::<_, i64>("batch")? <= cutoff {
            page.push(plant);
        }
    }
    Ok(page)
}
