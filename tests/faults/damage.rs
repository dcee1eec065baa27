//! Files that a disk has changed: cut short, or with bytes that are not what they were. The store is refused, or
//! `plantstore check` tells; nobody gets a wrong response.

use std::fs;
use std::path::Path;

use tempfile::TempDir;

use crate::checker::Ledger;
use crate::harness::{Client, Server, add_request, directory, plantstore, run};
use crate::load::{Load, body};
use crate::random::Random;
use crate::report::{Progress, Report};

/// A store to damage, over and over, and what it holds.
struct Original {
    place: TempDir,
    ledger: Ledger,
}

impl Original {
    /// Ended in good order, or killed, so that much of it is still in the log.
    fn new(seed: u64, killed: bool) -> Self {
        let place = directory();
        let mut server = Server::start_in(place.path(), &[]);
        let load = Load {
            clients: 4,
            plants: 200,
            seed,
            ..Load::default()
        };
        let ledger = load.start(server.address(), &server.token()).finish();
        if killed {
            server.kill();
        } else {
            assert!(server.terminate().success());
        }
        Self { place, ledger }
    }

    fn copy(&self) -> TempDir {
        let copy = directory();
        for name in ["plantstore.db", "plantstore.db-wal", "plantstore.token"] {
            let _ = fs::copy(self.place.path().join(name), copy.path().join(name));
        }
        copy
    }
}

/// The database file ends early.
pub fn cut_short(seed: u64, runs: usize, progress: &Progress) -> Report {
    let mut report = Report::new("store file cut short", "real binary, `plantstore check`");
    let mut random = Random::new(seed);
    let original = Original::new(seed, false);
    for _ in 0..runs {
        let copy = original.copy();
        let file = copy.path().join("plantstore.db");
        let bytes = fs::read(&file).expect("a file");
        let left = 1 + random.index(bytes.len() - 1);
        fs::write(&file, &bytes[..left]).expect("a file");
        report_one(
            &mut report,
            &original,
            copy.path(),
            &format!("{left} bytes left"),
        );
        progress.step();
    }
    report
}

/// Some of the database file is not what it was.
pub fn changed(seed: u64, runs: usize, progress: &Progress) -> Report {
    changes(
        "changed bytes in the store",
        "plantstore.db",
        seed,
        runs,
        progress,
    )
}

/// The same for the log of a server that was killed.
pub fn changed_log(seed: u64, runs: usize, progress: &Progress) -> Report {
    changes(
        "changed bytes in the log",
        "plantstore.db-wal",
        seed,
        runs,
        progress,
    )
}

fn changes(fault: &'static str, name: &str, seed: u64, runs: usize, progress: &Progress) -> Report {
    let mut report = Report::new(fault, "real binary, `plantstore check`");
    let mut random = Random::new(seed);
    let is_log = name.ends_with("-wal");
    let original = Original::new(seed, is_log);
    for _ in 0..runs {
        let copy = original.copy();
        let file = copy.path().join(name);
        let mut bytes = fs::read(&file).expect("a file");
        // The end of a log is what a power cut may take: that it is damaged, nobody can tell.
        let end = if is_log {
            last_commits(&bytes)
        } else {
            bytes.len()
        };
        let what = damage(&mut bytes[..end], &mut random);
        fs::write(&file, bytes).expect("a file");
        report_one(&mut report, &original, copy.path(), &what);
        progress.step();
    }
    report
}

/// Bits, or a whole block, zeroed or full of something else.
fn damage(bytes: &mut [u8], random: &mut Random) -> String {
    let block = random.index(bytes.len().div_ceil(4096)) * 4096;
    let end = bytes.len().min(block + 4096);
    match random.below(4) {
        0 => {
            bytes[block..end].fill(0);
            format!("zeroed at {block}")
        }
        1 => {
            bytes[block..end].fill_with(|| random.next().to_le_bytes()[0]);
            format!("garbled at {block}")
        }
        _ => {
            let places: Vec<_> = (0..=random.below(4))
                .map(|_| random.index(bytes.len()))
                .collect();
            for at in &places {
                bytes[*at] ^= 1 << random.below(8);
            }
            format!("flipped at {places:?}")
        }
    }
}

/// Where the last two commits of a log begin. A frame is 24 bytes and a page; those that end a commit have a size in
/// their fifth to eighth byte.
fn last_commits(log: &[u8]) -> usize {
    let frames: Vec<_> = log[32..].chunks_exact(24 + 4096).collect();
    let salts = &log[16..24];
    let of_this_log = frames.iter().take_while(|frame| &frame[8..16] == salts);
    let commits: Vec<_> = of_this_log
        .enumerate()
        .filter(|(_, frame)| frame[4..8] != [0; 4])
        .map(|(number, _)| number)
        .collect();
    32 + (commits[commits.len() - 3] + 1) * (24 + 4096)
}

fn report_one(report: &mut Report, original: &Original, place: &Path, what: &str) {
    let wrong = inspect(original, place);
    let wrong = wrong.into_iter().map(|wrong| format!("{wrong} ({what})"));
    report.add(1, original.ledger.acknowledged().count(), wrong.collect());
}

fn inspect(original: &Original, place: &Path) -> Vec<String> {
    let mut wrong = Vec::new();
    let checked = run(place, &["check"]);
    let said = String::from_utf8_lossy(&[checked.stdout, checked.stderr].concat()).into_owned();
    match checked.status.code() {
        Some(0) => {
            let violations = original.ledger.violations_in(&place.join("plantstore.db"));
            wrong.extend(
                violations
                    .into_iter()
                    .map(|lost| format!("{lost}, and check says nothing")),
            );
        }
        Some(1) if !said.contains("panicked") => {}
        other => wrong.push(format!("wrong: check ends with {other:?}: {said}")),
    }
    let mut command = plantstore(place);
    command.args(["serve", "--listen", "127.0.0.1:0"]);
    match Server::try_start_command(command, place) {
        Ok(mut server) => {
            wrong.extend(wrong_responses(&server, &original.ledger));
            if server.has_ended() && server.wait_for_exit().code() != Some(1) {
                wrong.push("wrong: it did not end with 1".to_owned());
            }
            if server.everything_logged().contains("panicked") {
                wrong.push(format!("wrong: {}", server.everything_logged()));
            }
        }
        Err(said) if said.contains("panicked") || !said.contains("plantstore: ") => {
            wrong.push(format!("wrong: it starts with {said}"));
        }
        Err(_) => {}
    }
    wrong
}

/// Sends everything again. A 200, a 5xx or a refused token are right, or at least safe; that an id belongs to another would
/// be wrong, and so would be that a plant is none.
fn wrong_responses(server: &Server, ledger: &Ledger) -> Vec<String> {
    let token = server.token();
    let mut wrong = Vec::new();
    for sent in ledger.acknowledged() {
        let Ok(mut client) = Client::try_connect(server.address()) else {
            break; // it has ended, as it may
        };
        client.send_as_far_as_it_goes(add_request(&token, body(sent).as_bytes()));
        let Some(response) = client.try_response() else {
            break;
        };
        if response.status == 400 {
            wrong.push(format!(
                "wrong: {sent:?} was acknowledged, and now gets {response:?}"
            ));
        }
    }
    wrong
}
