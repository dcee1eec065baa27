//! Exports all plants of one point in time in short transactions. A single long transaction would keep the WAL from being reset
//! for as long as the export runs.
//!
//! Plants are never changed or deleted, and each transaction that adds plants has a higher batch number than all before it. So the
//! plants up to the highest batch number at the start are all there, and nothing is added to them. (Plants that `plantstore copy`
//! inserts meanwhile have batch number 0 and may be exported or not.)

use std::ops::ControlFlow;

use rusqlite::Connection;

use crate::store::contract::Page;
use crate::store::error::StoreError;
use crate::store::sqlite::rows::{self, SELECT_FROM, plant_record};

/// Passes the plants on, a page at a time, until `hand_over` breaks.
pub(super) fn export(
    connection: &Connection,
    hand_over: &mut dyn FnMut(&Page) -> ControlFlow<()>,
) -> Result<(), StoreError> {
    let cutoff = rows::last_batch(connection)?;
    let mut next = Some(i64::MIN);
    while let Some(first) = next {
        let page = read(connection, first, cutoff)?;
        next = page.next_id();
        if hand_over(&page).is_break() {
            break;
        }
    }
    Ok(())
}

/// Reads every plant and skips those after the cutoff here instead of in SQL, so that a plant whose batch number is damaged is
/// an error and not left out.
fn read(connection: &Connection, first: i64, cutoff: i64) -> Result<Page, StoreError> {
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
