//! URLs with several hosts: which server is used, and what is reported if none can be used.

use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use crate::harness::tcp_proxy::TcpProxy;
use crate::harness::{Server, directory, free_port, run_ok, wait_until};
use crate::postgres::own_server::OwnServer;
use crate::postgres::tls::{fails, list, succeeds};
use crate::postgres::{BODY, END_CONNECTIONS, SERVE, address, refusal, sql, url};

/// The URL with these hosts in place of its own.
fn with_hosts(url: &str, hosts: &[SocketAddr]) -> String {
    let hosts: Vec<_> = hosts.iter().map(ToString::to_string).collect();
    url.replace(&address(url).to_string(), &hosts.join(","))
}

/// Refuses connections.
fn down() -> SocketAddr {
    ([127, 0, 0, 1], free_port()).into()
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn a_host_that_rejects_the_connection_is_named_although_another_is_down() {
    let directory = directory();
    let path = directory.path();
    let url = url(path);
    let up = address(&url);
    let absent = format!("{url}_absent");
    let rejects = format!("the database postgres://{up}/");
    for hosts in [[up, down()], [down(), up]] {
        let store = with_hosts(&absent, &hosts);
        let output = list(path, &store, &[]);
        fails(&output, &rejects);
        fails(&output, "rejects the connection; check the user");
        fails(&output, "does not exist");

        // The host that is down may accept the connection later.
        let server = Server::start_in(path, &["--store", &store]);
        let lost =
            server.wait_for_line(|line| line["message"] == "the store does not accept writes");
        let cause = lost["cause"].as_str().expect("a cause");
        assert!(cause.contains(&rejects), "{cause}");
        assert!(cause.contains("does not exist"), "{cause}");
    }

    let all = with_hosts(&absent, &[up, up]);
    let sentence = refusal(path, &[&SERVE[..], &["--store", &all]].concat());
    assert!(sentence.contains(&rejects), "{sentence}");

    let none = with_hosts(&url, &[down(), down()]);
    fails(&list(path, &none, &[]), "cannot be reached");
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn unsafe_settings_of_one_host_are_reported_with_its_name() {
    let directory = directory();
    let url = url(directory.path());
    let database = url.rsplit('/').next().expect("a name");
    let setting = format!("ALTER DATABASE \"{database}\" SET synchronous_commit = off");
    sql(&url, &setting);
    let store = with_hosts(&url, &[down(), address(&url)]);
    let output = list(directory.path(), &store, &[]);
    fails(
        &output,
        &format!("the database {url} must not be used").replace("postgres@", ""),
    );
    fails(&output, "synchronous_commit is off");
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn a_host_that_accepts_connections_but_never_responds_does_not_delay_the_use_of_another() {
    let directory = directory();
    let url = url(directory.path());
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let silent = listener.local_addr().expect("an address");
    for hosts in [[silent, address(&url)], [address(&url), silent]] {
        let store = format!("{}?connect_timeout=10", with_hosts(&url, &hosts));
        // Half of the time for which the other would be waited for if none could be used.
        let arguments = ["--store", &store, "--store-timeout", "5s"];
        let server = Server::start_in(directory.path(), &arguments);
        wait_until("it adds plants", || server.add(BODY).status == 200);
        sql(&url, END_CONNECTIONS);
        wait_until("it adds plants over new connections", || {
            server.add(BODY).status == 200
        });
    }
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn the_host_that_accepts_writes_is_found_in_any_place_and_also_if_it_is_slow() {
    let directory = directory();
    let path = directory.path();
    let url = url(path);
    run_ok(path, &["migrate"]);
    let primary = address(&url);
    let read_only = OwnServer::start();
    let database = url.rsplit('/').next().expect("a name");
    sql(&read_only.url, &format!("CREATE DATABASE \"{database}\""));
    read_only.set("default_transaction_read_only", "on");
    let standby = address(&read_only.url);
    for hosts in [
        [primary, standby, down()],
        [standby, primary, down()],
        [down(), standby, primary],
    ] {
        succeeds(&list(path, &with_hosts(&url, &hosts), &[]));
    }
    let none = list(path, &with_hosts(&url, &[standby, down()]), &[]);
    fails(&none, "cannot be reached");

    let mut slow = TcpProxy::closed(primary);
    slow.delay = Duration::from_secs(4);
    slow.open();
    let store = with_hosts(&url, &[standby, slow.address]);
    succeeds(&list(path, &format!("{store}?connect_timeout=10"), &[]));
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn another_database_is_not_used_in_place_of_the_one_that_was_used_before_if_there_are_several_hosts()
 {
    let directory = directory();
    let path = directory.path();
    let url = url(path);
    let other = OwnServer::start();
    let database = url.rsplit('/').next().expect("a name");
    sql(&other.url, &format!("CREATE DATABASE \"{database}\""));
    let there = with_hosts(&url, &[address(&other.url)]);
    let create = |store: &str| run_ok(path, &["token", "create", "a", "--store", store]);
    let [token, other_token] = [&url, &there].map(|store| create(store));

    let mut first = TcpProxy::to(address(&url));
    let mut second = TcpProxy::closed(address(&other.url));
    let hosts = with_hosts(&url, &[first.address, second.address]);
    let server = Server::start_in(path, &["--store", &hosts, "--store-timeout", "5s"]);
    let add = |server: &Server, token: &str| server.connect().add(token.trim(), BODY).status;
    wait_until("it uses the first", || add(&server, &token) == 200);
    first.close();
    second.open();
    let rejected = format!(
        "{} is not a copy of the database that this process has used",
        second.address
    );
    wait_until("it rejects the second", || {
        assert_ne!(add(&server, &other_token), 200);
        server.everything_logged().contains(&rejected)
    });
    first.open();
    wait_until("it uses the first again", || add(&server, &token) == 200);
    first.close();

    // An operator may replace the only database.
    first.server = address(&url);
    first.open();
    let only = with_hosts(&url, &[first.address]);
    let server = Server::start_in(path, &["--store", &only, "--store-timeout", "5s"]);
    wait_until("it uses the first", || add(&server, &token) == 200);
    first.close();
    first.server = address(&other.url);
    first.open();
    wait_until("it uses the second", || add(&server, &other_token) == 200);
}
