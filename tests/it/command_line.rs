//! Settings, exit codes and error messages of the command line.

use std::fs::{self, File};
use std::io;
use std::net::TcpListener;
use std::path::Path;
use std::process::Output;

use rusqlite::Connection;

use crate::harness::{Server, directory, output, plantstore, run, run_ok, wait_for_exit};

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_flag_overrides_the_environment_which_overrides_the_file() {
    // Each source of settings names another store.
    let directory = directory();
    for (name, store) in [
        ("flag", "flag.db"),
        ("environment", "environment.db"),
        ("file", "file.db"),
    ] {
        run_ok(
            directory.path(),
            &[
                "token",
                "create",
                name,
                "--store",
                &format!("sqlite:{store}"),
            ],
        );
    }
    run_ok(directory.path(), &["token", "create", "default"]);
    fs::write(
        directory.path().join("a.toml"),
        "store = \"sqlite:file.db\"\nmax_queue = 7\n",
    )
    .expect("a file");

    let listed = |flags: &[&str], variables: &[(&str, &str)]| {
        let mut command = plantstore(directory.path());
        command
            .args(["token", "list"])
            .args(flags)
            .envs(variables.iter().copied());
        let output = command.output().expect("it runs");
        assert!(output.status.success(), "{}", stderr(&output));
        let table = String::from_utf8(output.stdout).expect("UTF-8");
        table
            .lines()
            .nth(1)
            .expect("a row")
            .split(' ')
            .next()
            .expect("a name")
            .to_owned()
    };
    let flag = ["--store", "sqlite:flag.db"];
    let file = ["--config", "a.toml"];
    let variable = ("PLANTSTORE_STORE", "sqlite:environment.db");
    assert_eq!(listed(&[&flag[..], &file].concat(), &[variable]), "flag");
    assert_eq!(listed(&file, &[variable]), "environment");
    assert_eq!(listed(&file, &[]), "file");
    assert_eq!(listed(&[], &[("PLANTSTORE_CONFIG", "a.toml")]), "file");
    assert_eq!(listed(&[], &[]), "default");
}

