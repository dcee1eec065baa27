//! Disk faults under the real binary: failed syncs, full disks, slow syncs.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use crate::checker::{History, Outcome};
use crate::harness::{Server, directory, output};
use crate::load::{Load, after_restart, send_again};
use crate::power_cuts;
use crate::random::Random;
use crate::report::{Progress, Report};
use crate::simulated_disk::Disk;
use crate::strace;

/// One fdatasync fails, and the pages that it should have written are lost, although the next fdatasync succeeds. No add that
/// depends on them may be acknowledged, and the process has to exit.
pub fn failed_sync(seed: u64, runs: usize, progress: &Progress) -> Report {
    let mut report = Report::new("EIO from fdatasync", "strace, then a simulated power cut");
    let mut random = Random::new(seed);
    let mut seconds = Vec::new();
    for _ in 0..runs {
        let place = directory();
        let mut events = {
            let mut server = Server::start_under_strace(place.path(), &strace::RECORD, &[]);
            assert!(server.terminate().success());
            strace::events(&power_cuts::ended(server), place.path())
        };
        // strace counts calls per thread; opening the store takes 5 of the writer thread's.
        let at = 6 + random.below(40);
        let inject = format!("inject=fdatasync:error=EIO:when={at}");
        let strace = [&strace::RECORD[..], &["-ttt", "-e", &inject]].concat();
        let mut server = Server::start_under_strace(place.path(), &strace, &[]);
        let load = Load {
            clients: 4,
            plants: 100,
            seed: random.next(),
            ..Load::default()
        };
        let history = load.start(server.address(), &server.token()).finish();
        let code = server.wait_for_exit().code();
        let (times, calls) = without_times(&power_cuts::ended(server));
        events.extend(strace::events(&calls, place.path()));

        let mut disk = Disk::default();
        for event in &events {
            disk.apply(event);
        }
        let left = power_cuts::scratch();
        disk.cut(&mut random, left.path());
        let mut wrong = power_cuts::check(left.path(), &history);
        if code != Some(1) {
            wrong.push(format!("wrong: exit code {code:?}"));
        }
        seconds.extend(times);
        report.add(1, history.acknowledged().count(), wrong);
        progress.step();
    }
    seconds.sort_by(f64::total_cmp);
    let median = seconds.get(seconds.len() / 2).copied().unwrap_or(f64::MAX);
    // The process waits at most 0.7 s for its last responses to be sent; a busy machine takes longer.
    if median > 10.0 {
        report.add(
            0,
            0,
            vec![format!("wrong: the process took {median} s to exit")],
        );
    }
    report.note = format!("exits {median:.2} s after the failure (median)");
    report
}

/// Removes the timestamp of every line; returns the seconds from the failed sync to the exit of the process.
fn without_times(recording: &str) -> (Option<f64>, String) {
    let mut failed = None;
    let mut ended = None;
    let mut lines = Vec::new();
    for line in recording.lines() {
        let (thread, rest) = line.split_once(' ').unwrap_or_default();
        let (time, call) = rest.trim_start().split_once(' ').unwrap_or_default();
        if call.contains("EIO") {
            failed = time.parse::<f64>().ok();
        }
        if call.starts_with("+++ exited") {
            ended = time.parse::<f64>().ok();
        }
        lines.push(format!("{thread} {call}"));
    }
    (
        failed.zip(ended).map(|(from, to)| to - from),
        lines.join("\n"),
    )
}

/// Writes fail with ENOSPC for some time.
pub fn no_space(seed: u64, runs: usize, progress: &Progress) -> Report {
    let mut report = Report::new("ENOSPC", "strace, real binary");
    let mut random = Random::new(seed);
    for _ in 0..runs {
        let place = directory();
        assert!(Server::start_in(place.path(), &[]).terminate().success());
        // strace counts calls per thread; opening the store takes 14 of the writer thread's.
        let first = 16 + random.below(60);
        let last = first + 10 + random.below(40);
        let fault = format!("pwrite64:error=ENOSPC:when={first}..{last}");
        let mut server = Server::start_with_fault(place.path(), &fault, &[]);
        let load = Load {
            clients: 4,
            plants: 200,
            seed: random.next(),
            ..Load::default()
        };
        let mut history = load.start(server.address(), &server.token()).finish();
        let wrong = works_again(&mut server, &mut history);
        report.add(1, history.acknowledged().count(), wrong);
        progress.step();
    }
    report
}

