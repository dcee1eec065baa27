//! `postgres://…`: a URL with the meaning that it has in libpq. An option that cannot be followed is rejected with what to write instead.
//! The password is never shown.

use std::env;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use tokio_postgres::Config;
use tokio_postgres::config::{Host, LoadBalanceHosts, SslMode, TargetSessionAttrs};

use crate::store::error::{OpenError, chain};
use crate::store::postgres::password_file::{self, Login};
use crate::store::postgres::tls_options::{self, TlsOptions};
use crate::user::account_name;

/// Displayed without user and password.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Url {
    /// For all hosts; `config_for` has that of one host.
    pub config: Config,
    pub(super) tls: Option<TlsOptions>,
    password_file: Option<PathBuf>,
}

const PORT: u16 = 5432;

/// The time limit for one host, unless the URL has another.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// Where PostgreSQL has its Unix socket unless it is configured, by its own default and by that of Debian. A password file calls this host
/// `localhost`.
const SOCKET_DIRECTORIES: [&str; 2] = ["/tmp", "/var/run/postgresql"];

/// Options of libpq that are passed to the driver, which gives them the same meaning.
const DRIVER_OPTIONS: [&str; 12] = [
    "user",
    "password",
    "dbname",
    "hostaddr",
    "port",
    "options",
    "application_name",
    "connect_timeout",
    "keepalives",
    "keepalives_idle",
    "keepalives_interval",
    "load_balance_hosts",
];

/// Other options, of libpq and of other drivers, and what to do about them.
const REJECTED_OPTIONS: [(&[&str], &str); 22] = [
    (
        &["ssl", "sslaccept", "requiressl"],
        "write sslmode=verify-full&sslrootcert=system (or sslrootcert=FILE), or sslmode=require, which verifies nothing",
    ),
    (
        &["sslidentity"],
        "write sslcert=FILE&sslkey=FILE, with PEM files",
    ),
    (
        &["sslpassword"],
        "remove it, and decrypt the file of sslkey with `openssl pkey`",
    ),
    (
        &["sslnegotiation"],
        "remove it; direct TLS is not supported",
    ),
    (
        &["sslcompression"],
        "remove it; TLS compression is not supported",
    ),
    (
        &["sslcertmode"],
        "remove it; the file of sslcert is sent if the server requests a certificate",
    ),
    (
        &["sslcrl", "sslcrldir"],
        "remove it; revocation lists are not supported",
    ),
    (&["sslkeylogfile"], "remove it; TLS keys are not logged"),
    (
        &["require_auth"],
        "remove it; channel_binding=require makes sure that the server uses SCRAM",
    ),
    (
        &["gssencmode", "gsslib", "gssdelegation", "krbsrvname"],
        "remove it; Kerberos (GSSAPI) is not supported",
    ),
    (
        &["requirepeer"],
        "remove it; the owner of a Unix socket is not checked",
    ),
    (
        &["service", "servicefile"],
        "write host, user and database in the URL; service files are not read",
    ),
    (
        &["replication"],
        "remove it; the service uses an ordinary connection",
    ),
    (
        &["client_encoding"],
        "remove it; the encoding is always UTF8",
    ),
    (&["keepalives_retries"], "write keepalives_count"),
    (
        &["min_protocol_version"],
        "remove it; the protocol version is 3.0",
    ),
    (
        &[
            "pgbouncer",
            "prepareThreshold",
            "prepared_statements",
            "statement_cache_size",
            "statement_cache_capacity",
            "default_query_exec_mode",
        ],
        "remove it; a pooler is detected, and statements are prepared only without one",
    ),
    (
        &[
            "connection_limit",
            "pool_timeout",
            "pool_size",
            "pool_max_conns",
        ],
        "remove it; --store-connections sets the number of connections",
    ),
    (
        &["schema", "currentSchema", "search_path"],
        "remove it; the tables are always in the schema plantstore",
    ),
    (
        &["socket_timeout", "statement_timeout"],
        "remove it; --store-timeout limits each operation",
    ),
    (
        &["load_balance", "topology_keys"],
        "remove it; list the nodes as host1,host2 and add load_balance_hosts=random",
    ),
    (
        &["targetServerType"],
        "write target_session_attrs=read-write",
    ),
];

