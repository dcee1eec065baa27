//! SIGKILL under load: at random times, and at every sync and every write of a run.

use std::fs;
use std::thread;
use std::time::Duration;

use crate::checker::History;
use crate::harness::{Server, directory};
use crate::load::{Load, after_restart};
use crate::random::Random;
use crate::report::{Progress, Report};

/// A new store is created after this many kills, so that checking stays fast.
const KILLS_A_STORE: usize = 25;

/// More system calls of one kind than any run makes.
const CALLS_MAX: usize = 5000;

pub fn at_random(seed: u64, kills: usize, progress: &Progress) -> Report {
    let mut report = Report::new("kill -9 at random", "real binary under load");
    let mut random = Random::new(seed);
    let mut place = directory();
    let mut history = History::default();
    for number in 0..kills {
        if number.is_multiple_of(KILLS_A_STORE) {
            place = directory();
            history = History::default();
        }
        let mut server = Server::start_in(place.path(), &["--log-level", "info"]);
        let load = Load {
            clients: 8,
            plants: 100_000,
            first_id: i64::try_from(number).expect("small") * 1_000_000_000,
            seed: random.next(),
            ..Load::default()
        };
        let running = load.start(server.address(), &server.token());
        thread::sleep(Duration::from_micros(random.below(120_000)));
        server.kill();
        let run = running.finish();
        let acknowledged = run.acknowledged().count();
        history.append(run);
        let server = Server::start_in(place.path(), &[]);
        report.add(1, acknowledged, after_restart(&server, &mut history));
        progress.step();
    }
    report
}

/// At the first, second, third … call of this kind, until a run of `plants` finishes without reaching it.
pub fn at_every(call: &'static str, plants: u64, step: usize, progress: &Progress) -> Report {
    let fault = match call {
        "fdatasync" => "kill at every sync",
        _ => "kill at every write",
    };
    let mut report = Report::new(fault, "strace, real binary");
    for at in (1..=CALLS_MAX).step_by(step) {
        let place = directory();
        assert!(Server::start_in(place.path(), &[]).terminate().success());
        let kill = format!("inject={call}:signal=KILL:when={at}");
        let trace = format!("trace={call}");
        let strace = ["-e", &trace, "-e", &kill];
        let mut run = History::default();
        let mut killed = true;
        // The server may be killed before it listens.
        if let Some(mut server) = Server::try_start_under_strace(place.path(), &strace, &[]) {
            let load = Load {
                clients: 1,
                plants,
                seed: at as u64,
                ..Load::default()
            };
            run = load.start(server.address(), &server.token()).finish();
            killed = run.attempts().count() < usize::try_from(plants).expect("small");
            if !killed {
                server.kill();
            }
        } else {
            let trace = fs::read_to_string(place.path().join("strace.out")).unwrap_or_default();
            assert!(
                trace.contains("killed by SIGKILL"),
                "it does not start: {trace}"
            );
        }
        let server = Server::start_in(place.path(), &[]);
        let acknowledged = run.acknowledged().count();
        report.add(1, acknowledged, after_restart(&server, &mut run));
        progress.step();
        if !killed {
            return report;
        }
    }
    let endless = format!("wrong: no run finishes before call {CALLS_MAX}");
    report.add(0, 0, vec![endless]);
    report
}
