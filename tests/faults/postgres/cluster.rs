//! Temporary PostgreSQL servers from Debian's packages, unprivileged and on ports of 127.0.0.1. They are killed when dropped.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, geteuid, kill_process};
use tempfile::TempDir;
use tokio::time::timeout;
use tokio_postgres::SimpleQueryMessage;

use crate::harness::postgres::with_client;
use crate::harness::{HANG, PATIENCE, directory, output, wait_until};
use crate::process::{Process, children, finish, is_alive, unprivileged};

/// Small memory and short timeouts; settings that affect durability keep their defaults.
const SETTINGS: [&str; 9] = [
    "listen_addresses=127.0.0.1",
    "unix_socket_directories=",
    "shared_buffers=16MB",
    "max_connections=100",
    // A killed server leaves no files outside its directory.
    "dynamic_shared_memory_type=mmap",
    "deadlock_timeout=20ms",
    // A standby that was stopped finds all WAL that it has missed.
    "wal_keep_size=512MB",
    "wal_retrieve_retry_interval=100ms",
    "log_min_messages=warning",
];

pub struct Postgres {
    process: Process,
    port: u16,
    directory: PathBuf,
    place: Option<TempDir>,
}

impl Postgres {
    /// A new server with the database `plants`.
    pub fn start_new() -> Self {
        let mut server = Self::new(free_port());
        // Only processes are killed here, so the files of the empty database need no sync.
        let options = ["--no-sync", "--username=postgres", "--auth=trust"];
        let mut initdb = server.command("initdb");
        initdb.args(options).args(["--encoding=UTF8", "-D", "data"]);
        finish(&mut initdb);
        server.start();
        server.run("CREATE DATABASE plants", "postgres");
        server
    }

    /// A streaming standby of this server.
    pub fn start_standby(primary: &Self, port: u16) -> Self {
        let mut server = Self::new(port);
        let mut copy = server.command("pg_basebackup");
        let from = format!("host=127.0.0.1 port={} user=postgres", primary.port);
        copy.args(["-D", "data", "-R", "--checkpoint=fast", "--no-sync", "-d"])
            .arg(from);
        finish(&mut copy);
        server.start();
        server
    }

    /// On the files in `data` of this directory.
    pub fn start_in(directory: &Path) -> Self {
        let mut server = Self::new_in(directory, free_port());
        server.start();
        server
    }

    fn new(port: u16) -> Self {
        let place = scratch();
        let mut server = Self::new_in(place.path(), port);
        server.place = Some(place);
        server
    }

    fn new_in(directory: &Path, port: u16) -> Self {
        let port_argument = port.to_string();
        let mut arguments = vec!["-D", "data", "-p", &port_argument];
        arguments.extend(SETTINGS.iter().flat_map(|setting| ["-c", setting]));
        // An immediate shutdown ends its backends and removes its shared memory.
        let process = Process::new(programs().join("postgres"), &arguments, directory)
            .with_orphan_signal("QUIT");
        Self {
            process,
            port,
            directory: directory.to_owned(),
            place: None,
        }
    }

    fn command(&self, program: &str) -> Command {
        unprivileged(&programs().join(program), &self.directory)
    }

    /// Starts the server, and waits until it accepts connections.
    pub fn start(&mut self) {
        self.process.start();
        let port = self.port.to_string();
        wait_until("PostgreSQL takes connections", || {
            self.process.assert_runs();
            let mut ask = self.command("pg_isready");
            let ask = ask.args(["--quiet", "--host=127.0.0.1", "--port", &port]);
            output(ask).status.success()
        });
    }

    /// Kills the server and all its backends at once, as if the machine failed.
    pub fn kill(&mut self) {
        if let Some(postmaster) = self.process.pid() {
            kill_with_backends(postmaster);
        }
        self.process.kill();
    }

    /// Stops the server cleanly.
    pub fn stop(&mut self) {
        self.process.stop(Signal::INT);
    }

    /// The URL of the database `plants`.
    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/plants", self.port)
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Runs SQL in the database `plants`.
    pub fn sql(&self, sql: &str) {
        self.run(sql, "plants");
    }

    /// Queries the database `plants`; returns the first column of the first row.
    pub fn ask(&self, sql: &str) -> Option<String> {
        self.run(sql, "plants")
    }

    fn run(&self, sql: &str, database: &str) -> Option<String> {
        let responses = self.try_run(sql, database);
        let responses = responses.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
        responses.iter().find_map(|response| match response {
            SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
            _ => None,
        })
    }

