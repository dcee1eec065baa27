//! The `token` commands while a server runs.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use plantstore::Token;
use serde_json::Value;

use crate::harness::{
    Server, added_within_a_minute, copy_tokens, directory, plantstore, run, run_ok, wait_until,
};

const BODY: &[u8] = br#"{"id":1,"name":"x"}"#;

fn listed(server: &Server, name: &str) -> Value {
    let list = run_ok(server.directory(), &["token", "list", "--json"]);
    let tokens = list
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    tokens
        .into_iter()
        .find(|token| token["name"] == name)
        .expect("a token of that name")
}

#[test]
fn create_prints_the_token_and_nothing_else_and_it_works_at_once() {
    let server = Server::start();
    let output = run(server.directory(), &["token", "create", "ci"]);
    assert!(output.status.success() && output.stderr.is_empty());
    let printed = String::from_utf8(output.stdout).expect("UTF-8");
    let token = printed.strip_suffix('\n').expect("a line");
    assert!(Token::parse(token).is_some(), "{token}");
    assert_eq!(server.connect().add(token, BODY).status, 200);
}

#[test]
fn a_command_that_creates_a_store_says_so() {
    let directory = directory();
    fs::write(directory.path().join("plants.csv"), "id,name\n1,Fern\n").expect("a file");
    for (file, arguments) in [
        ("a.db", &["token", "create", "ci"][..]),
        ("b.db", &["import", "plants.csv"]),
    ] {
        let store = format!("sqlite:{file}");
        let arguments = [arguments, &["--store", &store]].concat();
        let output = run(directory.path(), &arguments);
        assert!(output.status.success(), "{output:?}");
        let said = String::from_utf8(output.stderr).expect("UTF-8");
        assert_eq!(said, format!("created the store {store}\n"));
    }
}

#[test]
fn a_token_that_was_just_rejected_works_as_soon_as_it_is_created() {
    // Rejections must not be cached: the client may know the token before the store does.
    let directory = directory();
    let server = Server::start_in(directory.path(), &[]);
    let elsewhere = crate::harness::directory();
    let token = run_ok(elsewhere.path(), &["token", "create", "early"]);
    assert_eq!(server.connect().add(token.trim(), BODY).error(), 40101);
    copy_tokens(elsewhere.path(), directory.path());
    assert_eq!(server.connect().add(token.trim(), BODY).status, 200);
}

#[test]
fn a_token_created_before_the_first_run_works_and_replaces_the_first_token() {
    let directory = directory();
    let token = run_ok(directory.path(), &["token", "create", "mine"]);
    let server = Server::start_in(directory.path(), &[]);
    assert_eq!(server.connect().add(token.trim(), BODY).status, 200);
    assert!(!directory.path().join("plantstore.token").exists());
}

#[test]
fn a_revocation_is_effective_within_a_second_and_permanent() {
    let mut server = Server::start();
    let token = run_ok(server.directory(), &["token", "create", "ci"]);
    let add = || server.connect().add(token.trim(), BODY);
    assert_eq!(add().status, 200);
    run_ok(server.directory(), &["token", "revoke", "ci"]);
    let revoked = Instant::now();
    let mut sent = revoked;
    while add().status == 200 {
        assert!(sent - revoked < Duration::from_secs(1));
        thread::sleep(Duration::from_millis(10));
        sent = Instant::now();
    }
    assert_eq!(add().error(), 40101);
    let directory = server.directory().to_owned();
    server.kill();
    let server = Server::start_in(&directory, &[]);
    assert_eq!(server.connect().add(token.trim(), BODY).error(), 40101);
}

