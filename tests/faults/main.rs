//! Nothing acknowledged is ever lost: the faults that really happen, made to happen, with a checker that knows
//! what was promised. `faults [--cuts N] [--kills N] [--step N] [--seed S]`; the same seed cuts a recording at the same places in the same
//! way.

mod breaks;
mod checker;
mod disk;
#[path = "../it/harness/mod.rs"]
#[allow(dead_code, reason = "the other tests use the rest")]
mod harness;
mod kills;
mod load;
mod power;
mod random;
mod report;
mod trace;

use std::process::ExitCode;

use report::{Progress, Report};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    let number = |flag: &str, default: u64| {
        let at = arguments.iter().position(|argument| argument == flag);
        let value = at.and_then(|at| arguments.get(at + 1));
        value.map_or(default, |value| value.parse().expect("a number"))
    };
    let seed = number("--seed", 1);
    let cuts = usize::try_from(number("--cuts", 2000)).expect("a number of cuts");

    let kills = usize::try_from(number("--kills", 20)).expect("a number of kills");
    // Of the syncs and writes of a run, one in so many.
    let step = usize::try_from(number("--step", 20)).expect("a step");

    let broken = std::env::var_os(harness::BINARY_UNDER_TEST).is_some();
    println!("seed {seed}\n");
    println!("| fault | method | runs | acknowledged | lost or wrong |\n|---|---|---|---|---|");
    let mut failed = 0;
    let mut run = |name, total, fault: &dyn Fn(&Progress) -> Report| {
        let progress = Progress::new(name, total);
        let report = fault(&progress);
        progress.end();
        println!("{}", report.row());
        for wrong in report.wrong.iter().take(10) {
            println!("  {wrong}");
        }
        failed += usize::from(!report.wrong.is_empty());
    };
    run("power cuts", cuts, &|progress| {
        power::cuts(seed, 200, cuts, progress)
    });
    run("ghosts", cuts, &|progress| {
        power::ghosts(seed, 12, cuts, progress)
    });
    if !broken {
        run("kills", kills, &|progress| {
            kills::at_random(seed, kills, progress)
        });
        run("kills at syncs", 200 / step, &|progress| {
            kills::at_every("fdatasync", 200, step, progress)
        });
        run("kills at writes", 400 / step, &|progress| {
            kills::at_every("pwrite64", 200, step, progress)
        });
    }
    // A broken build that is itself the subject has nothing to show by further ones.
    if !broken {
        for unnoticed in breaks::unnoticed(cuts / 4, seed) {
            println!("{unnoticed}");
            failed += 1;
        }
    }
    if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
