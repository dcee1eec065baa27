//! Process faults: out of memory, SIGTERM under load, two servers on one file, a clock that is set back.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use crate::checker::{History, Outcome};
use crate::harness::clock::Clock;
use crate::harness::{Server, copy_environment, directory, plantstore, run};
use crate::load::{Load, after_restart};
use crate::random::Random;
use crate::report::{Progress, Report};

const LISTEN: [&str; 5] = [
    "serve",
    "--listen",
    "127.0.0.1:0",
    "--ops-listen",
    "127.0.0.1:0",
];

/// Clients send far more at once than fits into the memory limit.
pub fn out_of_memory(seed: u64, runs: usize, progress: &Progress) -> Report {
    let mut report = Report::new("out of memory", Memory::new().method());
    let mut random = Random::new(seed);
    for _ in 0..runs {
        let place = directory();
        assert!(Server::start_in(place.path(), &[]).terminate().success());
        let memory = Memory::new();
        let mut server = Server::start_command(memory.command(place.path()), place.path());
        let load = Load {
            clients: 64,
            plants: 40,
            name_len: 200_000 + random.index(700_000),
            seed: random.next(),
            ..Load::default()
        };
        let mut history = load.start(server.address(), &server.token()).finish();
        let mut wrong = Vec::new();
        if history.unknown().next().is_none() {
            server.kill();
            if memory.is_certain() {
                wrong.push("wrong: the memory limit was not reached".to_owned());
            }
        } else if server.wait_for_exit().signal().is_none() && memory.is_certain() {
            wrong.push("wrong: the process was not killed by a signal".to_owned());
        }
        let server = Server::start_in(place.path(), &[]);
        wrong.extend(after_restart(&server, &mut history));
        report.add(1, history.acknowledged().count(), wrong);
        progress.step();
    }
    report
}

/// A memory limit: a cgroup if one can be created, otherwise an address-space limit.
enum Memory {
    Group(PathBuf),
    Addresses,
}

const LIMIT: &str = "33554432";

impl Memory {
    fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("plantstore-faults-{}-{number}", std::process::id());
        for (root, limit) in [
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            ("/sys/fs/cgroup", "memory.max"),
        ] {
            let group = Path::new(root).join(&name);
            let made =
                Path::new(root).join("cgroup.procs").exists() && fs::create_dir(&group).is_ok();
            if made && group.join(limit).exists() && fs::write(group.join(limit), LIMIT).is_ok() {
                return Self::Group(group);
            }
            let _ = fs::remove_dir(&group);
        }
        Self::Addresses
    }

    fn method(&self) -> &'static str {
        match self {
            Self::Group(_) => "a memory cgroup of 32 MiB, 64 clients with large plants",
            Self::Addresses => "an address-space limit, 64 clients with large plants",
        }
    }

    /// Whether the kernel kills the process at the limit. With an address-space limit an allocation may or may not fail.
    fn is_certain(&self) -> bool {
        matches!(self, Self::Group(_))
    }

    fn command(&self, place: &Path) -> Command {
        let plain = plantstore(place);
        let mut command = Command::new("sh");
        let limit = match self {
            Self::Group(group) => format!("echo $$ > {}/cgroup.procs", group.display()),
            Self::Addresses => "ulimit -v 200000".to_owned(),
        };
        command
            .args(["-c", &format!("{limit} && exec \"$@\""), "sh"])
            .arg(plain.get_program())
            .args(LISTEN)
            .current_dir(place);
        copy_environment(&plain, &mut command);
        command
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Self::Group(group) = self {
            let _ = fs::remove_dir(group);
        }
    }
}

