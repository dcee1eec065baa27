//! Plants by time, newest first: along the index, or by a look at every plant. Whether a plant is what was stored is seen
//! when it is read for good.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use rusqlite::{Connection, Error, OptionalExtension, Row, params};

use crate::store::query::{Cursor, Filter, Walk};
use crate::store::sqlite::rows::{self, SELECT_PLANT};
use crate::store::sqlite::scan::each_range;
use crate::store::types::Found;

/// Along the index. What is wanted is tested on those that are read, so that their number is bounded; the times are tested in
/// the index, all of it if need be, because the clock may have been wrong and they need not be in order.
const WALK: &str = "
    SELECT batch, added_at, id, (?1 IS NULL OR tag IS ?1) AND (?2 IS NULL OR instr(name, ?2) > 0) FROM plants
    WHERE added_at >= ?3 AND added_at < ?4 AND (batch, added_at, id) < (?5, ?6, ?7)
    ORDER BY batch DESC, added_at DESC, id DESC LIMIT ?8";

/// Along the ids: with a plus the index is of no use.
const SEARCH: &str = "
    SELECT batch, added_at, id FROM plants
    WHERE id BETWEEN ?8 AND ?9 AND (?1 IS NULL OR tag = ?1) AND (?2 IS NULL OR instr(name, ?2) > 0)
      AND +added_at >= ?3 AND +added_at < ?4 AND (+batch, +added_at, id) < (?5, ?6, ?7)";

/// Looks at so many of the newest plants of the time.
pub(super) fn walk(connection: &Connection, wanted: &Filter, len: u32) -> Result<Walk, Error> {
    let mut walk = Walk {
        found: Vec::new(),
        looked_at: 0,
        last: None,
    };
    let (tag, name_part) = (&wanted.tag, &wanted.name_part);
    let [since, until] = [wanted.since, wanted.until].map(|place| stored(place).0);
    let (batch, (time, id)) = (wanted.before.batch, stored(wanted.before));
    let mut select = connection.prepare_cached(WALK)?;
    let values = params![tag, name_part, since, until, batch, time, id, len];
    let mut rows = select.query(values)?;
    while let Some(row) = rows.next()? {
        let place = place(row)?;
        walk.looked_at += 1;
        walk.last = Some(place);
        if row.get(3)? {
            walk.found.push(place);
        }
    }
    if walk.looked_at < u64::from(len) {
        walk.last = None;
    }
    Ok(walk)
}

/// Looks at every plant: where so many of the newest stand that are wanted.
pub(super) fn search(
    connection: &Connection,
    wanted: &Filter,
    len: usize,
    read: &mut dyn FnMut(usize),
) -> Result<Vec<Cursor>, Error> {
    let (tag, name_part) = (&wanted.tag, &wanted.name_part);
    let [since, until] = [wanted.since, wanted.until].map(|place| stored(place).0);
    let (batch, (time, id)) = (wanted.before.batch, stored(wanted.before));
    let mut select = connection.prepare_cached(SEARCH)?;
    let mut newest = BinaryHeap::new();
    each_range(connection, read, |ids| {
        let (first, last) = ids.into_inner();
        let values = params![tag, name_part, since, until, batch, time, id, first, last];
        let mut rows = select.query(values)?;
        while let Some(row) = rows.next()? {
            newest.push(Reverse(place(row)?));
            if newest.len() > len {
                newest.pop();
            }
        }
        Ok(())
    })?;
    let newest = newest.into_sorted_vec();
    Ok(newest.into_iter().map(|Reverse(place)| place).collect())
}

/// The plants with these ids, in this order.
pub(super) fn found(connection: &Connection, ids: &[i64]) -> Result<Vec<Found>, Error> {
    let mut select = connection.prepare_cached(SELECT_PLANT)?;
    let mut found = Vec::with_capacity(ids.len());
    for id in ids {
        let one = select.query_row([id], |row| {
            Ok(rows::plant_record(row).map_or(Found::Damaged(*id), Found::Plant))
        });
        found.extend(one.optional()?);
    }
    Ok(found)
}

/// Of `batch, added_at, id`.
fn place(row: &Row<'_>) -> Result<Cursor, Error> {
    let added_at: i64 = row.get(1)?;
    Ok(Cursor {
        batch: row.get(0)?,
        microsecond: added_at.saturating_mul(1000),
        id: row.get(2)?,
    })
}

/// A place in milliseconds, such that what stands before it still does.
fn stored(place: Cursor) -> (i64, i64) {
    let milliseconds = place.microsecond.div_euclid(1000);
    match place.microsecond.rem_euclid(1000) {
        0 => (milliseconds, place.id),
        _ => (milliseconds + 1, i64::MIN),
    }
}
