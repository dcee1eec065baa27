//! Plants and tokens in PostgreSQL, or an engine that speaks its protocol. A batch is one statement, and what
//! became of it is never guessed: an answer that was lost is found out by running the same batch again.

mod session;
mod text;
mod tls;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::RangeInclusive;
use std::time::Duration;

use jiff::Timestamp;
use tokio::runtime::{Builder, Runtime};
use tokio::time::{Instant, sleep, timeout_at};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Error, Row};

use crate::plant::Plant;
use crate::store::contract::{Addition, Checked, NewToken, Outcome, PlantRecord, TokenId, TokenRecord};
use crate::store::error::{Cause, OpenError, StoreError};
use crate::store::postgres::session::{ConnectError, STEPS, Session, VERSION};
use crate::store::postgres::tls::Tls;
use crate::store::url::Url;
use crate::token::TokenDigest;

/// A replay is a write too: its commit waits for the standby, as that of the first time should have. Sorted, so
/// that two batches cannot wait for each other.
const ADD: &str = "
    INSERT INTO plants (id, name, tag, added_at, added_by)
    SELECT id, name, tag, $4::TIMESTAMPTZ, added_by
    FROM unnest($1::BIGINT[], $2::TEXT[], $3::TEXT[], $5::BIGINT[]) AS new (id, name, tag, added_by)
    ORDER BY id
    ON CONFLICT (id) DO UPDATE SET name = excluded.name
    WHERE plants.name = excluded.name AND plants.tag IS NOT DISTINCT FROM excluded.tag
    RETURNING id, added_at";

/// Between two attempts: longer each time, and never quite the same.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// One connection to the database, made anew whenever it is lost.
pub struct Postgres {
    /// None only while it is dropped.
    runtime: Option<Runtime>,
    link: Link,
}

/// Everything but the runtime.
struct Link {
    url: Url,
    tls: Option<Tls>,
    /// How long whatever is asked may take, with all attempts.
    timeout: Duration,
    session: Option<Session>,
}

impl Postgres {
    /// Opens a database that has our schema.
    pub fn open(url: &Url, timeout: Duration) -> Result<Self, OpenError> {
        let mut store = Self::new(url, timeout)?;
        match store.version()? {
            VERSION => Ok(store),
            _ => Err(OpenError::NotMigrated(url.to_string())),
        }
    }

    /// Opens a database, making the schema if it is not there.
    pub fn open_or_create(url: &Url, timeout: Duration) -> Result<Self, OpenError> {
        let mut store = Self::new(url, timeout)?;
        store.migrate()?;
        Ok(store)
    }

    /// Opens a database for a server. One that is away is waited for by every add; one that refuses us is an error
    /// at once.
    pub fn open_to_serve(url: &Url, timeout: Duration) -> Result<Self, OpenError> {
        let mut store = Self::new(url, timeout)?;
        match store.migrate() {
            Err(OpenError::Away { source, .. }) => {
                tracing::warn!(database = %url, cause = %chain(&source), "the database cannot be reached yet");
            }
            done => done?,
        }
        Ok(store)
    }

    fn new(url: &Url, timeout: Duration) -> Result<Self, OpenError> {
        let failed_to = |action, path: &str| {
            let path = path.to_owned();
            move |source| OpenError::Io {
                action,
                path,
                source,
            }
        };
        let tls = match &url.roots_path {
            Some(path) => {
                let tls = Tls::trusting(path);
                Some(tls.map_err(failed_to(
                    "read certificates from",
                    &path.display().to_string(),
                ))?)
            }
            None => None,
        };
        let runtime = Builder::new_current_thread().enable_all().build();
        Ok(Self {
            runtime: Some(runtime.map_err(failed_to("start a runtime for", &url.to_string()))?),
            link: Link {
                url: url.clone(),
                tls,
                timeout,
                session: None,
            },
        })
    }

