//! Accidents to the files of a store while no server runs, and a second server on one store through different paths.

use std::fmt::Write;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;

use rusqlite::Connection;
use rusqlite::config::DbConfig;

use crate::accidents::{
    Case, Row, STOP_LIMIT, is_error_message, wait_for_adds, with_suffix, within,
};
use crate::checker::Outcome;
use crate::load::body;

/// The commands that create a missing store.
const CREATORS: [&[&str]; 5] = [
    &["serve"],
    &["token", "create", "new"],
    &["import", "more.csv"],
    &[
        "copy",
        "--store",
        "sqlite:other.db",
        "--to",
        "sqlite:plantstore.db",
    ],
    &["migrate"],
];

#[expect(clippy::too_many_lines, reason = "it is a table")]
pub fn rows() -> Vec<Row> {
    let mut orphan = Row::new(
        "orphan WAL",
        "`kill -9`, then the database is moved away or truncated to 0 bytes; `serve`, `token create`, `import`, `copy --to`, `migrate`",
        "fails, names the WAL and what to do; the WAL is not changed; with the database back everything is there",
    );
    for creator in CREATORS {
        let name = creator.join(" ");
        orphan = orphan
            .case(format!("`{name}`, database moved"), move |case| {
                orphan_wal(case, creator, moved);
            })
            .case(format!("`{name}`, database empty"), move |case| {
                orphan_wal(case, creator, emptied);
            });
    }
    orphan = orphan
        .case("`serve`, database and lock file moved", |case| {
            orphan_wal(case, &["serve"], |case| {
                moved(case);
                lock(case, None);
            });
        })
        .case("`restore`, database moved", |case| {
            restore_beside_orphan(case, &[]);
        })
        .case("`restore --force`, database moved", |case| {
            restore_beside_orphan(case, &["--force"]);
        });
    vec![
        orphan,
        Row::new(
            "database file missing",
            "moved away after a clean stop, its lock file still there, then `serve` as by systemd, `token create`, `import`, `copy --to`",
            "fails and says what to do; no empty store is made; with the file back everything is there",
        )
        .case("serve", |case| missing(case, &["serve"]))
        .case("token create", |case| missing(case, &["token", "create", "new"]))
        .case("import", |case| missing(case, &["import", "more.csv"]))
        .case("copy", |case| missing(case, CREATORS[3])),
        Row::new(
            "WAL deleted after a kill",
            "`kill -9`, `rm plantstore.db-wal`, then `serve`, `export`, `backup`, `copy`, `check`, `token create`, `import`; the same for a WAL that is empty or cut short at a commit",
            "rejected: acknowledged changes are missing; with the WAL back everything is there",
        )
        .case("deleted", |case| wal_gone(case, |wal| fs::remove_file(wal).expect("a file")))
        .case("emptied", |case| wal_gone(case, |wal| fs::write(wal, "").expect("a file")))
        .case("cut short", |case| wal_gone(case, cut_short)),
        Row::new(
            "database separated from its WAL after a kill",
            "`kill -9`, then the database alone is renamed, moved or copied to another directory, moved and replaced by a link, opened by a hard link; `serve`, `list`, `export`, `backup`",
            "rejected, or complete; with the database back everything is there",
        )
        .case("moved to another directory", |case| {
            separated(case, "mkdir d && mv plantstore.db d", "d/plantstore.db");
        })
        .case("copied to another directory", |case| {
            separated(case, "mkdir d && cp plantstore.db d", "d/plantstore.db");
        })
        .case("moved and linked", |case| {
            let script = "mkdir d && mv plantstore.db d && ln -s d/plantstore.db plantstore.db";
            separated(case, script, "plantstore.db");
        })
        .case("renamed", |case| separated(case, "mv plantstore.db new.db", "new.db"))
        .case("hard link", |case| separated(case, "ln plantstore.db new.db", "new.db")),
        Row::new(
            "older copy put back",
            "a copy of the database file, taken while the server ran, put back after a clean stop, after a kill, with the WAL, and with the WAL of a later session",
            "rejected, or complete",
        )
        .case("after a clean stop", |case| old_copy(case, true, false))
        .case("after a kill", |case| old_copy(case, false, false))
        .case("after a kill, with the WAL", |case| old_copy(case, false, true))
        .case("with the WAL of a later session", old_copy_with_later_wal),
        Row::new(
            "files copied while the server runs",
            "all files copied one after another under load, opened elsewhere",
            "rejected, or a sound store that `check` accepts",
        )
        .case("all files", |case| copied_under_load(case, &["", "-wal", "-lock"]))
        .case("without the WAL", |case| copied_under_load(case, &[""]))
        .case("WAL first", |case| copied_under_load(case, &["-wal", ""])),
        Row::new(
            "another database with a leftover WAL",
            "`kill -9`, then another store, a backup or another program's database at the name of the database",
            "rejected, neither file is changed",
        )
        .case("another store", |case| beside_wal(case, "other.db"))
        .case("a backup", |case| beside_wal(case, "backup.db"))
        .case("another program's database", |case| beside_wal(case, "foreign.db")),
        Row::new(
            "second server on one store",
            "the lock file deleted or replaced; by a symbolic link, a hard link, another path, a link to the directory",
            "the second server does not start; the first goes on",
        )
        .case("lock file deleted", |case| second_server(case, &[], |case| lock(case, None)))
        .case("lock file replaced", |case| second_server(case, &[], |case| lock(case, Some("1"))))
        .case("by a symbolic link", |case| {
            second_server(case, &["--store", "sqlite:link.db"], |case| {
                symlink("plantstore.db", case.path("link.db")).expect("a link");
            });
        })
        .case("by a symbolic link, lock file deleted", |case| {
            second_server(case, &["--store", "sqlite:link.db"], |case| {
                symlink("plantstore.db", case.path("link.db")).expect("a link");
                lock(case, None);
            });
        })
        .case("by a hard link", |case| {
            second_server(case, &["--store", "sqlite:hard.db"], |case| {
                fs::hard_link(case.path("plantstore.db"), case.path("hard.db")).expect("a link");
            });
        })
        .case("by another path", |case| {
            second_server(case, &["--store", "sqlite:sub/../plantstore.db"], |case| {
                fs::create_dir(case.path("sub")).expect("a directory");
            });
        })
        .case("by a link to the directory, lock file deleted", |case| {
            second_server(case, &["--store", "sqlite:again/plantstore.db"], |case| {
                symlink(".", case.path("again")).expect("a link");
                lock(case, None);
            });
        }),
        Row::new(
            "commands under a server without its lock file",
            "the lock file deleted; `restore --force`, `token create`, `migrate`, `list`, `check`",
            "`restore` fails; everything is there",
        )
        .case("lock file deleted", commands_without_lock),
        Row::new(
            "what must go on working",
            "`sqlite3` opens the store after a kill, runs a checkpoint or VACUUM under a server; database and WAL moved together; \
             the files copied after a stop or a kill; the lock file and the shared memory deleted while nothing runs; a backup \
             restored; ten kills in a row",
            "everything is there, nothing is rejected",
        )
        .case("sqlite3 after a kill", |case| {
            case.killed();
            let store = Connection::open(case.path("plantstore.db")).expect("a database");
            let count = store.query_row("SELECT count(*) FROM plants", [], |row| row.get(0));
            case.expect(count.is_ok_and(|count: i64| count > 0), "wrong", "no plants");
            drop(store);
            case.serves_all();
        })
        .case("moved together", |case| {
            case.killed();
            fs::create_dir(case.path("elsewhere")).expect("a directory");
            for name in ["plantstore.db", "plantstore.db-wal", "plantstore.token"] {
                fs::rename(case.path(name), case.path("elsewhere").join(name)).expect("a move");
            }
            let from = case.take_place();
            case.copy_of(&from.path().join("elsewhere"));
            case.serves_all();
        })
        .case("directory copied after a kill", |case| {
            case.killed();
            let from = case.take_place();
            case.copy_of(from.path());
            case.serves_all();
        })
        .case("directory copied after a stop", |case| {
            case.stopped();
            let from = case.take_place();
            case.copy_of(from.path());
            case.serves_all();
        })
        .case("only the database copied after a stop", |case| {
            case.stopped();
            let from = case.take_place();
            for name in ["plantstore.db", "plantstore.token"] {
                fs::copy(from.path().join(name), case.path(name)).expect("a copy");
            }
            case.serves_all();
        })
        .case("lock file and shared memory deleted after a kill", |case| {
            case.killed();
            for name in ["plantstore.db-lock", "plantstore.db-shm"] {
                fs::remove_file(case.path(name)).expect("a file");
            }
            case.serves_all();
        })
        .case("checkpoint by another program under load", |case| {
            other_program(case, "PRAGMA wal_checkpoint(TRUNCATE)");
        })
        .case("VACUUM by another program under load", |case| other_program(case, "VACUUM"))
        .case("a restored store served again", |case| {
            case.stopped();
            case.succeeds(&["backup", "backup.db"]);
            let server = case.serve(&[]);
            drop(server);
            case.succeeds(&["restore", "--force", "backup.db"]);
            case.serves_all();
        })
        .case("killed ten times", |case| {
            for _ in 0..10 {
                case.killed();
            }
            case.serves_all();
        }),
    ]
}

