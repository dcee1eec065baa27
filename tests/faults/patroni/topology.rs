//! The topology of the guide: three machines, two Plant Store nodes and HAProxy. One node connects to PostgreSQL, the other one to
//! PgBouncer.

use std::fmt::Write as _;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::process::Pid;
use serde_json::Value;

use crate::harness::postgres::with_client;
use crate::harness::{Client, output, replace, wait_until};
use crate::patroni::machine::{
    Machine, PASSWORD, Ports, RESPONSE_TIMEOUT, ROLE, Routes, installed,
};
use crate::patroni::network::Network;
use crate::postgres::cluster::free_port;
use crate::postgres::nodes::Balancer;
use crate::postgres::{Node, prepare};
use crate::process::{finish, unprivileged};

const HAPROXY: &str = include_str!("../../../deploy/ha/haproxy.cfg");

/// The index of the last node, which is the one that uses PgBouncer.
pub const NODE_OF_PGBOUNCER: usize = 1;

/// How often something is tried again because the leader has changed meanwhile, which a slow machine can cause at any time.
const ATTEMPTS_MAX: usize = 10;

/// The index of the machine with each role.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Roles {
    pub leader: usize,
    /// The standby that commits wait for.
    pub synchronous: usize,
    pub other: usize,
}

pub struct Topology {
    // Dropped in this order.
    pub balancer: Balancer,
    pub nodes: Vec<Node>,
    pub machines: Vec<Machine>,
    routes: Vec<Routes>,
    pub network: Arc<Network>,
    /// How many runs there were: each has its own ids.
    pub runs: usize,
}

