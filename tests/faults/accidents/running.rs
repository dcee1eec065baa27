//! Accidents to the files of a running server, under load. The server has to detect them, stop acknowledging and exit with the
//! reason, and every acknowledged plant has to be in the moved file or in the copy that the server rescues.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::accidents::{
    Case, Row, STOP_LIMIT, is_error_message, wait_for_adds, with_suffix, within,
};
use crate::checker::{History, Outcome};
use crate::disk_faults::as_root;
use crate::harness::Server;
use crate::load::Running;

/// Where every acknowledged plant has to be after the accident.
#[derive(Clone, Copy)]
enum Kept {
    /// In this database file, with its WAL.
    In(&'static str),
    /// In the database file alone; the file next to it is not its WAL.
    Alone,
    /// In the copy that the server has made of its open files; the end of the log names it.
    Rescued,
    /// Nowhere: the accident has destroyed the content, and the server only has to report it.
    Destroyed,
}

const STOPS: &str = "the server exits with the reason";

#[expect(clippy::too_many_lines, reason = "it is a table")]
pub fn rows() -> Vec<Row> {
    let database = "data/plantstore.db";
    let wal = "data/plantstore.db-wal";
    vec![
        Row::new(
            "database file moved under a server",
            "`mv` in its directory, to another directory, with and without its WAL",
            "the server exits with the reason; the moved file is complete",
        )
        .case("moved", move |case| {
            accident(case, Kept::In("data/aside.db"), |case| {
                mv(case, database, "data/aside.db");
            });
            follow(case, "data/aside.db");
        })
        .case("moved to another directory", move |case| {
            accident(case, Kept::In("elsewhere.db"), |case| {
                mv(case, database, "elsewhere.db");
            });
            follow(case, "elsewhere.db");
        })
        .case("moved with its WAL", move |case| {
            accident(case, Kept::In("data/aside.db"), |case| {
                mv(case, wal, "data/aside.db-wal");
                mv(case, database, "data/aside.db");
            });
            follow(case, "data/aside.db");
        })
        .case("moved, no requests", move |case| {
            while_idle(case, Kept::In("data/aside.db"), |case| {
                mv(case, database, "data/aside.db");
            });
            follow(case, "data/aside.db");
        })
        .case("moved, server killed before it notices", move |case| {
            let (mut server, running) = serve(case);
            mv(case, database, "data/aside.db");
            server.kill();
            case.history.append(running.finish());
            case.serve_rejected(STORE, &["plantstore.db-wal"]);
            mv(case, "data/aside.db", database);
            serves_all(case);
        }),
        Row::new(
            "database file deleted under a server",
            "`rm` of the database, of all its files, of the directory",
            "the server exits with the reason; a rescued copy is complete",
        )
        .case("deleted", move |case| {
            accident(case, Kept::Rescued, |case| rm(case, database));
        })
        .case("deleted, no requests", move |case| {
            while_idle(case, Kept::Rescued, |case| rm(case, database));
        })
        .case("all files deleted", move |case| {
            accident(case, Kept::Rescued, |case| {
                for name in files_of(&case.path("data")) {
                    let _ = fs::remove_file(name);
                }
            });
        })
        .case("directory deleted", move |case| {
            accident(case, Kept::Rescued, |case| {
                // New files may appear while the directory is being emptied.
                while fs::remove_dir_all(case.path("data")).is_err() {}
            });
        }),
        Row::new(
            "database file replaced under a server",
            "a text file, another store, an older copy or an empty file renamed over it",
            "the server exits with the reason; a rescued copy is complete",
        )
        .case("replaced by a text file", move |case| {
            accident(case, Kept::Rescued, |case| {
                fs::write(case.path("other"), "text").expect("a file");
                mv(case, "other", database);
            });
        })
        .case("replaced by another store", move |case| {
            other_store(case);
            accident(case, Kept::Rescued, |case| mv(case, "other.db", database));
        })
        .case("replaced by an older copy", move |case| {
            accident(case, Kept::Rescued, |case| {
                fs::copy(case.path(database), case.path("old.db")).expect("a copy");
                mv(case, "old.db", database);
            });
        })
        .case("replaced by an empty file", move |case| {
            accident(case, Kept::Rescued, |case| {
                File::create(case.path("empty")).expect("a file");
                mv(case, "empty", database);
            });
        })
        .case("replaced by a link to itself", move |case| {
            accident(case, Kept::In("data/aside.db"), |case| {
                mv(case, database, "data/aside.db");
                std::os::unix::fs::symlink("plantstore.db", case.path(database)).expect("a link");
            });
        }),
        Row::new(
            "content destroyed under a server",
            "another store, or an older copy of the database, copied over it in place; the database truncated to 0 bytes and by half; its second half overwritten by zeros",
            STOPS,
        )
        .case("overwritten in place", move |case| {
            other_store(case);
            accident(case, Kept::Destroyed, |case| {
                fs::copy(case.path("other.db"), case.path(database)).expect("a copy");
            });
        })
        .case("overwritten by an older copy of itself", move |case| {
            fs::create_dir(case.path("data")).expect("a directory");
            for name in ["old.db", "newer.db"] {
                let (mut server, running) = serve(case);
                case.history.append(running.stop());
                assert!(server.terminate().success());
                fs::copy(case.path(database), case.path(name)).expect("a copy");
            }
            accident(case, Kept::Destroyed, |case| {
                fs::copy(case.path("old.db"), case.path(database)).expect("a copy");
            });
        })
        .case("truncated", move |case| {
            accident(case, Kept::Destroyed, |case| truncate(&case.path(database), 0));
        })
        .case("truncated, no requests", move |case| {
            while_idle(case, Kept::Destroyed, |case| {
                truncate(&case.path(database), 0);
            });
        })
        .case("cut in half", move |case| {
            accident(case, Kept::Destroyed, |case| {
                let len = fs::metadata(case.path(database)).expect("a file").len();
                truncate(&case.path(database), len / 2);
            });
        })
        .case("second half overwritten by zeros", move |case| {
            // Enough that the second half of the file is plants only.
            let (mut server, running) = serve(case);
            wait_for_adds(&running, 3000);
            case.history.append(running.stop());
            assert!(server.terminate().success());
            accident(case, Kept::Destroyed, |case| {
                let file = OpenOptions::new().write(true).open(case.path(database));
                let file = file.expect("a file");
                let len = file.metadata().expect("a file").len();
                let half = len / 2;
                let zeros = vec![0; usize::try_from(len - half).expect("a length")];
                file.write_all_at(&zeros, half).expect("a file");
            });
        }),
        Row::new(
            "data directory moved under a server",
            "renamed; renamed and replaced by an empty one or by a link; its file system unmounted (`umount -l`); another one mounted over it",
            "the server exits with the reason; the moved directory, or a rescued copy, is complete",
        )
        .case("directory moved", |case| {
            accident(case, Kept::In("aside/plantstore.db"), |case| mv(case, "data", "aside"));
        })
        .case("directory replaced", |case| {
            accident(case, Kept::In("aside/plantstore.db"), |case| {
                mv(case, "data", "aside");
                fs::create_dir(case.path("data")).expect("a directory");
            });
        })
        .case("directory replaced by a link to it", |case| {
            // The path leads to the same files as before: no error.
            let (mut server, running) = serve(case);
            mv(case, "data", "aside");
            std::os::unix::fs::symlink("aside", case.path("data")).expect("a link");
            wait_for_adds(&running, 20);
            case.history.append(running.stop());
            if !server.has_ended() {
                server.terminate();
            }
            case.complete(&case.path("aside/plantstore.db"));
        })
        .case("unmounted", |case| {
            fs::create_dir(case.path("data")).expect("a directory");
            let disk = Mounted::new(&case.path("data"), "64m");
            accident(case, Kept::Rescued, |_| drop(disk));
        })
        .case("another file system mounted over it", |case| {
            let mut disk = None;
            accident(case, Kept::Rescued, |case| {
                disk = Some(Mounted::new(&case.path("data"), "64m"));
            });
            drop(disk);
        }),
        Row::new(
            "WAL file moved, deleted or replaced under a server",
            "`mv`, `rm`, an empty file, a text file, a copy of the WAL or half of it renamed over it",
            "the server exits with the reason; the database is complete, and what replaced the WAL is not applied to it",
        )
        .case("WAL deleted", move |case| {
            accident(case, Kept::In(database), |case| rm(case, wal));
            serves_all(case);
        })
        .case("WAL deleted, no requests", move |case| {
            while_idle(case, Kept::In(database), |case| rm(case, wal));
            serves_all(case);
        })
        .case("WAL moved", move |case| {
            accident(case, Kept::In(database), |case| mv(case, wal, "aside"));
            serves_all(case);
        })
        .case("WAL replaced by an empty file", |case| {
            wal_replaced(case, |_| Vec::new());
        })
        .case("WAL replaced by a text file", |case| {
            wal_replaced(case, |_| b"text".to_vec());
        })
        .case("WAL replaced by a copy", |case| {
            wal_replaced(case, |wal| fs::read(wal).expect("a file"));
        })
        .case("WAL replaced by half of it", |case| {
            wal_replaced(case, |wal| {
                let content = fs::read(wal).expect("a file");
                content[..content.len() / 2].to_vec()
            });
        })
        .case("WAL and shared memory deleted", move |case| {
            accident(case, Kept::In(database), |case| {
                rm(case, wal);
                rm(case, "data/plantstore.db-shm");
            });
            serves_all(case);
        }),
        Row::new(
            "WAL file truncated under a server",
            "to 0 bytes and by half",
            STOPS,
        )
        .case("WAL truncated", move |case| {
            accident(case, Kept::Destroyed, |case| truncate(&case.path(wal), 0));
        })
        .case("WAL truncated, no requests", move |case| {
            while_idle(case, Kept::Destroyed, |case| truncate(&case.path(wal), 0));
        })
        .case("WAL cut in half", move |case| {
            accident(case, Kept::Destroyed, |case| {
                let len = fs::metadata(case.path(wal)).expect("a file").len();
                truncate(&case.path(wal), len / 2);
            });
        }),
        Row::new(
            "shared memory file deleted under a server",
            "`rm plantstore.db-shm`, or an empty file renamed over it; another command opens the store meanwhile",
            "the server exits with the reason, or goes on; the database is complete",
        )
        .case("-shm deleted", move |case| {
            goes_on_or_stops(case, |case| rm(case, "data/plantstore.db-shm"));
        })
        .case("-shm replaced", move |case| {
            goes_on_or_stops(case, |case| {
                File::create(case.path("empty")).expect("a file");
                mv(case, "empty", "data/plantstore.db-shm");
            });
        }),
        Row::new(
            "files made read-only under a server",
            "`chmod 000` of all files; writes fail with EROFS (strace); a file system mounted read-only before the start",
            "adds fail or the server exits with the reason, commands fail; the database is complete",
        )
        .case("chmod", |case| {
            goes_on_or_stops(case, |case| {
                for file in files_of(&case.path("data")) {
                    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o000);
                    fs::set_permissions(file, mode).expect("a mode");
                }
            });
        })
        .case("writes fail", writes_fail)
        .case("mounted read-only", read_only),
        Row::new(
            "data directory full under a server",
            "a file system of 8 MiB is filled; adds, `export`, `backup`, `copy`, `import --rejects`; then there is room again",
            "adds fail with 50302 and recover; commands fail and leave no file",
        )
        .case("full", full),
    ]
}

