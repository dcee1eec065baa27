//! Programs that the suite runs: each is started, killed, paused and started again, and its output goes to a log file. PostgreSQL does not
//! run as root, so neither do the others, and none of them outlives the suite.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use rustix::process::{Pid, Signal, geteuid, kill_process};

use crate::harness::{output, wait_for_exit};

/// The options of `setpriv` for a user without rights.
const NOBODY: [&str; 3] = ["--reuid=nobody", "--regid=nogroup", "--clear-groups"];

/// Killed when it is dropped.
pub struct Process {
    program: PathBuf,
    arguments: Vec<String>,
    variables: Vec<(String, String)>,
    directory: PathBuf,
    is_privileged: bool,
    orphan_signal: &'static str,
    child: Option<Child>,
}

impl Process {
    /// A program that runs in this directory, where its log is, too.
    pub fn new(program: impl Into<PathBuf>, arguments: &[&str], directory: &Path) -> Self {
        Self {
            program: program.into(),
            arguments: arguments
                .iter()
                .map(|&argument| argument.to_owned())
                .collect(),
            variables: Vec::new(),
            directory: directory.to_owned(),
            is_privileged: false,
            orphan_signal: "KILL",
            child: None,
        }
    }

    pub fn with_variables(mut self, variables: Vec<(String, String)>) -> Self {
        self.variables = variables;
        self
    }

    /// As the user that runs the suite.
    pub fn privileged(mut self) -> Self {
        self.is_privileged = true;
        self
    }

    /// The signal that the kernel sends to it if the suite is killed, for a program that has to end others.
    pub fn with_orphan_signal(mut self, signal: &'static str) -> Self {
        self.orphan_signal = signal;
        self
    }

    pub fn start(&mut self) {
        assert!(self.child.is_none(), "{} runs already", self.name());
        let log = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.log_path())
            .expect("a log");
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", self.orphan_signal]);
        if geteuid().is_root() && !self.is_privileged {
            command.args(NOBODY);
        }
        // Debian has some of them in /usr/sbin, which is not in every path.
        let path = std::env::var("PATH").expect("a path");
        command
            .arg(&self.program)
            .args(&self.arguments)
            .env("PATH", format!("{path}:/usr/sbin"))
            .envs(self.variables())
            .current_dir(&self.directory)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a log"))
            .stderr(log)
            .process_group(0);
        self.child = Some(command.spawn().expect("setpriv is installed"));
    }

    pub fn pid(&self) -> Option<Pid> {
        self.child.as_ref().map(Pid::from_child)
    }

    /// Fails if the program has ended by itself.
    pub fn assert_runs(&self) {
        if let Some(pid) = self.pid() {
            let (name, lines) = (self.name(), self.last_lines(20));
            assert!(is_alive(pid), "{name} has ended (make setup):\n{lines}");
        }
    }

    pub fn signal(&self, signal: Signal) {
        if let Some(pid) = self.pid() {
            let _ = kill_process(pid, signal);
        }
    }

    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Sends a signal that ends the program, and waits for that.
    pub fn stop(&mut self, signal: Signal) {
        self.signal(signal);
        self.wait_for_exit();
    }

    pub fn wait_for_exit(&mut self) -> Option<ExitStatus> {
        let status = self.child.as_mut().map(wait_for_exit);
        self.child = None;
        status
    }

    pub fn variables(&self) -> impl Iterator<Item = (String, String)> {
        self.variables.iter().cloned()
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// The end of the log, for the report of a failure.
    pub fn last_lines(&self, count: usize) -> String {
        let log = self.log();
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(count)..].join("\n    ")
    }

    fn name(&self) -> String {
        let name = self.program.file_name().expect("a program");
        name.to_string_lossy().into_owned()
    }

    fn log_path(&self) -> PathBuf {
        self.directory.join(self.name()).with_extension("log")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A command that runs in this directory, not as root, and ends by itself.
pub fn unprivileged(program: &Path, directory: &Path) -> Command {
    let mut command = if geteuid().is_root() {
        let mut command = Command::new("setpriv");
        command.args(NOBODY).arg(program);
        command
    } else {
        Command::new(program)
    };
    command.current_dir(directory).stdin(Stdio::null());
    command
}

/// Runs a program, which has to exit with 0.
pub fn finish(command: &mut Command) {
    let output = output(command);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {said}");
}

pub fn children(parent: Pid) -> Vec<Pid> {
    let parent = parent.as_raw_nonzero().to_string();
    let processes = fs::read_dir("/proc").expect("/proc");
    let processes = processes.filter_map(|entry| {
        let path = entry.ok()?.path();
        let (_, its_parent) = state_and_parent(&path)?;
        let number = path.file_name()?.to_str()?.parse().ok()?;
        (its_parent == parent).then(|| Pid::from_raw(number))?
    });
    processes.collect()
}

/// Whether the process still runs; a zombie does not.
pub fn is_alive(process: Pid) -> bool {
    state(process).is_some_and(|state| state != "Z")
}

/// Whether a signal has stopped the process.
pub fn is_stopped(process: Pid) -> bool {
    state(process).is_some_and(|state| state == "T")
}

fn state(process: Pid) -> Option<String> {
    let path = format!("/proc/{}", process.as_raw_nonzero());
    state_and_parent(Path::new(&path)).map(|(state, _)| state)
}

/// From `/proc/1/stat`: `1 (init) S 0 …`.
fn state_and_parent(process: &Path) -> Option<(String, String)> {
    let text = fs::read_to_string(process.join("stat")).ok()?;
    let (_, rest) = text.rsplit_once(") ")?;
    let mut words = rest.split(' ').map(str::to_owned);
    Some((words.next()?, words.next()?))
}
