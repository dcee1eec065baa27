//! Accidents with PostgreSQL: tables of other applications, locks of other sessions, weaker durability settings, an outage.

use std::fmt::Write;
use std::fs;
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rustix::process::geteuid;
use tempfile::TempDir;

use crate::accidents::{Case, Ran, Row, STOP_LIMIT, is_error_message, within};
use crate::checker::Outcome;
use crate::harness::{Server, directory, wait_until};
use crate::postgres::cluster::{Postgres, free_port};

pub fn rows() -> Vec<Row> {
    vec![
        Row::new(
            "another application's tables in PostgreSQL",
            "tables `tokens` and `plants` of others in the schema `public`, in one named like the role, and in one named `plantstore`; `serve`, `migrate`, `token create`",
            "our own schema is used, or rejected if theirs are in it; their tables are not changed",
        )
        .case("in public", |case| foreign_tables(case, "public"))
        .case("in a schema of the role", |case| foreign_tables(case, "postgres"))
        .case("in our schema", |case| foreign_tables(case, "plantstore")),
        Row::new(
            "locked row in PostgreSQL",
            "another session locks the rows of all tokens",
            "`/readyz` stays 200 and adds work",
        )
        .case("token rows", locked_rows),
        Row::new(
            "settings of PostgreSQL that promise less",
            "`synchronous_commit` is `off`, `local` or `remote_write` for the database, and a synchronous standby is required",
            "`serve` fails and names the setting",
        )
        .case("at the start", weak_settings),
        Row::new(
            "PgBouncer in transaction mode",
            "two nodes under load through a PgBouncer with two server connections",
            "every add gets 200 or 40009",
        )
        .case("transaction mode", pooled),
        Row::new(
            "outage of PostgreSQL",
            "the server is killed under a node and started again; nothing polls `/readyz`",
            "one log line at its start and one at its end, `plantstore_ready` 0 and 1, adds fail with 50303 and recover",
        )
        .case("outage", outage),
        Row::new(
            "backup out of PostgreSQL",
            "60,000 plants with random ids, `backup` and `copy`; the size of the directory is measured",
            "never more than twice the size of the result",
        )
        .case("backup and copy", temporary_space),
        Row::new(
            "restore into PostgreSQL where tokens collide",
            "`restore --force` into a database with a token of the same name and of the same id",
            "every plant keeps the token that added it, or the restore fails before the first plant",
        )
        .case("same name and id", |case| restore_tokens(case, "first"))
        .case("same id", |case| restore_tokens(case, "theirs")),
    ]
}

fn schema(postgres: &Postgres) -> String {
    let sql = "SELECT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
               WHERE c.relname = 'plants' AND c.relkind = 'r' ORDER BY n.nspname = 'plantstore' DESC LIMIT 1";
    postgres.ask(sql).unwrap_or_else(|| "public".to_owned())
}

fn complete(case: &mut Case, postgres: &Postgres) {
    let problems = case
        .history
        .violations_at(&postgres.url(), i64::MIN..=i64::MAX);
    case.problems.extend(problems.into_iter().take(3));
}

/// A server whose token is in the directory.
fn serve(case: &mut Case, postgres: &Postgres, arguments: &[&str]) -> Option<Server> {
    let url = postgres.url();
    let store = ["--store", &url];
    let Ran { code, said } = case.run(&[&["token", "create", "app"], &store[..]].concat());
    case.expect(code == Some(0), "wrong", format!("no token: {said}"));
    let token = said.lines().find(|line| line.starts_with("plant_"));
    fs::write(case.path("plantstore.token"), token?).expect("a file");
    match case.try_serve(&[&store[..], arguments].concat()) {
        Ok(server) => Some(server),
        Err(said) => {
            case.problem("wrong", format!("it does not start: {said}"));
            None
        }
    }
}

fn foreign_tables(case: &mut Case, schema: &str) {
    let postgres = Postgres::start_new();
    postgres.sql(&format!(
        "CREATE SCHEMA IF NOT EXISTS {schema};
         CREATE TABLE {schema}.tokens (session TEXT); INSERT INTO {schema}.tokens VALUES ('theirs');
         CREATE TABLE {schema}.plants (factory TEXT); INSERT INTO {schema}.plants VALUES ('theirs')"
    ));
    let url = postgres.url();
    if schema == "plantstore" {
        // Every command has to fail.
        let store = ["--store", &url];
        for command in [&["token", "create", "app"][..], &["migrate"], &["list"]] {
            case.count += 1;
            case.rejected(&[command, &store].concat(), &[]);
        }
        case.serve_rejected(&store, &[]);
    } else if let Some(server) = serve(case, &postgres, &[]) {
        case.add(&server);
        complete(case, &postgres);
    }
    for table in ["tokens", "plants"] {
        let theirs = postgres.ask(&format!(
            "SELECT count(*) || ' ' || min(t::TEXT) FROM {schema}.{table} t"
        ));
        let is_kept = theirs.as_deref() == Some("1 (theirs)");
        case.expect(
            is_kept,
            "silent",
            format!("{schema}.{table} is changed: {theirs:?}"),
        );
    }
}

