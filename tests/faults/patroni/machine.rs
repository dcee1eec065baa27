//! One of three machines: etcd, Patroni with its PostgreSQL, and PgBouncer, with the files of `deploy/ha`.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::harness::tcp_proxy::TcpProxy;
use crate::harness::{Client, replace, wait_until};
use crate::patroni::network::Network;
use crate::postgres::cluster::{free_port, kill_with_backends, programs, remove_shared_memory};
use crate::process::{Process, children, finish, is_alive, unprivileged};

const ETCD: &str = include_str!("../../../deploy/ha/etcd.env");
const PATRONI: &str = include_str!("../../../deploy/ha/patroni.yml");
const PATRONI_VARIABLES: &str = include_str!("../../../deploy/ha/patroni.env");
const PGBOUNCER: &str = include_str!("../../../deploy/ha/pgbouncer.ini");

/// Patroni replaces a leader that it has not heard of for this long. It accepts no smaller value.
pub const TTL: Duration = Duration::from_secs(20);

/// What the suite changes in `patroni.yml`: the time until a failover, to what the guide recommends for one data center, less disk
/// space, and no files outside its directory that a killed server would leave.
const PATRONI_CHANGES: [(&str, &str); 5] = [
    ("    ttl: 30\n", "    ttl: 20\n"),
    ("    loop_wait: 10\n", "    loop_wait: 5\n"),
    ("    retry_timeout: 10\n", "    retry_timeout: 5\n"),
    ("wal_keep_size: 1GB", "wal_keep_size: 256MB"),
    (
        "    unix_socket_directories: \"\"\n",
        "    unix_socket_directories: \"\"\n    dynamic_shared_memory_type: mmap\n",
    ),
];

/// A machine that is paused accepts connections and does not respond.
pub const RESPONSE_TIMEOUT: Duration = Duration::from_secs(2);

/// The role of the Plant Store nodes.
pub const ROLE: &str = "plantstore_node";
pub const PASSWORD: &str = "secret";

/// The ports of a machine, on 127.0.0.1.
#[derive(Clone, Copy)]
pub struct Ports {
    etcd: u16,
    etcd_peer: u16,
    pub rest: u16,
    pub postgres: u16,
    pub pgbouncer: u16,
}

impl Ports {
    pub fn new() -> Self {
        Self {
            etcd: free_port(),
            etcd_peer: free_port(),
            rest: free_port(),
            postgres: free_port(),
            pgbouncer: free_port(),
        }
    }
}

/// What other machines use in place of the ports of a machine. The nodes use only that of PostgreSQL: when a machine is cut off, the
/// node that uses PgBouncer still reaches it.
pub struct Routes {
    etcd: TcpProxy,
    etcd_peer: TcpProxy,
    rest: TcpProxy,
    pub postgres: TcpProxy,
}

impl Routes {
    pub fn new(network: &Arc<Network>, machine: usize, ports: &Ports) -> Self {
        let route = |port| network.route(machine, port);
        Self {
            etcd: route(ports.etcd),
            etcd_peer: route(ports.etcd_peer),
            rest: route(ports.rest),
            postgres: route(ports.postgres),
        }
    }
}

pub struct Machine {
    pub ports: Ports,
    pub etcd: Process,
    pub patroni: Process,
    pub pgbouncer: Process,
    pub directory: PathBuf,
}

impl Machine {
    /// The machine with this index, in a directory of its own; nothing is started yet.
    pub fn new(at: usize, directory: PathBuf, all: &[Ports], routes: &[Routes]) -> Self {
        let (number, ports) = (at + 1, all[at]);
        let Routes {
            etcd,
            etcd_peer,
            rest,
            postgres,
        } = &routes[at];
        // As the guide does it, by the user that runs PostgreSQL.
        finish(unprivileged(Path::new("mkdir"), &directory).arg("archive"));
        let peers: Vec<_> = (1..)
            .zip(routes)
            .map(|(n, routes)| format!("etcd{n}=http://{}", routes.etcd_peer.address))
            .collect();
        let listen = |port: u16| format!("http://127.0.0.1:{port}");
        let advertised = |route: &TcpProxy| format!("http://{}", route.address);
        let hosts = routes.iter().map(|routes| routes.etcd.address.to_string());
        let etcd = variables(
            ETCD,
            &[
                ("ETCD_NAME", &format!("etcd{number}")),
                ("ETCD_DATA_DIR", "etcd"),
                ("ETCD_LISTEN_PEER_URLS", &listen(ports.etcd_peer)),
                ("ETCD_INITIAL_ADVERTISE_PEER_URLS", &advertised(etcd_peer)),
                ("ETCD_LISTEN_CLIENT_URLS", &listen(ports.etcd)),
                ("ETCD_ADVERTISE_CLIENT_URLS", &advertised(etcd)),
                ("ETCD_INITIAL_CLUSTER", &peers.join(",")),
            ],
        );
        let hosts = hosts.collect::<Vec<_>>().join(",");
        let on_port = |port: u16| format!("127.0.0.1:{port}");
        let data = directory.join("data");
        let patroni = variables(
            PATRONI_VARIABLES,
            &[
                ("PATRONI_NAME", &format!("pg{number}")),
                ("PATRONI_RESTAPI_LISTEN", &on_port(ports.rest)),
                ("PATRONI_RESTAPI_CONNECT_ADDRESS", &rest.address.to_string()),
                ("PATRONI_POSTGRESQL_LISTEN", &on_port(ports.postgres)),
                (
                    "PATRONI_POSTGRESQL_CONNECT_ADDRESS",
                    &postgres.address.to_string(),
                ),
                ("PATRONI_ETCD3_HOSTS", &hosts),
                ("PATRONI_POSTGRESQL_DATA_DIR", &data.display().to_string()),
                (
                    "PATRONI_POSTGRESQL_BIN_DIR",
                    &programs().display().to_string(),
                ),
                (
                    "PATRONI_POSTGRESQL_PGPASS",
                    &directory.join("pgpass").display().to_string(),
                ),
            ],
        );
        let write = |name: &str, text: String| {
            fs::write(directory.join(name), text).expect("a file");
        };
        let change = |text: String, (from, to): (&str, &str)| replace(&text, from, to);
        let patroni_yml = PATRONI_CHANGES.into_iter().fold(PATRONI.to_owned(), change);
        write("patroni.yml", patroni_yml);
        write("userlist.txt", format!("\"{ROLE}\" \"{PASSWORD}\"\n"));
        let changes = [
            ("=10.0.0.1 ", "=127.0.0.1 "),
            ("= 10.0.0.1\n", "= 127.0.0.1\n"),
            ("port=5432", &format!("port={}", ports.postgres)),
            (
                "listen_port = 6432",
                &format!("listen_port = {}", ports.pgbouncer),
            ),
            ("= /etc/pgbouncer/", "= "),
        ];
        let pgbouncer = changes.into_iter().fold(PGBOUNCER.to_owned(), change);
        write("pgbouncer.ini", pgbouncer);
        Self {
            etcd: Process::new("etcd", &[], &directory).with_variables(etcd),
            patroni: Process::new(installed("patroni"), &["patroni.yml"], &directory)
                .with_variables(patroni)
                // Ends its PostgreSQL.
                .with_orphan_signal("TERM"),
            pgbouncer: Process::new("pgbouncer", &["pgbouncer.ini"], &directory),
            ports,
            directory,
        }
    }

