//! Connections with TLS: which certificates of a server are accepted, and the certificate of the client.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::harness::postgres::with_client;
use crate::harness::transport::Certificate;
use crate::harness::{directory, output, plantstore, run_ok};
use crate::postgres::own_server::OwnServer;
use crate::postgres::{sql, url};

/// Creates a self-signed certificate, `NAME.crt`, and its key, `NAME.key`. An extension of 127.0.0.1 makes it one of a server.
pub fn certificate(directory: &Path, name: &str, arguments: &[&str]) -> (PathBuf, PathBuf) {
    let [certificate, key] =
        ["crt", "key"].map(|ending| directory.join(format!("{name}.{ending}")));
    let mut openssl = Command::new("openssl");
    openssl
        .args(["req", "-x509", "-nodes", "-days", "2", "-subj"])
        .arg(format!("/CN={name}"))
        .args(arguments)
        .arg("-keyout")
        .arg(&key)
        .arg("-out")
        .arg(&certificate);
    let made = output(&mut openssl);
    let errors = String::from_utf8_lossy(&made.stderr);
    assert!(made.status.success(), "{errors}");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).expect("a mode");
    (certificate, key)
}

pub const EC: [&str; 4] = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"];

/// Lists tokens, without passwords or certificates from the environment.
pub fn list(directory: &Path, store: &str, variables: &[(&str, &str)]) -> Output {
    let mut command = plantstore(directory);
    for name in ["PGPASSWORD", "PGPASSFILE", "SSL_CERT_FILE", "SSL_CERT_DIR"] {
        command.env_remove(name);
    }
    command.env("HOME", directory);
    command.envs(variables.iter().copied());
    output(command.args(["token", "list", "--store", store]))
}

pub fn succeeds(output: &Output) {
    assert!(output.status.success(), "{output:?}");
}

/// The command has failed with a line that contains this text.
pub fn fails(output: &Output, text: &str) {
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert!(stderr.contains(text), "{stderr}");
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn each_sslmode_verifies_what_it_says() {
    let directory = directory();
    let path = directory.path();
    let postgres = OwnServer::start();
    run_ok(path, &["migrate", "--store", &postgres.url]);
    sql(&postgres.url, "CREATE ROLE encrypted SUPERUSER LOGIN");
    postgres.allow("hostssl all encrypted all trust");
    let url = postgres.url_of("encrypted");
    let list = |options: &str| list(path, &format!("{url}?{options}"), &[]);
    let misnamed = |options: &str| {
        // The certificate is valid for the address, not for this name.
        let url = url.replace("127.0.0.1", "localhost");
        super::tls::list(path, &format!("{url}?{options}"), &[])
    };
    let (strangers, _) = certificate(path, "stranger", &EC);
    let strangers = format!("sslrootcert={}", strangers.display());
    let roots = path.join("roots.pem");
    let copy = with_client(&postgres.url, async |client| {
        let sql = "SELECT pg_read_file(current_setting('ssl_cert_file'))";
        let row = client.query_one(sql, &[]).await.expect("a file");
        row.get::<_, String>(0)
    });
    fs::write(&roots, copy).expect("a file");
    let roots_file = roots.display().to_string();
    let roots = format!("sslrootcert={roots_file}");

    fails(&list(""), "no encryption");
    fails(&list("sslmode=disable"), "no encryption");

    succeeds(&list("sslmode=require"));
    succeeds(&misnamed("sslmode=require"));
    for mode in ["require", "verify-ca"] {
        let strange = list(&format!("sslmode={mode}&{strangers}"));
        fails(&strange, "invalid peer certificate");
        succeeds(&list(&format!("sslmode={mode}&{roots}")));
        succeeds(&misnamed(&format!("sslmode={mode}&{roots}")));
    }
    let strange = list(&format!("sslmode=verify-full&{strangers}"));
    fails(&strange, "invalid peer certificate");
    succeeds(&list(&format!("sslmode=verify-full&{roots}")));
    let other_name = misnamed(&format!("sslmode=verify-full&{roots}"));
    fails(&other_name, "not valid for name");
    for version in ["TLSv1.2", "TLSv1.3"] {
        let options = format!(
            "sslmode=verify-full&{roots}&ssl_min_protocol_version={version}&ssl_max_protocol_version={version}&sslsni=0"
        );
        succeeds(&list(&options));
    }

    let system = format!("{url}?sslmode=verify-full&sslrootcert=system");
    let trusted = [("SSL_CERT_FILE", &*roots_file)];
    succeeds(&super::tls::list(path, &system, &trusted));
    let stranger_file = strangers.trim_start_matches("sslrootcert=");
    let untrusted = [("SSL_CERT_FILE", stranger_file)];
    fails(
        &super::tls::list(path, &system, &untrusted),
        "invalid peer certificate",
    );

    let expired = Certificate::create_expired(path, "expired");
    postgres.use_certificate(&expired.cert, &expired.key);
    succeeds(&list("sslmode=require"));
    for mode in ["require", "verify-ca", "verify-full"] {
        let options = format!("sslmode={mode}&sslrootcert={}", expired.cert.display());
        fails(&list(&options), "expired");
    }
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn a_server_without_tls_is_not_used_with_sslmode_require() {
    let directory = directory();
    url(directory.path());
    let pooler = std::env::var("TEST_PGBOUNCER").expect("scripts/with-postgres runs this");
    let store = format!("{pooler}/postgres?sslmode=require");
    let output = list(directory.path(), &store, &[]);
    fails(&output, "server does not support TLS");
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn the_certificate_of_the_client_is_sent() {
    let directory = directory();
    let path = directory.path();
    let postgres = OwnServer::start();
    run_ok(path, &["migrate", "--store", &postgres.url]);
    let (certified, key) = certificate(path, "certified", &EC);
    let (_, other_key) = certificate(path, "other", &EC);
    let trusted = format!("{}/clients.pem", postgres.setting("data_directory"));
    postgres.write(&trusted, &fs::read_to_string(&certified).expect("a file"));
    postgres.set("ssl_ca_file", &trusted);
    sql(&postgres.url, "CREATE ROLE certified SUPERUSER LOGIN");
    postgres.allow("hostssl all certified all cert");
    let url = postgres.url_of("certified");
    let list = |certificate: &Path, key: &Path| {
        let (certificate, key) = (certificate.display(), key.display());
        let store = format!("{url}?sslmode=require&sslcert={certificate}&sslkey={key}");
        list(path, &store, &[])
    };

    let without = super::tls::list(path, &format!("{url}?sslmode=require"), &[]);
    fails(&without, "client certificate");
    succeeds(&list(&certified, &key));

    fails(
        &list(&certified, &other_key),
        "is not the one of the certificate in",
    );
    fails(&list(&path.join("absent"), &key), "absent (sslcert)");
    fails(&list(&certified, &path.join("absent")), "absent (sslkey)");
    fails(&list(&key, &key), "there is no certificate in");
    fails(&list(&certified, &certified), "certified.crt (sslkey)");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o604)).expect("a mode");
    fails(&list(&certified, &key), "chmod 600");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).expect("a mode");
    fs::write(&other_key, "no key").expect("a file");
    fails(&list(&certified, &other_key), "there is no private key in");
}
