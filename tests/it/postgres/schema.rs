//! The schema `plantstore`: tables of other applications in the same database or schema, and databases of an earlier version.

use std::collections::HashSet;
use std::path::Path;
use std::thread;

use crate::harness::postgres::{plants, with_client};
use crate::harness::{Server, directory, plantstore, run, run_ok, wait_for_exit, wait_until};
use crate::postgres::{BODY, END_CONNECTIONS, SERVE, as_role, refusal, says, sql, url};

/// A database of the previous version, with one token (digest of `token`) and one plant.
const EARLIER: &str = "
    CREATE TABLE tokens (id BIGINT PRIMARY KEY, name TEXT NOT NULL UNIQUE, digest BYTEA NOT NULL UNIQUE, rate_limit BIGINT,
        created_at TIMESTAMPTZ NOT NULL, expires_at TIMESTAMPTZ, revoked_at TIMESTAMPTZ, last_used_at TIMESTAMPTZ);
    CREATE TABLE plants (id BIGINT PRIMARY KEY, name TEXT NOT NULL, tag TEXT, added_at TIMESTAMPTZ NOT NULL,
        added_by BIGINT NOT NULL);
    CREATE INDEX plants_by_time ON plants (added_at, id);
    CREATE TABLE plantstore_schema (version BIGINT PRIMARY KEY);
    INSERT INTO plantstore_schema VALUES (3);
    INSERT INTO tokens VALUES (1, 'old', sha256('token'), NULL, now(), NULL, NULL, NULL);
    INSERT INTO plants VALUES (7, 'Fern', NULL, now(), 1)";

/// The first column of all rows, as text. Runs in its own thread, so that it works while a client holds locks.
fn ask(url: &str, query: &str) -> Vec<String> {
    let ask = || {
        with_client(url, async |client| {
            let rows = client.query(query, &[]).await.expect("SQL");
            rows.iter().map(|row| row.get(0)).collect()
        })
    };
    thread::scope(|scope| scope.spawn(ask).join().expect("no panic"))
}

/// Every column of every table in these schemas.
fn layout(url: &str, schemas: &str) -> Vec<String> {
    let query = format!(
        "SELECT format('%s.%s.%s %s', table_schema, table_name, column_name, data_type) FROM information_schema.columns
         WHERE table_schema IN ({schemas}) ORDER BY 1"
    );
    ask(url, &query)
}