    /// Makes whatever the schema lacks. Safe to run from several nodes at once.
    pub fn migrate(&mut self) -> Result<(), OpenError> {
        if self.version()? == VERSION {
            return Ok(());
        }
        self.block_on(async |link| {
            let make = "CREATE TABLE IF NOT EXISTS plantstore_schema (version BIGINT PRIMARY KEY)";
            for step in std::iter::once(make).chain(STEPS) {
                link.until_known(async |session| match session.client.batch_execute(step).await {
                    // Another node made it in the same moment.
                    Err(error) if was_made(&error) => Ok(()),
                    done => done,
                })
                .await?;
            }
            let sql = "INSERT INTO plantstore_schema (version) VALUES ($1) ON CONFLICT (version) DO NOTHING";
            link.until_known(async |session| session.client.execute(sql, &[&VERSION]).await)
                .await
        })
        .map(drop)
        .map_err(|error| match error {
            StoreError::Busy(source) => OpenError::Migration {
                database: self.link.url.to_string(),
                source,
            },
            other => OpenError::Away {
                database: self.link.url.to_string(),
                source: other.into(),
            },
        })
    }

    /// The version of the schema, as far as we know it.
    fn version(&mut self) -> Result<i64, OpenError> {
        let database = self.link.url.to_string();
        let found = self.block_on(async |link| {
            let session = link.session().await?;
            session.version().await.map_err(ConnectError::Rejected)
        });
        match found {
            Ok(found) if found > VERSION => Err(OpenError::Newer {
                path: database,
                found,
                known: VERSION,
            }),
            Ok(found) => Ok(found),
            Err(ConnectError::Away(source)) => Err(OpenError::Away {
                database,
                source: source.into(),
            }),
            Err(ConnectError::Refused(problem)) => Err(OpenError::Unsafe { database, problem }),
            Err(ConnectError::Rejected(source)) => Err(OpenError::Rejected {
                database,
                source: source.into(),
            }),
        }
    }

    /// Adds a batch of plants in one statement: an outcome for each, in order, once all of it is committed.
    /// After it, when tokens were used is noted.
    pub fn add(
        &mut self,
        batch: &[Addition],
        used: &[(TokenId, Timestamp)],
    ) -> Result<Vec<Outcome>, StoreError> {
        self.block_on(async |link| {
            let outcomes = link.add(batch).await?;
            for (token, used_at) in used {
                let sql = "UPDATE tokens SET last_used_at = $2
                           WHERE id = $1 AND (last_used_at IS NULL OR last_used_at < $2)";
                let noted = link.until_known(async |session| {
                    session.client.execute(sql, &[&token.0, used_at]).await
                });
                // The next minute is noted again.
                let _ = noted.await;
            }
            Ok(outcomes)
        })
    }

    /// Keeps a new token. False when the name is taken.
    pub fn create_token(&mut self, token: &NewToken<'_>) -> Result<bool, StoreError> {
        let id = number(&token.digest);
        let rate_limit = token.rate_limit.map(i64::from);
        let now = Timestamp::now();
        // The same digest is this very token, stored by an attempt whose answer was lost.
        let sql = "INSERT INTO tokens (id, name, digest, rate_limit, created_at, expires_at)
                   VALUES ($1, $2, $3, $4, $5, $6)
                   ON CONFLICT (name) DO UPDATE SET name = excluded.name
                   WHERE tokens.digest = excluded.digest";
        let digest: &[u8] = token.digest.as_bytes();
        let rows = self.block_on(async |link| {
            link.until_known(async |session| {
                let values: [&(dyn ToSql + Sync); 6] = [
                    &id,
                    &token.name,
                    &digest,
                    &rate_limit,
                    &now,
                    &token.expires_at,
                ];
                session.client.execute(sql, &values).await
            })
            .await
        })?;
        Ok(rows == 1)
    }

