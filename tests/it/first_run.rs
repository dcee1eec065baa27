//! The first start: a token file, and a curl command that works when pasted.

use std::fs;
use std::process::Command;

use crate::harness::{Server, directory, run, run_ok, wait_until};

fn pasted(server: &Server) -> String {
    let logged = server.everything_logged();
    let line = logged
        .lines()
        .find(|line| line.starts_with("curl "))
        .expect("a curl line")
        .to_owned();
    let output = Command::new("bash")
        .args(["-c", &line])
        .current_dir("/")
        .output();
    String::from_utf8(output.expect("bash and curl run").stdout).expect("UTF-8")
}

#[test]
fn the_curl_line_works_when_pasted_from_any_directory_and_the_token_is_in_no_log() {
    let server = Server::start();
    wait_until("the greeting", || {
        server.everything_logged().contains("curl ")
    });
    for _ in 0..2 {
        assert_eq!(pasted(&server), r#"{"name":"Monstera","tag":"indoor"}"#);
    }
    assert_eq!(server.plants().len(), 1);
    assert!(!server.everything_logged().contains(&server.token()));
}

#[test]
fn the_curl_line_works_in_a_directory_with_spaces_and_quotes() {
    let directory = directory();
    let odd = directory.path().join("it's a \"garden\" $HOME");
    fs::create_dir(&odd).expect("a directory");
    let server = Server::start_in(&odd, &[]);
    wait_until("the greeting", || {
        server.everything_logged().contains("curl ")
    });
    assert_eq!(pasted(&server), r#"{"name":"Monstera","tag":"indoor"}"#);
}

#[test]
fn there_is_one_first_token_and_one_greeting() {
    let directory = directory();
    let token = || fs::read_to_string(directory.path().join("plantstore.token")).expect("a token");
    Server::start_in(directory.path(), &[]).kill();
    let first = token();
    let server = Server::start_in(directory.path(), &[]);
    server.add_ok(r#"{"id":1,"name":"x"}"#);
    assert_eq!(token(), first);
    assert!(!server.everything_logged().contains("curl "));
}

#[test]
fn a_store_without_a_token_that_gives_access_says_how_to_create_one() {
    let directory = directory();
    let place = directory.path();
    let says_so = |server: &Server| {
        server
            .everything_logged()
            .contains("`plantstore token create NAME`")
    };
    fs::write(place.join("a.ndjson"), r#"{"id":1,"name":"x"}"#).expect("a file");
    run_ok(place, &["import", "a.ndjson"]);
    let server = Server::start_in(place, &[]);
    wait_until("it says so", || says_so(&server));
    drop(server);
    run_ok(place, &["token", "create", "a"]);
    let server = Server::start_in(place, &[]);
    assert_eq!(server.connect().add("plant_unknown", b"{}").status, 401); // the tokens are read
    assert!(!says_so(&server), "{}", server.everything_logged());
}

#[test]
fn an_existing_token_file_is_used_and_never_overwritten() {
    let directory = directory();
    Server::start_in(directory.path(), &[]).kill();
    let path = directory.path().join("plantstore.token");
    let first = fs::read(&path).expect("a token");
    // As after a crash between writing the file and storing the token, or for a second store.
    let server = Server::start_in(directory.path(), &["--store", "sqlite:second.db"]);
    assert_eq!(fs::read(&path).expect("a token"), first);
    server.add_ok(r#"{"id":1,"name":"x"}"#);

    fs::write(&path, "something else").expect("a file");
    let output = run(
        directory.path(),
        &[
            "serve",
            "--listen",
            "127.0.0.1:0",
            "--store",
            "sqlite:third.db",
        ],
    );
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(error.contains("contains no token; move it away"), "{error}");
    assert_eq!(fs::read(&path).expect("a file"), b"something else");
}
