//! Connections: timeouts, the connection limit, pipelining, and the drain.

use std::process::Command;
use std::thread;
use std::time::Duration;

use crate::harness::{
    Client, Server, add_request, directory, output, postgres, run_ok, wait_until,
};

const BODY: &[u8] = br#"{"id":1,"name":"x"}"#;

#[test]
fn an_idle_connection_is_closed_and_a_busy_one_is_not() {
    let server = Server::start_with(&["--idle-timeout", "2s", "--header-timeout", "60s"]);
    let token = server.token();
    let mut client = server.connect();
    for _ in 0..5 {
        thread::sleep(Duration::from_millis(500)); // in all longer than the deadline
        assert_eq!(client.add(&token, BODY).status, 200);
    }
    assert!(client.is_closed());
}

#[test]
fn a_connection_without_a_request_is_closed() {
    let server = Server::start_with(&["--header-timeout", "200ms", "--idle-timeout", "60s"]);
    assert!(server.connect().is_closed());
}

#[test]
fn a_client_that_does_not_read_its_responses_is_disconnected() {
    let server = Server::start_with(&["--idle-timeout", "300ms"]);
    let mut deaf = server.connect();
    // Requests more than the kernel's buffers hold, and does not read.
    for _ in 0..20 {
        deaf.try_send("GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n".repeat(1000));
    }
    wait_until("it is disconnected", || {
        server.metric("plantstore_connections") == 0
    });
}

