//! Statements that PostgreSQL aborts: serialization failures and deadlocks. The service retries each of them, so every
//! response is 200 or 40009.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::checker::{History, Outcome};
use crate::harness::wait_until;
use crate::load::Load;
use crate::postgres::cluster::Postgres;
use crate::postgres::{Node, load, prepare, settle, stop_all};
use crate::random::Random;
use crate::report::{Progress, Report};

/// A delay between the snapshot of a transaction and its first row makes conflicts likely.
const SERIALIZABLE: &str = "
    CREATE FUNCTION take_time() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM pg_sleep(0.002);
        RETURN NULL;
    END $$;
    CREATE TRIGGER take_time BEFORE INSERT ON plantstore.plants FOR EACH STATEMENT EXECUTE FUNCTION take_time();
    ALTER DATABASE plants SET default_transaction_isolation = 'serializable'";

/// A third of the statements fail, and succeed when retried.
const FAIL_A_THIRD: &str = "
    CREATE FUNCTION fail_a_third() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF random() < 0.33 THEN
            RAISE EXCEPTION 'made to fail'
            USING ERRCODE = CASE WHEN random() < 0.5 THEN '40001' ELSE '40P01' END;
        END IF;
        RETURN NULL;
    END $$;
    CREATE TRIGGER fail_a_third BEFORE INSERT ON plantstore.plants FOR EACH STATEMENT EXECUTE FUNCTION fail_a_third()";

/// Serializable transactions of two nodes race for the same ids.
pub fn serializable(seed: u64, runs: usize, progress: &Progress) -> Report {
    let mut report = Report::new(
        "serialization failures",
        "default_transaction_isolation = serializable, two nodes race for ids",
    );
    races(
        &mut report,
        SERIALIZABLE,
        "could not serialize",
        seed,
        runs,
        progress,
    );
    report
}

/// A trigger raises 40001 and 40P01.
pub fn made_failures(seed: u64, runs: usize, progress: &Progress) -> Report {
    let mut report = Report::new(
        "40001 and 40P01 in a third of all statements",
        "a trigger, two nodes race for ids",
    );
    races(
        &mut report,
        FAIL_A_THIRD,
        "made to fail",
        seed,
        runs,
        progress,
    );
    report
}

fn races(
    report: &mut Report,
    sql: &str,
    logged: &str,
    seed: u64,
    runs: usize,
    progress: &Progress,
) {
    let mut random = Random::new(seed);
    let postgres = Postgres::start_new();
    let token = prepare(&postgres.url());
    postgres.sql(sql);
    let nodes = [(); 2].map(|()| Node::start(&postgres.url(), &token, &[]));
    let mut all = History::default();
    for number in 0..runs {
        let before = failures(&postgres, logged);
        let [one, two] = [0, 100].map(|first_client| Load {
            ids: Some(8),
            ..load(number, first_client, random.next())
        });
        let loads = [nodes[0].load(one), nodes[1].load(two)];
        thread::sleep(Duration::from_millis(300));
        wait_until("statements fail", || failures(&postgres, logged) > before);
        let run = stop_all(loads);
        finish(report, &postgres, &nodes[number % 2], run, &mut all);
        progress.step();
    }
    report.note = format!("{} statements failed", failures(&postgres, logged));
}

/// Another session locks the rows of a batch in the opposite order.
pub fn deadlocks(seed: u64, runs: usize, progress: &Progress) -> Report {
    let mut report = Report::new(
        "deadlocks",
        "another session updates the rows of a batch in the opposite order",
    );
    let mut random = Random::new(seed);
    let postgres = Postgres::start_new();
    let token = prepare(&postgres.url());
    // One connection per node, so that batches are large.
    let node = Node::start(&postgres.url(), &token, &["--store-connections", "1"]);
    let mut all = History::default();
    let logged = "deadlock detected";
    for number in 0..runs {
        let before = failures(&postgres, logged);
        let load = Load {
            clients: 8,
            ids: Some(4),
            ..load(number, 0, random.next())
        };
        let first = load.first_id;
        let running = node.load(load);
        wait_until("there are plants", || running.stored().len() > 20);
        let has_ended = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !has_ended.load(Ordering::Relaxed) {
                    in_descending_order(&postgres, first);
                }
            });
            wait_until("there are deadlocks", || {
                failures(&postgres, logged) >= before + 3
            });
            has_ended.store(true, Ordering::Relaxed);
        });
        finish(&mut report, &postgres, &node, running.stop(), &mut all);
        progress.step();
    }
    report.note = format!("{} deadlocks", failures(&postgres, logged));
    report
}

/// PostgreSQL checks for a deadlock after `deadlock_timeout` (20 ms) of waiting, and aborts the session that checks. This
/// session has a longer timeout, so that nearly always the batch is aborted.
fn in_descending_order(postgres: &Postgres, first: i64) {
    let update = |id| {
        format!("UPDATE plantstore.plants SET name = name WHERE id = {id}; SELECT pg_sleep(0.005);")
    };
    let updates: String = (first..first + 4).rev().map(update).collect();
    let sql = format!("BEGIN; SET LOCAL deadlock_timeout = '200ms'; {updates} COMMIT");
    let _ = postgres.try_run(&sql, "plants");
}

fn failures(postgres: &Postgres, logged: &str) -> usize {
    postgres.log().matches(logged).count()
}

fn finish(report: &mut Report, postgres: &Postgres, node: &Node, run: History, all: &mut History) {
    let acknowledged = run.acknowledged().count();
    let answered = acknowledged + run.count(Outcome::Conflict);
    let others = run.attempts().count() - answered;
    let mut wrong = settle(&postgres.url(), &node.server, run, all);
    if others > 0 {
        wrong.push(format!(
            "wrong: {others} responses were neither 200 nor 40009"
        ));
    }
    report.add(1, acknowledged, wrong);
}
