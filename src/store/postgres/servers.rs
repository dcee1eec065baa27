//! Which server of a database is used. After a failover the old primary may still run, and accept writes that no standby confirms. So
//! the writable server with the highest timeline is chosen, all connections of the process move to it together, and a server whose
//! commits wait for a lost standby gets no further ones.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use jiff::Timestamp;
use parking_lot::Mutex;
use tokio::time::{sleep, timeout};
use tokio_postgres::{Client, Error, Row};

use crate::logging::write_stderr;
use crate::store::error::{Cause, OpenError};
use crate::store::postgres::session::{
    ConnectionTask, Session, classify_connect_error, connect, unreachable,
};
use crate::store::postgres::tls::Tls;
use crate::store::postgres::url::Url;

/// A server may accept a connection and never respond. The time limit of a login, unless the URL has a shorter one, and of what
/// follows it.
const LOGIN_TIMEOUT: Duration = Duration::from_secs(10);

/// How long the other servers of a URL are waited for after one of them can be used. Until then, and if it is the first that this process
/// uses, it is `connect_timeout`.
const NEWER_TIMEOUT: Duration = Duration::from_millis(500);

/// A statement that takes longer makes its connection look for a newer server, and again after as long.
pub(super) const SEARCH_INTERVAL: Duration = Duration::from_secs(2);

/// How long the result of a search is used, by all connections.
const SEARCH_TTL: Duration = Duration::from_secs(1);

/// The timeline of a server. A role may not be allowed to read it, and other engines do not have it.
const TIMELINE: &str = "
    SELECT (SELECT system_identifier FROM pg_catalog.pg_control_system()), pg_walfile_name(pg_current_wal_lsn())";

/// The process of a connection, and whether commits wait for a standby longer than they should. A role sees only its own sessions.
const PROCESS: &str = "
    SELECT pg_backend_pid(),
      (SELECT backend_start FROM pg_catalog.pg_stat_activity WHERE pid = pg_backend_pid()),
      EXISTS (
        SELECT 1 FROM pg_catalog.pg_stat_activity
        WHERE usename = current_user AND wait_event = 'SyncRep' AND query_start < clock_timestamp() - INTERVAL '2 s'
      )";

/// What a connection is for. A server whose commits wait for a lost standby can still be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Uses {
    /// Adds plants as a server, again and again.
    Commits,
    Other,
}

/// The history that a server continues: each promotion begins a new timeline of the same system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Timeline {
    system: i64,
    number: u32,
}

impl Timeline {
    fn is_older_than(self, other: Self) -> bool {
        self.system == other.system && self.number < other.number
    }
}

/// The process of a server that serves a connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct Backend {
    pub(super) pid: i32,
    pub(super) started_at: Timestamp,
}

/// What has become of the process of an earlier connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EarlierProcess {
    Ended,
    /// Its commit waits for a standby.
    WaitsForStandby,
    StillRuns,
}

/// A new connection to one of the servers, which accepts writes.
pub(super) struct Candidate {
    pub(super) client: Client,
    pub(super) connection: ConnectionTask,
    pub(super) timeline: Option<Timeline>,
    pub(super) backend: Option<Backend>,
    are_commits_stuck: bool,
    host: usize,
    /// The order of hosts that are equally good.
    rank: usize,
}

/// The servers of a URL, shared by all connections of the process.
pub(super) struct Servers {
    url: Url,
    tls: Tls,
    /// The timeline of the newest server that this process has used.
    newest: Mutex<Option<Timeline>>,
    /// How often all connections have moved.
    pub(super) moves: Arc<AtomicU64>,
    /// Held while a connection is made: all together have one more than those that they use.
    last_search: tokio::sync::Mutex<LastSearch>,
    /// What a command has written about its waiting; none for a server, which logs outages.
    reported: Option<Mutex<String>>,
}

#[derive(Default)]
struct LastSearch {
    /// The server that was chosen.
    host: Option<usize>,
    ended_at: Option<Instant>,
    /// Why a server that can be reached was not chosen.
    rejected: Option<String>,
}

