//! JWTs of an identity provider: `oidc-provider`, which `make setup` installs, with new keys after each start.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Instant;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as BASE64;
use ring::hmac;
use ring::rand::SystemRandom;
use ring::signature::{Ed25519KeyPair, KeyPair};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::clock::Clock;
use crate::harness::transport::Certificate;
use crate::harness::{Response, Server, directory, plantstore, run, run_ok, wait_until};

const AUDIENCE: &str = "https://plants.example";
const BODY: &[u8] = br#"{"id":1,"name":"x"}"#;

/// A running provider, in a directory with its certificate.
struct Provider {
    child: Child,
    port: u16,
    directory: TempDir,
}

impl Provider {
    fn start() -> Self {
        let directory = directory();
        Certificate::create(directory.path(), "provider", 2);
        let (child, port) = Self::spawn(directory.path(), 0).expect("a free port");
        Self {
            child,
            port,
            directory,
        }
    }

    /// None if the port is in use.
    fn spawn(directory: &Path, port: u16) -> Option<(Child, u16)> {
        let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/oidc");
        assert!(
            scripts.join("node_modules/stamp").exists(),
            "the identity provider is missing; `make setup` installs it"
        );
        let mut child = Command::new("node")
            .arg("provider.js")
            .arg(port.to_string())
            .args(["provider.crt", "provider.key"].map(|file| directory.join(file)))
            .current_dir(scripts)
            // It ends when this end of the pipe is closed.
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("node runs; `make setup` installs it");
        let output = child.stdout.take().expect("a pipe");
        let mut lines = BufReader::new(output).lines();
        let Some(Ok(port)) = lines.next() else {
            child.wait().expect("a child");
            return None;
        };
        Some((child, port.parse().expect("a port")))
    }

    fn stop(&mut self) {
        self.child.kill().expect("it was running");
        self.child.wait().expect("a child");
    }

    /// Starts it again, with other keys.
    fn start_again(&mut self) {
        // Another test may use the port for a connection.
        wait_until("the port is free", || {
            let started = Self::spawn(self.directory.path(), self.port);
            started.map(|(child, _)| self.child = child).is_some()
        });
    }

