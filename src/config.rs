//! Every setting, once: its name, default and help. The flag, the environment variable and the key in the configuration file
//! are derived from the name.

use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use clap::builder::{PossibleValuesParser, RangedU64ValueParser, TypedValueParser};
use hyper::Uri;
use hyper::header::HeaderValue;
use ipnet::IpNet;
use jiff::{SignedDuration, Span, SpanRelativeTo};
use tracing::level_filters::LevelFilter;

use crate::store::Location;

// A doc comment on a flattened struct would replace the help of the command that uses it.

#[derive(Debug, Clone, Args)]
pub(crate) struct StoreSettings {
    /// Location of plants and tokens: sqlite:PATH or postgres://USER@HOST/DATABASE
    #[arg(
        id = "store",
        long = "store",
        value_name = "URL",
        default_value = "sqlite:plantstore.db"
    )]
    pub(crate) location: Location,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct BodySettings {
    /// Maximum size of a request body, or of an imported line or row, in bytes
    #[arg(long, value_name = "N", default_value = "1048576", value_parser = up_to(64 << 20))]
    pub(crate) max_body_bytes: usize,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct WalSettings {
    /// Maximum size of the WAL of a SQLite store in bytes; while a reader prevents its reset, adds return 503 and import
    /// waits
    #[arg(long, value_name = "N", default_value = "1073741824", value_parser = clap::value_parser!(u64).range(1 << 20..=1 << 40))]
    pub(crate) max_wal_bytes: u64,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct TlsSettings {
    /// PEM file with a certificate and its chain; with it, the public listener uses TLS. Read again when it changes, and on
    /// SIGHUP
    #[arg(long, value_name = "FILE")]
    pub(crate) tls_cert: Option<PathBuf>,

    /// PEM file with the private key of the certificate
    #[arg(long, value_name = "FILE")]
    pub(crate) tls_key: Option<PathBuf>,

    /// Time limit for the TLS handshake
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = duration)]
    pub(crate) handshake_timeout: Duration,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct OpsSettings {
    /// Address of the private listener (status page, /healthz, /readyz, /metrics), or off
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9090", value_parser = ops_address)]
    pub(crate) ops_listen: AddressOrOff,

    /// Use TLS with the same certificate for the private listener
    #[arg(long)]
    pub(crate) ops_tls: bool,
}

#[derive(Debug, Clone, Args)]
#[expect(
    clippy::struct_field_names,
    reason = "the names of the flags follow from them"
)]
pub(crate) struct OidcSettings {
    /// URL of an OpenID Connect provider, as in the iss claim of its JWTs, which are accepted like tokens
    #[arg(long, value_name = "URL", value_parser = issuer)]
    pub(crate) oidc_issuer: Option<String>,

    /// Audience (aud claim) that JWTs must have
    #[arg(long, value_name = "AUDIENCE")]
    pub(crate) oidc_audience: Option<String>,

