//! PgBouncer in transaction mode between the nodes and the database, with two server connections in total.

use std::path::Path;
use std::thread;

use crate::harness::postgres::with_client;
use crate::harness::{Client, Server, directory, run, run_ok, wait_until};
use crate::postgres::{BODY, address, says, sql, url};

/// The database of this directory, through the pooler.
fn pooled(directory: &Path) -> String {
    let direct = url(directory);
    let pooler = std::env::var("TEST_PGBOUNCER").expect("scripts/with-postgres runs this");
    direct.replace(
        &address(&direct).to_string(),
        &address(&format!("{pooler}/")).to_string(),
    )
}

async fn with_another_client(url: &str, work: impl AsyncFnOnce(&tokio_postgres::Client)) {
    let connected = tokio_postgres::connect(url, tokio_postgres::NoTls).await;
    let (client, connection) = connected.expect("a server");
    tokio::spawn(connection);
    work(&client).await;
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn every_add_through_a_pooler_in_transaction_mode_succeeds() {
    let directory = directory();
    let store = pooled(directory.path());
    run_ok(directory.path(), &["migrate", "--store", &store]);
    let nodes = [(); 3].map(|()| Server::start_in(directory.path(), &["--store", &store]));
    let token = nodes[0].token();
    // Another application shares the server connections; its prepared statements have the names that our driver would use.
    sql(&store, "PREPARE s0 AS SELECT 1; PREPARE s1 AS SELECT 2");
    let statuses: Vec<u16> = thread::scope(|scope| {
        let adds: Vec<_> = (0..12)
            .map(|client| {
                let (token, address) = (&token, nodes[client % nodes.len()].address());
                scope.spawn(move || {
                    let add = |number: usize| {
                        // Two clients send each plant.
                        let id = client / 2 * 1000 + number;
                        let body = format!(r#"{{"id":{id},"name":"Fern {id}"}}"#);
                        Client::connect(address).add(token, body.as_bytes()).status
                    };
                    (0..100).map(add).collect::<Vec<_>>()
                })
            })
            .collect();
        let done = adds.into_iter();
        done.flat_map(|add| add.join().expect("no panic")).collect()
    });
    assert_eq!(statuses.len(), 1200);
    assert!(statuses.iter().all(|status| *status == 200), "{statuses:?}");
    for node in &nodes {
        node.wait_until_ready();
    }
    assert_eq!(nodes[0].plants().len(), 600);
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn every_command_works_through_a_pooler_in_transaction_mode() {
    let directory = directory();
    let store = pooled(directory.path());
    std::fs::write(
        directory.path().join("plants.csv"),
        "id,name,tag\n1,Fern,\n2,Ivy,shade\n",
    )
    .expect("a file");
    for (command, expected) in [
        (&["token", "create", "a"][..], "plant_"),
        (&["token", "revoke", "a"], ""),
        (&["token", "list"], "import"),
        (&["list", "--tag", "shade", "--name", "Iv"], "Ivy"),
        (&["get", "1"], "Fern"),
        (&["stats"], "2"),
        (&["export"], r#"{"id":2,"name":"Ivy","tag":"shade"}"#),
        (&["check"], "no damage found: 2 plants, 2 tokens"),
    ] {
        run_ok(
            directory.path(),
            &["import", "--store", &store, "plants.csv"],
        );
        let output = run(directory.path(), &[command, &["--store", &store]].concat());
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{command:?}: {output:?}");
        assert!(printed.contains(expected), "{command:?}: {printed}");
    }
    let copied = run(
        directory.path(),
        &["copy", "--store", &store, "--to", "sqlite:copy.db"],
    );
    assert!(copied.status.success(), "{copied:?}");
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn a_setting_that_another_client_leaves_in_a_server_connection_is_rejected() {
    let directory = directory();
    let store = pooled(directory.path());
    let server = Server::start_in(directory.path(), &["--store", &store]);
    server.token();
    let set = |value: &str| {
        let set = format!("SET synchronous_commit = {value}");
        with_client(&store, async |one| {
            with_another_client(&store, async |two| {
                // Within a transaction each of the two has its own server connection.
                for sql in ["BEGIN", &set, "COMMIT"] {
                    one.batch_execute(sql).await.expect("SQL");
                    two.batch_execute(sql).await.expect("SQL");
                }
            })
            .await;
        });
    };
    set("off");
    wait_until("no add is acknowledged", || server.add(BODY).status == 503);
    says(&server, "synchronous_commit is off");
    set("on");
    wait_until("adds are acknowledged again", || {
        server.add(BODY).status == 200
    });
}