    /// Revokes a token for good. `None` when there is none of that name, `Some(false)` when it was
    /// revoked before.
    pub fn revoke_token(&mut self, name: &str) -> Result<Option<bool>, StoreError> {
        let now = Timestamp::now();
        self.block_on(async |link| {
            let sql = "UPDATE tokens SET revoked_at = coalesce(revoked_at, $2) WHERE name = $1 RETURNING revoked_at";
            let row = link
                .until_known(async |session| session.client.query_opt(sql, &[&name, &now]).await)
                .await?;
            Ok(row.map(|row| row.get::<_, Timestamp>(0).as_microsecond() == now.as_microsecond()))
        })
    }

    /// Whether there is any token, revoked ones included.
    pub fn has_tokens(&mut self) -> Result<bool, StoreError> {
        self.block_on(async |link| {
            let sql = "SELECT EXISTS (SELECT 1 FROM tokens)";
            let row = link.until_known(async |session| session.client.query_one(sql, &[]).await);
            Ok(row.await?.get(0))
        })
    }

    /// Every token, oldest first.
    pub fn tokens(&mut self) -> Result<Vec<TokenRecord>, StoreError> {
        self.block_on(async |link| {
            let sql = "SELECT * FROM tokens ORDER BY created_at, id";
            let rows = link.until_known(async |session| session.client.query(sql, &[]).await);
            rows.await?.iter().map(token_record).collect()
        })
    }

    /// The token with this digest.
    pub fn token(&mut self, digest: &TokenDigest) -> Result<Option<TokenRecord>, StoreError> {
        let digest: &[u8] = digest.as_bytes();
        self.block_on(async |link| {
            let sql = "SELECT * FROM tokens WHERE digest = $1";
            let row =
                link.until_known(async |session| session.client.query_opt(sql, &[&digest]).await);
            row.await?.as_ref().map(token_record).transpose()
        })
    }

    /// How many plants there are.
    pub fn count_plants(&mut self) -> Result<u64, StoreError> {
        self.block_on(async |link| {
            let sql = "SELECT count(*) FROM plants";
            let row = link.until_known(async |session| session.client.query_one(sql, &[]).await);
            Ok(u64::try_from(row.await?.get::<_, i64>(0)).unwrap_or_default())
        })
    }

    /// The plants with ids of this range, by id, as many as fit in a page.
    pub fn plants(
        &mut self,
        ids: &RangeInclusive<i64>,
        page_len: u32,
    ) -> Result<Vec<PlantRecord>, StoreError> {
        let page_len = i64::from(page_len);
        self.block_on(async |link| {
            let sql = "SELECT id, name, tag, added_at, added_by FROM plants
                       WHERE id BETWEEN $1 AND $2 ORDER BY id LIMIT $3";
            let rows = link.until_known(async |session| {
                let values: [&(dyn ToSql + Sync); 3] = [ids.start(), ids.end(), &page_len];
                session.client.query(sql, &values).await
            });
            rows.await?.iter().map(plant_record).collect()
        })
    }

    /// Keeps plants of another store as they are; leaves what is there.
    pub fn keep_plants(&mut self, plants: &[PlantRecord]) -> Result<(), StoreError> {
        let column = |value: fn(&PlantRecord) -> i64| plants.iter().map(value).collect::<Vec<_>>();
        let (ids, tokens) = (column(|plant| plant.id), column(|plant| plant.added_by.0));
        let times: Vec<_> = plants.iter().map(|plant| plant.added_at).collect();
        let names: Vec<_> = plants.iter().map(|plant| text::stored(&plant.plant.name)).collect();
        let tag = |plant: &PlantRecord| plant.plant.tag.as_deref().map(|tag| text::stored(tag).into_owned());
        let tags: Vec<_> = plants.iter().map(tag).collect();
        self.block_on(async |link| {
            let sql = "INSERT INTO plants (id, name, tag, added_at, added_by)
                       SELECT * FROM unnest($1::BIGINT[], $2::TEXT[], $3::TEXT[], $4::TIMESTAMPTZ[], $5::BIGINT[])
                       ON CONFLICT (id) DO NOTHING";
            let kept = link.until_known(async |session| {
                let values: [&(dyn ToSql + Sync); 5] = [&ids, &names, &tags, &times, &tokens];
                session.client.execute(sql, &values).await
            });
            kept.await.map(drop)
        })
    }