    /// Scope that JWTs must have, or off
    #[arg(long, value_name = "SCOPE", default_value = "plants:write", value_parser = scope_or_off)]
    pub(crate) oidc_scope: ScopeOrOff,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct Settings {
    /// Address of the public listener; :8080 means all IPv4 addresses
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8080", value_parser = address)]
    pub(crate) listen: SocketAddr,

    #[command(flatten)]
    pub(crate) tls: TlsSettings,

    #[command(flatten)]
    pub(crate) store: StoreSettings,

    #[command(flatten)]
    pub(crate) ops: OpsSettings,

    /// Host name with a dot under which the private listener is reached; several with commas
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub(crate) ops_host: Vec<String>,

    #[command(flatten)]
    pub(crate) body: BodySettings,

    /// Maximum number of open connections; beyond it, unauthenticated and idle ones are closed
    #[arg(long, value_name = "N", default_value = "16384", value_parser = up_to(1 << 20))]
    pub(crate) max_connections: usize,

    /// Maximum number of open connections from one address (IPv6: one /64 network); a quarter of all unless given
    #[arg(long, value_name = "N", value_parser = up_to(1 << 20))]
    pub(crate) max_connections_per_address: Option<usize>,

    /// Maximum number of plants waiting for the store; further adds return 503
    #[arg(long, value_name = "N", default_value = "16384", value_parser = up_to(1 << 20))]
    pub(crate) max_queue: usize,

    /// Maximum requests per second of a token that has no limit of its own; unlimited unless given
    #[arg(long, value_name = "PER_SECOND", value_parser = clap::value_parser!(NonZeroU32))]
    pub(crate) rate_limit: Option<NonZeroU32>,

    /// Maximum requests per second from one address without a valid token, or off
    #[arg(long, value_name = "PER_SECOND", default_value = "100", value_parser = limit_or_off)]
    pub(crate) auth_failure_limit: LimitOrOff,

    /// Origin of a web page that may send requests, such as `https://plants.example`; several with commas
    #[arg(long, value_name = "ORIGIN", value_parser = origin, value_delimiter = ',')]
    pub(crate) cors_origin: Vec<HeaderValue>,

    /// Network of reverse proxies, such as 10.0.0.0/8, whose X-Forwarded-For or Forwarded header names the client
    #[arg(long, value_name = "CIDR", value_parser = network, value_delimiter = ',')]
    pub(crate) trusted_proxy: Vec<IpNet>,

    /// Expect the PROXY protocol, version 2, from the trusted proxies, and no other connections
    #[arg(long)]
    pub(crate) proxy_protocol: bool,

    #[command(flatten)]
    pub(crate) oidc: OidcSettings,

    #[command(flatten)]
    pub(crate) wal: WalSettings,

    /// Number of PostgreSQL connections that add plants (one more reads tokens); SQLite always uses one
    #[arg(long, value_name = "N", default_value = "4", value_parser = up_to(64))]
    pub(crate) store_connections: usize,

    /// Time limit for receiving the request headers
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = duration)]
    pub(crate) header_timeout: Duration,

    /// Time limit for receiving the request body
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
    pub(crate) body_timeout: Duration,

    /// Time limit for a whole request, from its first byte to the last byte of the response
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    pub(crate) request_timeout: Duration,

    /// Time limit for an idle connection, and for a client that does not read its response
    #[arg(long, value_name = "TIME", default_value = "75s", value_parser = duration)]
    pub(crate) idle_timeout: Duration,

    /// Time limit of a commit, and of a token lookup; after it the request gets 503
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = duration)]
    pub(crate) store_timeout: Duration,

    /// Time limit for in-flight requests after SIGTERM or Ctrl-C
    #[arg(long, value_name = "TIME", default_value = "20s", value_parser = duration)]
    pub(crate) drain_timeout: Duration,

    /// Log level; info logs one line per request
    #[arg(long, value_name = "LEVEL", default_value = "info", value_parser = log_level())]
    pub(crate) log_level: LevelFilter,

    /// Names and values of all settings, without passwords, for the status page.
    #[arg(skip)]
    pub(crate) shown: Vec<(String, String)>,
}

/// An alias, because clap would take a field of type `Option` for an argument without a default.
pub(crate) type AddressOrOff = Option<SocketAddr>;

fn ops_address(text: &str) -> Result<AddressOrOff, String> {
    if text == "off" {
        return Ok(None);
    }
    let address = address(text).map_err(|expected| format!("{expected}, or off"))?;
    Ok(Some(address))
}

/// `localhost` is 127.0.0.1 without a lookup, and an address without a host is 0.0.0.0. Other host names are rejected: they
/// could resolve to a public address.
fn address(text: &str) -> Result<SocketAddr, String> {
    let full = match text.split_once(':') {
        Some(("localhost", port)) => format!("127.0.0.1:{port}"),
        Some(("", port)) => format!("0.0.0.0:{port}"),
        _ => text.to_owned(),
    };
    full.parse()
        .map_err(|_| "expected an address such as 127.0.0.1:8080, localhost:8080 or :8080".into())
}

pub(crate) type LimitOrOff = Option<NonZeroU32>;

fn limit_or_off(text: &str) -> Result<LimitOrOff, String> {
    match text {
        "off" => Ok(None),
        _ => match text.parse() {
            Ok(limit) => Ok(Some(limit)),
            Err(_) => Err("expected a number from 1, or off".to_owned()),
        },
    }
}

