//! Operator and file accidents: a person at a shell, a moved file, a leftover file, a wrong clock. Every case runs the real
//! binary in a directory of its own. No acknowledged plant may be lost, and nothing may be silent: a command that would
//! destroy data fails with a sentence, and a server whose files are gone stops.

mod commands;
mod limits;
mod postgres;
mod running;
mod stopped;
mod targets;

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::checker::{Ledger, Told};
use crate::harness::{HANG, PATIENCE, Server, directory, plantstore, wait_until};
use crate::load::{Load, Running};
use crate::report::{Progress, thousands};

/// Cases that run at the same time.
const PARALLEL: usize = 4;

/// How long a server may take to stop after its files are gone. It has three seconds; a loaded machine takes longer.
const STOP_LIMIT: Duration = Duration::from_secs(20);

/// A problem may quote the output of a command; so much of it is printed.
const PROBLEM_LEN: usize = 600;

/// The header of the table.
pub const HEAD: &str = "| accident | what is done | expected result | cases | acknowledged | lost | silent | wrong |\n|---|---|---|---|---|---|---|---|";

type Accident = Box<dyn Fn(&mut Case) + Send + Sync>;

/// A row of the table: accidents of one kind.
pub struct Row {
    name: &'static str,
    done: &'static str,
    expected: &'static str,
    cases: Vec<(String, Accident)>,
    count: usize,
    acknowledged: usize,
    /// Each begins with `lost: `, `silent: `, `wrong: ` or `hang: `.
    pub problems: Vec<String>,
}

impl Row {
    fn new(name: &'static str, done: &'static str, expected: &'static str) -> Self {
        Self {
            name,
            done,
            expected,
            cases: Vec::new(),
            count: 0,
            acknowledged: 0,
            problems: Vec::new(),
        }
    }

    fn case(
        mut self,
        name: impl Into<String>,
        accident: impl Fn(&mut Case) + Send + Sync + 'static,
    ) -> Self {
        self.cases.push((name.into(), Box::new(accident)));
        self
    }

    /// The line of the table.
    pub fn line(&self) -> String {
        let of_kind = |kind: &str| {
            let found = self.problems.iter().filter(|said| said.contains(kind));
            found.count()
        };
        let columns = [
            self.name.to_owned(),
            self.done.to_owned(),
            self.expected.to_owned(),
            self.count.to_string(),
            thousands(self.acknowledged),
            of_kind("lost: ").to_string(),
            of_kind("silent: ").to_string(),
            (of_kind("wrong: ") + of_kind("hang: ")).to_string(),
        ];
        format!("| {} |", columns.join(" | "))
    }
}

/// Runs every case whose name, after the name of its row, contains this text.
pub fn run(filter: &str) -> Vec<Row> {
    let mut rows = targets::rows();
    rows.extend(stopped::rows());
    rows.extend(running::rows());
    rows.extend(commands::rows());
    rows.extend(limits::rows());
    rows.extend(postgres::rows());
    for row in &mut rows {
        let name = row.name;
        row.cases
            .retain(|(case, _)| format!("{name}: {case}").contains(filter));
    }
    rows.retain(|row| !row.cases.is_empty());
    let queue: Vec<_> = rows
        .iter()
        .enumerate()
        .flat_map(|(at, row)| row.cases.iter().map(move |case| (at, case)))
        .collect();
    let progress = Progress::new("operator and file accidents", queue.len());
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..PARALLEL {
            scope.spawn(|| {
                while let Some((row, (name, accident))) =
                    queue.get(next.fetch_add(1, Ordering::Relaxed))
                {
                    let case = attempt(name, accident);
                    let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
                    done.push((*row, case));
                    progress.step();
                }
            });
        }
    });
    for (row, case) in done.into_inner().unwrap_or_else(PoisonError::into_inner) {
        let row = &mut rows[row];
        row.count += case.count;
        row.acknowledged += case.ledger.acknowledged().count();
        row.problems.extend(case.problems);
    }
    rows
}

fn attempt(name: &str, accident: &Accident) -> Case {
    let begun = Instant::now();
    let mut case = Case::new();
    // Every wait ends, at the latest by a panic.
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| accident(&mut case))) {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        let text = text.unwrap_or("a panic").to_owned();
        let kind = if text.contains(HANG) { "hang" } else { "wrong" };
        case.problems.push(format!("{kind}: {text}"));
    }
    case.count = case.count.max(1);
    for problem in &mut case.problems {
        let text: String = problem
            .replace('\n', " ")
            .chars()
            .take(PROBLEM_LEN)
            .collect();
        *problem = format!("{name}: {text}");
    }
    if std::env::var_os("ACCIDENTS_VERBOSE").is_some() {
        eprintln!("{name}: {:.1} s", begun.elapsed().as_secs_f64());
    }
    case
}

