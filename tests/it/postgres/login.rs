//! Passwords from the URL, the environment and the password file; SCRAM with channel binding.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::harness::{directory, free_port, run_ok};
use crate::postgres::own_server::OwnServer;
use crate::postgres::tls::{EC, certificate, fails, list, succeeds};
use crate::postgres::{address, sql};

const PASSWORD: &str = "correct:horse\\battery";

/// A server with a role that needs a password.
fn server(directory: &Path) -> OwnServer {
    let postgres = OwnServer::start();
    run_ok(directory, &["migrate", "--store", &postgres.url]);
    let role = format!("CREATE ROLE locked SUPERUSER LOGIN PASSWORD '{PASSWORD}'");
    sql(&postgres.url, &role);
    sql(&postgres.url, "CREATE ROLE trusted SUPERUSER LOGIN");
    postgres.allow("host all locked all scram-sha-256\nhost all trusted all trust");
    postgres
}

fn write_private(path: &Path, text: &str) {
    fs::write(path, text).expect("a file");
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).expect("a mode");
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn a_password_is_taken_from_the_url_then_pgpassword_then_the_password_file() {
    let directory = directory();
    let path = directory.path();
    let postgres = server(path);
    let url = postgres.url_of("locked");
    let encoded = url.replace("locked@", "locked:correct%3Ahorse%5Cbattery@");
    let list = |store: &str, variables: &[(&str, &str)]| {
        let output = list(path, store, variables);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(
            !stderr.contains("horse") && !stderr.contains("wrong"),
            "{stderr}"
        );
        output
    };
    let [correct, wrong] = [("PGPASSWORD", PASSWORD), ("PGPASSWORD", "wrong")];

    fails(&list(&url, &[]), "requires a password");
    fails(&list(&url, &[wrong]), "rejects the connection");
    succeeds(&list(&url, &[correct]));
    succeeds(&list(&encoded, &[wrong]));

    let port = address(&url).port();
    let line = format!("127.0.0.1:{port}:postgres:locked:correct\\:horse\\\\battery");
    let [passwords, others] = ["passwords", "others"].map(|name| path.join(name));
    write_private(&passwords, &format!("# hosts\n*:1:*:*:wrong\n{line}\n"));
    write_private(&others, "*:*:*:other:wrong\n");
    let [named, other] = [&passwords, &others].map(|path| {
        let path = path.to_str().expect("UTF-8");
        ("PGPASSFILE", path)
    });
    succeeds(&list(&url, &[named]));
    fails(&list(&url, &[named, wrong]), "rejects the connection");
    fails(&list(&url, &[other]), "requires a password");
    let option = format!("{url}?passfile={}", passwords.display());
    succeeds(&list(&option, &[other]));
    fails(
        &list(&url, &[("PGPASSFILE", "absent")]),
        "password file absent",
    );

    // Each host has its own password.
    let closed = free_port();
    write_private(&others, &format!("*:{closed}:*:*:wrong\n{line}\n"));
    let two = format!("127.0.0.1:{closed},127.0.0.1:{port}");
    let two_hosts = url.replace(&format!("127.0.0.1:{port}"), &two);
    succeeds(&list(&two_hosts, &[other]));

    let in_home = path.join(".pgpass");
    fs::rename(&passwords, &in_home).expect("a name");
    succeeds(&list(&url, &[]));
    for mode in [0o640, 0o604] {
        fs::set_permissions(&in_home, fs::Permissions::from_mode(mode)).expect("a mode");
        fails(&list(&url, &[]), "chmod 600");
    }
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn scram_is_bound_to_the_certificate_of_the_server() {
    let directory = directory();
    let path = directory.path();
    let postgres = server(path);
    let url = postgres.url_of("locked");
    let password = [("PGPASSWORD", PASSWORD)];
    let list = |options: &str| list(path, &format!("{url}?sslmode=require&{options}"), &password);
    for binding in ["require", "prefer", "disable"] {
        succeeds(&list(&format!("channel_binding={binding}")));
    }

    // The hash is that of the certificate's signature; SHA-256 in place of SHA-1.
    let rsa = ["-newkey", "rsa:2048"];
    let pss = [&rsa[..], &["-sigopt", "rsa_padding_mode:pss", "-sha512"]].concat();
    for (name, arguments) in [
        ("ecdsa-sha384", [&EC[..], &["-sha384"]].concat()),
        ("ecdsa-sha512", [&EC[..], &["-sha512"]].concat()),
        ("rsa-sha1", [&rsa[..], &["-sha1"]].concat()),
        ("rsa-sha256", rsa.to_vec()),
        ("rsa-sha384", [&rsa[..], &["-sha384"]].concat()),
        ("rsa-pss-sha512", pss),
    ] {
        let (certificate, key) = certificate(path, name, &arguments);
        postgres.use_certificate(&certificate, &key);
        let output = list("channel_binding=require");
        assert!(output.status.success(), "{name}: {output:?}");
    }

    // There is no hash for this one.
    let (certificate, key) = certificate(path, "ed25519", &["-newkey", "ed25519"]);
    postgres.use_certificate(&certificate, &key);
    succeeds(&list(""));
    fails(
        &list("channel_binding=require"),
        "did not use channel binding",
    );
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn a_login_without_channel_binding_is_rejected_if_it_is_required() {
    let directory = directory();
    let path = directory.path();
    let postgres = server(path);
    let trusted = postgres.url_of("trusted");
    succeeds(&list(path, &format!("{trusted}?sslmode=require"), &[]));
    let required = format!("{trusted}?sslmode=require&channel_binding=require");
    fails(&list(path, &required, &[]), "did not use channel binding");

    let without_tls = format!("{}?channel_binding=require", postgres.url_of("locked"));
    let output = list(path, &without_tls, &[("PGPASSWORD", PASSWORD)]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("add sslmode=verify-full"), "{stderr}");
}
