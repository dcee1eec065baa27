//! Every command that writes a file, with every kind of file that it must not overwrite as its target.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use rusqlite::Connection;

use crate::accidents::{Case, Ran, Row, is_error_message, ran};
use crate::harness::{Server, plantstore};

/// The state of the server meanwhile.
#[derive(Clone, Copy, PartialEq)]
enum State {
    Running,
    Killed,
    Stopped,
}

const STATES: [(State, &str); 3] = [
    (State::Running, "server running"),
    (State::Killed, "server killed"),
    (State::Stopped, "server stopped"),
];

/// Files of the store itself.
const OWN: [&str; 7] = [
    "plantstore.db",
    "plantstore.db-wal",
    "plantstore.db-shm",
    "plantstore.db-lock",
    "link.db",
    "link.db-wal",
    "hard.db",
];

/// Other files, and paths where no file can be created.
const OTHERS: [&str; 8] = [
    "backup.db",
    "foreign.db",
    "foreign.db-journal",
    "other.db",
    "other.db-lock",
    "directory",
    "dangling",
    "missing/file",
];

/// A command, with `TARGET` in place of the file name.
struct Writer {
    arguments: &'static [&'static str],
    /// Targets that the command may accept: a store to open, a backup to replace, a name to use.
    may_accept: &'static [&'static str],
}

/// An export or a rejects file may be a new file, never an existing one.
const EXPORTS: [Writer; 3] = [
    Writer {
        arguments: &["export", "TARGET"],
        may_accept: &["dangling"],
    },
    Writer {
        arguments: &["export", "--format", "csv", "TARGET"],
        may_accept: &["dangling"],
    },
    Writer {
        arguments: &["import", "--rejects", "TARGET", "rows.csv"],
        may_accept: &["dangling"],
    },
];

const BACKUPS: [Writer; 2] = [
    Writer {
        arguments: &["backup", "TARGET"],
        may_accept: &["dangling"],
    },
    Writer {
        arguments: &["backup", "--force", "TARGET"],
        may_accept: &["dangling", "backup.db"],
    },
];

/// `restore --force` keeps the replaced store under another name.
const RESTORES: [Writer; 2] = [
    Writer {
        arguments: &["restore", "backup.db", "--store", "sqlite:TARGET"],
        may_accept: &["dangling"],
    },
    Writer {
        arguments: &[
            "restore",
            "backup.db",
            "--force",
            "--store",
            "sqlite:TARGET",
        ],
        may_accept: &[
            "dangling",
            "plantstore.db",
            "link.db",
            "hard.db",
            "other.db",
        ],
    },
];

/// Commands that open a store may open a store; a hard link to one may be rejected or not.
const STORES: &[&str] = &[
    "dangling",
    "plantstore.db",
    "link.db",
    "hard.db",
    "other.db",
];

const OPENERS: [Writer; 4] = [
    Writer {
        arguments: &["token", "create", "new", "--store", "sqlite:TARGET"],
        may_accept: STORES,
    },
    Writer {
        arguments: &["import", "more.csv", "--store", "sqlite:TARGET"],
        may_accept: STORES,
    },
    Writer {
        arguments: &["copy", "--to", "sqlite:TARGET"],
        may_accept: STORES,
    },
    Writer {
        arguments: &[
            "serve",
            "--listen",
            "127.0.0.1:0",
            "--store",
            "sqlite:TARGET",
        ],
        may_accept: STORES,
    },
];

