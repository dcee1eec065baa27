//! `plantstore token create`, `list`, `rotate` and `revoke`.

use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use clap::{Args, Subcommand};
use jiff::{SignedDuration, Timestamp};
use serde::Serialize;

use crate::cli::open_or_create;
use crate::cli::terminal::{json_line, print, print_durably, print_message, table};
use crate::config::{StoreSettings, duration, duration_or_zero};
use crate::store::{Mode, PreviousSecret, Store, TokenHistory, TokenRecord};
use crate::token::{SUBJECT_PREFIX, Token, TokenDigest, parse_existing_name, parse_name};
use crate::user::current_user;

#[derive(Debug, Subcommand)]
pub(super) enum TokenCommand {
    Create(Create),
    List(List),
    Rotate(Rotate),
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

    /// Maximum requests per second on each node [default: the server's --rate-limit]
    // With another id than the setting of the server, which would become its value.
    #[arg(id = "own_rate_limit", long = "rate-limit", value_name = "PER_SECOND", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    rate_limit: Option<u32>,

    #[command(flatten)]
    store: StoreSettings,
}

/// List tokens with their state; the tokens themselves are never shown
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  plantstore token list
  plantstore token list --json
  plantstore token list --history")]
pub(super) struct List {
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,

    /// List what was done to tokens, when and by which user of the system
    #[arg(long)]
    history: bool,

    #[command(flatten)]
    store: StoreSettings,
}

/// Give a token a new secret and print it; the old one stays valid for a while
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  plantstore token rotate ci > ci.token
  plantstore token rotate ci --overlap 7d --expires-in 90d > ci.token")]
pub(super) struct Rotate {
    /// Name of the token
    #[arg(value_parser = parse_name)]
    name: String,

    /// Time for which the old secret stays valid; 0 ends it at once
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = duration_or_zero)]
    overlap: Duration,

    /// Time until the token expires [default: as long as it was valid before]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    expires_in: Option<Duration>,

    /// Also if the secret before the last one is still valid; it ends at once
    #[arg(long)]
    force: bool,

    #[command(flatten)]
    store: StoreSettings,
}

/// Revoke a token permanently; every node rejects it within a second
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  plantstore token revoke ci
  plantstore token revoke oidc:alice@login.example")]
pub(super) struct Revoke {
    /// Name of the token, or of a subject of the identity provider
    #[arg(value_parser = parse_existing_name)]
    name: String,

    #[command(flatten)]
    store: StoreSettings,
}

impl TokenCommand {
    pub(super) fn run(self) -> anyhow::Result<()> {
        match self {
            Self::Create(create) => create.run(),
            Self::List(list) => list.run(),
            Self::Rotate(rotate) => rotate.run(),
            Self::Revoke(revoke) => revoke.run(),
        }
    }
}

