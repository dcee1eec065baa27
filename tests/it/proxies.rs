//! Reverse proxies with the configurations of `deploy/`: TLS, the address of the client, and limits.

use std::fs;
use std::path::Path;

use crate::harness::proxy::Proxy;
use crate::harness::{Client, Server, add_request, directory, run};
use crate::markdown::{self, Block};

/// A certificate for 127.0.0.1 in `fullchain.pem`, its key in `privkey.pem`, and both in `plants.pem`.
fn make_certificate(directory: &Path) {
    let script = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=plants -days 2 \
                  -keyout privkey.pem -out fullchain.pem -addext subjectAltName=IP:127.0.0.1 2> openssl.log\n\
                  cat fullchain.pem privkey.pem > plants.pem\n";
    let (language, text) = ("sh".to_owned(), script.to_owned());
    markdown::run(&[Block { language, text }], directory, &[]);
}

/// Adds a plant through a proxy that terminates TLS. The service logs the client, not what the client claims to be.
fn add_through(proxy: &Proxy, server: &Server) {
    let text = format!(
        "curl -sS -D headers --retry 30 --retry-connrefused --retry-delay 1 --cacert fullchain.pem https://{}/plants \
         -H 'Authorization: Bearer {}' -H 'Content-Type: application/json' -H 'x-request-id: from-a-client' \
         -H 'X-Forwarded-For: 192.0.2.1' -H 'Forwarded: for=192.0.2.1' --interface 127.0.0.9 \
         -d '{{\"id\":1,\"name\":\"Monstera\"}}'\n",
        proxy.address,
        server.token()
    );
    let language = "sh".to_owned();
    let expected = Block {
        language: "json".to_owned(),
        text: "{\"name\":\"Monstera\"}".to_owned(),
    };
    let blocks = [Block { language, text }, expected];
    markdown::run(&blocks, server.directory(), &[]);
    let headers = fs::read_to_string(server.directory().join("headers")).expect("headers");
    let headers = headers.to_lowercase();
    assert!(
        headers.contains("strict-transport-security: max-age=31536000"),
        "{headers}"
    );
    assert!(!headers.contains("nginx/"), "{headers}");
    let line = server.wait_for_line(|line| line["path"] == "/plants");
    assert_eq!(line["client"], "127.0.0.9");
    assert_ne!(line["request_id"], "from-a-client");
}

#[test]
fn haproxy_terminates_tls_and_names_the_client() {
    let server = Server::start_with(&["--trusted-proxy", "127.0.0.1"]);
    make_certificate(server.directory());
    add_through(&Proxy::haproxy(&server), &server);
}

#[test]
fn nginx_terminates_tls_and_names_the_client() {
    let server = Server::start_with(&["--trusted-proxy", "127.0.0.1"]);
    make_certificate(server.directory());
    add_through(&Proxy::nginx(&server), &server);
}

#[test]
fn haproxy_names_the_client_with_the_proxy_protocol() {
    let server = Server::start_with(&["--trusted-proxy", "127.0.0.1", "--proxy-protocol"]);
    let with_protocol = |config: String| config.replace(" check port", " send-proxy-v2 check port");
    let proxy = Proxy::plain_haproxy(&server, with_protocol);
    let mut client = Client::connect_from([127, 0, 0, 9], proxy.address);
    let token = server.token();
    assert_eq!(client.add(&token, br#"{"id":1,"name":"Fern"}"#).status, 200);
    let line = server.wait_for_line(|line| line["path"] == "/plants");
    assert_eq!(line["client"], "127.0.0.9");
    // Without the protocol, or from elsewhere, nothing is read.
    for source in [[127, 0, 0, 1], [127, 0, 0, 9]] {
        let mut direct = Client::connect_from(source, server.address());
        direct.try_send(add_request(&token, br#"{"id":2,"name":"Fern"}"#));
        assert!(direct.is_closed());
    }
    assert_eq!(server.plants().len(), 1);
}

#[test]
fn only_a_trusted_proxy_is_asked_for_the_client() {
    let server = Server::start_with(&["--trusted-proxy", "127.0.0.2/32,127.0.1.0/24"]);
    for (source, expected) in [
        ([127, 0, 0, 1], "127.0.0.1"),
        ([127, 0, 0, 2], "192.0.2.9"),
        ([127, 0, 1, 7], "192.0.2.9"),
    ] {
        let mut client = Client::connect_from(source, server.address());
        let path = format!("/from-{}-{}", source[2], source[3]);
        let forwarded = "x-forwarded-for: 203.0.113.1, 192.0.2.9, 127.0.1.3\r\n";
        assert_eq!(
            client.request(&format!("GET {path}"), forwarded).status,
            404
        );
        let line = server.wait_for_line(|line| line["path"] == path);
        assert_eq!(line["client"], expected);
    }
}

#[test]
fn the_configuration_file_has_switches_and_lists() {
    let directory = directory();
    let settings = "proxy_protocol = true\ntrusted_proxy = [\"127.0.0.2\", \"127.0.0.1/32\"]\n";
    fs::write(directory.path().join("a.toml"), settings).expect("a file");
    let server = Server::start_in(directory.path(), &["--config", "a.toml"]);
    let token = server.token();
    for (source, client) in [(1, 8), (2, 9)] {
        let mut proxy = Client::connect_from([127, 0, 0, source], server.address());
        let addresses = [192, 0, 2, client, 127, 0, 0, 1, 0, 80, 0, 81];
        proxy.send([&b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c"[..], &addresses].concat());
        let body = br#"{"id":1,"name":"Fern"}"#;
        assert_eq!(proxy.add(&token, body).status, 200);
        let address = format!("192.0.2.{client}");
        server.wait_for_line(|line| line["client"] == *address);
    }
}

#[test]
fn the_proxy_protocol_needs_a_proxy() {
    let output = run(directory().path(), &["serve", "--proxy-protocol"]);
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(
        error.contains("--proxy-protocol needs --trusted-proxy"),
        "{error}"
    );
}