impl FromStr for Url {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (address, query) = text.split_once('?').unwrap_or((text, ""));
        // These would end the password early, and the rest of it would become the name of a host or of a database, which are shown.
        let after_scheme = address.split_once("://").map_or("", |(_, rest)| rest);
        let (before_host, host) = after_scheme.rsplit_once('@').unwrap_or(("", after_scheme));
        if before_host.contains(['@', '/']) {
            return Err("write `@` and `/` in a user name or a password as %40 and %2F".into());
        }
        let options = Options::parse(query)?;
        if options.has_host && !host.is_empty() && !host.starts_with('/') {
            return Err("write the host once: before the database, or as the option host".into());
        }
        let config = format!("{address}?{}", options.for_driver.join("&")).parse();
        let mut config: Config = config
            .map_err(|error: tokio_postgres::Error| without_password(query, &chain(&error)))?;
        check_hosts(&config)?;
        let tls = options.tls.finish()?;
        let ssl_mode = tls.as_ref().map_or(SslMode::Disable, |_| SslMode::Require);
        config
            .ssl_mode(ssl_mode)
            .target_session_attrs(TargetSessionAttrs::ReadWrite);
        if config.get_application_name().is_none() {
            let name = options.fallback_application_name;
            config.application_name(name.as_deref().unwrap_or("plantstore"));
        }
        if config.get_connect_timeout().is_none() {
            config.connect_timeout(CONNECT_TIMEOUT);
        }
        if let Some(timeout) = options.tcp_user_timeout {
            config.tcp_user_timeout(timeout);
        }
        let password_file = options.password_file;
        Ok(Self {
            config,
            tls,
            password_file,
        })
    }
}

/// What the options of a URL say.
#[derive(Default)]
struct Options {
    /// As in the URL.
    for_driver: Vec<String>,
    has_host: bool,
    tls: tls_options::Parser,
    password_file: Option<PathBuf>,
    fallback_application_name: Option<String>,
    tcp_user_timeout: Option<Duration>,
}

impl Options {
    fn parse(query: &str) -> Result<Self, String> {
        let mut options = Self::default();
        for option in query.split('&').filter(|option| !option.is_empty()) {
            let Some((name, value)) = option.split_once('=') else {
                return Err(without_password(query, "expected NAME=VALUE after `?`"));
            };
            let decoded = percent_decode_str(value).decode_utf8();
            let decoded = decoded.map_err(|_| "expected UTF-8 in the options after `?`")?;
            if !options.set(name, value, &decoded)? {
                let rejected = REJECTED_OPTIONS
                    .iter()
                    .find(|(names, _)| names.contains(&name));
                return Err(match rejected {
                    Some((_, advice)) => format!("{name} cannot be used: {advice}"),
                    None => without_password(
                        query,
                        &format!(
                            "unknown option `{name}`: remove it; docs/high-availability.md has those of a database URL"
                        ),
                    ),
                });
            }
        }
        Ok(options)
    }

    /// Returns false for an option that is unknown, or has a value that is not supported.
    fn set(&mut self, name: &str, value: &str, decoded: &str) -> Result<bool, String> {
        if self.tls.set(name, decoded)? && name != "channel_binding" {
            return Ok(true);
        }
        match (name, decoded) {
            ("channel_binding", _) => self.for_driver.push(format!("{name}={value}")),
            ("host", hosts) => {
                self.has_host = true;
                let hosts = hosts
                    .split(',')
                    .map(|host| format!("host={}", utf8_percent_encode(host, NON_ALPHANUMERIC)));
                self.for_driver.extend(hosts);
            }
            ("keepalives_count", _) => self.for_driver.push(format!("keepalives_retries={value}")),
            ("passfile", "") => return Err("passfile: expected a file".into()),
            ("passfile", path) => self.password_file = Some(path.into()),
            ("fallback_application_name", name) => {
                self.fallback_application_name = Some(name.to_owned());
            }
            // In milliseconds; the option of the driver is in seconds.
            ("tcp_user_timeout", value) => {
                let timeout = value
                    .parse()
                    .map_err(|_| "tcp_user_timeout is in milliseconds")?;
                self.tcp_user_timeout = (timeout > 0).then_some(Duration::from_millis(timeout));
            }
            // A server that can be written to is required in any case. There is no GSSAPI, and the protocol version is 3.0.
            ("target_session_attrs", "any" | "read-write" | "primary")
            | ("gssencmode", "disable" | "prefer")
            | ("min_protocol_version", "3.0")
            | ("max_protocol_version", _) => {}
            ("target_session_attrs", _) => {
                return Err(
                    "plants cannot be added to a server that is read-only: write target_session_attrs=read-write"
                        .into(),
                );
            }
            ("client_encoding", encoding) => {
                return Ok(["utf8", "utf-8"].contains(&&*encoding.to_ascii_lowercase()));
            }
            _ if DRIVER_OPTIONS.contains(&name) => self.for_driver.push(format!("{name}={value}")),
            _ => return Ok(false),
        }
        Ok(true)
    }
}

