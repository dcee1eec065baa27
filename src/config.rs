//! Every setting, once: its name, its default and its help. From the name come the flag, the
//! variable and the key in the file. What has been parsed into `Settings` is valid.

use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use clap::builder::{PossibleValuesParser, RangedU64ValueParser, TypedValueParser};
use jiff::{SignedDuration, Span, SpanRelativeTo};
use tracing_subscriber::filter::LevelFilter;

use crate::store::Location;

/// Where the store is: for every command.
#[derive(Debug, Clone, Args)]
pub struct StoreSettings {
    /// Where plants and tokens are kept: sqlite:PATH or postgres://USER@HOST/DATABASE
    #[arg(long, value_name = "URL", default_value = "sqlite:plantstore.db")]
    pub store: Location,
}

/// How large a plant may be: for whatever takes plants.
#[derive(Debug, Clone, Args)]
pub struct BodySettings {
    /// The largest request body, in bytes; for import, the largest line or row
    #[arg(long, value_name = "N", default_value = "1048576", value_parser = up_to(64 << 20))]
    pub max_body_bytes: usize,
}

/// How long the WAL of a SQLite store may become: for whatever adds plants.
#[derive(Debug, Clone, Args)]
pub struct WalSettings {
    /// The largest WAL of a SQLite store, in bytes; while a reader keeps it from being reset, adds get 503 and import waits
    #[arg(long, value_name = "N", default_value = "1073741824", value_parser = wal_bytes())]
    pub max_wal_bytes: u64,
}

/// What `serve` can be told.
#[derive(Debug, Clone, Args)]
pub struct Settings {
    /// The address of the public listener
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8080")]
    pub listen: SocketAddr,

    #[command(flatten)]
    pub store: StoreSettings,

    /// The address of the private listener with /healthz, /readyz and /metrics; or off
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9090")]
    pub ops_listen: OpsListen,

    #[command(flatten)]
    pub body: BodySettings,

    /// The most connections at a time; more wait to be accepted
    #[arg(long, value_name = "N", default_value = "1024", value_parser = up_to(1 << 20))]
    pub max_connections: usize,

    /// The most plants waiting for the store; more are answered 503
    #[arg(long, value_name = "N", default_value = "1024", value_parser = up_to(1 << 20))]
    pub max_queue: usize,

    #[command(flatten)]
    pub wal: WalSettings,

    /// How many connections to PostgreSQL add plants, and one more reads tokens; SQLite has one
    #[arg(long, value_name = "N", default_value = "4", value_parser = up_to(64))]
    pub store_connections: usize,

    /// How long the head of a request may take to arrive
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = duration)]
    pub header_timeout: Duration,

    /// How long the body of a request may take to arrive
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
    pub body_timeout: Duration,

    /// How long a connection may be idle, or a client take nothing of its answer
    #[arg(long, value_name = "TIME", default_value = "75s", value_parser = duration)]
    pub idle_timeout: Duration,

    /// How long an add waits for the store before it is answered 503
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = duration)]
    pub store_timeout: Duration,

    /// How long what is in flight may take to end after SIGTERM or ctrl-c
    #[arg(long, value_name = "TIME", default_value = "20s", value_parser = duration)]
    pub drain_timeout: Duration,

    /// How much is logged: error, warn, info (a line a request), debug
    #[arg(long, value_name = "LEVEL", default_value = "info", value_parser = log_level())]
    pub log_level: LevelFilter,
}

/// Where health and metrics can be asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpsListen {
    /// At this address.
    On(SocketAddr),
    /// Nowhere.
    Off,
}

impl FromStr for OpsListen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "off" => Ok(Self::Off),
            address => address
                .parse()
                .map(Self::On)
                .map_err(|_| "expected an address such as 127.0.0.1:9090, or off".to_owned()),
        }
    }
}

/// A whole number from 1 on.
fn up_to(max: u64) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=max)
}

/// From 1 MiB to 1 TiB.
fn wal_bytes() -> RangedU64ValueParser {
    RangedU64ValueParser::new().range(1 << 20..=1 << 40)
}

fn log_level() -> impl TypedValueParser<Value = LevelFilter> {
    PossibleValuesParser::new(["error", "warn", "info", "debug"])
        .map(|name| name.parse().expect("each of these is a level"))
}

/// A name that can stand in a log and on a command line as it is.
pub fn token_name(text: &str) -> Result<String, String> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._@-".contains(c);
    if (1..=64).contains(&text.len()) && text.chars().all(allowed) {
        Ok(text.to_owned())
    } else {
        Err("expected 1 to 64 letters, digits, and . _ @ -".to_owned())
    }
}

/// A span of time such as `500ms`, `10s`, `1m30s` or `90d`; a day is 24 hours.
pub fn duration(text: &str) -> Result<Duration, String> {
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

#[cfg(test)]
mod tests {
    use super::*;

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
