//! The commands of docs/operations.md, run as they stand there.

use std::net::TcpListener;
use std::path::Path;

use crate::harness::{Server, directory, postgres, run_ok};
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

/// Runs the `sh` blocks of a chapter, one after the other, in the directory of a running service. The block after one
/// is what it prints, where `…` stands for anything; nothing is said of what it prints if that is `sh` again.
fn walk_through(chapter: &str) {
    let server = Server::start();
    server.token();
    let store = postgres::store(server.directory());
    let store = store.as_deref().map(|store| ("PLANTSTORE_STORE", store));
    let blocks = blocks_of(chapter);
    for (at, (_, script)) in blocks
        .iter()
        .enumerate()
        .filter(|(_, (language, _))| *language == "sh")
    {
        let here = script
            .replace("127.0.0.1:8080", &server.address().to_string())
            .replace("127.0.0.1:9090", &server.ops_address().to_string());
        let printed = shell(server.directory(), &here, store.as_slice());
        if let Some((language, expected)) = blocks.get(at + 1)
            && *language != "sh"
        {
            assert!(
                reads_as(&printed, expected),
                "{script}\nprinted\n{printed}\nnot\n{expected}"
            );
        }
    }
}

/// Whether a text is as expected, where `…` stands for anything.
fn reads_as(text: &str, expected: &str) -> bool {
    let mut parts = expected.trim_end().split('…');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = text.trim_end().strip_prefix(first) else {
        return false;
    };
    let mut parts = parts.peekable();
    while let Some(part) = parts.next() {
        // The last of them has to be the end.
        let at = match parts.peek() {
            Some(_) => rest.find(part),
            None => rest.ends_with(part).then(|| rest.len() - part.len()),
        };
        let Some(at) = at else {
            return false;
        };
        rest = &rest[at + part.len()..];
    }
    rest.is_empty()
}

#[test]
fn an_expected_text_may_leave_things_open() {
    assert!(reads_as("a b\n", "a b"));
    assert!(reads_as("a 17 b 18\n", "a … b …"));
    assert!(!reads_as("a 17 b 18 c\n", "a … b 18"));
    assert!(!reads_as("a 17\n", "b …"));
}

#[test]
fn moving_plants_in_and_out_works_as_written() {
    walk_through("Moving plants in and out");
}

#[test]
fn looking_works_as_written() {
    walk_through("Looking");
}

#[test]
fn the_walk_through_of_saving_works_as_written() {
    walk_through("Saving");
}

#[test]
fn the_walk_through_of_installing_works_as_written() {
    walk_through("Installing");
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
    for port in ["8081", "8082", "8083", "9091", "9092", "9093"] {
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

#[test]
fn the_chapter_on_watching_works_as_written() {
    walk_through("Watching");
}