#[test]
fn a_name_is_taken_until_its_token_is_revoked() {
    let directory = directory();
    run_ok(directory.path(), &["token", "create", "ci"]);
    let output = run(directory.path(), &["token", "create", "ci"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stdout.is_empty());
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        error.contains("already") && error.contains("rotate ci"),
        "{error}"
    );
    let output = run(directory.path(), &["token", "revoke", "nobody"]);
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn the_plants_of_a_revoked_token_are_not_taken_for_those_of_the_next_one_of_its_name() {
    let server = Server::start();
    let directory = server.directory();
    for id in 1..=3 {
        let token = run_ok(directory, &["token", "create", "ci"]);
        let body = format!(r#"{{"id":{id},"name":"x"}}"#);
        let response = server.connect().add(token.trim(), body.as_bytes());
        assert_eq!(response.status, 200);
        if id < 3 {
            server.revoke("ci", token.trim());
        }
    }
    let added_by = |id: &str| {
        let plant = run_ok(directory, &["get", id, "--json"]);
        let plant: Value = serde_json::from_str(&plant).expect("JSON");
        plant["added_by"].as_str().expect("a name").to_owned()
    };
    let names = ["1", "2", "3"].map(added_by);
    assert!(names[0].starts_with("ci (revoked 20"), "{names:?}");
    assert!(names[1].starts_with("ci (revoked 20"), "{names:?}");
    assert_ne!(names[0], names[1]);
    assert_eq!(names[2], "ci");
    assert_eq!(listed(&server, "ci")["state"], "active");
    assert_eq!(listed(&server, &names[0])["state"], "revoked");
    run_ok(directory, &["check"]);
}

#[test]
fn both_secrets_of_a_rotated_token_are_valid_until_the_overlap_ends() {
    let mut server = Server::start();
    let directory = server.directory().to_owned();
    let old = run_ok(
        &directory,
        &["token", "create", "ci", "--rate-limit", "1000"],
    );
    let add = |server: &Server, token: &str, id: u32| {
        let body = format!(r#"{{"id":{id},"name":"x"}}"#);
        server.connect().add(token.trim(), body.as_bytes())
    };
    assert_eq!(add(&server, &old, 1).status, 200);
    let new = run_ok(&directory, &["token", "rotate", "ci"]);
    assert_ne!(old, new);
    assert_eq!(add(&server, &new, 2).status, 200);
    assert_eq!(add(&server, &old, 3).status, 200);
    assert_eq!(listed(&server, "ci")["state"], "active");
    let end = &listed(&server, "ci")["previous_secret"]["expires_at"];
    assert!(end.is_string(), "{end}");
    // It is one token, in the log and for its plants.
    let line = server.wait_for_line(|line| line["status"] == 200);
    assert_eq!(line["token_name"], "ci");
    let names = added_within_a_minute(&directory);
    assert_eq!(names, [1, 2, 3].map(|id| (id, "ci".to_owned())));

    // Another rotation would end a secret that may be in use.
    let output = run(&directory, &["token", "rotate", "ci"]);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success() && error.contains("--force"),
        "{error}"
    );
    assert!(output.stdout.is_empty());
    let last = run_ok(
        &directory,
        &["token", "rotate", "ci", "--force", "--overlap", "0"],
    );
    wait_until("the first secret ends", || {
        add(&server, &old, 1).status == 401
    });
    wait_until("the second secret ends", || {
        add(&server, &new, 1).status == 401
    });
    assert_eq!(add(&server, &old, 1).error(), 40101);
    assert_eq!(add(&server, &new, 1).error(), 40102);
    assert_eq!(add(&server, &last, 1).status, 200);
    server.kill();
    let server = Server::start_in(&directory, &[]);
    assert_eq!(add(&server, &new, 1).error(), 40102);
    assert_eq!(add(&server, &last, 1).status, 200);
    run_ok(&directory, &["check"]);
}

#[test]
fn a_rotated_token_is_valid_for_as_long_as_before_or_as_told() {
    let server = Server::start();
    let directory = server.directory();
    run_ok(directory, &["token", "create", "ci", "--expires-in", "90d"]);
    let days = |name: &str| {
        let time = |value: &Value| {
            let time = value.as_str().expect("a time");
            time.parse::<jiff::Timestamp>().expect("a time")
        };
        let token = listed(&server, name);
        let lifetime = time(&token["expires_at"]).duration_since(time(&token["rotated_at"]));
        lifetime.as_hours() / 24
    };
    run_ok(directory, &["token", "rotate", "ci", "--overlap", "0"]);
    assert_eq!(days("ci"), 90);
    let rotate = [
        "token",
        "rotate",
        "ci",
        "--overlap",
        "0s",
        "--expires-in",
        "7d",
    ];
    run_ok(directory, &rotate);
    assert_eq!(days("ci"), 7);
    for (name, problem) in [("nobody", "there is no token"), ("gone", "is revoked")] {
        if name == "gone" {
            run_ok(directory, &["token", "create", name]);
            run_ok(directory, &["token", "revoke", name]);
        }
        let output = run(directory, &["token", "rotate", name]);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            !output.status.success() && error.contains(problem),
            "{error}"
        );
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn the_history_says_what_was_done_when_and_by_whom() {
    let server = Server::start();
    server.token();
    let directory = server.directory();
    run_ok(directory, &["token", "create", "ci"]);
    run_ok(directory, &["token", "rotate", "ci"]);
    run_ok(directory, &["token", "revoke", "ci"]);
    run_ok(directory, &["token", "create", "ci"]);
    let history = run_ok(directory, &["token", "list", "--history", "--json"]);
    let history: Vec<Value> = history
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    let events: Vec<_> = history
        .iter()
        .filter_map(|entry| entry["event"].as_str())
        .collect();
    assert_eq!(
        events,
        [
            "created", "created", "rotated", "revoked", "renamed", "created"
        ]
    );
    let user = Command::new("id").arg("-un").output();
    let user = String::from_utf8(user.expect("id runs").stdout).expect("text");
    for entry in &history {
        let by = entry["user"].as_str().expect("a user");
        assert!(by == user.trim() || by.ends_with(" (sudo)"), "{entry}");
        assert!(
            entry["at"].is_string() && entry["name"].is_string(),
            "{entry}"
        );
    }
    let table = run_ok(directory, &["token", "list", "--history"]);
    assert!(table.starts_with("TIME "), "{table}");
    assert_eq!(table.lines().count(), 7, "{table}");
}

#[test]
fn an_invalid_name_or_duration_is_a_usage_error() {
    let directory = directory();
    let long = "x".repeat(65);
    for arguments in [
        &["token", "create", ""][..],
        &["token", "create", "two words"],
        &["token", "create", "new\nline"],
        &["token", "create", &long],
        &["token", "create", "x", "--expires-in", "soon"],
        &["token", "create", "x", "--expires-in", "0s"],
        &["token", "create", "x", "--rate-limit", "0"],
    ] {
        assert_eq!(
            run(directory.path(), arguments).status.code(),
            Some(2),
            "{arguments:?}"
        );
    }
    assert!(!directory.path().join("plantstore.db").exists());
}

#[test]
fn a_list_shows_the_state_of_every_token_and_when_it_was_last_used() {
    let server = Server::start();
    server.token();
    let directory = server.directory();
    run_ok(
        directory,
        &[
            "token",
            "create",
            "brief",
            "--expires-in",
            "1ms",
            "--rate-limit",
            "9",
        ],
    );
    run_ok(
        directory,
        &["token", "create", "later", "--expires-in", "90d"],
    );
    run_ok(directory, &["token", "create", "gone"]);
    run_ok(directory, &["token", "revoke", "gone"]);
    for (name, state) in [
        ("first", "active"),
        ("brief", "expired"),
        ("later", "active"),
        ("gone", "revoked"),
    ] {
        assert_eq!(listed(&server, name)["state"], state, "{name}");
        assert_eq!(listed(&server, name)["last_used_at"], Value::Null, "{name}");
    }
    assert_eq!(listed(&server, "brief")["rate_limit"], 9);
    let table = run_ok(directory, &["token", "list"]);
    assert_eq!(table.lines().count(), 5, "{table}");
    assert!(table.starts_with("NAME   STATE    CREATED "), "{table}");

    // Any request counts as a use, even one that adds nothing.
    assert_eq!(server.add("{}").error(), 40002);
    wait_until("the use is noted", || {
        listed(&server, "first")["last_used_at"].is_string()
    });
    let used_at = listed(&server, "first")["last_used_at"].to_string();
    assert!(used_at.ends_with(":00Z\""), "to the minute: {used_at}");
}

#[test]
fn a_plant_records_its_token_and_time() {
    let server = Server::start();
    let token = run_ok(server.directory(), &["token", "create", "ci"]);
    server.add_ok(r#"{"id":1,"name":"x"}"#);
    assert_eq!(
        server
            .connect()
            .add(token.trim(), br#"{"id":2,"name":"y"}"#)
            .status,
        200
    );
    // A replay does not change them.
    assert_eq!(server.connect().add(token.trim(), BODY).status, 200);
    let added = added_within_a_minute(server.directory());
    assert_eq!(added, [(1, "first".to_owned()), (2, "ci".to_owned())]);
}

#[test]
fn a_token_is_stored_only_as_a_hash() {
    let mut server = Server::start_with(&["--log-level", "debug"]);
    let token = run_ok(server.directory(), &["token", "create", "ci"]);
    let token = token.trim();
    assert_eq!(server.connect().add(token, BODY).status, 200);
    assert_eq!(server.connect().add(&token[..41], BODY).error(), 40101);
    let response = server.connect().request(
        &format!("GET /nothing?token={token}"),
        &format!("x-request-id: {token}!\r\n"),
    );
    assert_eq!(response.status, 404);
    server.wait_for_line(|line| line["status"] == 404);
    server.kill();
    let secret = &token[6..41];
    assert!(!server.everything_logged().contains(secret));
    for file in fs::read_dir(server.directory()).expect("a directory") {
        let path = file.expect("a file").path();
        let bytes = fs::read(&path).expect("a file");
        let found = bytes
            .windows(secret.len())
            .any(|window| window == secret.as_bytes());
        assert!(!found, "{}", path.display());
    }
}

/// Runs `token create` with this standard output, which must fail and create nothing.
fn creates_nothing(directory: &Path, what: &str, mut command: Command) {
    command.stderr(Stdio::piped());
    let child = command.spawn().expect("it starts");
    drop(command); // and with it the standard output
    let output = child.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{what}: {said}");
    assert!(said.contains("no token was created"), "{what}: {said}");
    assert!(!said.contains("plant_"), "{what}: {said}");
    let listed = run_ok(directory, &["token", "list", "--json"]);
    assert!(!listed.contains("ci"), "{what}: {listed}");
}

#[test]
fn a_token_that_cannot_be_printed_is_not_created_and_its_name_is_free() {
    let directory = directory();
    let place = directory.path();
    run_ok(place, &["token", "create", "other"]);
    let create = |stdout: Stdio| {
        let mut command = plantstore(place);
        command.args(["token", "create", "ci"]).stdout(stdout);
        command
    };
    let full = fs::OpenOptions::new().write(true).open("/dev/full");
    creates_nothing(
        place,
        "a full device",
        create(full.expect("/dev/full").into()),
    );
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    creates_nothing(place, "a closed pipe", create(writer.into()));
    let plain = plantstore(place);
    let mut closed = Command::new("sh");
    closed
        .args(["-c", r#""$0" token create ci >&-"#])
        .arg(plain.get_program())
        .current_dir(place);
    for (name, value) in plain.get_envs() {
        match value {
            Some(value) => closed.env(name, value),
            None => closed.env_remove(name),
        };
    }
    creates_nothing(place, "a closed standard output", closed);

    let token = run_ok(place, &["token", "create", "ci"]);
    let server = Server::start_in(place, &[]);
    assert_eq!(server.connect().add(token.trim(), BODY).status, 200);
}

#[test]
fn a_token_whose_creation_is_killed_after_printing_does_not_exist() {
    let directory = directory();
    let place = directory.path();
    let store = ["--store", "sqlite:plantstore.db"];
    run_ok(place, &[&["token", "create", "other"], &store[..]].concat());
    let kill = ["-e", "trace=write", "-e", "inject=write:signal=KILL:when=1"];
    let output = Command::new("strace")
        .args(["-f", "-qq", "-o", "strace.out"])
        .args(kill)
        .arg(plantstore(place).get_program())
        .args(["token", "create", "ci"])
        .args(store)
        .current_dir(place)
        .output()
        .expect("strace runs");
    assert!(!output.status.success(), "{output:?}");
    let trace = fs::read_to_string(place.join("strace.out")).expect("a trace");
    assert!(trace.contains(", \"plant_"), "{trace}");
    let listed = run_ok(place, &[&["token", "list", "--json"], &store[..]].concat());
    assert!(!listed.contains("ci"), "{listed}");
}

#[test]
fn a_token_is_rejected_as_a_name_and_not_printed() {
    let directory = directory();
    let secret = run_ok(directory.path(), &["token", "create", "ci"]);
    let secret = secret.trim();
    for command in ["create", "rotate", "revoke"] {
        let output = run(directory.path(), &["token", command, secret]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains("is a token itself"), "{said}");
        assert!(!said.contains(&secret[..20]), "{said}");
        assert!(output.stdout.is_empty());
    }
}