pub fn rows() -> Vec<Row> {
    let matrix = |row: Row, writers: &'static [Writer]| {
        let mut row = row;
        for writer in writers {
            for (state, name) in STATES {
                let name = format!("`{}`, {name}", writer.arguments.join(" "));
                row = row.case(name, move |case| against_all(case, writer, state));
            }
        }
        row
    };
    let kinds = "the store's database, WAL, shared memory and lock file, a symbolic link and a hard link to them, a backup, \
                 another store, another program's database, a directory, a dangling link, a missing directory; server \
                 running, killed and stopped";
    vec![
        matrix(
            Row::new(
                "export or rejects file over a file of a store",
                kinds,
                "fails with a sentence, no file is changed",
            ),
            &EXPORTS,
        ),
        matrix(
            Row::new(
                "backup over a file of a store",
                "the same targets, with and without `--force`",
                "fails; `--force` replaces a backup and nothing else",
            ),
            &BACKUPS,
        ),
        matrix(
            Row::new(
                "restore over a file of a store",
                "the same targets, with and without `--force`",
                "fails; `--force` replaces a store, which is kept under another name",
            ),
            &RESTORES,
        ),
        matrix(
            Row::new(
                "a wrong file as `--store` or `--to`",
                "the same targets; `serve`, `token create`, `import`, `copy`",
                "fails, or opens a store, which stays complete",
            ),
            &OPENERS,
        ),
        Row::new(
            "manual pages over a file of a store",
            "`man --to` a directory where `plantstore.1` is one of the same files, and to a file",
            "fails, or replaces a hard link; no file is changed",
        )
        .case("man", man),
        Row::new(
            "files at temporary names",
            "an unrelated file, a symbolic link and a hard link to a store at the name that a command uses for an unfinished file",
            "the file is not changed; the command fails or makes a file of mode 0600",
        )
        .case("export", |case| temporary_names(case, &["export", "out.ndjson"]))
        .case("backup", |case| temporary_names(case, &["backup", "out.db"]))
        .case("restore", |case| {
            temporary_names(case, &["restore", "backup.db", "--store", "sqlite:out.db"]);
        })
        .case("import --rejects", |case| {
            temporary_names(case, &["import", "--rejects", "out.csv", "rows.csv"]);
        })
        .case("first token", first_token),
        Row::new(
            "rejects file over the file to import",
            "`import --rejects rows.csv rows.csv`, also by a link",
            "fails, the file is not changed",
        )
        .case("rejects", rejects_over_input),
        Row::new(
            "mode of new files",
            "umask 000 and 022; `export`, `backup`, `restore`, `copy`, `import --rejects`, `token create`, `serve`",
            "mode 0600",
        )
        .case("umask 000", |case| modes(case, "000"))
        .case("umask 022", |case| modes(case, "022")),
        Row::new(
            "command killed while it writes",
            "`kill -9` at the first sync and at the rename; the command is run again",
            "it succeeds and no unfinished file is left",
        )
        .case("export", |case| leftovers(case, &["export", "out.ndjson"]))
        .case("backup", |case| leftovers(case, &["backup", "out.db"]))
        .case("restore", |case| {
            leftovers(case, &["restore", "backup.db", "--store", "sqlite:out.db"]);
        })
        .case("import --rejects", |case| {
            leftovers(case, &["import", "--rejects", "out.csv", "rows.csv"]);
        }),
    ]
}

/// A directory with every kind of file, and the server if it runs.
fn scene(case: &mut Case, state: State) -> Option<Server> {
    let mut server = case.serve(&[]);
    case.add(&server);
    case.succeeds(&["backup", "backup.db"]);
    fs::write(case.path("more.csv"), "id,name\n1,Fern\n").expect("a file");
    fs::write(case.path("rows.csv"), "id,name\nx,Fern\n").expect("a file");
    case.succeeds(&["token", "create", "theirs", "--store", "sqlite:other.db"]);
    fs::write(case.path("theirs.csv"), "id,name\n5,Rose\n6,Ivy\n").expect("a file");
    case.succeeds(&["import", "theirs.csv", "--store", "sqlite:other.db"]);
    let foreign = Connection::open(case.path("foreign.db")).expect("a database");
    let sql = "CREATE TABLE t (x); INSERT INTO t VALUES (1)";
    foreign.execute_batch(sql).expect("a table");
    drop(foreign);
    fs::create_dir(case.path("directory")).expect("a directory");
    fs::write(case.path("notes.txt"), "notes").expect("a file");
    symlink("nowhere", case.path("dangling")).expect("a link");
    symlink("plantstore.db", case.path("link.db")).expect("a link");
    symlink("plantstore.db-wal", case.path("link.db-wal")).expect("a link");
    fs::hard_link(case.path("plantstore.db"), case.path("hard.db")).expect("a link");
    // After the backup, so that a restored store is not complete.
    case.add(&server);
    match state {
        State::Running => return Some(server),
        State::Killed => server.kill(),
        State::Stopped => assert!(server.terminate().success()),
    }
    None
}

/// The command with each of the files as its target. Without a server every target has a fresh copy of the files.
fn against_all(case: &mut Case, writer: &Writer, state: State) {
    let server = scene(case, state);
    let scene = server.is_none().then(|| case.take_place());
    for target in OWN.iter().chain(&OTHERS) {
        if let Some(scene) = &scene {
            case.copy_of(scene.path());
        }
        case.count += 1;
        against(case, writer, target, state == State::Running);
    }
    drop(server);
}

