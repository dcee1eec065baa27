//! `postgres://…`: a URL with the meaning that it has in libpq. The password is never shown.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use tokio_postgres::Config;
use tokio_postgres::config::{Host, LoadBalanceHosts, SslMode, TargetSessionAttrs};

use crate::store::error::{OpenError, chain};
use crate::store::postgres::options::{Options, without_password};
use crate::store::postgres::password::{self, Login};
use crate::store::postgres::tls_options::TlsOptions;
use crate::user::account_name;

/// Displayed without user and password.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Url {
    /// With the hosts and the password, as they are in the URL.
    complete: Config,
    /// What all hosts have in common, without a password; `config_for` has that of one host.
    config: Config,
    pub(super) tls: Option<TlsOptions>,
    password_file: Option<PathBuf>,
}

const PORT: u16 = 5432;

/// How long a host is waited for until it accepts a connection, unless the URL has `connect_timeout`.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

impl FromStr for Url {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (address, query) = text.split_once('?').unwrap_or((text, ""));
        let (scheme, after_scheme) = address.split_once("://").unwrap_or((address, ""));
        let (login, host) = match after_scheme.rsplit_once('@') {
            Some((login, host)) => (Some(login), host),
            None => (None, after_scheme),
        };
        // These would end the password early, and the rest of it would become the name of a host or of a database, which are shown.
        if login.is_some_and(|login| login.contains(['@', '/'])) {
            return Err("write `@` and `/` in a user name or a password as %40 and %2F".into());
        }
        let options = Options::parse(query)?;
        if options.has_host && !host.is_empty() && !host.starts_with('/') {
            return Err("write the host once: before the database, or as the option host".into());
        }
        let parse = |address: &str, options: &[String]| {
            let config = format!("{address}?{}", options.join("&")).parse();
            config.map_err(|error: tokio_postgres::Error| without_password(query, &chain(&error)))
        };
        let all = [&options.of_all[..], &options.of_hosts].concat();
        let complete = parse(address, &all)?;
        check_hosts(&complete)?;
        let user = login.map(|login| login.split(':').next().unwrap_or_default());
        let user = user.map(|user| format!("{user}@")).unwrap_or_default();
        let database = host.split_once('/').map_or("", |(_, database)| database);
        let mut config = parse(&format!("{scheme}://{user}/{database}"), &options.of_all)?;
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
            complete,
            config,
            tls,
            password_file,
        })
    }
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
        self.complete.get_hosts().len()
    }

    /// Such as `database1:5432`.
    pub(super) fn host_name(&self, host: usize) -> String {
        match &self.complete.get_hosts()[host] {
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

    /// The time limit for the login to one host, if the URL has one.
    pub(super) fn connect_timeout(&self) -> Option<Duration> {
        self.complete.get_connect_timeout().copied()
    }

    /// How long the other hosts are waited for after one has responded.
    pub(super) fn others_timeout(&self) -> Duration {
        self.connect_timeout().unwrap_or(CONNECT_TIMEOUT)
    }

    /// True if what is sent to a host on another machine is not encrypted.
    pub(super) fn is_in_clear_text(&self) -> bool {
        self.tls.is_none() && (0..self.hosts_len()).any(|host| !self.is_on_this_machine(host))
    }

    fn is_on_this_machine(&self, host: usize) -> bool {
        let Host::Tcp(name) = &self.complete.get_hosts()[host] else {
            return true;
        };
        let address = self.complete.get_hostaddrs().get(host).copied();
        match address.or_else(|| name.parse().ok()) {
            Some(address) => address.to_canonical().is_loopback(),
            None => name.eq_ignore_ascii_case("localhost"),
        }
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
        let mut config = self.config.clone();
        match &self.complete.get_hosts()[index] {
            Host::Tcp(name) => config.host(name),
            // As in libpq, there is no TLS over a Unix socket.
            Host::Unix(path) => config.host_path(path).ssl_mode(SslMode::Disable),
        };
        config.port(self.port(index));
        if let Some(address) = self.complete.get_hostaddrs().get(index) {
            config.hostaddr(*address);
        }
        if let Some(password) = self.password_for(index)? {
            config.password(password);
        }
        Ok(config)
    }

    fn password_for(&self, index: usize) -> Result<Option<Vec<u8>>, OpenError> {
        let user = self.config.get_user().map(str::to_owned);
        let user = user.or_else(account_name).unwrap_or_default();
        let login = Login {
            host: &self.complete.get_hosts()[index],
            port: self.port(index),
            database: self.config.get_dbname().unwrap_or(&user),
            user: &user,
        };
        let in_url = self.complete.get_password();
        password::find(in_url, self.password_file.as_deref(), &login)
    }

    fn port(&self, index: usize) -> u16 {
        let ports = self.complete.get_ports();
        ports.get(index).or(ports.first()).copied().unwrap_or(PORT)
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

    #[test]
    fn what_is_sent_to_another_machine_without_tls_is_in_clear_text() {
        for (url, expected) in [
            ("postgres://u@db.example/d", true),
            ("postgres://u@db.example/d?sslmode=disable", true),
            ("postgres://u@db.example/d?sslmode=require", false),
            ("postgres://u@10.0.0.1/d", true),
            ("postgres://u@127.0.0.1,10.0.0.1/d", true),
            ("postgres://u@127.0.0.2/d", false),
            ("postgres://u@[::1]/d", false),
            ("postgres://u@LocalHost/d", false),
            ("postgres://u@localhost/d?hostaddr=10.0.0.1", true),
            ("postgres://u@db.example/d?hostaddr=127.0.0.1", false),
            ("postgres://u@%2Fvar%2Frun%2Fpostgresql/d", false),
        ] {
            assert_eq!(parse(url).is_in_clear_text(), expected, "{url}");
        }
    }
}