    /// Runs SQL that may fail.
    pub fn try_run(
        &self,
        sql: &str,
        database: &str,
    ) -> Result<Vec<SimpleQueryMessage>, tokio_postgres::Error> {
        let url = format!("postgres://postgres@127.0.0.1:{}/{database}", self.port);
        let responses = with_client(&url, async |client| {
            timeout(PATIENCE, client.simple_query(sql)).await
        });
        responses.unwrap_or_else(|_| panic!("{HANG}: {sql}"))
    }

    /// Promotes a standby.
    pub fn promote(&self) {
        let mut promote = self.command("pg_ctl");
        finish(promote.args(["promote", "-D", "data", "--timeout=30"]));
    }

    /// Turns synchronous replication on or off.
    pub fn wait_for_standby(&self, wait: bool) {
        let names = if wait { "*" } else { "" };
        self.sql(&format!(
            "ALTER SYSTEM SET synchronous_standby_names = '{names}'"
        ));
        self.sql("SELECT pg_reload_conf()");
    }

    /// Whether a standby is connected and has replayed everything.
    pub fn has_synchronous_standby(&self) -> bool {
        let sql = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync' AND state = 'streaming'";
        self.ask(sql).as_deref() == Some("1")
    }

    pub fn log(&self) -> String {
        self.process.log()
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        self.kill();
        remove_shared_memory(&self.directory.join("data"));
    }
}

/// Removes the shared memory segment of a killed server: the seventh line of its `postmaster.pid`.
pub fn remove_shared_memory(data: &Path) {
    let file = fs::read_to_string(data.join("postmaster.pid")).unwrap_or_default();
    let memory = file
        .lines()
        .nth(6)
        .and_then(|line| line.split_whitespace().nth(1));
    if let Some(memory) = memory {
        let _ = output(Command::new("ipcrm").args(["-m", memory]));
    }
}

/// A temporary directory for unprivileged programs, in memory if there is room: only processes are killed here, which lose nothing that is written to a
/// file system. On a slow disk, creating servers would take most of the time.
pub fn scratch() -> TempDir {
    let memory = "/dev/shm";
    let free = output(Command::new("df").args(["--output=avail", "-BM", memory]));
    let mebibytes = String::from_utf8_lossy(&free.stdout)
        .lines()
        .nth(1)
        .and_then(|free| free.trim().trim_end_matches('M').parse().ok());
    let place = if mebibytes.is_some_and(|free: u64| free >= 4096) {
        tempfile::tempdir_in(memory).expect("a directory")
    } else {
        directory()
    };
    if geteuid().is_root() {
        finish(
            Command::new("chown")
                .arg("nobody:nogroup")
                .arg(place.path()),
        );
    }
    place
}

/// A free port below the ephemeral range, so that no client connection takes it while the server restarts. Each process
/// uses its own hundred ports, so that two suites can run at the same time.
pub fn free_port() -> u16 {
    static HUNDRED: LazyLock<(u16, TcpListener)> = LazyLock::new(own_hundred_ports);
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let (first, _) = &*HUNDRED;
    let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    (1..100)
        .map(|_| first + 1 + NEXT.fetch_add(1, Ordering::Relaxed) % 99)
        .find(is_free)
        .expect("a free port")
}

/// The first of a hundred ports that no other suite uses. It is bound for as long as this one runs, which shows that to the others.
fn own_hundred_ports() -> (u16, TcpListener) {
    let hundreds = (20_000..32_000).step_by(100);
    let bound = |first| Some((first, TcpListener::bind(("127.0.0.1", first)).ok()?));
    hundreds.into_iter().find_map(bound).expect("free ports")
}

/// The programs of the newest installed version.
pub fn programs() -> PathBuf {
    let versions =
        fs::read_dir("/usr/lib/postgresql").expect("PostgreSQL is installed: make setup");
    let programs = versions.map(|version| version.expect("an entry").path().join("bin"));
    let installed = programs.filter(|programs| programs.join("initdb").exists());
    installed
        .max()
        .expect("PostgreSQL is installed: make setup")
}

/// Kills a postmaster and all its backends at once, and waits until they have ended.
pub fn kill_with_backends(postmaster: Pid) {
    // Every backend has its own process group. A stopped postmaster starts no more of them.
    let _ = kill_process(postmaster, Signal::STOP);
    let mut processes = children(postmaster);
    processes.push(postmaster);
    for process in &processes {
        let _ = kill_process(*process, Signal::KILL);
    }
    let end = Instant::now() + PATIENCE;
    while processes.iter().any(|process| is_alive(*process)) && Instant::now() < end {
        thread::sleep(Duration::from_millis(1));
    }
}