fn moved(case: &Case) {
    fs::rename(case.path("plantstore.db"), case.path("aside.db")).expect("a move");
}

fn emptied(case: &Case) {
    fs::copy(case.path("plantstore.db"), case.path("aside.db")).expect("a copy");
    fs::write(case.path("plantstore.db"), "").expect("a file");
}

fn write_others(case: &mut Case) {
    fs::write(case.path("more.csv"), "id,name\n1,Fern\n").expect("a file");
    case.succeeds(&["import", "more.csv", "--store", "sqlite:other.db"]);
}

/// A command that may be `serve`, and must fail.
fn rejected(case: &mut Case, arguments: &[&str], words: &[&str]) {
    match arguments {
        ["serve"] => case.serve_rejected(&[], words),
        _ => case.rejected(arguments, words),
    }
}

fn read(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap_or_default()
}

fn orphan_wal(case: &mut Case, creator: &[&str], accident: fn(&Case)) {
    write_others(case);
    case.killed();
    write_all_pages(case);
    let wal = case.path("plantstore.db-wal");
    let before = read(&wal);
    accident(case);
    rejected(case, creator, &["plantstore.db-wal"]);
    case.expect(read(&wal) == before, "lost", "the WAL is changed or gone");
    fs::rename(case.path("aside.db"), case.path("plantstore.db")).expect("a move");
    case.serves_all();
}

