//! The loss of a whole server: of the primary, after which its synchronous standby is promoted, and of the standby,
//! without which no add may be acknowledged.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::checker::{History, Outcome, Sent};
use crate::harness::wait_until;
use crate::load::{Running, body, outcome_of};
use crate::postgres::pair::Pair;
use crate::postgres::{
    Node, end_of_longest_gap, load_both, median, prepare, settle, stop_all, violations,
    wait_until_acknowledged,
};
use crate::random::Random;
use crate::report::{Progress, Report};

/// The primary is killed under load, and the nodes reconnect to the promoted standby.
pub fn failovers(seed: u64, runs: usize, progress: &Progress) -> Report {
    let mut report = Report::new(
        "PostgreSQL primary killed",
        "two nodes under load, a synchronous standby promoted",
    );
    let mut random = Random::new(seed);
    let (mut pair, token) = pair();
    let nodes = [(); 2].map(|()| Node::start(&pair.store(), &token, &[]));
    let mut all = History::default();
    let mut seconds = Vec::new();
    for number in 0..runs {
        let loads = load_both(&nodes, number, &mut random);
        thread::sleep(Duration::from_micros(50_000 + random.below(200_000)));
        let killed = Instant::now();
        pair.fail_over();
        let promoted = Instant::now();
        wait_until_acknowledged(&loads, 1, promoted);
        let times = loads.iter().flat_map(Running::stored).collect();
        seconds.push(end_of_longest_gap(times, killed).as_secs_f64());
        let run = stop_all(loads);
        let acknowledged = run.acknowledged().count();
        let database = pair.primary.url();
        let wrong = settle(&database, &nodes[number % 2].server, run, &mut all);
        report.add(1, acknowledged, wrong);
        progress.step();
        if number + 1 < runs {
            pair = pair.rejoin();
        }
    }
    report.note = format!(
        "{:.2} s from the kill to the next 200 (median)",
        median(seconds)
    );
    report
}

/// Without its standby the primary commits locally, but not durably. No add may be acknowledged, not even one whose row
/// is visible after a restart, nor one whose wait for the standby is cancelled.
pub fn standby_losses(seed: u64, runs: usize, progress: &Progress) -> Report {
    let mut report = Report::new(
        "PostgreSQL standby lost",
        "primary restarted, commits cancelled, then the standby promoted",
    );
    let (mut pair, token) = pair();
    let node = Node::start(&pair.store(), &token, &["--store-timeout", "2s"]);
    let mut all = History::default();
    let mut ghosts = 0;
    for number in 0..runs {
        let plant = |kind: &str| -> Sent {
            let id = i64::try_from(number).expect("small") * 10
                + i64::try_from(kind.len()).expect("small");
            (id, format!("{kind} of {seed}"), None)
        };
        let (ghost, cancelled) = (plant("ghost"), plant("cancelled"));
        let mut run = History::default();
        let mut wrong = Vec::new();
        let mut must_not_be_stored =
            |when: &str, sent: &Sent, outcome: Outcome, run: &mut History| {
                // The checker verifies later that Busy plants are not stored.
                if !matches!(outcome, Outcome::Unknown | Outcome::Busy) {
                    wrong.push(format!(
                        "wrong: {outcome:?} without a standby, {when}: {sent:?}"
                    ));
                }
                run.note(sent.clone(), outcome);
            };

        pair.standby.stop();
        must_not_be_stored("at first", &ghost, send(&node, &ghost), &mut run);
        pair.primary.kill();
        pair.primary.start();
        let sql = format!("SELECT id FROM plantstore.plants WHERE id = {}", ghost.0);
        ghosts += usize::from(pair.primary.ask(&sql).is_some());
        must_not_be_stored("after a restart", &ghost, send(&node, &ghost), &mut run);
        let outcome = send_and_cancel(&node, &cancelled, &pair);
        must_not_be_stored("after a cancel", &cancelled, outcome, &mut run);

        pair.standby.start();
        for plant in [&ghost, &cancelled] {
            wait_until("it is acknowledged with a standby", || {
                let outcome = send(&node, plant);
                run.note(plant.clone(), outcome);
                outcome == Outcome::Acknowledged
            });
        }
        pair.fail_over();
        let acknowledged = run.acknowledged().count();
        all.append(run);
        wrong.extend(violations(&pair.primary.url(), &all));
        report.add(1, acknowledged, wrong);
        progress.step();
        if number + 1 < runs {
            pair = pair.rejoin();
        }
    }
    report.note = format!("{ghosts} rows seen that were not durable");
    report
}

pub fn pair() -> (Pair, String) {
    let mut token = String::new();
    let pair = Pair::start_new(|primary| token = prepare(&primary.url()));
    (pair, token)
}

fn send(node: &Node, sent: &Sent) -> Outcome {
    outcome_of(Some(&node.server.add(body(sent))))
}

/// Cancelling a commit that waits for its standby makes it succeed with a warning.
fn send_and_cancel(node: &Node, sent: &Sent, pair: &Pair) -> Outcome {
    let sql = "SELECT count(pg_cancel_backend(pid)) FROM pg_stat_activity
               WHERE wait_event = 'SyncRep' AND application_name = 'plantstore'";
    let is_answered = AtomicBool::new(false);
    thread::scope(|scope| {
        let cancelled = scope.spawn(|| {
            let mut cancelled = 0;
            while !is_answered.load(Ordering::Relaxed) {
                let count = pair.primary.ask(sql).expect("a count");
                cancelled += count.parse::<u32>().expect("a number");
            }
            cancelled
        });
        let outcome = send(node, sent);
        is_answered.store(true, Ordering::Relaxed);
        let cancelled = cancelled.join().expect("no panic");
        assert!(cancelled > 0, "no commit was cancelled");
        outcome
    })
}
