//! What a role of a node needs, and what it can do without.

use crate::harness::{Server, directory, run_ok, wait_until};
use crate::postgres::{BODY, END_CONNECTIONS, SERVE, as_role, refusal, sql, url};

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn a_role_without_ddl_rights_works_after_another_role_has_migrated() {
    let directory = directory();
    let url = url(directory.path());
    let role = format!("clerk_{}", std::process::id());
    sql(
        &url,
        &format!("CREATE ROLE {role} LOGIN; REVOKE CREATE ON SCHEMA public FROM PUBLIC"),
    );
    let clerk = as_role(&url, &role);
    let sentence = refusal(
        directory.path(),
        &[&SERVE[..], &["--store", &clerk]].concat(),
    );
    assert!(sentence.contains("run `plantstore migrate`"), "{sentence}");

    run_ok(directory.path(), &["migrate"]);
    sql(
        &url,
        &format!(
            "GRANT USAGE ON SCHEMA plantstore TO {role};
             GRANT SELECT ON plantstore.schema_version TO {role};
             GRANT SELECT, INSERT, UPDATE ON plantstore.plants, plantstore.tokens TO {role};
             GRANT SELECT, INSERT, UPDATE, DELETE ON plantstore.nodes TO {role}"
        ),
    );
    let server = Server::start_in(directory.path(), &["--store", &clerk]);
    wait_until("it is not ready without a privilege", || {
        let response = server.ask("/readyz");
        response.body == "not ready: the tokens cannot be read\n"
    });
    drop(server);
    sql(
        &url,
        &format!("GRANT SELECT, INSERT ON plantstore.token_events TO {role}"),
    );
    let token = run_ok(
        directory.path(),
        &["token", "create", "a", "--store", &clerk],
    );
    let server = Server::start_in(directory.path(), &["--store", &clerk]);
    for _ in 0..2 {
        assert_eq!(server.connect().add(token.trim(), BODY).status, 200);
    }
    drop(server);

    // Nor with rights that only protect from stale primaries and connections that were given up.
    let optional = "pg_control_system(), pg_terminate_backend(integer, bigint)";
    sql(
        &url,
        &format!("REVOKE EXECUTE ON FUNCTION {optional} FROM PUBLIC"),
    );
    let server = Server::start_in(directory.path(), &["--store", &clerk]);
    let add = || server.connect().add(token.trim(), BODY).status;
    wait_until("it adds plants", || add() == 200);
    sql(&url, END_CONNECTIONS);
    wait_until("it adds plants over new connections", || add() == 200);
    drop(server);
    sql(&url, &format!("DROP OWNED BY {role}; DROP ROLE {role}"));
}