/// With all pages in the WAL, nothing but its missing database shows that it must not be used.
fn write_all_pages(case: &Case) {
    let store = Connection::open(case.path("plantstore.db")).expect("a database");
    let config = DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE;
    store.set_db_config(config, true).expect("a setting");
    let vacuum = "PRAGMA wal_autocheckpoint = 0; VACUUM";
    store.execute_batch(vacuum).expect("a copy of all pages");
}

/// The WAL still exists, possibly under another name.
fn restore_beside_orphan(case: &mut Case, flags: &[&str]) {
    let server = case.serve(&[]);
    case.add(&server);
    case.succeeds(&["backup", "backup.db"]);
    drop(server);
    case.killed();
    let before = read(&case.path("plantstore.db-wal"));
    moved(case);
    let _ = case.run(&[&["restore", "backup.db"], flags].concat());
    let is_wal = |name: &String| read(&case.path(name)) == before;
    let kept = case.files().into_iter().find(is_wal);
    case.expect(kept.is_some(), "lost", "the WAL is changed or gone");
    if let Some(kept) = kept {
        for name in ["plantstore.db", "plantstore.db-shm"] {
            let _ = fs::remove_file(case.path(name));
        }
        fs::rename(case.path(&kept), case.path("plantstore.db-wal")).expect("a move");
        fs::rename(case.path("aside.db"), case.path("plantstore.db")).expect("a move");
        case.complete(&case.path("plantstore.db"));
    }
}

fn missing(case: &mut Case, command: &[&str]) {
    write_others(case);
    case.stopped();
    moved(case);
    rejected(case, command, &["plantstore.db"]);
    let is_there = case.path("plantstore.db").exists();
    case.expect(!is_there, "silent", "an empty store is made");
    fs::rename(case.path("aside.db"), case.path("plantstore.db")).expect("a move");
    case.serves_all();
}

fn wal_gone(case: &mut Case, accident: fn(&Path)) {
    fs::write(case.path("more.csv"), "id,name\n1,Fern\n").expect("a file");
    case.killed();
    let (wal, aside) = (case.path("plantstore.db-wal"), case.path("aside-wal"));
    fs::copy(&wal, &aside).expect("a copy");
    accident(&wal);
    case.serve_rejected(&[], &["plantstore.db"]);
    for command in [
        &["export", "out.ndjson"][..],
        &["backup", "out.db"],
        &["copy", "--to", "sqlite:copy.db"],
        &["check"],
        &["token", "create", "new"],
        &["import", "more.csv"],
    ] {
        case.count += 1;
        case.rejected(command, &["plantstore.db"]);
    }
    fs::rename(aside, wal).expect("a move");
    case.serves_all();
}