/// The store is in a subdirectory that can be moved; the working directory stays.
const STORE: &[&str] = &["--store", "sqlite:data/plantstore.db"];

/// A server under load. The token file is next to the store, where the harness does not look for it.
fn serve(case: &mut Case) -> (Server, Running) {
    let _ = fs::create_dir(case.path("data"));
    let server = case.serve(STORE);
    let token = fs::read_to_string(case.path("data/plantstore.token")).expect("a token");
    fs::write(case.path("plantstore.token"), &token).expect("a file");
    case.add(&server);
    let load = case.load(2, 900_000);
    let running = load.start(server.address(), token.trim());
    wait_for_adds(&running, 20);
    (server, running)
}

/// The server must detect the accident, and no acknowledged plant may be missing.
fn accident(case: &mut Case, kept: Kept, act: impl FnOnce(&Case)) {
    let (server, running) = serve(case);
    act(case);
    stops(case, kept, server, running);
}

/// The same without requests.
fn while_idle(case: &mut Case, kept: Kept, act: impl FnOnce(&Case)) {
    let (server, running) = serve(case);
    case.history.append(running.stop());
    let none = case.load(0, 0).start(server.address(), "");
    act(case);
    stops(case, kept, server, none);
}

fn stops(case: &mut Case, kept: Kept, mut server: Server, running: Running) {
    let has_ended = within(STOP_LIMIT, || server.has_ended());
    if !has_ended {
        let count = running.stored().len();
        let more = within(STOP_LIMIT / 10, || running.stored().len() > count);
        let what = if more { "adds return 200" } else { "it runs" };
        let seconds = STOP_LIMIT.as_secs();
        case.problem("silent", format!("{what} {seconds} s after the accident"));
        server.kill();
    }
    let code = server.wait_for_exit().code();
    let history = running.stop();
    if matches!(kept, Kept::Destroyed) {
        case.history = History::default(); // there is nothing to compare with
    } else {
        case.history.append(history);
    }
    let said = server.everything_logged();
    if has_ended {
        case.expect(
            code != Some(0),
            "silent",
            format!("it ends with {code:?}: {said}"),
        );
        let has_reason =
            code.is_some() && said.contains("plantstore: ") && said.contains("plantstore.db");
        case.expect(
            has_reason && !said.contains("panicked"),
            "wrong",
            format!("no reason: {code:?} {}", last_words(&said)),
        );
    }
    match kept {
        Kept::In(path) => case.complete(&case.path(path)),
        Kept::Alone => {
            let alone = case.path("alone.db");
            fs::copy(case.path("data/plantstore.db"), &alone).expect("a copy");
            case.complete(&alone);
        }
        Kept::Rescued => match rescued(case, &said) {
            Some(path) => {
                case.complete(&path);
                restores(case, &path);
            }
            None => case.problem("lost", format!("no rescued copy: {}", last_words(&said))),
        },
        Kept::Destroyed => {}
    }
}

