//! Disk faults, injected into the real binary with `strace`: the errors that need a fault, and recovery afterwards.

use std::thread;
use std::time::Duration;

use crate::harness::{Client, Response, Server, add_request, directory, wait_until};

fn plant(id: usize) -> String {
    format!(r#"{{"id":{id},"name":"plant {id}"}}"#)
}

/// Adds these plants at the same time, each from its own client.
fn add_at_once(server: &Server, ids: std::ops::Range<usize>) -> Vec<Option<Response>> {
    let token = server.token();
    let clients: Vec<_> = ids
        .map(|id| {
            let (address, token) = (server.address(), token.clone());
            thread::spawn(move || {
                let mut client = Client::connect(address);
                client.send_add(&token, plant(id).as_bytes());
                client.try_response()
            })
        })
        .collect();
    clients
        .into_iter()
        .map(|client| client.join().expect("no panic"))
        .collect()
}

#[test]
fn after_a_failed_fsync_nothing_is_acknowledged_and_the_process_exits() {
    let directory = directory();
    Server::start_in(directory.path(), &[]).add_ok(plant(0));
    let mut server = Server::start_with_fault(directory.path(), "fdatasync:error=EIO:when=6+", &[]);
    let mut acknowledged = vec![0];
    let mut lost = None;
    for id in 1..20 {
        let response = server.add(plant(id));
        if response.status != 200 {
            lost = Some(response);
            break;
        }
        acknowledged.push(id);
    }
    let lost = lost.expect("an fsync that failed");
    assert_eq!(lost.error(), 50301);
    assert_eq!(lost.header("retry-after"), Some("1"));
    assert_eq!(server.wait_for_exit().code(), Some(1));
    let logged = server.everything_logged();
    assert!(
        logged.contains("its store cannot be used any more"),
        "{logged}"
    );
    // After a failed sync, the success of another one proves nothing.
    let trace = server.trace();
    let failed = trace.find("EIO").expect("the failed sync");
    assert!(!trace[failed..].contains("sync("), "{trace}");
    // Every acknowledged plant is stored, and adds succeed again.
    assert!(acknowledged.len() > 1, "{acknowledged:?}");
    let server = Server::start_in(directory.path(), &[]);
    let stored: Vec<_> = server.plants().into_iter().map(|(id, ..)| id).collect();
    assert!(
        acknowledged
            .iter()
            .all(|id| stored.contains(&i64::try_from(*id).expect("small")))
    );
    for id in 0..20 {
        server.add_ok(plant(id));
    }
}

#[test]
fn a_full_disk_is_50302_until_there_is_room_without_a_restart() {
    let directory = directory();
    let mut before = Server::start_in(directory.path(), &[]);
    before.add_ok(plant(0));
    assert!(before.terminate().success());
    let server =
        Server::start_with_fault(directory.path(), "pwrite64:error=ENOSPC:when=30..60", &[]);
    let mut rejected = 0;
    let mut last = 0;
    for id in 1..200 {
        last = id;
        let response = server.add(plant(id));
        if response.status != 200 {
            assert_eq!(response.error(), 50302);
            assert_eq!(response.header("retry-after"), Some("1"));
            rejected += 1;
        } else if rejected > 0 {
            break;
        }
    }
    assert!(rejected > 0);
    for id in 0..=last {
        server.add_ok(plant(id));
    }
    assert_eq!(server.plants().len(), last + 1);
}

#[test]
fn a_full_queue_is_50300_at_once_and_rejected_plants_are_not_stored() {
    let directory = directory();
    let server = Server::start_with_fault(
        directory.path(),
        "fdatasync:delay_enter=300000",
        &["--max-queue", "2"],
    );
    server.add_ok(plant(0));
    let responses = add_at_once(&server, 1..30);
    let mut stored = vec![0];
    let mut rejected = 0;
    for (id, response) in (1..30).zip(responses) {
        let response = response.expect("a response");
        if response.status == 200 {
            stored.push(id);
        } else {
            assert_eq!(response.error(), 50300);
            assert_eq!(response.header("retry-after"), Some("1"));
            rejected += 1;
        }
    }
    assert!(
        rejected > 0 && stored.len() > 1,
        "{rejected} rejected, {stored:?} stored"
    );
    let found: Vec<_> = server.plants().into_iter().map(|(id, ..)| id).collect();
    assert_eq!(found, stored);
}

#[test]
fn a_commit_that_times_out_is_50301() {
    let directory = directory();
    let fault = "fdatasync:delay_enter=2000000:when=8+";
    let server = Server::start_with_fault(directory.path(), fault, &["--store-timeout", "500ms"]);
    let responses = (0..20).map(|id| server.add(plant(id)));
    let late = responses
        .into_iter()
        .find(|response| response.status != 200)
        .expect("a sync that takes too long");
    assert_eq!(late.error(), 50301);
}

#[test]
fn a_duplicate_of_a_plant_in_flight_waits_for_its_commit() {
    let directory = directory();
    assert!(
        Server::start_in(directory.path(), &[])
            .terminate()
            .success()
    );
    // From the sixth sync of the writer on, a sync takes eight seconds.
    let mut server = Server::start_with_fault(
        directory.path(),
        "fdatasync:delay_enter=8000000:when=6+",
        &[],
    );
    let token = server.token();
    let (id, mut in_flight) = (0..20)
        .find_map(|id| {
            let mut client = server.connect();
            client.send_add(&token, plant(id).as_bytes());
            client
                .is_silent_for(Duration::from_secs(2))
                .then_some((id, client))
        })
        .expect("a sync that does not return");
    let mut duplicate = server.connect();
    duplicate.send_add(&token, plant(id).as_bytes());
    assert!(duplicate.is_silent_for(Duration::from_secs(1)));
    // Neither got a response, not even when the process exited.
    server.kill();
    assert!(in_flight.try_response().is_none());
    assert!(duplicate.try_response().is_none());
    Server::start_in(directory.path(), &[]).add_ok(plant(id));
}

#[test]
fn a_drain_commits_the_queue() {
    let directory = directory();
    let mut server =
        Server::start_with_fault(directory.path(), "fdatasync:delay_enter=300000", &[]);
    let token = server.token();
    let mut clients: Vec<_> = (0..20).map(|_| server.connect()).collect();
    for (id, client) in clients.iter_mut().enumerate() {
        client.send_add(&token, plant(id).as_bytes());
    }
    server.wait_for_connection();
    server.signal("-TERM");
    for client in &mut clients {
        let response = client.response();
        assert_eq!(
            (response.status, response.header("connection")),
            (200, Some("close"))
        );
    }
    assert_eq!(server.wait_for_exit().code(), Some(0));
    assert_eq!(server.plants().len(), 20);
}

#[test]
fn a_failed_fsync_during_a_checkpoint_ends_the_process_and_loses_nothing() {
    // SQLite does not report a failed sync of its automatic checkpoints.
    let directory = directory();
    assert!(
        Server::start_in(directory.path(), &[])
            .terminate()
            .success()
    );
    let database = directory.path().join("plantstore.db");
    let database = database.to_str().expect("UTF-8");
    // The first sync of each thread succeeds: it belongs to the startup.
    let strace = ["-P", database, "-e", "inject=fdatasync:error=EIO:when=2+"];
    let mut server = Server::start_under_strace(directory.path(), &strace, &[]);
    let token = server.token();
    let long = "x".repeat(20_000);
    let acknowledged = (0..2000)
        .take_while(|id| {
            let Ok(mut client) = Client::try_connect(server.address()) else {
                return false;
            };
            let body = format!(r#"{{"id":{id},"name":"{long}"}}"#);
            client.try_send(add_request(&token, body.as_bytes()));
            client
                .try_response()
                .is_some_and(|response| response.status == 200)
        })
        .count();
    assert_eq!(server.wait_for_exit().code(), Some(1));
    assert!((100..2000).contains(&acknowledged), "{acknowledged}");
    let server = Server::start_in(directory.path(), &[]);
    assert!(server.plants().len() >= acknowledged);
}

#[test]
fn a_drain_with_a_stuck_disk_times_out_and_logs_the_reason() {
    let directory = directory();
    assert!(
        Server::start_in(directory.path(), &[])
            .terminate()
            .success()
    );
    let arguments = ["--drain-timeout", "500ms"];
    let mut server = Server::start_with_fault(
        directory.path(),
        "fdatasync:delay_enter=6000000",
        &arguments,
    );
    let mut client = server.connect();
    client.send_add(&server.token(), plant(1).as_bytes());
    server.wait_for_connection();
    assert_eq!(server.terminate().code(), Some(1));
    assert!(client.try_response().is_none());
    let logged = server.everything_logged();
    assert!(logged.contains("the final commit timed out"), "{logged}");
}

#[test]
fn a_node_with_a_full_disk_is_not_ready_and_recovers_without_a_restart() {
    let directory = directory();
    let mut before = Server::start_in(directory.path(), &[]);
    before.add_ok(plant(0));
    assert!(before.terminate().success());
    let fault = "pwrite64:error=ENOSPC:when=60..63";
    let server = Server::start_with_fault(directory.path(), fault, &[]);
    server.wait_until_ready();
    let full = (1..200).map(|id| server.add(plant(id)).status);
    assert_eq!(full.into_iter().find(|status| *status != 200), Some(503));
    let response = server.ask("/readyz");
    let reason = "not ready: the disk is full, or the WAL has reached its limit: ";
    assert_eq!(response.status, 503);
    assert!(response.body.starts_with(reason), "{response:?}");
    assert_eq!(server.ask("/healthz").status, 200);
    assert_eq!(server.metric("plantstore_ready"), 0);
    // Without requests: the health check notices that there is space again.
    let stored = server.plants().len();
    server.wait_until_ready();
    assert_eq!(server.metric("plantstore_ready"), 1);
    assert_eq!(server.plants().len(), stored);
    let tried = server.trace().matches("ENOSPC").count();
    assert_eq!(
        tried, 4,
        "one for the add, and one for each attempt to find out"
    );
    server.add_ok(plant(999));
}

#[test]
fn a_node_with_a_stuck_store_is_not_ready_until_the_store_recovers() {
    let directory = directory();
    assert!(
        Server::start_in(directory.path(), &[])
            .terminate()
            .success()
    );
    let fault = "fdatasync:delay_enter=6000000:when=6";
    let server = Server::start_with_fault(directory.path(), fault, &[]);
    let token = server.token();
    let mut in_flight = (0..20)
        .find_map(|id| {
            let mut client = server.connect();
            client.send_add(&token, plant(id).as_bytes());
            let stuck = client.is_silent_for(Duration::from_secs(3));
            stuck.then_some(client)
        })
        .expect("a sync that does not return");
    let response = server.ask("/readyz");
    let reason = "not ready: the store does not respond\n";
    assert_eq!((response.status, &*response.body), (503, reason));
    assert_eq!(server.ask("/healthz").status, 200);
    assert_eq!(server.metric("plantstore_ready"), 0);
    assert_eq!(in_flight.response().status, 200);
    server.wait_until_ready();
}

#[test]
fn a_starting_node_is_alive_and_not_ready() {
    let directory = directory();
    let mut before = Server::start_in(directory.path(), &[]);
    before.add_ok(plant(0));
    before.kill(); // what is in the log has to be synced by the next
    let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = free.local_addr().expect("an address");
    drop(free);
    let strace = ["-e", "inject=fdatasync,fsync:delay_enter=1500000:when=1"];
    let command = Server::strace_command(
        directory.path(),
        &strace,
        &["--ops-listen", &address.to_string()],
    );
    let server = Server::spawn(command, directory.path(), address);
    let ask = |path: &str| {
        let mut client = Client::try_connect(address).ok()?;
        Some(client.request(&format!("GET {path}"), ""))
    };
    let mut first = None;
    wait_until("it responds", || {
        first = ask("/readyz");
        first.is_some()
    });
    let first = first.expect("a response");
    assert_eq!((first.status, &*first.body), (503, "not ready: starting\n"));
    assert_eq!(ask("/healthz").expect("a response").status, 200);
    let metrics = ask("/metrics").expect("a response").body;
    assert!(metrics.contains("\nplantstore_ready 0\n"), "{metrics}");
    assert!(!server.everything_logged().contains("listening"));
    wait_until("it is ready", || {
        ask("/readyz").is_some_and(|response| response.status == 200)
    });
    assert!(server.everything_logged().contains("listening"));
}