fn locked_rows(case: &mut Case) {
    let postgres = Postgres::start_new();
    let Some(server) = serve(case, &postgres, &["--store-timeout", "2s"]) else {
        return;
    };
    case.add(&server);
    let schema = schema(&postgres);
    let has_ended = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let lock = format!(
                "BEGIN; SELECT 1 FROM {schema}.tokens FOR UPDATE; SELECT pg_sleep(5); COMMIT"
            );
            let _ = postgres.try_run(&lock, "plants");
            has_ended.store(true, Ordering::SeqCst);
        });
        let is_locked = || {
            let sql = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'";
            postgres.ask(sql).as_deref() == Some("1")
        };
        assert!(within(STOP_LIMIT, is_locked));
        let mut failed = 0;
        while !has_ended.load(Ordering::SeqCst) {
            failed += usize::from(server.ask("/readyz").status != 200);
            thread::sleep(Duration::from_millis(100));
        }
        case.expect(
            failed == 0,
            "wrong",
            format!("/readyz failed {failed} times"),
        );
    });
    case.add(&server);
    complete(case, &postgres);
}

fn weak_settings(case: &mut Case) {
    let postgres = Postgres::start_new();
    let Some(server) = serve(case, &postgres, &[]) else {
        return;
    };
    case.add(&server);
    drop(server);
    let url = postgres.url();
    for setting in ["off", "local", "remote_write"] {
        case.count += 1;
        postgres.sql(&format!(
            "ALTER DATABASE plants SET synchronous_commit = {setting}"
        ));
        postgres.wait_for_standby(true);
        case.serve_rejected(&["--store", &url], &["synchronous_commit"]);
        postgres.wait_for_standby(false);
    }
    postgres.sql("ALTER DATABASE plants RESET synchronous_commit");
    complete(case, &postgres);
}

fn pooled(case: &mut Case) {
    let postgres = Postgres::start_new();
    let direct = postgres.url();
    let printed = case.succeeds(&["token", "create", "app", "--store", &direct]);
    let token = printed.lines().find(|line| line.starts_with("plant_"));
    let token = token.unwrap_or_default();
    let pooler = Pooler::start(&postgres);
    let nodes = [(); 2].map(|()| case.serve(&["--store", &pooler.store]));
    // Both send different plants with the same ids.
    let mut load = case.load(4, 100);
    load.ids = Some(40);
    let loads = nodes.each_ref().map(|node| {
        load.first_client += 100;
        load.start(node.address(), token)
    });
    for running in loads {
        let history = running.finish();
        let answered = history.count(Outcome::Acknowledged) + history.count(Outcome::Conflict);
        let is_answered = answered == history.attempts().count();
        case.expect(is_answered, "wrong", "an add was answered with an error");
        case.history.append(history);
    }
    complete(case, &postgres);
}

/// PgBouncer in transaction mode, with two connections to the server for all clients.
struct Pooler {
    store: String,
    child: Child,
    _place: TempDir,
}

