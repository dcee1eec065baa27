//! The contract of `POST /plants`: new plants, replays, conflicts, and the accepted forms of each member.

use std::sync::{Arc, Barrier};
use std::thread;

use serde_json::json;

use crate::harness::{Client, Server, directory};

#[test]
fn the_response_to_a_new_plant_has_no_id() {
    let server = Server::start();
    let response = server.add(r#"{"id":1,"name":"Monstera","tag":"indoor"}"#);
    assert_eq!(response.status, 200);
    assert_eq!(
        response.json(),
        json!({"name": "Monstera", "tag": "indoor"})
    );
    assert_eq!(response.body, r#"{"name":"Monstera","tag":"indoor"}"#);
    assert_eq!(
        server.plants(),
        [(1, "Monstera".to_owned(), Some("indoor".to_owned()))]
    );
}

#[test]
fn the_response_to_a_plant_without_a_tag_has_no_tag() {
    let server = Server::start();
    assert_eq!(
        server.add(r#"{"id":1,"name":"Fern"}"#).body,
        r#"{"name":"Fern"}"#
    );
    assert_eq!(server.plants(), [(1, "Fern".to_owned(), None)]);
}

#[test]
fn a_replay_gets_the_same_response_even_after_a_kill_and_is_stored_once() {
    let directory = directory();
    let mut server = Server::start_in(directory.path(), &[]);
    let first = server.add(r#"{"id":1,"name":"Fern","tag":"shade"}"#);
    assert_eq!(first.status, 200);
    for round in 0..3 {
        // The same plant in different bytes.
        let again = server.add(r#"{ "tag": "shade", "other": 1, "name": "\u0046ern", "id": 1.0 }"#);
        assert_eq!(
            (again.status, &again.body),
            (200, &first.body),
            "round {round}"
        );
        assert_eq!(server.plants().len(), 1);
        if round == 1 {
            assert!(server.terminate().success());
        } else {
            server.kill();
        }
        server = Server::start_in(directory.path(), &[]);
    }
    assert_eq!(
        server.plants(),
        [(1, "Fern".to_owned(), Some("shade".to_owned()))]
    );
}

#[test]
fn a_conflict_does_not_change_the_stored_plant() {
    let server = Server::start();
    server.add_ok(r#"{"id":1,"name":"Fern","tag":"shade"}"#);
    server.add_ok(r#"{"id":2,"name":"Fern"}"#);
    for other in [
        r#"{"id":1,"name":"fern","tag":"shade"}"#,
        r#"{"id":1,"name":"Fern","tag":"sun"}"#,
        r#"{"id":1,"name":"Fern"}"#,
        r#"{"id":1,"name":"Fern\u0000","tag":"shade"}"#,
        r#"{"id":2,"name":"Fern","tag":""}"#,
    ] {
        assert_eq!(server.add(other).error(), 40009, "{other}");
    }
    let (fern, shade) = ("Fern".to_owned(), Some("shade".to_owned()));
    assert_eq!(server.plants(), [(1, fern.clone(), shade), (2, fern, None)]);
}

#[test]
fn of_a_hundred_clients_racing_for_one_id_exactly_one_wins() {
    let server = Server::start();
    let token = server.token();
    for id in 0..5 {
        let start = Arc::new(Barrier::new(100));
        let clients: Vec<_> = (0..100)
            .map(|number| {
                let (start, token, address) = (Arc::clone(&start), token.clone(), server.address());
                thread::spawn(move || {
                    let mut client = Client::connect(address);
                    start.wait();
                    let body = format!(r#"{{"id":{id},"name":"client {number}"}}"#);
                    client.add(&token, body.as_bytes())
                })
            })
            .collect();
        let responses: Vec<_> = clients
            .into_iter()
            .map(|client| client.join().expect("a response"))
            .collect();
        let winners: Vec<_> = responses
            .iter()
            .filter(|response| response.status == 200)
            .collect();
        assert_eq!(winners.len(), 1);
        let losers = responses.iter().filter(|response| response.status != 200);
        assert!(losers.into_iter().all(|response| response.error() == 40009));
        let stored = server.plants().pop().expect("a plant");
        assert_eq!(winners[0].json()["name"], stored.1);
    }
    assert_eq!(server.plants().len(), 5);
}

#[test]
fn a_hundred_clients_sending_the_same_plant_all_succeed_and_it_is_stored_once() {
    let server = Server::start();
    let token = server.token();
    let clients: Vec<_> = (0..100)
        .map(|_| {
            let (token, address) = (token.clone(), server.address());
            thread::spawn(move || Client::connect(address).add(&token, br#"{"id":7,"name":"Ivy"}"#))
        })
        .collect();
    for client in clients {
        assert_eq!(client.join().expect("a response").status, 200);
    }
    assert_eq!(server.plants().len(), 1);
}

#[test]
fn unknown_members_are_ignored_at_any_depth() {
    let server = Server::start();
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    let body =
        format!(r#"{{"a":{deep},"id":1,"b":{{"id":9}},"name":"Fern","":null,"\ud800":"\udfff"}}"#);
    assert_eq!(server.add(body).body, r#"{"name":"Fern"}"#);
}

#[test]
fn every_notation_of_an_integer_is_accepted_exactly_over_the_whole_range() {
    let server = Server::start();
    let ids = [
        ("-9223372036854775808", i64::MIN),
        ("-9223372036854775807.0", i64::MIN + 1),
        ("-0", 0),
        ("1.0", 1),
        ("1e3", 1000),
        ("9007199254740993", 9_007_199_254_740_993),
        ("9223372036854775806", i64::MAX - 1),
        ("9223372036854775807.0", i64::MAX),
    ];
    for (written, _) in ids {
        server.add_ok(format!(r#"{{"id":{written},"name":"{written}"}}"#));
    }
    let stored: Vec<_> = server
        .plants()
        .into_iter()
        .map(|(id, name, _)| (name, id))
        .collect();
    assert_eq!(stored, ids.map(|(written, id)| (written.to_owned(), id)));
    for written in ["9223372036854775808", "-9223372036854775809", "0.5", "1e19"] {
        let response = server.add(format!(r#"{{"id":{written},"name":"x"}}"#));
        assert_eq!(response.error(), 40002, "{written}");
    }
}

#[test]
fn any_json_string_is_stored_exactly() {
    let server = Server::start();
    let names = [
        "",
        "\0",
        "a\0b",
        "🌱🏽",
        "e\u{301}é",
        "שלום\u{202e}",
        "\u{ffff}\u{10ffff}",
        " \t\n\"\\/",
    ];
    for (id, name) in names.iter().enumerate() {
        let body = json!({"id": id, "name": name, "tag": name}).to_string();
        let response = server.add(&body);
        assert_eq!(response.json(), json!({"name": name, "tag": name}));
        // A replay compares the whole string, including what follows U+0000.
        assert_eq!(server.add(&body).status, 200);
    }
    for ((_, name, tag), sent) in server.plants().into_iter().zip(names) {
        assert_eq!((name.as_str(), tag.as_deref()), (sent, Some(sent)));
    }
}

#[test]
fn an_invalid_plant_is_rejected_and_not_stored() {
    let server = Server::start();
    for body in [
        r#"{"id":1,"name":"x","tag":null}"#,
        r#"{"id":1,"name":"\ud800"}"#,
        r#"{"id":1,"name":"x","tag":"\udc00"}"#,
        r#"{"id":1,"id":1,"name":"x"}"#,
        r#"{"id":1,"name":"x","name":"x"}"#,
        r#"{"id":1,"name":"x","tag":"t","tag":"t"}"#,
        r#"[1,"x"]"#,
        r#"[1,"x","t"]"#,
        r#""x""#,
        "1",
        "null",
        r#"{"id":"1","name":"x"}"#,
        r#"{"id":null,"name":"x"}"#,
        r#"{"id":1,"name":null}"#,
        r#"{"id":1}"#,
        r#"{"name":"x"}"#,
    ] {
        assert_eq!(server.add(body).error(), 40002, "{body}");
    }
    assert_eq!(server.plants(), []);
}

#[test]
fn the_served_and_printed_openapi_description_is_the_file_of_the_repository() {
    let server = Server::start();
    let contract = include_str!("../../openapi.yaml");
    let yaml = server.connect().request("GET /openapi.yaml", "");
    assert_eq!(
        (yaml.status, yaml.header("content-type")),
        (200, Some("application/yaml"))
    );
    assert_eq!(yaml.body, contract);
    assert_eq!(
        crate::harness::run_ok(server.directory(), &["openapi"]),
        contract
    );

    let json = server.connect().request("GET /openapi.json", "");
    assert_eq!(json.status, 200);
    let contract = json.json();
    assert_eq!(contract["info"]["title"], "OpenAPI Plant Store");
    assert_eq!(contract["info"]["version"], "1.0.0");
    assert_eq!(contract["info"]["license"]["name"], "MIT");
}
