//! Values that plantstore cannot have written, such as an administrator may.

use crate::harness::{Server, directory, run, run_ok, wait_until};
use crate::postgres::{BODY, sql, url};

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn a_time_that_is_infinite_affects_only_the_token_or_plant_that_has_it() {
    let directory = directory();
    let path = directory.path();
    let url = url(path);
    let [forever, other] =
        ["forever", "other"].map(|name| run_ok(path, &["token", "create", name]));
    let server = Server::start_in(path, &[]);
    let add = |token: &str, body: &[u8]| server.connect().add(token.trim(), body);
    assert_eq!(add(&forever, BODY).status, 200);
    assert_eq!(add(&other, br#"{"id":2,"name":"y"}"#).status, 200);
    run_ok(path, &["check"]);

    sql(
        &url,
        "UPDATE plantstore.tokens SET expires_at = 'infinity' WHERE name = 'forever';
         UPDATE plantstore.plants SET added_at = '-infinity' WHERE id = 1",
    );
    // A server reads all tokens at its start.
    drop(server);
    let server = Server::start_in(path, &[]);
    let add = |token: &str, body: &[u8]| server.connect().add(token.trim(), body);
    wait_until("the other token is known", || {
        add(&other, br#"{"id":2,"name":"y"}"#).status == 200
    });
    assert_eq!(add(&forever, BODY).status, 401);
    assert_eq!(add(&other, BODY).status, 200);
    assert_eq!(add(&other, br#"{"id":1,"name":"z"}"#).status, 400);

    let output = run(path, &["check"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let found = [output.stdout, output.stderr].concat();
    let found = String::from_utf8(found).expect("UTF-8");
    assert!(
        found.contains("plant 1: a time that plantstore did not write"),
        "{found}"
    );
    assert!(found.contains("token "), "{found}");
    for command in [&["get", "1"][..], &["export"], &["token", "list"]] {
        let output = run(path, command);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let stderr = String::from_utf8(output.stderr).expect("UTF-8");
        assert!(stderr.contains("damaged"), "{stderr}");
    }
}
