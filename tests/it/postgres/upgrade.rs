//! Upgrades of the schema while nodes serve: docs/decisions/schema-changes.md. `make upgrade` tests the same with two binaries.

use crate::earlier_versions::Fixture;
use crate::harness::postgres::with_client;
use crate::harness::{Server, directory, run, run_ok, wait_until};
use crate::postgres::{BODY, SERVE, refusal, says, sql, url};
use crate::rolling_upgrade::Load;

/// What a later version may add to the tables while nodes of this version serve.
const EXPANSION: &str = "
    ALTER TABLE plantstore.plants ADD COLUMN later TEXT;
    ALTER TABLE plantstore.tokens ADD COLUMN later BIGINT NOT NULL DEFAULT 0;
    ALTER TABLE plantstore.token_events ADD COLUMN later TIMESTAMPTZ;
    ALTER TABLE plantstore.nodes ADD COLUMN later TEXT;
    CREATE TABLE plantstore.later (id BIGINT PRIMARY KEY);
    CREATE INDEX plants_later ON plantstore.plants (later)";

/// Ends all connections: the nodes connect again and verify the tables.
const END_CONNECTIONS: &str = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()";

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn nodes_serve_while_a_later_version_expands_the_schema() {
    let directory = directory();
    let url = url(directory.path());
    let nodes = [(); 2].map(|()| Server::start_in(directory.path(), &[]));
    let load = Load::start(
        nodes.iter().map(Server::address).collect(),
        &nodes[0].token(),
    );
    load.wait_for_acknowledgements();
    sql(&url, EXPANSION);
    load.wait_for_acknowledgements();
    sql(&url, END_CONNECTIONS);
    load.wait_for_acknowledgements();
    let later = Server::start_in(directory.path(), &[]);
    later.add_ok(r#"{"id":-1,"name":"x"}"#);
    let token = run_ok(directory.path(), &["token", "create", "a"]);
    assert_eq!(
        later
            .connect()
            .add(token.trim(), br#"{"id":-1,"name":"x"}"#)
            .status,
        200
    );

    let history = load.stop();
    assert_eq!(history.rejected, Vec::<String>::new());
    history.is_stored(&url);
    let checked = run_ok(directory.path(), &["check"]);
    assert!(checked.starts_with("no damage found"), "{checked}");
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn nodes_reject_adds_after_a_later_version_has_contracted_the_schema() {
    let directory = directory();
    let url = url(directory.path());
    let node = Server::start_in(directory.path(), &[]);
    node.add_ok(BODY);
    sql(&url, "INSERT INTO plantstore.schema_version VALUES (7)");
    sql(&url, END_CONNECTIONS);
    // Until each connection has been used again, the outcome is unknown (50301).
    wait_until("adds are rejected", || {
        let response = node.add(br#"{"id":2,"name":"x"}"#);
        response.status == 503 && response.error() == 50303
    });
    let sentence = "has schema version 7 and this plantstore knows versions up to 6; use the newer plantstore that made it";
    says(&node, sentence);
    for command in [&SERVE[..], &["migrate"], &["list"]] {
        let refused = refusal(directory.path(), command);
        assert!(refused.contains(sentence), "{refused}");
    }
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn what_a_version_has_added_without_a_new_number_is_added_at_the_start() {
    let directory = directory();
    let url = url(directory.path());
    let drop =
        "ALTER TABLE plantstore.tokens DROP COLUMN rotated_at, DROP COLUMN previous_expires_at;
                ALTER TABLE plantstore.token_events DROP COLUMN by_user";
    run_ok(directory.path(), &["token", "create", "a"]);
    sql(&url, drop);
    let refused = refusal(directory.path(), &["list"]);
    assert!(refused.contains("run `plantstore migrate`"), "{refused}");
    let migrated = run(directory.path(), &["migrate"]);
    let printed = String::from_utf8_lossy(&migrated.stderr);
    assert!(printed.contains("was upgraded from version 6"), "{printed}");
    run_ok(directory.path(), &["token", "rotate", "a"]);

    sql(&url, drop);
    let node = Server::start_in(directory.path(), &[]);
    node.add_ok(BODY);
    // A node that has used the columns has seen them complete.
    sql(&url, drop);
    sql(&url, END_CONNECTIONS);
    wait_until("adds are rejected", || node.add(BODY).status == 503);
    says(&node, "is not what this plantstore creates");
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn an_upgrade_gives_up_a_lock_that_a_long_reader_holds() {
    let directory = directory();
    let url = url(directory.path());
    run_ok(directory.path(), &["token", "create", "a"]);
    let drop = "ALTER TABLE plantstore.token_events DROP COLUMN by_user";
    sql(&url, drop);
    with_client(&url, async |reader| {
        let read = "BEGIN; SELECT count(*) FROM plantstore.token_events";
        reader.batch_execute(read).await.expect("SQL");
        let refused = refusal(directory.path(), &["migrate"]);
        assert!(refused.contains("lock timeout"), "{refused}");
    });
    run_ok(directory.path(), &["migrate"]);
    run_ok(directory.path(), &["token", "rotate", "a"]);
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn a_backup_of_every_schema_version_is_restored_into_postgresql() {
    for fixture in Fixture::all() {
        let Some(backup) = fixture.backup() else {
            continue;
        };
        let place = directory();
        run_ok(place.path(), &["restore", backup.to_str().expect("UTF-8")]);
        fixture.has_the_plants(place.path(), &[]);
        let tokens = fixture.tokens();
        assert_eq!(
            run_ok(place.path(), &["check"]),
            format!("no damage found: 3 plants, {tokens} tokens\n")
        );
        fixture.serves(&Server::start_in(place.path(), &[]));
    }
}
