//! Operator and file accidents: wrong commands, moved files, leftover files, a wrong clock. Every case runs the real
//! binary in its own directory. No acknowledged plant may be lost, and no damage may be silent: a command that would
//! destroy data fails with an error message, and a server whose files are gone exits.

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

use crate::checker::{History, Outcome};
use crate::harness::{Server, copy_environment, directory, output, plantstore, wait_until};
use crate::load::{Load, Running};
use crate::report::{Progress, Report, thousands, violation_of_panic};

/// Cases that run at the same time.
const PARALLEL: usize = 4;

/// How long a server may take to stop after its files are gone. It checks them every second; a loaded machine takes longer.
const STOP_LIMIT: Duration = Duration::from_secs(20);

/// A problem may quote the output of a command, which is truncated to this length.
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

    /// As a row of the table of faults.
    pub fn report(&self) -> Report {
        let mut report = Report::new(self.name, self.done);
        let problems = self.problems.iter();
        let problems = problems.map(|said| said.replace("silent: ", "wrong: silent: "));
        report.add(self.count, self.acknowledged, problems.collect());
        report
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

/// Accidents that depend on how clients connect.
pub fn of_clients() -> Vec<Row> {
    limits::rows()
}

pub fn all() -> Vec<Row> {
    let mut rows = targets::rows();
    rows.extend(stopped::rows());
    rows.extend(running::rows());
    rows.extend(commands::rows());
    rows.extend(limits::rows());
    rows.extend(postgres::rows());
    rows
}

/// Runs every case whose name, after the name of its row, contains this text.
pub fn run(mut rows: Vec<Row>, filter: &str) -> Vec<Row> {
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
        row.acknowledged += case.history.acknowledged().count();
        row.problems.extend(case.problems);
    }
    rows
}

fn attempt(name: &str, accident: &Accident) -> Case {
    let started = Instant::now();
    let mut case = Case::new();
    // Every wait has a timeout and then panics.
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| accident(&mut case))) {
        case.problems.push(violation_of_panic(panic.as_ref()));
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
        eprintln!("{name}: {:.1} s", started.elapsed().as_secs_f64());
    }
    case
}

/// The result of a command.
struct Ran {
    code: Option<i32>,
    said: String,
}

/// One accident: its directory, the plants that were acknowledged and what was found to be wrong.
pub struct Case {
    place: TempDir,
    history: History,
    problems: Vec<String>,
    /// How many accidents happened in it; 0 means one.
    count: usize,
    runs: i64,
}

impl Case {
    fn new() -> Self {
        Self {
            place: directory(),
            history: History::default(),
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

    /// Returns the directory, and continues in an empty one.
    fn take_place(&mut self) -> TempDir {
        std::mem::replace(&mut self.place, directory())
    }

    /// Continues in a copy of a directory, including its links.
    fn copy_of(&mut self, from: &Path) {
        self.place = directory();
        let from = from.join(".");
        let copied = output(Command::new("cp").arg("-a").arg(from).arg(self.dir()));
        assert!(copied.status.success(), "{copied:?}");
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

    /// A server that may fail to start; then its output.
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
        let history = load.start(server.address(), &server.token()).finish();
        let succeeded = history.count(Outcome::Acknowledged) + history.count(Outcome::Conflict);
        let attempts = history.attempts().count();
        self.expect(
            succeeded == attempts,
            "wrong",
            format!("{succeeded} of {attempts} adds succeeded: {history:?}"),
        );
        self.history.append(history);
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

    /// Runs a shell script in which `$0` is the binary and `$@` are the arguments.
    fn shell(&self, script: &str, arguments: &[&str]) -> Ran {
        let plain = plantstore(self.dir());
        let mut command = Command::new("sh");
        command.args(["-c", script]).arg(plain.get_program());
        command
            .args(arguments)
            .current_dir(self.dir())
            .stdin(Stdio::null());
        copy_environment(&plain, &mut command);
        ran(command)
    }

    /// A command that must succeed; returns its output.
    fn succeeds(&mut self, arguments: &[&str]) -> String {
        let ran = self.run(arguments);
        if ran.code != Some(0) {
            self.problem("wrong", format!("{arguments:?} fails: {}", ran.said));
        }
        ran.said
    }

    /// A command that must fail with an error message that contains these words.
    fn rejected(&mut self, arguments: &[&str], words: &[&str]) {
        let ran = self.run(arguments);
        self.expect_failure(&format!("{arguments:?}"), &ran, words);
    }

    fn expect_failure(&mut self, what: &str, ran: &Ran, words: &[&str]) {
        match ran.code {
            Some(0) => self.problem("silent", format!("{what} succeeds: {}", ran.said)),
            Some(_) if is_error_message(&ran.said) => {
                let missing = words.iter().find(|word| !ran.said.contains(**word));
                if let Some(missing) = missing {
                    self.problem("wrong", format!("{what} without {missing:?}: {}", ran.said));
                }
            }
            code => self.problem("wrong", format!("{what} ends with {code:?}: {}", ran.said)),
        }
    }

    /// A server that must not start, with an error message that contains these words.
    fn serve_rejected(&mut self, arguments: &[&str], words: &[&str]) {
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
        self.expect_failure("serve", &ran, words);
    }

    /// The database must contain every acknowledged plant and pass the integrity check. This runs on a copy, because SQLite
    /// changes the files of a database when it closes them.
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
            let _ = fs::copy(with_suffix(database, suffix), with_suffix(&to, suffix));
        }
        let mut problems = self.history.violations_in(&to);
        if problems.iter().any(|problem| problem.contains("lost: ")) {
            let lost = problems.len();
            problems.truncate(1);
            problems.push(format!("wrong: {lost} problems in {}", database.display()));
        }
        problems
    }

    /// The store must be complete: the server starts and accepts adds, and `check` reports nothing.
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

    /// Either the server does not start and prints an error message, or it serves every acknowledged plant.
    fn complete_or_rejected(&mut self) {
        match self.try_serve(&[]) {
            Ok(server) => {
                let lost = self.problems_of(&self.path("plantstore.db"));
                if !lost.is_empty() {
                    self.problem("silent", "it serves a store that is not complete");
                }
                self.problems.extend(lost);
                drop(server);
            }
            Err(said) => self.expect(is_error_message(&said), "wrong", said),
        }
    }
}

fn ran(mut command: Command) -> Ran {
    let output = output(&mut command);
    let said = [output.stderr, output.stdout].concat();
    Ran {
        code: output.status.code(),
        said: String::from_utf8_lossy(&said).into_owned(),
    }
}

/// Whether a failed command printed an error message.
fn is_error_message(said: &str) -> bool {
    !said.contains("panicked") && (said.contains("plantstore: ") || said.contains("error: "))
}

/// The path of a database with a suffix, such as `-wal`.
fn with_suffix(database: &Path, suffix: &str) -> PathBuf {
    let mut path = database.as_os_str().to_owned();
    path.push(suffix);
    path.into()
}

/// Whether the condition becomes true within the limit.
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

/// Waits until clients have received this many more acknowledgements.
fn wait_for_adds(running: &Running, count: usize) {
    let before = running.stored().len();
    wait_until("adds", || running.stored().len() >= before + count);
}