/// SIGTERM under load: no request is dropped without a response, and the server exits with 0.
pub fn terminated(seed: u64, runs: usize, progress: &Progress) -> Report {
    let mut report = Report::new("SIGTERM", "real binary under load");
    let mut random = Random::new(seed);
    for _ in 0..runs {
        let place = directory();
        let mut server = Server::start_in(place.path(), &[]);
        let load = Load {
            clients: 8,
            plants: 100_000,
            seed: random.next(),
            ..Load::default()
        };
        let running = load.start(server.address(), &server.token());
        thread::sleep(Duration::from_micros(random.below(150_000)));
        let code = server.terminate().code();
        let mut history = running.finish();
        let mut wrong = Vec::new();
        if code != Some(0) {
            wrong.push(format!("wrong: exit code {code:?}"));
        }
        if history.count(Outcome::ConnectionLost) > 0 {
            let cut = history.count(Outcome::ConnectionLost);
            wrong.push(format!(
                "wrong: {cut} requests were dropped without a response"
            ));
        }
        let server = Server::start_in(place.path(), &[]);
        wrong.extend(after_restart(&server, &mut history));
        report.add(1, history.acknowledged().count(), wrong);
        progress.step();
    }
    report
}

/// A second server on the same database does not start, neither under load nor when both start at the same time.
pub fn two_servers(seed: u64, runs: usize, progress: &Progress) -> Report {
    let mut report = Report::new("two servers on one file", "real binaries");
    for number in 0..runs {
        let place = directory();
        let start = || {
            let mut command = plantstore(place.path());
            command.args(LISTEN);
            Server::try_start_command(command, place.path())
        };
        let both = thread::scope(|scope| {
            let both = [scope.spawn(start), scope.spawn(start)];
            both.map(|server| server.join().expect("no panic"))
        });
        let mut wrong = Vec::new();
        let (winners, losers): (Vec<_>, Vec<_>) = both.into_iter().partition(Result::is_ok);
        if winners.len() != 1 {
            wrong.push(format!("wrong: {} of two servers run", winners.len()));
        }
        let said: Vec<_> = losers.into_iter().filter_map(Result::err).collect();
        if !said
            .iter()
            .all(|said| said.contains("is in use by another plantstore"))
        {
            wrong.push(format!("wrong: the second server prints {said:?}"));
        }
        let mut acknowledged = 0;
        if let Some(server) = winners.into_iter().find_map(Result::ok) {
            let load = Load {
                clients: 4,
                plants: 50,
                seed: seed ^ number as u64,
                ..Load::default()
            };
            let running = load.start(server.address(), &server.token());
            let second = run(place.path(), &LISTEN).status.code();
            if second != Some(1) {
                wrong.push(format!("wrong: the second server exits with {second:?}"));
            }
            let mut history = running.finish();
            wrong.extend(after_restart(&server, &mut history));
            acknowledged = history.acknowledged().count();
        }
        report.add(1, acknowledged, wrong);
        progress.step();
    }
    report
}

/// The clock jumps back and forth under load, and the server is restarted with the clock in the past.
pub fn clock_set_back(seed: u64, runs: usize, progress: &Progress) -> Report {
    let mut report = Report::new("clock set back", "libfaketime, real binary under load");
    let mut random = Random::new(seed);
    for _ in 0..runs {
        let place = directory();
        let clock = Clock::new(place.path());
        let mut history = History::default();
        let mut wrong = Vec::new();
        for (start, then) in [("+0", "-400d"), ("-30y", "+1d"), ("-1h", "-2h")] {
            clock.set(start);
            let mut command = plantstore(place.path());
            command.args(LISTEN);
            clock.apply_to(&mut command);
            let server = Server::start_command(command, place.path());
            let load = Load {
                clients: 4,
                plants: 50,
                first_id: i64::try_from(history.attempts().count()).expect("small") << 32,
                seed: random.next(),
                ..Load::default()
            };
            let running = load.start(server.address(), &server.token());
            thread::sleep(Duration::from_micros(random.below(20_000)));
            clock.set(then);
            let run = running.finish();
            if run.count(Outcome::Acknowledged) == 0 {
                wrong.push(format!("wrong: nothing was stored at {start}"));
            }
            history.append(run);
            wrong.extend(after_restart(&server, &mut history));
        }
        let server = Server::start_in(place.path(), &[]);
        wrong.extend(after_restart(&server, &mut history));
        report.add(1, history.acknowledged().count(), wrong);
        progress.step();
    }
    report
}
