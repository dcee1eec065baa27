//! Commits that do not complete: at a primary whose standby was promoted without it, which still accepts writes, and at one whose standby
//! is lost. Meanwhile no node may have more connections than documented, and all of them must move together.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::checker::History;
use crate::harness::postgres::with_client;
use crate::harness::{Server, directory, run_ok};
use crate::load::Running;
use crate::postgres::failover::pair;
use crate::postgres::{
    Node, end_of_longest_gap, load_both, maximum, median, settle, stop_all, wait_until_acknowledged,
};
use crate::random::Random;
use crate::report::{Progress, Report};

const NODES: usize = 2;

/// Of two nodes. Each has four for adds and one for tokens, and less than twice as many while it replaces them.
const CONNECTIONS_MAX: i64 = 20;

const REVOCATION_MAX: Duration = Duration::from_secs(1);

/// The standby is promoted while its primary runs. A token is revoked and another created at the new primary.
pub fn stale_primaries(seed: u64, runs: usize, progress: &Progress) -> Report {
    let mut report = Report::new(
        "stale PostgreSQL primary",
        "two nodes under load, the standby promoted while the primary goes on",
    );
    let mut random = Random::new(seed);
    let (mut pair, token) = pair();
    let nodes = [(); NODES].map(|()| Node::start(&pair.store(), &token, &[]));
    let mut all = History::default();
    let mut seconds = Vec::new();
    let mut most = 0;
    for number in 0..runs {
        let revoked = create_token(&pair.primary.url(), &format!("revoked-{number}"));
        let loads = load_both(&nodes, number, &mut random);
        let counts = [&pair.primary, &pair.standby].map(|server| Count::start(server.url()));
        thread::sleep(Duration::from_micros(50_000 + random.below(200_000)));
        pair.standby.promote();
        let promoted = Instant::now();
        pair.standby.wait_for_standby(false);
        let database = pair.standby.url();
        revoke_token(&database, &format!("revoked-{number}"));
        let revoked_at = Instant::now();
        let created = create_token(&database, &format!("created-{number}"));
        // More than the responses that were on their way from the old primary.
        wait_until_acknowledged(&loads, 10, promoted);
        let mut wrong = Vec::new();
        for node in &nodes {
            wrong.extend(outdated_tokens(
                &node.server,
                &revoked,
                revoked_at,
                &created,
            ));
        }
        let times = loads.iter().flat_map(Running::stored).collect();
        seconds.push(end_of_longest_gap(times, promoted).as_secs_f64());
        let run = stop_all(loads);
        for count in counts {
            most = most.max(count.stop(&mut wrong));
        }
        let acknowledged = run.acknowledged().count();
        wrong.extend(settle(
            &database,
            &nodes[number % NODES].server,
            run,
            &mut all,
        ));
        report.add(1, acknowledged, wrong);
        progress.step();
        pair.exchange();
        if number + 1 < runs {
            pair = pair.rejoin();
        }
    }
    let slowest = maximum(&seconds);
    report.note = format!(
        "{:.1} s from the promotion to the next 200 (median; at most {slowest:.1} s), at most {most} connections at a server",
        median(seconds),
    );
    report
}

/// The standby stops for longer than several commits may take, and starts again.
pub fn standby_outages(seed: u64, runs: usize, progress: &Progress) -> Report {
    let mut report = Report::new(
        "PostgreSQL standby absent",
        "two nodes under load, the standby stopped for 5 times --store-timeout",
    );
    let mut random = Random::new(seed);
    let (mut pair, token) = pair();
    let more = ["--store-timeout", "2s"];
    let nodes = [(); NODES].map(|()| Node::start(&pair.store(), &token, &more));
    let mut all = History::default();
    let mut most = 0;
    for number in 0..runs {
        let loads = load_both(&nodes, number, &mut random);
        let count = Count::start(pair.primary.url());
        thread::sleep(Duration::from_micros(50_000 + random.below(200_000)));
        pair.standby.stop();
        thread::sleep(Duration::from_secs(10));
        pair.standby.start();
        let started = Instant::now();
        wait_until_acknowledged(&loads, 1, started);
        let mut wrong = Vec::new();
        let run = stop_all(loads);
        most = most.max(count.stop(&mut wrong));
        let acknowledged = run.acknowledged().count();
        let database = pair.primary.url();
        wrong.extend(settle(
            &database,
            &nodes[number % NODES].server,
            run,
            &mut all,
        ));
        report.add(1, acknowledged, wrong);
        progress.step();
    }
    report.note = format!("at most {most} connections at a server");
    report
}

fn create_token(store: &str, name: &str) -> String {
    let place = directory();
    run_ok(place.path(), &["token", "create", name, "--store", store])
}

fn revoke_token(store: &str, name: &str) {
    let place = directory();
    run_ok(place.path(), &["token", "revoke", name, "--store", store]);
}

/// After adds have moved to the new primary, so have tokens.
fn outdated_tokens(
    server: &Server,
    revoked: &str,
    revoked_at: Instant,
    created: &str,
) -> Vec<String> {
    let status = |token: &str| server.connect().add(token.trim(), b"{}").status;
    let mut wrong = Vec::new();
    // On a slow machine the nodes may have moved before the token was revoked, which is then effective within a second.
    while status(revoked) != 401 && revoked_at.elapsed() < REVOCATION_MAX {}
    if status(revoked) != 401 {
        wrong.push("wrong: a token that is revoked is valid after the failover".to_owned());
    }
    if status(created) == 401 {
        wrong.push("wrong: a token that exists is unknown after the failover".to_owned());
    }
    wrong
}

/// Counts the connections of the nodes at a server.
struct Count {
    server: String,
    has_ended: Arc<AtomicBool>,
    thread: JoinHandle<i64>,
}

impl Count {
    fn start(server: String) -> Self {
        let has_ended = Arc::new(AtomicBool::new(false));
        let (url, is_over) = (server.clone(), Arc::clone(&has_ended));
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'plantstore'";
        let thread = thread::spawn(move || {
            with_client(&url, async |client| {
                let mut most = 0;
                while !is_over.load(Ordering::Relaxed) {
                    let row = client.query_one(sql, &[]).await.expect("a count");
                    most = most.max(row.get::<_, i64>(0));
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                most
            })
        });
        Self {
            server,
            has_ended,
            thread,
        }
    }

    /// The most connections at a time.
    fn stop(self, wrong: &mut Vec<String>) -> i64 {
        self.has_ended.store(true, Ordering::Relaxed);
        let most = self.thread.join().expect("no panic");
        if most > CONNECTIONS_MAX {
            let server = self.server;
            wrong.push(format!(
                "wrong: {most} connections of the nodes at {server}"
            ));
        }
        most
    }
}
