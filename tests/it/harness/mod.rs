//! Runs the real binary on a free port with a fresh store. Every wait has a timeout, and every process is stopped.

mod client;
pub mod clock;
pub mod http2;
pub mod postgres;
pub mod proxy;
pub mod tcp_proxy;
pub mod transport;

use std::fmt::Write as _;
use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rusqlite::{Connection, OpenFlags};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

pub use client::{Client, Response, add_request};
use transport::{Bridge, Transport, bridge, certificate, transport};

/// The timeout of every wait, far longer than anything takes: a backup has a low priority and takes minutes on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(300);

/// The panic message of a wait that timed out.
pub const HANG: &str = "timed out";

/// The environment variable that names another binary to test, such as one with deliberate breaks.
pub const BINARY_UNDER_TEST: &str = "BINARY_UNDER_TEST";

pub fn directory() -> TempDir {
    tempfile::tempdir().expect("a temporary directory")
}

pub fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}

/// The binary, without settings from the environment.
pub fn plantstore(directory: &Path) -> Command {
    let ours = env!("CARGO_BIN_EXE_plantstore").into();
    let mut command = Command::new(std::env::var_os(BINARY_UNDER_TEST).unwrap_or(ours));
    command.current_dir(directory).stdin(Stdio::null());
    let settings = std::env::vars_os().map(|(name, _)| name);
    for name in settings.filter(|name| name.to_string_lossy().starts_with("PLANTSTORE_")) {
        command.env_remove(name);
    }
    if let Some(store) = postgres::store(directory) {
        command.env("PLANTSTORE_STORE", store);
    }
    command.env("PLANTSTORE_OPS_LISTEN", "127.0.0.1:0");
    if transport() != Transport::Plain {
        command.env("PLANTSTORE_TLS_CERT", &certificate().cert);
        command.env("PLANTSTORE_TLS_KEY", &certificate().key);
    }
    command
}

/// For a command that runs the binary by another program, such as a shell.
pub fn copy_environment(from: &Command, to: &mut Command) {
    for (name, value) in from.get_envs() {
        match value {
            Some(value) => to.env(name, value),
            None => to.env_remove(name),
        };
    }
}

/// Runs a command and waits for it to exit.
pub fn run(directory: &Path, arguments: &[&str]) -> Output {
    let mut command = plantstore(directory);
    command.args(arguments);
    output(&mut command)
}

/// The output of a command, which has to exit in time. Its standard input is that of the tests unless it is set.
pub fn output(command: &mut Command) -> Output {
    output_within(PATIENCE, command)
}

/// The same with a timeout for a command that takes long.
pub fn output_within(limit: Duration, command: &mut Command) -> Output {
    let pipes = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let spawned = pipes.spawn();
    let child = spawned.unwrap_or_else(|error| panic!("{command:?}: {error}; `make setup`"));
    let pid = Pid::from_child(&child);
    let (sender, output) = channel();
    thread::spawn(move || sender.send(child.wait_with_output()));
    let Ok(output) = output.recv_timeout(limit) else {
        let _ = kill_process(pid, Signal::KILL);
        panic!("{HANG}: {command:?} ends");
    };
    output.expect("its output")
}

