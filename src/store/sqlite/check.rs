//! Is all that is stored what was stored? Reads everything: for `plantstore check`.

use std::collections::HashSet;

use rusqlite::{Connection, Error, ErrorCode, Row};

use crate::store::contract::Checked;
use crate::store::sqlite::rows::{PLANT_COLUMNS, plant, token};

/// Looks at the structure, then at every row. What is wrong is told as it is found, in words.
pub(super) fn check(
    connection: &Connection,
    wrong: &mut dyn FnMut(String),
) -> Result<Checked, Error> {
    let mut check = Check { connection, wrong };
    check.structure()?;
    let tokens = check.tokens()?;
    let plants = check.plants(&tokens)?;
    Ok(Checked {
        plants,
        tokens: tokens.len() as u64,
    })
}

struct Check<'a> {
    connection: &'a Connection,
    wrong: &'a mut dyn FnMut(String),
}

impl Check<'_> {
    fn structure(&mut self) -> Result<(), Error> {
        self.each("structure", "PRAGMA integrity_check(20)", |row, wrong| {
            let verdict: String = row.get(0)?;
            // The first line of a longer report names the database, of which there is one.
            let lines = verdict
                .lines()
                .filter(|line| *line != "ok" && !line.starts_with("***"));
            lines.for_each(|line| wrong(format!("structure: {line}")));
            Ok(())
        })
    }

    /// The numbers of all tokens.
    fn tokens(&mut self) -> Result<HashSet<i64>, Error> {
        let mut numbers = HashSet::new();
        self.each("tokens", "SELECT * FROM tokens", |row, wrong| {
            let id = row.get("id")?;
            numbers.insert(id);
            if token(row).is_err() {
                wrong(format!("token {id}: not what was stored"));
            }
            Ok(())
        })?;
        Ok(numbers)
    }

    /// How many plants there are.
    fn plants(&mut self, tokens: &HashSet<i64>) -> Result<u64, Error> {
        let mut count = 0;
        let all = format!("SELECT {PLANT_COLUMNS} FROM plants");
        self.each("plants", &all, |row, wrong| {
            count += 1;
            let id: i64 = row.get(0)?;
            match plant(row) {
                None => wrong(format!("plant {id}: not what was stored")),
                Some(plant) if !tokens.contains(&plant.added_by) => {
                    wrong(format!("plant {id}: added by a token that is not there"));
                }
                Some(_) => {}
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
        mut row: impl FnMut(&Row<'_>, &mut dyn FnMut(String)) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let read = self.connection.prepare(sql).and_then(|mut select| {
            let mut rows = select.query([])?;
            while let Some(next) = rows.next()? {
                row(next, self.wrong)?;
            }
            Ok(())
        });
        match read {
            Err(error) if error.sqlite_error_code() == Some(ErrorCode::DatabaseCorrupt) => {
                (self.wrong)(format!("{what}: cannot be read to the end: {error}"));
                Ok(())
            }
            other => other,
        }
    }
}
