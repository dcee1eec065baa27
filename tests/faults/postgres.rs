//! Faults of PostgreSQL and of several nodes over one database.

pub mod cluster;
mod conflicts;
mod connections;
pub mod database;
pub mod failover;
pub mod nodes;
mod pair;
mod proxy;
mod stuck_commits;

use std::fs;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::checker::History;
use crate::harness::{Server, directory, plantstore, run_ok, wait_until};
use crate::load::{Load, Running, send_again};
use crate::random::Random;

pub use conflicts::{deadlocks, made_failures, serializable};
pub use connections::{cut, stalled, terminated};
pub use failover::{failovers, standby_losses};
pub use nodes::{killed, rolling};
pub use stuck_commits::{stale_primaries, standby_outages};

use cluster::free_port;

/// The faults that need no control of the database server.
pub const FAULTS_OF_CLIENTS: [&str; 4] = [
    "connections cut",
    "connections that stall",
    "nodes killed",
    "rolling restarts",
];

/// A node: the real binary, with an address that stays the same across restarts.
pub struct Node {
    pub server: Server,
    place: TempDir,
    pub address: SocketAddr,
    arguments: Vec<String>,
    /// What the node logged before it was last started.
    earlier_log: String,
}

impl Node {
    pub fn start(store: &str, token: &str, more: &[&str]) -> Self {
        let place = directory();
        fs::write(place.path().join("plantstore.token"), token).expect("a file");
        let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let arguments = ["--store", store].into_iter().chain(more.iter().copied());
        let arguments: Vec<_> = arguments.map(str::to_owned).collect();
        let server = serve(&place, address, &arguments);
        Self {
            server,
            place,
            address,
            arguments,
            earlier_log: String::new(),
        }
    }

    /// The store that the node uses when it is started again.
    pub fn use_store(&mut self, store: &str) {
        store.clone_into(&mut self.arguments[1]);
    }

    /// Starts the node again after it has exited.
    pub fn start_again(&mut self) {
        self.earlier_log += &self.server.everything_logged();
        self.server = serve(&self.place, self.address, &self.arguments);
    }

    pub fn log(&self) -> String {
        self.earlier_log.clone() + &self.server.everything_logged()
    }

    fn load(&self, load: Load) -> Running {
        load.start(self.server.address(), &self.server.token())
    }
}

fn serve(place: &TempDir, address: SocketAddr, arguments: &[String]) -> Server {
    let mut command = plantstore(place.path());
    command.args(["serve", "--listen", &address.to_string()]);
    command.args(arguments);
    Server::start_command(command, place.path())
}

/// Creates the schema and a token.
pub fn prepare(store: &str) -> String {
    let place = directory();
    run_ok(
        place.path(),
        &["token", "create", "faults", "--store", store],
    )
}

/// A load that runs until it is stopped; loads with the same number race for the same ids.
pub fn load(number: usize, first_client: u64, seed: u64) -> Load {
    Load {
        clients: 4,
        plants: 900_000,
        first_id: i64::try_from(number).expect("small") * 1_000_000_000,
        first_client,
        seed,
        ..Load::default()
    }
}

/// A load on each of two nodes, which race for the same ids.
fn load_both(nodes: &[Node; 2], number: usize, random: &mut Random) -> [Running; 2] {
    let [one, two] = nodes;
    [(one, 0), (two, 100)]
        .map(|(node, first_client)| node.load(load(number, first_client, random.next())))
}

/// Waits until each node has acknowledged this many plants since then.
fn wait_until_acknowledged(loads: &[Running], plants: usize, since: Instant) {
    wait_until("both nodes acknowledge again", || {
        let count = |load: &Running| load.stored().iter().filter(|at| **at > since).count();
        loads.iter().all(|load| count(load) >= plants)
    });
}

fn stop_all(loads: impl IntoIterator<Item = Running>) -> History {
    let mut all = History::default();
    for load in loads {
        all.append(load.stop());
    }
    all
}

/// Appends a run to the history of this database, checks the database, and sends plants with an unknown outcome again.
fn settle(database: &str, server: &Server, run: History, all: &mut History) -> Vec<String> {
    let unknown = run.unknown().cloned().collect();
    all.append(run);
    let mut wrong = violations(database, all);
    wrong.extend(send_again(server, unknown, all));
    if wrong.is_empty() {
        wrong = violations(database, all);
    }
    wrong
}

fn violations(database: &str, history: &History) -> Vec<String> {
    history.violations_at(database, i64::MIN..=i64::MAX)
}

/// The longest time without a 200 after a failure, from the times of all 200s.
pub fn longest_gap(times: Vec<Instant>, failed_at: Instant) -> Duration {
    let (start, end) = ends_of_longest_gap(times, failed_at);
    end - start
}

/// The time from a failure to the next 200: to the end of the longest time without one, because responses that were sent before
/// the failure arrive after it.
fn end_of_longest_gap(times: Vec<Instant>, failed_at: Instant) -> Duration {
    let (_, end) = ends_of_longest_gap(times, failed_at);
    end - failed_at
}

fn ends_of_longest_gap(mut times: Vec<Instant>, failed_at: Instant) -> (Instant, Instant) {
    times.push(failed_at);
    times.sort();
    let gaps = times.windows(2).map(|pair| (pair[0], pair[1]));
    let gaps = gaps.filter(|(start, _)| *start >= failed_at);
    let longest = gaps.max_by_key(|(start, end)| *end - *start);
    longest.expect("a 200 after the failure")
}

pub fn maximum(seconds: &[f64]) -> f64 {
    seconds.iter().copied().fold(f64::NAN, f64::max)
}

pub fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds.get(seconds.len() / 2).copied().unwrap_or(f64::NAN)
}
