//! TLS: which certificates are accepted, when they are read again, and what a connection without TLS gets.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{ClientConnection, StreamOwned};
use tempfile::TempDir;
use tokio_rustls::rustls;

use crate::harness::clock::Clock;
use crate::harness::transport::Certificate;
use crate::harness::{Client, PATIENCE, Server, add_request, directory, output, run, wait_until};

const BODY: &[u8] = br#"{"id":1,"name":"x"}"#;

/// A server with a certificate in its directory.
fn start(arguments: &[&str]) -> (TempDir, Certificate, Server) {
    let directory = directory();
    let certificate = Certificate::create(directory.path(), "server", 2);
    let server = start_in(directory.path(), arguments);
    (directory, certificate, server)
}

fn start_in(directory: &Path, arguments: &[&str]) -> Server {
    let tls = ["--tls-cert", "server.crt", "--tls-key", "server.key"];
    Server::start_in(directory, &[&tls, arguments].concat())
}

fn connect(
    address: SocketAddr,
    certificate: &Certificate,
) -> StreamOwned<ClientConnection, TcpStream> {
    let config = Arc::new(certificate.client_config(&["http/1.1"]));
    let name = ServerName::from(address.ip());
    let client = ClientConnection::new(config, name).expect("a client");
    let stream = TcpStream::connect(address).expect("a connection");
    stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
    StreamOwned::new(client, stream)
}

/// Sends a request and returns the start of the response.
fn exchange(stream: &mut (impl Read + Write), request: &[u8]) -> std::io::Result<String> {
    stream.write_all(request)?;
    let mut response = vec![0; 4096];
    let len = stream.read(&mut response)?;
    response.truncate(len);
    Ok(String::from_utf8(response).expect("text"))
}

/// Output of curl, which knows the certificate.
fn curl(certificate: &Certificate, arguments: &[&str]) -> (bool, String) {
    let mut curl = Command::new("curl");
    curl.args(["-sS", "--cacert"])
        .arg(&certificate.cert)
        .args(arguments);
    let output = output(&mut curl);
    let text = [output.stdout, output.stderr].concat();
    (
        output.status.success(),
        String::from_utf8(text).expect("text"),
    )
}

