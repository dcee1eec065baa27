//! `plantstore check`: reads everything, the structure first and then every row with its checksum.

use std::collections::HashMap;

use rusqlite::{Connection, Error, ErrorCode, Row};

use crate::store::error::StoreError;
use crate::store::sqlite::rows::{plant, select_plants, token};
use crate::store::sqlite::{Sqlite, connection};
use crate::store::types::{Checked, Finding};

/// The number of plants between two reports.
const REPORT_INTERVAL: usize = 1000;

type Report<'a> = &'a mut dyn FnMut(Finding);

impl Sqlite {
    pub(crate) fn check(&mut self, report: Report<'_>) -> Result<Checked, StoreError> {
        // Nothing is written to a disk that may be damaged: closing must not run a checkpoint.
        let connection = &self.connection;
        connection::run_checkpoint_on_close(connection, false)?;
        check_structure(connection, report)?;
        // One plant of each token that added plants.
        let mut added_by = HashMap::new();
        let plants = check_plants(connection, report, &mut added_by)?;
        // Tokens are never deleted, so reading them last includes all that were used before.
        let tokens = check_tokens(connection, report, &mut added_by)?;
        for (token, plant) in added_by {
            let problem = format!("plant {plant}: added by token {token}, which does not exist");
            report(Finding::Problem(problem));
        }
        Ok(Checked { plants, tokens })
    }
}

fn check_structure(connection: &Connection, report: Report<'_>) -> Result<(), Error> {
    let sql = "PRAGMA integrity_check(20)";
    for_each_row(connection, report, "structure", sql, |row, report| {
        let found: String = row.get(0)?;
        // The first line of a longer report names the database, of which there is one.
        let lines = found
            .lines()
            .filter(|line| *line != "ok" && !line.starts_with("***"));
        lines.for_each(|line| report(Finding::Problem(format!("structure: {line}"))));
        Ok(())
    })
}

fn check_plants(
    connection: &Connection,
    report: Report<'_>,
    added_by: &mut HashMap<i64, i64>,
) -> Result<u64, Error> {
    // Only the progress bar needs the number. If the plants cannot be counted, reading them reports why.
    let total = connection.query_row("SELECT count(*) FROM plants", [], |row| row.get(0));
    report(Finding::Total(total.map_or(0, i64::unsigned_abs)));
    let mut count = 0;
    let sql = select_plants!("");
    for_each_row(connection, report, "plants", sql, |row, report| {
        count += 1;
        if count % REPORT_INTERVAL == 0 {
            report(Finding::Read(REPORT_INTERVAL));
        }
        if let Some(plant) = plant(row) {
            added_by.entry(plant.added_by).or_insert(plant.id);
        } else {
            let id: i64 = row.get(0)?;
            let problem = format!("plant {id}: not what was stored");
            report(Finding::Problem(problem));
        }
        Ok(())
    })?;
    Ok(count as u64)
}

/// Removes the tokens that exist from `added_by`.
fn check_tokens(
    connection: &Connection,
    report: Report<'_>,
    added_by: &mut HashMap<i64, i64>,
) -> Result<u64, Error> {
    let mut count = 0;
    let sql = "SELECT * FROM tokens";
    for_each_row(connection, report, "tokens", sql, |row, report| {
        count += 1;
        let id = row.get("id")?;
        added_by.remove(&id);
        if token(row).is_err() {
            let problem = format!("token {id}: not what was stored");
            report(Finding::Problem(problem));
        }
        Ok(())
    })?;
    Ok(count)
}

/// Damage that ends the query early is reported and is not an error.
fn for_each_row(
    connection: &Connection,
    report: Report<'_>,
    what: &str,
    sql: &str,
    mut visit: impl FnMut(&Row<'_>, Report<'_>) -> Result<(), Error>,
) -> Result<(), Error> {
    use ErrorCode::{DatabaseCorrupt, SystemIoFailure};
    let read = connection.prepare(sql).and_then(|mut select| {
        let mut rows = select.query([])?;
        while let Some(row) = rows.next()? {
            visit(row, report)?;
        }
        Ok(())
    });
    match read {
        Err(error)
            if matches!(
                error.sqlite_error_code(),
                Some(DatabaseCorrupt | SystemIoFailure)
            ) =>
        {
            let problem = format!("{what}: cannot be read to the end: {error}");
            report(Finding::Problem(problem));
            Ok(())
        }
        other => other,
    }
}
