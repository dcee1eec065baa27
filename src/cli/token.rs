//! `plantstore token create | list | revoke`, beside a running server or without one.

use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use jiff::Timestamp;
use serde::Serialize;

use crate::cli::terminal::{print, print_durably, table};
use crate::config::{StoreSettings, duration, token_name};
use crate::store::{Mode, NewToken, Store, TokenRecord};
use crate::token::Token;

#[derive(Debug, Subcommand)]
pub(super) enum TokenCommand {
    /// Make a token and print it, this once, on standard output
    Create(Create),
    /// List the tokens: what they are called and since when, never what they are
    List(List),
    /// Revoke a token for good; within a second no server takes it any more
    Revoke(Revoke),
}

#[derive(Debug, Args)]
pub(super) struct Create {
    /// What to call it: unique, letters, digits and . _ @ -
    #[arg(value_parser = token_name)]
    name: String,

    /// When it stops working, such as 90d or 12h; never, unless given
    #[arg(long, value_name = "TIME", value_parser = duration)]
    expires_in: Option<Duration>,

    /// How many requests a second it may make on each server; as many as it likes, unless given
    #[arg(long, value_name = "PER_SECOND", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    rate_limit: Option<u32>,

    #[command(flatten)]
    store: StoreSettings,
}

#[derive(Debug, Args)]
pub(super) struct List {
    /// One JSON object a line instead of a table
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    store: StoreSettings,
}

#[derive(Debug, Args)]
pub(super) struct Revoke {
    /// The name it was created with
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
        let expires_at = match self.expires_in {
            Some(time) => Some(
                Timestamp::now()
                    .checked_add(time)
                    .context("that is too far away")?,
            ),
            None => None,
        };
        if Token::parse(&self.name).is_some() {
            bail!("this is a token itself, not a name for one; keep it secret");
        }
        let token = Token::generate().context("cannot get random numbers")?;
        let mut store = Store::open(&self.store.store, Mode::Create)?;
        let is_taken = |other: &TokenRecord| *other.name == *self.name;
        if store.tokens()?.iter().any(is_taken) {
            bail!(
                "there is a token named {} already; choose another name",
                self.name
            );
        }
        // Printed first: a token that was printed and not stored is of no use to anyone, but one that was stored and not
        // printed would be valid, and nobody could tell who has it. The error is not passed on as it is, because a closed
        // pipe is not an error of other commands.
        if let Err(error) = print_durably(&format!("{}\n", token.reveal())) {
            bail!("cannot write to standard output: {error}; no token was created");
        }
        let created = store
            .create_token(&NewToken {
                name: &self.name,
                digest: token.digest(),
                expires_at,
                rate_limit: self.rate_limit,
            })
            .context("do not use the token that was printed, it may be invalid")?;
        if !created {
            bail!(
                "another token named {} was created meanwhile; the token that was printed is invalid; choose another name",
                self.name
            );
        }
        Ok(())
    }
}

impl List {
    fn run(self) -> anyhow::Result<()> {
        let tokens = Store::open(&self.store.store, Mode::Read)?.tokens()?;
        let mut text = String::new();
        if self.json {
            for token in &tokens {
                text += &serde_json::to_string(&Listed::from(token))?;
                text.push('\n');
            }
        } else {
            let head = [
                "NAME",
                "STATE",
                "CREATED",
                "LAST USED",
                "EXPIRES",
                "RATE LIMIT",
            ];
            let rows = tokens.iter().map(row);
            text = table(
                std::iter::once(head.map(str::to_owned))
                    .chain(rows)
                    .collect(),
            );
        }
        print(&text)
    }
}

impl Revoke {
    fn run(self) -> anyhow::Result<()> {
        let name = self.name;
        if Token::parse(&name).is_some() {
            bail!(
                "this is a token itself, not the name of one; `plantstore token list` shows the names"
            );
        }
        match Store::open(&self.store.store, Mode::Write)?.revoke_token(&name)? {
            Some(true) => eprintln!("{name} is revoked"),
            Some(false) => eprintln!("{name} was revoked before"),
            None => bail!("there is no token named {name}; `plantstore token list` shows them"),
        }
        Ok(())
    }
}

/// A token in JSON.
#[derive(Serialize)]
struct Listed<'a> {
    name: &'a str,
    state: &'static str,
    created_at: String,
    last_used_at: Option<String>,
    expires_at: Option<String>,
    revoked_at: Option<String>,
    rate_limit: Option<u32>,
}

impl<'a> From<&'a TokenRecord> for Listed<'a> {
    fn from(token: &'a TokenRecord) -> Self {
        Self {
            name: &token.name,
            state: state(token),
            created_at: token.created_at.to_string(),
            last_used_at: token.last_used_at.map(|time| time.to_string()),
            expires_at: token.expires_at.map(|time| time.to_string()),
            revoked_at: token.revoked_at.map(|time| time.to_string()),
            rate_limit: token.rate_limit,
        }
    }
}

fn row(token: &TokenRecord) -> [String; 6] {
    let time = |time: Option<Timestamp>| match time {
        Some(time) => time.strftime("%Y-%m-%d %H:%M UTC").to_string(),
        None => "-".to_owned(),
    };
    [
        token.name.to_string(),
        state(token).to_owned(),
        time(Some(token.created_at)),
        time(token.last_used_at),
        time(token.expires_at),
        token
            .rate_limit
            .map_or_else(|| "-".to_owned(), |limit| format!("{limit}/s")),
    ]
}

fn state(token: &TokenRecord) -> &'static str {
    match (token.revoked_at, token.expires_at) {
        (Some(_), _) => "revoked",
        (None, Some(end)) if end <= Timestamp::now() => "expired",
        _ => "active",
    }
}
