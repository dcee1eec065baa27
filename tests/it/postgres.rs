//! Tests that apply to PostgreSQL only: settings, roles, logins, several nodes, TLS, an unavailable database.
//! `scripts/with-postgres` runs these, and the tests of both stores, with a temporary server.

mod damage;
mod hosts;
mod login;
mod lost_responses;
mod own_server;
mod pooler;
mod roles;
mod schema;
mod settings;
mod tls;
mod upgrade;

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::harness::postgres::{plants, store, with_client};
use crate::harness::tcp_proxy::TcpProxy;
use crate::harness::{Client, Server, directory, free_port, plantstore, run, run_ok, wait_until};

const BODY: &[u8] = br#"{"id":1,"name":"x"}"#;

/// Ends the connections of the nodes to this database.
const END_CONNECTIONS: &str = "
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE application_name = 'plantstore' AND datname = current_database()";

pub fn url(directory: &Path) -> String {
    store(directory).expect("scripts/with-postgres runs this")
}

pub fn sql(url: &str, statements: &str) {
    with_client(url, async |client| {
        client.batch_execute(statements).await.expect("SQL");
    });
}

/// The same database as another role.
fn as_role(url: &str, role: &str) -> String {
    url.replace("postgres@", &format!("{role}@"))
}

/// The one-line error message of a command that exits with 1.
fn refusal(directory: &Path, arguments: &[&str]) -> String {
    let output = run(directory, arguments);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    stderr
}

/// Waits for a log line that contains a text.
fn says(server: &Server, part: &str) {
    wait_until(part, || server.everything_logged().contains(part));
}

const SERVE: [&str; 3] = ["serve", "--listen", "127.0.0.1:0"];

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn a_server_with_asynchronous_commits_is_rejected_with_the_name_of_the_setting() {
    let directory = directory();
    let url = url(directory.path());
    let database = url.rsplit('/').next().expect("a name");
    sql(
        &url,
        &format!("ALTER DATABASE \"{database}\" SET synchronous_commit = off"),
    );
    let sentence = refusal(directory.path(), &SERVE);
    assert!(sentence.contains("synchronous_commit is off"), "{sentence}");
    let sentence = refusal(directory.path(), &["token", "create", "a"]);
    assert!(sentence.contains("synchronous_commit is off"), "{sentence}");
}

