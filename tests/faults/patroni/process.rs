//! A program that is started, killed, paused and started again; its output goes to a log file.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Child;

use rustix::process::{Pid, Signal, kill_process};

use crate::harness::wait_for_exit;
use crate::postgres::cluster::unprivileged;

/// Killed when it is dropped.
pub struct Process {
    program: &'static str,
    arguments: Vec<String>,
    variables: Vec<(String, String)>,
    directory: PathBuf,
    child: Option<Child>,
}

impl Process {
    pub fn new(
        program: &'static str,
        arguments: &[&str],
        variables: Vec<(String, String)>,
        directory: &Path,
    ) -> Self {
        Self {
            program,
            arguments: arguments
                .iter()
                .map(|&argument| argument.to_owned())
                .collect(),
            variables,
            directory: directory.to_owned(),
            child: None,
        }
    }

    pub fn start(&mut self) {
        assert!(self.child.is_none(), "{} runs already", self.program);
        let log = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.log_path())
            .expect("a log");
        let mut command = unprivileged(Path::new(self.program), &self.directory);
        // Debian has some of them in /usr/sbin, which is not in every path.
        let path = std::env::var("PATH").expect("a path");
        command
            .args(&self.arguments)
            .env("PATH", format!("{path}:/usr/sbin"))
            .envs(self.variables())
            .stdout(log.try_clone().expect("a log"))
            .stderr(log);
        let child = command.spawn();
        self.child = Some(child.unwrap_or_else(|_| panic!("{}: make setup", self.program)));
    }

    fn pid(&self) -> Option<Pid> {
        self.child.as_ref().map(Pid::from_child)
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

    /// Sends SIGTERM and waits for the exit.
    pub fn stop(&mut self) {
        self.signal(Signal::TERM);
        if let Some(mut child) = self.child.take() {
            wait_for_exit(&mut child);
        }
    }

    pub fn variables(&self) -> impl Iterator<Item = (String, String)> {
        self.variables.iter().cloned()
    }

    pub fn log_path(&self) -> PathBuf {
        self.directory.join(self.program).with_extension("log")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}
