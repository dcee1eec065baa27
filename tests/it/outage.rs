//! Outages of the store: detected by the server itself, logged once at the start and once at the end, and reported
//! consistently in responses, log and metrics.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use serde_json::Value;

use crate::harness::tcp_proxy::TcpProxy;
use crate::harness::{Client, Server, directory, run_ok, wait_until};
use crate::postgres::{address, url};

fn plant(id: usize) -> String {
    format!(r#"{{"id":{id},"name":"plant {id}"}}"#)
}

fn outcome(server: &Server, outcome: &str) -> u64 {
    server.metric(&format!("plantstore_adds_total{{outcome=\"{outcome}\"}}"))
}

/// The sum over all outcomes.
fn adds(server: &Server) -> u64 {
    server.metric("plantstore_adds_total")
}

/// The lines of the log with this message.
fn lines(server: &Server, message: &str) -> Vec<Value> {
    let logged = server.everything_logged();
    let lines = logged
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok());
    lines
        .filter(|line: &Value| line["message"] == message)
        .collect()
}

const LOST: &str = "the store does not accept writes";
const BACK: &str = "the store accepts writes again";

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn an_outage_of_the_database_is_detected_and_reported_consistently_in_responses_log_and_metrics() {
    let directory = directory();
    let url = url(directory.path());
    let token = run_ok(directory.path(), &["token", "create", "a"]);
    let token = token.trim();
    let database = address(&url);
    let mut proxy = TcpProxy::to(database);
    let through = url.replace(&database.to_string(), &proxy.address.to_string());
    let arguments = ["--store", &through, "--store-timeout", "2s"];
    let server = Server::start_in(directory.path(), &arguments);
    let add = |id| server.connect().add(token, plant(id).as_bytes());
    assert_eq!(add(0).status, 200);
    wait_until("it is ready", || server.metric("plantstore_ready") == 1);

    for outage in 1..=2 {
        proxy.close();
        wait_until("it is not ready", || server.metric("plantstore_ready") == 0);
        assert_eq!(outcome(&server, "unavailable"), 4 * (outage - 1));
        for id in 1..=4 {
            let response = add(id);
            assert_eq!(response.error(), 50303);
            assert!(
                response.message().contains("cannot be reached or used"),
                "{response:?}"
            );
            let id = response.header("x-request-id").expect("an id").to_owned();
            let line = server.wait_for_line(|line| line["request_id"] == id.as_str());
            assert_eq!(line["error_code"], 50303);
            let cause = line["cause"].as_str().expect("a cause");
            assert!(
                !cause.contains("busy") && !cause.contains("may or may not"),
                "{cause}"
            );
        }
        assert_eq!(outcome(&server, "unavailable"), 4 * outage);
        let response = server.ask("/readyz");
        assert_eq!(response.status, 503);
        let reason = response
            .body
            .strip_prefix("not ready: the store cannot be reached: ");
        assert!(reason.is_some_and(|cause| cause.len() > 1), "{response:?}");
        wait_until("it is logged", || {
            lines(&server, LOST).len() as u64 >= outage
        });
        let lost = lines(&server, LOST);
        assert_eq!(lost.len() as u64, outage, "{lost:?}");
        let lost = lost.last().expect("a line");
        assert_eq!(lost["level"], "WARN");
        assert_eq!(lost["reason"], "the store cannot be reached");
        assert!(
            lost["cause"]
                .as_str()
                .is_some_and(|cause| !cause.is_empty())
        );
        assert_eq!(lines(&server, BACK).len() as u64, outage - 1);

        proxy.open();
        wait_until("it is ready", || server.metric("plantstore_ready") == 1);
        server.wait_until_ready();
        wait_until("it is logged", || {
            lines(&server, BACK).len() as u64 >= outage
        });
        let back = lines(&server, BACK);
        assert_eq!(back.len() as u64, outage, "{back:?}");
        assert!(back.iter().all(|line| line["outage_us"].as_u64() > Some(0)));
        let response = add(0);
        assert_eq!(
            response.status,
            200,
            "{response:?} {:?}",
            lines(&server, "request").last()
        );
    }
    assert_eq!(adds(&server), 1 + 2 * 5);
    assert_eq!(lines(&server, LOST).len(), 2);
}

#[test]
fn a_store_that_rejects_writes_is_detected_without_a_request_and_logged_once() {
    let directory = directory();
    // strace counts calls per thread: opening the store takes 3 and a probe 2 or 3 of the writer's. After some of them the disk
    // is full for four attempts.
    let wal = directory.path().join("plantstore.db-wal");
    let wal = wal.to_str().expect("UTF-8");
    let fault = ["-P", wal, "-e", "inject=pwrite64:error=ENOSPC:when=5..8"];
    let store = ["--store", "sqlite:plantstore.db"];
    assert!(
        Server::start_in(directory.path(), &store)
            .terminate()
            .success()
    );
    let server = Server::start_under_strace(directory.path(), &fault, &store);
    wait_until("it is ready", || server.metric("plantstore_ready") == 1);
    wait_until("it is not ready", || server.metric("plantstore_ready") == 0);
    wait_until("it is ready again", || {
        server.metric("plantstore_ready") == 1
    });
    server.wait_for_line(|line| line["message"] == BACK);
    let (lost, back) = (lines(&server, LOST), lines(&server, BACK));
    assert_eq!((lost.len(), back.len()), (1, 1), "{lost:?} {back:?}");
    assert_eq!(server.trace().matches("ENOSPC").count(), 4);
    assert_eq!(
        lost[0]["reason"],
        "the disk is full, or the WAL has reached its limit"
    );
    assert!(lost[0]["cause"].is_string());
}