impl Servers {
    pub(super) fn new(url: Url, tls: Tls, is_server: bool) -> Self {
        Self {
            url,
            tls,
            newest: Mutex::default(),
            moves: Arc::default(),
            last_search: tokio::sync::Mutex::default(),
            reported: (!is_server).then(Mutex::default),
        }
    }

    /// Writes to standard error why a command waits.
    pub(super) fn report(&self, reason: &str) {
        let Some(reported) = &self.reported else {
            return;
        };
        let mut reported = reported.lock();
        if *reported != reason {
            reason.clone_into(&mut reported);
            write_stderr(format!("waiting for the database: {reason}\n"));
        }
    }

    /// True if other connections of this process have moved to another server.
    pub(super) fn is_outdated(&self, timeline: Option<Timeline>) -> bool {
        let newest = *self.newest.lock();
        timeline.is_some() && newest.is_some() && newest != timeline
    }

    /// Connects to the newest server that accepts writes, in place of an earlier connection. The process of that one is ended, so that it
    /// does not count twice; while its commit waits for a standby, it cannot be replaced. The caller waits for at most `time_limit`.
    pub(super) async fn connect(
        &self,
        uses: Uses,
        earlier: Option<Backend>,
        time_limit: Duration,
    ) -> Result<Session, OpenError> {
        let mut last = self.last_search.lock().await;
        if let Some(reason) = last.recent_rejection().filter(|_| uses == Uses::Commits) {
            return Err(self.unreachable(reason));
        }
        // Usually it is the same as for the connection before. Later that one may have become a stale primary, so all are asked again.
        let is_known = last.is_recent() && self.url.hosts_len() > 1 && !self.url.is_balanced();
        let known = match last.host.filter(|_| is_known) {
            Some(host) => {
                let known = timeout(NEWER_TIMEOUT, self.candidate(host, 0)).await;
                known.ok().and_then(Result::ok)
            }
            None => None,
        };
        let known = known.filter(|known| self.reason_against(known, uses).is_none());
        let candidate = match known {
            Some(candidate) => candidate,
            None => self.search(&mut last, uses, time_limit).await?,
        };
        self.found(&candidate);
        let host = candidate.host;
        let prepare = async {
            let session = Session::new(self.url.shown_for(host), candidate).await?;
            let ended = match earlier {
                Some(earlier) => session.end_process(earlier).await?,
                None => EarlierProcess::Ended,
            };
            Ok::<_, OpenError>((session, ended))
        };
        let (session, ended) = match timeout(LOGIN_TIMEOUT, prepare).await {
            Ok(prepared) => prepared?,
            Err(elapsed) => return Err(unreachable(&self.url.shown_for(host), elapsed)),
        };
        let reason = match ended {
            EarlierProcess::Ended => return Ok(session),
            EarlierProcess::WaitsForStandby => self.stuck_commits_at(host),
            EarlierProcess::StillRuns => {
                let host = self.url.host_name(host);
                format!("the process of an earlier connection to {host} does not end")
            }
        };
        last.host = None;
        last.ended_at = Some(Instant::now());
        let reason = last.rejected.insert(reason);
        Err(self.unreachable(reason.as_str()))
    }

    /// Why a statement may have taken too long: what the last search found while it waited.
    pub(super) fn reason_of_timeout(&self) -> String {
        // Held while another connection searches.
        let last = self.last_search.try_lock().ok();
        let rejected = last.and_then(|last| last.rejected.clone());
        rejected.unwrap_or_else(|| "no response within the time limit".to_owned())
    }

    /// Returns when a newer server than this one accepts writes.
    pub(super) async fn newer_than(&self, timeline: Option<Timeline>) {
        loop {
            sleep(SEARCH_INTERVAL).await;
            let mut last = self.last_search.lock().await;
            if !self.is_outdated(timeline) && !last.is_recent() {
                // What was found is closed: each connection makes its own.
                let search = self.search(&mut last, Uses::Commits, LOGIN_TIMEOUT);
                match search.await {
                    Ok(found) => self.found(&found),
                    Err(_) => {
                        if let Some(reason) = &last.rejected {
                            self.report(reason);
                        }
                    }
                }
            }
            if self.is_outdated(timeline) {
                return;
            }
        }
    }

