//! The order in which plants were added: the table `batches` has one row for each transaction that added plants, with their ids. A batch of
//! many plants costs one insert here, where an index would cost one per plant.

use rusqlite::types::ValueRef;
use rusqlite::{Connection, Error, OptionalExtension, params};

use crate::store::error::{Failure, StoreError};
use crate::store::query::Cursor;

/// The times are compared in every row if necessary: they need not be in order, since the clock may have been wrong.
const SELECT_NEWEST: &str = "
    SELECT number, added_at, ids FROM batches
    WHERE number <= ?1 AND added_at >= ?2 AND added_at < ?3 ORDER BY number DESC";

/// Plants that were copied, or stored by an older version, come after all others.
const SELECT_WITHOUT_BATCH: &str = "
    SELECT added_at, id FROM plants
    WHERE batch = 0 AND added_at >= ?1 AND added_at < ?2 AND (added_at, id) < (?3, ?4)
    ORDER BY added_at DESC, id DESC LIMIT ?5";

/// The number of the last batch; 0 if there is none.
pub(super) fn last(connection: &Connection) -> Result<i64, Error> {
    let mut select = connection.prepare_cached("SELECT max(number) FROM batches")?;
    let last: Option<i64> = select.query_row([], |row| row.get(0))?;
    Ok(last.unwrap_or(0))
}

/// The same in a store whose schema may be too old to have the table.
pub(super) fn last_before_upgrade(connection: &Connection) -> Result<i64, Error> {
    let exists = "SELECT EXISTS (SELECT 1 FROM sqlite_schema WHERE name = 'batches')";
    if connection.query_row(exists, [], |row| row.get(0))? {
        return last(connection);
    }
    let last: Option<i64> =
        connection.query_row("SELECT max(batch) FROM plants", [], |row| row.get(0))?;
    Ok(last.unwrap_or(0))
}

/// When the newest plant was added, in milliseconds since 1970; none if there are no plants.
pub(super) fn newest(connection: &Connection) -> Result<Option<i64>, Error> {
    let select = "SELECT added_at FROM batches ORDER BY number DESC LIMIT 1";
    let newest = connection.query_row(select, [], |row| row.get(0));
    if let Some(newest) = newest.optional()? {
        return Ok(Some(newest));
    }
    let select = "SELECT max(added_at) FROM plants WHERE batch = 0";
    connection.query_row(select, [], |row| row.get(0))
}

pub(super) fn insert(
    connection: &Connection,
    number: i64,
    added_at: i64,
    ids: impl Iterator<Item = i64>,
) -> Result<(), Error> {
    let ids: Vec<u8> = ids.flat_map(i64::to_be_bytes).collect();
    let sql = "INSERT INTO batches (number, added_at, ids) VALUES (?1, ?2, ?3)";
    let mut insert = connection.prepare_cached(sql)?;
    insert.execute(params![number, added_at, ids]).map(drop)
}

/// The newest plants that were added in this range of milliseconds, before the cursor.
pub(super) fn newest_before(
    connection: &Connection,
    before: Cursor,
    [since, until]: [i64; 2],
    limit: usize,
) -> Result<Vec<Cursor>, StoreError> {
    let mut newest: Vec<Cursor> = Vec::new();
    // A plant may have been deleted by hand, and the id used again since.
    let mut is_stored =
        connection.prepare_cached("SELECT 1 FROM plants WHERE id = ?1 AND batch <= ?2")?;
    let mut select = connection.prepare_cached(SELECT_NEWEST)?;
    let mut rows = select.query([before.batch, since, until])?;
    while newest.len() < limit
        && let Some(row) = rows.next()?
    {
        let (number, added_at) = (row.get::<_, i64>(0)?, row.get(1)?);
        let ids = ids(row.get_ref(2)?).ok_or_else(|| {
            Failure::Damaged.because(format!("the list of batch {number} is damaged"))
        })?;
        let cursors = ids.map(|id| cursor(number, added_at, id));
        let mut cursors: Vec<_> = cursors.filter(|cursor| *cursor < before).collect();
        cursors.sort_unstable();
        while newest.len() < limit
            && let Some(cursor) = cursors.pop()
        {
            if is_stored.exists([cursor.id, number])? {
                newest.push(cursor);
            }
        }
    }
    drop(rows);
    // The plants without a batch, by time. SQLite has milliseconds: rounded up, the same plants are before the cursor.
    let (time, id) = match before.microsecond.rem_euclid(1000) {
        _ if before.batch > 0 => (i64::MAX, i64::MAX),
        0 => (before.microsecond / 1000, before.id),
        _ => (milliseconds(before.microsecond), i64::MIN),
    };
    let mut select = connection.prepare_cached(SELECT_WITHOUT_BATCH)?;
    let left = i64::try_from(limit - newest.len()).unwrap_or(i64::MAX);
    let mut rows = select.query(params![since, until, time, id, left])?;
    while let Some(row) = rows.next()? {
        newest.push(cursor(0, row.get(0)?, row.get(1)?));
    }
    // A damaged page can lead back to where a list began.
    if newest.first().is_some_and(|first| *first >= before) || !newest.is_sorted_by(|a, b| a > b) {
        return Err(Failure::Damaged.because("the plants are not in order"));
    }
    Ok(newest)
}

/// None if this is not a list of ids.
pub(super) fn ids(value: ValueRef<'_>) -> Option<impl Iterator<Item = i64>> {
    let (ids, rest) = value.as_blob().ok()?.as_chunks();
    let ids = ids.iter().map(|id| i64::from_be_bytes(*id));
    rest.is_empty().then_some(ids)
}

/// The position of a plant that was added at this millisecond.
pub(super) fn cursor(batch: i64, added_at: i64, id: i64) -> Cursor {
    Cursor {
        batch,
        microsecond: added_at.saturating_mul(1000),
        id,
    }
}

/// Converts microseconds to milliseconds, rounded up.
pub(super) fn milliseconds(microseconds: i64) -> i64 {
    microseconds.div_euclid(1000) + i64::from(microseconds.rem_euclid(1000) > 0)
}
