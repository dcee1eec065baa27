//! Fault injection: runs the real binary under load, injects a fault, and checks that no acknowledged plant is lost.
//!
//! `faults [--cuts N] [--kills N] [--step N] [--each N] [--failovers N] [--standby-losses N] [--connection-cuts N]
//! [--rolling N] [--seed S] [--only NAME,NAME] [--postgres-only] [--faults-only] [--accidents-only [--case NAME]] [--publish]`, or
//! `faults --replay RECORDING --seed S --cuts N`, which repeats the power cuts of a saved recording, or `faults --patroni-only
//! [--leader-failures N] [--patroni-each N] [--seed S] [--only NAME,NAME] [--publish]` for a cluster under Patroni.
//!
//! With `TEST_ENGINE=postgres://user@host:port` and `--postgres-only`, the faults of nodes and connections are injected into nodes that use
//! that server (`scripts/check-engine`).
//!
//! With `TRANSPORT=tls` or `TRANSPORT=http2` clients use TLS or HTTP/2. Accidents with files and commands, which do not depend on
//! that, are left out then, and so are the deliberate breaks, which run over all transports without it.

mod accidents;
mod breaks;
mod checker;
mod corruption;
mod disk_faults;
#[path = "../it/harness/mod.rs"]
#[allow(dead_code, reason = "the other tests use the rest")]
mod harness;
mod kills;
mod load;
mod patroni;
mod postgres;
mod power_cuts;
mod process;
mod process_faults;
mod random;
mod report;
mod simulated_disk;
mod strace;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::ExitCode;

use harness::transport::{Transport, transport};
use postgres::database::Database;
use report::{HEAD, Progress, Report, violation_of_panic};

/// Enough for more than 200 commits: some plants are sent twice.
const PLANTS: u64 = 260;

/// Which faults to inject.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    /// All but Patroni.
    All,
    Postgres,
    Patroni,
    /// All but Patroni and the accidents.
    Faults,
    Accidents,
}

/// The command-line options.
struct Asked {
    seed: u64,
    cuts: usize,
    kills: usize,
    /// Kill at every `step`-th sync and write of a run.
    step: usize,
    /// How often to inject each of the other faults.
    each: usize,
    failovers: usize,
    standby_losses: usize,
    connection_cuts: usize,
    rolling: usize,
    /// How often the leader of a cluster under Patroni fails, and how often to inject each other fault of it.
    leader_failures: usize,
    patroni_each: usize,
    /// The names of the faults to inject; empty for all.
    only: Vec<String>,
    part: Part,
    /// Only the accidents whose name contains this text.
    case: String,
    replay: Option<String>,
    publish: bool,
}

impl Asked {
    fn read() -> Self {
        let arguments: Vec<String> = std::env::args().collect();
        let at = |flag: &str| arguments.iter().position(|argument| argument == flag);
        let value = |flag: &str| at(flag).and_then(|at| arguments.get(at + 1));
        let number = |flag: &str, default: usize| {
            value(flag).map_or(default, |value| value.parse().expect("a number"))
        };
        Self {
            seed: number("--seed", 1) as u64,
            cuts: number("--cuts", 2000),
            kills: number("--kills", 20),
            step: number("--step", 20),
            each: number("--each", 2),
            failovers: number("--failovers", 1),
            standby_losses: number("--standby-losses", 1),
            connection_cuts: number("--connection-cuts", 20),
            rolling: number("--rolling", 1),
            leader_failures: number("--leader-failures", 3),
            patroni_each: number("--patroni-each", 1),
            only: value("--only").map_or_else(Vec::new, |names| {
                names.split(',').map(str::to_owned).collect()
            }),
            part: if at("--postgres-only").is_some() {
                Part::Postgres
            } else if at("--patroni-only").is_some() {
                Part::Patroni
            } else if at("--faults-only").is_some() {
                Part::Faults
            } else if at("--accidents-only").is_some() {
                Part::Accidents
            } else {
                Part::All
            },
            case: value("--case").cloned().unwrap_or_default(),
            replay: value("--replay").cloned(),
            publish: at("--publish").is_some(),
        }
    }