fn stored_names(directory: &Path) -> Vec<String> {
    let store = url(directory);
    plants(&store)
        .into_iter()
        .map(|(_, name, _)| name)
        .collect()
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn tables_of_other_applications_with_our_names_are_not_used_and_not_changed() {
    let directory = directory();
    let url = url(directory.path());
    let theirs = "'public', 'postgres'";
    // The second schema has the name of our role, so that its tables come first in the search path.
    sql(
        &url,
        "CREATE TABLE public.tokens (id INTEGER, secret TEXT); INSERT INTO public.tokens VALUES (1, 'theirs');
         CREATE TABLE public.plants (plant_id UUID, power REAL);
         CREATE TABLE public.schema_version (version TEXT);
         CREATE SCHEMA postgres; CREATE TABLE postgres.plants (LIKE public.plants);
         CREATE VIEW postgres.tokens AS SELECT 1 AS id",
    );
    let before = layout(&url, theirs);
    let server = Server::start_in(directory.path(), &[]);
    server.add_ok(BODY);
    server.add_ok(BODY);
    assert_eq!(stored_names(directory.path()), ["x"]);
    assert_eq!(layout(&url, theirs), before);
    assert_eq!(ask(&url, "SELECT secret FROM public.tokens"), ["theirs"]);
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn an_unknown_table_in_our_schema_is_rejected_and_not_changed() {
    let cases = [
        (
            "DROP SCHEMA plantstore CASCADE; CREATE SCHEMA plantstore; CREATE TABLE plantstore.plants (power REAL)",
            "plantstore.plants is not what this plantstore creates (it has no column added_at, it has no column added_by, it has no column id,",
        ),
        (
            "DROP SCHEMA plantstore CASCADE; CREATE SCHEMA plantstore; CREATE TABLE plantstore.turbines (power REAL)",
            "its schema plantstore belongs to another application: it has turbines",
        ),
        (
            "ALTER TABLE plantstore.plants ALTER COLUMN id TYPE INTEGER",
            "column id is integer instead of bigint",
        ),
        (
            "ALTER TABLE plantstore.plants DROP CONSTRAINT plants_pkey",
            "column id is not unique",
        ),
        (
            "ALTER TABLE plantstore.plants ALTER COLUMN tag SET NOT NULL",
            "column tag cannot be null",
        ),
        (
            "ALTER TABLE plantstore.tokens ADD COLUMN owner TEXT NOT NULL",
            "it has a further column owner, which cannot be null",
        ),
        (
            "ALTER TABLE plantstore.plants SET UNLOGGED",
            "it is not logged: a crash would empty it",
        ),
        ("DROP TABLE plantstore.nodes", "it is missing"),
        (
            "ALTER TABLE plantstore.plants RENAME TO p; CREATE VIEW plantstore.plants AS SELECT * FROM plantstore.p",
            "it is not a table",
        ),
    ];
    for (change, complaint) in cases {
        let directory = directory();
        let url = url(directory.path());
        run_ok(directory.path(), &["migrate"]);
        sql(&url, change);
        let before = layout(&url, "'plantstore'");
        for command in [&SERVE[..], &["migrate"], &["token", "list"]] {
            let sentence = refusal(directory.path(), command);
            assert!(sentence.contains(complaint), "{change}: {sentence}");
        }
        assert_eq!(layout(&url, "'plantstore'"), before, "{change}");
    }
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn an_additional_nullable_column_is_accepted() {
    let directory = directory();
    run_ok(directory.path(), &["migrate"]);
    sql(
        &url(directory.path()),
        "ALTER TABLE plantstore.plants ADD COLUMN note TEXT;
         ALTER TABLE plantstore.tokens ADD COLUMN team TEXT NOT NULL DEFAULT 'none'",
    );
    let server = Server::start_in(directory.path(), &[]);
    server.add_ok(BODY);
    assert!(run_ok(directory.path(), &["token", "list"]).contains("first"));
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn a_node_stops_acknowledging_when_its_tables_are_changed() {
    let directory = directory();
    let url = url(directory.path());
    let server = Server::start_in(directory.path(), &[]);
    server.add_ok(BODY);
    sql(&url, "ALTER TABLE plantstore.plants SET UNLOGGED");
    wait_until("no add is acknowledged", || server.add(BODY).status == 503);
    sql(&url, "ALTER TABLE plantstore.plants SET LOGGED");
    wait_until("adds are acknowledged again", || {
        server.add(BODY).status == 200
    });
    says(&server, "it is not logged");
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn a_running_node_does_not_recreate_a_dropped_schema() {
    let directory = directory();
    let url = url(directory.path());
    let server = Server::start_in(directory.path(), &[]);
    server.add_ok(BODY);
    sql(&url, "ALTER SCHEMA plantstore RENAME TO elsewhere");
    sql(&url, END_CONNECTIONS);
    wait_until("no add is acknowledged", || server.add(BODY).status == 503);
    // The add may have failed at its token; the writer notices at its next use of the store, a second later at most.
    wait_until("it is not ready", || server.ask("/readyz").status == 503);
    assert_eq!(layout(&url, "'plantstore'"), [""; 0]);
    says(&server, "which this process has used, is no longer there");
    sql(&url, "ALTER SCHEMA elsewhere RENAME TO plantstore");
    wait_until("adds are acknowledged again", || {
        server.add(BODY).status == 200
    });
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn a_database_of_the_previous_version_is_moved_into_our_schema_by_concurrent_nodes() {
    for schema in ["public", "Old \"one\""] {
        let directory = directory();
        let url = url(directory.path());
        let quoted = format!("\"{}\"", schema.replace('"', "\"\""));
        let role = format!("clerk_{}_{}", std::process::id(), schema.len());
        sql(
            &url,
            &format!(
                "CREATE SCHEMA IF NOT EXISTS {quoted}; SET search_path = {quoted}; {EARLIER}; CREATE ROLE {role} LOGIN;
                 GRANT USAGE ON SCHEMA {quoted} TO {role};
                 GRANT SELECT ON plantstore_schema TO {role}; GRANT SELECT, INSERT, UPDATE ON plants, tokens TO {role};
                 CREATE ROLE {role}_owner LOGIN; ALTER TABLE plantstore_schema OWNER TO {role}_owner;
                 ALTER TABLE plants OWNER TO {role}_owner; ALTER TABLE tokens OWNER TO {role}_owner"
            ),
        );
        // The error for a role without the rights names the role that has them.
        let clerk = as_role(&url, &role);
        let sentence = refusal(
            directory.path(),
            &[&SERVE[..], &["--store", &clerk]].concat(),
        );
        assert!(sentence.contains("run `plantstore migrate`"), "{sentence}");
        let sentence = refusal(directory.path(), &["token", "list", "--store", &url]);
        assert!(sentence.contains("run `plantstore migrate`"), "{sentence}");

        let mut children: Vec<_> = (0..8)
            .map(|_| {
                let mut migrate = plantstore(directory.path());
                migrate.arg("migrate").spawn().expect("it starts")
            })
            .collect();
        for child in &mut children {
            assert!(wait_for_exit(child).success());
        }

        // The rights of the role are kept.
        let server = Server::start_in(directory.path(), &["--store", &clerk]);
        server.add_ok(BODY);
        server.wait_until_ready();
        assert_eq!(stored_names(directory.path()), ["x", "Fern"]);
        let owner = as_role(&url, &format!("{role}_owner"));
        let listed = run_ok(directory.path(), &["token", "list", "--store", &owner]);
        assert!(listed.contains("old"), "{listed}");
        Server::start_in(directory.path(), &["--store", &owner]).add_ok(BODY);
        assert_eq!(
            run_ok(directory.path(), &["check"]),
            "no damage found: 2 plants, 2 tokens\n"
        );
        // An earlier version finds an unknown version and creates no tables.
        let marker = format!("SELECT max(version)::TEXT FROM {quoted}.plantstore_schema");
        assert_eq!(ask(&url, &marker), ["4"]);
        assert_eq!(
            layout(&url, &format!("'{schema}'")),
            [format!("{schema}.plantstore_schema.version bigint")]
        );
        drop(server);
        if schema == "public" {
            // The documented downgrade, and the upgrade again.
            let docs = include_str!("../../../docs/upgrading.md");
            let (_, back) = docs.split_once("```sql\n").expect("SQL");
            let (back, _) = back.split_once("```").expect("an end");
            sql(&url, back);
            assert_eq!(layout(&url, "'plantstore'"), [""; 0]);
            assert_eq!(
                ask(&url, "SELECT name FROM public.plants ORDER BY id"),
                ["x", "Fern"]
            );
            assert_eq!(ask(&url, &marker), ["3"]);
            run_ok(directory.path(), &["migrate"]);
            assert_eq!(stored_names(directory.path()), ["x", "Fern"]);
        }
        sql(
            &url,
            &format!("DROP OWNED BY {role}, {role}_owner; DROP ROLE {role}, {role}_owner"),
        );
    }
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn tables_that_only_resemble_the_previous_version_are_neither_moved_nor_changed() {
    for (change, complaint) in [
        (
            "ALTER TABLE plants ALTER COLUMN id TYPE INTEGER",
            "public.plants is not what an earlier plantstore made (column id is integer instead of bigint)",
        ),
        (
            "DROP TABLE tokens",
            "public.tokens is not what an earlier plantstore made (it is missing)",
        ),
        (
            "CREATE SCHEMA b; CREATE TABLE b.plantstore_schema AS SELECT * FROM plantstore_schema;
             CREATE TABLE b.plants (LIKE plants INCLUDING ALL); CREATE TABLE b.tokens (LIKE tokens INCLUDING ALL)",
            "in two schemas, b and public",
        ),
        (
            "INSERT INTO plantstore_schema VALUES (4); DROP TABLE plants, tokens",
            "were moved to the schema plantstore, which is not there",
        ),
    ] {
        let directory = directory();
        let url = url(directory.path());
        sql(&url, EARLIER);
        sql(&url, change);
        let all = "'public', 'b', 'plantstore'";
        let before = layout(&url, all);
        for command in [&SERVE[..], &["migrate"]] {
            let sentence = refusal(directory.path(), command);
            assert!(sentence.contains(complaint), "{change}: {sentence}");
        }
        assert_eq!(layout(&url, all), before, "{change}");
    }
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn tables_of_version_4_that_were_moved_are_upgraded() {
    let directory = directory();
    let url = url(directory.path());
    sql(&url, EARLIER);
    run_ok(directory.path(), &["migrate"]);
    sql(
        &url,
        "DROP TABLE plantstore.token_events; UPDATE plantstore.schema_version SET version = 4",
    );
    let server = Server::start_in(directory.path(), &[]);
    server.add_ok(BODY);
    assert_eq!(stored_names(directory.path()), ["x", "Fern"]);
    assert_eq!(
        ask(&url, "SELECT event FROM plantstore.token_events"),
        ["created"]
    );
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn a_database_of_version_5_gets_the_columns_of_rotated_tokens() {
    let directory = directory();
    let url = url(directory.path());
    let token = run_ok(directory.path(), &["token", "create", "ci"]);
    sql(
        &url,
        "ALTER TABLE plantstore.tokens DROP COLUMN rotated_at, DROP COLUMN previous_digest, DROP COLUMN previous_expires_at;
         ALTER TABLE plantstore.token_events DROP COLUMN by_user;
         UPDATE plantstore.schema_version SET version = 5",
    );
    let server = Server::start_in(directory.path(), &[]);
    assert_eq!(server.connect().add(token.trim(), BODY).status, 200);
    let rotated = run_ok(directory.path(), &["token", "rotate", "ci"]);
    for token in [token, rotated] {
        let response = server.connect().add(token.trim(), BODY);
        assert_eq!(response.status, 200);
    }
    assert_eq!(
        ask(
            &url,
            "SELECT version::TEXT FROM plantstore.schema_version ORDER BY version"
        ),
        ["5", "6"]
    );
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn a_database_with_tables_of_an_older_plantstore_next_to_ours_is_rejected() {
    let directory = directory();
    let url = url(directory.path());
    run_ok(directory.path(), &["migrate"]);
    sql(&url, EARLIER);
    let sentence = refusal(directory.path(), &SERVE);
    assert!(
        sentence.contains("an older plantstore has been used"),
        "{sentence}"
    );
    sql(&url, "DROP TABLE public.plantstore_schema");
    run_ok(directory.path(), &["token", "list"]);
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn a_role_without_rights_on_our_schema_gets_an_error() {
    let directory = directory();
    let url = url(directory.path());
    run_ok(directory.path(), &["migrate"]);
    let role = format!("stranger_{}", std::process::id());
    sql(&url, &format!("CREATE ROLE {role} LOGIN"));
    let store = as_role(&url, &role);
    let sentence = refusal(directory.path(), &["token", "list", "--store", &store]);
    assert!(
        sentence.contains("permission denied for schema plantstore"),
        "{sentence}"
    );
    assert!(sentence.contains("docs/high-availability.md"), "{sentence}");
    sql(&url, &format!("DROP ROLE {role}"));
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn a_node_is_ready_while_other_sessions_lock_all_other_rows() {
    let directory = directory();
    let url = url(directory.path());
    let first = Server::start_in(directory.path(), &[]);
    first.add_ok(BODY);
    let nodes = "SELECT count(*)::TEXT FROM plantstore.nodes WHERE id > 0";
    wait_until("it has a row", || {
        first.ask("/readyz").status == 200 && ask(&url, nodes) == ["1"]
    });
    sql(
        &url,
        "INSERT INTO plantstore.nodes VALUES (-1, now() - INTERVAL '2 days', now() - INTERVAL '2 days'),
                                             (-2, now() - INTERVAL '2 days', now() - INTERVAL '2 days')",
    );
    with_client(&url, async |client| {
        let lock = "BEGIN; SELECT * FROM plantstore.tokens FOR UPDATE; SELECT * FROM plantstore.plants FOR UPDATE;
                    SELECT * FROM plantstore.nodes WHERE id <> -2 FOR UPDATE";
        client.batch_execute(lock).await.expect("locks");
        let second = Server::start_in(directory.path(), &[]);
        // It writes its own row more than once, and is ready all the time.
        let probed_again = "SELECT count(*)::TEXT FROM plantstore.nodes WHERE id > 0 AND seen_at > started_at + INTERVAL '1 s'
                            AND started_at > (SELECT min(started_at) FROM plantstore.nodes WHERE id > 0)";
        wait_until("the second node writes its row", || {
            let response = second.ask("/readyz");
            assert_eq!(response.status, 200, "{response:?}");
            ask(&url, probed_again) == ["1"]
        });
        // Rows of nodes that stopped long ago are deleted, unless they are locked.
        let old = "SELECT id::TEXT FROM plantstore.nodes WHERE id < 0";
        wait_until("old rows are deleted", || ask(&url, old) == ["-1"]);
        client.batch_execute("ROLLBACK").await.expect("no locks");
    });
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn connections_do_not_accumulate_while_the_check_of_the_tables_waits_for_a_lock() {
    let directory = directory();
    let url = url(directory.path());
    let started = Server::start_in(directory.path(), &["--store-timeout", "1s"]);
    started.add_ok(BODY);
    let pids = "SELECT pid::TEXT FROM pg_stat_activity
                WHERE application_name = 'plantstore' AND datname = current_database()";
    with_client(&url, async |client| {
        let lock = "BEGIN; LOCK TABLE plantstore.schema_version IN ACCESS EXCLUSIVE MODE";
        client.batch_execute(lock).await.expect("a lock");
        client.query(END_CONNECTIONS, &[]).await.expect("SQL");
        // A node that starts now has not used the tables before.
        let mut command = plantstore(directory.path());
        command.args([&SERVE[..], &["--store-timeout", "1s"]].concat());
        let starting = Server::spawn(command, directory.path(), started.address());
        let mut seen = HashSet::new();
        wait_until("many connections were made", || {
            let open = ask(&url, pids);
            assert!(open.len() <= 2 * 10, "{} connections", open.len());
            seen.extend(open);
            seen.len() >= 40
        });
        drop(starting);
        client.batch_execute("ROLLBACK").await.expect("no lock");
    });
    wait_until("adds are acknowledged again", || {
        started.add(BODY).status == 200
    });
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn a_read_only_command_needs_only_the_right_to_read() {
    let directory = directory();
    let url = url(directory.path());
    Server::start_in(directory.path(), &[]).add_ok(BODY);
    let role = format!("reader_{}", std::process::id());
    sql(
        &url,
        &format!(
            "CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA plantstore TO {role};
             GRANT SELECT ON ALL TABLES IN SCHEMA plantstore TO {role}"
        ),
    );
    let store = as_role(&url, &role);
    for command in ["list", "export", "stats", "check"] {
        let output = run(directory.path(), &[command, "--store", &store]);
        assert!(output.status.success(), "{command}: {output:?}");
    }
    sql(&url, &format!("DROP OWNED BY {role}; DROP ROLE {role}"));
}