#[test]
fn curl_adds_a_plant_over_each_version_of_http_and_tls() {
    let (_directory, certificate, server) = start(&[]);
    let url = format!("https://{}/plants", server.address());
    let token = format!("authorization: Bearer {}", server.token());
    for (options, version) in [
        (&["--http1.1", "--tlsv1.3"][..], "1.1"),
        (&["--http2", "--tlsv1.3"], "2"),
        (&["--http1.1", "--tlsv1.2", "--tls-max", "1.2"], "1.1"),
        (&["--http2", "--tlsv1.2", "--tls-max", "1.2"], "2"),
    ] {
        let request = [
            &url,
            "-H",
            &token,
            "-H",
            "content-type: application/json",
            "-d",
            r#"{"id":1,"name":"x"}"#,
            "-w",
            " %{http_version} %header{strict-transport-security}",
        ];
        let (_, said) = curl(&certificate, &[options, &request].concat());
        assert_eq!(
            said,
            format!(r#"{{"name":"x"}} {version} max-age=31536000"#)
        );
    }
    let (succeeded, said) = curl(
        &certificate,
        &["--tls-max", "1.1", "--ciphers", "ALL:@SECLEVEL=0", &url],
    );
    assert!(!succeeded, "{said}");
}

#[test]
fn the_example_of_the_first_start_uses_the_name_of_the_certificate() {
    let (_directory, certificate, server) = start(&[]);
    let logged = server.everything_logged();
    let port = server.address().port();
    let origin = format!("https://localhost:{port}");
    assert!(
        logged.contains(&format!("curl {origin}/plants")),
        "{logged}"
    );
    let (_, page) = curl(&certificate, &[&format!("{origin}/docs")]);
    assert!(page.contains("Plant Store"), "{page}");
}

#[test]
fn a_certificate_that_cannot_be_used_is_an_error_that_names_the_file() {
    let directory = directory();
    let path = directory.path();
    Certificate::create(path, "server", 2);
    Certificate::create(path, "other", 2);
    Certificate::create_expired(path, "expired");
    fs::write(path.join("empty"), "").expect("a file");
    fs::write(path.join("broken"), "-----BEGIN CERTIFICATE-----\nAAAA\n").expect("a file");
    let encrypted = Command::new("openssl")
        .args(["pkcs8", "-topk8", "-in", "server.key", "-out", "encrypted"])
        .args(["-passout", "pass:secret"])
        .current_dir(path)
        .status();
    assert!(encrypted.expect("openssl runs").success());
    for (cert, key, problem) in [
        ("missing", "server.key", "cannot read missing: No such file"),
        ("server.crt", "missing", "cannot read missing: No such file"),
        ("empty", "server.key", "there is no certificate in empty"),
        ("broken", "server.key", "broken is not a valid PEM file"),
        (
            "server.key",
            "server.key",
            "there is no certificate in server.key",
        ),
        (
            "server.crt",
            "server.crt",
            "there is no private key in server.crt",
        ),
        (
            "server.crt",
            "encrypted",
            "there is no private key in encrypted",
        ),
        (
            "server.crt",
            "other.key",
            "the key in other.key is not the one of the certificate in server.crt",
        ),
        (
            "expired.crt",
            "expired.key",
            "cannot use the certificate in expired.crt: it has expired at ",
        ),
        (".", "server.key", ". is not a file of at most"),
    ] {
        let serve = ["serve", "--listen", "127.0.0.1:0"];
        let tls = ["--tls-cert", cert, "--tls-key", key];
        let output = run(path, &[&serve[..], &tls].concat());
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{errors}");
        assert!(errors.contains(problem), "{problem}: {errors}");
        assert!(!path.join("plantstore.db").exists(), "{problem}");
    }
    for (arguments, problem) in [
        (
            &["--tls-cert", "server.crt"][..],
            "--tls-cert and --tls-key need each other",
        ),
        (
            &["--tls-key", "server.key"],
            "--tls-cert and --tls-key need each other",
        ),
        (&["--ops-tls"], "--ops-tls needs --tls-cert and --tls-key"),
    ] {
        let output = run(path, &[&["serve"][..], arguments].concat());
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{errors}");
        assert!(errors.contains(problem), "{errors}");
    }
}

#[test]
fn a_changed_certificate_is_used_for_new_connections_and_open_ones_stay() {
    let (directory, _, server) = start(&[]);
    let first = Certificate {
        cert: directory.path().join("first.crt"),
        key: directory.path().join("first.key"),
    };
    fs::copy(directory.path().join("server.crt"), &first.cert).expect("a copy");
    let request = add_request(&server.token(), BODY);
    let mut open = connect(server.address(), &first);
    let response = exchange(&mut open, &request).expect("a response");
    assert!(response.starts_with("HTTP/1.1 200"), "{response}");

    for (name, is_signalled) in [("second", false), ("third", true)] {
        let next = Certificate::create(directory.path(), name, 2);
        for (from, to) in [(&next.cert, "server.crt"), (&next.key, "server.key")] {
            fs::copy(from, directory.path().join(to)).expect("a copy");
        }
        if is_signalled {
            server.signal("-HUP");
        }
        wait_until("the new certificate is used", || {
            exchange(&mut connect(server.address(), &next), &request).is_ok()
        });
        let rejected = exchange(&mut connect(server.address(), &first), &request);
        assert_eq!(
            rejected.expect_err("unknown").kind(),
            ErrorKind::InvalidData
        );
        let response = exchange(&mut open, &request).expect("a response");
        assert!(response.starts_with("HTTP/1.1 200"), "{response}");
    }

    // One that cannot be used changes nothing.
    let used = Certificate {
        cert: directory.path().join("third.crt"),
        key: directory.path().join("third.key"),
    };
    fs::write(directory.path().join("server.crt"), "nonsense").expect("a file");
    server.signal("-HUP");
    let line = server.wait_for_line(|line| line["level"] == "ERROR");
    let problem = line["error"].as_str().expect("a cause");
    assert!(
        problem.contains("there is no certificate in server.crt"),
        "{line}"
    );
    assert!(exchange(&mut connect(server.address(), &used), &request).is_ok());
}

/// The clock of the server may be wrong, and clients with the right time accept the certificate.
#[test]
fn a_certificate_that_is_not_valid_yet_is_a_warning_at_the_start_and_an_error_later() {
    let (directory, certificates) = (directory(), directory());
    let path = directory.path();
    let install = |certificate: &Certificate| {
        fs::copy(&certificate.key, path.join("server.key")).expect("a copy");
        fs::copy(&certificate.cert, path.join("server.crt")).expect("a copy");
    };
    let certificate = Certificate::create(certificates.path(), "first", 100);
    install(&certificate);
    let clock = Clock::new(path);
    clock.set("-400d");
    let mut command = crate::harness::plantstore(path);
    command.args(["serve", "--listen", "127.0.0.1:0"]);
    command.args(["--tls-cert", "server.crt", "--tls-key", "server.key"]);
    clock.apply_to(&mut command);
    let server = Server::start_command(command, path);
    let logged = server.everything_logged();
    assert!(
        logged.contains("the certificate is not valid yet"),
        "{logged}"
    );
    let request = add_request(&server.token(), BODY);
    let response = exchange(&mut connect(server.address(), &certificate), &request);
    assert!(response.is_ok_and(|response| response.starts_with("HTTP/1.1 200")));

    clock.set("+0");
    install(&Certificate::create_for_later(certificates.path(), "later"));
    server.signal("-HUP");
    let line = server.wait_for_line(|line| line["level"] == "ERROR");
    let problem = line["error"].as_str().expect("a cause");
    assert!(problem.contains("it is valid only from "), "{line}");
    assert!(exchange(&mut connect(server.address(), &certificate), &request).is_ok());
}

#[test]
fn the_expiry_of_the_certificate_is_a_metric_and_near_expiry_a_warning() {
    let (directory, _, server) = start(&[]);
    let logged = server.everything_logged();
    assert!(logged.contains("the certificate expires soon"), "{logged}");
    let metrics = server.ask("/metrics").body;
    let name = "plantstore_tls_certificate_expiry_timestamp_seconds ";
    let expiry = metrics.lines().find_map(|line| line.strip_prefix(name));
    let expiry: i64 = expiry.expect("a metric").parse().expect("seconds");
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let now = i64::try_from(now.expect("a time").as_secs()).expect("seconds");
    assert!((now + 86400..now + 3 * 86400).contains(&expiry), "{expiry}");

    let later = Certificate::create(directory.path(), "later", 100);
    fs::copy(later.key, directory.path().join("server.key")).expect("a copy");
    fs::copy(later.cert, directory.path().join("server.crt")).expect("a copy");
    server.signal("-HUP");
    wait_until("the metric is that of the new certificate", || {
        let metrics = server.ask("/metrics").body;
        let expiry = metrics.lines().find_map(|line| line.strip_prefix(name));
        let expiry: i64 = expiry.expect("a metric").parse().expect("seconds");
        expiry > now + 90 * 86400
    });
}

#[test]
fn a_request_without_tls_is_40000_and_tells_what_to_do() {
    let (_directory, _, server) = start(&[]);
    let mut client = server.connect();
    let response = client.add(&server.token(), BODY);
    assert_eq!(response.error(), 40000);
    assert!(response.message().contains("https://"), "{response:?}");
    // RFC 6797 does not allow it without TLS.
    assert_eq!(response.header("strict-transport-security"), None);
    assert!(client.is_closed());
    assert!(server.plants().is_empty());
}

#[test]
fn a_handshake_that_takes_too_long_or_is_invalid_is_ended_and_counted() {
    let (_directory, certificate, server) = start(&["--handshake-timeout", "300ms"]);
    let failed = || {
        let metrics = server.ask("/metrics").body;
        let name = "plantstore_tls_handshakes_failed_total ";
        let count = metrics.lines().find_map(|line| line.strip_prefix(name));
        count.expect("a metric").parse::<u64>().expect("a number")
    };
    assert_eq!(failed(), 0);
    let mut silent = server.connect();
    assert!(silent.is_closed());
    let mut half = server.connect();
    half.send([22, 3, 1, 1, 0]);
    assert!(half.is_closed());
    wait_until("both are counted", || failed() == 2);
    let mut invalid = server.connect();
    invalid.send([22, 3, 1, 0, 3, 9, 9, 9]);
    let _alert = invalid.is_closed();
    wait_until("it is counted", || failed() == 3);
    let request = add_request(&server.token(), BODY);
    assert!(exchange(&mut connect(server.address(), &certificate), &request).is_ok());
}

#[test]
fn the_private_listener_can_use_the_same_certificate() {
    let (_directory, certificate, server) = start(&["--ops-tls"]);
    let url = format!("https://{}/healthz", server.ops_address());
    for version in ["--http1.1", "--http2"] {
        let (_, said) = curl(&certificate, &[version, "-w", "%{http_version}", &url]);
        assert_eq!(said, "alive\n1.1");
    }
    let mut plain = Client::connect(server.ops_address());
    plain.try_send("GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n");
    assert!(!plain.everything_as_bytes().starts_with(b"HTTP"));

    let status = |url: &str, roots: Option<&Path>| {
        let mut command = crate::harness::plantstore(server.directory());
        command.args(["status", url]);
        if let Some(roots) = roots {
            command.env("SSL_CERT_FILE", roots);
        }
        let output = output(&mut command);
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
    };
    let [https, http] = ["https", "http"].map(|it| format!("{it}://{}", server.ops_address()));
    let said = status(&https, Some(certificate.cert.as_ref()));
    assert!(said.starts_with("ready\n"), "{said}");
    let said = status(&https, None);
    assert!(said.contains("set SSL_CERT_FILE"), "{said}");
    let said = status(&http, None);
    assert!(said.contains("begins with https:"), "{said}");
    let without = Server::start();
    let https = format!("https://{}", without.ops_address());
    let said = status(&https, Some(certificate.cert.as_ref()));
    assert!(said.contains("begins with http:"), "{said}");
}

#[test]
fn plaintext_beyond_this_machine_is_a_warning() {
    let message = |server: &Server| server.everything_logged().contains("without encryption");
    let directory = directory();
    Certificate::create(directory.path(), "server", 2);
    for (arguments, environment, is_warned) in [
        (&[][..], "0.0.0.0:0", true),
        (&[], "127.0.0.1:0", false),
        (
            &["--tls-cert", "server.crt", "--tls-key", "server.key"],
            "0.0.0.0:0",
            false,
        ),
        (&["--trusted-proxy", "10.0.0.0/8"], "0.0.0.0:0", false),
    ] {
        let mut command = crate::harness::plantstore(directory.path());
        command.arg("serve").args(arguments);
        command.env("PLANTSTORE_LISTEN", environment);
        let mut server = Server::start_command(command, directory.path());
        server.terminate();
        assert_eq!(message(&server), is_warned, "{arguments:?} {environment}");
    }
}
