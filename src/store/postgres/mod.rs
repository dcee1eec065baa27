//! Plants and tokens in PostgreSQL, or an engine that speaks its protocol. A batch is one statement, and what
//! became of it is never guessed: an answer that was lost is found out by running the same batch again.

mod batch;
mod client;
mod export;
mod keep;
mod query;
mod retry;
mod rows;
mod schema;
mod session;
mod statistics;
mod text;
mod tls;
mod tokens;
pub(super) mod url;

use std::ops::{ControlFlow, RangeInclusive};
use std::time::Duration;

use jiff::Timestamp;
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;

use crate::store::Mode;
use crate::store::error::{OpenError, StoreError, chain};
use crate::store::postgres::client::Param;
use crate::store::postgres::retry::Link;
use crate::store::postgres::session::ConnectError;
use crate::store::postgres::tls::Tls;
use crate::store::postgres::url::Url;
use crate::store::query::{Cursor, Days, Filter, Statistics, Walk};
use crate::store::types::{
    Addition, Checked, Finding, Found, NewToken, Outcome, Page, PlantRecord, TokenId, TokenRecord,
};
use crate::token::TokenDigest;

/// The time limit of one operation of a command: it may have much to count.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(600);

/// For the first connection at least, in which tables may have to be created.
const OPEN_TIMEOUT: Duration = Duration::from_secs(30);

/// One connection to the database, made anew whenever it is lost.
pub struct Postgres {
    /// None only while it is dropped.
    runtime: Option<Runtime>,
    link: Link,
}

impl Postgres {
    /// Several nodes may create the tables at once.
    pub(crate) fn open(url: &Url, mode: Mode) -> Result<Self, OpenError> {
        let (create, timeout) = match mode {
            Mode::Read | Mode::ReadBackup | Mode::Write => (false, COMMAND_TIMEOUT),
            Mode::Create | Mode::Import | Mode::FillBackup => (true, COMMAND_TIMEOUT),
            Mode::Serve { timeout } | Mode::ServeTokens { timeout } => (true, timeout),
        };
        let mut store = Self::new(url, timeout, create)?;
        match store.connect() {
            Err(OpenError::Away { source, .. })
                if matches!(mode, Mode::Serve { .. } | Mode::ServeTokens { .. }) =>
            {
                // The first probe logs this once, for all connections.
                tracing::debug!(database = %url, cause = %chain(&*source), "the database cannot be reached yet");
            }
            connected => connected?,
        }
        Ok(store)
    }