/// As browsers send it: scheme and host in lower case, a port unless it is the usual one, no path.
fn origin(text: &str) -> Result<HeaderValue, String> {
    let host = text
        .strip_prefix("https://")
        .or_else(|| text.strip_prefix("http://"));
    let is_host = |host: &str| {
        let is_allowed =
            |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9') || b"-._:[]".contains(&byte);
        !host.is_empty() && host.bytes().all(is_allowed)
    };
    let origin = host
        .filter(|host| is_host(host))
        .and_then(|_| text.parse().ok());
    origin.ok_or_else(|| {
        "expected an origin such as https://plants.example, without a path".to_owned()
    })
}

/// The issuer is compared with the one in JWTs, so it is used as it is written.
fn issuer(text: &str) -> Result<String, String> {
    if is_secure_url(text) && !text.contains(['@', '?', '#']) {
        Ok(text.to_owned())
    } else {
        Err("expected a URL such as https://login.example; http:// only for 127.0.0.1, [::1] and localhost".to_owned())
    }
}

/// True if what is read from the URL cannot be changed on the way: `https`, or this machine.
pub(crate) fn is_secure_url(text: &str) -> bool {
    let Ok(url) = text.parse::<Uri>() else {
        return false;
    };
    let is_local = matches!(url.host(), Some("127.0.0.1" | "[::1]" | "localhost"));
    match url.scheme_str() {
        Some("https") => url.host().is_some_and(|host| !host.is_empty()),
        Some("http") => is_local,
        _ => false,
    }
}

pub(crate) type ScopeOrOff = Option<String>;

/// RFC 6749, section 3.3.
fn scope_or_off(text: &str) -> Result<ScopeOrOff, String> {
    let is_allowed = |byte: u8| matches!(byte, b'!' | b'#'..=b'[' | b']'..=b'~');
    match text {
        "off" => Ok(None),
        _ if !text.is_empty() && text.bytes().all(is_allowed) => Ok(Some(text.to_owned())),
        _ => Err("expected one scope such as plants:write, or off".to_owned()),
    }
}

/// A network, or a single address.
fn network(text: &str) -> Result<IpNet, String> {
    let network = text
        .parse()
        .or_else(|_| text.parse::<IpAddr>().map(IpNet::from));
    network.map_err(|_| "expected a network such as 10.0.0.0/8, or an address".to_owned())
}

fn up_to(max: u64) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=max)
}

fn log_level() -> impl TypedValueParser<Value = LevelFilter> {
    PossibleValuesParser::new(["error", "warn", "info", "debug"])
        .map(|name| name.parse().expect("each of these is a level"))
}

/// A span of time such as `500ms`, `10s`, `1m30s` or `90d`; a day is 24 hours.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let hint = || "expected a time such as 500ms, 10s, 2m or 90d".to_owned();
    let span: Span = text.parse().map_err(|_| hint())?;
    let duration: SignedDuration = span
        .to_duration(SpanRelativeTo::days_are_24_hours())
        .map_err(|_| hint())?;
    match Duration::try_from(duration) {
        Ok(duration) if !duration.is_zero() => Ok(duration),
        _ => Err(hint()),
    }
}

/// The same, or 0.
pub(crate) fn duration_or_zero(text: &str) -> Result<Duration, String> {
    match text {
        "0" | "0s" => Ok(Duration::ZERO),
        _ => duration(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_may_leave_out_the_host_or_name_localhost() {
        for (text, expected) in [
            (":8080", Some("0.0.0.0:8080")),
            ("localhost:8080", Some("127.0.0.1:8080")),
            ("127.0.0.2:80", Some("127.0.0.2:80")),
            ("[::1]:80", Some("[::1]:80")),
            ("8080", None),
            (":", None),
            ("localhost", None),
            ("example.org:80", None),
            ("::1:80", None),
        ] {
            let parsed = address(text).ok().map(|address| address.to_string());
            assert_eq!(parsed.as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn durations_are_read_as_people_write_them() {
        let seconds = |text| duration(text).map(|duration| duration.as_secs_f64());
        assert_eq!(seconds("500ms"), Ok(0.5));
        assert_eq!(seconds("10s"), Ok(10.0));
        assert_eq!(seconds("1m30s"), Ok(90.0));
        assert_eq!(seconds("90d"), Ok(90.0 * 86400.0));
        for bad in [
            "",
            "0s",
            "-1s",
            "10",
            "1mo",
            "soon",
            "99999999999999999999s",
        ] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }
}
