//! Simulated power cuts: the system calls of a run are recorded with strace. Then, for a power cut after each of them, the
//! disk is rebuilt as it could have been, opened by the store's own code, and checked.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use plantstore::{Addition, Location, NewPlant, Store, TokenId};
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use crate::checker::{History, Outcome, Sent};
use crate::harness::Server;
use crate::load::{Load, body};
use crate::random::Random;
use crate::report::{Progress, Report};
use crate::simulated_disk::Disk;
use crate::strace::{self, Event};

/// The recorded system calls of a run, and the plants that clients sent in it.
#[derive(Serialize, Deserialize)]
struct Recording {
    name: String,
    events: Vec<Event>,
    attempted: Vec<Sent>,
    /// The first event after which the power is cut.
    first_cut: usize,
}

/// Cuts the power `cuts` times: after every event of a run in turn, repeatedly.
pub fn cuts(seed: u64, plants: u64, cuts: usize, progress: &Progress) -> Report {
    let method = "recorded run, disk rebuilt after every write, sync and response";
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

/// The same with plants so large that a checkpoint runs, and the WAL is restarted, during the run.
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
    // The run has to include a checkpoint under load and a WAL that is restarted, with a new header.
    let checkpointed = events
        .iter()
        .filter(|event| matches!(event, Event::Write { file, .. } if file == "plantstore.db"))
        .count();
    let restarts = events
        .iter()
        .skip_while(|event| !matches!(event, Event::Response(_)))
        .filter(|event| {
            matches!(event, Event::Write { file, offset: 0, .. } if file == "plantstore.db-wal")
        })
        .count();
    if checkpointed < 500 || restarts == 0 {
        let found = format!("wrong: {checkpointed} pages checkpointed, {restarts} WAL restarts");
        report.add(0, 0, vec![found]);
    }
    report
}

/// Records a run and cuts the power in it; returns the recorded events.
fn cut_under(
    load: Load,
    name: &str,
    cuts: usize,
    progress: &Progress,
    report: &mut Report,
) -> Vec<Event> {
    let directory = crate::harness::directory();
    let server = Server::start_under_strace(directory.path(), &strace::RECORD, &[]);
    let history = load.start(server.address(), &server.token()).finish();
    let events = strace::events(&kill(server), directory.path());
    let recording = Recording {
        name: name.to_owned(),
        events: strace::decrypt(events, history.received()),
        attempted: history.attempts().cloned().collect(),
        first_cut: 0,
    };
    cut_everywhere(&recording, load.seed, cuts, progress, report);
    recording.events
}

/// The server is killed inside an fdatasync and restarted, the same plants are sent again and acknowledged, and then the power
/// is cut. The rows are visible before the retry, but must not be acknowledged before they are durable.
pub fn after_retries(seed: u64, kills: usize, cuts: usize, progress: &Progress) -> Report {
    let mut report = Report::new(
        "kill in a sync, retry, power cut",
        "two recorded runs on one disk",
    );
    for number in 0..kills {
        let directory = crate::harness::directory();
        // A store that has its token already, so that the kill hits an add.
        let mut events = {
            let mut server = Server::start_under_strace(directory.path(), &strace::RECORD, &[]);
            assert!(server.terminate().success());
            strace::events(&ended(server), directory.path())
        };
        // strace counts calls per thread; opening the store takes 5 of the writer thread's.
        let inject = format!("inject=fdatasync:signal=KILL:when={}", 6 + number % 6);
        let strace = [&strace::RECORD[..], &["-e", &inject]].concat();
        let server = Server::start_under_strace(directory.path(), &strace, &[]);
        let load = Load {
            clients: 2,
            plants: 50,
            seed: seed + number as u64,
            ..Load::default()
        };
        let first = load.start(server.address(), &server.token()).finish();
        // The server is dead already, unless a deliberate break removed all syncs.
        let of_first = strace::events(&kill(server), directory.path());
        events.extend(strace::decrypt(of_first, first.received()));
        let first_cut = events.len();

        let server = Server::start_under_strace(directory.path(), &strace::RECORD, &[]);
        let mut client = server.connect();
        let mut retries = History::default();
        for sent in first.attempts() {
            let response = client.add(&server.token(), body(sent).as_bytes());
            if let (200, Some(received)) = (response.status, client.received()) {
                retries.note_received(sent.clone(), received);
            }
        }
        let of_retries = strace::events(&kill(server), directory.path());
        events.extend(strace::decrypt(of_retries, retries.received()));
        let recording = Recording {
            name: format!("retries-{number}"),
            events,
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

/// Repeats the power cuts of a saved recording.
pub fn replay(kept: &Path, seed: u64, cuts: usize, progress: &Progress) -> Report {
    let mut report = Report::new("power cut", "saved recording");
    let recording = fs::read(kept).expect("a recording");
    let recording = serde_json::from_slice(&recording).expect("a recording");
    cut_everywhere(&recording, seed, cuts, progress, &mut report);
    report
}

/// Kills the server, so that its shutdown is not recorded, and returns the recording.
pub fn kill(mut server: Server) -> String {
    server.kill();
    ended(server)
}

pub fn ended(mut server: Server) -> String {
    server.wait_for_exit();
    // The exit of the process is the last line that strace writes.
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
    // With more events than cuts, the cuts are spread evenly.
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
        let kept = save(recording);
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

/// Saves a recording for `--replay`.
fn save(recording: &Recording) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}.json", recording.name));
    let json = serde_json::to_vec(recording).expect("a recording");
    fs::write(&path, json).expect("a file");
    path
}

/// One cut after every `stride`-th event.
fn cut_once_everywhere(
    recording: &Recording,
    (seed, round): (u64, u64),
    stride: usize,
    place: &Path,
    progress: &Progress,
) -> Vec<String> {
    let mut disk = Disk::default();
    let mut history = History::default();
    for sent in &recording.attempted {
        history.note(sent.clone(), Outcome::Unknown);
    }
    let mut wrong = Vec::new();
    for (at, event) in recording.events.iter().enumerate() {
        disk.apply(event);
        if let Some(sent) = acknowledged(event, &recording.attempted) {
            history.note(sent.clone(), Outcome::Acknowledged);
        }
        if at < recording.first_cut || !(at - recording.first_cut).is_multiple_of(stride) {
            continue;
        }
        let mut random = Random::new(seed ^ round << 20 ^ at as u64);
        empty(place);
        disk.cut(&mut random, place);
        for violation in check(place, &history) {
            wrong.push(format!(
                "seed {seed}, round {round}, event {at}: {violation}"
            ));
        }
        progress.step();
    }
    wrong
}

/// Opens the rebuilt files with the store's own code: every acknowledged plant has to be there, and an add has to succeed.
pub fn check(place: &Path, history: &History) -> Vec<String> {
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
    let wrong = history.violations_in(&path);
    let token = TokenId(1);
    let probe = NewPlant::from_json(br#"{"id":-1,"name":"after the cut"}"#).expect("a plant");
    match stores[0].add(
        &[Addition {
            plant: probe,
            token,
        }],
        &[],
    ) {
        Ok(outcomes) if outcomes == [plantstore::Outcome::Added] => wrong,
        other => [wrong, vec![format!("wrong: an add fails: {other:?}")]].concat(),
    }
}

/// The plant that a 200 response acknowledges: names are unique.
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

/// A temporary directory, in memory if possible: these files need no durability.
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
