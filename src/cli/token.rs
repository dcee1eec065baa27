//! `plantstore token create`, `list` and `revoke`.

use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use jiff::Timestamp;
use serde::Serialize;

use crate::cli::open_or_create;
use crate::cli::terminal::{json_line, print, print_durably, table};
use crate::config::{StoreSettings, duration};
use crate::store::{Mode, Store, TokenRecord};
use crate::token::{Token, parse_name};

#[derive(Debug, Subcommand)]
pub(super) enum TokenCommand {
    Create(Create),
    List(List),
    Revoke(Revoke),
}

/// Create a token and print it; it cannot be shown again
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  plantstore token create ci
  plantstore token create ci --expires-in 90d --rate-limit 100 > ci.token")]
pub(super) struct Create {
    /// Unique name: 1 to 64 letters, digits and . _ @ -
    #[arg(value_parser = parse_name)]
    name: String,

    /// Time until the token expires, such as 90d or 12h [default: never]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    expires_in: Option<Duration>,

    /// Maximum requests per second on each node [default: unlimited]
    #[arg(long, value_name = "PER_SECOND", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    rate_limit: Option<u32>,

    #[command(flatten)]
    store: StoreSettings,
}

/// List tokens with their state; the tokens themselves are never shown
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  plantstore token list\n  plantstore token list --json")]
pub(super) struct List {
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    store: StoreSettings,
}

/// Revoke a token permanently; every node rejects it within a second
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  plantstore token revoke ci")]
pub(super) struct Revoke {
    /// Name of the token
    #[arg(value_parser = parse_name)]
    name: String,

    #[command(flatten)]
    store: StoreSettings,
}

impl TokenCommand {
    pub(super) fn run(self) -> anyhow::Result<()> {
        match self {
            Self::Create(create) => create.run(),
            Self::List(list) => list.run(),
            Self::Revoke(revoke) => revoke.run(),
        }
    }
}

impl Create {
    fn run(self) -> anyhow::Result<()> {
        let name = &self.name;
        let expires_at = self
            .expires_in
            .map(|time| Timestamp::now().checked_add(time));
        let expires_at = expires_at.transpose().context("--expires-in is too long")?;
        let token = Token::generate().context("cannot get random numbers")?;
        let mut store = open_or_create(&self.store.location, Mode::Create)?;
        if store.tokens()?.iter().any(|other| *other.name == **name) {
            bail!("a token named {name} already exists; choose another name");
        }
        // Printed first: a token that was printed and not stored is useless, but one that was stored and not printed would be
        // valid, and its owner unknown. The error is not passed on as it is, because a closed pipe is not an error of other
        // commands.
        if let Err(error) = print_durably(&format!("{}\n", token.reveal())) {
            bail!("cannot write to standard output: {error}; no token was created");
        }
        let record = TokenRecord {
            expires_at,
            rate_limit: self.rate_limit,
            ..TokenRecord::new(name, token.digest())
        };
        let created = store
            .create_token(&record)
            .context("do not use the token that was printed, it may be invalid")?;
        if !created {
            bail!(
                "another token named {name} was created at the same time; the token that was printed is invalid; choose \
                 another name"
            );
        }
        Ok(())
    }
}

impl List {
    fn run(self) -> anyhow::Result<()> {
        let tokens = Store::open(&self.store.location, Mode::Read)?.tokens()?;
        if self.json {
            let lines = tokens.iter().map(|token| {
                json_line(&Listed {
                    token,
                    state: state(token),
                })
            });
            return print(&lines.collect::<Result<String, _>>()?);
        }
        let head = [
            "NAME",
            "STATE",
            "CREATED",
            "LAST USED",
            "EXPIRES",
            "RATE LIMIT",
        ];
        print(&table(head, tokens.iter().map(row)))
    }
}

impl Revoke {
    fn run(self) -> anyhow::Result<()> {
        let name = self.name;
        match Store::open(&self.store.location, Mode::Write)?.revoke_token(&name)? {
            Some(true) => eprintln!("{name} is revoked"),
            Some(false) => eprintln!("{name} was already revoked"),
            None => {
                bail!("there is no token named {name}; `plantstore token list` shows the names")
            }
        }
        Ok(())
    }
}

#[derive(Serialize)]
struct Listed<'a> {
    #[serde(flatten)]
    token: &'a TokenRecord,
    state: &'static str,
}

fn row(token: &TokenRecord) -> [String; 6] {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let time = |time: Option<Timestamp>| {
        or_dash(time.map(|time| time.strftime("%Y-%m-%d %H:%M UTC").to_string()))
    };
    [
        token.name.to_string(),
        state(token).to_owned(),
        time(Some(token.created_at)),
        time(token.last_used_at),
        time(token.expires_at),
        or_dash(token.rate_limit.map(|limit| format!("{limit}/s"))),
    ]
}

fn state(token: &TokenRecord) -> &'static str {
    match (token.revoked_at, token.expires_at) {
        (Some(_), _) => "revoked",
        (None, Some(end)) if end <= Timestamp::now() => "expired",
        _ => "active",
    }
}