/// The file that replaced the WAL must not be applied to the database.
fn wal_replaced(case: &mut Case, content: fn(&Path) -> Vec<u8>) {
    let wal = "data/plantstore.db-wal";
    accident(case, Kept::Alone, |case| {
        fs::write(case.path("other"), content(&case.path(wal))).expect("a file");
        mv(case, "other", wal);
    });
    match case.try_serve(STORE) {
        Ok(server) => {
            case.add(&server);
            drop(server);
            let problems = case.problems_of(&case.path("data/plantstore.db"));
            case.expect(problems.is_empty(), "silent", problems.join(", "));
        }
        Err(said) => case.expect(is_error_message(&said), "wrong", said),
    }
}

/// The path of the copy, as the last lines of the log name it.
fn rescued(case: &Case, said: &str) -> Option<PathBuf> {
    let words = said.split(|c: char| c.is_whitespace() || "\"',;()".contains(c));
    let mut named = words.filter(|word| word.contains("-rescued-"));
    let path = named.next_back()?.trim_end_matches(['.', ':']);
    let path = case.dir().join(path);
    path.exists().then_some(path)
}

fn last_words(said: &str) -> &str {
    let mut lines = said.lines().rev();
    lines
        .find(|line| line.starts_with("plantstore: "))
        .unwrap_or(said)
}

