//! `plantstore status`: the numbers of the status page, in a terminal.

use std::io::{self, Write};
use std::time::Duration;

use anyhow::{Context, anyhow};
use clap::Args;
use console::Term;
use tokio::time::sleep;

use crate::cli::terminal::{cut, print, printable};
use crate::http_client::HttpClient;

const WATCH_INTERVAL: Duration = Duration::from_secs(1);

/// Show what a running server is doing: the numbers of its status page
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  plantstore status
  plantstore status --watch
  plantstore status https://node1.example:9090")]
pub(super) struct Status {
    /// URL of the private listener (--ops-listen) of the server
    #[arg(value_name = "URL", default_value = "http://127.0.0.1:9090", value_parser = url)]
    url: String,

    /// Show the numbers again every second, until Ctrl-C
    #[arg(long)]
    watch: bool,
}

fn url(text: &str) -> Result<String, &'static str> {
    let is_url = ["http://", "https://"]
        .iter()
        .any(|scheme| text.starts_with(scheme));
    if is_url && !text.contains(['@', '?', '#']) {
        Ok(text.trim_end_matches('/').to_owned())
    } else {
        Err("expected a URL such as http://127.0.0.1:9090")
    }
}

impl Status {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let client = HttpClient::new(self.url.starts_with("https:"));
        let client = client.map_err(|problem| anyhow!(problem))?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("cannot start a runtime")?;
        runtime.block_on(async {
            if !self.watch {
                return print(&self.read(&client).await?);
            }
            let mut is_first = true;
            loop {
                let text = self.read(&client).await;
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

    async fn read(&self, client: &HttpClient) -> anyhow::Result<String> {
        let url = format!("{}/status.txt", self.url);
        let body = client.get(&url, "text/plain").await;
        let body = body.map_err(|cause| {
            anyhow!("{url}: {cause}; is the server running, and is that its --ops-listen?")
        })?;
        let lines = String::from_utf8_lossy(&body);
        Ok(lines.lines().map(|line| printable(line) + "\n").collect())
    }
}

/// Replaces what the terminal shows; without a terminal, the texts follow each other.
fn redraw(text: &str, is_first: bool) -> anyhow::Result<()> {
    let terminal = Term::stdout();
    if !terminal.is_term() {
        return print(&format!("{text}\n"));
    }
    let (rows, columns) = terminal.size();
    let lines = text.lines().take(usize::from(rows).saturating_sub(1));
    let lines = lines.map(|line| format!("{}\x1b[K\n", cut(line, columns.into())));
    let clear = if is_first { "\x1b[2J" } else { "" };
    let screen = format!("{clear}\x1b[H{}\x1b[J", lines.collect::<String>());
    let mut stdout = io::stdout().lock();
    stdout
        .write_all(screen.as_bytes())
        .and_then(|()| stdout.flush())
        .context("cannot write to standard output")
}