    fn new(url: &Url, timeout: Duration, create: bool) -> Result<Self, OpenError> {
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
                create,
                is_verified: false,
                session: None,
            },
        })
    }

    /// Connects for the first time: to a server with safe settings, and with our tables.
    fn connect(&mut self) -> Result<(), OpenError> {
        let database = self.link.url.to_string();
        let connected = self.block_on(async |link| {
            match timeout(link.timeout.max(OPEN_TIMEOUT), link.session()).await {
                Ok(session) => session.map(drop),
                Err(elapsed) => Err(ConnectError::Away(elapsed.into())),
            }
        });
        connected.map_err(|error| match error {
            ConnectError::Away(source) => OpenError::Away { database, source },
            ConnectError::Refused(problem) => OpenError::Unsafe { database, problem },
            ConnectError::Rejected(source) => OpenError::Rejected {
                database,
                source: source.into(),
            },
            ConnectError::NotMigrated => OpenError::NotMigrated(database),
            ConnectError::Migration(source) => OpenError::Migration {
                database,
                source: source.into(),
            },
            ConnectError::Newer { found, known } => OpenError::Newer {
                path: database,
                found,
                known,
            },
        })
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
            link.note_use(used).await;
            Ok(outcomes)
        })
    }

    /// Checks that the database takes writes, if a write is due.
    pub fn probe(&mut self, is_write_due: bool) -> Result<(), StoreError> {
        if is_write_due {
            self.block_on(async |link| link.probe().await)?;
        }
        Ok(())
    }

    /// True if the server has closed the connection.
    pub fn is_disconnected(&mut self) -> bool {
        self.block_on(async |link| link.is_disconnected().await)
    }

    /// What each plant is to the one that has its id; none where the id is free.
    pub fn compare(&mut self, batch: &[Addition]) -> Result<Vec<Option<Outcome>>, StoreError> {
        self.block_on(async |link| link.compare(batch).await)
    }

    /// Hands over all plants of one moment, by id, a page at a time, until that is enough.
    pub fn export(
        &mut self,
        hand_over: &mut dyn FnMut(&Page) -> ControlFlow<()>,
    ) -> Result<(), StoreError> {
        self.block_on(async |link| link.export(hand_over).await)
    }

    /// Keeps a new token. False when the name is taken.
    pub fn create_token(&mut self, token: &NewToken<'_>) -> Result<bool, StoreError> {
        self.block_on(async |link| link.create_token(token).await)
    }

    /// Revokes a token for good. `None` when there is none of that name, `Some(false)` when it was
    /// revoked before.
    pub fn revoke_token(&mut self, name: &str) -> Result<Option<bool>, StoreError> {
        self.block_on(async |link| link.revoke_token(name).await)
    }

    /// Whether there is any token, revoked ones included.
    pub fn has_tokens(&mut self) -> Result<bool, StoreError> {
        self.block_on(async |link| link.has_tokens().await)
    }

    /// Every token, oldest first.
    pub fn tokens(&mut self) -> Result<Vec<TokenRecord>, StoreError> {
        self.block_on(async |link| link.tokens().await)
    }

    /// The token with this digest.
    pub fn token(&mut self, digest: &TokenDigest) -> Result<Option<TokenRecord>, StoreError> {
        self.block_on(async |link| link.token(digest).await)
    }

    /// How many plants there are.
    pub fn count_plants(&mut self) -> Result<u64, StoreError> {
        self.block_on(async |link| {
            let sql = "SELECT count(*) FROM plantstore.plants";
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
            let sql = "SELECT id, name, tag, added_at, added_by FROM plantstore.plants
                       WHERE id BETWEEN $1 AND $2 ORDER BY id LIMIT $3";
            let rows = link.until_known(async |session| {
                let values: [&dyn Param; 3] = [ids.start(), ids.end(), &page_len];
                session.client.query(sql, &values).await
            });
            rows.await?.iter().map(rows::plant_record).collect()
        })
    }

    /// Looks at so many of the newest plants of a time, for those that are wanted.
    pub fn walk(&mut self, wanted: &Filter, len: u32) -> Result<Walk, StoreError> {
        self.block_on(async |link| link.walk(wanted, len).await)
    }

    /// Looks at every plant: where so many of the newest stand that are wanted.
    pub fn search(
        &mut self,
        wanted: &Filter,
        len: u32,
        _: &mut dyn FnMut(usize),
    ) -> Result<Vec<Cursor>, StoreError> {
        self.block_on(async |link| link.search(wanted, len).await)
    }

    /// The plants with these ids, in this order, without those that are not there.
    pub fn found(&mut self, ids: &[i64]) -> Result<Vec<Found>, StoreError> {
        self.block_on(async |link| link.found(ids).await)
    }

    /// What there is to say of all plants.
    pub fn statistics(
        &mut self,
        days: Days,
        _: &mut dyn FnMut(usize),
    ) -> Result<Statistics, StoreError> {
        self.block_on(async |link| link.statistics(days).await)
    }

    /// Keeps plants of another store as they are; leaves what is there.
    pub fn insert_plants(&mut self, plants: &[PlantRecord]) -> Result<(), StoreError> {
        self.block_on(async |link| link.insert_plants(plants).await)
    }

    /// Inserts tokens of another store, and merges the state of those that are there already.
    pub fn merge_tokens(&mut self, tokens: &[TokenRecord]) -> Result<(), StoreError> {
        self.block_on(async |link| link.merge_tokens(tokens).await)
    }

    /// Reads everything, and tells in words what none of us has stored.
    pub fn check(&mut self, tell: &mut dyn FnMut(Finding)) -> Result<Checked, StoreError> {
        self.block_on(async |link| {
            let sql = "SELECT plants.id, plants.added_by, tokens.id IS NULL
                       FROM plantstore.plants LEFT JOIN plantstore.tokens ON tokens.id = plants.added_by
                       WHERE tokens.id IS NULL OR plants.name ~ $1 OR plants.tag ~ $1
                       ORDER BY plants.id LIMIT 1000";
            let escape = "\u{1a}([^01]|$)";
            let rows =
                link.until_known(async |session| session.client.query(sql, &[&escape]).await);
            for row in rows.await? {
                let (id, token): (i64, i64) = (row.get(0), row.get(1));
                tell(Finding::Wrong(if row.get(2) {
                    format!("plant {id}: added by token {token}, which is not there")
                } else {
                    format!("plant {id}: not what was stored")
                }));
            }
            let sql = "SELECT (SELECT count(*) FROM plantstore.plants), (SELECT count(*) FROM plantstore.tokens)";
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
