//! Server settings under which a commit is not durable, and the clock of the server.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use crate::harness::postgres::with_client;
use crate::harness::{
    Server, added_within_a_minute, directory, plantstore, run, run_ok, wait_for_exit, wait_until,
};
use crate::postgres::own_server::OwnServer;
use crate::postgres::{BODY, END_CONNECTIONS, SERVE, refusal, says, sql, url};

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn with_synchronous_standbys_a_commit_has_to_wait_for_the_flush_of_a_standby() {
    let directory = directory();
    let postgres = OwnServer::start();
    run_ok(directory.path(), &["migrate", "--store", &postgres.url]);
    let with_level = |level: &str| {
        let url = &postgres.url;
        format!("{url}?options=-c%20synchronous_commit%3D{level}")
    };
    let list = |level: &str| {
        run(
            directory.path(),
            &["token", "list", "--store", &with_level(level)],
        )
    };
    for level in ["remote_write", "local", "on", "remote_apply"] {
        assert!(list(level).status.success(), "{level} without a standby");
    }
    postgres.set("synchronous_standby_names", "*");
    for level in ["remote_write", "local", "off"] {
        let store = with_level(level);
        for command in [&SERVE[..], &["token", "list"]] {
            let sentence = refusal(directory.path(), &[command, &["--store", &store]].concat());
            assert!(
                sentence.contains(&format!("synchronous_commit is {level}")),
                "{sentence}"
            );
        }
    }
    for level in ["on", "remote_apply"] {
        assert!(list(level).status.success(), "{level} with a standby");
    }
    let url = &postgres.url;
    let store = format!("{url}?options=-c%20client_min_messages%3Derror");
    let sentence = refusal(directory.path(), &["token", "list", "--store", &store]);
    assert!(
        sentence.contains("client_min_messages is error"),
        "{sentence}"
    );
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn settings_are_checked_for_every_new_connection() {
    let directory = directory();
    let url = url(directory.path());
    let server = Server::start_in(directory.path(), &[]);
    server.add_ok(BODY);
    let database = url.rsplit('/').next().expect("a name");
    let setting = format!("ALTER DATABASE \"{database}\" SET synchronous_commit");
    sql(&url, &format!("{setting} = off"));
    // Open connections keep their settings.
    server.add_ok(BODY);
    sql(&url, END_CONNECTIONS);
    wait_until("no add is acknowledged", || server.add(BODY).status == 503);
    sql(&url, &format!("{setting} = on"));
    wait_until("adds are acknowledged again", || {
        server.add(BODY).status == 200
    });
    says(&server, "synchronous_commit is off");
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn a_setting_that_is_changed_under_open_connections_stops_acknowledgements_until_it_is_changed_back()
 {
    let directory = directory();
    let postgres = OwnServer::start();
    let server = Server::start_in(directory.path(), &["--store", &postgres.url]);
    let token = run_ok(
        directory.path(),
        &["token", "create", "a", "--store", &postgres.url],
    );
    let add = || server.connect().add(token.trim(), BODY).status;
    assert_eq!(add(), 200);
    for setting in ["fsync", "full_page_writes", "synchronous_commit"] {
        postgres.set(setting, "off");
        wait_until("no add is acknowledged", || add() == 503);
        wait_until("it is not ready", || server.ask("/readyz").status == 503);
        says(&server, &format!("{setting} is off"));
        postgres.set(setting, "on");
        wait_until("adds are acknowledged again", || add() == 200);
        server.wait_until_ready();
    }
}

/// For each transaction that adds plants: the settings that it has, and those of the session.
const RECORD: &str = "
    CREATE TABLE commits (name TEXT, setting TEXT, otherwise TEXT);
    CREATE FUNCTION record() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO public.commits SELECT name, setting, reset_val FROM pg_settings
        WHERE name IN ('synchronous_commit', 'client_min_messages');
        RETURN NULL;
    END $$;
    CREATE CONSTRAINT TRIGGER record AFTER INSERT ON plantstore.plants DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION record()";

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn a_commit_of_plants_is_waited_for_and_reports_warnings_whatever_the_settings_become() {
    let directory = directory();
    let postgres = OwnServer::start();
    let server = Server::start_in(directory.path(), &["--store", &postgres.url]);
    let token = run_ok(
        directory.path(),
        &["token", "create", "a", "--store", &postgres.url],
    );
    sql(&postgres.url, RECORD);
    let mut ids = 0..;
    let mut add = || {
        let body = format!(r#"{{"id":{},"name":"x"}}"#, ids.next().expect("an id"));
        server.connect().add(token.trim(), body.as_bytes()).status
    };
    let count = |condition: &str| {
        with_client(&postgres.url, async |client| {
            let query = format!("SELECT count(*) FROM commits WHERE {condition}");
            let row = client.query_one(&query, &[]).await;
            row.expect("a count").get::<_, i64>(0)
        })
    };
    let settings = [
        ("synchronous_commit", "off", "on"),
        ("client_min_messages", "error", "notice"),
    ];
    for (name, bad, good) in settings {
        wait_until("an add is committed under the changed setting", || {
            wait_until("an add is acknowledged", || add() == 200);
            sql(&postgres.url, &format!("ALTER SYSTEM SET {name} = {bad}"));
            sql(&postgres.url, "SELECT pg_reload_conf()");
            for _ in 0..20 {
                add();
            }
            postgres.set(name, good);
            count(&format!("name = '{name}' AND otherwise = '{bad}'")) > 0
        });
        assert_eq!(count(&format!("setting = '{bad}'")), 0);
    }
}

/// Debian installs it in a directory named after the architecture.
fn libfaketime() -> PathBuf {
    let places = fs::read_dir("/usr/lib").expect("/usr/lib");
    places
        .map(|place| place.expect("an entry").path())
        .map(|place| place.join("faketime/libfaketimeMT.so.1"))
        .find(|library| library.exists())
        .expect("scripts/with-postgres installs libfaketime")
}

fn start_with_clock(directory: &Path, offset: &str) -> Server {
    let mut command = plantstore(directory);
    command
        .args(SERVE)
        .env("LD_PRELOAD", libfaketime())
        .env("FAKETIME", offset)
        .env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
    Server::start_command(command, directory)
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn timestamps_come_from_the_database_and_a_node_with_another_clock_logs_it_once() {
    let directory = directory();
    let nodes = ["+3600s", "-50y"].map(|offset| start_with_clock(directory.path(), offset));
    let right = Server::start_in(directory.path(), &[]);
    let all = [&nodes[0], &nodes[1], &right];
    for (id, node) in (0..12).zip(all.into_iter().cycle()) {
        node.add_ok(format!(r#"{{"id":{id},"name":"x"}}"#));
    }
    assert_eq!(added_within_a_minute(directory.path()).len(), 12);
    let listed = run_ok(directory.path(), &["list", "--json"]);
    let listed = listed.lines().map(|line| {
        let plant: serde_json::Value = serde_json::from_str(line).expect("JSON");
        plant["id"].as_i64().expect("an id")
    });
    assert_eq!(
        listed.collect::<Vec<_>>(),
        (0..12).rev().collect::<Vec<_>>()
    );
    let warnings = |node: &Server| {
        let logged = node.everything_logged();
        logged.matches("the clock of this machine is").count()
    };
    assert_eq!(nodes.each_ref().map(warnings), [1, 1]);
    assert_eq!(warnings(&right), 0);
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn a_copy_waits_for_the_standby_also_after_its_wait_was_cancelled() {
    let directory = directory();
    let path = directory.path();
    let server = OwnServer::start();
    let source = ["--store", "sqlite:source.db"];
    let import = |id: usize| {
        let row = format!(r#"{{"id":{id},"name":"x"}}"#);
        fs::write(path.join("row.ndjson"), row).expect("a file");
        run_ok(path, &[&["import", "row.ndjson"], &source[..]].concat());
    };
    let copy = [&["copy", "--to", &server.url], &source[..]].concat();
    import(1);
    run_ok(path, &copy);
    import(2);
    server.set("synchronous_standby_names", "absent");
    let mut copying = plantstore(path).args(&copy).spawn().expect("it starts");
    let waiting = "FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND query";
    let count = |what: &str| {
        with_client(&server.url, async |client| {
            let row = client.query_one(&format!("SELECT count({what}"), &[]).await;
            row.expect("a count").get::<_, i64>(0)
        })
    };
    let mut has_ended = false;
    wait_until("it waits with another commit", || {
        has_ended = copying.try_wait().expect("a child").is_some();
        count(&format!(
            "pg_cancel_backend(pid)) {waiting} NOT LIKE '%plantstore.nodes%'"
        ));
        has_ended || count(&format!("*) {waiting} LIKE '%plantstore.nodes%'")) == 1
    });
    server.set("synchronous_standby_names", "");
    assert!(wait_for_exit(&mut copying).success());
    assert!(!has_ended, "it ended without the standby");
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn a_node_whose_commits_wait_for_a_standby_says_so() {
    let directory = directory();
    let postgres = OwnServer::start();
    let arguments = ["--store", &postgres.url, "--store-timeout", "5s"];
    let server = Server::start_in(directory.path(), &arguments);
    let token = run_ok(
        directory.path(),
        &["token", "create", "a", "--store", &postgres.url],
    );
    postgres.set("synchronous_standby_names", "absent");
    let response = server.connect().add(token.trim(), BODY);
    assert_eq!(response.error(), 50301, "{response:?}");
    let reason = "wait for a synchronous standby that does not confirm them";
    let outage = server.wait_for_line(|line| line["message"] == "the store does not accept writes");
    let cause = outage["cause"].as_str().expect("a cause");
    assert!(cause.ends_with(reason), "{outage}");
    wait_until("/readyz says so", || {
        let response = server.ask("/readyz");
        response.status == 503 && response.body.trim_end().ends_with(reason)
    });
    postgres.set("synchronous_standby_names", "");
    server.wait_until_ready();
    assert_eq!(server.connect().add(token.trim(), BODY).status, 200);
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn a_command_whose_commit_waits_for_a_standby_says_so_and_ends_when_it_is_complete() {
    let directory = directory();
    let server = OwnServer::start();
    let command = |arguments: &[&str]| {
        let mut command = plantstore(directory.path());
        command.args(arguments).args(["--store", &server.url]);
        command
    };
    assert!(command(&["migrate"]).status().expect("it runs").success());
    server.set("synchronous_standby_names", "absent");
    let messages = directory.path().join("messages");
    let create = command(&["token", "create", "a"])
        .stdout(Stdio::piped())
        .stderr(fs::File::create(&messages).expect("a file"))
        .spawn()
        .expect("it runs");
    wait_until("it says why it waits", || {
        let messages = fs::read_to_string(&messages).expect("a file");
        messages.starts_with("waiting for the database: commits at 127.0.0.1:")
    });
    server.set("synchronous_standby_names", "");
    let output = create.wait_with_output().expect("it ends");
    assert!(output.status.success(), "{output:?}");
    assert!(output.stdout.starts_with(b"plant_"), "{output:?}");
}
