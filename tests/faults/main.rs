//! Nothing acknowledged is ever lost: the faults that really happen, made to happen, with a checker that knows
//! what was promised.
//!
//! `faults [--cuts N] [--kills N] [--step N] [--each N] [--failovers N] [--standby-losses N] [--connection-cuts N]
//! [--rolling N] [--seed S] [--postgres-only] [--accidents-only [--case NAME]] [--publish]`, or `faults --replay RECORDING --seed S --cuts N`, which cuts
//! a recording that was kept at the same places in the same way.

mod accidents;
mod breaks;
mod checker;
mod damage;
mod disk;
mod disks;
#[path = "../it/harness/mod.rs"]
#[allow(dead_code, reason = "the other tests use the rest")]
mod harness;
mod kills;
mod load;
mod machine;
mod postgres;
mod power;
mod random;
mod report;
mod trace;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::ExitCode;

use report::{HEAD, Progress, Report};

/// So many plants make more than 200 commits: some are sent twice.
const PLANTS: u64 = 260;

/// What was asked for.
struct Asked {
    seed: u64,
    cuts: usize,
    kills: usize,
    /// Of the syncs and writes of a run, one in so many.
    step: usize,
    /// Every other fault so often.
    each: usize,
    failovers: usize,
    standby_losses: usize,
    connection_cuts: usize,
    rolling: usize,
    postgres_only: bool,
    accidents_only: bool,
    /// Of the accidents, those whose name contains this.
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
            postgres_only: at("--postgres-only").is_some(),
            accidents_only: at("--accidents-only").is_some(),
            case: value("--case").cloned().unwrap_or_default(),
            replay: value("--replay").cloned(),
            publish: at("--publish").is_some(),
        }
    }
}

/// A fault: a seed, how often, and where to show how far it is.
type Fault = fn(u64, usize, &Progress) -> Report;

/// Runs faults one after another and keeps the rows.
#[derive(Default)]
struct Suite {
    rows: Vec<String>,
    accidents: Vec<String>,
    failed: bool,
}

impl Suite {
    fn run(&mut self, total: usize, fault: impl FnOnce(&Progress) -> Report, name: &'static str) {
        let progress = Progress::new(name, total);
        // Every wait ends, at the latest by a panic.
        let done = catch_unwind(AssertUnwindSafe(|| fault(&progress)));
        let report = done.unwrap_or_else(|panic| {
            let mut report = Report::new(name, "");
            let words = panic
                .downcast_ref::<String>()
                .map_or("a panic", String::as_str);
            let hang = words.contains(harness::HANG);
            let kind = if hang { "hang" } else { "wrong" };
            report.add(0, 0, vec![format!("{kind}: {words}")]);
            report
        });
        drop(progress);
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
            |progress| power::cuts(seed, PLANTS, cuts, progress),
            name,
        );
        let name = "ghost acknowledgements";
        self.run(
            cuts,
            |progress| power::ghosts(seed, 12, cuts, progress),
            name,
        );
    }

    fn all_others(&mut self, asked: &Asked) {
        let cuts = asked.cuts / 4;
        let fault = |progress: &Progress| power::cuts_at_checkpoints(asked.seed, cuts, progress);
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
            ("failed syncs", disks::failed_sync),
            ("no room", disks::no_room),
            ("full disks", disks::full_disk),
            ("slow syncs", disks::slow_syncs),
            ("out of memory", machine::out_of_memory),
            ("SIGTERM", machine::terminated),
            ("two servers", machine::two_servers),
            ("clock set back", machine::clock_set_back),
            ("files cut short", damage::cut_short),
            ("changed bytes", damage::changed),
            ("changed bytes in the log", damage::changed_log),
        ];
        for (name, fault) in faults {
            self.run(each, |progress| fault(seed, each, progress), name);
        }
    }

    /// Deliberate breaks that were not noticed.
    fn fail(&mut self, unnoticed: Vec<String>) {
        for unnoticed in unnoticed {
            println!("{unnoticed}");
            self.failed = true;
        }
    }

    /// Operator and file accidents, which have a table of their own.
    fn accidents(&mut self, asked: &Asked) {
        println!("\n{}", accidents::HEAD);
        for row in accidents::run(&asked.case) {
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
        let faults: [(&'static str, usize, Fault); 10] = [
            ("failovers", asked.failovers, postgres::failovers),
            (
                "standbys lost",
                asked.standby_losses,
                postgres::standby_losses,
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
            if runs > 0 {
                self.run(runs, |progress| fault(asked.seed, runs, progress), name);
            }
        }
    }
}

fn main() -> ExitCode {
    let asked = Asked::read();
    println!("seed {}", asked.seed);
    if !asked.accidents_only {
        println!("\n{HEAD}");
    }
    let mut suite = Suite::default();
    if let Some(kept) = &asked.replay {
        let Asked { seed, cuts, .. } = asked;
        let kept = Path::new(kept);
        suite.run(
            cuts,
            |progress| power::replay(kept, seed, cuts, progress),
            "replay",
        );
    } else if asked.postgres_only {
        suite.postgres(&asked);
    } else if asked.accidents_only {
        suite.accidents(&asked);
        if asked.case.is_empty() {
            suite.fail(breaks::unnoticed_accidents());
        }
    } else {
        suite.power_cuts(&asked);
        // A build that is broken on purpose has nothing to show by more.
        if std::env::var_os(harness::BINARY_UNDER_TEST).is_none() {
            suite.all_others(&asked);
            suite.postgres(&asked);
            suite.accidents(&asked);
            suite.fail(breaks::unnoticed(asked.cuts / 4, asked.seed));
        }
    }
    if asked.publish {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reliability.md");
        for (table, head, rows) in [
            ("written by make faults", HEAD, &suite.rows),
            (
                "accidents, written by make faults",
                accidents::HEAD,
                &suite.accidents,
            ),
        ] {
            if !rows.is_empty() {
                report::publish(&page, table, asked.seed, head, rows);
            }
        }
    }
    if suite.failed {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}