/// A rescued copy can be restored like a backup.
fn restores(case: &mut Case, rescued: &Path) {
    let rescued = rescued.display().to_string();
    case.succeeds(&["restore", &rescued, "--store", "sqlite:restored.db"]);
    case.succeeds(&["check", "--store", "sqlite:restored.db"]);
    case.complete(&case.path("restored.db"));
}

/// A restart, as by systemd, creates no empty store; with the file back in place the store is complete.
fn follow(case: &mut Case, moved: &str) {
    case.serve_rejected(STORE, &["plantstore.db"]);
    case.complete(&case.path(moved));
    mv(case, moved, "data/plantstore.db");
    let wal = with_suffix(&case.path(moved), "-wal");
    if wal.exists() {
        fs::rename(wal, case.path("data/plantstore.db-wal")).expect("a move");
    }
    serves_all(case);
}

fn serves_all(case: &mut Case) {
    match case.try_serve(STORE) {
        Ok(server) => {
            case.add(&server);
            case.complete(&case.path("data/plantstore.db"));
        }
        Err(said) => case.problem("wrong", format!("it does not start again: {said}")),
    }
}

/// The server may continue without losing plants, or exit with the reason.
fn goes_on_or_stops(case: &mut Case, act: impl FnOnce(&Case)) {
    let (mut server, running) = serve(case);
    act(case);
    let count = running.stored().len();
    within(STOP_LIMIT, || {
        server.has_ended() || running.stored().len() > count + 200
    });
    // Another process opens the current files.
    case.run(&[
        "token",
        "create",
        "another",
        "--store",
        "sqlite:data/plantstore.db",
    ]);
    case.run(&["list", "--store", "sqlite:data/plantstore.db"]);
    within(STOP_LIMIT / 10, || server.has_ended());
    let history = if server.has_ended() {
        let code = server.wait_for_exit().code();
        let said = server.everything_logged();
        let has_reason = said.contains("plantstore: ") && said.contains("plantstore.db");
        case.expect(
            code != Some(0) && has_reason,
            "silent",
            format!("{code:?} {}", last_words(&said)),
        );
        running.finish()
    } else {
        let history = running.stop();
        server.kill();
        history
    };
    case.history.append(history);
    case.complete(&case.path("data/plantstore.db"));
    serves_all(case);
}