#[test]
fn an_idle_node_exits_after_a_failed_sync() {
    let directory = directory();
    let store = ["--store", "sqlite:plantstore.db"];
    assert!(
        Server::start_in(directory.path(), &store)
            .terminate()
            .success()
    );
    let fault = "fdatasync:error=EIO:when=6+";
    let mut server = Server::start_with_fault(directory.path(), fault, &store);
    assert_eq!(server.wait_for_exit().code(), Some(1));
    let logged = server.everything_logged();
    assert!(
        logged.contains("its store cannot be used any more"),
        "{logged}"
    );
}

#[test]
fn a_locked_store_is_reported_as_busy() {
    let directory = directory();
    let store = ["--store", "sqlite:plantstore.db"];
    let server = Server::start_in(directory.path(), &store);
    let token = std::fs::read_to_string(directory.path().join("plantstore.token"));
    let token = token.expect("the first token");
    let other = crate::harness::open(directory.path());
    other
        .execute_batch("BEGIN IMMEDIATE")
        .expect("the write lock");
    let response = server.connect().add(token.trim(), plant(1).as_bytes());
    assert_eq!(response.error(), 50300);
    assert!(response.message().contains("too busy"), "{response:?}");
    let lost = server.wait_for_line(|line| line["message"] == LOST);
    assert_eq!(lost["reason"], "the store is busy");
    assert_eq!(outcome(&server, "busy"), 1);
    other.execute_batch("ROLLBACK").expect("the end");
    server.wait_for_line(|line| line["message"] == BACK);
    let response = server.connect().add(token.trim(), plant(1).as_bytes());
    assert_eq!(response.status, 200);
}

#[test]
fn every_add_is_counted_once_with_the_outcome_of_its_response() {
    let directory = directory();
    // Every sync from the 20th on, of adds and of probes.
    let fault = "fdatasync:delay_enter=3000000:when=20+";
    let arguments = [
        "--store",
        "sqlite:plantstore.db",
        "--store-timeout",
        "500ms",
        "--max-queue",
        "4",
    ];
    let server = Server::start_with_fault(directory.path(), fault, &arguments);
    let token = std::fs::read_to_string(directory.path().join("plantstore.token"));
    let token = token.expect("the first token").trim().to_owned();
    // Before and while syncs are stuck: some adds are in the batch, some in the queue, and some find the queue full. The first stuck
    // sync may be that of a probe, so clients go on until an add is stuck.
    let is_stuck = Arc::new(AtomicBool::new(false));
    let clients: Vec<_> = (0..12)
        .map(|client: usize| {
            let (address, token) = (server.address(), token.clone());
            let is_stuck = Arc::clone(&is_stuck);
            thread::spawn(move || {
                let mut responses = Vec::new();
                for id in 0..1000 {
                    if id >= 40 && is_stuck.load(Ordering::Relaxed) {
                        break;
                    }
                    // Every second plant is a conflict between all clients.
                    let body = match id % 2 {
                        0 => plant(1000 * client + id),
                        _ => format!(r#"{{"id":{id},"name":"of {client}"}}"#),
                    };
                    let response = Client::connect(address).add(&token, body.as_bytes());
                    responses.push(if response.status == 200 {
                        0
                    } else {
                        response.error()
                    });
                    is_stuck.fetch_or(responses.last() == Some(&50301), Ordering::Relaxed);
                    thread::sleep(Duration::from_millis(20));
                }
                responses
            })
        })
        .collect();
    let responses: Vec<u64> = clients
        .into_iter()
        .flat_map(|client| client.join().expect("no panic"))
        .collect();
    let told = |error| {
        responses
            .iter()
            .filter(|response| **response == error)
            .count() as u64
    };
    assert!(told(50301) > 0, "{responses:?}");
    assert!(told(0) > 0 && told(40009) > 0, "{responses:?}");
    let counted = |names: &[&str]| names.iter().map(|name| outcome(&server, name)).sum::<u64>();
    assert_eq!(counted(&["added", "replayed"]), told(0));
    assert_eq!(counted(&["conflict"]), told(40009));
    assert_eq!(counted(&["unknown"]), told(50301));
    let stuck = lines(&server, "a commit takes longer than the store timeout");
    let plants = |line: &Value| line["plants"].as_u64().expect("a number");
    assert_eq!(stuck.iter().map(plants).sum::<u64>(), told(50301));
    assert_eq!(counted(&["busy", "queue_full"]), told(50300));
    assert_eq!(counted(&["unavailable"]), told(50303));
    assert_eq!(adds(&server), responses.len() as u64);
}
