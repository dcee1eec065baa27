//! What goes into a store and comes out of it, the same for SQLite and PostgreSQL.

use std::collections::HashMap;
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

/// The schema of a store.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Schema {
    pub version: i64,
    /// False if it has to be upgraded before the store can be used.
    pub is_current: bool,
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
    Rotated,
    Revoked,
    /// After it was revoked, because another token was created with its name.
    Renamed,
    /// From another store.
    Copied,
}

impl TokenEvent {
    /// None if only its last use has changed.
    pub(super) fn of_merge(before: &TokenRecord, merged: &TokenRecord) -> Option<Self> {
        if merged.revoked_at != before.revoked_at {
            Some(Self::Revoked)
        } else if merged.digest != before.digest {
            Some(Self::Rotated)
        } else {
            (merged.name != before.name).then_some(Self::Renamed)
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Rotated => "rotated",
            Self::Renamed => "renamed",
            Self::Revoked => "revoked",
            Self::Copied => "copied",
        }
    }
}

/// The tokens of a store, to find those of another store among them.
pub(crate) struct TokenIndex<'a> {
    by_digest: HashMap<TokenDigest, &'a TokenRecord>,
    by_name: HashMap<&'a str, &'a TokenRecord>,
}

impl<'a> TokenIndex<'a> {
    pub(crate) fn new(tokens: &'a [TokenRecord]) -> Self {
        let digests = tokens.iter().flat_map(|token| {
            let secrets = token.secrets();
            secrets.map(move |digest| (digest, token))
        });
        let names = tokens.iter().map(|token| (&*token.name, token));
        Self {
            by_digest: digests.collect(),
            by_name: names.collect(),
        }
    }

    /// The same token, although one of the two may have been rotated since it was copied.
    pub(crate) fn find(&self, token: &TokenRecord) -> Option<&'a TokenRecord> {
        let by_digest = token
            .secrets()
            .find_map(|digest| self.by_digest.get(&digest));
        // Rotated several times since it was copied.
        let by_name = || {
            let named = self.by_name.get(&*token.name);
            named.filter(|other| {
                other.created_at == token.created_at && other.rotated_at != token.rotated_at
            })
        };
        by_digest.or_else(by_name).copied()
    }

    pub(crate) fn named(&self, name: &str) -> Option<&'a TokenRecord> {
        self.by_name.get(name).copied()
    }
}

/// What was done to a token, and by whom.
#[derive(Debug, Serialize)]
pub(crate) struct TokenHistory {
    pub at: Timestamp,
    /// The name of the token.
    pub name: Arc<str>,
    pub event: String,
    /// The user of the operating system; none for events of versions that did not record it.
    pub user: Option<String>,
}

/// The secret that a token had before it was rotated, which is valid for a while.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct PreviousSecret {
    #[serde(skip)]
    pub digest: TokenDigest,
    pub expires_at: Timestamp,
}

/// A token: everything but the secret.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TokenRecord {
    #[serde(skip)]
    pub id: TokenId,
    /// Unique. A revoked token gets another one if its name is used again.
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
    /// When it got its present secret, if that is not its first.
    pub rotated_at: Option<Timestamp>,
    pub previous_secret: Option<PreviousSecret>,
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
            rotated_at: None,
            previous_secret: None,
        }
    }

    /// The name that a revoked token gets when another one is created with its name: plants that it added are not taken for
    /// those of the other.
    pub(super) fn name_when_replaced(&self) -> Option<String> {
        let revoked_at = self.revoked_at?;
        let time = revoked_at.strftime("%Y-%m-%d %H:%M:%S%.3f");
        Some(format!("{} (revoked {time})", self.name))
    }

    /// The digests of its secrets.
    pub(crate) fn secrets(&self) -> impl Iterator<Item = TokenDigest> + use<> {
        let previous = self.previous_secret.map(|secret| secret.digest);
        [Some(self.digest), previous].into_iter().flatten()
    }

    /// The same token after it was merged with its copy in another store: with the latest secret, and revoked if one of them is.
    pub(super) fn merged_with(&self, other: &Self) -> Self {
        let latest = if other.rotated_at > self.rotated_at {
            other
        } else {
            self
        };
        // A name only gets longer: by the time of the revocation.
        let named = if other.name.len() > self.name.len() {
            other
        } else {
            self
        };
        let revoked_at = [self.revoked_at, other.revoked_at].into_iter().flatten();
        Self {
            name: Arc::clone(&named.name),
            digest: latest.digest,
            expires_at: latest.expires_at,
            rotated_at: latest.rotated_at,
            previous_secret: latest.previous_secret,
            revoked_at: revoked_at.min(),
            last_used_at: self.last_used_at.max(other.last_used_at),
            ..self.clone()
        }
    }
}
