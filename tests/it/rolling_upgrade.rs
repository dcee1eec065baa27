//! Nodes of two versions over one PostgreSQL database, under load. `tests/upgrade/run` builds the versions and runs this.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use crate::harness::postgres::plants;
use crate::harness::{Client, Server, copy_environment, directory, output, plantstore, wait_until};
use crate::postgres::{sql, url};

/// How many plants of each client are waited for.
const ACKNOWLEDGEMENTS: usize = 50;

/// Clients that add plants to nodes, one client per address. The plants of one client have different ids, and every tenth is sent again.
pub struct Load {
    clients: Vec<LoadClient>,
    has_ended: Arc<AtomicBool>,
}

struct LoadClient {
    acknowledged: Arc<AtomicUsize>,
    thread: JoinHandle<History>,
}

#[derive(Default)]
pub struct History {
    acknowledged: BTreeMap<i64, String>,
    /// Responses other than 200, and responses that did not arrive.
    pub rejected: Vec<String>,
}

impl Load {
    pub fn start(nodes: Vec<SocketAddr>, token: &str) -> Self {
        // Loads of one test have different ids.
        static LOADS: Mutex<i64> = Mutex::new(0);
        let has_ended = Arc::new(AtomicBool::new(false));
        let clients = nodes.into_iter().map(|node| {
            let mut loads = LOADS.lock().expect("no panic");
            *loads += 1;
            let first_id = *loads * 1_000_000_000;
            let acknowledged = Arc::new(AtomicUsize::new(0));
            let (token, has_ended) = (token.to_owned(), Arc::clone(&has_ended));
            let counter = Arc::clone(&acknowledged);
            let thread = thread::spawn(move || add(node, &token, first_id, &counter, &has_ended));
            LoadClient {
                acknowledged,
                thread,
            }
        });
        Self {
            clients: clients.collect(),
            has_ended,
        }
    }

    /// Waits until every client has got further acknowledgements.
    pub fn wait_for_acknowledgements(&self) {
        for client in &self.clients {
            let count = || client.acknowledged.load(Ordering::SeqCst);
            let before = count();
            wait_until("plants are acknowledged", || {
                count() >= before + ACKNOWLEDGEMENTS
            });
        }
    }

    pub fn stop(self) -> History {
        self.has_ended.store(true, Ordering::SeqCst);
        let mut all = History::default();
        for client in self.clients {
            all.append(client.thread.join().expect("no panic"));
        }
        all
    }
}

