//! Faults of a PostgreSQL cluster under Patroni with etcd, as docs/patroni.md sets it up, and two Plant Store nodes behind HAProxy.

mod archive;
mod faults;
mod machine;
mod network;
mod topology;

use std::fmt;
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::checker::{History, Outcome, Sent};
use crate::harness::{Client, HANG, PATIENCE, directory, run_ok, wait_until};
use crate::load::{Load, body, outcome_of, send_again};
use crate::postgres::cluster::scratch;
use crate::postgres::{Node, load, longest_gap, maximum, median};
use crate::random::Random;
use crate::report::{Progress, Report, violation_of_panic};

use archive::{Backup, time_at, wait_until_archived};
pub use faults::{Fault, LEADER_FAILURES, OTHERS};
use topology::{Roles, Topology};

/// The ids of a run, below which those of its load and above which those of single plants are.
const IDS_PER_RUN: i64 = 1_000_000_000;
const FIRST_SINGLE_ID: i64 = 900_000_000;

/// The cluster, which all faults share. One that has not recovered from a fault is replaced.
#[derive(Default)]
pub struct Patroni {
    cluster: Option<Cluster>,
}

/// A cluster with its files, which are kept after a violation.
struct Cluster {
    // Dropped in this order.
    topology: Topology,
    place: TempDir,
}

/// What was measured in the runs of a fault.
#[derive(Default)]
struct Measured {
    /// The longest time without a 200.
    gaps: Vec<f64>,
    /// From the failure until both nodes have acknowledged.
    both: Vec<f64>,
    unknown: usize,
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "median {:.1} s, at most {:.1} s without a 200; both nodes after at most {:.1} s; {} unknown outcomes, all resolved by a retry",
            median(self.gaps.clone()),
            maximum(&self.gaps),
            maximum(&self.both),
            self.unknown,
        )
    }
}

impl Patroni {
    pub fn run(&mut self, fault: Fault, seed: u64, runs: usize, progress: &Progress) -> Report {
        let [_, name, method] = fault.names();
        let mut report = Report::new(name, method);
        let cluster = self.cluster.take();
        match cluster.map_or_else(Cluster::start, Ok) {
            Err(violation) => report.add(0, 0, vec![violation]),
            Ok(mut cluster) => {
                cluster.run(fault, seed, runs, progress, &mut report);
                if report.wrong.is_empty() {
                    self.cluster = Some(cluster);
                } else {
                    cluster.topology.write_logs(cluster.place.path());
                    drop(cluster.topology);
                    keep(cluster.place);
                }
            }
        }
        report
    }
}

/// Keeps a directory, to find the reason of a violation.
fn keep(place: TempDir) {
    println!("the files of the cluster are in {}", place.keep().display());
}

impl Cluster {
    fn start() -> Result<Self, String> {
        let place = scratch();
        let started = catch_unwind(|| Topology::start(place.path()));
        match started {
            Ok(topology) => Ok(Self { topology, place }),
            Err(panic) => {
                keep(place);
                Err(violation_of_panic(panic.as_ref()))
            }
        }
    }

    fn run(
        &mut self,
        fault: Fault,
        seed: u64,
        runs: usize,
        progress: &Progress,
        report: &mut Report,
    ) {
        let Self { topology, place } = self;
        let mut random = Random::new(seed);
        let mut all = History::default();
        let mut measured = Measured::default();
        let mut backup = None;
        // What the clients knew at a time between the first run and later adds.
        let mut earlier = None;
        let first = topology.runs;
        let wrong = without_panic(topology, |topology| {
            backup = Some(Backup::new(topology, place.path()));
            Vec::new()
        });
        report.add(0, 0, wrong);
        for number in 0..runs {
            if !report.wrong.is_empty() {
                return;
            }
            let mut history = History::default();
            let wrong = without_panic(topology, |topology| {
                let random = &mut random;
                let wrong = run(topology, fault, number, random, &mut history, &mut measured);
                if number == 0 {
                    earlier = Some((topology.at_leader(time_at), history.clone()));
                }
                wrong
            });
            report.add(1, history.acknowledged().count(), wrong);
            all.append(history);
            progress.step();
        }
        let Some(backup) = backup.filter(|_| report.wrong.is_empty()) else {
            return;
        };
        let wrong = without_panic(topology, |topology| {
            // A later failover must not have lost plants of an earlier run.
            let ids = first_id(first)..=first_id(topology.runs) - 1;
            let mut wrong = topology.at_leader(|database| {
                run_ok(directory().path(), &["check", "--store", database]);
                all.violations_at(database, ids.clone())
            });
            acknowledged_by(&topology.nodes, topology.runs - 1, 2, &mut all);
            wait_until_archived(topology);
            let (time, earlier) = earlier.expect("there was a run");
            for (time, history) in [(Some(time.as_str()), &earlier), (None, &all)] {
                let restored = backup.restore(time);
                let of_restored = history.violations_at(&restored.url(), ids.clone());
                let when = time.unwrap_or("the end");
                let with_time = |violation| format!("{violation} (after a restore to {when})");
                wrong.extend(of_restored.into_iter().map(with_time));
            }
            wrong
        });
        report.add(0, 0, wrong);
        if report.wrong.is_empty() {
            backup.delete();
            report.note = measured.to_string();
        }
    }
}

