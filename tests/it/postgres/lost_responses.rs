//! A batch is committed, and the node does not learn it, or a warning comes with the response: then it may be stored, whatever fails
//! afterwards.

use std::io::Write;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::harness::tcp_proxy::{Carrier, TcpProxy};
use crate::harness::{Response, Server, directory, run_ok, wait_until};
use crate::postgres::{BODY, address, url};

/// What happens to the responses to batches.
#[derive(Default)]
struct Plan {
    /// In place of the response to the first batch; then its connection is closed.
    response: Vec<u8>,
    /// The number of statements for batches after which the database is down.
    statements_max: usize,
    statements: AtomicUsize,
    is_down: AtomicBool,
}

struct Batches {
    plan: Arc<Plan>,
    adds: AtomicBool,
}

impl Carrier for Batches {
    fn request(&self, bytes: &[u8], mut server: &TcpStream) -> Option<()> {
        let plan = &self.plan;
        if contains(bytes, b"INSERT INTO plantstore.plants") {
            self.adds.store(true, Ordering::SeqCst);
            let number = plan.statements.fetch_add(1, Ordering::SeqCst);
            plan.is_down
                .fetch_or(number >= plan.statements_max, Ordering::SeqCst);
        }
        if plan.is_down.load(Ordering::SeqCst) {
            return None;
        }
        server.write_all(bytes).ok()
    }

    fn response(&self, bytes: &[u8], mut client: &TcpStream) -> Option<()> {
        let plan = &self.plan;
        if self.adds.load(Ordering::SeqCst) && contains(bytes, b"INSERT 0 1\0") {
            let is_last = plan.statements.load(Ordering::SeqCst) >= plan.statements_max;
            plan.is_down.store(is_last, Ordering::SeqCst);
            let _ = client.write_all(&plan.response);
            return None;
        }
        client.write_all(bytes).ok()
    }
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

/// Adds a plant that is committed, with this response to its first batch. The database is down after some statements.
fn add_without_response(response: Vec<u8>, statements_max: usize) {
    let directory = directory();
    let path = directory.path();
    let url = url(path);
    let token = run_ok(path, &["token", "create", "a"]);
    let plan = Arc::new(Plan {
        response,
        statements_max,
        ..Plan::default()
    });
    let for_connections = Arc::clone(&plan);
    let proxy = TcpProxy::carrying(address(&url), move |_| {
        Box::new(Batches {
            plan: Arc::clone(&for_connections),
            adds: AtomicBool::new(false),
        })
    });
    let store = url.replace(&address(&url).to_string(), &proxy.address.to_string());
    let arguments = ["--store-connections", "1", "--store-timeout", "3s"];
    let server = Server::start_in(path, &[&["--store", &store][..], &arguments].concat());
    wait_until("it is ready", || server.ask("/readyz").status == 200);
    let response = server.connect().add(token.trim(), BODY);
    assert_eq!(response.error(), 50301, "{response:?}");
    assert!(plan.is_down.load(Ordering::SeqCst), "not all was sent");
    assert!(run_ok(path, &["export"]).contains(r#""id":1"#));
}

/// A message of the server.
fn message(kind: u8, fields: &[u8]) -> Vec<u8> {
    let len = u32::try_from(fields.len() + 4).expect("it is short");
    [&[kind], &len.to_be_bytes()[..], fields].concat()
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn a_batch_may_be_stored_after_the_database_has_panicked() {
    // As when the WAL cannot be extended after a commit.
    let panic = b"SPANIC\0VPANIC\0C53100\0Mcould not write to file\0\0";
    add_without_response(message(b'E', panic), 1);
}

/// Sends a warning before each response to a batch.
struct Warnings {
    warning: Vec<u8>,
    adds: AtomicBool,
}

impl Carrier for Warnings {
    fn request(&self, bytes: &[u8], mut server: &TcpStream) -> Option<()> {
        let adds = contains(bytes, b"INSERT INTO plantstore.plants");
        self.adds.fetch_or(adds, Ordering::SeqCst);
        server.write_all(bytes).ok()
    }

    fn response(&self, bytes: &[u8], mut client: &TcpStream) -> Option<()> {
        if self.adds.load(Ordering::SeqCst) {
            client.write_all(&self.warning).ok()?;
        }
        client.write_all(bytes).ok()
    }
}

/// The response to an add whose batches come with a warning from this function of the server.
fn add_with_warning_from(function: &str) -> Response {
    let directory = directory();
    let path = directory.path();
    let url = url(path);
    let token = run_ok(path, &["token", "create", "a"]);
    let fields = format!("SWARNING\0VWARNING\0C01000\0Mtext\0R{function}\0\0");
    let warning = message(b'N', fields.as_bytes());
    let proxy = TcpProxy::carrying(address(&url), move |_| {
        Box::new(Warnings {
            warning: warning.clone(),
            adds: AtomicBool::new(false),
        })
    });
    let store = url.replace(&address(&url).to_string(), &proxy.address.to_string());
    let arguments = ["--store-connections", "1", "--store-timeout", "3s"];
    let server = Server::start_in(path, &[&["--store", &store][..], &arguments].concat());
    wait_until("it is ready", || server.ask("/readyz").status == 200);
    server.connect().add(token.trim(), BODY)
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn a_warning_leaves_the_outcome_unknown_unless_it_is_about_transaction_ids() {
    let response = add_with_warning_from("SyncRepWaitForLSN");
    assert_eq!(response.error(), 50301, "{response:?}");
    // Sent with every transaction long before the ids are used up.
    let response = add_with_warning_from("GetNewTransactionId");
    assert_eq!(response.status, 200, "{response:?}");
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn a_batch_may_be_stored_if_its_second_statement_fails_after_the_response_to_the_first_was_lost() {
    add_without_response(Vec::new(), 2);
}