fn add(
    node: SocketAddr,
    token: &str,
    first_id: i64,
    acknowledged: &AtomicUsize,
    has_ended: &AtomicBool,
) -> History {
    let mut history = History::default();
    let mut client = None;
    let mut id = first_id;
    while !has_ended.load(Ordering::SeqCst) {
        id += 1;
        let sent = if id % 10 == 0 { id - 5 } else { id };
        let name = format!("plant {sent}");
        let mut connected = client.take().unwrap_or_else(|| Client::connect(node));
        let body = format!(r#"{{"id":{sent},"name":"{name}"}}"#);
        connected.send_add(token, body.as_bytes());
        match connected.try_response() {
            Some(response) if response.status == 200 => {
                acknowledged.fetch_add(1, Ordering::SeqCst);
                history.acknowledged.insert(sent, name);
                client = (!response.is_last()).then_some(connected);
            }
            response => history.rejected.push(format!("{sent}: {response:?}")),
        }
    }
    history
}

impl History {
    fn append(&mut self, other: Self) {
        self.acknowledged.extend(other.acknowledged);
        self.rejected.extend(other.rejected);
    }

    /// Every acknowledged plant is in the database.
    pub fn is_stored(&self, url: &str) {
        let stored: BTreeMap<_, _> = plants(url)
            .into_iter()
            .map(|(id, name, _)| (id, name))
            .collect();
        for (id, name) in &self.acknowledged {
            assert_eq!(stored.get(id), Some(name), "{id} was acknowledged");
        }
    }
}

/// A command of the version whose binary the variable `variable` names.
fn command(variable: &str, directory: &Path, arguments: &[&str]) -> Command {
    let binary = std::env::var_os(variable).expect("make upgrade runs this");
    let mut command = Command::new(binary);
    copy_environment(&plantstore(directory), &mut command);
    command
        .args(arguments)
        .current_dir(directory)
        .stdin(Stdio::null());
    command
}

fn node(variable: &str, directory: &Path) -> Server {
    let command = command(variable, directory, &["serve", "--listen", "127.0.0.1:0"]);
    Server::start_command(command, directory)
}

fn run_ok(variable: &str, directory: &Path, arguments: &[&str]) -> String {
    let output = output(&mut command(variable, directory, arguments));
    assert!(
        output.status.success(),
        "{variable} {arguments:?}: {output:?}"
    );
    String::from_utf8(output.stdout).expect("UTF-8")
}

const END_CONNECTIONS: &str = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()";

const OLDER: &str = "OLDER_PLANTSTORE";
const NEWER: &str = "NEWER_PLANTSTORE";

/// A change that both versions can use: neither rejects an add, before, during and after it.
#[test]
#[ignore = "make upgrade runs it"]
fn nodes_of_both_versions_serve_one_database() {
    let place = directory();
    let directory = place.path();
    let url = url(directory);
    let token = run_ok(OLDER, directory, &["token", "create", "load"]);
    let older = [(); 2].map(|()| node(OLDER, directory));
    let addresses = older.iter().map(Server::address).collect();
    let of_older = Load::start(addresses, token.trim());
    of_older.wait_for_acknowledgements();

    run_ok(NEWER, directory, &["migrate"]);
    of_older.wait_for_acknowledgements();
    let mut newer = node(NEWER, directory);
    let of_newer = Load::start(vec![newer.address()], token.trim());
    of_newer.wait_for_acknowledgements();
    // The older nodes verify the tables again.
    sql(&url, END_CONNECTIONS);
    of_older.wait_for_acknowledgements();
    of_newer.wait_for_acknowledgements();

    // Tokens of both versions, on the nodes of both.
    let body = br#"{"id":1,"name":"x"}"#;
    for (creates, revokes) in [(OLDER, NEWER), (NEWER, OLDER)] {
        let token = run_ok(creates, directory, &["token", "create", creates]);
        let nodes = || older.iter().chain([&newer]);
        for node in nodes() {
            assert_eq!(node.connect().add(token.trim(), body).status, 200);
        }
        run_ok(revokes, directory, &["token", "revoke", creates]);
        for node in nodes() {
            wait_until("the token is revoked", || {
                node.connect().add(token.trim(), body).status == 401
            });
        }
    }

    // Back to the older version.
    let history = of_newer.stop();
    assert_eq!(history.rejected, Vec::<String>::new());
    assert_eq!(newer.terminate().code(), Some(0));
    let again = node(OLDER, directory);
    let of_again = Load::start(vec![again.address()], token.trim());
    of_again.wait_for_acknowledgements();

    let mut all = history;
    for load in [of_older, of_again] {
        let history = load.stop();
        assert_eq!(history.rejected, Vec::<String>::new());
        all.append(history);
    }
    all.is_stored(&url);
    run_ok(NEWER, directory, &["check"]);
    println!(
        "{} plants acknowledged, none rejected",
        all.acknowledged.len()
    );
}

/// A change that the older version cannot use: its nodes reject adds from then on, and lose none that they have acknowledged.
#[test]
#[ignore = "make upgrade runs it"]
fn nodes_of_the_older_version_reject_adds_after_the_upgrade() {
    let place = directory();
    let directory = place.path();
    let url = url(directory);
    let token = run_ok(OLDER, directory, &["token", "create", "load"]);
    let older = node(OLDER, directory);
    let of_older = Load::start(vec![older.address()], token.trim());
    of_older.wait_for_acknowledgements();
    run_ok(NEWER, directory, &["migrate"]);
    let newer = node(NEWER, directory);
    let of_newer = Load::start(vec![newer.address()], token.trim());
    of_newer.wait_for_acknowledgements();
    let sentence = "use the newer plantstore that made it";
    wait_until("the older node rejects adds", || {
        older.everything_logged().contains(sentence)
    });
    of_newer.wait_for_acknowledgements();
    assert_eq!(
        older
            .connect()
            .add(token.trim(), b"{\"id\":1,\"name\":\"x\"}")
            .error(),
        50303
    );

    let start = ["serve", "--listen", "127.0.0.1:0"];
    let refused = output(&mut command(OLDER, directory, &start));
    assert_eq!(refused.status.code(), Some(1));
    let printed = String::from_utf8_lossy(&refused.stderr);
    assert!(printed.contains(sentence), "{printed}");

    let history = of_newer.stop();
    assert_eq!(history.rejected, Vec::<String>::new());
    history.is_stored(&url);
    let history = of_older.stop();
    assert!(
        history.rejected.iter().all(|it| it.contains("50303")),
        "{:?}",
        history.rejected.first()
    );
    history.is_stored(&url);
}