    pub fn start(&mut self) {
        self.etcd.start();
        self.start_others();
    }

    /// Starts everything but etcd, as in the guide: until that has decided on its version, Patroni would fail.
    pub fn start_others(&mut self) {
        let etcd = SocketAddr::from((Ipv4Addr::LOCALHOST, self.ports.etcd));
        wait_until("etcd has decided", || {
            self.etcd.assert_runs();
            let version = Client::get(etcd, "/version", RESPONSE_TIMEOUT).unwrap_or_default();
            version.contains("etcdcluster") && !version.contains("not_decided")
        });
        self.patroni.start();
        self.pgbouncer.start();
    }

    /// Kills everything at once, as if the machine failed.
    pub fn kill(&mut self) {
        self.patroni.signal(Signal::STOP); // does not start PostgreSQL again
        self.kill_postgres();
        self.patroni.kill();
        self.pgbouncer.kill();
        self.etcd.kill();
    }

    pub fn kill_postgres(&self) {
        if let Some(postmaster) = self.postmaster() {
            kill_with_backends(postmaster);
        }
    }

    /// Stops all processes where they are, but not etcd. The kernel would keep the connections of a stopped etcd open, which that of a
    /// machine that stops does not, and Patroni of another machine would wait at one of them for changes of the cluster.
    pub fn pause(&self) {
        self.patroni.signal(Signal::STOP);
        self.signal_postgres(Signal::STOP);
        self.pgbouncer.signal(Signal::STOP);
    }

    /// Patroni comes last: until then PostgreSQL serves as the leader that it was.
    pub fn resume(&self) {
        self.signal_postgres(Signal::CONT);
        self.pgbouncer.signal(Signal::CONT);
        self.patroni.signal(Signal::CONT);
    }

    /// Where PostgreSQL archives its WAL.
    pub fn archive(&self) -> PathBuf {
        self.directory.join("archive")
    }

    fn data(&self) -> PathBuf {
        self.directory.join("data")
    }

    /// Patroni's PostgreSQL is not a child of it, so its process is found by the file that it writes.
    pub fn postmaster(&self) -> Option<Pid> {
        // As in /proc: the directory of temporary files may be a symbolic link.
        let data = fs::canonicalize(self.data()).ok()?;
        let file = fs::read_to_string(self.data().join("postmaster.pid")).ok()?;
        let number = file.lines().next()?.trim().parse().ok()?;
        // The file of a killed server may name a process that is another one now.
        let is_its = fs::read_link(format!("/proc/{number}/cwd")).ok()? == data;
        Pid::from_raw(number).filter(|pid| is_its && is_alive(*pid))
    }

    fn signal_postgres(&self, signal: Signal) {
        let Some(postmaster) = self.postmaster() else {
            return;
        };
        let _ = kill_process(postmaster, signal);
        for backend in children(postmaster) {
            let _ = kill_process(backend, signal);
        }
    }

    /// Fails if a program has ended by itself.
    pub fn assert_runs(&self) {
        for process in [&self.etcd, &self.patroni, &self.pgbouncer] {
            process.assert_runs();
        }
    }

    /// The end of the logs, for the report of a failure. That of Patroni has what PostgreSQL logs.
    pub fn last_lines(&self) -> String {
        let logs = [(&self.patroni, 12), (&self.pgbouncer, 4), (&self.etcd, 4)];
        let logs = logs.map(|(process, count)| process.last_lines(count));
        logs.join("\n    ")
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.resume();
        self.kill();
        remove_shared_memory(&self.data());
    }
}

/// A program of the Python environment of the guide, which `scripts/install-patroni` makes.
pub fn installed(program: &str) -> PathBuf {
    Path::new("/opt/patroni/bin").join(program)
}

/// The variables of a file, some of them with other values.
fn variables(file: &str, changes: &[(&str, &str)]) -> Vec<(String, String)> {
    let lines = file.lines().filter_map(|line| line.split_once('='));
    let lines = lines.filter(|(name, _)| !name.starts_with('#'));
    let all = lines.chain(changes.iter().copied());
    all.map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}