    /// Keeps tokens of another store as they are, and brings those up to date that it kept before.
    pub fn keep_tokens(&mut self, tokens: &[TokenRecord]) -> Result<(), StoreError> {
        self.block_on(async |link| {
            for token in tokens {
                let sql = "INSERT INTO tokens
                             (id, name, digest, rate_limit, created_at, expires_at, revoked_at, last_used_at)
                           VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
                           ON CONFLICT (id) DO UPDATE
                           SET revoked_at = excluded.revoked_at, last_used_at = excluded.last_used_at
                           WHERE tokens.digest = excluded.digest";
                let digest: &[u8] = token.digest.as_bytes();
                let rate_limit = token.rate_limit.map(i64::from);
                let kept = link.until_known(async |session| {
                    let values: [&(dyn ToSql + Sync); 8] = [
                        &token.id.0,
                        &&*token.name,
                        &digest,
                        &rate_limit,
                        &token.created_at,
                        &token.expires_at,
                        &token.revoked_at,
                        &token.last_used_at,
                    ];
                    session.client.execute(sql, &values).await
                });
                kept.await?;
            }
            Ok(())
        })
    }

    /// Reads everything, and tells in words what none of us has stored.
    pub fn check(&mut self, _wrong: &mut dyn FnMut(String)) -> Result<Checked, StoreError> {
        self.block_on(async |link| {
            let sql = "SELECT (SELECT count(*) FROM plants), (SELECT count(*) FROM tokens)";
            let row = link.until_known(async |session| session.client.query_one(sql, &[]).await);
            let row = row.await?;
            let count = |index| u64::try_from(row.get::<_, i64>(index)).unwrap_or_default();
            Ok(Checked {
                plants: count(0),
                tokens: count(1),
            })
        })
    }

