//! `plantstore status`: the numbers of the status page, in a terminal.

use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use clap::Args;
use console::Term;
use hyper::Uri;
use tokio::time::sleep;

use crate::cli::terminal::{cut, print, printable};
use crate::config::OpsSettings;
use crate::http_client::HttpClient;

const WATCH_INTERVAL: Duration = Duration::from_secs(1);

const EXPECTED: &str = "expected a URL such as http://127.0.0.1:9090";

/// Show what a running server is doing: the numbers of its status page
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  plantstore status
  plantstore status --watch
  plantstore status https://node1.example:9090")]
pub(super) struct Status {
    /// URL or address of the private listener; from --ops-listen and --ops-tls unless given
    #[arg(value_name = "URL", value_parser = url)]
    url: Option<String>,

    /// Show the numbers again every second, until Ctrl-C
    #[arg(long)]
    watch: bool,

    #[command(flatten)]
    ops: OpsSettings,
}

fn url(text: &str) -> Result<String, &'static str> {
    let url = match text.split_once("://") {
        None => format!("http://{text}"),
        Some(("http" | "https", _)) => text.to_owned(),
        Some(_) => return Err(EXPECTED),
    };
    let is_complete = url
        .parse::<Uri>()
        .is_ok_and(|url| url.host().is_some_and(|host| !host.is_empty()));
    if is_complete && !url.contains(['@', '?', '#']) {
        Ok(url.trim_end_matches('/').to_owned())
    } else {
        Err(EXPECTED)
    }
}

impl OpsSettings {
    /// The private listener of a server on this machine with these settings.
    fn url(&self) -> anyhow::Result<String> {
        let Some(mut address) = self.ops_listen else {
            bail!("the private listener is off (--ops-listen off)");
        };
        if address.ip().is_unspecified() {
            address.set_ip(match address.ip() {
                IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
                IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
            });
        }
        let scheme = if self.ops_tls { "https" } else { "http" };
        Ok(format!("{scheme}://{address}"))
    }
}

impl Status {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let url = self.url.map_or_else(|| self.ops.url(), Ok)?;
        let client = HttpClient::new(url.starts_with("https:"));
        let client = client.map_err(|problem| anyhow!(problem))?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("cannot start a runtime")?;
        runtime.block_on(async {
            if !self.watch {
                return print(&read(&client, &url).await?);
            }
            let mut is_first = true;
            loop {
                let text = read(&client, &url).await;
                // The first error is probably in the URL; later ones are those of a server that restarts.
                let text = match text {
                    Err(error) if is_first => return Err(error),
                    text => text.unwrap_or_else(|error| format!("{error:#}\n")),
                };
                redraw(&text, is_first)?;
                is_first = false;
                sleep(WATCH_INTERVAL).await;
            }
        })
    }
}

async fn read(client: &HttpClient, url: &str) -> anyhow::Result<String> {
    let url = format!("{url}/status.txt");
    let body = client.get(&url, "text/plain").await;
    let body = body.map_err(|cause| {
        anyhow!(
            "cannot read {url}, which is expected on the --ops-listen of a running server: {cause}"
        )
    })?;
    let lines = String::from_utf8_lossy(&body);
    Ok(lines.lines().map(|line| printable(line) + "\n").collect())
}

/// Replaces what the terminal shows; without a terminal, the texts follow each other.
fn redraw(text: &str, is_first: bool) -> anyhow::Result<()> {
    let terminal = Term::stdout();
    if !terminal.is_term() {
        return print(&format!("{text}\n"));
    }
    let (rows, columns) = terminal.size();
    let lines = fit(text, rows.into(), columns.into());
    let lines = lines.iter().map(|line| format!("{line}\x1b[K\n"));
    let clear = if is_first { "\x1b[2J" } else { "" };
    let screen = format!("{clear}\x1b[H{}\x1b[J", lines.collect::<String>());
    let mut stdout = io::stdout().lock();
    stdout
        .write_all(screen.as_bytes())
        .and_then(|()| stdout.flush())
        .context("cannot write to standard output")
}

/// The lines that a terminal of this size can show above its cursor. If they are not all, the last one says so.
fn fit(text: &str, rows: usize, columns: usize) -> Vec<String> {
    let mut lines: Vec<_> = text.lines().map(|line| cut(line, columns)).collect();
    let room = rows.saturating_sub(1).max(1);
    if lines.len() > room {
        let hidden = lines.len() - (room - 1);
        lines.truncate(room - 1);
        let hidden = format!("({hidden} more lines; enlarge the terminal to see them)");
        lines.push(cut(&hidden, columns));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_url() {
        for (text, expected) in [
            ("http://127.0.0.1:9090/", "http://127.0.0.1:9090"),
            ("https://node1.example:9090", "https://node1.example:9090"),
            ("127.0.0.1:9090", "http://127.0.0.1:9090"),
            ("[::1]:9090", "http://[::1]:9090"),
        ] {
            assert_eq!(url(text).as_deref(), Ok(expected));
        }
        for invalid in [
            "",
            "ftp://x",
            "http://",
            "http://user:secret@x",
            "http://x?y",
            ":9090",
        ] {
            assert_eq!(url(invalid), Err(EXPECTED), "{invalid}");
        }
    }

    #[test]
    fn without_a_url_the_settings_name_the_listener() {
        for (listen, ops_tls, expected) in [
            ("127.0.0.1:9090", false, "http://127.0.0.1:9090"),
            ("0.0.0.0:9091", true, "https://127.0.0.1:9091"),
            ("[::]:9090", false, "http://[::1]:9090"),
        ] {
            let ops_listen = Some(listen.parse().expect("an address"));
            let settings = OpsSettings {
                ops_listen,
                ops_tls,
            };
            assert_eq!(settings.url().expect("a URL"), expected);
        }
    }

    #[test]
    fn a_small_terminal_says_that_there_are_more_lines() {
        assert_eq!(fit("a\nb\nc", 4, 80), ["a", "b", "c"]);
        let small = fit("a\nb\nc\nd", 4, 80);
        assert_eq!(small[..2], ["a", "b"]);
        assert!(small[2].starts_with("(2 more lines"), "{small:?}");
        assert_eq!(fit("a\nb", 1, 80).len(), 1);
    }
}