fn against(case: &mut Case, writer: &Writer, target: &str, is_running: bool) {
    let words = writer.arguments.iter();
    let arguments: Vec<_> = words.map(|word| word.replace("TARGET", target)).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    let may_accept = writer.may_accept.contains(&target);
    let others = OTHERS.map(|name| (name, fs::read(case.path(name)).unwrap_or_default()));
    let open_files = open_files(case);
    let Ran { code, said } = run_or_serve(case, &arguments);

    let what = arguments.join(" ");
    let silent = if code == Some(0) { "silent" } else { "wrong" };
    match code {
        Some(0) if may_accept => {}
        Some(code) if code != 0 && is_error_message(&said) => {}
        code => case.problem("wrong", format!("`{what}` ends with {code:?}: {said}")),
    }
    if is_running && self::open_files(case) != open_files {
        case.problem(silent, format!("`{what}` replaces a file of the server"));
    }
    for (name, before) in others {
        let is_kept = is_kept(case, name, &before) || (may_accept && name == target);
        case.expect(is_kept, silent, format!("`{what}` changes {name}"));
    }
    // The store is complete, or it was replaced and kept.
    let mut stores = with_prefix(case, "plantstore.db-before-");
    stores.push(case.path("plantstore.db"));
    let problems: Vec<_> = stores.iter().map(|path| case.problems_of(path)).collect();
    // `copy` and `import` into the store itself add plants that no client has sent.
    let is_added = |problem: &String| problem.contains("is stored but was never sent");
    if !problems.iter().any(|of_one| of_one.iter().all(is_added)) {
        let first = problems.concat().into_iter().next().unwrap_or_default();
        case.problem(silent, format!("`{what}`: {first}: {said}"));
    }
}

/// `serve` is stopped once it listens.
fn run_or_serve(case: &Case, arguments: &[&str]) -> Ran {
    if arguments[0] != "serve" {
        return case.run(arguments);
    }
    match case.try_serve(&arguments[3..]) {
        Ok(mut server) => Ran {
            code: server.terminate().code(),
            said: server.everything_logged(),
        },
        Err(said) => Ran {
            code: Some(1),
            said,
        },
    }
}

/// Under its name, or under the name of a store that was replaced.
fn is_kept(case: &Case, name: &str, before: &[u8]) -> bool {
    let mut kept = with_prefix(case, &format!("{name}-before-"));
    kept.push(case.path(name));
    match name {
        "other.db" => kept.iter().any(|path| has_their_plants(path)),
        "other.db-lock" => true, // its content is for people
        _ => kept
            .iter()
            .any(|path| fs::read(path).unwrap_or_default() == before),
    }
}

fn has_their_plants(path: &Path) -> bool {
    let sql = "SELECT count(*) FROM plants WHERE id IN (5, 6)";
    let store = Connection::open(path);
    store.and_then(|store| store.query_row(sql, [], |row| row.get(0))) == Ok(2)
}

fn with_prefix(case: &Case, prefix: &str) -> Vec<PathBuf> {
    let names = case.files();
    let found = names.iter().filter(|name| name.starts_with(prefix));
    found.map(|name| case.path(name)).collect()
}

/// The inodes of the files that a running server has open.
fn open_files(case: &Case) -> [Option<u64>; 4] {
    let number = |suffix| fs::symlink_metadata(case.path(&format!("plantstore.db{suffix}")));
    ["", "-wal", "-shm", "-lock"].map(|suffix| number(suffix).ok().map(|file| file.ino()))
}

/// `man --to` with a page that is a protected file, or a target that is not a directory.
fn man(case: &mut Case) {
    let server = scene(case, State::Running).expect("it is running");
    // It writes to its WAL now and then, also without requests.
    server.signal("-STOP");
    fs::create_dir(case.path("pages")).expect("a directory");
    let page = case.path("pages/plantstore.1");
    for target in OWN.iter().chain(&["backup.db", "foreign.db", "other.db"]) {
        for is_hard in [false, true] {
            case.count += 1;
            let before = fs::read(case.path(target)).expect("a file");
            let linked = if is_hard {
                fs::hard_link(case.path(target), &page)
            } else {
                symlink(case.path(target), &page)
            };
            linked.expect("a link");
            let ran = case.run(&["man", "--to", "pages"]);
            // Replacing a directory entry does not change the file.
            if !(is_hard && ran.code == Some(0)) {
                case.expect_failure(&format!("man over {target}"), &ran, &["plantstore.1"]);
            }
            let is_kept = fs::read(case.path(target)).expect("a file") == before;
            let silent = if ran.code == Some(0) {
                "silent"
            } else {
                "wrong"
            };
            case.expect(is_kept, silent, format!("man changes {target}"));
            fs::remove_file(&page).expect("a link");
        }
        case.count += 1;
        case.rejected(&["man", "--to", target], &[target]);
    }
    server.signal("-CONT");
    case.complete(&case.path("plantstore.db"));
    drop(server);
}