/// Runs a command that must succeed; returns its standard output.
pub fn run_ok(directory: &Path, arguments: &[&str]) -> String {
    let output = run(directory, arguments);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {errors}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// Replaces text that must be there, such as a value in a file of `deploy/`.
pub fn replace(text: &str, from: &str, to: &str) -> String {
    assert!(text.contains(from), "{from:?} in:\n{text}");
    text.replace(from, to)
}

/// Waits until a condition holds.
pub fn wait_until(what: &str, mut fact: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !fact() {
        assert!(Instant::now() < end, "{HANG}: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Waits for a process to exit.
pub fn wait_for_exit(child: &mut Child) -> ExitStatus {
    let mut status = None;
    wait_until("the process exits", || {
        status = child.try_wait().expect("a child");
        status.is_some()
    });
    status.expect("just seen")
}

/// The data directory: deleted with the server, or owned by the test.
enum DataDirectory {
    Own(TempDir),
    Given(PathBuf),
}

/// A running server.
pub struct Server {
    child: Child,
    address: SocketAddr,
    bridge: Option<Bridge>,
    ops_address: Option<SocketAddr>,
    directory: DataDirectory,
    lines: Receiver<String>,
    seen: Arc<Mutex<String>>,
}

impl Server {
    /// On a fresh store.
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// On a fresh store, with these arguments.
    pub fn start_with(arguments: &[&str]) -> Self {
        let directory = directory();
        let mut server = Self::start_in(directory.path(), arguments);
        server.directory = DataDirectory::Own(directory);
        server
    }

    /// On `plantstore.db` in this directory.
    pub fn start_in(directory: &Path, arguments: &[&str]) -> Self {
        let mut command = plantstore(directory);
        command
            .args(["serve", "--listen", "127.0.0.1:0"])
            .args(arguments);
        Self::start_command(command, directory)
    }

    /// With `--log-level warn`, so that the address is not logged and has to be chosen.
    pub fn start_with_quiet_log_in(directory: &Path) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = port.local_addr().expect("an address");
        drop(port);
        let mut command = plantstore(directory);
        command.args([
            "serve",
            "--log-level",
            "warn",
            "--listen",
            &address.to_string(),
        ]);
        let server = Self::spawn(command, directory, address);
        wait_until("it listens", || Client::try_connect(address).is_ok());
        server
    }

    /// Under `strace` with these options. (With `-D` the child process is the server, and `strace` is its grandchild.)
    pub fn start_under_strace(directory: &Path, strace: &[&str], arguments: &[&str]) -> Self {
        Self::start_command(
            Self::strace_command(directory, strace, arguments),
            directory,
        )
    }

    /// With a fault in its system calls: `fdatasync:error=EIO:when=6+`. strace counts calls per thread.
    pub fn start_with_fault(directory: &Path, fault: &str, arguments: &[&str]) -> Self {
        let call = fault.split(':').next().expect("a call");
        let trace = format!("trace=fsync,{call}");
        let inject = format!("inject={fault}");
        Self::start_under_strace(directory, &["-e", &trace, "-e", &inject], arguments)
    }

    /// The same for a server that may exit before it listens.
    pub fn try_start_under_strace(
        directory: &Path,
        strace: &[&str],
        arguments: &[&str],
    ) -> Option<Self> {
        let command = Self::strace_command(directory, strace, arguments);
        Self::try_start_command(command, directory).ok()
    }

    /// The command that runs the server under `strace`.
    pub fn strace_command(directory: &Path, strace: &[&str], arguments: &[&str]) -> Command {
        let plain = plantstore(directory);
        let mut command = Command::new("strace");
        copy_environment(&plain, &mut command);
        command
            .args(["-D", "-f", "-q", "-o", "strace.out"])
            .args(strace)
            .arg(plain.get_program())
            .args(["serve", "--listen", "127.0.0.1:0"])
            .args(arguments)
            .current_dir(directory)
            .stdin(Stdio::null());
        command
    }

    /// With this command, in this directory.
    pub fn start_command(command: Command, directory: &Path) -> Self {
        Self::try_start_command(command, directory).unwrap_or_else(|logged| {
            panic!("the server does not listen:\n{logged}");
        })
    }

    /// A server that listens, or the log of one that exits instead.
    pub fn try_start_command(command: Command, directory: &Path) -> Result<Self, String> {
        let nowhere = SocketAddr::from(([127, 0, 0, 1], 0));
        let mut server = Self::spawn(command, directory, nowhere);
        let Some(listening) = server.next_line(|line| line["message"] == "listening") else {
            return Err(server.everything_logged());
        };
        let address = listening["address"].as_str().expect("an address");
        server.address = address.parse().expect("an address");
        server.bridge = bridge(server.address);
        let ops_address = listening["ops_address"].as_str();
        server.ops_address = ops_address.map(|address| address.parse().expect("an address"));
        Ok(server)
    }

    /// Without waiting for it to listen.
    pub fn spawn(mut command: Command, directory: &Path, address: SocketAddr) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().expect("it starts");
        let stderr = child.stderr.take().expect("a pipe");
        let (sender, lines) = channel();
        let seen = Arc::new(Mutex::new(String::new()));
        let for_thread = Arc::clone(&seen);
        thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                let _ = writeln!(for_thread.lock().expect("no panic"), "{line}");
                let _ = sender.send(line);
            }
        });
        Self {
            child,
            address,
            bridge: bridge(address),
            ops_address: None,
            directory: DataDirectory::Given(directory.to_owned()),
            lines,
            seen,
        }
    }

    /// Waits for the next log line that matches.
    pub fn wait_for_line(&self, is_so: impl Fn(&Value) -> bool) -> Value {
        let line = self.next_line(is_so);
        line.unwrap_or_else(|| panic!("no such line in the log:\n{}", self.everything_logged()))
    }

    fn next_line(&self, is_so: impl Fn(&Value) -> bool) -> Option<Value> {
        let end = Instant::now() + PATIENCE;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left).ok()?;
            match serde_json::from_str(&line) {
                Ok(line) if is_so(&line) => return Some(line),
                _ => {}
            }
        }
    }

    /// Standard error so far.
    pub fn everything_logged(&self) -> String {
        self.seen.lock().expect("no panic").clone()
    }

    /// The output of `strace` so far.
    pub fn trace(&self) -> String {
        std::fs::read_to_string(self.directory().join("strace.out")).unwrap_or_default()
    }

    /// Where clients connect to.
    pub fn address(&self) -> SocketAddr {
        self.bridge
            .as_ref()
            .map_or(self.address, |bridge| bridge.address)
    }

    /// The address of the private listener.
    pub fn ops_address(&self) -> SocketAddr {
        self.ops_address.expect("it has a private listener")
    }

    /// Sends a GET request to the private listener.
    pub fn ask(&self, path: &str) -> Response {
        Client::connect(self.ops_address()).request(&format!("GET {path}"), "")
    }

    /// A metric, summed over its labels unless the name has them.
    #[track_caller]
    pub fn metric(&self, name: &str) -> u64 {
        let page = self.ask("/metrics").body;
        let values = page.lines().filter_map(|line| {
            let rest = line.strip_prefix(name)?;
            let is_this = rest.starts_with([' ', '{']);
            is_this.then(|| rest.rsplit(' ').next()?.parse::<u64>().ok())?
        });
        let sum = values.reduce(|sum, value| sum + value);
        sum.unwrap_or_else(|| panic!("no {name} in\n{page}"))
    }

    pub fn directory(&self) -> &Path {
        match &self.directory {
            DataDirectory::Own(directory) => directory.path(),
            DataDirectory::Given(directory) => directory,
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The first token.
    pub fn token(&self) -> String {
        let path = self.directory().join("plantstore.token");
        if postgres::is_under_test() && !path.exists() {
            let token = run_ok(self.directory(), &["token", "create", "first"]);
            std::fs::write(&path, token).expect("a file");
        }
        let token = std::fs::read_to_string(path);
        token.expect("the first token").trim().to_owned()
    }

    pub fn connect(&self) -> Client {
        Client::connect(self.address())
    }

    /// Adds a plant with the first token.
    pub fn add(&self, body: impl AsRef<[u8]>) -> Response {
        self.connect().add(&self.token(), body.as_ref())
    }

    /// Adds a plant that must be accepted.
    pub fn add_ok(&self, body: impl AsRef<[u8]>) {
        let response = self.add(body);
        assert_eq!(response.status, 200, "{response:?}");
    }

    pub fn refuses_connections(&self) -> bool {
        Client::try_connect(self.address).is_err()
    }

    pub fn wait_until_ready(&self) {
        wait_until("it is ready", || self.ask("/readyz").status == 200);
    }

    /// Revokes a token and waits until that is effective.
    pub fn revoke(&self, name: &str, token: &str) {
        run_ok(self.directory(), &["token", "revoke", name]);
        wait_until("the token is rejected", || {
            self.connect().add(token, b"{}").status == 401
        });
    }

    /// Waits until all earlier connections are accepted: connections are accepted in order.
    pub fn wait_for_connection(&self) {
        assert_eq!(self.connect().request("GET /nothing", "").status, 404);
    }

    /// Kills the server with SIGKILL.
    pub fn kill(&mut self) {
        self.child.kill().expect("it was running");
        self.child.wait().expect("a child");
    }

    pub fn signal(&self, signal: &str) {
        let sent = Command::new("kill")
            .args([signal, &self.pid().to_string()])
            .status();
        assert!(sent.expect("kill runs").success());
    }

    /// Sends SIGTERM and waits for the exit.
    pub fn terminate(&mut self) -> ExitStatus {
        self.signal("-TERM");
        self.wait_for_exit()
    }

    pub fn wait_for_exit(&mut self) -> ExitStatus {
        let status = wait_for_exit(&mut self.child);
        wait_until("its standard error is read", || {
            Arc::strong_count(&self.seen) == 1
        });
        status
    }

    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("a child").is_some()
    }

    /// The peak resident memory so far.
    pub fn peak_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid()));
        let status = status.expect("it is running");
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let peak = peak.expect("a peak").trim().trim_end_matches(" kB");
        peak.parse().expect("a number")
    }

    /// All stored plants.
    pub fn plants(&self) -> Vec<(i64, String, Option<String>)> {
        plants(self.directory())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// All plants in `plantstore.db` of this directory.
pub fn plants(directory: &Path) -> Vec<(i64, String, Option<String>)> {
    if let Some(store) = postgres::store(directory) {
        return postgres::plants(&store);
    }
    let store = open(directory);
    let mut select = store
        .prepare("SELECT id, name, tag FROM plants ORDER BY id")
        .expect("SQL");
    let rows = select.query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)));
    rows.expect("rows").collect::<Result<_, _>>().expect("rows")
}