    fn block_on<T>(&mut self, work: impl AsyncFnOnce(&mut Link) -> T) -> T {
        let runtime = self.runtime.as_ref().expect("it is there until the drop");
        runtime.block_on(work(&mut self.link))
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        // Dropped in place, a runtime would wait, and that is not allowed where another one is running.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Link {
    /// The connection, made now if there is none.
    async fn session(&mut self) -> Result<&Session, ConnectError> {
        if self
            .session
            .as_ref()
            .is_none_or(|session| session.client.is_closed())
        {
            self.session = Some(Session::connect(&self.url, self.tls.as_ref()).await?);
        }
        Ok(self.session.as_ref().expect("it was made just now"))
    }

    /// Does something that can be done again without harm until it is known to have succeeded, or to have failed
    /// for good, or until the time is over.
    async fn until_known<T>(
        &mut self,
        attempt: impl AsyncFn(&Session) -> Result<T, Error>,
    ) -> Result<T, StoreError> {
        let deadline = Instant::now() + self.timeout;
        let mut pause = PAUSE_MIN;
        let mut may_be_stored = false;
        loop {
            let cause: Cause = match timeout_at(deadline, self.session()).await {
                Err(elapsed) => elapsed.into(),
                Ok(Err(ConnectError::Away(error))) => error.into(),
                Ok(Err(refused)) => return Err(given_up(may_be_stored, refused.into())),
                Ok(Ok(session)) => {
                    session.expect_no_warning();
                    let result = timeout_at(deadline, attempt(session)).await;
                    let warned = session.has_warned();
                    match result {
                        Ok(Ok(done)) if !warned => return Ok(done),
                        Ok(Err(error)) => {
                            match Meaning::of(&error) {
                                Meaning::Again => {}
                                Meaning::Elsewhere => self.session = None,
                                Meaning::Unknown => {
                                    self.session = None;
                                    may_be_stored = true;
                                }
                                Meaning::Full if !may_be_stored => {
                                    return Err(StoreError::Full(error.into()));
                                }
                                Meaning::Full | Meaning::Never => {
                                    // It may be the prepared statement that is of no use any more.
                                    self.session = None;
                                    return Err(given_up(may_be_stored, error.into()));
                                }
                            }
                            error.into()
                        }
                        Ok(Ok(_)) => {
                            self.session = None;
                            may_be_stored = true;
                            "the database has warned".into()
                        }
                        Err(elapsed) => {
                            // Never a cancel: that could turn a commit that waits into a success.
                            self.session = None;
                            may_be_stored = true;
                            elapsed.into()
                        }
                    }
                }
            };
            tracing::debug!(cause = %chain(&cause), "another attempt at the database");
            let jitter = pause.mul_f64(fraction());
            if Instant::now() + jitter >= deadline {
                return Err(given_up(may_be_stored, cause));
            }
            sleep(jitter).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    async fn add(&mut self, batch: &[Addition]) -> Result<Vec<Outcome>, StoreError> {
        // Of several plants with one id the first is sent, and the others are compared with it.
        let mut first = BTreeMap::new();
        for addition in batch {
            first.entry(addition.plant.id).or_insert(addition);
        }
        let now = Timestamp::from_microsecond(Timestamp::now().as_microsecond())
            .expect("now is within the range");
        let mut stored = self.insert(first.values().copied(), now).await?;

        // Where the first was not the one that is stored, another may be.
        let others: Vec<_> = batch
            .iter()
            .filter(|addition| {
                let id = addition.plant.id;
                !stored.contains_key(&id) && addition.plant.plant != first[&id].plant.plant
            })
            .collect();
        if !others.is_empty() {
            let ids: Vec<_> = others.iter().map(|addition| addition.plant.id).collect();
            let there = self.there(&ids).await?;
            for other in others {
                if there.get(&other.plant.id) == Some(&other.plant.plant) {
                    first.insert(other.plant.id, other);
                }
            }
            let again = first.values().copied();
            let again: Vec<_> = again
                .filter(|addition| ids.contains(&addition.plant.id))
                .collect();
            stored.extend(self.insert(again.into_iter(), now).await?);
        }

        let mut seen = HashSet::new();
        let outcome = |addition: &Addition| {
            let id = addition.plant.id;
            match stored.get(&id) {
                Some(added_at) if addition.plant.plant == first[&id].plant.plant => {
                    let is_first = seen.insert(id);
                    if is_first && *added_at == now {
                        Outcome::Added
                    } else {
                        Outcome::AlreadyThere
                    }
                }
                _ => Outcome::Taken,
            }
        };
        Ok(batch.iter().map(outcome).collect())
    }

    /// Stores plants with different ids; tells since when those are there that are stored now just as given.
    async fn insert<'a>(
        &mut self,
        additions: impl Iterator<Item = &'a Addition>,
        now: Timestamp,
    ) -> Result<HashMap<i64, Timestamp>, StoreError> {
        let (mut ids, mut names, mut tags, mut tokens) = (vec![], vec![], vec![], vec![]);
        for Addition { plant, token } in additions {
            ids.push(plant.id);
            names.push(text::stored(&plant.plant.name));
            tags.push(plant.plant.tag.as_deref().map(text::stored));
            tokens.push(token.0);
        }
        let rows = self
            .until_known(async |session| {
                let add = session.add(ADD).await?;
                session
                    .client
                    .query(add, &[&ids, &names, &tags, &now, &tokens])
                    .await
            })
            .await?;
        Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
    }

    /// Those of these plants that are stored.
    async fn there(&mut self, ids: &[i64]) -> Result<HashMap<i64, Plant>, StoreError> {
        let sql = "SELECT id, name, tag FROM plants WHERE id = ANY($1)";
        let rows = self
            .until_known(async |session| session.client.query(sql, &[&ids]).await)
            .await?;
        rows.iter().map(plant).collect()
    }
}

/// What an error of a statement means for what it was to do.
enum Meaning {
    /// Not done, and the next attempt may succeed.
    Again,
    /// Not done, and this server will not do it: it has become a standby.
    Elsewhere,
    /// Perhaps done.
    Unknown,
    /// Not done: no room.
    Full,
    /// Not done, and not to be done until a person has changed something.
    Never,
}

impl Meaning {
    fn of(error: &Error) -> Self {
        let Some(code) = error.code() else {
            return Self::Unknown; // the connection is gone, or what came is not what was expected
        };
        match code.code() {
            "25006" => Self::Elsewhere,
            "40003" => Self::Unknown,
            "53100" => Self::Full,
            code if code.starts_with("08") || code.starts_with("57P") => Self::Unknown,
            // Serialization, deadlock, locks, a query that somebody has cancelled, too little of something.
            code if ["40", "53", "55", "57"].contains(&&code[..2]) => Self::Again,
            _ => Self::Never,
        }
    }
}

fn given_up(may_be_stored: bool, cause: Cause) -> StoreError {
    if may_be_stored {
        StoreError::Unknown(cause)
    } else {
        StoreError::Busy(cause)
    }
}

fn was_made(error: &Error) -> bool {
    let made = [
        SqlState::DUPLICATE_TABLE,
        SqlState::UNIQUE_VIOLATION,
        SqlState::DUPLICATE_OBJECT,
    ];
    error.code().is_some_and(|code| made.contains(code))
}

fn plant_record(row: &Row) -> Result<PlantRecord, StoreError> {
    let (id, plant) = plant(row)?;
    Ok(PlantRecord {
        id,
        plant,
        added_at: to_the_millisecond(row.get(3)),
        added_by: TokenId(row.get(4)),
    })
}

/// As precise as records are.
fn to_the_millisecond(time: Timestamp) -> Timestamp {
    Timestamp::from_millisecond(time.as_millisecond()).unwrap_or(time)
}

fn plant(row: &Row) -> Result<(i64, Plant), StoreError> {
    let original = |stored: &str| match text::original(stored) {
        Some(text) => Ok(text.into_owned()),
        None => Err(StoreError::Damaged("a plant is not what was stored".into())),
    };
    let tag: Option<&str> = row.get(2);
    let plant = Plant {
        name: original(row.get(1))?,
        tag: tag.map(original).transpose()?,
    };
    Ok((row.get(0), plant))
}

fn token_record(row: &Row) -> Result<TokenRecord, StoreError> {
    let damaged = || StoreError::Damaged("a token is not what was stored".into());
    let digest: &[u8] = row.get("digest");
    let digest = digest.try_into().map_err(|_| damaged())?;
    let rate_limit: Option<i64> = row.get("rate_limit");
    let time = |column| row.get::<_, Option<Timestamp>>(column).map(to_the_millisecond);
    Ok(TokenRecord {
        id: TokenId(row.get("id")),
        name: row.get::<_, &str>("name").into(),
        digest: TokenDigest::from_bytes(digest),
        rate_limit: rate_limit
            .map(|limit| u32::try_from(limit).map_err(|_| damaged()))
            .transpose()?,
        created_at: to_the_millisecond(row.get("created_at")),
        expires_at: time("expires_at"),
        revoked_at: time("revoked_at"),
        last_used_at: time("last_used_at"),
    })
}

/// The number of a token: positive, and unlike any other, as its digest is.
fn number(digest: &TokenDigest) -> i64 {
    let (first, _) = digest.as_bytes().split_at(8);
    i64::from_be_bytes(first.try_into().expect("8 bytes")) & i64::MAX
}

/// Between a half and one. A pause can do without randomness, if there is none.
fn fraction() -> f64 {
    let random = getrandom::u32().unwrap_or(u32::MAX);
    0.5 + f64::from(random) / f64::from(u32::MAX) / 2.0
}

/// An error with all that is behind it.
fn chain(error: &Cause) -> String {
    let sources = std::iter::successors(error.source(), |error| error.source());
    let all = std::iter::once(error.to_string()).chain(sources.map(ToString::to_string));
    all.collect::<Vec<_>>().join(": ")
}
