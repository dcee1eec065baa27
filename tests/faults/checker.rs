//! The checker: compares the history of all requests, recorded by the clients, with the plants that are stored.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::Path;

use rusqlite::{Connection, OpenFlags};

use crate::harness::postgres::plants_in;
use crate::harness::transport::Received;

/// A plant as it was sent: id, name, tag.
pub type Sent = (i64, String, Option<String>);

/// What the client knows about an add after its response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// 200: the plant is durable.
    Acknowledged,
    /// 40009: the id belongs to a different plant.
    Conflict,
    /// 50300 or 50303: not stored; the queue is full or the store is unavailable.
    Busy,
    /// 50302: not stored; the disk is full.
    Full,
    /// Not stored: the server had announced that it closes the connection before it read the request (HTTP/2).
    Unprocessed,
    /// 50301, or no response from a server that had exited.
    Unknown,
    /// No response on a keep-alive connection that the server had not announced to close.
    ConnectionLost,
}

/// Every attempt with its outcome.
#[derive(Debug, Clone, Default)]
pub struct History {
    attempts: Vec<(Sent, Outcome)>,
    /// Acknowledged plants, and where their encrypted responses end in what the server has sent.
    received: Vec<(Sent, Received)>,
}

impl History {
    pub fn note(&mut self, sent: Sent, outcome: Outcome) {
        self.attempts.push((sent, outcome));
    }

    /// An acknowledgement that was encrypted.
    pub fn note_received(&mut self, sent: Sent, received: Received) {
        self.received.push((sent, received));
    }

    pub fn received(&self) -> &[(Sent, Received)] {
        &self.received
    }

    pub fn append(&mut self, other: History) {
        self.attempts.extend(other.attempts);
        self.received.extend(other.received);
    }

    pub fn attempts(&self) -> impl Iterator<Item = &Sent> {
        self.attempts.iter().map(|(sent, _)| sent)
    }

    /// Plants whose outcome the client does not know.
    pub fn unknown(&self) -> impl Iterator<Item = &Sent> {
        let unknown = self
            .attempts
            .iter()
            .filter(|(_, outcome)| matches!(outcome, Outcome::Unknown | Outcome::ConnectionLost));
        unknown.map(|(sent, _)| sent)
    }

    pub fn count(&self, what: Outcome) -> usize {
        let so = self.attempts.iter().filter(|(_, outcome)| *outcome == what);
        so.count()
    }

    pub fn acknowledged(&self) -> impl Iterator<Item = &Sent> {
        let stored = self
            .attempts
            .iter()
            .filter(|(_, outcome)| *outcome == Outcome::Acknowledged);
        stored.map(|(sent, _)| sent)
    }

    /// Every violation of the durability contract; empty if there is none.
    pub fn violations(&self, plants: impl IntoIterator<Item = Sent>) -> Vec<String> {
        let mut wrong = Vec::new();
        let mut stored: BTreeMap<i64, (String, Option<String>)> = BTreeMap::new();
        for (id, name, tag) in plants {
            if stored.insert(id, (name, tag)).is_some() {
                wrong.push(format!("wrong: {id} is stored twice"));
            }
        }
        let is_stored =
            |(id, name, tag): &Sent| stored.get(id) == Some(&(name.clone(), tag.clone()));
        let mut attempted: BTreeMap<&Sent, Vec<Outcome>> = BTreeMap::new();
        for (sent, outcome) in &self.attempts {
            attempted.entry(sent).or_default().push(*outcome);
        }
        for (sent, outcome) in &attempted {
            if outcome.contains(&Outcome::Acknowledged) && !is_stored(sent) {
                wrong.push(format!("lost: {sent:?} was acknowledged"));
            }
            if outcome.contains(&Outcome::Conflict) && is_stored(sent) {
                wrong.push(format!(
                    "wrong: {sent:?} is stored, but its response was 40009"
                ));
            }
            // Such a plant may be a row that was visible but not durable. The client does not send it again after a 40009.
            if outcome.contains(&Outcome::Conflict) && !stored.contains_key(&sent.0) {
                wrong.push(format!(
                    "wrong: the response to {sent:?} was 40009, but no plant has its id"
                ));
            }
            let not_stored = |outcome: &Outcome| {
                matches!(
                    outcome,
                    Outcome::Busy | Outcome::Full | Outcome::Unprocessed
                )
            };
            if outcome.iter().all(not_stored) && is_stored(sent) {
                wrong.push(format!(
                    "wrong: {sent:?} is stored, but its response said that it is not"
                ));
            }
        }
        for (id, (name, tag)) in &stored {
            if !attempted.contains_key(&(*id, name.clone(), tag.clone())) {
                wrong.push(format!(
                    "wrong: {id} {name:?} {tag:?} is stored but was never sent"
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

    /// The same for a database file, with SQLite's own integrity check.
    pub fn violations_in(&self, database: &Path) -> Vec<String> {
        match read(database) {
            Ok((stored, integrity)) => {
                let mut wrong = self.violations(stored);
                if integrity != "ok" {
                    wrong.push(format!("wrong: damaged: {integrity}"));
                }
                wrong
            }
            Err(error) => vec![format!("wrong: unreadable: {error}")],
        }
    }

    /// The same for the plants with these ids in a PostgreSQL database.
    pub fn violations_at(&self, database: &str, ids: RangeInclusive<i64>) -> Vec<String> {
        self.violations(plants_in(database, ids))
    }
}

/// Every plant, and the result of `integrity_check`.
fn read(database: &Path) -> Result<(Vec<Sent>, String), rusqlite::Error> {
    let connection = Connection::open_with_flags(database, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    let integrity = connection.query_row("PRAGMA integrity_check", [], |row| row.get(0))?;
    let mut select = connection.prepare("SELECT id, name, tag FROM plants")?;
    let rows = select.query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?;
    let stored = rows.collect::<Result<_, _>>()?;
    Ok((stored, integrity))
}
