//! Is all that is stored what was stored? Reads everything: for `plantstore check`.

use std::collections::HashMap;

use rusqlite::{Connection, Error, ErrorCode, Row};

use crate::store::sqlite::rows::{SELECT_PLANTS, plant, token};
use crate::store::types::{Checked, Finding};

/// So many plants are read before it is told.
const TOLD_AFTER: usize = 1000;

/// Looks at the structure, then at every row. What is wrong is told as it is found, in words.
pub(super) fn check(
    connection: &Connection,
    tell: &mut dyn FnMut(Finding),
) -> Result<Checked, Error> {
    let mut check = Check { connection, tell };
    check.structure()?;
    let mut adders = HashMap::new();
    let plants = check.plants(&mut adders)?;
    // Tokens are never deleted: those that are read last include all that were used before.
    let tokens = check.tokens(&mut adders)?;
    for (token, plant) in adders {
        let problem = format!("plant {plant}: added by token {token}, which is not there");
        tell(Finding::Wrong(problem));
    }
    Ok(Checked { plants, tokens })
}

struct Check<'a> {
    connection: &'a Connection,
    tell: &'a mut dyn FnMut(Finding),
}

impl Check<'_> {
    fn structure(&mut self) -> Result<(), Error> {
        self.each("structure", "PRAGMA integrity_check(20)", |row, tell| {
            let verdict: String = row.get(0)?;
            // The first line of a longer report names the database, of which there is one.
            let lines = verdict
                .lines()
                .filter(|line| *line != "ok" && !line.starts_with("***"));
            lines.for_each(|line| tell(Finding::Wrong(format!("structure: {line}"))));
            Ok(())
        })
    }

    /// How many plants there are. For each token that added any, one of them is kept.
    fn plants(&mut self, adders: &mut HashMap<i64, i64>) -> Result<u64, Error> {
        // Only for whoever waits: if they cannot be counted, reading them will tell.
        let all = self
            .connection
            .query_row("SELECT count(*) FROM plants", [], |row| row.get(0));
        (self.tell)(Finding::Plants(all.map_or(0, i64::unsigned_abs)));
        let mut count = 0;
        self.each("plants", SELECT_PLANTS, |row, tell| {
            count += 1;
            if count % TOLD_AFTER == 0 {
                tell(Finding::Read(TOLD_AFTER));
            }
            if let Some(plant) = plant(row) {
                adders.entry(plant.added_by).or_insert(plant.id);
            } else {
                let id: i64 = row.get(0)?;
                tell(Finding::Wrong(format!("plant {id}: not what was stored")));
            }
            Ok(())
        })?;
        Ok(count as u64)
    }

    /// How many tokens there are. Those that are there are taken from the adders.
    fn tokens(&mut self, adders: &mut HashMap<i64, i64>) -> Result<u64, Error> {
        let mut count = 0;
        self.each("tokens", "SELECT * FROM tokens", |row, tell| {
            count += 1;
            let id = row.get("id")?;
            adders.remove(&id);
            if token(row).is_err() {
                tell(Finding::Wrong(format!("token {id}: not what was stored")));
            }
            Ok(())
        })?;
        Ok(count)
    }

    /// Every row of an answer. A table that cannot be read is what this looks for, and no reason to
    /// stop looking.
    fn each(
        &mut self,
        what: &str,
        sql: &str,
        mut row: impl FnMut(&Row<'_>, &mut dyn FnMut(Finding)) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let read = self.connection.prepare(sql).and_then(|mut select| {
            let mut rows = select.query([])?;
            while let Some(next) = rows.next()? {
                row(next, self.tell)?;
            }
            Ok(())
        });
        let damage = |error: &Error| {
            let code = error.sqlite_error_code();
            matches!(
                code,
                Some(ErrorCode::DatabaseCorrupt | ErrorCode::SystemIoFailure)
            )
        };
        match read {
            Err(error) if damage(&error) => {
                let problem = format!("{what}: cannot be read to the end: {error}");
                (self.tell)(Finding::Wrong(problem));
                Ok(())
            }
            other => other,
        }
    }
}
