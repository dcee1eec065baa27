//! Reading plants from SQLite: pages, exports and statistics. Whatever reads many plants does so in short transactions, since a long one
//! would keep the WAL from being reset for as long as it runs.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use rusqlite::{Error, OptionalExtension, Row};

use crate::plant::Plant;
use crate::store::error::StoreError;
use crate::store::query::{Cursor, Filter, Statistics, TAGS_MAX, TagCount};
use crate::store::sqlite::Sqlite;
use crate::store::sqlite::batches::{self, cursor, milliseconds, newest_before};
use crate::store::sqlite::open::file_sizes;
use crate::store::sqlite::rows::{self, plant_record, select_plants};
use crate::store::types::{DamagedPlant, PAGE_BYTES_MAX, PAGE_LEN_MAX, PlantRecord, next_id};

/// About the time of one transaction of a scan.
const SCAN_TRANSACTION: Duration = Duration::from_millis(50);

const DAY_MILLISECONDS: i64 = 86_400_000;

impl Sqlite {
    pub(crate) fn count_plants(&mut self) -> Result<u64, StoreError> {
        let sql = "SELECT count(*) FROM plants";
        let count: i64 = self.connection.query_row(sql, [], |row| row.get(0))?;
        Ok(count.unsigned_abs())
    }

    pub(crate) fn last_id(&mut self) -> Result<Option<i64>, StoreError> {
        let sql = "SELECT max(id) FROM plants";
        Ok(self.connection.query_row(sql, [], |row| row.get(0))?)
    }

    pub(crate) fn get(
        &mut self,
        ids: &[i64],
    ) -> Result<Vec<Result<PlantRecord, DamagedPlant>>, StoreError> {
        let sql = select_plants!("WHERE id = ?1");
        let mut select = self.connection.prepare_cached(sql)?;
        let mut found = Vec::with_capacity(ids.len());
        for &id in ids {
            let plant = select.query_row([id], |row| {
                Ok(plant_record(row).map_err(|_| DamagedPlant { id }))
            });
            found.extend(plant.optional()?);
        }
        Ok(found)
    }

    pub(crate) fn find(
        &mut self,
        filter: &Filter,
        before: Cursor,
        limit: u32,
        read: &mut dyn FnMut(usize),
    ) -> Result<Vec<Cursor>, StoreError> {
        let (since, until) = filter.time_range();
        if filter.is_by_time() {
            let range = [since, until].map(milliseconds);
            return newest_before(&self.connection, before, range, limit as usize);
        }
        let mut newest = BinaryHeap::new();
        self.scan(read, |row| {
            let (name, tag) = (row.get_ref(1)?, row.get_ref(2)?);
            let is_match = match (name.as_str(), tag.as_str_or_null()) {
                (Ok(name), Ok(tag)) => filter.matches(name, tag),
                _ => true, // damaged, which `get` reports
            };
            if is_match {
                let found = cursor(row.get(6)?, row.get(3)?, row.get(0)?);
                if found < before && (since..until).contains(&found.microsecond) {
                    newest.push(Reverse(found));
                    if newest.len() > limit as usize {
                        newest.pop();
                    }
                }
            }
            Ok(())
        })?;
        let newest = newest.into_sorted_vec().into_iter();
        Ok(newest.map(|Reverse(cursor)| cursor).collect())
    }

    pub(crate) fn statistics(
        &mut self,
        now: Timestamp,
        read: &mut dyn FnMut(usize),
    ) -> Result<Statistics, StoreError> {
        let mut all = Statistics::until(now);
        // Instead of GROUP BY, which would be one long transaction and would not check the rows.
        let mut tags: HashMap<String, (u64, Reverse<i64>)> = HashMap::new();
        self.scan(read, |row| {
            all.plants += 1;
            let Some(plant) = rows::plant(row) else {
                all.damaged += 1;
                return Ok(());
            };
            match plant.tag {
                None => all.untagged += 1,
                Some(tag) => match tags.get_mut(tag) {
                    Some((plants, _)) => *plants += 1,
                    None => drop(tags.insert(tag.to_owned(), (1, Reverse(plant.id)))),
                },
            }
            all.count_day(plant.added_at.div_euclid(DAY_MILLISECONDS), 1);
            Ok(())
        })?;
        let mut tags: Vec<_> = tags.into_iter().collect();
        tags.sort_unstable_by_key(|(_, plants)| Reverse(*plants));
        tags.truncate(TAGS_MAX as usize);
        let tags = tags.into_iter();
        all.set_tags(
            tags.map(|(tag, (plants, _))| TagCount { tag, plants })
                .collect(),
        );
        let sql = "SELECT count(*) FROM tokens";
        let tokens: i64 = self.connection.query_row(sql, [], |row| row.get(0))?;
        all.tokens = tokens.unsigned_abs();
        let path = self.connection.path();
        if let Some(size) = path.and_then(|path| file_sizes(path.as_ref()).ok()) {
            all.database_bytes = Some(size.database);
            all.wal_bytes = Some(size.wal);
        }
        Ok(all)
    }

    /// Visits every plant by id, in rows of `select_plants`, and reports after each transaction how many it has read. What is added
    /// meanwhile may be visited or not.
    fn scan(
        &self,
        read: &mut dyn FnMut(usize),
        mut visit: impl FnMut(&Row<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let sql = select_plants!("WHERE id >= ?1 ORDER BY id");
        let mut select = self.connection.prepare_cached(sql)?;
        let mut next = Some(i64::MIN);
        while let Some(first) = next.take() {
            let start = Instant::now();
            let mut plants = 0;
            let mut rows = select.query([first])?;
            while let Some(row) = rows.next()? {
                visit(row)?;
                plants += 1;
                if plants % 256 == 0 && start.elapsed() >= SCAN_TRANSACTION {
                    next = row.get::<_, i64>(0)?.checked_add(1);
                    break;
                }
            }
            read(plants);
        }
        Ok(())
    }

    /// Plants are never changed or deleted, and each transaction that adds plants has a higher batch number than all before it. So the
    /// plants up to the highest batch number at the start are a snapshot, although several transactions read them. (Plants that
    /// `plantstore copy` inserts meanwhile have batch number 0 and may be exported or not.)
    pub(crate) fn export(
        &mut self,
        visit: &mut dyn FnMut(&[PlantRecord]) -> ControlFlow<()>,
    ) -> Result<(), StoreError> {
        let cutoff = batches::last(&self.connection)?;
        let mut next = Some(i64::MIN);
        while let Some(first) = next {
            let page = self.plants(first, cutoff)?;
            next = next_id(&page);
            if visit(&page).is_break() {
                break;
            }
        }
        Ok(())
    }

    /// A page of plants with batch numbers up to the cutoff. Reads every plant and skips those after the cutoff here instead of in SQL, so that a plant whose batch number is damaged is
    /// an error and not left out.
    pub(crate) fn plants(&self, first: i64, cutoff: i64) -> Result<Vec<PlantRecord>, StoreError> {
        let sql = select_plants!("WHERE id >= ?1 ORDER BY id");
        let mut select = self.connection.prepare_cached(sql)?;
        let mut rows = select.query([first])?;
        let (mut page, mut bytes) = (Vec::new(), 0);
        while page.len() < PAGE_LEN_MAX
            && bytes < PAGE_BYTES_MAX
            && let Some(row) = rows.next()?
        {
            let record = plant_record(row)?;
            if row.get::<_, i64>("batch")? <= cutoff {
                let Plant { name, tag } = &record.plant;
                bytes += name.len() + tag.as_ref().map_or(0, String::len);
                page.push(record);
            }
        }
        Ok(page)
    }
}