impl Create {
    fn run(self) -> anyhow::Result<()> {
        let name = &self.name;
        let now = now();
        let expires_at = self.expires_in.map(|time| now.checked_add(time));
        let expires_at = expires_at.transpose().context("--expires-in is too long")?;
        let token = Token::generate().context("cannot get random numbers")?;
        let mut store = open_or_create(&self.store.location, Mode::Create)?;
        let is_taken = |other: &TokenRecord| *other.name == **name && other.revoked_at.is_none();
        if store.tokens()?.iter().any(is_taken) {
            bail!(
                "a token named {name} already exists; choose another name, or give it a new secret with `plantstore token \
                 rotate {name}`"
            );
        }
        print_token(&token, "no token was created")?;
        let record = TokenRecord {
            created_at: now,
            expires_at,
            rate_limit: self.rate_limit,
            ..TokenRecord::new(name, token.digest())
        };
        let created = store
            .create_token(&record, &current_user())
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

/// Prints a token before it is stored: one that was printed and not stored is useless, but one that was stored and not printed would
/// be valid, and its owner unknown. The error is not passed on as it is, because a closed pipe is not an error of other commands.
fn print_token(token: &Token, consequence: &str) -> anyhow::Result<()> {
    print_durably(&format!("{}\n", token.reveal()))
        .map_err(|error| anyhow!("cannot write to standard output: {error}; {consequence}"))
}

impl Rotate {
    fn run(self) -> anyhow::Result<()> {
        let name = &self.name;
        let mut store = Store::open(&self.store.location, Mode::Write)?;
        let before = store
            .tokens()?
            .into_iter()
            .find(|token| *token.name == **name);
        let Some(before) = before else {
            bail!("there is no token named {name}; `plantstore token list` shows the names");
        };
        let now = now();
        if before.revoked_at.is_some() {
            bail!("{name} is revoked; create a new token with `plantstore token create {name}`");
        }
        let valid_until = before.previous_secret.map(|secret| secret.expires_at);
        if let Some(end) = valid_until.filter(|end| *end > now && !self.force) {
            bail!(
                "{name} was rotated before, and its secret of that time is valid until {end}; wait, or end it at once with --force"
            );
        }
        let token = Token::generate().context("cannot get random numbers")?;
        let rotated = self.rotated(&before, &token, now)?;
        print_token(&token, "the token was not rotated")?;
        let is_rotated = store
            .rotate_token(&before, &rotated, &current_user())
            .context("do not use the token that was printed, it may be invalid")?;
        if !is_rotated {
            bail!(
                "{name} was rotated or revoked at the same time; the token that was printed is invalid; run the command again"
            );
        }
        let previous = rotated.previous_secret.map(|secret| secret.expires_at);
        match previous.filter(|end| *end > now) {
            Some(end) => print_message(format_args!(
                "the previous secret of {name} is valid until {end}"
            )),
            None => print_message(format_args!(
                "the previous secret of {name} is not valid any more"
            )),
        }
        Ok(())
    }

    fn rotated(
        &self,
        before: &TokenRecord,
        token: &Token,
        now: Timestamp,
    ) -> anyhow::Result<TokenRecord> {
        let lifetime = || {
            let since = before.rotated_at.unwrap_or(before.created_at);
            before.expires_at.map(|end| end.duration_since(since))
        };
        let expires_in = match self.expires_in {
            Some(time) => Some(SignedDuration::try_from(time).context("--expires-in is too long")?),
            None => lifetime(),
        };
        let expires_at = expires_in.map(|time| now.checked_add(time)).transpose();
        let previous_end = now
            .checked_add(self.overlap)
            .context("--overlap is too long")?;
        Ok(TokenRecord {
            digest: token.digest(),
            rotated_at: Some(now),
            expires_at: expires_at.context("--expires-in is too long")?,
            previous_secret: Some(PreviousSecret {
                digest: before.digest,
                // It does not become valid for longer than it was.
                expires_at: before
                    .expires_at
                    .map_or(previous_end, |end| end.min(previous_end)),
            }),
            ..before.clone()
        })
    }
}

/// Stores have milliseconds.
fn now() -> Timestamp {
    let now = Timestamp::now();
    Timestamp::from_millisecond(now.as_millisecond()).unwrap_or(now)
}

impl List {
    fn run(self) -> anyhow::Result<()> {
        let mut store = Store::open(&self.store.location, Mode::Read)?;
        if self.history {
            return print_history(&store.token_history()?, self.json);
        }
        let tokens = store.tokens()?;
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
            "ROTATED",
            "EXPIRES",
            "RATE LIMIT",
        ];
        print(&table(head, tokens.iter().map(row)))
    }
}

impl Revoke {
    fn run(self) -> anyhow::Result<()> {
        let name = self.name;
        let mut store = Store::open(&self.store.location, Mode::Write)?;
        if name.starts_with(SUBJECT_PREFIX) && name.contains('@') {
            // Before its first request there is no record that could be revoked.
            let subject = TokenRecord::new(&name, TokenDigest::of_name(&name));
            store.create_token(&subject, &current_user())?;
        }
        match store.revoke_token(&name, &current_user())? {
            Some(true) => print_message(format_args!("{name} is revoked")),
            Some(false) => print_message(format_args!("{name} was already revoked")),
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

fn print_history(history: &[TokenHistory], as_json: bool) -> anyhow::Result<()> {
    if as_json {
        let lines = history.iter().map(json_line);
        return print(&lines.collect::<Result<String, _>>()?);
    }
    let row = |entry: &TokenHistory| {
        [
            entry.at.strftime("%Y-%m-%d %H:%M:%S UTC").to_string(),
            entry.name.to_string(),
            entry.event.clone(),
            or_dash(entry.user.clone()),
        ]
    };
    print(&table(
        ["TIME", "NAME", "EVENT", "USER"],
        history.iter().map(row),
    ))
}

fn or_dash(text: Option<String>) -> String {
    text.unwrap_or_else(|| "-".to_owned())
}

fn row(token: &TokenRecord) -> [String; 7] {
    let time = |time: Option<Timestamp>| {
        or_dash(time.map(|time| time.strftime("%Y-%m-%d %H:%M UTC").to_string()))
    };
    [
        token.name.to_string(),
        state(token).to_owned(),
        time(Some(token.created_at)),
        time(token.last_used_at),
        time(token.rotated_at),
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