/// These are settings of a whole server, so this test has its own server.
#[test]
#[ignore = "scripts/with-postgres runs it"]
fn a_server_without_fsync_or_full_page_writes_is_rejected_with_the_name_of_the_setting() {
    let directory = directory();
    let script = r#"
        store="$TEST_POSTGRES/postgres"
        for setting in fsync full_page_writes; do
          psql -qX "$store" -c "ALTER SYSTEM SET $setting = off" -c "SELECT pg_reload_conf()" >/dev/null
          for _ in $(seq 300); do
            [ "$(psql -qXtA "$store" -c "SHOW $setting")" = on ] || break
            sleep 0.1
          done
          code=0
          timeout 20 "$PLANTSTORE" serve --listen 127.0.0.1:0 --ops-listen off --store "$store" 2>&1 || code=$?
          echo "exit code $code"
          psql -qX "$store" -c "ALTER SYSTEM RESET $setting" -c "SELECT pg_reload_conf()" >/dev/null
        done"#;
    let project = env!("CARGO_MANIFEST_DIR");
    let output = std::process::Command::new("timeout")
        .args(["120", "scripts/with-postgres", "bash", "-euc", script])
        .env("PLANTSTORE", plantstore(directory.path()).get_program())
        .current_dir(project)
        .output()
        .expect("bash runs");
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    for setting in ["fsync", "full_page_writes"] {
        assert!(printed.contains(&format!("{setting} is off")), "{printed}");
    }
    assert_eq!(printed.matches("exit code 1").count(), 2, "{printed}");
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn many_nodes_can_migrate_at_the_same_time() {
    let directory = directory();
    url(directory.path());
    let mut children: Vec<_> = (0..8)
        .map(|_| {
            plantstore(directory.path())
                .arg("migrate")
                .spawn()
                .expect("it starts")
        })
        .collect();
    for child in &mut children {
        assert!(crate::harness::wait_for_exit(child).success());
    }
    run_ok(directory.path(), &["token", "create", "a"]);
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn a_newer_schema_is_rejected() {
    let directory = directory();
    run_ok(directory.path(), &["migrate"]);
    sql(
        &url(directory.path()),
        "INSERT INTO plantstore.schema_version VALUES (99)",
    );
    let sentence = refusal(directory.path(), &SERVE);
    assert!(sentence.contains("schema version 99"), "{sentence}");
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn a_token_created_or_revoked_on_one_node_is_valid_or_invalid_on_all() {
    let directory = directory();
    let nodes = [(); 3].map(|()| Server::start_in(directory.path(), &[]));
    let token = run_ok(directory.path(), &["token", "create", "a"]);
    let add = |node: &Server| node.connect().add(token.trim(), BODY);
    for node in &nodes {
        assert_eq!(add(node).status, 200);
    }
    run_ok(directory.path(), &["token", "revoke", "a"]);
    let revoked = Instant::now();
    for node in &nodes {
        let mut sent = revoked;
        while add(node).status == 200 {
            assert!(sent - revoked < Duration::from_secs(1));
            sent = Instant::now();
        }
        assert_eq!(add(node).error(), 40101);
    }
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn of_two_nodes_racing_for_an_id_exactly_one_wins() {
    let directory = directory();
    let nodes = [(); 2].map(|()| Server::start_in(directory.path(), &[]));
    let token = nodes[0].token();
    for id in 0..50 {
        let statuses = thread::scope(|scope| {
            let adds = nodes.iter().zip(["a", "b"]).map(|(node, name)| {
                let (token, address) = (&token, node.address());
                let body = format!(r#"{{"id":{id},"name":"{name}"}}"#);
                scope.spawn(move || Client::connect(address).add(token, body.as_bytes()).status)
            });
            let adds: Vec<_> = adds.collect();
            let mut statuses: Vec<_> = adds
                .into_iter()
                .map(|add| add.join().expect("no panic"))
                .collect();
            statuses.sort_unstable();
            statuses
        });
        assert_eq!(statuses, [200, 400], "id {id}");
    }
    assert_eq!(nodes[0].plants().len(), 50);
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn a_node_starts_without_its_database_and_works_when_it_becomes_available() {
    let directory = directory();
    let url = url(directory.path());
    let token = run_ok(directory.path(), &["token", "create", "a"]);
    let database = address(&url);
    let mut proxy = TcpProxy::closed(database);
    let through = url.replace(&database.to_string(), &proxy.address.to_string());
    let arguments = ["--store", &through, "--store-timeout", "1s"];
    let server = Server::start_in(directory.path(), &arguments);
    let response = server.ask("/readyz");
    let reason = "not ready: the store cannot be reached: ";
    assert_eq!(response.status, 503);
    assert!(response.body.starts_with(reason), "{response:?}");
    assert_eq!(server.ask("/healthz").status, 200);
    let response = server.connect().add(token.trim(), BODY);
    assert_eq!(response.error(), 50303, "{response:?}");

    proxy.open();
    server.wait_until_ready();
    assert_eq!(server.connect().add(token.trim(), BODY).status, 200);
}

#[test]
fn a_server_that_accepts_connections_but_never_responds_times_out() {
    let directory = directory();
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!(
        "postgres://u@{}/d",
        silent.local_addr().expect("an address")
    );
    let sentence = refusal(directory.path(), &["token", "list", "--store", &url]);
    assert!(sentence.contains("cannot be reached"), "{sentence}");
}

/// With one attempt per connection, this would take many minutes.
#[test]
fn a_node_with_many_connections_starts_during_an_outage_after_one_attempt_to_connect() {
    let directory = directory();
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = silent.local_addr().expect("an address");
    let store = format!("postgres://u@{address}/d");
    let arguments = ["--store", &store, "--store-connections", "64"];
    let server = Server::start_in(directory.path(), &arguments);
    assert_eq!(server.ask("/healthz").status, 200);
    assert_eq!(server.ask("/readyz").status, 503);
}

#[test]
fn a_connection_to_another_machine_without_tls_is_logged_as_a_warning() {
    let directory = directory();
    let port = free_port();
    // Not an address of this machine, but connections to it stay on this machine.
    for (host, options, expected) in [
        ("0.0.0.0", "", 1),
        ("0.0.0.0", "?sslmode=require", 0),
        ("127.0.0.1", "", 0),
    ] {
        let store = format!("postgres://u:secret@{host}:{port}/d{options}");
        let server = Server::start_in(directory.path(), &["--store", &store]);
        let logged = server.everything_logged();
        let warnings = logged.matches("is not encrypted; add sslmode=verify-full");
        assert_eq!(warnings.count(), expected, "{store}: {logged}");
        assert!(!logged.contains("secret"), "{logged}");
    }
}

pub fn address(url: &str) -> SocketAddr {
    let host = url
        .split('@')
        .nth(1)
        .and_then(|rest| rest.split('/').next());
    host.expect("a host").parse().expect("an address")
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn an_invalid_url_is_a_usage_error_without_the_password() {
    let directory = directory();
    for (url, complaint) in [
        ("postgres://u:secret@h/d?sslmode=prefer", "verify-full"),
        ("postgres://u:secret@h/d?sslmode=verify-full", "sslrootcert"),
        ("postgres://u:secret@h/d?frobnicate=1", "frobnicate"),
    ] {
        let output = run(directory.path(), &["token", "list", "--store", url]);
        assert_eq!(output.status.code(), Some(2));
        let stderr = String::from_utf8(output.stderr).expect("UTF-8");
        assert!(stderr.contains(complaint), "{stderr}");
    }
    let away = "postgres://u:secret@127.0.0.1:1/d";
    let sentence = refusal(directory.path(), &["token", "list", "--store", away]);
    assert!(sentence.contains("cannot be reached"), "{sentence}");
    assert!(!sentence.contains("secret"), "{sentence}");
}

/// A trigger in the target adds a plant to the source whenever the copy inserts some.
#[test]
#[ignore = "scripts/with-postgres runs it"]
fn a_copy_ends_although_plants_are_added_behind_it() {
    let (from, to) = (directory(), directory());
    let (source, target) = (url(from.path()), url(to.path()));
    run_ok(from.path(), &["token", "create", "a", "--store", &source]);
    run_ok(to.path(), &["migrate", "--store", &target]);
    let add = |amount: i64| {
        format!(
            "INSERT INTO plantstore.plants (id, name, added_at, added_by)
             SELECT coalesce(max(id), 0) + n, 'x', now(), (SELECT id FROM plantstore.tokens)
             FROM generate_series(1, {amount}) AS n LEFT JOIN plantstore.plants ON true GROUP BY n
             HAVING coalesce(max(id), 0) < 3000"
        )
    };
    sql(&source, &add(2500));
    sql(
        &target,
        &format!(
            "CREATE EXTENSION dblink;
             CREATE FUNCTION add_behind() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN PERFORM public.dblink_exec('{source}', $add${}$add$); RETURN NULL; END $$;
             CREATE TRIGGER add_behind AFTER INSERT ON plantstore.plants EXECUTE FUNCTION add_behind()",
            add(1)
        ),
    );
    let said = refusal(from.path(), &["copy", "--store", &source, "--to", &target]);
    let advice = "if they were added during the copy, stop the server";
    assert!(said.contains(advice), "{said}");
    let (source, target) = (plants(&source), plants(&target));
    assert!(target.len() >= 2500, "{said}");
    assert!(target.len() < source.len(), "it did not end before: {said}");
    assert_eq!(target[..], source[..target.len()], "{said}");
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn a_store_is_migrated_to_postgresql_and_back_completely() {
    let directory = directory();
    let there = url(directory.path());
    let here = "sqlite:plantstore.db";
    let server = Server::start_in(directory.path(), &["--store", here]);
    let token = fs::read_to_string(directory.path().join("plantstore.token")).expect("a token");
    run_ok(
        directory.path(),
        &["token", "create", "gone", "--store", here],
    );
    run_ok(
        directory.path(),
        &["token", "revoke", "gone", "--store", here],
    );
    let names = ["Fern", "\\u0000", "\\u001a0", "🌱", ""];
    for (id, name) in (i64::MAX - 2500..=i64::MAX).zip(names.iter().cycle()) {
        let body = format!(r#"{{"id":{id},"name":"{name}","tag":"{name}"}}"#);
        assert_eq!(
            server.connect().add(token.trim(), body.as_bytes()).status,
            200
        );
    }
    drop(server);

    let copy = |from: &str, to: &str| run(directory.path(), &["copy", "--store", from, "--to", to]);
    for _ in 0..2 {
        let copied = copy(here, &there);
        let said = String::from_utf8_lossy(&copied.stderr).into_owned();
        assert_eq!(said, "copied and compared: 2501 plants, 2 tokens\n");
    }
    // An interrupted copy is continued.
    sql(&there, "DELETE FROM plantstore.plants WHERE id % 3 = 0");
    assert!(copy(here, &there).status.success());
    assert!(copy(&there, "sqlite:back.db").status.success());
    let listed = |store: &str| {
        run_ok(
            directory.path(),
            &["token", "list", "--json", "--store", store],
        )
    };
    assert_eq!(listed(here), listed("sqlite:back.db"));
    assert_eq!(
        run_ok(directory.path(), &["check", "--store", "sqlite:back.db"]),
        "no damage found: 2501 plants, 2 tokens\n"
    );

    sql(
        &there,
        "UPDATE plantstore.plants SET name = 'another' WHERE id = 9223372036854775807",
    );
    let rejected = copy(here, &there);
    assert_eq!(rejected.status.code(), Some(1));
    let said = String::from_utf8_lossy(&rejected.stderr).into_owned();
    assert!(
        said.contains("other plants") && said.contains("1 (id 9223372036854775807)"),
        "{said}"
    );

    // More problems than one statement of the check reads.
    sql(&there, "UPDATE plantstore.plants SET name = chr(26) || 'x'");
    let damaged = run(directory.path(), &["check", "--store", &there]);
    assert_eq!(damaged.status.code(), Some(1));
    let said = String::from_utf8_lossy(&damaged.stderr).into_owned();
    assert!(said.contains(": 2501 problems found;"), "{said}");
}

/// The peak size of all files of a directory while `work` runs.
fn peak_bytes(directory: &Path, work: impl FnOnce()) -> u64 {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let peak = scope.spawn(|| {
            let mut peak = 0;
            while !over.load(Ordering::Relaxed) {
                let files = fs::read_dir(directory).expect("a directory").flatten();
                let sizes = files.filter_map(|file| Some(file.metadata().ok()?.len()));
                peak = peak.max(sizes.sum());
                thread::sleep(Duration::from_millis(1));
            }
            peak
        });
        let done = catch_unwind(AssertUnwindSafe(work));
        over.store(true, Ordering::Relaxed);
        let peak = peak.join().expect("no panic");
        done.unwrap_or_else(|panic| resume_unwind(panic));
        peak
    })
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn a_backup_and_a_copy_need_at_most_twice_the_size_of_their_result() {
    let here = directory();
    let there = url(here.path());
    run_ok(here.path(), &["token", "create", "x", "--store", &there]);
    // The order of the ids differs from the order of the timestamps.
    sql(
        &there,
        "INSERT INTO plantstore.plants SELECT hashint8extended(i, 0), 'plant ' || i, 'tag', '2026-01-01'::TIMESTAMPTZ + i * interval '1 s',
                (SELECT min(id) FROM plantstore.tokens) FROM generate_series(1, 100000::BIGINT) AS i",
    );
    for command in ["backup result.db", "copy --to sqlite:result.db"] {
        let target = directory();
        let arguments: Vec<_> = command.split(' ').collect();
        let arguments = [&arguments[..], &["--store", &there]].concat();
        let peak = peak_bytes(target.path(), || {
            run_ok(target.path(), &arguments);
        });
        let result = fs::metadata(target.path().join("result.db")).expect("the result");
        let result = result.len();
        assert!(result > 4 << 20, "{result} bytes");
        assert!(peak <= 2 * result, "{command}: {peak} bytes for {result}");
        let listed = |store: &str| {
            let list = ["list", "--json", "--limit", "3", "--store", store];
            run_ok(target.path(), &list)
        };
        assert_eq!(listed("sqlite:result.db"), listed(&there), "{command}");
    }
}
