//! All plants of one moment, read in short transactions: a long one would keep the log from being moved, and it would grow for
//! as long as somebody reads.
//!
//! Plants are never changed or deleted, and an add takes its time with the write lock in hand, never before what is stored.
//! So once a moment is over, and whoever had the lock in it has let go, all plants of up to that moment are there for good:
//! the pages may be read at leisure. (Plants that `plantstore copy` brings in meanwhile keep their old times, and may be among
//! them or not.)

use std::ops::ControlFlow;
use std::thread::sleep;
use std::time::Duration;

use jiff::Timestamp;
use rusqlite::{Connection, TransactionBehavior, params};

use crate::store::contract::Page;
use crate::store::error::StoreError;
use crate::store::sqlite::rows::{SELECT_CUT, newest, plant_record};

/// How often we look for a moment that is over.
const LOOKS: usize = 100;

/// Hands over the pages, until that is enough.
pub(super) fn export(
    connection: &mut Connection,
    hand_over: &mut dyn FnMut(&Page) -> ControlFlow<()>,
) -> Result<(), StoreError> {
    let is_backup = connection.is_readonly("main")?; // whose moment is over
    if !is_backup && let Some(cut) = moment_that_is_over(connection)? {
        return pages(connection, cut, hand_over);
    }
    // The clock was wrong once and is now behind: adds have the same time until it has caught up. Then there is nothing for
    // it but one long transaction.
    let transaction = connection.transaction()?;
    pages(&transaction, i64::MAX, hand_over)
}

/// The time of the newest plant, once no other will have it.
fn moment_that_is_over(connection: &mut Connection) -> Result<Option<i64>, StoreError> {
    for _ in 0..LOOKS {
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let newest = newest(&transaction)?;
        let now = Timestamp::now().as_millisecond();
        drop(transaction);
        if newest < now {
            return Ok(Some(newest));
        }
        sleep(Duration::from_millis(1));
    }
    Ok(None)
}

fn pages(
    connection: &Connection,
    cut: i64,
    hand_over: &mut dyn FnMut(&Page) -> ControlFlow<()>,
) -> Result<(), StoreError> {
    let mut next = Some(i64::MIN);
    while let Some(first) = next {
        let page = read(connection, first, cut)?;
        next = page.next_id();
        if hand_over(&page).is_break() {
            break;
        }
    }
    Ok(())
}

fn read(connection: &Connection, first: i64, cut: i64) -> Result<Page, StoreError> {
    let mut select = connection.prepare_cached(SELECT_CUT)?;
    let mut rows = select.query(params![first, cut])?;
    let mut page = Page::default();
    while !page.is_full()
        && let Some(row) = rows.next()?
    {
        page.push(plant_record(row)?);
    }
    Ok(page)
}
