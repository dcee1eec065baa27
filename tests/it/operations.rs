//! The commands of docs/operations.md, run as they stand there.

use std::net::TcpListener;
use std::path::Path;

use crate::harness::{directory, run_ok};
use crate::postgres::{address, sql, url};

const OPERATIONS: &str = include_str!("../../docs/operations.md");

/// The fenced blocks of a chapter: language and text.
fn blocks_of(chapter: &str) -> Vec<(&'static str, &'static str)> {
    let chapter = OPERATIONS
        .split("\n## ")
        .find(|text| text.starts_with(chapter));
    let fenced = chapter
        .expect("the chapter")
        .split("```")
        .skip(1)
        .step_by(2);
    let block = |block: &'static str| block.split_once('\n').expect("a language");
    fenced.map(block).collect()
}

/// Runs a script with the binary in its path; gives what it prints.
fn shell(directory: &Path, script: &str, variables: &[(&str, &str)]) -> String {
    let binary = Path::new(env!("CARGO_BIN_EXE_plantstore"));
    let folder = binary.parent().expect("a folder").display();
    let path = std::env::var("PATH").expect("a path");
    let output = std::process::Command::new("timeout")
        .args(["60", "bash", "-euc", script])
        .env("PATH", format!("{folder}:{path}"))
        .env_remove("PLANTSTORE_STORE")
        .envs(variables.iter().copied())
        .current_dir(directory)
        .output()
        .expect("bash runs");
    assert!(output.status.success(), "{script}: {output:?}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn the_walk_through_of_three_nodes_and_of_moving_house_works_as_written() {
    let place = directory();
    let store = url(place.path());
    let server = address(&store).to_string();
    sql(&store, "CREATE ROLE owner SUPERUSER LOGIN");
    sql(&store, "CREATE DATABASE plants");

    let blocks = blocks_of("Three nodes");
    let mut script = "trap 'kill $(jobs -p); wait' EXIT\n".to_owned();
    for (_, text) in blocks.iter().filter(|(language, _)| *language == "sh") {
        script += text;
    }
    for port in ["8081", "8082", "8083"] {
        let free = TcpListener::bind("127.0.0.1:0").expect("a port");
        let free = free.local_addr().expect("an address").port();
        script = script.replace(port, &free.to_string());
    }
    let printed = shell(place.path(), &script, &[("DATABASE", &server)]);
    let (_, expected) = blocks
        .iter()
        .find(|(language, _)| *language == "json")
        .expect("answers");
    assert!(printed.ends_with(expected), "{printed}");

    let house = directory();
    let to = url(house.path());
    run_ok(
        house.path(),
        &["token", "create", "a", "--store", "sqlite:plantstore.db"],
    );
    let (_, moving) = blocks_of("Moving house")[0];
    shell(house.path(), moving, &[("PLANTSTORE_STORE", &to)]);
    assert_eq!(
        run_ok(house.path(), &["check"]),
        "no damage: plants 0, tokens 1\n"
    );
}