/// A message that shows the name of an option. If the password contains `?`, its rest is not shown as one.
fn without_password(query: &str, message: &str) -> String {
    if query.contains('@') {
        return "write `?` in a user name or a password as %3F".to_owned();
    }
    message.to_owned()
}

fn check_hosts(config: &Config) -> Result<(), String> {
    let hosts = config.get_hosts();
    let is_empty = |host: &Host| matches!(host, Host::Tcp(name) if name.is_empty());
    if hosts.is_empty() || hosts.iter().any(is_empty) {
        return Err("expected a host, such as postgres://user@host/database".into());
    }
    if config.get_ports().len() > 1 && config.get_ports().len() != hosts.len() {
        return Err("write each port after its host, such as host1:5432,host2:5433".into());
    }
    let addresses = config.get_hostaddrs().len();
    if addresses != 0 && addresses != hosts.len() {
        return Err("hostaddr: expected as many addresses as there are hosts".into());
    }
    // The address would be used, but without TLS, which there is not over a socket.
    if addresses != 0 && hosts.iter().any(|host| matches!(host, Host::Unix(_))) {
        return Err("hostaddr: remove it, or the Unix socket from the hosts".into());
    }
    Ok(())
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

    /// Displays the URL as if it had only this host.
    pub(super) fn shown_for(&self, host: usize) -> String {
        self.shown(&self.host_name(host))
    }

    fn shown(&self, hosts: &str) -> String {
        match self.config.get_dbname() {
            Some(name) => format!("postgres://{hosts}/{name}"),
            None => format!("postgres://{hosts}"),
        }
    }

    pub(super) fn connect_timeout(&self) -> Duration {
        let timeout = self.config.get_connect_timeout();
        timeout.copied().unwrap_or(CONNECT_TIMEOUT)
    }

    /// The indexes of the hosts in the order in which to try them.
    pub(super) fn host_order(&self) -> Vec<usize> {
        let mut order: Vec<_> = (0..self.hosts_len()).collect();
        if self.is_balanced() {
            // Without random numbers the order is that of the URL.
            order.sort_by_cached_key(|_| getrandom::u64().unwrap_or(0));
        }
        order
    }

    /// True with `load_balance_hosts=random`.
    pub(super) fn is_balanced(&self) -> bool {
        self.config.get_load_balance_hosts() == LoadBalanceHosts::Random
    }

    /// The configuration for one host. The password, if the URL has none, is that of `PGPASSWORD`, or for this host in the password file,
    /// which is read each time.
    pub(super) fn config_for(&self, index: usize) -> Result<Config, OpenError> {
        let all = &self.config;
        let mut config = Config::new();
        match &all.get_hosts()[index] {
            Host::Tcp(name) => config.host(name).ssl_mode(all.get_ssl_mode()),
            // As in libpq, there is no TLS over a Unix socket.
            Host::Unix(path) => config.host_path(path).ssl_mode(SslMode::Disable),
        };
        config
            .port(self.port(index))
            .keepalives(all.get_keepalives())
            .keepalives_idle(all.get_keepalives_idle())
            .target_session_attrs(all.get_target_session_attrs())
            .channel_binding(all.get_channel_binding())
            .load_balance_hosts(all.get_load_balance_hosts());
        // The setters have no way to set nothing.
        all.get_hostaddrs()
            .get(index)
            .map(|address| config.hostaddr(*address));
        all.get_user().map(|user| config.user(user));
        all.get_dbname().map(|name| config.dbname(name));
        all.get_options().map(|options| config.options(options));
        all.get_application_name()
            .map(|name| config.application_name(name));
        all.get_connect_timeout()
            .map(|timeout| config.connect_timeout(*timeout));
        all.get_tcp_user_timeout()
            .map(|timeout| config.tcp_user_timeout(*timeout));
        all.get_keepalives_interval()
            .map(|interval| config.keepalives_interval(interval));
        all.get_keepalives_retries()
            .map(|retries| config.keepalives_retries(retries));
        self.password_for(index)?
            .map(|password| config.password(password));
        Ok(config)
    }

    fn port(&self, index: usize) -> u16 {
        let ports = self.config.get_ports();
        ports.get(index).or(ports.first()).copied().unwrap_or(PORT)
    }

    fn password_for(&self, index: usize) -> Result<Option<Vec<u8>>, OpenError> {
        let in_url = self.config.get_password().map(<[u8]>::to_vec);
        let in_variable = || Some(env::var_os("PGPASSWORD")?.as_bytes().to_vec());
        let password = in_url.filter(|password| !password.is_empty());
        let password = password.or_else(|| in_variable().filter(|password| !password.is_empty()));
        if password.is_some() {
            return Ok(password);
        }
        let host = match &self.config.get_hosts()[index] {
            Host::Tcp(name) => name.clone(),
            Host::Unix(path)
                if SOCKET_DIRECTORIES
                    .iter()
                    .any(|known| path == Path::new(known)) =>
            {
                "localhost".to_owned()
            }
            Host::Unix(path) => path.display().to_string(),
        };
        let user = self.config.get_user().map(str::to_owned);
        let user = user.or_else(account_name).unwrap_or_default();
        let login = Login {
            host: &host,
            port: &self.port(index).to_string(),
            database: self.config.get_dbname().unwrap_or(&user),
            user: &user,
        };
        password_file::password(self.password_file.as_deref(), &login)
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hosts: Vec<_> = (0..self.hosts_len())
            .map(|host| self.host_name(host))
            .collect();
        f.write_str(&self.shown(&hosts.join(",")))
    }
}

