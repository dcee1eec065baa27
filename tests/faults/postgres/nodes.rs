//! Nodes that stop while others serve: killed, or restarted in turn behind a load balancer.

use std::fmt::Write as _;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use crate::checker::{History, Outcome};
use crate::harness::transport::{Transport, certificate, transport};
use crate::harness::{Client, PATIENCE, directory, wait_until};
use crate::load::Load;
use crate::postgres::cluster::free_port;
use crate::postgres::database::Database;
use crate::postgres::{Node, load, prepare, settle};
use crate::process::Process;
use crate::random::Random;
use crate::report::{Progress, Report};

/// One of two nodes is killed under load; its plants with an unknown outcome are sent to the other.
pub fn killed(seed: u64, runs: usize, progress: &Progress) -> Report {
    let mut report = Report::new(
        "node killed",
        "kill -9 of one of two nodes under load, its plants sent to the other",
    );
    let mut random = Random::new(seed);
    let database = Database::new();
    let token = prepare(&database.url());
    let mut nodes = [(); 2].map(|()| Node::start(&database.url(), &token, &[]));
    let mut all = History::default();
    for number in 0..runs {
        let (one, two) = (random.next(), random.next());
        let [to_one, to_two] = [
            nodes[0].load(load(number, 0, one)),
            nodes[1].load(load(number, 100, two)),
        ];
        thread::sleep(Duration::from_micros(50_000 + random.below(200_000)));
        let (victim, other) = (number % 2, 1 - number % 2);
        nodes[victim].server.kill();
        let (of_victim, of_other) = if victim == 0 {
            (to_one, to_two)
        } else {
            (to_two, to_one)
        };
        let mut run = of_victim.finish();
        let stored = of_other.stored().len();
        wait_until("the other goes on", || of_other.stored().len() > stored);
        let undisturbed = of_other.stop();
        let mut wrong = Vec::new();
        if undisturbed.unknown().next().is_some() {
            wrong.push("wrong: the other node did not respond to every request".to_owned());
        }
        run.append(undisturbed);
        let acknowledged = run.acknowledged().count();
        wrong.extend(settle(&database.url(), &nodes[other].server, run, &mut all));
        report.add(1, acknowledged, wrong);
        nodes[victim].start_again();
        progress.step();
    }
    report
}

/// Three nodes behind a load balancer are restarted in turn.
pub fn rolling(seed: u64, runs: usize, progress: &Progress) -> Report {
    let mut report = Report::new(
        "rolling restart",
        "three nodes behind HAProxy under load, SIGTERM to each in turn",
    );
    let mut random = Random::new(seed);
    let database = Database::new();
    let token = prepare(&database.url());
    let mut nodes = [(); 3].map(|()| Node::start(&database.url(), &token, &[]));
    let place = directory();
    let balancer = Balancer::start(&nodes, place.path());
    let mut all = History::default();
    let (mut retries, mut attempts) = (0, 0);
    for number in 0..runs {
        let load = Load {
            balanced: true,
            ..load(number, 0, random.next())
        };
        let running = load.start(balancer.address, &nodes[0].server.token());
        let mut wrong = Vec::new();
        for (at, node) in nodes.iter_mut().enumerate() {
            thread::sleep(Duration::from_micros(random.below(100_000)));
            let code = node.server.terminate().code();
            if code != Some(0) {
                wrong.push(format!("wrong: exit code {code:?}"));
            }
            node.start_again();
            wait_until("it is given requests", || balancer.is_up(at));
        }
        let run = running.stop();
        let acknowledged = run.acknowledged().count();
        attempts += run.attempts().count();
        retries += run.unknown().count() + run.count(Outcome::Busy);
        wrong.extend(settle(&database.url(), &nodes[0].server, run, &mut all));
        report.add(1, acknowledged, wrong);
        progress.step();
    }
    report.note = format!("{retries} of {attempts} requests had to be retried");
    report
}

/// The options of a node that HAProxy reaches over TLS.
fn tls(protocol: &str) -> String {
    let certificate = certificate().cert.display();
    format!(" ssl verify required ca-file {certificate} alpn {protocol} check-alpn {protocol}")
}

/// HAProxy with health checks on `/readyz`, which redispatches a request if it cannot connect.
pub struct Balancer {
    pub address: SocketAddr,
    statistics: SocketAddr,
    process: Process,
    nodes: usize,
    directory: PathBuf,
}

/// Starts HAProxy, which reads the certificate of the nodes.
fn haproxy(directory: &Path, more: &[&str]) -> Process {
    let arguments = [&["-db", "-f", "haproxy.cfg"], more].concat();
    let mut haproxy = Process::new("haproxy", &arguments, directory).privileged();
    haproxy.start();
    haproxy
}

impl Balancer {
    fn start(nodes: &[Node], directory: &Path) -> Self {
        let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let mut configuration = format!(
            "defaults
  mode http
  timeout connect 2s
  timeout check 10s
  timeout client 60s
  timeout server 60s
  retries 3
  option redispatch 1
frontend public
  bind {address}
  default_backend nodes
backend nodes
  balance roundrobin
  option httpchk
  http-check send meth GET uri /openapi.yaml ver HTTP/1.1 hdr host nodes
  default-server check inter 50ms fall 1 rise 1
"
        );
        let tls = match transport() {
            Transport::Plain => String::new(),
            Transport::Tls => tls("http/1.1"),
            Transport::Http2 => tls("h2"),
        };
        for (number, node) in (1..).zip(nodes) {
            let address = node.address;
            writeln!(configuration, "  server node{number} {address}{tls}")
                .expect("it is a string");
        }
        Self::with(&configuration, address, nodes.len(), directory)
    }

    /// With a configuration whose backend `nodes` has the servers `node1`, `node2` … Its files are in this directory.
    pub fn with(configuration: &str, address: SocketAddr, nodes: usize, directory: &Path) -> Self {
        let statistics = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let configuration = format!(
            "{configuration}
frontend statistics
  bind {statistics}
  stats enable
  stats uri /
"
        );
        fs::write(directory.join("haproxy.cfg"), configuration).expect("a file");
        let balancer = Self {
            address,
            statistics,
            process: haproxy(directory, &[]),
            nodes,
            directory: directory.to_owned(),
        };
        balancer.wait_until_all_are_up();
        balancer
    }

    /// As `systemctl reload haproxy` does it: a new process takes over the ports, and the old one ends when it has forwarded the
    /// responses that it waits for.
    pub fn reload(&mut self) {
        let pid = self.process.pid().expect("it runs").as_raw_nonzero();
        let new = haproxy(&self.directory, &["-sf", &pid.to_string()]);
        let mut old = std::mem::replace(&mut self.process, new);
        old.wait_for_exit();
        self.wait_until_all_are_up();
    }

    pub fn wait_until_all_are_up(&self) {
        wait_until("HAProxy gives requests to all nodes", || {
            self.process.assert_runs();
            (0..self.nodes).all(|at| self.is_up(at))
        });
    }

    /// Whether the health check of this node passes again.
    pub fn is_up(&self, at: usize) -> bool {
        // As CSV, one line per server.
        let all = Client::get(self.statistics, "/;csv;norefresh", PATIENCE).unwrap_or_default();
        let its_line = all
            .lines()
            .find_map(|line| line.strip_prefix(&format!("nodes,node{},", at + 1)));
        its_line.is_some_and(|line| line.split(',').nth(15) == Some("UP"))
    }

    /// The end of its log: which nodes were up and down.
    pub fn last_lines(&self) -> String {
        self.process.last_lines(8)
    }
}
