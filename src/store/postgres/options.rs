//! The options of a database URL: those of libpq that are followed, and what to write in place of others.

use std::path::PathBuf;
use std::time::Duration;

use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

use crate::store::postgres::tls_options;

/// Options of libpq that are passed to the driver, which gives them the same meaning.
const DRIVER_OPTIONS: [&str; 9] = [
    "user",
    "dbname",
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

/// What the options of a URL say.
#[derive(Default)]
pub(super) struct Options {
    /// For the driver, as in the URL: about hosts and the login, and others.
    pub(super) of_hosts: Vec<String>,
    pub(super) of_all: Vec<String>,
    pub(super) has_host: bool,
    pub(super) tls: tls_options::Parser,
    pub(super) password_file: Option<PathBuf>,
    pub(super) fallback_application_name: Option<String>,
    pub(super) tcp_user_timeout: Option<Duration>,
}

impl Options {
    pub(super) fn parse(query: &str) -> Result<Self, String> {
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
            ("channel_binding", _) => self.of_all.push(format!("{name}={value}")),
            ("host", hosts) => {
                self.has_host = true;
                let hosts = hosts
                    .split(',')
                    .map(|host| format!("host={}", utf8_percent_encode(host, NON_ALPHANUMERIC)));
                self.of_hosts.extend(hosts);
            }
            ("keepalives_count", _) => self.of_all.push(format!("keepalives_retries={value}")),
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
            ("hostaddr" | "port" | "password", _) => self.of_hosts.push(format!("{name}={value}")),
            _ if DRIVER_OPTIONS.contains(&name) => self.of_all.push(format!("{name}={value}")),
            _ => return Ok(false),
        }
        Ok(true)
    }
}

/// A message that shows the name of an option. If the password contains `?`, its rest is not shown as one.
pub(super) fn without_password(query: &str, message: &str) -> String {
    if query.contains('@') {
        return "write `?` in a user name or a password as %3F".to_owned();
    }
    message.to_owned()
}

#[cfg(test)]
mod tests {
    use crate::store::postgres::url::Url;

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
}
