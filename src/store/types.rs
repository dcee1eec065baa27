//! What goes into a store and comes out of it, the same for SQLite and PostgreSQL.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use jiff::Timestamp;
use serde::Serialize;

use crate::plant::{NewPlant, Plant};
use crate::store::postgres::url::Url;
use crate::token::TokenDigest;

/// Where a store is, as in `--store`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Location {
    Sqlite(PathBuf),
    Postgres(Box<Url>),
}

impl Location {
    /// The path of a SQLite file.
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

/// Passwords are left out.
impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sqlite(path) => write!(f, "sqlite:{}", path.display()),
            Self::Postgres(url) => url.fmt(f),
        }
    }
}

/// The id of a token within its store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TokenId(pub i64);

impl TokenId {
    /// An id that is as unique as the digest.
    pub(crate) fn of(digest: &TokenDigest) -> Self {
        let first = digest.0.first_chunk();
        Self(i64::from_be_bytes(*first.expect("a digest has 32 bytes")) & i64::MAX)
    }
}

/// A plant to add, and the token that adds it.
#[derive(Debug)]
pub struct Addition {
    pub plant: NewPlant,
    pub token: TokenId,
}

/// A plant as it is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PlantRecord {
    pub id: i64,
    pub plant: Plant,
    /// Precise to the millisecond.
    pub added_at: Timestamp,
    pub added_by: TokenId,
}

/// The stored plant with this id is damaged: its checksum does not match, or its text cannot be decoded.
#[derive(Debug)]
pub(crate) struct DamagedPlant {
    pub id: i64,
}

/// Plants are exported and copied in pages, by id. A page ends with the plant that reaches one of these limits.
pub(crate) const PAGE_LEN_MAX: usize = 1000;
pub(crate) const PAGE_BYTES_MAX: usize = 1 << 20;

/// The most plants that are looked up by id at a time: each may be long.
pub(crate) const LOOKUP_LEN_MAX: usize = 100;

/// The first id of the next page; none if there is no next page.
pub(crate) fn next_id(page: &[PlantRecord]) -> Option<i64> {
    page.last()?.id.checked_add(1)
}

/// The result of adding a plant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Added,
    /// The same plant was stored before.
    Replayed,
    /// The id belongs to a different plant, which was left as it is.
    Conflict,
    /// The id belongs to a plant that is not what was stored: the disk has changed it.
    Damaged,
}

/// What a check reports while it reads.
#[derive(Debug)]
pub(crate) enum Finding {
    /// The approximate number of plants to be read.
    Total(u64),
    /// This many more plants have been read.
    Read(usize),
    /// A sentence about what is not as it was stored.
    Problem(String),
}

/// What a check has read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Checked {
    pub plants: u64,
    /// The number of tokens, revoked ones included.
    pub tokens: u64,
}

/// The size of the files of a store in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FileSizes {
    pub database: u64,
    pub wal: u64,
}

/// What has happened to tokens since an event.
#[derive(Debug)]
pub(crate) struct TokenChanges {
    /// True if these are all tokens.
    pub is_complete: bool,
    pub changed: Vec<TokenRecord>,
    pub last_event: i64,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum TokenEvent {
    Created,
    Revoked,
    /// From another store.
    Copied,
}

impl TokenEvent {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Revoked => "revoked",
            Self::Copied => "copied",
        }
    }
}

/// A token: everything but the secret.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TokenRecord {
    #[serde(skip)]
    pub id: TokenId,
    /// Unique, also among revoked tokens.
    pub name: Arc<str>,
    #[serde(skip)]
    pub digest: TokenDigest,
    /// Requests per second.
    pub rate_limit: Option<u32>,
    pub created_at: Timestamp,
    pub expires_at: Option<Timestamp>,
    pub revoked_at: Option<Timestamp>,
    /// Precise to the minute.
    pub last_used_at: Option<Timestamp>,
}

impl TokenRecord {
    /// A token that is created now.
    pub fn new(name: &str, digest: TokenDigest) -> Self {
        Self {
            id: TokenId::of(&digest),
            name: name.into(),
            digest,
            rate_limit: None,
            created_at: Timestamp::now(),
            expires_at: None,
            revoked_at: None,
            last_used_at: None,
        }
    }
}
