//! The database of a fault that does not control its server: on a temporary PostgreSQL server, or on the server of `TEST_ENGINE`.

use std::net::{SocketAddr, ToSocketAddrs};

use crate::harness::postgres::with_client;
use crate::postgres::cluster::Postgres;

/// The URL of a server of any engine that has PostgreSQL's protocol, without a database: `postgres://user@host:port`.
const TEST_ENGINE: &str = "TEST_ENGINE";

pub struct Database {
    user: String,
    server: SocketAddr,
    name: String,
    _own: Option<Postgres>,
}

impl Database {
    /// True if the faults run against a server that is not ours.
    pub fn is_foreign() -> bool {
        std::env::var_os(TEST_ENGINE).is_some()
    }

    /// A new, empty database.
    pub fn new() -> Self {
        let Ok(url) = std::env::var(TEST_ENGINE) else {
            let postgres = Postgres::start_new();
            return Self {
                user: "postgres".to_owned(),
                server: ([127, 0, 0, 1], postgres.port()).into(),
                name: "plants".to_owned(),
                _own: Some(postgres),
            };
        };
        let address = url.strip_prefix("postgres://").expect("postgres://…");
        let (user, host) = address.rsplit_once('@').expect("user@host:port");
        let mut servers = host.to_socket_addrs().expect("host:port");
        let random = getrandom::u64().expect("random bytes");
        let database = Self {
            user: user.to_owned(),
            server: servers.next().expect("an address"),
            name: format!("plantstore_faults_{random:x}"),
            _own: None,
        };
        with_client(&format!("{url}/postgres"), async |client| {
            let sql = format!("CREATE DATABASE {}", database.name);
            client.batch_execute(&sql).await.expect("a database");
        });
        database
    }

    pub fn url(&self) -> String {
        self.url_at(self.server)
    }

    /// The URL of the same database at another address, such as that of a proxy.
    pub fn url_at(&self, address: SocketAddr) -> String {
        format!("postgres://{}@{address}/{}", self.user, self.name)
    }

    pub fn address(&self) -> SocketAddr {
        self.server
    }
}