    fn url(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    /// A command that runs a server which accepts its JWTs.
    fn server_command(&self, directory: &Path) -> Command {
        let mut command = plantstore(directory);
        command
            .env("SSL_CERT_FILE", self.directory.path().join("provider.crt"))
            .args(["serve", "--listen", "127.0.0.1:0"])
            .args(["--oidc-issuer", &self.url()])
            .args(["--oidc-audience", AUDIENCE]);
        command
    }

    /// The directory must outlive the server.
    fn serve(&self, directory: &TempDir) -> Server {
        Server::start_command(self.server_command(directory.path()), directory.path())
    }

    fn get(&self, arguments: &[&str]) -> Value {
        let certificate = self.directory.path().join("provider.crt");
        let output = Command::new("curl")
            .args(["-sS", "--cacert"])
            .arg(certificate)
            .args(arguments)
            .output()
            .expect("curl runs; `make setup` installs it");
        serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"))
    }

    fn jwt(&self, client: &str, algorithm: &str) -> String {
        self.jwt_for(client, AUDIENCE, algorithm, "plants:write")
    }

    fn jwt_for(&self, client: &str, audience: &str, algorithm: &str, scope: &str) -> String {
        let form = format!(
            "grant_type=client_credentials&client_id={client}&client_secret=secret&scope={scope}&resource={audience}/{algorithm}"
        );
        let response = self.get(&[&format!("{}/token", self.url()), "-d", &form]);
        let jwt = response["access_token"].as_str();
        jwt.unwrap_or_else(|| panic!("{response}")).to_owned()
    }
}

impl Drop for Provider {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn encoded(value: &Value) -> String {
    BASE64.encode(value.to_string())
}

fn decoded(part: &str) -> Value {
    serde_json::from_slice(&BASE64.decode(part).expect("base64")).expect("JSON")
}

/// Header, claims and signature.
fn parts(jwt: &str) -> [&str; 3] {
    let parts: Vec<_> = jwt.split('.').collect();
    parts.try_into().expect("three parts")
}

fn key_readings(server: &Server) -> u64 {
    server.metric("plantstore_oidc_key_readings_total")
}

fn verifications(server: &Server) -> u64 {
    server.metric("plantstore_oidc_verifications_total")
}

/// The response to a JWT whose key may not have been read yet.
fn add_when_key_is_read(server: &Server, jwt: &str) -> Response {
    let mut last = None;
    wait_until("the provider is reached", || {
        let response = server.connect().add(jwt, BODY);
        let is_read = ![429, 503].contains(&response.status);
        last = Some(response);
        is_read
    });
    last.expect("a response")
}

#[test]
fn jwts_of_each_algorithm_are_accepted_and_the_subject_is_recorded() {
    let provider = Provider::start();
    let directory = directory();
    let server = provider.serve(&directory);
    let name = format!("oidc:alice@127.0.0.1:{}", provider.port);
    for (id, algorithm) in ["RS256", "PS256", "ES256", "EdDSA"].iter().enumerate() {
        let jwt = provider.jwt("alice", algorithm);
        let body = format!(r#"{{"id":{id},"name":"Fern"}}"#);
        // The second time without verifying it again.
        let mut client = server.connect();
        for _ in 0..2 {
            let response = client.add(&jwt, body.as_bytes());
            assert_eq!(response.status, 200, "{algorithm}: {response:?}");
            let line = server.wait_for_line(|line| line["message"] == "request");
            assert_eq!(line["token_name"], *name);
        }
        assert_eq!(verifications(&server), id as u64 + 1);
        let plant = run_ok(directory.path(), &["get", &id.to_string()]);
        assert!(plant.contains(&name), "{plant}");
    }
    let tokens = run_ok(directory.path(), &["token", "list", "--history", "--json"]);
    assert_eq!(tokens.matches(&*name).count(), 1, "{tokens}");
    // The same scope in other claims. Another plant has the id.
    let other = provider.jwt("list", "ES256");
    for jwt in [&other, &provider.jwt("program", "ES256")] {
        let response = server.connect().add(jwt, BODY);
        assert_eq!(response.error(), 40009, "{response:?}");
    }

    // Tokens of the service are accepted as before, and a subject can be revoked like them.
    assert_eq!(server.add(br#"{"id":9,"name":"Fern"}"#).status, 200);
    let jwt = provider.jwt("alice", "ES256");
    server.revoke(&name, &jwt);
    assert_eq!(server.connect().add(&jwt, BODY).error(), 40101);
    let new = provider.jwt("alice", "RS256");
    assert_eq!(server.connect().add(&new, BODY).error(), 40101);
    assert_eq!(server.connect().add(&other, BODY).error(), 40009);

    // Also one that has not sent a request yet.
    let name = format!("oidc:bob@127.0.0.1:{}", provider.port);
    run_ok(directory.path(), &["token", "revoke", &name]);
    let bob = provider.jwt("bob", "RS256");
    wait_until("the subject is rejected", || {
        server.connect().add(&bob, b"{}").error() == 40101
    });
}

#[test]
fn jwts_of_a_new_subject_that_arrive_at_the_same_time_are_accepted() {
    let provider = Provider::start();
    let directory = directory();
    let server = provider.serve(&directory);
    let jwt = provider.jwt("alice", "ES256");
    let clients: Vec<_> = (0..32)
        .map(|id| {
            let mut client = server.connect();
            let body = format!(r#"{{"id":{id},"name":"Fern"}}"#);
            client.send_add(&jwt, body.as_bytes());
            client
        })
        .collect();
    for mut client in clients {
        let response = client.response();
        assert_eq!(response.status, 200, "{response:?}");
    }
    let history = run_ok(directory.path(), &["token", "list", "--history", "--json"]);
    assert_eq!(history.matches("oidc:alice").count(), 1, "{history}");
}

#[test]
fn invalid_jwts_count_as_failed_authentication_and_valid_ones_do_not() {
    let provider = Provider::start();
    let directory = directory();
    let mut command = provider.server_command(directory.path());
    command.args(["--auth-failure-limit", "1"]);
    let server = Server::start_command(command, directory.path());
    let expired = provider.jwt("expired", "ES256");
    wait_until("the limit is reached", || {
        let response = server.connect().add(&expired, BODY);
        assert!([401, 429].contains(&response.status), "{response:?}");
        response.status == 429
    });
    for _ in 0..3 {
        let jwt = provider.jwt("alice", "ES256");
        assert_eq!(server.connect().add(&jwt, BODY).status, 200);
    }
}

#[test]
fn jwts_with_other_claims_are_rejected() {
    let provider = Provider::start();
    let directory = directory();
    let server = provider.serve(&directory);
    let other = "https://other.example";
    for (jwt, code, message) in [
        (provider.jwt("expired", "RS256"), 40102, "has expired"),
        (provider.jwt("early", "RS256"), 40101, "not valid yet"),
        (provider.jwt("other-issuer", "RS256"), 40101, "issuer"),
        (provider.jwt("no-subject", "RS256"), 40101, "sub"),
        (provider.jwt("alice", "ES384"), 40101, "algorithm"),
        (
            provider.jwt_for("alice", other, "RS256", "plants:write"),
            40101,
            "audience",
        ),
        ("a.b.c".to_owned(), 40101, "neither"),
        ("x".to_owned(), 40101, "neither"),
    ] {
        let response = server.connect().add(&jwt, BODY);
        assert_eq!(response.error(), code, "{message}: {response:?}");
        assert!(response.body.contains(message), "{message}: {response:?}");
        let challenge = response.header("www-authenticate").expect("a challenge");
        assert!(challenge.contains("invalid_token"), "{challenge}");
    }
    let jwt = provider.jwt_for("alice", AUDIENCE, "RS256", "plants:read");
    let response = server.connect().add(&jwt, BODY);
    assert_eq!((response.status, response.error()), (403, 40300));
    assert_eq!(
        response.header("www-authenticate"),
        Some(r#"Bearer realm="plantstore", error="insufficient_scope", scope="plants:write""#)
    );
    assert_eq!(server.plants(), []);
    let tokens = run_ok(directory.path(), &["token", "list"]);
    assert!(!tokens.contains("oidc:"), "{tokens}");
}

#[test]
fn a_scope_that_is_not_required_is_not_missed() {
    let provider = Provider::start();
    let directory = directory();
    let mut command = provider.server_command(directory.path());
    command.args(["--oidc-scope", "off"]);
    let server = Server::start_command(command, directory.path());
    let jwt = provider.jwt_for("alice", AUDIENCE, "RS256", "plants:read");
    assert_eq!(server.connect().add(&jwt, BODY).status, 200);
}

#[test]
fn forged_jwts_are_rejected() {
    let provider = Provider::start();
    let directory = directory();
    let server = provider.serve(&directory);
    let jwt = provider.jwt("alice", "RS256");
    let [header, claims, signature] = parts(&jwt);
    let header_value = decoded(header);
    let kid = header_value["kid"].as_str().expect("a kid");
    let keys = provider.get(&[&format!("{}/jwks", provider.url())]);
    let keys = keys["keys"].as_array().expect("keys");
    let public = keys.iter().find(|key| key["kid"] == kid).expect("the key");
    let mut forged = Vec::new();

    for none in ["none", "None", "NONE"] {
        let header = encoded(&json!({"alg": none, "typ": "JWT", "kid": kid}));
        forged.push(format!("{header}.{claims}."));
        forged.push(format!("{header}.{claims}.{signature}"));
    }
    // What an attacker knows of the public key, as the secret of an HMAC.
    let modulus = public["n"].as_str().expect("a modulus");
    let secrets = [
        modulus.as_bytes().to_vec(),
        BASE64.decode(modulus).expect("base64"),
        public.to_string().into_bytes(),
        Vec::new(),
    ];
    for secret in secrets {
        for header in [
            json!({"alg": "HS256", "kid": kid}),
            json!({"alg": "HS256"}),
            json!({"alg": "RS256", "kid": kid}),
        ] {
            let message = format!("{}.{claims}", encoded(&header));
            let key = hmac::Key::new(hmac::HMAC_SHA256, &secret);
            let tag = BASE64.encode(hmac::sign(&key, message.as_bytes()));
            forged.push(format!("{message}.{tag}"));
        }
    }
    // Other claims, and other headers, with the same signature.
    let mut changed = decoded(claims);
    changed["sub"] = "root".into();
    forged.push(format!("{header}.{}.{signature}", encoded(&changed)));
    // The key for ES384 is not used, so it would be unknown.
    let used = keys.iter().filter(|key| key["alg"] != "ES384");
    let other_kids = used.map(|key| key["kid"].clone());
    for (algorithm, kid) in other_kids
        .map(|kid| ("RS256", kid))
        .chain(["PS256", "ES256", "EdDSA", "RS512"].map(|name| (name, kid.into())))
    {
        if algorithm != "RS256" || kid != header_value["kid"] {
            let header = encoded(&json!({"alg": algorithm, "typ": "at+jwt", "kid": kid}));
            forged.push(format!("{header}.{claims}.{signature}"));
        }
    }
    // A key of the attacker, which the header brings along or pretends to be known.
    let pair = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).expect("a key");
    let pair = Ed25519KeyPair::from_pkcs8(pair.as_ref()).expect("a key");
    let own = BASE64.encode(pair.public_key());
    let known = keys.iter().find(|key| key["alg"] == "EdDSA");
    let known = known.expect("a key")["kid"].clone();
    let jwk = json!({"kty": "OKP", "crv": "Ed25519", "x": own, "kid": known});
    for header in [
        json!({"alg": "EdDSA", "kid": known}),
        json!({"alg": "EdDSA", "kid": known, "jwk": jwk}),
        json!({"alg": "EdDSA", "jwk": jwk}),
        json!({"alg": "EdDSA", "kid": known, "crit": ["exp"]}),
    ] {
        let message = format!("{}.{claims}", encoded(&header));
        let signature = BASE64.encode(pair.sign(message.as_bytes()));
        forged.push(format!("{message}.{signature}"));
    }
    forged.push(format!("{header}.{claims}"));
    forged.push(format!("{header}.{claims}.{signature}.{signature}"));
    forged.push(format!("{header}.{claims}.{}", &signature[..100]));

    let before = key_readings(&server);
    for jwt in &forged {
        let response = server.connect().add(jwt, BODY);
        assert_eq!(response.error(), 40101, "{jwt}: {response:?}");
    }
    assert_eq!(server.plants(), []);
    let readings = key_readings(&server) - before;
    assert!(readings <= 1, "only one of them does not name a known key");
    assert_eq!(server.connect().add(&jwt, BODY).status, 200);
}

#[test]
fn a_verified_jwt_is_rejected_when_it_has_expired() {
    let provider = Provider::start();
    let directory = directory();
    let clock = Clock::new(directory.path());
    clock.set("+0");
    let mut command = provider.server_command(directory.path());
    clock.apply_to(&mut command);
    let server = Server::start_command(command, directory.path());
    let jwt = provider.jwt("alice", "ES256");
    // One connection, because verified JWTs are remembered by each runtime.
    let mut client = server.connect();
    assert_eq!(client.add(&jwt, BODY).status, 200);
    clock.set("+2h");
    let response = client.add(&jwt, BODY);
    assert_eq!(response.error(), 40102, "{response:?}");
}

#[test]
fn keys_are_read_again_for_an_unknown_kid_but_not_for_each() {
    let mut provider = Provider::start();
    let directory = directory();
    let server = provider.serve(&directory);
    let old = provider.jwt("alice", "ES256");
    // Of one connection, because verified JWTs are remembered by each runtime.
    let mut client = server.connect();
    assert_eq!(client.add(&old, BODY).status, 200);

    provider.stop();
    provider.start_again();
    let new = provider.jwt("alice", "ES256");
    assert_eq!(add_when_key_is_read(&server, &new).status, 200);
    // It was verified with a key that the provider has withdrawn.
    assert_eq!(client.add(&old, BODY).error(), 40101);

    // Forty requests wait for the same readings.
    let (before, started) = (key_readings(&server), Instant::now());
    let [_, claims, signature] = parts(&new);
    let clients: Vec<_> = (0..40)
        .map(|n| {
            let kid = format!("unknown-{n}");
            let header = encoded(&json!({"alg": "ES256", "kid": kid}));
            let mut client = server.connect();
            client.send_add(&format!("{header}.{claims}.{signature}"), BODY);
            client
        })
        .collect();
    for mut client in clients {
        let error = client.response().error();
        // A slow provider does not respond in time.
        assert!([40101, 50304].contains(&error), "{error}");
    }
    let readings = key_readings(&server) - before;
    let pauses = started.elapsed().as_secs() / 5;
    assert!(readings <= pauses + 2, "{readings} readings");
}

#[test]
fn a_provider_that_is_down_affects_only_keys_that_are_not_known() {
    let mut provider = Provider::start();
    let directory = directory();
    let mut server = provider.serve(&directory);
    let jwt = provider.jwt("alice", "ES256");
    let later = provider.jwt("bob", "ES256");
    assert_eq!(server.connect().add(&jwt, BODY).status, 200);

    provider.stop();
    // Neither a JWT that was verified before nor a new one with the same key needs the provider.
    assert_eq!(server.connect().add(&jwt, BODY).status, 200);
    assert_eq!(server.connect().add(&later, BODY).status, 200);
    let [_, claims, signature] = parts(&jwt);
    let header = encoded(&json!({"alg": "ES256", "kid": "unknown"}));
    let unknown = format!("{header}.{claims}.{signature}");
    let response = server.connect().add(&unknown, BODY);
    assert_eq!((response.status, response.error()), (503, 50304));
    assert!(response.header("retry-after").is_some());
    server.wait_for_line(|line| {
        let message = line["message"].as_str();
        message.is_some_and(|text| text.starts_with("the keys of the identity provider cannot"))
    });
    assert_eq!(server.connect().add(&jwt, BODY).status, 200);

    // A server that starts without the provider accepts the tokens of its store, and JWTs later.
    assert!(server.terminate().success());
    let server = provider.serve(&directory);
    assert_eq!(server.add(BODY).status, 200);
    assert_eq!(server.connect().add(&jwt, BODY).error(), 50304);
    provider.start_again();
    let new = provider.jwt("alice", "ES256");
    assert_eq!(add_when_key_is_read(&server, &new).status, 200);
}

/// The first warning in the log, also if it is from before the server listened.
fn warning(server: &Server) -> Value {
    let mut found = None;
    wait_until("there is a warning", || {
        let log = server.everything_logged();
        let mut lines = log
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok());
        found = lines.find(|line: &Value| line["level"] == "WARN");
        found.is_some()
    });
    found.expect("just seen")
}

/// Responds to one request after another.
fn respond_with(response: impl Fn(&str, &str) -> String + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    let issuer = url.clone();
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let mut line = String::new();
            let _ = BufReader::new(&stream).read_line(&mut line);
            let path = line.split(' ').nth(1).unwrap_or_default();
            let _ = (&stream).write_all(response(&issuer, path).as_bytes());
        }
    });
    url
}

#[test]
fn a_provider_that_responds_with_something_else_is_logged_with_the_cause() {
    fn ok(body: &str) -> String {
        format!(
            "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
    }
    fn configuration(issuer: &str, jwks_uri: &str) -> String {
        ok(&json!({"issuer": issuer, "jwks_uri": jwks_uri}).to_string())
    }
    fn with_keys(issuer: &str, path: &str, keys: &str) -> String {
        match path {
            "/keys" => ok(keys),
            _ => configuration(issuer, &format!("{issuer}/keys")),
        }
    }
    type Respond = fn(&str, &str) -> String;
    let cases: [(Respond, &str); 9] = [
        (|_, _| String::new(), "openid-configuration: "),
        (|_, _| "nonsense\r\n\r\n".to_owned(), "not HTTP"),
        (
            |_, _| "HTTP/1.1 302 Found\r\nlocation: /\r\n\r\n".to_owned(),
            "302",
        ),
        (|_, _| ok("<html>"), "expected value"),
        (
            |_, _| configuration("https://other.example", "https://x"),
            "the issuer there is",
        ),
        (
            |issuer, _| configuration(issuer, "http://192.0.2.1/keys"),
            "not an https:// URL",
        ),
        (
            |issuer, _| configuration(issuer, "file:///etc/passwd"),
            "not an https:// URL",
        ),
        (
            |issuer, path| with_keys(issuer, path, &" ".repeat(2 << 20)),
            "length limit exceeded",
        ),
        (
            |issuer, path| with_keys(issuer, path, r#"{"keys":{}}"#),
            "invalid type",
        ),
    ];
    for (response, expected) in cases {
        let url = respond_with(response);
        let server = Server::start_with(&["--oidc-issuer", &url, "--oidc-audience", "plants"]);
        let line = warning(&server);
        let cause = line["cause"].as_str().unwrap_or_default();
        assert!(cause.contains(expected), "{expected}: {line}");
        assert!(cause.len() < 1000);
    }
    // Keys that cannot be used are not a failure: the provider may have withdrawn the others.
    let url = respond_with(|issuer, path| {
        with_keys(
            issuer,
            path,
            r#"{"keys":[{"kty":"oct","k":"AAAA"},{"kty":"?"},1]}"#,
        )
    });
    let server = Server::start_with(&["--oidc-issuer", &url, "--oidc-audience", "plants"]);
    let line = warning(&server);
    assert_eq!(line["ignored"], 3, "{line}");
}

#[test]
fn a_provider_with_an_unknown_certificate_is_not_trusted() {
    let provider = Provider::start();
    let elsewhere = directory();
    Certificate::create(elsewhere.path(), "other", 2);
    let directory = directory();
    let mut command = provider.server_command(directory.path());
    command.env("SSL_CERT_FILE", elsewhere.path().join("other.crt"));
    let server = Server::start_command(command, directory.path());
    let jwt = provider.jwt("alice", "RS256");
    assert_eq!(server.connect().add(&jwt, BODY).error(), 50304);
    let line = server.wait_for_line(|line| !line["cause"].is_null());
    let cause = line["cause"].as_str().expect("text");
    assert!(cause.contains("certificate"), "{cause}");
}

#[test]
fn settings_that_cannot_work_are_rejected() {
    let directory = directory();
    for (arguments, expected) in [
        (
            &["--oidc-issuer", "https://login.example"][..],
            "--oidc-issuer and --oidc-audience need each other",
        ),
        (
            &["--oidc-audience", "plants"],
            "--oidc-issuer and --oidc-audience need each other",
        ),
        (
            &["--oidc-issuer", "http://login.example"],
            "expected a URL such as https://login.example",
        ),
        (&["--oidc-issuer", "login.example"], "expected a URL"),
        (&["--oidc-issuer", "https://a@b.example"], "expected a URL"),
        (&["--oidc-issuer", "https://"], "expected a URL"),
        (&["--oidc-scope", "a b"], "expected one scope"),
        (&["--oidc-scope", ""], "expected one scope"),
    ] {
        let arguments = [&["serve"][..], arguments].concat();
        let output = run(directory.path(), &arguments);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(errors.contains(expected), "{arguments:?}: {errors}");
    }
    let mut command = plantstore(directory.path());
    let output = command
        .args(["serve", "--oidc-issuer", "https://login.example"])
        .args(["--oidc-audience", "plants"])
        .env("SSL_CERT_FILE", directory.path().join("empty.pem"))
        .env("SSL_CERT_DIR", directory.path())
        .output()
        .expect("the binary runs");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("there are no CA certificates"), "{errors}");
}