/// Its flag has the name of the setting.
#[test]
fn the_rate_limit_of_the_server_is_not_that_of_a_new_token() {
    let directory = directory();
    let mut command = plantstore(directory.path());
    command
        .args(["token", "create", "a"])
        .env("PLANTSTORE_RATE_LIMIT", "9");
    assert!(output(&mut command).status.success());
    run_ok(
        directory.path(),
        &["token", "create", "b", "--rate-limit", "8"],
    );
    let listed = run_ok(directory.path(), &["token", "list", "--json"]);
    assert!(!listed.contains(r#""rate_limit":9"#), "{listed}");
    assert!(listed.contains(r#""rate_limit":8"#), "{listed}");
}

#[test]
fn serve_takes_its_settings_from_a_file() {
    let directory = directory();
    let settings = "max_body_bytes = 20\nheader_timeout = \"2s\"\nlog_level = \"info\"\n";
    fs::write(directory.path().join("a.toml"), settings).expect("a file");
    let server = Server::start_in(directory.path(), &["--config", "a.toml"]);
    assert_eq!(server.add(r#"{"id":1,"name":"too long"}"#).error(), 40013);
}

#[test]
fn an_invalid_config_file_is_a_usage_error_that_names_the_file() {
    let directory = directory();
    for (content, expected) in [
        (
            "listne = \"127.0.0.1:1\"",
            "there is no setting `listne`; the settings are listen, tls_cert",
        ),
        ("config = \"b.toml\"", "there is no setting `config`"),
        (
            "listen = \"nonsense\"",
            "invalid value 'nonsense' for '--listen",
        ),
        ("max_queue = 0", "0 is not in 1..=1048576"),
        (
            "listen = 1.5",
            "`listen` must be a string, a whole number, true, false, or a list of strings",
        ),
        ("a = [1", "(line 1)"),
        ("listen = 127.0.0.1:8080", "(line 1); text needs quotes"),
        (
            "max-queue = 7",
            "there is no setting `max-queue`; it is `max_queue` here",
        ),
        (
            "log_level = \"verbose\"",
            "for '--log-level <LEVEL>' [possible values: error, warn, info, debug",
        ),
        (
            "max_body_bytes = \"1MB\"",
            "invalid value '1MB' for '--max-body-bytes <N>': expected a whole number",
        ),
        (
            "proxy_protocol = true",
            "--proxy-protocol needs --trusted-proxy",
        ),
        ("listen = \"a\"\nlisten = \"b\"", "duplicate key (line 2)"),
    ] {
        fs::write(directory.path().join("a.toml"), content).expect("a file");
        let output = run(directory.path(), &["serve", "--config", "a.toml"]);
        assert_eq!(output.status.code(), Some(2), "{content}");
        let error = stderr(&output);
        assert!(error.contains(expected), "{content}: {error}");
        let is_contradiction = expected.contains(" needs ");
        let names_file = error.contains("in the configuration file a.toml: ");
        assert!(names_file || is_contradiction, "{content}: {error}");
        assert_eq!(error.lines().count(), 1, "{content}: {error}");
    }
    let output = run(directory.path(), &["serve", "--config", "/dev/zero"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("larger than"), "{output:?}");
    let output = run(directory.path(), &["serve", "--config", "missing.toml"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("missing.toml: No such file"));
    assert!(!directory.path().join("plantstore.db").exists());
}

#[test]
fn a_usage_error_exits_with_2_and_help_with_0() {
    let directory = directory();
    for arguments in [
        &[][..],
        &["grow"],
        &["serve", "--lsten", "127.0.0.1:1"],
        &["serve", "--listen", "localhost"],
        &["serve", "--store", "plantstore.db"],
        &["serve", "--store", "sqlite:"],
        &["serve", "--store", "mysql://x"],
        &["serve", "--ops-listen", "on"],
        &["serve", "--max-connections", "0"],
        &["serve", "--body-timeout", "10"],
        &["serve", "--log-level", "loud"],
        &["serve", "--log-level", ""],
        &["token"],
        &["token", "create"],
    ] {
        let output = run(directory.path(), arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(output.stdout.is_empty() && !output.stderr.is_empty());
    }
    let output = plantstore(directory.path())
        .arg("serve")
        .env("PLANTSTORE_LISTEN", "nonsense")
        .output()
        .expect("it runs");
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("(from PLANTSTORE_LISTEN)"));
    assert!(run_ok(directory.path(), &["--help"]).contains("serve"));
    let version = concat!("plantstore ", env!("CARGO_PKG_VERSION"));
    assert!(run_ok(directory.path(), &["--version"]).starts_with(version));
    assert_eq!(
        fs::read_dir(directory.path()).expect("a directory").count(),
        0
    );
}

/// The exit code of a command whose standard output has no reader, and whose standard error is this device.
fn exit_code_unread(directory: &Path, arguments: &[&str], stderr: &str) -> Option<i32> {
    let (_, unread) = io::pipe().expect("a pipe");
    let stderr = File::options().write(true).open(stderr).expect("a device");
    let mut command = plantstore(directory);
    command.args(arguments).stdout(unread).stderr(stderr);
    wait_for_exit(&mut command.spawn().expect("it runs")).code()
}

#[test]
fn the_exit_code_is_that_of_the_work_even_if_messages_cannot_be_written() {
    let directory = directory();
    let place = directory.path();
    let lines = "{\"id\":1,\"name\":\"x\"}\nwrong\n";
    fs::write(place.join("a.ndjson"), lines).expect("a file");
    for (device, rejects, backup) in [
        ("/dev/null", "a", "a.backup"),
        ("/dev/full", "b", "b.backup"),
    ] {
        let store = format!("sqlite:{rejects}.db");
        let exits = |code, arguments: &[&str]| {
            let found = exit_code_unread(place, arguments, device);
            assert_eq!(found, Some(code), "{arguments:?} 2>{device}");
        };
        exits(0, &["migrate", "--store", &store]);
        let import = ["import", "a.ndjson", "--store", &store];
        exits(1, &[&import[..], &["--rejects", rejects]].concat());
        assert!(place.join(rejects).exists());
        exits(1, &[&import[..], &["--strict"]].concat());
        run_ok(place, &["token", "create", "a", "--store", &store]);
        exits(0, &["token", "revoke", "a", "--store", &store]);
        exits(0, &["list", "--store", &store]);
        exits(0, &["export", &format!("{rejects}.csv"), "--store", &store]);
        exits(0, &["backup", backup, "--store", &store]);
        exits(0, &["check", backup]);
        let restored = format!("sqlite:{backup}.db");
        exits(0, &["restore", backup, "--store", &restored]);
        exits(0, &["copy", "--store", &store, "--to", &restored]);
        let damaged = Connection::open(place.join(format!("{rejects}.db"))).expect("a store");
        let damage = "UPDATE plants SET name = 'y'";
        damaged.execute(damage, ()).expect("an update");
        drop(damaged);
        exits(1, &["check", "--store", &store]);
        exits(1, &["backup", "c.backup", "--store", &store]);
        assert!(!place.join("c.backup").exists());
    }
    // As `export >&-` and `export 1</dev/null`, which the standard library takes for success.
    for stdout in ["/dev/null", "a.ndjson"] {
        let is_null = stdout == "/dev/null";
        let file = File::options()
            .read(true)
            .write(is_null)
            .open(place.join(stdout));
        let file = file.expect("a file");
        for arguments in [&["export"][..], &["token", "create", "c"]] {
            let mut command = plantstore(place);
            command
                .args(arguments)
                .args(["--store", "sqlite:a.backup.db"]);
            let ended = command.stdout(file.try_clone().expect("a copy")).status();
            assert_eq!(ended.expect("it runs").code(), Some(1), "{arguments:?}");
        }
    }
}

#[test]
fn a_port_in_use_is_an_error_and_creates_nothing() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    let directory = directory();
    let public = ["--listen", &address];
    let private = ["--ops-listen", &address, "--listen", "127.0.0.1:0"];
    for arguments in [&public[..], &private] {
        let flag = arguments[0];
        let output = run(directory.path(), &[&["serve"], arguments].concat());
        assert_eq!(output.status.code(), Some(1));
        let expected = format!(
            "plantstore: cannot listen on {address}; free that port or choose another {flag}: "
        );
        assert!(
            stderr(&output).starts_with(&expected),
            "{}",
            stderr(&output)
        );
        assert_eq!(stderr(&output).lines().count(), 1);
        assert_eq!(
            fs::read_dir(directory.path()).expect("a directory").count(),
            0
        );
    }
}

#[test]
fn an_address_of_another_machine_is_an_error_that_says_so() {
    let directory = directory();
    let output = run(directory.path(), &["serve", "--listen", "192.0.2.1:8080"]);
    assert_eq!(output.status.code(), Some(1));
    let error = stderr(&output);
    let expected = "this machine does not have that address; choose another --listen";
    assert!(error.contains(expected), "{error}");
}

#[test]
fn the_listeners_have_an_address_each_and_the_private_one_can_be_off() {
    let free = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = free.local_addr().expect("an address").to_string();
    drop(free);
    let directory = directory();
    let output = run(
        directory.path(),
        &["serve", "--listen", &address, "--ops-listen", &address],
    );
    assert_eq!(output.status.code(), Some(2));
    let sentence = stderr(&output);
    assert!(
        sentence.contains("choose another --ops-listen"),
        "{sentence}"
    );
    assert_eq!(
        fs::read_dir(directory.path()).expect("a directory").count(),
        0
    );

    let server = Server::start_with(&["--ops-listen", "off"]);
    server.add_ok(r#"{"id":1,"name":"x"}"#);
    assert!(!server.everything_logged().contains("ops_address"));
}

#[test]
fn migrate_reports_whether_it_created_or_upgraded_the_schema() {
    let directory = directory();
    let migrate = || {
        let output = run(directory.path(), &["migrate", "--store", "sqlite:a.db"]);
        assert!(output.status.success(), "{output:?}");
        stderr(&output)
    };
    assert_eq!(migrate(), "sqlite:a.db was created\n");
    assert_eq!(migrate(), "sqlite:a.db is up to date\n");
    let store = Connection::open(directory.path().join("a.db")).expect("a store");
    // As version 3, which had no tables `store` and `token_events`, and an index instead of the table `batches`.
    let earlier = "ALTER TABLE tokens DROP COLUMN rotated_at; ALTER TABLE tokens DROP COLUMN previous_digest;
                   ALTER TABLE tokens DROP COLUMN previous_expires_at; DROP TABLE token_events; DROP TABLE store; DROP TABLE batches; DROP INDEX plants_without_batch;
                   CREATE INDEX plants_by_batch ON plants (batch, added_at);
                   PRAGMA user_version = 3";
    store.execute_batch(earlier).expect("SQL");
    drop(store);
    assert_eq!(migrate(), "sqlite:a.db was upgraded from version 3\n");
    assert_eq!(migrate(), "sqlite:a.db is up to date\n");
}

#[test]
fn listeners_accept_localhost_and_addresses_without_a_host() {
    let server = Server::start_with(&["--ops-listen", "localhost:0"]);
    assert!(server.everything_logged().contains("127.0.0.1:"));
    let directory = directory();
    let output = run(
        directory.path(),
        &["serve", "--listen", "8080", "--ops-listen", "off"],
    );
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("such as 127.0.0.1:8080, localhost:8080 or :8080"));
}

#[test]
fn the_help_does_not_show_values_of_variables() {
    let directory = directory();
    let mut command = plantstore(directory.path());
    command.env("PLANTSTORE_STORE", "postgres://u:secret@h/d");
    let output = command.args(["serve", "--help"]).output();
    let help = String::from_utf8(output.expect("it runs").stdout).expect("UTF-8");
    assert!(help.contains("PLANTSTORE_STORE"), "{help}");
    assert!(!help.contains("secret"), "{help}");
}

/// Runs a command that must fail without printing the secret.
fn keeps_secret(directory: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> String {
    let mut command = plantstore(directory);
    command.args(arguments).envs(variables.iter().copied());
    let output = command.output().expect("it runs");
    let said = [&output.stdout[..], &output.stderr].concat();
    let said = String::from_utf8(said).expect("UTF-8");
    assert!(
        matches!(output.status.code(), Some(1 | 2)),
        "{arguments:?}: {said}"
    );
    for secret in ["secret", "s3cr", "cr3t"] {
        assert!(
            !said.contains(secret),
            "{arguments:?} {variables:?}: {said}"
        );
    }
    said
}

const URLS_WITH_SECRETS: [&str; 24] = [
    "postgres://u:secret@127.0.0.1:1/d",
    "postgresql://u:secret@127.0.0.1:1,127.0.0.1:2/d?sslmode=disable",
    "postgres://u:secret@h:port/d",
    "postgres://:secret@127.0.0.1:1/d",
    "postgres://u:s3cr%40cr3t@127.0.0.1:1/d",
    "postgres://u:s3cr@cr3t@127.0.0.1:1/d",
    "postgres://u:s3cr/cr3t@127.0.0.1:1/d",
    "postgres://u:s3cr:cr3t@127.0.0.1:1/d",
    "postgres://u:s3cr?cr3t@127.0.0.1:1/d",
    "postgres://u:s3cr?cr3t=1@127.0.0.1:1/d",
    "postgres://u:s3cr#cr3t@127.0.0.1:1/d",
    "postgres://u:s3cr cr3t@127.0.0.1:1/d",
    "postgres://u:s3cr'cr3t\"secret@127.0.0.1:1/d",
    "postgres://u:secret",
    "postgres://u:secret/d",
    "postgres://u@127.0.0.1:1/d?password=secret",
    "postgres://u@127.0.0.1:1/d?sslmode=nope&password=secret&x=1",
    "postgres://127.0.0.1:1/d?user=u&PASSWORD=secret",
    "postgres:u:secret@127.0.0.1/d",
    "u:secret@127.0.0.1/d",
    "mysql://u:secret@h/d",
    "host=127.0.0.1 port=1 user=u password=secret dbname=d",
    "host=127.0.0.1 password = 's3cr cr3t' dbname=d",
    "password='s3cr \\' cr3t'",
];

#[test]
fn no_error_repeats_a_password() {
    let directory = directory();
    let place = directory.path();
    for url in URLS_WITH_SECRETS {
        let with = |flag: &str| format!("{flag}={url}");
        for arguments in [
            &["serve", url][..],
            &["serve", "--listen", url],
            &["serve", &with("--listen")],
            &["serve", "--ops-listen", url],
            &["serve", "--log-level", url],
            &["serve", &with("--storee")],
            &["serve", "--storee", url],
            &["token", "list", &with("--store")],
            &["token", "create", url],
            &["token", "revoke", url, "--store", "sqlite:missing.db"],
            &[url],
            &["import", url],
            &["import", "-", "--token", url],
            &["export", url, "--store", "sqlite:missing.db"],
            &["backup", url, "--store", "sqlite:missing.db"],
            &["restore", url, "--store", "sqlite:missing.db"],
            &["check", url],
            &["copy", "--to", url],
            &["copy", url],
            &["get", url],
            &["list", "--since", url],
            &["completions", url],
            &["--config", url, "serve"],
        ] {
            keeps_secret(place, arguments, &[]);
        }
        for variable in [
            "PLANTSTORE_STORE",
            "PLANTSTORE_LISTEN",
            "PLANTSTORE_LOG_LEVEL",
            "PLANTSTORE_CONFIG",
        ] {
            let serve = ["serve", "--max-connections", "0"];
            keeps_secret(place, &serve, &[(variable, url)]);
            if variable != "PLANTSTORE_STORE" {
                keeps_secret(place, &["serve"], &[(variable, url)]);
            }
        }
        for setting in ["listen", "log_level", "max_queue", "unknown"] {
            let line = format!("{setting} = {url:?}\n");
            fs::write(place.join("a.toml"), line).expect("a file");
            keeps_secret(place, &["serve", "--config", "a.toml"], &[]);
        }
    }
    fs::write(place.join("a.toml"), "store = \"postgres://u:secret@h:p/d").expect("a file");
    keeps_secret(place, &["serve", "--config", "a.toml"], &[]);
}

#[test]
fn an_error_repeats_values_that_are_not_secret() {
    let directory = directory();
    run_ok(directory.path(), &["token", "create", "ci"]);
    let url = "postgres://u:secret@127.0.0.1:1/d";
    for (arguments, expected) in [
        (&["serve", url][..], "'postgres://u:…@127.0.0.1:1/d'"),
        (&["serve", "--listen", url], "for '--listen <ADDRESS>'"),
        (&["import", url], "postgres://u:…@127.0.0.1:1/d"),
        (
            &["list", "--store", "plants.db"],
            "invalid value 'plants.db' for '--store <URL>'",
        ),
        (&["get", "abc"], "expected a whole number"),
        (&["get", "9223372036854775808"], "number too large"),
        (
            &["serve", "http://127.0.0.1:80/a:b"],
            "'http://127.0.0.1:80/a:b'",
        ),
        (&["serve", "http://[::1]:80/a"], "'http://[::1]:80/a'"),
        (
            &["serve", "--listen", "example.org:80"],
            "expected an address such as 127.0.0.1:8080, localhost:8080 or :8080",
        ),
        (&["serve", "someone@example.org"], "'someone@example.org'"),
        (&["import", "a@b:c.csv"], "a@b:c.csv"),
        (
            &["token", "list", "--store", "sqlite:a@b/c:d@e.db"],
            "no store at a@b/c:d@e.db;",
        ),
        (&["token", "revoke", "plant_watering"], "plant_watering"),
    ] {
        let said = keeps_secret(directory.path(), arguments, &[]);
        assert!(said.contains(expected), "{arguments:?}: {said}");
    }
}

#[test]
fn no_error_repeats_a_token() {
    let directory = directory();
    let place = directory.path();
    let token = run_ok(place, &["token", "create", "ci"]);
    let token = token.trim();
    let (cut, longer) = (&token[..30], format!("{token}x"));
    for token in [token, cut, &longer] {
        let with = |flag: &str| format!("{flag}={token}");
        for arguments in [
            &["token", "revoke", token][..],
            &["token", "create", token, "--expires-in", "soon"],
            &["token", "create", "--expires-in", token, "x"],
            &["token", "list", token],
            &["token", "list", &with("--store")],
            &["token", token],
            &["serve", token],
            &["serve", "--listen", token],
            &["serve", &with("--token")],
            &["import", token],
            &["import", "missing.csv", "--token", token],
            &["get", token],
            &["check", token],
            &[token],
        ] {
            let output = run(place, arguments);
            let said = stderr(&output);
            assert!(!output.status.success(), "{arguments:?}");
            assert!(!said.contains(&token[6..26]), "{arguments:?}: {said}");
        }
    }
}

#[test]
fn the_configuration_page_lists_every_setting_with_its_variable_and_default() {
    let directory = directory();
    let page = include_str!("../../docs/configuration.md");
    let help = run_ok(directory.path(), &["serve", "--help"]);
    let words = help.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut settings = 0;
    for part in words.split(" --").skip(1) {
        let Some((_, variable)) = part.split_once("[env: ") else {
            continue;
        };
        let variable = variable.split(']').next().expect("a name");
        let flag = part.split(' ').next().expect("a flag");
        let default = part
            .split_once("[default: ")
            .map(|(_, rest)| rest.split(']').next().expect("an end"));
        let default = default.map_or("none".to_owned(), |default| format!("`{default}`"));
        let row = format!("| `--{flag}` | `{variable}` | {default} |");
        assert!(
            page.contains(&row),
            "docs/configuration.md has no row {row}"
        );
        settings += 1;
    }
    assert!(settings >= 11, "{help}");
    assert_eq!(page.matches("| `--").count(), settings);
}
