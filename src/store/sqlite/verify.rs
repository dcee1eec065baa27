//! `plantstore check`: reads everything, the structure first and then every row with its checksum.

use std::collections::HashMap;

use rusqlite::ErrorCode::{DatabaseCorrupt, SystemIoFailure};
use rusqlite::{Connection, Error, Row};

use crate::store::error::StoreError;
use crate::store::sqlite::batches;
use crate::store::sqlite::rows::{plant, select_plants, token};
use crate::store::sqlite::{Sqlite, connection};
use crate::store::types::{Checked, Finding};

/// The number of plants between two reports.
const REPORT_INTERVAL: usize = 1000;

type Report<'a> = &'a mut dyn FnMut(Finding);

impl Sqlite {
    pub(crate) fn check(&mut self, report: Report<'_>) -> Result<Checked, StoreError> {
        // Nothing is written to a disk that may be damaged: closing must not run a checkpoint.
        connection::run_checkpoint_on_close(&self.connection, false)?;
        // One transaction, so that all tables are read as they were at the same time.
        let connection = &self.connection.transaction()?;
        let sql = "PRAGMA integrity_check(20)";
        for_each_row(connection, report, "structure", sql, |row, report| {
            let found: String = row.get(0)?;
            // The first line of a longer report names the database, of which there is one.
            let lines = found
                .lines()
                .filter(|line| *line != "ok" && !line.starts_with("***"));
            lines.for_each(|line| report(Finding::Problem(format!("structure: {line}"))));
            Ok(())
        })?;

        // Only the progress bar needs the number. If the plants cannot be counted, reading them reports why.
        let total = connection.query_row("SELECT count(*) FROM plants", [], |row| row.get(0));
        report(Finding::Total(total.map_or(0, i64::unsigned_abs)));
        // One plant of each token that added plants.
        let mut added_by = HashMap::new();
        let (mut with_batch, mut damaged) = (0, 0);
        let sql = select_plants!("");
        let plants = for_each_row(connection, report, "plants", sql, |row, report| {
            if let Some(plant) = plant(row) {
                added_by.entry(plant.added_by).or_insert(plant.id);
                with_batch += u64::from(plant.batch != 0);
            } else {
                damaged += 1;
                let id: i64 = row.get(0)?;
                report(Finding::Problem(format!(
                    "plant {id}: its checksum does not match"
                )));
            }
            Ok(())
        })?;

        // A batch may list plants that were deleted by hand since, but every plant is in the list of its batch.
        let mut listed = 0;
        let sql = "SELECT 1 FROM plants WHERE id = ?1 AND batch = ?2 AND added_at = ?3";
        let mut is_of_batch = connection.prepare(sql)?;
        let sql = "SELECT number, added_at, ids FROM batches";
        for_each_row(connection, report, "batches", sql, |row, report| {
            let (number, added_at) = (row.get::<_, i64>(0)?, row.get(1)?);
            if let Some(ids) = batches::ids(row.get_ref(2)?) {
                for id in ids {
                    listed += u64::from(is_of_batch.exists([id, number, added_at])?);
                }
            } else {
                damaged += 1;
                let problem = format!("batch {number}: its list of plants is damaged");
                report(Finding::Problem(problem));
            }
            Ok(())
        })?;
        if damaged == 0 && listed != with_batch {
            let problem = format!(
                "batches: they list {listed} of {with_batch} plants; `plantstore list` omits the others"
            );
            report(Finding::Problem(problem));
        }

        let sql = "SELECT * FROM tokens";
        let tokens = for_each_row(connection, report, "tokens", sql, |row, report| {
            let id: i64 = row.get("id")?;
            added_by.remove(&id);
            if token(row).is_err() {
                report(Finding::Problem(format!(
                    "token {id}: its checksum does not match"
                )));
            }
            Ok(())
        })?;
        for (token, plant) in added_by {
            let problem = format!("plant {plant}: added by token {token}, which does not exist");
            report(Finding::Problem(problem));
        }
        Ok(Checked { plants, tokens })
    }
}

/// Returns the number of rows, and reports it while it counts them. Damage that ends the query early is reported and is not an error.
fn for_each_row(
    connection: &Connection,
    report: Report<'_>,
    what: &str,
    sql: &str,
    mut visit: impl FnMut(&Row<'_>, Report<'_>) -> Result<(), Error>,
) -> Result<u64, Error> {
    let mut count = 0;
    let read = connection.prepare(sql).and_then(|mut select| {
        let mut rows = select.query([])?;
        while let Some(row) = rows.next()? {
            visit(row, report)?;
            count += 1;
            if count % REPORT_INTERVAL == 0 {
                report(Finding::Read(REPORT_INTERVAL));
            }
        }
        Ok(())
    });
    if let Err(error) = read {
        if !matches!(
            error.sqlite_error_code(),
            Some(DatabaseCorrupt | SystemIoFailure)
        ) {
            return Err(error);
        }
        let problem = format!("{what}: cannot be read to the end: {error}");
        report(Finding::Problem(problem));
    }
    Ok(count as u64)
}