    /// Whether the rows are only some of those of a published table.
    fn is_a_part_of_a_table(&self) -> bool {
        !self.only.is_empty()
            || !self.case.is_empty()
            || self.replay.is_some()
            || self.part == Part::Postgres
    }
}

/// A fault: takes a seed, the number of runs and a progress bar.
type Fault = fn(u64, usize, &Progress) -> Report;

/// Runs the faults one after another and collects the rows of the tables.
#[derive(Default)]
struct Suite {
    /// The names of the faults to inject; empty for all.
    only: Vec<String>,
    rows: Vec<String>,
    accidents: Vec<String>,
    failed: bool,
}

impl Suite {
    fn run(&mut self, total: usize, fault: impl FnOnce(&Progress) -> Report, name: &'static str) {
        if !self.only.is_empty() && !self.only.iter().any(|only| only == name) {
            return;
        }
        let progress = Progress::new(name, total);
        // Every wait has a timeout and then panics.
        let done = catch_unwind(AssertUnwindSafe(|| fault(&progress)));
        let report = done.unwrap_or_else(|panic| {
            let mut report = Report::new(name, "");
            report.add(0, 0, vec![violation_of_panic(panic.as_ref())]);
            report
        });
        drop(progress);
        self.add(&report);
    }

    fn add(&mut self, report: &Report) {
        println!("{}", report.row());
        for wrong in report.wrong.iter().take(10) {
            println!("  {wrong}");
        }
        self.failed |= !report.wrong.is_empty();
        self.rows.push(report.row());
    }

    fn power_cuts(&mut self, asked: &Asked) {
        let Asked { seed, cuts, .. } = *asked;
        let name = "power cuts";
        self.run(
            cuts,
            |progress| power_cuts::cuts(seed, PLANTS, cuts, progress),
            name,
        );
        let name = "acknowledged retries after a kill";
        self.run(
            cuts,
            |progress| power_cuts::after_retries(seed, 12, cuts, progress),
            name,
        );
    }

