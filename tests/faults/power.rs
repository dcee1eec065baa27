//! Power cuts: a run of the real binary is recorded, system call by system call; then the power goes after
//! every one of them, and what is left of the disk is opened by the real code and checked.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use plantstore::plant::NewPlant;
use plantstore::store::{Addition, Location, Outcome, Store, TokenId};
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use crate::checker::{Ledger, Sent, Told};
use crate::disk::Disk;
use crate::harness::Server;
use crate::load::{Load, body};
use crate::random::Random;
use crate::report::{Progress, Report};
use crate::trace::{self, Event};

/// A recording, and what clients attempted in it.
#[derive(Serialize, Deserialize)]
struct Recording {
    name: String,
    events: Vec<Event>,
    attempted: Vec<Sent>,
    /// Events before this one are history: the power stays on.
    first_cut: usize,
}

/// Cuts the power `cuts` times in a run with load: at every event in turn, over and over.
pub fn cuts(seed: u64, plants: u64, cuts: usize, progress: &Progress) -> Report {
    let method = "recorded run, disk rebuilt at every write, sync and response";
    let load = Load {
        clients: 4,
        plants: plants / 4,
        seed,
        ..Load::default()
    };
    let mut report = Report::new("power cut", method);
    cut_under(load, "power-cuts", cuts, progress, &mut report);
    report
}

/// The same in a run with plants so large that the log is moved into the database on the way, and starts again.
pub fn cuts_at_checkpoints(seed: u64, cuts: usize, progress: &Progress) -> Report {
    let load = Load {
        clients: 2,
        plants: 90,
        name_len: 100_000,
        seed,
        ..Load::default()
    };
    let mut report = Report::new(
        "power cut at a checkpoint",
        "recorded run with large plants",
    );
    let events = cut_under(load, "checkpoints", cuts, progress, &mut report);
    // More than the log may hold: it was moved while adds went on, and then begun again, with its header.
    let moved = events
        .iter()
        .filter(|event| matches!(event, Event::Write { file, .. } if file == "plantstore.db"))
        .count();
    let begun_again = events
        .iter()
        .skip_while(|event| !matches!(event, Event::Response(_)))
        .filter(|event| {
            matches!(event, Event::Write { file, offset: 0, .. } if file == "plantstore.db-wal")
        })
        .count();
    if moved < 500 || begun_again == 0 {
        let found = format!("wrong: {moved} pages moved, the log begun again {begun_again} times");
        report.add(0, 0, vec![found]);
    }
    report
}

/// Records a run and cuts the power in it; gives the recording.
fn cut_under(
    load: Load,
    name: &str,
    cuts: usize,
    progress: &Progress,
    report: &mut Report,
) -> Vec<Event> {
    let directory = crate::harness::directory();
    let server = Server::start_under_strace(directory.path(), &trace::RECORD, &[]);
    let ledger = load.start(server.address(), &server.token()).finish();
    let recording = Recording {
        name: name.to_owned(),
        events: trace::events(&end(server), directory.path()),
        attempted: ledger.attempts().cloned().collect(),
        first_cut: 0,
    };
    cut_everywhere(&recording, load.seed, cuts, progress, report);
    recording.events
}

/// Ghost acknowledgements: killed inside a sync, started again, the same plant sent again and acknowledged, and
/// then the power goes.
pub fn ghosts(seed: u64, kills: usize, cuts: usize, progress: &Progress) -> Report {
    let mut report = Report::new(
        "kill in a sync, retry, power cut",
        "two recorded runs on one disk",
    );
    for number in 0..kills {
        let directory = crate::harness::directory();
        // A store with its token, ended in good order, so that the kill meets an add.
        let mut history = {
            let mut server = Server::start_under_strace(directory.path(), &trace::RECORD, &[]);
            assert!(server.terminate().success());
            trace::events(&ended(server), directory.path())
        };
        // Calls are counted for each thread, and the one that opens the store makes 5.
        let kill = format!("inject=fdatasync:signal=KILL:when={}", 6 + number % 6);
        let strace = [&trace::RECORD[..], &["-e", &kill]].concat();
        let server = Server::start_under_strace(directory.path(), &strace, &[]);
        let load = Load {
            clients: 2,
            plants: 50,
            seed: seed + number as u64,
            ..Load::default()
        };
        let first = load.start(server.address(), &server.token()).finish();
        // It is dead already, unless it is a broken one that does not sync at all.
        history.extend(trace::events(&end(server), directory.path()));
        let first_cut = history.len();

        let server = Server::start_under_strace(directory.path(), &trace::RECORD, &[]);
        let mut client = server.connect();
        for sent in first.attempts() {
            client.add(&server.token(), body(sent).as_bytes());
        }
        history.extend(trace::events(&end(server), directory.path()));
        let recording = Recording {
            name: format!("ghosts-{number}"),
            events: history,
            attempted: first.attempts().cloned().collect(),
            first_cut,
        };
        cut_everywhere(
            &recording,
            seed ^ (number as u64) << 32,
            cuts / kills,
            progress,
            &mut report,
        );
    }
    report
}

/// Cuts the power in a recording that was kept, at the same places in the same way.
pub fn replay(kept: &Path, seed: u64, cuts: usize, progress: &Progress) -> Report {
    let mut report = Report::new("power cut", "a recording that was kept");
    let recording = fs::read(kept).expect("a recording");
    let recording = serde_json::from_slice(&recording).expect("a recording");
    cut_everywhere(&recording, seed, cuts, progress, &mut report);
    report
}