    /// Connects to all servers at once, and chooses one.
    async fn search(
        &self,
        last: &mut LastSearch,
        uses: Uses,
        time_limit: Duration,
    ) -> Result<Candidate, OpenError> {
        // Leaves time for what follows.
        let others_timeout = self.url.others_timeout().min(time_limit / 2);
        let newer_timeout = NEWER_TIMEOUT.min(time_limit / 2);
        let hosts = self.url.host_order().into_iter().enumerate();
        let attempts = hosts.map(async |(rank, host)| (host, self.candidate(host, rank).await));
        let mut attempts: FuturesUnordered<_> = attempts.collect();
        let mut best: Option<Candidate> = None;
        let mut errors = BTreeMap::new();
        last.rejected = None;
        let mut patience = LOGIN_TIMEOUT;
        while let Ok(Some((host, result))) = timeout(patience, attempts.next()).await {
            match result {
                Err(error) => {
                    errors.insert(host, error);
                }
                Ok(candidate) => {
                    let is_better = |best: &Candidate| candidate.is_better_than(best);
                    if let Some(reason) = self.reason_against(&candidate, uses) {
                        last.rejected = Some(reason);
                    } else if best.as_ref().is_none_or(is_better) {
                        best = Some(candidate);
                    }
                }
            }
            patience = match &best {
                // The first server that this process uses may be a stale primary, which responds sooner than the new one.
                Some(best) if best.timeline.is_some() && self.newest.lock().is_none() => {
                    others_timeout
                }
                Some(_) => newer_timeout,
                None => others_timeout,
            };
        }
        last.ended_at = Some(Instant::now());
        let Some(best) = best else {
            return Err(match &last.rejected {
                Some(reason) => self.unreachable(reason.as_str()),
                None => self.error_to_report(errors),
            });
        };
        last.host = Some(best.host);
        last.rejected = None;
        Ok(best)
    }

    async fn candidate(&self, host: usize, rank: usize) -> Result<Candidate, OpenError> {
        let database = self.url.shown_for(host);
        let config = self.url.config_for(host)?;
        let connect = async {
            let (client, connection) = connect(&config, &self.tls).await?;
            let (timeline, process) = tokio::try_join!(timeline(&client), process(&client))?;
            let (backend, are_commits_stuck) = process.unzip();
            Ok(Candidate {
                client,
                connection,
                timeline,
                backend,
                are_commits_stuck: are_commits_stuck.unwrap_or_default(),
                host,
                rank,
            })
        };
        let time_limit = self.url.connect_timeout().unwrap_or(LOGIN_TIMEOUT);
        match timeout(time_limit.min(LOGIN_TIMEOUT), connect).await {
            Ok(candidate) => candidate.map_err(classify_connect_error(&database)),
            Err(elapsed) => Err(unreachable(&database, elapsed)),
        }
    }

    /// Why this server must not be used now, although it accepts writes.
    fn reason_against(&self, candidate: &Candidate, uses: Uses) -> Option<String> {
        let host = self.url.host_name(candidate.host);
        if let Some(newest) = *self.newest.lock() {
            let Some(timeline) = candidate.timeline else {
                return Some(format!(
                    "{host} does not report its timeline, so it may be a stale primary; the role must be allowed to call pg_control_system()"
                ));
            };
            // The only host may lead to another database: that of an operator who has replaced it.
            if timeline.system != newest.system && self.url.hosts_len() > 1 {
                return Some(format!(
                    "{host} is not a copy of the database that this process has used; if you have replaced the database, restart plantstore"
                ));
            }
            if timeline.is_older_than(newest) {
                return Some(format!(
                    "{host} is a stale primary: it is on timeline {}, and this process has used timeline {}; \
                     if you have restored the database, restart plantstore",
                    timeline.number, newest.number
                ));
            }
        }
        let is_stuck = candidate.are_commits_stuck && uses == Uses::Commits;
        is_stuck.then(|| self.stuck_commits_at(candidate.host))
    }

    fn stuck_commits_at(&self, host: usize) -> String {
        let host = self.url.host_name(host);
        format!("commits at {host} wait for a synchronous standby that does not confirm them")
    }

