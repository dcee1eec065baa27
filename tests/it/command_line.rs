//! Settings and exit codes: flag beats environment beats file, and what is wrong is told in a
//! sentence.

use std::fs;
use std::net::TcpListener;
use std::process::Output;

use crate::harness::{Server, directory, plantstore, run, run_ok};

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_flag_beats_the_environment_which_beats_the_file() {
    // The store is the setting whose value shows: each way has one of its own.
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

#[test]
fn serve_takes_its_settings_from_a_file() {
    let directory = directory();
    let settings = "max_body_bytes = 20\nheader_timeout = \"2s\"\nlog_level = \"info\"\n";
    fs::write(directory.path().join("a.toml"), settings).expect("a file");
    let server = Server::start_in(directory.path(), &["--config", "a.toml"]);
    assert_eq!(server.add(r#"{"id":1,"name":"too long"}"#).error(), 40013);
}

#[test]
fn what_is_wrong_with_a_file_is_wrong_usage_and_names_the_file() {
    let directory = directory();
    for (content, expected) in [
        (
            "listne = \"127.0.0.1:1\"",
            "there is no setting `listne`; the settings are listen, store",
        ),
        ("config = \"b.toml\"", "there is no setting `config`"),
        (
            "listen = \"nonsense\"",
            "invalid value 'nonsense' for '--listen",
        ),
        ("max_queue = 0", "0 is not in 1..=1048576"),
        (
            "listen = true",
            "`listen` must be a string or a whole number",
        ),
        ("a = [1", "(line 1)"),
        ("listen = \"a\"\nlisten = \"b\"", "duplicate key (line 2)"),
    ] {
        fs::write(directory.path().join("a.toml"), content).expect("a file");
        let output = run(directory.path(), &["serve", "--config", "a.toml"]);
        assert_eq!(output.status.code(), Some(2), "{content}");
        let error = stderr(&output);
        assert!(
            error.contains("a.toml: ") && error.contains(expected),
            "{content}: {error}"
        );
    }
    let output = run(directory.path(), &["serve", "--config", "missing.toml"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("missing.toml: No such file"));
    assert!(!directory.path().join("plantstore.db").exists());
}

#[test]
fn wrong_usage_ends_with_2_and_help_with_0() {
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
    assert!(run_ok(directory.path(), &["--help"]).contains("serve"));
    assert!(run_ok(directory.path(), &["--version"]).starts_with("plantstore 0."));
    assert_eq!(
        fs::read_dir(directory.path()).expect("a directory").count(),
        0
    );
}

#[test]
fn a_port_that_is_taken_is_told_in_a_sentence_and_nothing_is_made() {
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
fn the_listeners_have_an_address_each_and_the_private_one_can_be_off() {
    let free = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = free.local_addr().expect("an address").to_string();
    drop(free);
    let directory = directory();
    let output = run(
        directory.path(),
        &["serve", "--listen", &address, "--ops-listen", &address],
    );
    assert_eq!(output.status.code(), Some(1));
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
fn the_help_does_not_show_what_is_in_a_variable() {
    let directory = directory();
    let mut command = plantstore(directory.path());
    command.env("PLANTSTORE_STORE", "postgres://u:secret@h/d");
    let output = command.args(["serve", "--help"]).output();
    let help = String::from_utf8(output.expect("it runs").stdout).expect("UTF-8");
    assert!(help.contains("PLANTSTORE_STORE"), "{help}");
    assert!(!help.contains("secret"), "{help}");
}

#[test]
fn an_address_that_cannot_be_understood_is_not_repeated_with_its_password() {
    let directory = directory();
    let bad = "postgres://u:secret@h:port/d";
    fs::write(
        directory.path().join("bad.toml"),
        format!("store = \"{bad}\""),
    )
    .expect("a file");
    for arguments in [
        ["serve", "--store", bad],
        ["copy", "--to", bad],
        ["serve", "--config", "bad.toml"],
    ] {
        let output = run(directory.path(), &arguments);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        let said = String::from_utf8(output.stderr).expect("UTF-8");
        assert!(said.contains("<URL>"), "{said}");
        assert!(!said.contains("secret"), "{said}");
    }
}

#[test]
fn the_readme_lists_every_setting_with_its_variable_and_default() {
    let directory = directory();
    let readme = include_str!("../../README.md");
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
        assert!(readme.contains(&row), "README.md has no row {row}");
        settings += 1;
    }
    assert!(settings >= 11, "{help}");
    assert_eq!(readme.matches("| `--").count(), settings);
}