/// The file system is full.
pub fn full_disk(seed: u64, runs: usize, progress: &Progress) -> Report {
    let mut report = Report::new("full disk", "a tmpfs of 8 MiB and a file that fills it");
    let mut random = Random::new(seed);
    for _ in 0..runs {
        let place = SmallDisk::new();
        let mut server = Server::start_in(place.path(), &[]);
        place.fill(random.below(200 << 10));
        let load = Load {
            clients: 4,
            plants: 60,
            seed: random.next(),
            ..Load::default()
        };
        let mut history = load.start(server.address(), &server.token()).finish();
        place.make_room();
        let wrong = works_again(&mut server, &mut history);
        report.add(1, history.acknowledged().count(), wrong);
        progress.step();
        drop(server);
    }
    report
}

/// The server responded 50302 at least once, kept every acknowledged plant, and accepts all plants now without a restart.
fn works_again(server: &mut Server, history: &mut History) -> Vec<String> {
    let mut wrong = history.violations_in(&server.directory().join("plantstore.db"));
    if history.count(Outcome::Full) == 0 {
        wrong.push("wrong: no response was 50302".to_owned());
    }
    let attempts = history.attempts().cloned().collect();
    wrong.extend(send_again(server, attempts, history));
    server.kill();
    let server = Server::start_in(server.directory(), &[]);
    wrong.extend(after_restart(&server, history));
    wrong
}

/// A tmpfs that is small enough to be filled.
struct SmallDisk(TempDir);

impl SmallDisk {
    fn new() -> Self {
        let place = directory();
        let owner = fs::metadata(place.path()).expect("a directory");
        let owner = std::os::unix::fs::MetadataExt::uid(&owner);
        let options = format!("size=8m,mode=0700,uid={owner}");
        as_root(
            &["mount", "-t", "tmpfs", "-o", &options, "tmpfs"],
            place.path(),
        );
        Self(place)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// Fills the file system up to `left` bytes.
    fn fill(&self, left: u64) {
        let mut ballast = File::create(self.path().join("ballast")).expect("a file");
        let block = [0; 4096];
        let mut size: u64 = 0;
        while ballast.write_all(&block).is_ok() {
            size += block.len() as u64;
        }
        ballast.set_len(size.saturating_sub(left)).expect("less");
    }

    fn make_room(&self) {
        fs::remove_file(self.path().join("ballast")).expect("the ballast");
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        as_root(&["umount", "--lazy"], self.path());
    }
}

/// Runs a command as root, with this path as its last argument.
pub fn as_root(command: &[&str], path: &Path) {
    let root = fs::metadata("/proc/self").expect("proc");
    let root = std::os::unix::fs::MetadataExt::uid(&root) == 0;
    let words = [if root { &[][..] } else { &["sudo"][..] }, command].concat();
    let done = output(Command::new(words[0]).args(&words[1..]).arg(path));
    assert!(done.status.success(), "{words:?} needs root: {done:?}");
}

/// Every fdatasync takes 200 ms: the queue stays bounded, further adds get 50300 at once, and memory does not grow.
pub fn slow_syncs(seed: u64, runs: usize, progress: &Progress) -> Report {
    let mut report = Report::new(
        "slow fdatasync (200 ms)",
        "strace, real binary, 48 clients, a queue of 16",
    );
    for run in 0..runs {
        let place = directory();
        let fault = "fdatasync:delay_enter=200000";
        let server = Server::start_with_fault(place.path(), fault, &["--max-queue", "16"]);
        let mut history = History::default();
        let mut peaks = Vec::new();
        for round in 0..3 {
            let load = Load {
                clients: 48,
                plants: 3,
                first_id: round << 40,
                seed: seed ^ (run as u64) << 8 ^ u64::try_from(round).expect("small"),
                ..Load::default()
            };
            history.append(load.start(server.address(), &server.token()).finish());
            peaks.push(server.peak_kib());
        }
        let mut wrong = after_restart(&server, &mut history);
        if history.count(Outcome::Busy) == 0 {
            wrong.push("wrong: no response was 50300".to_owned());
        }
        if peaks[2] > peaks[0] + peaks[0] / 4 {
            wrong.push(format!("wrong: memory grows: {peaks:?} KiB"));
        }
        report.add(1, history.acknowledged().count(), wrong);
        progress.step();
    }
    report
}
