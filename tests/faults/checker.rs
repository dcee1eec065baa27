//! The one checker: what clients attempted and what they were told, kept outside the service, held
//! against what is stored.

use std::collections::BTreeMap;
use std::path::Path;

use rusqlite::{Connection, OpenFlags};

/// A plant as it was sent: id, name, tag.
pub type Sent = (i64, String, Option<String>);

/// What a client was told of a plant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Told {
    /// 200: it is on disk.
    Stored,
    /// 40009: the id belongs to a different plant.
    Taken,
    /// 50300 or 50303: nothing was stored, too many are waiting or the store cannot be reached.
    Busy,
    /// 50302: nothing was stored, there is no room.
    Full,
    /// 50301, or no response from a service that was not there any more.
    Nothing,
    /// No response on a connection that had been served, and had not been told that it would be closed.
    Cut,
}

/// Every attempt and every response.
#[derive(Debug, Clone, Default)]
pub struct Ledger {
    attempts: Vec<(Sent, Told)>,
}

impl Ledger {
    pub fn note(&mut self, sent: Sent, told: Told) {
        self.attempts.push((sent, told));
    }

    pub fn append(&mut self, other: Ledger) {
        self.attempts.extend(other.attempts);
    }

    pub fn attempts(&self) -> impl Iterator<Item = &Sent> {
        self.attempts.iter().map(|(sent, _)| sent)
    }

    /// Plants whose sender does not know what became of them.
    pub fn unanswered(&self) -> impl Iterator<Item = &Sent> {
        let unanswered = self
            .attempts
            .iter()
            .filter(|(_, told)| matches!(told, Told::Nothing | Told::Cut));
        unanswered.map(|(sent, _)| sent)
    }

    /// How often this was said.
    pub fn count(&self, what: Told) -> usize {
        let so = self.attempts.iter().filter(|(_, told)| *told == what);
        so.count()
    }

    pub fn acknowledged(&self) -> impl Iterator<Item = &Sent> {
        let stored = self
            .attempts
            .iter()
            .filter(|(_, told)| *told == Told::Stored);
        stored.map(|(sent, _)| sent)
    }

    /// Everything that is wrong with what is stored; nothing, if the promise was kept.
    pub fn violations(&self, stored: &BTreeMap<i64, (String, Option<String>)>) -> Vec<String> {
        let mut wrong = Vec::new();
        let is_stored =
            |(id, name, tag): &Sent| stored.get(id) == Some(&(name.clone(), tag.clone()));
        let mut attempted: BTreeMap<&Sent, Vec<Told>> = BTreeMap::new();
        for (sent, told) in &self.attempts {
            attempted.entry(sent).or_default().push(*told);
        }
        for (sent, told) in &attempted {
            if told.contains(&Told::Stored) && !is_stored(sent) {
                wrong.push(format!("lost: {sent:?} was acknowledged"));
            }
            if told.contains(&Told::Taken) && is_stored(sent) {
                wrong.push(format!(
                    "wrong: {sent:?} is stored, and was told to be another's"
                ));
            }
            let not_stored = |told: &Told| matches!(told, Told::Busy | Told::Full);
            if told.iter().all(not_stored) && is_stored(sent) {
                wrong.push(format!("wrong: {sent:?} is stored, and was told not to be"));
            }
        }
        for (id, (name, tag)) in stored {
            if !attempted.contains_key(&(*id, name.clone(), tag.clone())) {
                wrong.push(format!(
                    "wrong: {id} {name:?} {tag:?} is stored and nobody sent it"
                ));
            }
        }
        let mut winners: BTreeMap<i64, &Sent> = BTreeMap::new();
        for sent in self.acknowledged() {
            if winners
                .insert(sent.0, sent)
                .is_some_and(|other| other != sent)
            {
                wrong.push(format!(
                    "wrong: two plants were acknowledged with the id {}",
                    sent.0
                ));
            }
        }
        wrong
    }

    /// The same for a database file, with what SQLite itself says of it.
    pub fn violations_in(&self, database: &Path) -> Vec<String> {
        match read(database) {
            Ok((stored, integrity)) => {
                let mut wrong = self.violations(&stored);
                if integrity != "ok" {
                    wrong.push(format!("wrong: damaged: {integrity}"));
                }
                wrong
            }
            Err(error) => vec![format!("wrong: unreadable: {error}")],
        }
    }
}

type Stored = BTreeMap<i64, (String, Option<String>)>;

/// Every plant, and the verdict of `integrity_check`.
fn read(database: &Path) -> Result<(Stored, String), rusqlite::Error> {
    let connection = Connection::open_with_flags(database, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    let integrity = connection.query_row("PRAGMA integrity_check", [], |row| row.get(0))?;
    let mut select = connection.prepare("SELECT id, name, tag FROM plants")?;
    let rows = select.query_map([], |row| Ok((row.get(0)?, (row.get(1)?, row.get(2)?))))?;
    let mut stored = Stored::new();
    for row in rows {
        let (id, plant) = row?;
        assert!(stored.insert(id, plant).is_none(), "{id} is stored twice");
    }
    Ok((stored, integrity))
}
