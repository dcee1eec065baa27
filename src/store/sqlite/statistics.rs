//! What there is to say of all plants, by one look at each: two, if they have very many tags.

use rusqlite::{Connection, Error, Row};

use crate::store::query::{Days, Statistics, TAGS_MAX};
use crate::store::sqlite::open::footprint;
use crate::store::sqlite::query::found;
use crate::store::sqlite::rows::{SELECT_ALL, plant};
use crate::store::sqlite::scan::each_range;
use crate::store::sqlite::tally::Tally;
use crate::store::types::Found;

/// Tags that are told apart at a time, some bytes each.
const TAGS_APART: usize = 100_000;

pub(super) fn statistics(
    connection: &Connection,
    days: Days,
    read: &mut dyn FnMut(usize),
) -> Result<Statistics, Error> {
    let mut all = Statistics::default();
    let mut tally = Tally::new(TAGS_APART);
    each_plant(connection, read, |row| {
        all.plants += 1;
        let Some(plant) = plant(row) else {
            all.damaged += 1;
            return;
        };
        match plant.tag {
            Some(tag) => tally.add(tag, plant.id),
            None => all.without_tag += 1,
        }
        all.count_day(days, Days::of(plant.added_at.saturating_mul(1000)), 1);
    })?;
    if !tally.is_exact() {
        tally.begin_again();
        each_plant(connection, read, |row| {
            if let Some(tag) = plant(row).and_then(|plant| plant.tag) {
                tally.add_again(tag);
            }
        })?;
    }
    for count in tally.most(TAGS_MAX as usize) {
        for example in found(connection, &[count.example])? {
            if let Found::Plant(example) = example {
                let tag = example.plant.tag.unwrap_or_default();
                all.tags.push((tag, count.times));
            }
        }
    }
    let sql = "SELECT count(*) FROM tokens";
    let tokens: i64 = connection.query_row(sql, [], |row| row.get(0))?;
    all.tokens = tokens.unsigned_abs();
    if let Some(size) = connection
        .path()
        .and_then(|path| footprint(path.as_ref()).ok())
    {
        all.database_bytes = Some(size.database);
        all.wal_bytes = Some(size.wal);
    }
    Ok(all)
}

fn each_plant(
    connection: &Connection,
    read: &mut dyn FnMut(usize),
    mut work: impl FnMut(&Row<'_>),
) -> Result<(), Error> {
    let mut select = connection.prepare_cached(SELECT_ALL)?;
    each_range(connection, read, |ids| {
        let mut rows = select.query([ids.start(), ids.end()])?;
        while let Some(row) = rows.next()? {
            work(row);
        }
        Ok(())
    })
}
