//! Every plant, by id, in turns: no transaction is so long that the log of a server grows for it.

use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use rusqlite::{Connection, Error, OptionalExtension, params};

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