    fn all_others(&mut self, asked: &Asked) {
        let cuts = asked.cuts / 4;
        let fault =
            |progress: &Progress| power_cuts::cuts_at_checkpoints(asked.seed, cuts, progress);
        self.run(cuts, fault, "power cuts at a checkpoint");
        let Asked {
            seed,
            kills,
            step,
            each,
            ..
        } = *asked;
        self.run(
            kills,
            |progress| kills::at_random(seed, kills, progress),
            "kills",
        );
        let at_every =
            |call| move |progress: &Progress| kills::at_every(call, PLANTS, step, progress);
        self.run(230 / step, at_every("fdatasync"), "kills at syncs");
        self.run(480 / step, at_every("pwrite64"), "kills at writes");

        let faults: [(&'static str, Fault); 11] = [
            ("failed syncs", disk_faults::failed_sync),
            ("ENOSPC", disk_faults::no_space),
            ("full disks", disk_faults::full_disk),
            ("slow syncs", disk_faults::slow_syncs),
            ("out of memory", process_faults::out_of_memory),
            ("SIGTERM", process_faults::terminated),
            ("two servers", process_faults::two_servers),
            ("clock set back", process_faults::clock_set_back),
            ("truncated files", corruption::truncated),
            ("changed bytes", corruption::changed),
            ("changed bytes in the WAL", corruption::changed_wal),
        ];
        for (name, fault) in faults {
            self.run(each, |progress| fault(seed, each, progress), name);
        }
    }

    /// Deliberate breaks that were not detected.
    fn fail(&mut self, undetected: Vec<String>) {
        for undetected in undetected {
            println!("{undetected}");
            self.failed = true;
        }
    }

    /// Operator and file accidents, which have their own table without a TRANSPORT.
    fn accidents(&mut self, asked: &Asked) {
        if !self.only.is_empty() {
            return;
        }
        if transport() != Transport::Plain {
            for row in accidents::run(accidents::of_clients(), &asked.case) {
                self.add(&row.report());
            }
            return;
        }
        println!("\n{}", accidents::HEAD);
        for row in accidents::run(accidents::all(), &asked.case) {
            println!("{}", row.line());
            for problem in row.problems.iter().take(10) {
                println!("  {problem}");
            }
            self.failed |= !row.problems.is_empty();
            self.accidents.push(row.line());
        }
    }

    fn postgres(&mut self, asked: &Asked) {
        let each = asked.each;
        let faults: [(&'static str, usize, Fault); 12] = [
            ("failovers", asked.failovers, postgres::failovers),
            (
                "standbys lost",
                asked.standby_losses,
                postgres::standby_losses,
            ),
            (
                "stale primaries",
                asked.failovers,
                postgres::stale_primaries,
            ),
            (
                "standbys absent",
                asked.standby_losses,
                postgres::standby_outages,
            ),
            ("connections cut", asked.connection_cuts, postgres::cut),
            ("connections that stall", each, postgres::stalled),
            ("connections ended", each, postgres::terminated),
            ("serialization failures", each, postgres::serializable),
            ("40001 and 40P01", each, postgres::made_failures),
            ("deadlocks", each, postgres::deadlocks),
            ("nodes killed", each, postgres::killed),
            ("rolling restarts", asked.rolling, postgres::rolling),
        ];
        for (name, runs, fault) in faults {
            let is_possible =
                !Database::is_foreign() || postgres::FAULTS_OF_CLIENTS.contains(&name);
            if runs > 0 && is_possible {
                self.run(runs, |progress| fault(asked.seed, runs, progress), name);
            }
        }
    }

    /// A PostgreSQL cluster under Patroni, which has its own table.
    fn patroni(&mut self, asked: &Asked) {
        let kinds = patroni::LEADER_FAILURES.len();
        let leader_failures = asked.leader_failures.div_ceil(kinds);
        let faults = patroni::LEADER_FAILURES
            .map(|fault| (fault, leader_failures))
            .into_iter()
            .chain(patroni::OTHERS.map(|fault| (fault, asked.patroni_each)));
        let mut cluster = patroni::Patroni::default();
        for (fault, runs) in faults.filter(|(_, runs)| *runs > 0) {
            let [name, ..] = fault.names();
            self.run(
                runs,
                |progress| cluster.run(fault, asked.seed, runs, progress),
                name,
            );
        }
    }
}

fn main() -> ExitCode {
    let asked = Asked::read();
    if asked.publish && asked.is_a_part_of_a_table() {
        eprintln!(
            "--publish replaces whole tables: not with --only, --case, --replay or --postgres-only"
        );
        return ExitCode::from(2);
    }
    println!("seed {}", asked.seed);
    if asked.part != Part::Accidents {
        println!("\n{HEAD}");
    }
    let mut suite = Suite {
        only: asked.only.clone(),
        ..Suite::default()
    };
    if let Some(kept) = &asked.replay {
        let Asked { seed, cuts, .. } = asked;
        let kept = Path::new(kept);
        suite.run(
            cuts,
            |progress| power_cuts::replay(kept, seed, cuts, progress),
            "replay",
        );
    } else if asked.part == Part::Postgres {
        suite.postgres(&asked);
    } else if asked.part == Part::Patroni {
        suite.patroni(&asked);
    } else if asked.part == Part::Accidents {
        suite.accidents(&asked);
    } else {
        suite.power_cuts(&asked);
        // A deliberate break has to be detected by these already.
        if std::env::var_os(harness::BINARY_UNDER_TEST).is_none() {
            suite.all_others(&asked);
            suite.postgres(&asked);
            if asked.part != Part::Faults {
                suite.accidents(&asked);
            }
            if transport() == Transport::Plain && asked.only.is_empty() {
                suite.fail(breaks::undetected(asked.cuts / 4, asked.seed));
            }
        }
    }
    if asked.publish {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reliability.md");
        let by_transport = transport().name().map(|name| format!("{name}, "));
        let by_transport = by_transport.unwrap_or_default();
        let of_rows = if asked.part == Part::Patroni {
            "Patroni, ".to_owned()
        } else {
            by_transport
        };
        for (table, head, rows) in [
            (of_rows, HEAD, &suite.rows),
            ("accidents, ".to_owned(), accidents::HEAD, &suite.accidents),
        ] {
            let table = format!("{table}written by make faults");
            if !rows.is_empty() {
                report::publish(&page, &table, asked.seed, head, rows);
            }
        }
    }
    if suite.failed {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}