impl Topology {
    /// Its files are in this directory.
    pub fn start(place: &Path) -> Self {
        let ports = [(); 3].map(|()| Ports::new());
        let directories = [1, 2, 3].map(|number| place.join(format!("pg{number}")));
        let make = |directory: &PathBuf| {
            finish(unprivileged(Path::new("mkdir"), place).arg(directory));
        };
        directories.iter().for_each(make);
        let network = Arc::new(Network::new(&directories));
        let routes: Vec<_> = (0..)
            .zip(&ports)
            .map(|(at, ports)| Routes::new(&network, at, ports))
            .collect();
        let mut machines: Vec<_> = (0..)
            .zip(directories)
            .map(|(at, directory)| Machine::new(at, directory, &ports, &routes))
            .collect();
        for machine in &mut machines {
            machine.etcd.start();
        }
        machines.iter_mut().for_each(Machine::start_others);
        let roles = wait_for_roles(&machines);
        let url = superuser(&machines[roles.leader], "postgres");
        with_client(&url, async |client| {
            let role = format!("CREATE ROLE {ROLE} LOGIN PASSWORD '{PASSWORD}'");
            client.batch_execute(&role).await.expect("a role");
            let database = format!("CREATE DATABASE plants OWNER {ROLE}");
            client.batch_execute(&database).await.expect("a database");
        });
        let stores = stores(&machines, &routes, 0);
        let token = prepare(&stores[0]);
        // As in the guide: this is not run as root.
        let (comment, global) = HAPROXY.split_once("global\n").expect("a section");
        let (_, others) = global.split_once("\n\n").expect("more sections");
        let mut configuration = [comment, others].concat();
        let mut nodes = Vec::new();
        for (number, store) in (1..).zip(stores) {
            let ops = free_port();
            let ops_address = format!("127.0.0.1:{ops}");
            let node = Node::start(&store, &token, &["--ops-listen", &ops_address]);
            configuration = replace(
                &configuration,
                &format!("10.0.0.1{number}:8080 check port 9090"),
                &format!("{} check port {ops}", node.address),
            );
            nodes.push(node);
        }
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()));
        let bind = format!("bind {address}");
        configuration = replace(&configuration, "bind 10.0.0.20:8080", &bind);
        let balancer = Balancer::with(&configuration, address, nodes.len(), place);
        Self {
            balancer,
            nodes,
            machines,
            routes,
            network,
            runs: 0,
        }
    }

    /// Restarts the nodes with URLs in which this machine is the first host.
    pub fn list_first(&mut self, machine: usize) {
        for (at, store) in stores(&self.machines, &self.routes, machine)
            .into_iter()
            .enumerate()
        {
            self.nodes[at].use_store(&store);
            self.restart_node(at);
        }
    }

    /// Stops a node with SIGTERM and starts it again.
    pub fn restart_node(&mut self, at: usize) {
        let node = &mut self.nodes[at];
        let status = node.server.terminate();
        assert!(status.success(), "node {at}: {status}");
        node.start_again();
        wait_until("the node gets requests", || self.balancer.is_up(at));
    }

    /// Waits until there is a leader with a synchronous and another standby, and all machines run.
    pub fn wait_until_healthy(&self) -> Roles {
        wait_for_roles(&self.machines)
    }

    /// Calls a function with the URL of the database on the leader; again, if another machine was the leader afterwards.
    pub fn at_leader<T>(&self, mut work: impl FnMut(&str) -> T) -> T {
        for _ in 0..ATTEMPTS_MAX {
            let Roles { leader, .. } = self.wait_until_healthy();
            let done = work(&superuser(&self.machines[leader], "plants"));
            if self.wait_until_healthy().leader == leader {
                return done;
            }
        }
        panic!("the leader changes all the time");
    }

    /// The PostgreSQL server of each machine; all of them run.
    pub fn postmasters(&self) -> Vec<Pid> {
        let machines = self.machines.iter();
        machines
            .map(|machine| machine.postmaster().expect("PostgreSQL runs"))
            .collect()
    }

    /// Waits until a machine other than this one is the leader and has been promoted: until then its commits go to the old one.
    pub fn wait_for_other_leader(&self, than: usize) {
        wait_until("another machine is the leader", || {
            self.machines.iter().for_each(Machine::assert_runs);
            let mut others = (0..self.machines.len()).filter(|at| *at != than);
            others.any(|at| is_primary(&self.machines[at]))
        });
    }

    /// Waits until this standby receives nothing any more, and commits wait for the other one.
    pub fn wait_for_other_standby(&self, than: usize) {
        let lost = format!("pg{}", than + 1);
        wait_until("only the other standby follows the leader", || {
            self.machines.iter().for_each(Machine::assert_runs);
            let mut others = (0..self.machines.len()).filter(|at| *at != than);
            others.any(|at| {
                let standbys = standbys(&self.machines[at]).unwrap_or_default();
                !standbys
                    .iter()
                    .any(|standby| standby["application_name"] == lost.as_str())
                    && standbys.iter().any(is_synchronous)
            })
        });
    }

    /// As the guide does it; returns the old leader. Patroni rejects it if the roles have changed since they were read.
    pub fn switch_over(&self) -> usize {
        let mut printed = String::new();
        for _ in 0..ATTEMPTS_MAX {
            let roles = self.wait_until_healthy();
            let machine = &self.machines[roles.leader];
            let mut command = unprivileged(&installed("patronictl"), &machine.directory);
            command.envs(machine.patroni.variables());
            let name = |at: usize| format!("pg{}", at + 1);
            command.args(["-c", "patroni.yml", "switchover", "plants", "--force"]);
            command.args(["--leader", &name(roles.leader)]);
            command.args(["--candidate", &name(roles.synchronous)]);
            let output = output(&mut command);
            if output.status.success() {
                return roles.leader;
            }
            printed = [output.stdout, output.stderr]
                .map(|text| String::from_utf8_lossy(&text).into_owned())
                .concat();
        }
        panic!("patronictl switchover: {printed}");
    }

    /// What Patroni reports, for the report of a failure.
    pub fn state(&self) -> String {
        let mut text = String::new();
        for (at, machine) in self.machines.iter().enumerate() {
            let cluster = cluster(machine).map_or_else(String::new, |cluster| cluster.to_string());
            let lines = machine.last_lines();
            write!(text, "\n  pg{}: {cluster}\n    {lines}", at + 1).expect("it is a string");
        }
        let lines = self.balancer.last_lines();
        write!(text, "\n  HAProxy:\n    {lines}").expect("it is a string");
        text
    }

    /// Writes the logs of the nodes to files; those of the other programs are there already.
    pub fn write_logs(&self, place: &Path) {
        for (number, node) in (1..).zip(&self.nodes) {
            let file = place.join(format!("node{number}.log"));
            fs::write(file, node.log()).expect("a file");
        }
    }
}

impl Drop for Topology {
    fn drop(&mut self) {
        self.network.end();
    }
}