/// What a command did.
struct Ran {
    code: Option<i32>,
    said: String,
}

/// One accident: its directory, the plants that were acknowledged and what was found to be wrong.
pub struct Case {
    place: TempDir,
    ledger: Ledger,
    problems: Vec<String>,
    /// How many accidents happened in it; 0 means one.
    count: usize,
    runs: i64,
}

impl Case {
    fn new() -> Self {
        Self {
            place: directory(),
            ledger: Ledger::default(),
            problems: Vec::new(),
            count: 0,
            runs: 0,
        }
    }

    fn dir(&self) -> &Path {
        self.place.path()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir().join(name)
    }

    /// The names of the files there, sorted.
    fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(self.dir()).expect("a directory");
        let name = |entry: std::io::Result<fs::DirEntry>| entry.expect("an entry").file_name();
        let mut names: Vec<_> = entries
            .map(|entry| name(entry).to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    /// Gives the directory away, and goes on in an empty one.
    fn take_place(&mut self) -> TempDir {
        std::mem::replace(&mut self.place, directory())
    }

    /// Goes on in a copy of a directory, links included.
    fn copy_of(&mut self, from: &Path) {
        self.place = directory();
        let from = from.join(".");
        let copied = Command::new("cp")
            .arg("-a")
            .arg(from)
            .arg(self.dir())
            .status();
        assert!(copied.expect("cp runs").success());
    }

    fn problem(&mut self, kind: &str, text: impl std::fmt::Display) {
        self.problems.push(format!("{kind}: {text}"));
    }

    fn expect(&mut self, fact: bool, kind: &str, text: impl std::fmt::Display) {
        if !fact {
            self.problem(kind, text);
        }
    }

    /// A server on `plantstore.db`, or on another store by `arguments`.
    fn serve(&self, arguments: &[&str]) -> Server {
        Server::start_in(self.dir(), arguments)
    }

    /// A server that may not start; then what it said.
    fn try_serve(&self, arguments: &[&str]) -> Result<Server, String> {
        let mut command = plantstore(self.dir());
        command
            .args(["serve", "--listen", "127.0.0.1:0"])
            .args(arguments);
        Server::try_start_command(command, self.dir())
    }

    /// The next clients send plants with new ids.
    fn load(&mut self, clients: u64, plants: u64) -> Load {
        self.runs += 1;
        Load {
            clients,
            plants,
            first_id: self.runs << 32,
            seed: self.runs.unsigned_abs(),
            ..Load::default()
        }
    }

    /// Adds plants that must be acknowledged.
    fn add(&mut self, server: &Server) {
        let load = self.load(2, 20);
        let ledger = load.start(server.address(), &server.token()).finish();
        let answered = ledger.count(Told::Stored) + ledger.count(Told::Taken);
        let attempts = ledger.attempts().count();
        self.expect(
            answered == attempts,
            "wrong",
            format!("{answered} of {attempts} adds were answered 200: {ledger:?}"),
        );
        self.ledger.append(ledger);
    }

    /// A store whose server was killed: its last plants are in the WAL only.
    fn killed(&mut self) {
        let mut server = self.serve(&[]);
        self.add(&server);
        server.kill();
        assert!(fs::metadata(self.path("plantstore.db-wal")).is_ok_and(|wal| wal.len() > 0));
    }

    /// A store whose server ended after SIGTERM.
    fn stopped(&mut self) {
        let mut server = self.serve(&[]);
        self.add(&server);
        assert!(server.terminate().success());
    }

    /// Runs a command of the binary to its end.
    fn run(&self, arguments: &[&str]) -> Ran {
        let mut command = plantstore(self.dir());
        command.args(arguments);
        ran(command)
    }

    /// Runs a command through a shell, which knows the binary as `$0` and its arguments as `$@`.
    fn shell(&self, script: &str, arguments: &[&str]) -> Ran {
        let plain = plantstore(self.dir());
        let mut command = Command::new("sh");
        command.args(["-c", script]).arg(plain.get_program());
        command
            .args(arguments)
            .current_dir(self.dir())
            .stdin(Stdio::null());
        for (name, value) in plain.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        ran(command)
    }

    /// A command that must succeed; gives its output.
    fn succeeds(&mut self, arguments: &[&str]) -> String {
        let ran = self.run(arguments);
        if ran.code != Some(0) {
            self.problem("wrong", format!("{arguments:?} fails: {}", ran.said));
        }
        ran.said
    }

    /// A command that must fail with a sentence that contains these words.
    fn refused(&mut self, arguments: &[&str], words: &[&str]) {
        let ran = self.run(arguments);
        self.is_refusal(&format!("{arguments:?}"), &ran, words);
    }

    fn is_refusal(&mut self, what: &str, ran: &Ran, words: &[&str]) {
        match ran.code {
            Some(0) => self.problem("silent", format!("{what} succeeds: {}", ran.said)),
            Some(_) if is_sentence(&ran.said) => {
                let missing = words.iter().find(|word| !ran.said.contains(**word));
                if let Some(missing) = missing {
                    self.problem("wrong", format!("{what} without {missing:?}: {}", ran.said));
                }
            }
            code => self.problem("wrong", format!("{what} ends with {code:?}: {}", ran.said)),
        }
    }

    /// A server that must not start, and must say why with these words.
    fn serve_refused(&mut self, arguments: &[&str], words: &[&str]) {
        let ran = match self.try_serve(arguments) {
            Ok(_) => Ran {
                code: Some(0),
                said: "it listens".to_owned(),
            },
            Err(said) => Ran {
                code: Some(1),
                said,
            },
        };
        self.is_refusal("serve", &ran, words);
    }

    /// What is stored there must be everything that was acknowledged, and sound. The check runs on a copy: SQLite changes
    /// the files of a store when it closes them.
    fn complete(&mut self, database: &Path) {
        let problems = self.problems_of(database);
        self.problems.extend(problems);
    }

    fn problems_of(&self, database: &Path) -> Vec<String> {
        if !database.exists() {
            let path = database.display();
            return vec![format!("lost: there is no {path} with acknowledged plants")];
        }
        let copy = directory();
        let to = copy.path().join("copy.db");
        for suffix in ["", "-wal"] {
            let _ = fs::copy(beside(database, suffix), beside(&to, suffix));
        }
        let mut problems = self.ledger.violations_in(&to);
        if problems.iter().any(|problem| problem.contains("lost: ")) {
            let lost = problems.len();
            problems.truncate(1);
            problems.push(format!("wrong: {lost} problems in {}", database.display()));
        }
        problems
    }

    /// The store must be complete, by the real binary: it serves, takes adds, and `check` finds nothing.
    fn serves_all(&mut self) {
        match self.try_serve(&[]) {
            Ok(server) => {
                self.complete(&self.path("plantstore.db"));
                self.add(&server);
                drop(server);
                self.succeeds(&["check"]);
                self.complete(&self.path("plantstore.db"));
            }
            Err(said) => self.problem("wrong", format!("it does not start: {said}")),
        }
    }

    /// The server keeps its word: either it does not start, with a sentence, or it serves everything.
    fn complete_or_refused(&mut self) {
        match self.try_serve(&[]) {
            Ok(server) => {
                let lost = self.problems_of(&self.path("plantstore.db"));
                if !lost.is_empty() {
                    self.problem("silent", "it serves a store that is not complete");
                }
                self.problems.extend(lost);
                drop(server);
            }
            Err(said) => self.expect(is_sentence(&said), "wrong", said),
        }
    }
}

fn ran(mut command: Command) -> Ran {
    let child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let child = child.expect("it runs");
    let pid = child.id().to_string();
    let (sender, output) = std::sync::mpsc::channel();
    thread::spawn(move || sender.send(child.wait_with_output()));
    let Ok(output) = output.recv_timeout(PATIENCE) else {
        let _ = Command::new("kill").args(["-KILL", &pid]).status();
        panic!("{HANG}: {command:?} ends");
    };
    let output = output.expect("its output");
    let said = [output.stderr, output.stdout].concat();
    Ran {
        code: output.status.code(),
        said: String::from_utf8_lossy(&said).into_owned(),
    }
}

/// A command failed as it should: it says why, in words.
fn is_sentence(said: &str) -> bool {
    !said.contains("panicked") && (said.contains("plantstore: ") || said.contains("error: "))
}

/// The file beside a database.
fn beside(database: &Path, suffix: &str) -> PathBuf {
    let mut path = database.as_os_str().to_owned();
    path.push(suffix);
    path.into()
}

/// Whether this becomes true before the time is over.
fn within(limit: Duration, mut fact: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + limit;
    while Instant::now() < end {
        if fact() {
            return true;
        }
        thread::sleep(Duration::from_millis(10));
    }
    fact()
}

/// Waits until clients were told that so many more plants are stored.
fn wait_for_adds(running: &Running, count: usize) {
    let before = running.stored().len();
    wait_until("adds", || running.stored().len() >= before + count);
}