/// After a disk error the kernel makes a file system read-only: writes to open files fail.
fn writes_fail(case: &mut Case) {
    let fault = "pwrite64:error=EROFS:when=200+";
    let mut server = Server::start_with_fault(case.dir(), fault, &[]);
    let load = case.load(2, 400);
    let history = load.start(server.address(), &server.token()).finish();
    let attempts = history.attempts().count();
    let is_noticed = history.acknowledged().count() < attempts;
    case.expect(is_noticed, "silent", "every add returned 200");
    case.history.append(history);
    server.kill();
    case.serves_all();
}

/// Commands on a read-only file system fail with the reason.
fn read_only(case: &mut Case) {
    fs::create_dir(case.path("data")).expect("a directory");
    let disk = Mounted::new(&case.path("data"), "64m");
    let (mut server, running) = serve(case);
    case.history.append(running.stop());
    server.kill();
    as_root(&["mount", "-o", "remount,ro"], &case.path("data"));
    case.serve_rejected(STORE, &["plantstore.db"]);
    for arguments in [&["token", "create", "x"][..], &["import", "rows.csv"]] {
        case.rejected(&[arguments, STORE].concat(), &[]);
    }
    as_root(&["mount", "-o", "remount,rw"], &case.path("data"));
    serves_all(case);
    drop(disk);
}

/// Commands whose output does not fit fail with the reason and leave no file.
fn full(case: &mut Case) {
    fs::create_dir(case.path("data")).expect("a directory");
    fs::write(case.path("rows.csv"), "id,name\n1,Fern\nx,Ivy\n").expect("a file");
    let disk = Mounted::new(&case.path("data"), "8m");
    let (server, running) = serve(case);
    case.history.append(running.stop());
    let mut ballast = File::create(case.path("data/ballast")).expect("a file");
    while ballast.write_all(&[0; 4096]).is_ok() {}
    for arguments in [
        &["export", "data/out.ndjson"][..],
        &["backup", "data/out.db"],
        &["import", "rows.csv", "--rejects", "data/out.csv"],
        &["copy", "--to", "sqlite:data/out.db"],
    ] {
        case.count += 1;
        case.rejected(&[arguments, STORE].concat(), &[]);
        // An incomplete copy is a store that a second run completes.
        let names = files_of(&case.path("data"));
        let is_left = |path: &PathBuf| path.to_string_lossy().contains("/out.");
        let left = names.iter().any(is_left);
        let left = left && arguments[0] != "copy";
        case.expect(!left, "wrong", format!("{arguments:?} leaves {names:?}"));
    }
    let load = case.load(2, 100);
    let history = load.start(server.address(), &server.token()).finish();
    let is_full = history.count(Outcome::Full) > 0;
    case.expect(is_full, "wrong", "no add was answered with 50302");
    case.history.append(history);
    // Until it is executed, a program that another thread starts has the file open too, so deleting it need not make room.
    ballast.set_len(0).expect("a file");
    drop(ballast);
    rm(case, "data/ballast");
    case.add(&server);
    case.complete(&case.path("data/plantstore.db"));
    drop(server);
    drop(disk);
}

/// A tmpfs, unmounted at the end.
struct Mounted(PathBuf);

impl Mounted {
    fn new(path: &Path, size: &str) -> Self {
        let options = format!("size={size},mode=0777");
        as_root(&["mount", "-t", "tmpfs", "-o", &options, "tmpfs"], path);
        Self(path.to_owned())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        as_root(&["umount", "--lazy"], &self.0);
    }
}

fn mv(case: &Case, from: &str, to: &str) {
    fs::rename(case.path(from), case.path(to)).expect("a move");
}

fn rm(case: &Case, name: &str) {
    fs::remove_file(case.path(name)).expect("a file");
}

fn truncate(path: &Path, len: u64) {
    let file = OpenOptions::new().write(true).open(path);
    file.expect("a file").set_len(len).expect("a length");
}

fn files_of(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).expect("a directory");
    entries
        .map(|entry| entry.expect("an entry").path())
        .collect()
}

/// A different store with one plant, without a WAL.
fn other_store(case: &mut Case) {
    fs::write(case.path("more.csv"), "id,name\n1,Fern\n").expect("a file");
    case.succeeds(&["import", "more.csv", "--store", "sqlite:other.db"]);
}