#[cfg(test)]
mod tests {
    use tokio_postgres::config::ChannelBinding;

    use super::*;
    use crate::store::postgres::tls_options::{Roots, Verify};

    fn parse(url: &str) -> Url {
        url.parse()
            .unwrap_or_else(|problem: String| panic!("{url}: {problem}"))
    }

    #[test]
    fn what_hosted_databases_give_as_a_url_is_accepted() {
        for url in [
            // Amazon RDS and Aurora
            "postgres://u:p@mydb.123456789012.us-east-1.rds.amazonaws.com:5432/d?sslmode=verify-full&sslrootcert=/etc/global-bundle.pem",
            // Google Cloud SQL: a Unix socket of its proxy, or an address with its own authority
            "postgresql://u:p@/d?host=/cloudsql/project:region:instance",
            "postgres://u:p@10.1.2.3/d?sslmode=verify-ca&sslrootcert=server-ca.pem&sslcert=client-cert.pem&sslkey=client-key.pem",
            // Azure
            "postgres://u%40server:p@server.postgres.database.azure.com:5432/d?sslmode=require",
            // Neon
            "postgresql://alex:AbC123dEf@ep-cool-darkness-123456-pooler.us-east-2.aws.neon.tech/d?sslmode=require&channel_binding=require",
            "postgresql://alex:AbC123dEf@ep-cool-darkness-123456.us-east-2.aws.neon.tech/d?options=endpoint%3Dep-cool-darkness-123456&sslmode=require",
            // Supabase
            "postgresql://postgres.abcdefgh:p@aws-0-eu-central-1.pooler.supabase.com:6543/postgres",
            "postgres://postgres:p@db.abcdefgh.supabase.co:5432/postgres?sslmode=verify-full&sslrootcert=prod-ca-2021.crt",
            // Heroku
            "postgres://u:p@ec2-1-2-3-4.compute-1.amazonaws.com:5432/d?sslmode=require",
            // Aiven and DigitalOcean
            "postgres://avnadmin:p@pg-1.aivencloud.com:12691/defaultdb?sslmode=require",
            "postgresql://doadmin:p@db-1.db.ondigitalocean.com:25060/defaultdb?sslmode=require",
            // CockroachDB
            "postgresql://u:p@free-tier.gcp-us-central1.cockroachlabs.cloud:26257/d?sslmode=verify-full&sslrootcert=/home/u/root.crt&options=--cluster%3Dname-123",
            // Crunchy Bridge and PlanetScale
            "postgres://application:p@p.abcdefgh.db.postgresbridge.com:5432/postgres",
            "postgresql://u.branch:p@us-east-3.pg.psdb.cloud:6432/postgres?sslmode=verify-full&sslrootcert=system",
            // YugabyteDB
            "postgresql://admin:p@us-west-2.1234.aws.ybdb.io:5433/yugabyte?ssl_min_protocol_version=TLSv1.2&sslmode=verify-full&sslrootcert=root.crt",
            // Other options of libpq
            "postgres://u@h/d?connect_timeout=10&application_name=a&target_session_attrs=read-write&gssencmode=disable&sslsni=1",
            "postgres://u@h1,h2:5433/d?load_balance_hosts=random&target_session_attrs=primary&fallback_application_name=a",
            "postgres://u@h/d?keepalives=1&keepalives_idle=30&keepalives_interval=10&keepalives_count=3&tcp_user_timeout=5000",
            "postgres://u@h/d?hostaddr=10.0.0.1&client_encoding=utf-8&passfile=/p&gssencmode=prefer&sslcompression=0",
            "postgres://u@h/d?sslmode=require&ssl_max_protocol_version=TLSv1.3&sslnegotiation=postgres&channel_binding=prefer",
            "postgres://u@h/d?max_protocol_version=3.2&min_protocol_version=3.0&sslcertmode=allow",
            "postgres:///d?host=h1,h2&port=5433,5434&user=u&password=p",
        ] {
            parse(url);
        }
    }