#[test]
fn a_client_that_has_closed_its_sending_side_gets_its_response() {
    let server = Server::start();
    let mut client = server.connect();
    client.send_add(&server.token(), BODY);
    client.finish();
    assert_eq!(client.response().status, 200);
    assert!(client.is_closed());
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let server = Server::start();
    let token = server.token();
    let mut client = server.connect();
    let plant = |id: usize| format!(r#"{{"id":{id},"name":"plant {id}"}}"#);
    let requests: Vec<u8> = (0..50)
        .flat_map(|id| add_request(&token, plant(id).as_bytes()))
        .collect();
    client.send(requests);
    for id in 0..50 {
        assert_eq!(client.response().json()["name"], format!("plant {id}"));
    }
}

#[test]
fn small_responses_are_not_delayed_by_nagle() {
    let directory = directory();
    let strace = ["-e", "trace=setsockopt"];
    let server = Server::start_under_strace(directory.path(), &strace, &[]);
    server.add_ok(BODY);
    wait_until("TCP_NODELAY is set", || {
        server.trace().contains("TCP_NODELAY, [1]")
    });
}

#[test]
fn sigterm_and_sigint_finish_accepted_requests_and_exit_with_0() {
    for signal in ["-TERM", "-INT"] {
        let mut server = Server::start();
        let request = add_request(&server.token(), BODY);
        let (most, rest) = request.split_at(request.len() - 5);
        let mut half_way = server.connect();
        half_way.send(most);
        let mut idle = server.connect();
        assert_eq!(idle.request("GET /nothing", "").status, 404);

        server.signal(signal);
        server.wait_for_line(|line| line["message"] == "draining");
        wait_until("new connections are refused", || {
            server.refuses_connections()
        });
        assert!(idle.is_closed());
        half_way.send(rest);
        let response = half_way.response();
        assert_eq!(response.status, 200);
        assert!(response.is_last(), "{response:?}");
        assert!(half_way.is_closed());

        assert_eq!(server.wait_for_exit().code(), Some(0));
        assert_eq!(server.plants().len(), 1);
        let left: Vec<_> = std::fs::read_dir(server.directory())
            .expect("a directory")
            .collect();
        let files = if postgres::is_under_test() { 1 } else { 3 };
        assert_eq!(
            left.len(),
            files,
            "a clean end leaves the database, its lock and the token: {left:?}"
        );
    }
}

/// A client that has sent more requests than the kernel's buffers can hold responses, and does not read.
fn deaf(server: &Server) -> Client {
    let mut deaf = server.connect();
    for _ in 0..20 {
        deaf.try_send("GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n".repeat(1000));
    }
    let mut answered = 0;
    wait_until("no more is answered", || {
        let page = server.ask("/metrics").body;
        let mut lines = page.lines();
        let count = lines.find(|line| line.contains(r#"status="200",error_code="none""#));
        let count = count.and_then(|line| line.rsplit(' ').next()?.parse().ok());
        let before = std::mem::replace(&mut answered, count.expect("a number"));
        thread::sleep(Duration::from_millis(300));
        answered > 0 && answered == before
    });
    deaf
}

/// The server asks for the body of a request with `Expect: 100-continue` when it is ready to read it.
#[test]
fn the_large_bodies_of_a_token_are_limited_and_others_do_not_wait_for_them() {
    // With bodies of up to 64 MiB, four may be in memory, and one of each token.
    let server = Server::start_with(&["--max-body-bytes", "67108864", "--body-timeout", "10m"]);
    let other = run_ok(server.directory(), &["token", "create", "other"]);
    let (token, other) = (server.token(), other.trim());
    let body = |id: usize| format!(r#"{{"id":{id},"name":"{}"}}"#, "x".repeat(20_000));
    let mut slow = server.connect();
    let request = add_request(&token, body(0).as_bytes());
    let (most, rest) = request.split_at(request.len() - 1);
    slow.send(most);
    let mut waiting = Vec::new();
    wait_until("a large body waits", || {
        let mut client = server.connect();
        client.send_add(&token, body(1).as_bytes());
        let is_waiting = client.is_silent_for(Duration::from_millis(300));
        waiting.push(client);
        is_waiting
    });
    server.add_ok(r#"{"id":2,"name":"Fern"}"#);
    assert_eq!(server.connect().add(other, body(3).as_bytes()).status, 200);

    slow.send(rest);
    assert_eq!(slow.response().status, 200);
    for client in &mut waiting {
        assert_eq!(client.response().status, 200);
    }
}

/// What only HTTP/1.1 has; `http2.rs` has the rest.
mod http1 {
    use super::*;

    #[test]
    fn a_request_sent_while_the_drain_starts_gets_a_response() {
        let mut server = Server::start();
        let token = server.token();
        let mut client = server.connect();
        assert_eq!(client.add(&token, BODY).status, 200);
        server.signal("-TERM");
        server.wait_for_line(|line| line["message"] == "draining");
        let response = client.add(&token, br#"{"id":2,"name":"late"}"#);
        assert_eq!((response.status, response.is_last()), (200, true));
        assert_eq!(server.wait_for_exit().code(), Some(0));
        assert_eq!(server.plants().len(), 2);
    }

    #[test]
    fn a_body_may_be_chunked_and_waited_for_with_100_continue() {
        let server = Server::start();
        let mut client = server.connect();
        client.send(format!(
            "POST /plants HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\ncontent-type: application/json\r\n\
             expect: 100-continue\r\ntransfer-encoding: chunked\r\n\r\n",
            server.token()
        ));
        assert_eq!(client.response().status, 100);
        client.send("8\r\n{\"id\":1,\r\n");
        client.send("b\r\n\"name\":\"x\"}\r\n0\r\n\r\n");
        assert_eq!(client.response().status, 200);
    }

    #[test]
    fn a_drain_ends_at_its_timeout_or_at_the_second_signal() {
        let limits = ["--idle-timeout", "20m", "--drain-timeout"];
        let mut server = Server::start_with(&[&limits[..], &["1s"]].concat());
        let _stuck = deaf(&server);
        assert_eq!(server.terminate().code(), Some(0));
        server.wait_for_line(|line| {
            line["message"] == "the drain timeout is over; open connections are closed"
        });

        let mut server = Server::start_with(&[&limits[..], &["10m"]].concat());
        let _stuck = deaf(&server);
        server.signal("-TERM");
        server.wait_for_line(|line| line["message"] == "draining");
        assert_eq!(server.terminate().code(), Some(0));
        server
            .wait_for_line(|line| line["message"] == "second signal: open connections are closed");
    }

    #[test]
    fn further_signals_do_not_make_a_shutdown_fail() {
        for _ in 0..10 {
            let mut server = Server::start();
            let signals = "for i in 1 2 3 4 5; do kill -INT $0; kill -TERM $0; done";
            let pid = server.pid().to_string();
            // It fails if the server has ended before the last of them.
            let _ = output(Command::new("sh").args(["-c", signals, &pid]));
            assert_eq!(server.wait_for_exit().code(), Some(0));
        }
    }

    #[test]
    fn incomplete_requests_do_not_delay_a_drain_and_requests_in_flight_get_responses() {
        let limits = ["--header-timeout", "100m", "--body-timeout", "100m"];
        let limits = [&limits[..], &["--drain-timeout", "60m"]].concat();
        let mut server = Server::start_with(&limits);
        let token = server.token();
        let request = add_request(&token, BODY);
        let head_len = request.len() - BODY.len();
        let mut half_sent: Vec<Client> = (0..50)
            .map(|number| {
                let mut client = server.connect();
                match number % 5 {
                    0 => {} // nothing at all
                    1 => client.send("POST /pla"),
                    2 => client.send(&request[..head_len - 2]),
                    // The second request of a connection.
                    3 => {
                        assert_eq!(client.add(&token, BODY).status, 200);
                        client.send(&request[..head_len / 2]);
                    }
                    _ => client.send(&request[..request.len() - 5]), // half a body
                }
                client
            })
            .collect();
        // It continues to send after its response while the connection is open.
        let mut talker = server.connect();
        talker.send("GET /nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n");
        assert_eq!(talker.response().error(), 40400);
        let mut in_flight = server.connect();
        in_flight.send(&request[..request.len() - 5]);
        server.wait_for_connection();

        server.signal("-TERM");
        server.wait_for_line(|line| line["message"] == "draining");
        in_flight.send(&request[request.len() - 5..]);
        let response = in_flight.response();
        assert_eq!(
            (response.status, response.header("connection")),
            (200, Some("close"))
        );
        // None of the timeouts has expired.
        wait_until("the process ends", || {
            talker.try_send("x");
            server.has_ended()
        });
        assert_eq!(server.wait_for_exit().code(), Some(0));
        for (number, client) in half_sent.iter_mut().enumerate() {
            match number % 5 {
                // An incomplete request gets a response that it can be retried.
                0 => assert!(client.is_closed()),
                _ => assert_eq!(client.response().error(), 40800, "{number}"),
            }
        }
    }

    #[test]
    fn headers_that_arrive_too_slowly_time_out() {
        let server = Server::start_with(&["--header-timeout", "1s"]);
        let mut client = server.connect();
        let mut drops = 0;
        while client.is_silent_for(Duration::from_millis(50)) {
            client.try_send("x");
            drops += 1;
            assert!(drops < 200, "a deadline that every byte puts off");
        }
        assert_eq!(client.response().error(), 40800);
    }

    #[test]
    fn a_body_in_a_million_chunks_needs_no_more_memory_than_its_size() {
        let server = Server::start_with(&["--body-timeout", "10m"]);
        server.add_ok(format!(r#"{}{{"id":1,"name":"x"}}"#, " ".repeat(1_000_000)));
        let whole_kib = server.peak_kib();
        for _ in 0..2 {
            let mut client = server.connect();
            client.send(format!(
                "POST /plants HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\n\
                 content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n",
                server.token()
            ));
            for _ in 0..1000 {
                client.send("1\r\n \r\n".repeat(1000));
            }
            let plant = r#"{"id":1,"name":"x"}"#;
            client.send(format!("{:x}\r\n{plant}\r\n0\r\n\r\n", plant.len()));
            assert_eq!(client.response().status, 200);
        }
        let peak_kib = server.peak_kib();
        // Each chunk used to keep a buffer of the connection alive: 37 MiB for this body.
        let more_kib = peak_kib.saturating_sub(whole_kib);
        assert!(more_kib < 24 << 10, "{whole_kib} KiB, then {peak_kib}");
    }
}