    /// All connections move to this server.
    fn found(&self, server: &Candidate) {
        let Some(timeline) = server.timeline else {
            return;
        };
        let before = self.newest.lock().replace(timeline);
        if let Some(before) = before.filter(|before| *before != timeline) {
            self.moves.fetch_add(1, Ordering::SeqCst);
            tracing::warn!(
                timeline = timeline.number,
                before = before.number,
                "the database has another primary; all connections move to it"
            );
        }
    }

    /// Of the errors of all hosts that have responded, the one that the operator can act on: a rejection, such as of a wrong password. It is
    /// final only if no other host might accept the connection later.
    fn error_to_report(&self, errors: BTreeMap<usize, OpenError>) -> OpenError {
        let is_temporary = |error: &OpenError| matches!(error, OpenError::Unreachable { .. });
        let are_all_here = errors.len() == self.url.hosts_len();
        let (temporary, rejections): (Vec<_>, Vec<_>) =
            errors.into_values().partition(is_temporary);
        let is_final = are_all_here && temporary.is_empty();
        match (rejections.into_iter().next(), temporary.into_iter().next()) {
            (Some(rejection), _) if is_final => rejection,
            (Some(rejection), _) => self.unreachable(rejection),
            (None, Some(OpenError::Unreachable { source, .. })) => self.unreachable(source),
            _ => self.unreachable("it does not respond"),
        }
    }

    fn unreachable(&self, reason: impl Into<Cause>) -> OpenError {
        unreachable(&self.url.to_string(), reason)
    }
}

impl fmt::Display for Servers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.url.fmt(f)
    }
}

impl LastSearch {
    fn is_recent(&self) -> bool {
        self.ended_at.is_some_and(|at| at.elapsed() < SEARCH_TTL)
    }

    fn recent_rejection(&self) -> Option<&str> {
        self.rejected.as_deref().filter(|_| self.is_recent())
    }
}

impl Candidate {
    /// Whether this server is newer than the other, or else comes first.
    fn is_better_than(&self, other: &Self) -> bool {
        match (self.timeline, other.timeline) {
            (Some(one), Some(two)) if one.is_older_than(two) => false,
            (Some(one), Some(two)) if two.is_older_than(one) => true,
            _ => self.rank < other.rank,
        }
    }
}

/// The timeline of the server; none for an engine that does not have it, or a role that may not read it.
pub(super) async fn timeline(client: &Client) -> Result<Option<Timeline>, Error> {
    let row = optional(client.query_typed_one(TIMELINE, &[]).await)?;
    Ok(row.and_then(|row| {
        let system = row.try_get(0).ok()?;
        // The name of a WAL file begins with the timeline.
        let wal_file: &str = row.try_get(1).ok()?;
        let number = u32::from_str_radix(wal_file.get(..8)?, 16).ok()?;
        Some(Timeline { system, number })
    }))
}

/// The process of this connection, and whether commits of this role are stuck; none for an engine that does not have them.
async fn process(client: &Client) -> Result<Option<(Backend, bool)>, Error> {
    let row = optional(client.query_typed_one(PROCESS, &[]).await)?;
    Ok(row.and_then(|row| {
        let pid = process_id(&row)?;
        let started_at = row.try_get(1).ok()?;
        let are_commits_stuck = row.try_get(2).ok()?;
        Some((Backend { pid, started_at }, are_commits_stuck))
    }))
}

/// The result of a statement that an engine may not support, or that a role may not run.
pub(super) fn optional<T>(result: Result<T, Error>) -> Result<Option<T>, Error> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) => match error.code().map(|code| &code.code()[..2]) {
            Some("0A" | "42" | "XX") => Ok(None),
            _ => Err(error),
        },
    }
}

/// The first column, which is `pg_backend_pid()`: INT4 in PostgreSQL, INT8 in CockroachDB.
pub(super) fn process_id(row: &Row) -> Option<i32> {
    let wide = || row.try_get::<_, i64>(0).ok()?.try_into().ok();
    row.try_get(0).ok().or_else(wide)
}