impl Pooler {
    fn start(postgres: &Postgres) -> Self {
        let (place, port) = (directory(), free_port());
        let settings = format!(
            "[databases]\nplants = host=127.0.0.1 port={} user=postgres\n[pgbouncer]\nlisten_addr = 127.0.0.1\n\
             listen_port = {port}\nunix_socket_dir =\nauth_type = any\npool_mode = transaction\ndefault_pool_size = 2\n",
            postgres.port()
        );
        let file = place.path().join("pgbouncer.ini");
        fs::write(&file, settings).expect("a file");
        let program = "/usr/sbin/pgbouncer";
        let mut command = Command::new(program);
        if geteuid().is_root() {
            // PgBouncer does not run as root.
            for path in [place.path(), &file] {
                let mode = fs::Permissions::from_mode(0o755);
                fs::set_permissions(path, mode).expect("a mode");
            }
            command = Command::new("setpriv");
            command.args([
                "--reuid=nobody",
                "--regid=nogroup",
                "--clear-groups",
                program,
            ]);
        }
        command.arg("--quiet").arg(&file).stdin(Stdio::null());
        let quiet = command.stdout(Stdio::null()).stderr(Stdio::null());
        let child = quiet.spawn().expect("PgBouncer is installed: make setup");
        let pooler = Self {
            store: format!("postgres://postgres@127.0.0.1:{port}/plants"),
            child,
            _place: place,
        };
        wait_until("PgBouncer listens", || {
            TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
        pooler
    }
}

impl Drop for Pooler {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn outage(case: &mut Case) {
    let mut postgres = Postgres::start_new();
    let Some(server) = serve(case, &postgres, &["--store-timeout", "1s"]) else {
        return;
    };
    case.add(&server);
    let metric = |name: &str| {
        let text = server.ask("/metrics").body;
        let line = text.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.rsplit(' ').next())
            .map(str::to_owned)
    };
    let before = server.everything_logged().lines().count();
    postgres.kill();
    let is_down = within(STOP_LIMIT, || {
        metric("plantstore_ready").as_deref() == Some("0")
    });
    case.expect(is_down, "silent", "plantstore_ready stays 1");
    let token = server.token();
    let body = br#"{"id":1,"name":"Fern"}"#;
    for _ in 0..5 {
        let error = server.connect().add(&token, body).error();
        case.expect(
            error == 50303,
            "wrong",
            format!("an add is answered with {error}"),
        );
    }
    postgres.start();
    let is_up = within(STOP_LIMIT, || {
        metric("plantstore_ready").as_deref() == Some("1")
    });
    case.expect(is_up, "silent", "plantstore_ready stays 0");
    case.add(&server);
    let log = server.everything_logged();
    let lines: Vec<_> = log
        .lines()
        .skip(before)
        .filter(|line| !line.contains("plantstore::access_log"))
        .collect();
    let is_short = (2..=6).contains(&lines.len());
    case.expect(
        is_short,
        "wrong",
        format!("{} lines of the outage: {lines:?}", lines.len()),
    );
    complete(case, &postgres);
}

fn temporary_space(case: &mut Case) {
    let postgres = Postgres::start_new();
    let url = postgres.url();
    let mut rows = "id,name,tag\n".to_owned();
    let mut random = crate::random::Random::new(1);
    for number in 0..60_000 {
        let id = random.next() >> 2;
        writeln!(rows, "{id},plant {number},tag").expect("it is a string");
    }
    fs::write(case.path("rows.csv"), rows).expect("a file");
    case.succeeds(&["import", "rows.csv", "--store", &url]);
    for (directory, command) in [
        ("backup", &["backup", "backup/out.db"][..]),
        ("copy", &["copy", "--to", "sqlite:copy/out.db"]),
    ] {
        case.count += 1;
        let target = case.path(directory);
        fs::create_dir(&target).expect("a directory");
        let has_ended = AtomicBool::new(false);
        let largest = thread::scope(|scope| {
            let measured = scope.spawn(|| {
                let mut largest = 0;
                while !has_ended.load(Ordering::SeqCst) {
                    largest = largest.max(size(&target));
                    thread::sleep(Duration::from_millis(2));
                }
                largest
            });
            case.succeeds(&[command, &["--store", &url]].concat());
            has_ended.store(true, Ordering::SeqCst);
            measured.join().expect("no panic")
        });
        let result = fs::metadata(target.join("out.db")).map_or(1, |file| file.len());
        let is_bounded = largest <= 2 * result;
        let text = format!("{directory}: {largest} bytes for a file of {result}");
        case.expect(is_bounded, "wrong", text);
    }
}

fn size(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).expect("a directory");
    let sizes = entries.filter_map(|entry| Some(entry.ok()?.metadata().ok()?.len()));
    sizes.sum()
}

fn restore_tokens(case: &mut Case, theirs: &str) {
    let postgres = Postgres::start_new();
    let url = postgres.url();
    let store = ["--store", &url];
    case.stopped();
    case.succeeds(&["backup", "backup.db"]);
    fs::write(case.path("more.csv"), "id,name\n1,Fern\n2,Ivy\n").expect("a file");
    case.succeeds(&[&["token", "create", theirs], &store[..]].concat());
    case.succeeds(&[&["import", "more.csv", "--token", theirs], &store[..]].concat());
    let schema = schema(&postgres);
    let digests = format!(
        "SELECT coalesce(string_agg(p.id || encode(t.digest, 'hex'), ' ' ORDER BY p.id), '')
         FROM {schema}.plants p JOIN {schema}.tokens t ON t.id = p.added_by"
    );
    let before = postgres.ask(&digests).unwrap_or_default();
    let ran = case.run(&[&["restore", "--force", "backup.db"], &store[..]].concat());
    let after = postgres.ask(&digests).unwrap_or_default();
    let mut expected: Vec<_> = before.split_whitespace().map(str::to_owned).collect();
    for (id, digest) in super::commands::adders(&case.path("plantstore.db")) {
        let mut plant = id.to_string();
        for byte in digest {
            write!(plant, "{byte:02x}").expect("it is a string");
        }
        expected.push(plant);
    }
    let after: Vec<_> = after.split_whitespace().map(str::to_owned).collect();
    let silent = if ran.code == Some(0) {
        "silent"
    } else {
        "wrong"
    };
    let is_right = after.iter().all(|plant| expected.contains(plant));
    case.expect(is_right, silent, "a plant has a wrong adder");
    if ran.code == Some(0) {
        case.expect(
            after.len() == expected.len(),
            "silent",
            "plants are missing",
        );
    } else {
        case.expect(is_error_message(&ran.said), "wrong", &ran.said);
        case.expect(
            after.join(" ") == before,
            "wrong",
            "the restore that failed has added plants",
        );
    }
}