/// Kills the service, so that its end is no part of the recording, and gives the recording.
pub fn end(mut server: Server) -> String {
    server.kill();
    ended(server)
}

pub fn ended(mut server: Server) -> String {
    server.wait_for_exit();
    // The end of the process is the last thing that the tracer writes down.
    let pid = format!("{} ", server.pid());
    let is_last = |line: &str| line.starts_with(&pid) && line.contains(" +++ ");
    crate::harness::wait_until("the recording is complete", || {
        server.trace().lines().any(is_last)
    });
    let recording = server.trace();
    fs::remove_file(server.directory().join("strace.out")).expect("a recording");
    recording
}

fn cut_everywhere(
    recording: &Recording,
    seed: u64,
    cuts: usize,
    progress: &Progress,
    report: &mut Report,
) {
    let points = recording.events.len() - recording.first_cut;
    let rounds = cuts.div_ceil(points.max(1));
    // Where there are more places than cuts, one in so many.
    let stride = (points / cuts.max(1)).max(1);
    let next = AtomicUsize::new(0);
    let worker = || {
        let place = scratch();
        let mut wrong = Vec::new();
        loop {
            let round = next.fetch_add(1, Ordering::Relaxed);
            if round >= rounds {
                return wrong;
            }
            wrong.extend(cut_once_everywhere(
                recording,
                (seed, round as u64),
                stride,
                place.path(),
                progress,
            ));
        }
    };
    let wrong: Vec<String> = thread::scope(|scope| {
        let workers = [scope.spawn(worker), scope.spawn(worker)];
        workers
            .into_iter()
            .flat_map(|worker| worker.join().expect("no panic"))
            .collect()
    });
    if !wrong.is_empty() {
        let kept = keep(recording);
        println!(
            "replay: --replay {} --seed {seed} --cuts {cuts}",
            kept.display()
        );
    }
    let acknowledged = recording
        .events
        .iter()
        .filter_map(|event| acknowledged(event, &recording.attempted));
    report.add(
        rounds * points.div_ceil(stride),
        acknowledged.count(),
        wrong,
    );
}

/// Writes a recording down, to be cut again.
fn keep(recording: &Recording) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}.json", recording.name));
    let json = serde_json::to_vec(recording).expect("a recording");
    fs::write(&path, json).expect("a file");
    path
}

/// One cut after each event, or after one in so many.
fn cut_once_everywhere(
    recording: &Recording,
    (seed, round): (u64, u64),
    stride: usize,
    place: &Path,
    progress: &Progress,
) -> Vec<String> {
    let mut disk = Disk::default();
    let mut ledger = Ledger::default();
    for sent in &recording.attempted {
        ledger.note(sent.clone(), Told::Nothing);
    }
    let mut wrong = Vec::new();
    for (at, event) in recording.events.iter().enumerate() {
        disk.apply(event);
        if let Some(sent) = acknowledged(event, &recording.attempted) {
            ledger.note(sent.clone(), Told::Stored);
        }
        if at < recording.first_cut || !(at - recording.first_cut).is_multiple_of(stride) {
            continue;
        }
        let mut random = Random::new(seed ^ round << 20 ^ at as u64);
        empty(place);
        disk.cut(&mut random, place);
        for violation in check(place, &ledger) {
            wrong.push(format!(
                "seed {seed}, round {round}, event {at}: {violation}"
            ));
        }
        progress.step();
    }
    wrong
}

/// Opens what is left with the real code; everything acknowledged must be there, and it must take adds again.
pub fn check(place: &Path, ledger: &Ledger) -> Vec<String> {
    let path = place.join("plantstore.db");
    let location = Location::Sqlite(path.clone());
    let opened = Store::open_writers(&location, 1, Duration::from_secs(60));
    let mut stores = match opened {
        Ok(opened) => opened,
        Err(error) => {
            return vec![format!(
                "wrong: does not open: {:#}",
                anyhow::Error::from(error)
            )];
        }
    };
    let wrong = ledger.violations_in(&path);
    let token = TokenId(1);
    let probe = NewPlant::from_json(br#"{"id":-1,"name":"after the cut"}"#).expect("a plant");
    match stores[0].add(
        &[Addition {
            plant: probe,
            token,
        }],
        &[],
    ) {
        Ok(outcomes) if outcomes == [Outcome::Added] => wrong,
        other => [wrong, vec![format!("wrong: takes no adds: {other:?}")]].concat(),
    }
}

/// The plant that a response of 200 is about: names are unique.
pub fn acknowledged<'a>(event: &Event, attempted: &'a [Sent]) -> Option<&'a Sent> {
    let Event::Response(bytes) = event else {
        return None;
    };
    let text = std::str::from_utf8(bytes)
        .ok()?
        .strip_prefix("HTTP/1.1 200 ")?;
    let (_, json) = text.split_once("\r\n\r\n")?;
    let response: serde_json::Value = serde_json::from_str(json).ok()?;
    attempted
        .iter()
        .find(|(_, name, _)| response["name"] == name.as_str())
}

/// Memory, if there is a file system for it: only the simulated disk has to be slow.
pub fn scratch() -> TempDir {
    let memory = PathBuf::from("/dev/shm");
    if memory.is_dir() {
        tempfile::tempdir_in(memory)
    } else {
        tempfile::tempdir()
    }
    .expect("a directory")
}

fn empty(place: &Path) {
    for entry in fs::read_dir(place).expect("a directory") {
        fs::remove_file(entry.expect("an entry").path()).expect("a file");
    }
}
