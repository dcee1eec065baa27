//! Connections to the database that are cut, stall, or are terminated by the server.

use std::thread;
use std::time::Duration;

use crate::checker::{History, Outcome};
use crate::harness::wait_until;
use crate::postgres::cluster::Postgres;
use crate::postgres::database::Database;
use crate::postgres::proxy::Proxy;
use crate::postgres::{Node, load, prepare, settle, stop_all};
use crate::random::Random;
use crate::report::{Progress, Report};

/// The database is checked after this many cuts.
const CUTS_A_RUN: usize = 20;

/// Connections are cut within a batch: in the request, after it, before the response, or in the response.
pub fn cut(seed: u64, cuts: usize, progress: &Progress) -> Report {
    let mut report = Report::new(
        "connection to PostgreSQL cut",
        "a proxy, real binary under load",
    );
    let mut random = Random::new(seed);
    let database = Database::new();
    let token = prepare(&database.url());
    let proxy = Proxy::start(database.address(), random.next());
    let store = database.url_at(proxy.address());
    let node = Node::start(&store, &token, &[]);
    let mut all = History::default();
    let count = || proxy.cuts().iter().sum::<usize>();
    for number in 0..cuts.div_ceil(CUTS_A_RUN) {
        let before = count();
        let target = CUTS_A_RUN.min(cuts - before.min(cuts));
        let running = node.load(load(number, 0, random.next()));
        proxy.cut(true);
        wait_until("connections are cut", || count() >= before + target);
        proxy.cut(false);
        let run = running.stop();
        let acknowledged = run.acknowledged().count();
        let wrong = settle(&database.url(), &node.server, run, &mut all);
        let made = count() - before;
        report.add(made, acknowledged, wrong);
        (0..made).for_each(|_| progress.step());
    }
    let [in_request, after_request, before_response, in_response] = proxy.cuts();
    report.note = format!(
        "{in_request} in the request, {after_request} after it, {before_response} before the response, {in_response} in it"
    );
    report
}

/// The proxy delays responses for longer than `--store-timeout`.
pub fn stalled(seed: u64, runs: usize, progress: &Progress) -> Report {
    let mut report = Report::new(
        "PostgreSQL does not respond",
        "a proxy that delays responses, real binary under load",
    );
    let mut random = Random::new(seed);
    let database = Database::new();
    let token = prepare(&database.url());
    let proxy = Proxy::start(database.address(), random.next());
    let store = database.url_at(proxy.address());
    let node = Node::start(&store, &token, &["--store-timeout", "500ms"]);
    let mut all = History::default();
    let mut lost = 0;
    for number in 0..runs {
        let running = node.load(load(number, 0, random.next()));
        wait_until("there is a load", || !running.stored().is_empty());
        thread::sleep(Duration::from_micros(random.below(50_000)));
        proxy.hold_responses(true);
        thread::sleep(Duration::from_millis(800));
        proxy.hold_responses(false);
        let held = running.stored().len();
        wait_until("adds are acknowledged again", || {
            running.stored().len() > held
        });
        let run = running.stop();
        let acknowledged = run.acknowledged().count();
        lost += run.count(Outcome::Unknown);
        let wrong = settle(&database.url(), &node.server, run, &mut all);
        report.add(1, acknowledged, wrong);
        progress.step();
    }
    // Not in every run: if the lookup of a token stalls, it is known that nothing was stored.
    if lost == 0 {
        let wrong = "wrong: no response was 50301".to_owned();
        report.add(0, 0, vec![wrong]);
    }
    report.note = format!("{lost} unknown outcomes, all resolved by a retry");
    report
}

/// The server terminates all connections of the nodes about every 30 ms.
pub fn terminated(seed: u64, runs: usize, progress: &Progress) -> Report {
    let mut report = Report::new(
        "PostgreSQL backends terminated",
        "pg_terminate_backend about every 30 ms, two nodes under load",
    );
    let mut random = Random::new(seed);
    let postgres = Postgres::start_new();
    let token = prepare(&postgres.url());
    let nodes = [(); 2].map(|()| Node::start(&postgres.url(), &token, &[]));
    let mut all = History::default();
    let mut ended = 0;
    for number in 0..runs {
        let (one, two) = (random.next(), random.next());
        let loads = [
            nodes[0].load(load(number, 0, one)),
            nodes[1].load(load(number, 100, two)),
        ];
        for _ in 0..12 {
            thread::sleep(Duration::from_micros(20_000 + random.below(10_000)));
            let sql = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
                       WHERE application_name = 'plantstore'";
            let count = postgres.ask(sql).expect("a count");
            ended += count.parse::<usize>().expect("a number");
        }
        let run = stop_all(loads);
        let acknowledged = run.acknowledged().count();
        let wrong = settle(&postgres.url(), &nodes[number % 2].server, run, &mut all);
        report.add(1, acknowledged, wrong);
        progress.step();
    }
    report.note = format!("{ended} connections ended");
    report
}