    #[test]
    fn what_cannot_be_followed_is_rejected_with_what_to_write() {
        for (options, advice) in [
            ("sslmode=prefer", "write verify-full, verify-ca or require"),
            ("sslmode=allow", "write verify-full, verify-ca or require"),
            ("sslmode=no-verify", "write sslmode=require"),
            ("sslmode=on", "disable, require, verify-ca or verify-full"),
            ("sslmode=verify-ca", "needs sslrootcert=FILE"),
            ("sslmode=verify-full", "sslrootcert=system"),
            (
                "sslrootcert=f",
                "sslrootcert needs TLS: add sslmode=verify-full",
            ),
            ("sslrootcert=system", "add sslmode=verify-full"),
            ("sslcert=f&sslkey=g", "sslcert needs TLS: add"),
            (
                "channel_binding=require",
                "channel_binding=require needs TLS: add",
            ),
            ("sslmode=disable&sslrootcert=f", "instead of disable"),
            (
                "sslmode=disable&channel_binding=require",
                "instead of disable",
            ),
            (
                "sslmode=require&sslrootcert=system",
                "needs sslmode=verify-full",
            ),
            (
                "sslmode=verify-ca&sslrootcert=system",
                "needs sslmode=verify-full",
            ),
            ("sslmode=require&sslcert=f", "sslcert needs sslkey=FILE"),
            ("sslmode=require&sslkey=f", "sslkey needs sslcert=FILE"),
            ("sslmode=require&sslrootcert=", "expected a file"),
            ("channel_binding=always", "require, prefer or disable"),
            ("ssl_min_protocol_version=TLSv2", "TLSv1.2 or TLSv1.3"),
            ("ssl_max_protocol_version=TLSv1.1", "TLSv1.2 or TLSv1.3"),
            (
                "sslmode=require&ssl_min_protocol_version=TLSv1.3&ssl_max_protocol_version=TLSv1.2",
                "above",
            ),
            ("sslsni=yes", "0 or 1"),
            ("sslnegotiation=direct", "remove it"),
            ("sslcompression=1", "remove it"),
            ("sslcertmode=require", "remove it"),
            ("sslpassword=x", "openssl pkey"),
            ("sslcrl=f", "revocation lists"),
            ("ssl=true", "write sslmode=verify-full"),
            ("sslaccept=strict", "write sslmode=verify-full"),
            ("gssencmode=require", "Kerberos"),
            ("require_auth=scram-sha-256", "channel_binding=require"),
            ("client_encoding=latin1", "always UTF8"),
            ("service=s", "service files are not read"),
            ("pgbouncer=true", "a pooler is detected"),
            ("prepareThreshold=0", "a pooler is detected"),
            ("connection_limit=1", "--store-connections"),
            ("pool_timeout=10", "--store-connections"),
            ("schema=public", "schema plantstore"),
            ("currentSchema=public", "schema plantstore"),
            ("load_balance=true", "load_balance_hosts=random"),
            ("topology_keys=a.b.c", "load_balance_hosts=random"),
            (
                "targetServerType=primary",
                "target_session_attrs=read-write",
            ),
            (
                "target_session_attrs=read-only",
                "target_session_attrs=read-write",
            ),
            (
                "target_session_attrs=prefer-standby",
                "target_session_attrs=read-write",
            ),
            ("keepalives_retries=3", "keepalives_count"),
            ("tcp_user_timeout=5s", "milliseconds"),
            ("connect_timeout=5s", "connect_timeout"),
            ("port=5433", "write each port after its host"),
            ("host=other", "write the host once"),
            ("hostaddr=10.0.0.1,10.0.0.2", "as many addresses"),
            ("frobnicate=1", "unknown option `frobnicate`: remove it"),
            ("frobnicate", "NAME=VALUE"),
            ("word@h/d", "%3F"),
        ] {
            let problem = format!("postgres://u:secret@h/d?{options}").parse::<Url>();
            let problem = problem.expect_err(options);
            assert!(problem.contains(advice), "{options}: {problem}");
            assert!(!problem.contains("secret"), "{problem}");
        }
    }