/// The temporary names that commands use or have used. `exec` keeps the process id.
const UNFINISHED: [&str; 5] = ["-partial", ".$$.part", ".part", ".tmp", ".new"];

/// Another file has the temporary name of the command.
fn temporary_names(case: &mut Case, arguments: &[&str]) {
    let server = scene(case, State::Running);
    let target = target_of(arguments);
    let store = case.path("other.db");
    let before = fs::read(&store).expect("a file");
    for (what, plant) in [
        ("an unrelated file", "cp notes.txt"),
        ("a symbolic link", "ln -s other.db"),
        ("a hard link", "ln other.db"),
    ] {
        case.count += 1;
        let mut script: String = UNFINISHED
            .map(|suffix| format!("{plant} \"{target}{suffix}\" && "))
            .concat();
        script += "exec \"$0\" \"$@\"";
        let ran = case.shell(&script, arguments);
        let made = fs::symlink_metadata(case.path(target)).ok();
        let silent = if made.is_some() { "silent" } else { "wrong" };
        case.expect(
            made.is_some() || is_error_message(&ran.said),
            "wrong",
            &ran.said,
        );
        if let Some(made) = made {
            let permissions = made.permissions().mode() & 0o7777;
            let is_private = made.is_file() && permissions == 0o600;
            case.expect(is_private, "wrong", format!("{what}: mode {permissions:o}"));
        }
        let is_kept = fs::read(&store).expect("a file") == before;
        case.expect(is_kept, silent, format!("{what}: other.db is changed"));
        let names = with_prefix(case, target);
        let (made, planted): (Vec<_>, Vec<_>) = names
            .into_iter()
            .partition(|path| *path == case.path(target));
        let is_note = |path: &&PathBuf| fs::read(path).is_ok_and(|text| text == b"notes");
        if what == "an unrelated file" {
            let left = planted.iter().filter(is_note).count();
            case.expect(
                left == UNFINISHED.len(),
                silent,
                format!("{what} is changed: {planted:?}"),
            );
        }
        for path in made.iter().chain(&planted) {
            fs::remove_file(path).expect("a file");
        }
    }
    case.complete(&case.path("plantstore.db"));
    drop(server);
}

/// The name of the file that the command creates.
fn target_of<'a>(arguments: &[&'a str]) -> &'a str {
    let words = arguments
        .iter()
        .map(|word| word.trim_start_matches("sqlite:"));
    let mut targets = words.filter(|word| word.starts_with("out."));
    targets.next().expect("a target")
}

/// A new store has its first token in a file next to it. Another file has that name, or its temporary name.
fn first_token(case: &mut Case) {
    let server = scene(case, State::Running);
    let before = fs::read(case.path("other.db")).expect("a file");
    fs::set_permissions(case.path("other.db"), fs::Permissions::from_mode(0o640)).expect("a mode");
    for name in [
        "plantstore.token",
        "plantstore.token.new",
        "plantstore.token-partial",
    ] {
        for is_hard in [false, true] {
            case.count += 1;
            fs::create_dir(case.path("new")).expect("a directory");
            let planted = case.path("new").join(name);
            let linked = if is_hard {
                fs::hard_link(case.path("other.db"), planted)
            } else {
                symlink(case.path("other.db"), planted)
            };
            linked.expect("a link");
            let started = case.try_serve(&["--store", "sqlite:new/plantstore.db"]);
            let silent = if started.is_ok() { "silent" } else { "wrong" };
            if let Err(said) = started {
                case.expect(is_error_message(&said), "wrong", said);
            }
            let is_kept = fs::read(case.path("other.db")).expect("a file") == before;
            case.expect(is_kept, silent, format!("{name}: other.db is changed"));
            let mode = fs::metadata(case.path("other.db")).expect("a file").mode() & 0o777;
            case.expect(mode == 0o640, silent, format!("{name}: mode {mode:o}"));
            fs::remove_dir_all(case.path("new")).expect("a directory");
        }
    }
    drop(server);
}