fn superuser(machine: &Machine, database: &str) -> String {
    let port = machine.ports.postgres;
    format!("postgres://postgres:change-me-1@127.0.0.1:{port}/{database}")
}

/// The store URLs of the two nodes: to PostgreSQL and to PgBouncer, with all hosts, this machine first.
fn stores(machines: &[Machine], routes: &[Routes], first: usize) -> [String; 2] {
    let order = || (0..machines.len()).map(move |at| (first + at) % machines.len());
    [
        store(order().map(|at| routes[at].postgres.address.port())),
        store(order().map(|at| machines[at].ports.pgbouncer)),
    ]
}

fn store(ports: impl Iterator<Item = u16>) -> String {
    let hosts: Vec<_> = ports.map(|port| format!("127.0.0.1:{port}")).collect();
    format!("postgres://{ROLE}:{PASSWORD}@{}/plants", hosts.join(","))
}

fn wait_for_roles(machines: &[Machine]) -> Roles {
    let mut roles = None;
    wait_until("all machines follow one leader", || {
        machines.iter().for_each(Machine::assert_runs);
        roles = roles_in(machines);
        roles.is_some()
    });
    roles.expect("just seen")
}

/// The roles, if two standbys follow a leader and commits wait for one of them.
fn roles_in(machines: &[Machine]) -> Option<Roles> {
    // A machine that is not the leader shows whether the others see the same.
    let clusters: Option<Vec<_>> = machines.iter().map(cluster).collect();
    let clusters = clusters?;
    let leader = with_role(&clusters[0], "leader")?;
    let synchronous = with_role(&clusters[0], "sync_standby")?;
    let other = (0..machines.len()).find(|at| ![leader, synchronous].contains(at))?;
    let is_complete = |cluster: &Value| {
        let members = cluster["members"].as_array();
        let members = members.map(Vec::as_slice).unwrap_or_default();
        let timeline = |member: &Value| member["timeline"].as_u64();
        with_role(cluster, "leader") == Some(leader)
            && with_role(cluster, "sync_standby") == Some(synchronous)
            && members.len() == machines.len()
            && members.iter().all(|member| {
                ["running", "streaming"].contains(&member["state"].as_str().unwrap_or_default())
                    && timeline(member).is_some()
                    && timeline(member) == timeline(&members[0])
            })
    };
    let standbys = standbys(&machines[leader])?;
    let are_streaming = standbys.len() == machines.len() - 1
        && standbys
            .iter()
            .all(|standby| standby["state"] == "streaming")
        && standbys.iter().any(is_synchronous);
    (are_streaming && clusters.iter().all(is_complete)).then_some(Roles {
        leader,
        synchronous,
        other,
    })
}

/// The standbys that receive WAL from this machine; none if its Patroni does not respond, or it is a standby.
fn standbys(machine: &Machine) -> Option<Vec<Value>> {
    let state: Value = serde_json::from_str(&ask(machine, "/patroni")?).ok()?;
    state["replication"].as_array().cloned()
}

fn is_synchronous(standby: &Value) -> bool {
    standby["sync_state"] == "sync"
}

/// What Patroni of this machine says about all of them; none if it does not respond.
fn cluster(machine: &Machine) -> Option<Value> {
    serde_json::from_str(&ask(machine, "/cluster")?).ok()
}

/// The index of the machine that has this role.
fn with_role(cluster: &Value, role: &str) -> Option<usize> {
    let mut members = cluster["members"].as_array()?.iter();
    let member = members.find(|member| member["role"] == role)?;
    let number: usize = member["name"].as_str()?.strip_prefix("pg")?.parse().ok()?;
    Some(number - 1)
}

/// Whether PostgreSQL of this machine is a primary. `/primary` of Patroni would tell whether it has the lock, which it gets before
/// it promotes PostgreSQL.
fn is_primary(machine: &Machine) -> bool {
    let state = ask(machine, "/patroni").and_then(|body| serde_json::from_str::<Value>(&body).ok());
    state.is_some_and(|state| state["role"] == "primary")
}

/// The body of a response of Patroni.
fn ask(machine: &Machine, path: &str) -> Option<String> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, machine.ports.rest));
    Client::get(address, path, RESPONSE_TIMEOUT)
}
