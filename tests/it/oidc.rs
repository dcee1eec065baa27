//! JWTs of an identity provider: `oidc-provider`, which `make setup` installs, with new keys after each start.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as BASE64;
use ring::hmac;
use ring::rand::SystemRandom;
use ring::signature::{Ed25519KeyPair, KeyPair};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::clock::Clock;
use crate::harness::transport::Certificate;
use crate::harness::{Server, directory, free_port, plantstore, run, run_ok, wait_until};

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
        let port = free_port();
        let child = Self::spawn(directory.path(), port);
        Self {
            child,
            port,
            directory,
        }
    }

    fn spawn(directory: &Path, port: u16) -> Child {
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
        let listening = BufReader::new(output).lines().map_while(Result::ok);
        assert_eq!(listening.take(1).collect::<String>(), "listening");
        child
    }

    fn stop(&mut self) {
        self.child.kill().expect("it was running");
        self.child.wait().expect("a child");
    }

    /// Starts it again, with other keys.
    fn start_again(&mut self) {
        self.child = Self::spawn(self.directory.path(), self.port);
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
    let metrics = server.ask("/metrics").body;
    let counts = metrics.lines().filter_map(|line| {
        let rest = line.strip_prefix("plantstore_oidc_key_readings_total")?;
        rest.split(' ').nth(1)?.parse::<u64>().ok()
    });
    counts.sum()
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
        let plant = run_ok(directory.path(), &["get", &id.to_string()]);
        assert!(plant.contains(&name), "{plant}");
    }
    let tokens = run_ok(directory.path(), &["token", "list", "--history", "--json"]);
    assert_eq!(tokens.matches(&*name).count(), 1, "{tokens}");
    let other = provider.jwt("list", "ES256");
    let response = server.connect().add(&other, BODY);
    assert_eq!(response.status, 400, "id 1 is another plant: {response:?}");
    assert_eq!(response.error(), 40009);

    // Tokens of the service are accepted as before, and a subject can be revoked like them.
    assert_eq!(server.add(br#"{"id":9,"name":"Fern"}"#).status, 200);
    let jwt = provider.jwt("alice", "ES256");
    server.revoke(&name, &jwt);
    assert_eq!(server.connect().add(&jwt, BODY).error(), 40101);
    let new = provider.jwt("alice", "RS256");
    assert_eq!(server.connect().add(&new, BODY).error(), 40101);
    assert_eq!(server.connect().add(&other, BODY).error(), 40009);
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
        (provider.jwt("nobody", "RS256"), 40101, "sub"),
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
    assert_eq!(key_readings(&server), before, "all of them name known keys");
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
    let before = key_readings(&server);

    provider.stop();
    provider.start_again();
    let new = provider.jwt("alice", "ES256");
    assert_eq!(server.connect().add(&new, BODY).status, 200);
    // It was verified with a key that the provider has withdrawn.
    assert_eq!(client.add(&old, BODY).error(), 40101);

    // Forty requests wait for the same readings.
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
        assert_eq!(client.response().error(), 40101);
    }
    let readings = key_readings(&server) - before;
    assert!(readings < 20, "{readings} readings for 42 requests");
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
    wait_until("the provider is reached", || {
        let response = server.connect().add(&new, BODY);
        assert!([200, 503].contains(&response.status), "{response:?}");
        response.status == 200
    });
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
        assert!(!output.status.success(), "{arguments:?}");
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