/// Opens the database of this directory with SQLite.
pub fn open(directory: &Path) -> Connection {
    let path = directory.join("plantstore.db");
    let connection = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_WRITE);
    connection.expect("the database")
}

/// The plants that were added within the last minute, each with the name of its token.
pub fn added_within_a_minute(directory: &Path) -> Vec<(i64, String)> {
    let (schema, now, minute) = match postgres::store(directory) {
        Some(_) => ("plantstore.", "now()", "interval '1 minute'"),
        None => ("", "unixepoch() * 1000", "60000"),
    };
    let sql = format!(
        "SELECT p.id, t.name FROM {schema}plants p JOIN {schema}tokens t ON t.id = p.added_by
         WHERE p.added_at BETWEEN {now} - {minute} AND {now} + {minute} ORDER BY p.id"
    );
    if let Some(store) = postgres::store(directory) {
        return postgres::with_client(&store, async |client| {
            let rows = client.query(&sql, &[]).await.expect("rows");
            rows.iter().map(|row| (row.get(0), row.get(1))).collect()
        });
    }
    let store = open(directory);
    let mut select = store.prepare(&sql).expect("SQL");
    let rows = select.query_map([], |row| Ok((row.get(0)?, row.get(1)?)));
    rows.expect("rows").collect::<Result<_, _>>().expect("rows")
}