/// Truncates the WAL after a commit in the middle: the rest is a valid WAL.
fn cut_short(wal: &Path) {
    let content = read(wal);
    let frames = content[32..].chunks_exact(24 + 4096).enumerate();
    let commits = frames.filter(|(_, frame)| frame[4..8] != [0; 4]);
    let commits: Vec<_> = commits.map(|(number, _)| number).collect();
    let end = 32 + (commits[commits.len() / 2] + 1) * (24 + 4096);
    fs::write(wal, &content[..end]).expect("a file");
}

/// A server that cannot find the WAL must not serve the database without it.
fn separated(case: &mut Case, script: &str, database: &str) {
    case.killed();
    let done = case.shell(script, &[]);
    assert!(done.code == Some(0), "{}", done.said);
    let store = format!("sqlite:{database}");
    for command in [
        &["serve"][..],
        &["list"],
        &["export", "out.ndjson"],
        &["backup", "out.db"],
    ] {
        case.count += 1;
        let arguments = ["--store", &store];
        let (started, said) = if command == ["serve"] {
            let started = case.try_serve(&arguments);
            (started.is_ok(), started.err().unwrap_or_default())
        } else {
            let ran = case.run(&[command, &arguments[..]].concat());
            (ran.code == Some(0), ran.said)
        };
        if started {
            let lost = case.problems_of(&case.path(database));
            let is_complete = lost.is_empty();
            case.expect(is_complete, "silent", format!("{command:?}: {lost:?}"));
        } else {
            case.expect(
                is_error_message(&said),
                "wrong",
                format!("{command:?}: {said}"),
            );
        }
    }
    let real = case.path(database).canonicalize().expect("a file");
    for suffix in ["-wal", "-shm", "-lock"] {
        if real != case.path("plantstore.db") {
            let _ = fs::remove_file(with_suffix(&real, suffix));
        }
    }
    fs::rename(real, case.path("plantstore.db")).expect("a move");
    case.serves_all();
}

/// SQLite keeps the files consistent: the server continues.
fn other_program(case: &mut Case, sql: &str) {
    let mut server = case.serve(&[]);
    let load = case.load(2, 900_000);
    let running = load.start(server.address(), &server.token());
    for _ in 0..10 {
        wait_for_adds(&running, 20);
        let other = Connection::open(case.path("plantstore.db")).expect("a database");
        other.busy_timeout(STOP_LIMIT).expect("a timeout");
        let _ = other.execute_batch(sql);
    }
    // Longer than the interval at which the server checks its files.
    within(Duration::from_secs(4), || server.has_ended());
    let said = server.everything_logged();
    case.expect(
        !server.has_ended(),
        "wrong",
        format!("it has ended: {said}"),
    );
    case.history.append(running.stop());
    server.kill();
    case.serves_all();
}

fn old_copy(case: &mut Case, is_clean: bool, keeps_wal: bool) {
    let mut server = case.serve(&[]);
    case.add(&server);
    fs::copy(case.path("plantstore.db"), case.path("old.db")).expect("a copy");
    case.add(&server);
    if is_clean {
        assert!(server.terminate().success());
    } else {
        server.kill();
    }
    fs::rename(case.path("plantstore.db"), case.path("aside.db")).expect("a move");
    fs::rename(case.path("old.db"), case.path("plantstore.db")).expect("a move");
    if !is_clean && !keeps_wal {
        fs::rename(case.path("plantstore.db-wal"), case.path("aside.db-wal")).expect("a move");
    }
    case.complete_or_rejected();
    if !keeps_wal {
        fs::rename(case.path("aside.db"), case.path("plantstore.db")).expect("a move");
        let _ = fs::remove_file(case.path("plantstore.db-wal"));
        let _ = fs::rename(case.path("aside.db-wal"), case.path("plantstore.db-wal"));
        case.serves_all();
    }
}

/// The copy lacks the plants that were added after it, and the WAL has only those since the last start. The database does not
/// grow meanwhile, so its length reveals nothing.
fn old_copy_with_later_wal(case: &mut Case) {
    case.stopped();
    let mut rows = "id,name\n".to_owned();
    for id in (0..2_000_000).step_by(1000) {
        writeln!(rows, "{id},a plant of an import").expect("it is a string");
        let plant = (id, "a plant of an import".to_owned(), None);
        case.history.note(plant, Outcome::Acknowledged);
    }
    fs::write(case.path("rows.csv"), rows).expect("a file");
    case.succeeds(&["import", "rows.csv"]);
    for (at, id) in [(0, 500_001), (1, 1_500_001)] {
        let server = case.serve(&[]);
        if at == 0 {
            fs::copy(case.path("plantstore.db"), case.path("old.db")).expect("a copy");
        }
        for id in id..id + 3 {
            let plant = (id, "Fern".to_owned(), None);
            server.add_ok(body(&plant));
            case.history.note(plant, Outcome::Acknowledged);
        }
    }
    moved(case);
    fs::rename(case.path("old.db"), case.path("plantstore.db")).expect("a move");
    case.complete_or_rejected();
    fs::rename(case.path("aside.db"), case.path("plantstore.db")).expect("a move");
    case.serves_all();
}