    #[test]
    fn the_modes_of_tls_mean_what_they_mean_in_libpq() {
        let file = || Roots::File("f".into());
        for (options, expected) in [
            ("", None),
            ("sslmode=disable", None),
            ("sslmode=require", Some(Verify::Nothing)),
            (
                "sslmode=require&sslrootcert=f",
                Some(Verify::Authority(file())),
            ),
            (
                "sslmode=verify-ca&sslrootcert=f",
                Some(Verify::Authority(file())),
            ),
            (
                "sslmode=verify-full&sslrootcert=f",
                Some(Verify::AuthorityAndHostName(file())),
            ),
            (
                "sslmode=verify-full&sslrootcert=system",
                Some(Verify::AuthorityAndHostName(Roots::System)),
            ),
        ] {
            let url = parse(&format!("postgres://u:p@h/d?{options}"));
            let mode = url.config_for(0).expect("a password").get_ssl_mode();
            let is_encrypted = mode == SslMode::Require;
            assert_eq!(is_encrypted, expected.is_some(), "{options}");
            assert_eq!(url.tls.map(|tls| tls.verify), expected, "{options}");
        }
    }

    #[test]
    fn the_configuration_of_a_host_has_everything_of_the_url() {
        let url = parse(
            "postgres://u:p@h1:1,h2:2,h3:3/d?hostaddr=10.0.0.1,10.0.0.2,10.0.0.3&options=o&application_name=a&connect_timeout=4\
             &tcp_user_timeout=5000&keepalives=1&keepalives_idle=6&keepalives_interval=7&keepalives_count=8&sslmode=require\
             &channel_binding=require&load_balance_hosts=random",
        );
        let third = url.config_for(2).expect("a password in the URL");
        let mut expected = Config::new();
        expected
            .host("h3")
            .hostaddr([10, 0, 0, 3].into())
            .port(3)
            .user("u")
            .password("p")
            .dbname("d")
            .options("o")
            .application_name("a")
            .ssl_mode(SslMode::Require)
            .connect_timeout(Duration::from_secs(4))
            .tcp_user_timeout(Duration::from_secs(5))
            .keepalives(true)
            .keepalives_idle(Duration::from_secs(6))
            .keepalives_interval(Duration::from_secs(7))
            .keepalives_retries(8)
            .target_session_attrs(TargetSessionAttrs::ReadWrite)
            .channel_binding(ChannelBinding::Require)
            .load_balance_hosts(LoadBalanceHosts::Random);
        assert_eq!(third, expected);
        let mut order = url.host_order();
        order.sort_unstable();
        assert_eq!(order, [0, 1, 2]);
        let url = parse("postgres://u:p@h,%2Fs/d?sslmode=require");
        let socket = url.config_for(1).expect("a password in the URL");
        assert_eq!(socket.get_ssl_mode(), SslMode::Disable);
    }
}
