//! `postgres://…`: a URL as tokio-postgres parses it, with the TLS options of libpq, which it does not know. The password is never shown.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use percent_encoding::percent_decode_str;
use tokio_postgres::Config;
use tokio_postgres::config::{Host, SslMode, TargetSessionAttrs};

use crate::store::error::chain;

/// Displayed without user and password.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Url {
    pub config: Config,
    /// The trusted certificates; without them the connection is not encrypted.
    pub roots_path: Option<PathBuf>,
}

const PORT: u16 = 5432;

/// The time limit for one host, unless the URL has another.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

impl FromStr for Url {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (address, query) = text.split_once('?').unwrap_or((text, ""));
        let mut rest = Vec::new();
        let (mut mode, mut roots_path) = ("disable", None);
        for option in query.split('&').filter(|option| !option.is_empty()) {
            match option.split_once('=') {
                Some(("sslmode", value)) => mode = value,
                Some(("sslrootcert", value)) => {
                    let path = percent_decode_str(value).decode_utf8();
                    let path = path.map_err(|_| "sslrootcert: expected UTF-8")?;
                    roots_path = Some(path.into_owned().into());
                }
                _ => rest.push(option),
            }
        }
        let ssl_mode = match (mode, &roots_path) {
            ("disable", None) => SslMode::Disable,
            ("verify-full", Some(_)) => SslMode::Require,
            ("disable", Some(_)) => return Err("sslrootcert needs sslmode=verify-full".into()),
            ("verify-full", None) => {
                return Err("sslmode=verify-full needs sslrootcert=FILE".into());
            }
            _ => {
                let problem =
                    "sslmode is disable or verify-full; the others do not verify the server";
                return Err(problem.into());
            }
        };
        // These would end the password early, and the rest of it would become the name of a host or of a database, which are shown.
        let after_scheme = address.split_once("://").map_or("", |(_, rest)| rest);
        let before_host = after_scheme.rsplit_once('@').map_or("", |(user, _)| user);
        if before_host.contains(['@', '/']) {
            return Err("write `@` and `/` in a user name or a password as %40 and %2F".into());
        }
        let mut config: Config = format!("{address}?{}", rest.join("&")).parse().map_err(
            |error: tokio_postgres::Error| {
                if query.contains('@') {
                    // The error would show the rest of the password as the name of an option.
                    "write `?` in a user name or a password as %3F".to_owned()
                } else {
                    chain(&error)
                }
            },
        )?;
        if config.get_hosts().is_empty() {
            return Err("expected a host, such as postgres://user@host/database".into());
        }
        if config.get_target_session_attrs() == TargetSessionAttrs::ReadOnly {
            return Err("plants cannot be added to a server that is read-only".into());
        }
        config
            .ssl_mode(ssl_mode)
            .target_session_attrs(TargetSessionAttrs::ReadWrite);
        if config.get_application_name().is_none() {
            config.application_name("plantstore");
        }
        if config.get_connect_timeout().is_none() {
            config.connect_timeout(CONNECT_TIMEOUT);
        }
        Ok(Self { config, roots_path })
    }
}

impl Url {
    pub(super) fn hosts_len(&self) -> usize {
        self.config.get_hosts().len()
    }

    /// Such as `database1:5432`.
    pub(super) fn host_name(&self, host: usize) -> String {
        match &self.config.get_hosts()[host] {
            Host::Tcp(name) => format!("{name}:{}", self.port(host)),
            Host::Unix(path) => path.display().to_string(),
        }
    }

    fn port(&self, host: usize) -> u16 {
        let ports = self.config.get_ports();
        let port = ports.get(host).or(ports.first());
        port.copied().unwrap_or(PORT)
    }

    /// What is needed to connect to this host alone.
    pub(super) fn config_for(&self, host: usize) -> Config {
        let all = &self.config;
        let mut config = Config::new();
        match &all.get_hosts()[host] {
            Host::Tcp(name) => config.host(name),
            Host::Unix(path) => config.host_path(path),
        };
        config.port(self.port(host));
        if let Some(address) = all.get_hostaddrs().get(host) {
            config.hostaddr(*address);
        }
        if let Some(user) = all.get_user() {
            config.user(user);
        }
        if let Some(password) = all.get_password() {
            config.password(password);
        }
        if let Some(name) = all.get_dbname() {
            config.dbname(name);
        }
        if let Some(options) = all.get_options() {
            config.options(options);
        }
        if let Some(name) = all.get_application_name() {
            config.application_name(name);
        }
        if let Some(timeout) = all.get_connect_timeout() {
            config.connect_timeout(*timeout);
        }
        if let Some(timeout) = all.get_tcp_user_timeout() {
            config.tcp_user_timeout(*timeout);
        }
        if let Some(interval) = all.get_keepalives_interval() {
            config.keepalives_interval(interval);
        }
        if let Some(retries) = all.get_keepalives_retries() {
            config.keepalives_retries(retries);
        }
        config
            .ssl_mode(all.get_ssl_mode())
            .ssl_negotiation(all.get_ssl_negotiation())
            .channel_binding(all.get_channel_binding())
            .keepalives(all.get_keepalives())
            .keepalives_idle(all.get_keepalives_idle())
            .target_session_attrs(all.get_target_session_attrs())
            .load_balance_hosts(all.get_load_balance_hosts());
        config
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hosts: Vec<_> = (0..self.hosts_len())
            .map(|host| self.host_name(host))
            .collect();
        write!(f, "postgres://{}", hosts.join(","))?;
        match self.config.get_dbname() {
            Some(name) => write!(f, "/{name}"),
            None => Ok(()),
        }
    }
}
