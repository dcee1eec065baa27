//! Corrupted files: truncated, or with changed bytes. Either the store does not open, or `plantstore check` reports the
//! damage; no client gets a wrong response.

use std::fs;
use std::path::Path;

use tempfile::TempDir;

use crate::checker::History;
use crate::harness::{Client, Server, add_request, directory, plantstore, run};
use crate::load::{Load, body};
use crate::random::Random;
use crate::report::{Progress, Report};

/// A store that is copied and damaged in every run, with the history of its plants.
struct Original {
    place: TempDir,
    history: History,
}

impl Original {
    /// Stopped cleanly, or killed, so that the plants are only in the WAL: there are too few of them for a checkpoint.
    fn new(seed: u64, killed: bool) -> Self {
        let place = directory();
        let mut server = Server::start_in(place.path(), &[]);
        let load = Load {
            clients: 4,
            plants: if killed { 50 } else { 200 },
            seed,
            ..Load::default()
        };
        let history = load.start(server.address(), &server.token()).finish();
        if killed {
            server.kill();
        } else {
            assert!(server.terminate().success());
        }
        Self { place, history }
    }

    fn copy(&self) -> TempDir {
        let copy = directory();
        for name in ["plantstore.db", "plantstore.db-wal", "plantstore.token"] {
            let _ = fs::copy(self.place.path().join(name), copy.path().join(name));
        }
        copy
    }
}

/// The database file is truncated.
pub fn truncated(seed: u64, runs: usize, progress: &Progress) -> Report {
    let mut report = Report::new("database file truncated", "real binary, `plantstore check`");
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

/// Bytes of the database file are changed.
pub fn changed(seed: u64, runs: usize, progress: &Progress) -> Report {
    changes(
        "changed bytes in the database file",
        "plantstore.db",
        seed,
        runs,
        progress,
    )
}

/// Bytes of the WAL of a killed server are changed.
pub fn changed_wal(seed: u64, runs: usize, progress: &Progress) -> Report {
    changes(
        "changed bytes in the WAL",
        "plantstore.db-wal",
        seed,
        runs,
        progress,
    )
}

fn changes(fault: &'static str, name: &str, seed: u64, runs: usize, progress: &Progress) -> Report {
    let mut report = Report::new(fault, "real binary, `plantstore check`");
    let mut random = Random::new(seed);
    let is_wal = name.ends_with("-wal");
    let original = Original::new(seed, is_wal);
    for _ in 0..runs {
        let copy = original.copy();
        let file = copy.path().join(name);
        let mut bytes = fs::read(&file).expect("a file");
        // A damaged end of a WAL cannot be told from a commit that a power cut interrupted.
        let end = if is_wal {
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

/// Flips bits, or overwrites a whole block with zeros or random bytes.
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

/// The offset of the last two commits in a WAL. A frame is a header of 24 bytes and a page; the last frame of a commit has the
/// database size in bytes 4 to 7 of its header.
fn last_commits(wal: &[u8]) -> usize {
    let frames: Vec<_> = wal[32..].chunks_exact(24 + 4096).collect();
    let salts = &wal[16..24];
    let of_this_wal = frames.iter().take_while(|frame| &frame[8..16] == salts);
    let commits: Vec<_> = of_this_wal
        .enumerate()
        .filter(|(_, frame)| frame[4..8] != [0; 4])
        .map(|(number, _)| number)
        .collect();
    assert!(commits.len() > 2, "a WAL with {} commits", commits.len());
    32 + (commits[commits.len() - 3] + 1) * (24 + 4096)
}

fn report_one(report: &mut Report, original: &Original, place: &Path, what: &str) {
    let wrong = inspect(original, place);
    let wrong = wrong.into_iter().map(|wrong| format!("{wrong} ({what})"));
    report.add(1, original.history.acknowledged().count(), wrong.collect());
}

fn inspect(original: &Original, place: &Path) -> Vec<String> {
    let mut wrong = Vec::new();
    let checked = run(place, &["check"]);
    let said = String::from_utf8_lossy(&[checked.stdout, checked.stderr].concat()).into_owned();
    match checked.status.code() {
        Some(0) => {
            let violations = original.history.violations_in(&place.join("plantstore.db"));
            wrong.extend(
                violations
                    .into_iter()
                    .map(|lost| format!("{lost}, but check reports nothing")),
            );
        }
        Some(1) if !said.contains("panicked") => {}
        other => wrong.push(format!("wrong: check ends with {other:?}: {said}")),
    }
    let mut command = plantstore(place);
    command.args(["serve", "--listen", "127.0.0.1:0"]);
    match Server::try_start_command(command, place) {
        Ok(mut server) => {
            wrong.extend(wrong_responses(&server, &original.history));
            if server.has_ended() && server.wait_for_exit().code() != Some(1) {
                wrong.push("wrong: the server did not exit with 1".to_owned());
            }
            if server.everything_logged().contains("panicked") {
                wrong.push(format!("wrong: {}", server.everything_logged()));
            }
        }
        Err(said) if said.contains("panicked") || !said.contains("plantstore: ") => {
            wrong.push(format!(
                "wrong: the server fails to start without a reason: {said}"
            ));
        }
        Err(_) => {}
    }
    wrong
}

/// Sends every acknowledged plant again. 200, 401 and 5xx are correct or at least safe; 400 (a conflict or an invalid plant) is
/// wrong.
fn wrong_responses(server: &Server, history: &History) -> Vec<String> {
    let token = server.token();
    let mut wrong = Vec::new();
    for sent in history.acknowledged() {
        let Ok(mut client) = Client::try_connect(server.address()) else {
            break; // the server may exit
        };
        client.try_send(add_request(&token, body(sent).as_bytes()));
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