fn rejects_over_input(case: &mut Case) {
    case.stopped();
    let rows = "id,name\n1,Fern\nx,Ivy\n";
    fs::write(case.path("rows.csv"), rows).expect("a file");
    symlink("rows.csv", case.path("link.csv")).expect("a link");
    fs::hard_link(case.path("rows.csv"), case.path("hard.csv")).expect("a link");
    for target in ["rows.csv", "./rows.csv", "link.csv", "hard.csv"] {
        case.count += 1;
        case.rejected(&["import", "--rejects", target, "rows.csv"], &[]);
        let is_kept = fs::read_to_string(case.path("rows.csv")).is_ok_and(|text| text == rows);
        case.expect(is_kept, "silent", format!("{target}: the rows are changed"));
    }
    case.complete(&case.path("plantstore.db"));
}

/// Every created file is accessible to its owner only.
fn modes(case: &mut Case, umask: &str) {
    fs::write(case.path("rows.csv"), "id,name\n1,Fern\nx,Ivy\n").expect("a file");
    let script = format!("umask {umask} && exec \"$0\" \"$@\"");
    for arguments in [
        &["token", "create", "first"][..],
        &["import", "--rejects", "out.csv", "rows.csv"],
        &["export", "out.ndjson"],
        &["backup", "out.db"],
        &["restore", "out.db", "--store", "sqlite:out.restored.db"],
        &["copy", "--to", "sqlite:out.copy.db"],
    ] {
        case.count += 1;
        let before = case.files();
        let said = case.shell(&script, arguments).said;
        let new: Vec<_> = case
            .files()
            .into_iter()
            .filter(|name| !before.contains(name))
            .collect();
        case.expect(
            !new.is_empty(),
            "wrong",
            format!("{arguments:?} makes nothing: {said}"),
        );
        for name in new {
            let mode = fs::metadata(case.path(&name)).expect("a file").mode() & 0o7777;
            case.expect(mode == 0o600, "wrong", format!("{name} has mode {mode:o}"));
        }
    }
    case.count += 1;
    let plain = plantstore(case.dir());
    let mut command = Command::new("sh");
    command
        .args(["-c", &script])
        .arg(plain.get_program())
        .args(["serve", "--listen", "127.0.0.1:0"]);
    command
        .args(["--ops-listen", "127.0.0.1:0", "--store", "sqlite:new.db"])
        .current_dir(case.dir());
    let server = Server::start_command(command, case.dir());
    case.add(&server);
    for name in case.files() {
        let mode = fs::metadata(case.path(&name)).expect("a file").mode() & 0o7777;
        let is_private = mode == 0o600 || name == "rows.csv";
        case.expect(is_private, "wrong", format!("{name} has mode {mode:o}"));
    }
    case.complete(&case.path("new.db"));
}

/// The command is killed, and run again.
fn leftovers(case: &mut Case, arguments: &[&str]) {
    let server = scene(case, State::Running);
    let target = target_of(arguments);
    let before = case.files();
    for calls in ["fsync,fdatasync", "rename,renameat,renameat2,link,linkat"] {
        for when in 1..=2 {
            case.count += 1;
            let kill = format!("inject={calls}:signal=KILL:when={when}");
            let plain = plantstore(case.dir());
            let mut strace = Command::new("strace");
            strace.args([
                "-f",
                "-qq",
                "-o",
                "/dev/null",
                "-e",
                &format!("trace={calls}"),
                "-e",
                &kill,
            ]);
            strace
                .arg(plain.get_program())
                .args(arguments)
                .current_dir(case.dir());
            ran(strace);
            for path in with_prefix(case, target)
                .into_iter()
                .filter(|path| *path == case.path(target))
            {
                fs::remove_file(path).expect("a file"); // it was complete
            }
            case.run(arguments);
            let is_there = case.path(target).exists();
            case.expect(
                is_there,
                "wrong",
                format!("{calls} {when}: {target} is not made"),
            );
            for path in with_prefix(case, target) {
                let name = path
                    .file_name()
                    .expect("a name")
                    .to_string_lossy()
                    .into_owned();
                let is_own = name == target
                    || ["-wal", "-shm", "-lock"]
                        .iter()
                        .any(|own| name == format!("{target}{own}"));
                case.expect(is_own, "wrong", format!("{calls} {when}: {name} is left"));
                fs::remove_file(path).expect("a file");
            }
            let after = case.files();
            case.expect(
                after == before,
                "wrong",
                format!("{calls} {when}: {after:?} are there"),
            );
        }
    }
    case.complete(&case.path("plantstore.db"));
    drop(server);
}