/// The checksum of a plant in a SQLite store.
pub fn plant_checksum(
    id: i64,
    name: &str,
    tag: &str,
    added_at: i64,
    added_by: i64,
    batch: i64,
) -> i32 {
    let text = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let number = |number: i64| number.to_le_bytes().to_vec();
    let mut parts = vec![
        number(id),
        text(name),
        text(tag),
        number(added_at),
        number(added_by),
    ];
    if batch != 0 {
        parts.push(number(batch));
    }
    crc32fast::hash(&parts.concat()).cast_signed()
}

/// Copies the tokens of another store with SQL.
pub fn copy_tokens(from: &Path, to: &Path) {
    if let (Some(from), Some(to)) = (postgres::store(from), postgres::store(to)) {
        let read = async |client: &tokio_postgres::Client| {
            let sql = "SELECT row_to_json(tokens)::TEXT FROM plantstore.tokens";
            let row = client.query_one(sql, &[]).await.expect("a token");
            row.get::<_, String>(0)
        };
        let token = postgres::with_client(&from, read);
        return postgres::with_client(&to, async |client| {
            let sql = "INSERT INTO plantstore.tokens SELECT * FROM json_populate_record(NULL::plantstore.tokens, $1::TEXT::JSON)";
            client.execute(sql, &[&token]).await.expect("a copy");
            let sql = "INSERT INTO plantstore.token_events SELECT 1 + count(*), (SELECT max(id) FROM plantstore.tokens), 'copied', now(), NULL FROM plantstore.token_events";
            client.execute(sql, &[]).await.expect("an event");
        });
    }
    let store = open(to);
    let from = from.join("plantstore.db");
    store
        .execute("ATTACH ?1 AS elsewhere", [from.to_str()])
        .expect("the other store");
    let copy = "INSERT INTO tokens SELECT 99, name, digest, rate_limit, created_at, expires_at, revoked_at,
                last_used_at, checksum, rotated_at, previous_digest, previous_expires_at FROM elsewhere.tokens";
    store.execute(copy, []).expect("a copy");
    let event =
        "INSERT INTO token_events SELECT 1 + count(*), 99, 'copied', 0, NULL FROM token_events";
    store.execute(event, []).expect("an event");
}
