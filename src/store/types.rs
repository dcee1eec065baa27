//! What goes into a store and what comes out of it, the same for every kind of store.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use jiff::Timestamp;

use crate::plant::{NewPlant, Plant};
use crate::store::postgres::url::Url;
use crate::token::TokenDigest;

/// Where the plants are kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Location {
    /// In this file.
    Sqlite(PathBuf),
    /// In this database.
    Postgres(Box<Url>),
}

impl Location {
    /// The file, if it is one.
    pub fn file(&self) -> Option<&Path> {
        match self {
            Self::Sqlite(path) => Some(path),
            Self::Postgres(_) => None,
        }
    }
}

impl FromStr for Location {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once(':') {
            Some(("sqlite", "-")) => Err("expected a file: sqlite:PATH".to_owned()),
            Some(("sqlite", path)) if !path.is_empty() => Ok(Self::Sqlite(path.into())),
            Some(("postgres" | "postgresql", _)) => Ok(Self::Postgres(Box::new(text.parse()?))),
            _ => {
                Err("expected sqlite:PATH or postgres://…, such as sqlite:plantstore.db".to_owned())
            }
        }
    }
}

/// Without passwords.
impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sqlite(path) => write!(f, "sqlite:{}", path.display()),
            Self::Postgres(url) => url.fmt(f),
        }
    }
}

/// The number of a token within its store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TokenId(pub i64);

/// A plant to add, and the token that adds it.
#[derive(Debug)]
pub struct Addition {
    /// What to add.
    pub plant: NewPlant,
    /// Who adds it.
    pub token: TokenId,
}

/// A plant as the store knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlantRecord {
    /// Its id.
    pub id: i64,
    /// The rest of what was sent.
    pub plant: Plant,
    /// When it was added, to the millisecond.
    pub added_at: Timestamp,
    /// By which token.
    pub added_by: TokenId,
}

/// Plants that are handed over together: so few, and of so few bytes, that memory does not notice.
#[derive(Debug, Default)]
pub struct Page {
    /// By id.
    pub plants: Vec<PlantRecord>,
    bytes: usize,
}

impl Page {
    const LEN_MAX: usize = 1000;
    const BYTES_MAX: usize = 1 << 20;

    /// One more.
    pub fn push(&mut self, record: PlantRecord) {
        let plant = &record.plant;
        self.bytes += plant.name.len() + plant.tag.as_ref().map_or(0, String::len);
        self.plants.push(record);
    }

    /// Whether it is time to hand it over.
    pub fn is_full(&self) -> bool {
        self.plants.len() >= Self::LEN_MAX || self.bytes >= Self::BYTES_MAX
    }

    /// The id to go on with; none if there can be no more.
    pub fn next_id(&self) -> Option<i64> {
        self.plants.last()?.id.checked_add(1)
    }
}

/// What became of an addition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It is stored now.
    Added,
    /// The very same plant was stored before.
    Replayed,
    /// The id belongs to a different plant, which was left as it is.
    Conflict,
    /// The id belongs to a plant that is no longer what was stored: a disk has changed it.
    Damaged,
}

/// What a check tells while it reads.
#[derive(Debug)]
pub enum Finding {
    /// There are about so many plants to be read.
    Plants(u64),
    /// So many more have been read.
    Read(usize),
    /// What is not as it was stored, in words.
    Wrong(String),
}

/// What a check has read.
#[derive(Debug, Clone, Copy)]
pub struct Checked {
    /// How many plants.
    pub plants: u64,
    /// How many tokens, revoked ones included.
    pub tokens: u64,
}

/// What a store takes of the disk of this machine, in bytes.
#[derive(Debug, Clone, Copy)]
pub struct Footprint {
    /// The database.
    pub database: u64,
    /// The log of what is not in the database yet.
    pub wal: u64,
}

/// A plant that was asked for.
#[derive(Debug)]
pub enum Found {
    /// As it was stored.
    Plant(PlantRecord),
    /// The one with this id is no longer what was stored.
    Damaged(i64),
}

/// A token to keep: everything but the secret.
#[derive(Debug)]
pub struct NewToken<'a> {
    /// Unique, also among revoked tokens.
    pub name: &'a str,
    /// What is kept of the secret.
    pub digest: TokenDigest,
    /// When it stops working.
    pub expires_at: Option<Timestamp>,
    /// Requests a second that it may make.
    pub rate_limit: Option<u32>,
}

/// A token as the store knows it.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenRecord {
    /// Its number within the store.
    pub id: TokenId,
    /// Its unique name.
    pub name: Arc<str>,
    /// What is kept of the secret.
    pub digest: TokenDigest,
    /// Requests a second that it may make.
    pub rate_limit: Option<u32>,
    /// When it was made.
    pub created_at: Timestamp,
    /// When it stops working.
    pub expires_at: Option<Timestamp>,
    /// When it was revoked.
    pub revoked_at: Option<Timestamp>,
    /// When it was last used, to the minute.
    pub last_used_at: Option<Timestamp>,
}