/// Runs a part of the suite; a panic is a violation, with the state of the cluster.
fn without_panic(
    topology: &mut Topology,
    part: impl FnOnce(&mut Topology) -> Vec<String>,
) -> Vec<String> {
    let done = catch_unwind(AssertUnwindSafe(|| part(topology)));
    done.unwrap_or_else(|panic| {
        let violation = violation_of_panic(panic.as_ref());
        vec![format!("{violation}{}", topology.state())]
    })
}

fn first_id(run: usize) -> i64 {
    i64::try_from(run).expect("small") * IDS_PER_RUN
}

/// Injects a fault under load and checks what is stored after it.
fn run(
    topology: &mut Topology,
    fault: Fault,
    number: usize,
    random: &mut Random,
    history: &mut History,
    measured: &mut Measured,
) -> Vec<String> {
    let run = topology.runs;
    topology.runs += 1;
    if fault.leaves_two_primaries() {
        let Roles { leader, .. } = topology.wait_until_healthy();
        // The worst case: a node that tries its hosts in order comes to the old leader first. In every third run it comes last.
        topology.list_first(leader + usize::from(number % 3 == 2));
    }
    topology.balancer.wait_until_all_are_up();
    let token = topology.nodes[0].server.token();
    let load = Load {
        balanced: true,
        is_redispatched: true,
        ..load(run, 0, random.next())
    };
    let running = load.start(topology.balancer.address, &token);
    wait_until("adds are acknowledged", || running.stored().len() > 10);
    thread::sleep(Duration::from_micros(50_000 + random.below(200_000)));

    let roles = topology.wait_until_healthy();
    let postmasters = topology.postmasters();
    let failed_at = Instant::now();
    let victims = fault.inject(topology, number, roles);
    fault.wait(topology, &victims);
    let in_service = fault.nodes_in_service(topology);
    let is_degraded = in_service.len() < topology.nodes.len();
    acknowledged_by(in_service, run, 0, history);
    let mut both = failed_at.elapsed();
    fault.heal(topology, &victims);
    topology.wait_until_healthy();
    fault.verify(topology, &victims, &postmasters);
    acknowledged_by(&topology.nodes, run, 1, history);
    if is_degraded {
        both = failed_at.elapsed();
    }
    measured.both.push(both.as_secs_f64());
    let healed_at = Instant::now();
    wait_until("HAProxy forwards a 200 again", || {
        running.stored().last().is_some_and(|at| *at > healed_at)
    });
    let gap = longest_gap(running.stored(), failed_at);
    measured.gaps.push(gap.as_secs_f64());
    history.append(running.stop());

    let unknown: Vec<_> = history.unknown().cloned().collect();
    measured.unknown += unknown.len();
    let ids = first_id(run)..=first_id(run + 1) - 1;
    let mut wrong = topology.at_leader(|database| history.violations_at(database, ids.clone()));
    let server = &topology.nodes[run % topology.nodes.len()].server;
    wrong.extend(send_again(server, unknown, history));
    if wrong.is_empty() {
        wrong = topology.at_leader(|database| history.violations_at(database, ids.clone()));
    }
    wrong
}

/// Waits until each of these nodes has acknowledged an add that was sent after this call.
fn acknowledged_by(nodes: &[Node], run: usize, phase: i64, history: &mut History) {
    thread::scope(|scope| {
        let nodes = (0..).zip(nodes);
        let waits: Vec<_> = nodes
            .map(|(at, node)| {
                let id = first_id(run) + FIRST_SINGLE_ID + phase * 10 + at;
                let plant = (id, format!("single {id}"), None);
                let (address, token) = (node.server.address(), node.server.token());
                scope.spawn(move || acknowledged(address, &token, &plant))
            })
            .collect();
        for wait in waits {
            let attempts = wait.join();
            history.append(attempts.unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
    });
}

/// Sends a plant to this node until it is acknowledged.
fn acknowledged(address: SocketAddr, token: &str, plant: &Sent) -> History {
    let mut history = History::default();
    let end = Instant::now() + PATIENCE;
    loop {
        let response = Client::connect(address).add(token, body(plant).as_bytes());
        let outcome = outcome_of(Some(&response));
        history.note(plant.clone(), outcome);
        if outcome == Outcome::Acknowledged {
            return history;
        }
        assert!(
            Instant::now() < end,
            "{HANG}: the node at {address} acknowledges an add; its last response: {response:?}"
        );
        thread::sleep(Duration::from_millis(20));
    }
}