/// A copy that opens is undamaged, and every plant in it was sent.
fn copied_under_load(case: &mut Case, suffixes: &[&str]) {
    let server = case.serve(&[]);
    case.add(&server);
    let load = case.load(2, 900_000);
    let running = load.start(server.address(), &server.token());
    wait_for_adds(&running, 50);
    fs::create_dir(case.path("copy")).expect("a directory");
    for suffix in suffixes {
        let name = format!("plantstore.db{suffix}");
        fs::copy(case.path(&name), case.path("copy").join(name)).expect("a copy");
        wait_for_adds(&running, 20);
    }
    let checked = case.run(&["check", "--store", "sqlite:copy/plantstore.db"]);
    let arguments = ["--store", "sqlite:copy/plantstore.db"];
    match case.try_serve(&arguments) {
        Ok(copy) => {
            let is_sound = checked.code == Some(0);
            case.expect(
                is_sound,
                "silent",
                format!("it serves what check rejects: {}", checked.said),
            );
            drop(copy);
        }
        Err(said) => case.expect(is_error_message(&said), "wrong", said),
    }
    case.history.append(running.stop());
    drop(server);
    case.complete(&case.path("plantstore.db"));
    case.serves_all();
}

fn beside_wal(case: &mut Case, other: &str) {
    write_others(case);
    let foreign = Connection::open(case.path("foreign.db")).expect("a database");
    foreign
        .execute_batch("CREATE TABLE t (x)")
        .expect("a table");
    drop(foreign);
    let server = case.serve(&[]);
    case.add(&server);
    case.succeeds(&["backup", "backup.db"]);
    case.add(&server);
    drop(server);
    case.killed();
    moved(case);
    fs::rename(case.path(other), case.path("plantstore.db")).expect("a move");
    let files = ["plantstore.db", "plantstore.db-wal"].map(|name| case.path(name));
    let before = files.clone().map(|path| read(&path));
    for command in [
        &["serve"][..],
        &["token", "create", "new"],
        &["list"],
        &["check"],
        &["backup", "out.db"],
    ] {
        case.count += 1;
        rejected(case, command, &["plantstore.db"]);
        let after = files.clone().map(|path| read(&path));
        case.expect(
            after == before,
            "lost",
            format!("{command:?} changes a file"),
        );
    }
    fs::rename(case.path("aside.db"), case.path("plantstore.db")).expect("a move");
    case.serves_all();
}

fn lock(case: &Case, content: Option<&str>) {
    let path = case.path("plantstore.db-lock");
    fs::remove_file(&path).expect("a file");
    if let Some(content) = content {
        fs::write(path, content).expect("a file");
    }
}

fn second_server(case: &mut Case, arguments: &[&str], accident: fn(&Case)) {
    let mut server = case.serve(&[]);
    case.add(&server);
    accident(case);
    case.serve_rejected(arguments, &["plantstore"]);
    // The first server continues, or exits with the reason.
    if server.has_ended() {
        let said = server.everything_logged();
        case.expect(said.contains("plantstore: "), "wrong", said);
    } else {
        case.add(&server);
        server.kill();
    }
    case.complete(&case.path("plantstore.db"));
    case.serves_all();
}

fn commands_without_lock(case: &mut Case) {
    fs::write(case.path("more.csv"), "id,name\n1,Fern\n").expect("a file");
    let server = case.serve(&[]);
    case.add(&server);
    case.succeeds(&["backup", "backup.db"]);
    case.add(&server);
    lock(case, None);
    case.rejected(&["restore", "--force", "backup.db"], &["plantstore.db"]);
    for command in [
        &["token", "create", "new"][..],
        &["migrate"],
        &["list"],
        &["check"],
    ] {
        case.count += 1;
        let _ = case.run(command);
        case.add(&server);
        case.complete(&case.path("plantstore.db"));
    }
    drop(server);
    case.serves_all();
}
