//! `plantstore import`: plants from a file, through the decoding of the service. What is reported as added, or as there
//! already, is on disk; so it can be run again at any time, and goes on where it was interrupted.

mod batches;
mod rejects;
mod tally;

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::mpsc::Receiver;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use clap::Args;
use clap::builder::{PathBufValueParser, TypedValueParser};
use jiff::Timestamp;

use crate::cli::import::batches::{Batch, Reading};
use crate::cli::import::rejects::Rejects;
use crate::cli::import::tally::Tally;
use crate::cli::output::print;
use crate::cli::progress::Progress;
use crate::config::{BodySettings, StoreSettings, WalSettings, token_name};
use crate::exchange::{Format, Reader};
use crate::store::{
    Addition, DryRun, OpenError, Outcome, Store, StoreError, TokenId, TokenRecord, WalFull,
};
use crate::telemetry::say;
use crate::token::Token;

/// The most plants in one transaction: if others wait for its end, and if not.
const LEN_BESIDE: usize = 4096;
const LEN_ALONE: usize = 16384;

/// How often a batch is tried while others have the store. Each time is a wait of some seconds.
const BUSY_TRIES: usize = 12;

/// How long a batch waits for a reader to end that keeps the WAL from being reset, and how often it tries.
const READER_TIMEOUT: Duration = Duration::from_secs(600);
const READER_PAUSE: Duration = Duration::from_millis(200);

/// The longest that others are given between two batches.
const PAUSE_MAX: Duration = Duration::from_millis(100);

const READ_BUFFER: usize = 256 << 10;

#[derive(Debug, Args)]
pub(super) struct Import {
    /// What to read, or - for standard input
    file: PathBuf,

    /// How it is written; csv if the name ends so, or else ndjson
    #[arg(long)]
    format: Option<Format>,

    /// Tell what would become of each plant, and store nothing
    #[arg(long)]
    dry_run: bool,

    /// Stop at the first problem
    #[arg(long)]
    strict: bool,

    /// Write the rows that are not stored to this new file, with the reasons; corrected, it can be imported
    #[arg(long, value_name = "FILE", conflicts_with = "strict", value_parser = rejects_file())]
    rejects: Option<PathBuf>,

    /// The name of the token that the plants are kept as added by. If there is none, one is made that nobody can use
    #[arg(long, value_name = "NAME", default_value = "import", value_parser = token_name)]
    token: String,

    #[command(flatten)]
    body: BodySettings,

    #[command(flatten)]
    wal: WalSettings,

    #[command(flatten)]
    store: StoreSettings,
}

impl Import {
    pub(super) fn run(self) -> anyhow::Result<()> {
        if Token::parse(&self.token).is_some() {
            bail!("--token takes the name of a token, and this is a token itself; keep it secret");
        }
        let (input, bytes) = open(&self.file)?;
        let rejects = self.rejects.as_deref();
        let rejects = rejects.map(|path| Rejects::create(path, self.store.store.file()));
        let mut rejects = rejects.transpose()?;
        let mut sink = self.sink()?;
        let format = self.format.unwrap_or_else(|| Format::of(&self.file));
        let input = BufReader::with_capacity(READ_BUFFER, input);
        let reader = Reader::with_text(
            input,
            format,
            self.body.max_body_bytes,
            self.rejects.is_some(),
        );
        let (reading, batches) = Reading::start(
            reader,
            sink.token.unwrap_or(TokenId(0)),
            sink.len_max(),
            self.strict,
        );

        let mut tally = Tally::new(self.dry_run);
        let progress = Progress::of_bytes(bytes, "importing");
        let stored = self.store_all(&batches, &mut sink, &mut tally, &progress, rejects.as_mut());
        if stored.is_err() {
            abandon(sink);
            return stored;
        }
        tally.tell_rest(&progress);
        drop(progress);
        print(&tally.summary())?;
        // One that was told to stop may be waiting for more to read.
        if self.strict && tally.refused() > 0 {
            bail!("stopped at the first problem, as --strict says; correct it and run this again");
        }
        let read = reading
            .end()
            .map_err(|_| anyhow!("a defect of plantstore"))?;
        read.with_context(|| format!("cannot read {} to the end", self.file.display()))?;
        let again = match (rejects, &self.rejects) {
            (Some(rejects), Some(path)) => {
                rejects.finish().with_context(cannot_write(path))?;
                let flag = if Format::of(path) == format {
                    ""
                } else if format == Format::Csv {
                    " --format csv"
                } else {
                    " --format ndjson"
                };
                let path = path.display();
                format!("correct {path} and run `plantstore import{flag} {path}`")
            }
            _ if tally.refused() == 1 => "correct it and run this again".to_owned(),
            _ => "correct them and run this again".to_owned(),
        };
        match tally.refused() {
            0 => Ok(()),
            1 => bail!("one plant {}; {again}", tally.fate()),
            some => bail!("{some} plants {}; {again}", tally.fate()),
        }
    }

    fn store_all(
        &self,
        batches: &Receiver<Batch>,
        sink: &mut Sink,
        tally: &mut Tally,
        progress: &Progress,
        mut rejects: Option<&mut Rejects>,
    ) -> anyhow::Result<()> {
        for mut batch in batches {
            let line = batch.line();
            let outcomes = sink.take(&mut batch, self.strict).with_context(|| {
                format!("stopped before line {line}; once that is put right, run this again")
            })?;
            progress.set(batch.bytes_read);
            let taken = tally.take(batch, &outcomes, progress, rejects.as_deref_mut());
            if let (Err(error), Some(path)) = (taken, &self.rejects) {
                return Err(error).with_context(cannot_write(path));
            }
            if self.strict && tally.refused() > 0 {
                break;
            }
        }
        Ok(())
    }

    fn sink(&self) -> anyhow::Result<Sink> {
        let location = &self.store.store;
        let rehearsal = (self.dry_run || self.strict).then(DryRun::new);
        let rehearsal = rehearsal
            .transpose()
            .context("cannot make a temporary file")?;
        if self.dry_run {
            let store = match Store::open(location) {
                Err(OpenError::Missing(_) | OpenError::NotMigrated(_)) => None,
                opened => Some(opened?),
            };
            return Ok(Sink {
                store,
                token: None,
                rehearsal,
            });
        }
        let mut store = Store::open_to_import(location)?;
        store.limit_wal(self.wal.max_wal_bytes);
        match token_named(&mut store, &self.token) {
            Ok(token) => Ok(Sink {
                store: Some(store),
                token: Some(token),
                rehearsal,
            }),
            Err(error) => {
                abandon(store);
                Err(error)
            }
        }
    }
}

/// Leaves a store open until the process ends: closing would sync again, and after a failed fsync that may claim success.
fn abandon<T>(store: T) {
    std::mem::forget(store);
}

/// What there is to read, and how much of it.
fn open(path: &Path) -> anyhow::Result<(Box<dyn Read + Send>, Option<u64>)> {
    if path == Path::new("-") {
        return Ok((Box::new(io::stdin()), None));
    }
    let opened = File::open(path).and_then(|file| {
        let metadata = file.metadata()?;
        if metadata.is_dir() {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        Ok((file, metadata.is_file().then_some(metadata.len())))
    });
    let (file, bytes) = opened.with_context(|| format!("cannot read {}", path.display()))?;
    Ok((Box::new(file), bytes))
}

fn rejects_file() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(|path| {
        if path == Path::new("-") {
            Err("expected a file: standard output has the summary")
        } else {
            Ok(path)
        }
    })
}

fn cannot_write(path: &Path) -> impl FnOnce() -> String {
    move || format!("cannot write {}", path.display())
}

/// The token of this name, created if there is none: revoked from the start, so that it tells where plants come from and
/// gives no access.
fn token_named(store: &mut Store, name: &str) -> anyhow::Result<TokenId> {
    let tokens = store.tokens()?;
    let find = |tokens: &[TokenRecord]| {
        let found = tokens.iter().find(|token| *token.name == *name);
        found.map(|token| token.id)
    };
    if let Some(id) = find(&tokens) {
        return Ok(id);
    }
    let is_free = |id: &i64| tokens.iter().all(|token| token.id.0 != *id);
    let free = (1..=i64::MAX).find(is_free);
    let free = free.context("no id is left for a token")?;
    let secret = Token::generate().context("cannot get random numbers")?;
    let now = Timestamp::now();
    let created = store.merge_tokens(&[TokenRecord {
        id: TokenId(free),
        name: name.into(),
        digest: secret.digest(),
        rate_limit: None,
        created_at: now,
        expires_at: None,
        revoked_at: Some(now),
        last_used_at: None,
    }]);
    // Another process may have created one at the same time.
    if let Some(id) = find(&store.tokens()?) {
        return Ok(id);
    }
    created?;
    bail!("cannot create the token {name}; run this again");
}

/// Where the plants go.
struct Sink {
    /// None, if it is not there yet and is not to be made.
    store: Option<Store>,
    /// None, if nothing is to be stored.
    token: Option<TokenId>,
    /// Of what must be known before it is stored.
    rehearsal: Option<DryRun>,
}

impl Sink {
    fn len_max(&self) -> usize {
        match &self.store {
            Some(store) if store.keeps_others_waiting() => LEN_BESIDE,
            _ => LEN_ALONE,
        }
    }

    /// Stores a batch, or finds out what would become of it. If a problem is to end it, what follows the first is left out.
    fn take(&mut self, batch: &mut Batch, is_strict: bool) -> Result<Vec<Outcome>, StoreError> {
        let mut rehearsed = self.rehearse(&batch.additions)?;
        let is_refused =
            |outcome: &Outcome| matches!(outcome, Outcome::Conflict | Outcome::Damaged);
        if is_strict && let Some(refused) = rehearsed.iter().position(is_refused) {
            batch.cut_after(refused);
            rehearsed.truncate(refused + 1);
        }
        match (&mut self.store, self.token) {
            _ if batch.additions.is_empty() => Ok(Vec::new()),
            (Some(store), Some(token)) => add_once_readers_end(store, token, &batch.additions),
            _ => Ok(rehearsed),
        }
    }

    fn rehearse(&mut self, batch: &[Addition]) -> Result<Vec<Outcome>, StoreError> {
        let Some(rehearsal) = &mut self.rehearsal else {
            return Ok(Vec::new());
        };
        let stored = match &mut self.store {
            Some(store) => store.compare(batch)?,
            None => vec![None; batch.len()],
        };
        rehearsal.add(batch, stored)
    }
}

/// Adds a batch. Waits while the WAL is as long as it may be.
fn add_once_readers_end(
    store: &mut Store,
    token: TokenId,
    batch: &[Addition],
) -> Result<Vec<Outcome>, StoreError> {
    let mut waiting_since = None;
    loop {
        match add(store, token, batch) {
            Err(StoreError::Full(cause)) if cause.is::<WalFull>() => {
                let since = *waiting_since.get_or_insert_with(|| {
                    say(format!("waiting: {cause}\n"));
                    Instant::now()
                });
                if since.elapsed() > READER_TIMEOUT {
                    return Err(StoreError::Full(cause));
                }
                thread::sleep(READER_PAUSE);
            }
            other => return other,
        }
    }
}

/// Adds a batch, and leaves others their share of the store.
fn add(store: &mut Store, token: TokenId, batch: &[Addition]) -> Result<Vec<Outcome>, StoreError> {
    for tries_left in (0..BUSY_TRIES).rev() {
        let begun = Instant::now();
        // The use of the token makes every batch a write, whose sync covers whatever was written before: without it a plant
        // could be called there already that an interrupted process had written and not synced.
        match store.add(batch, &[(token, Timestamp::now())]) {
            Err(StoreError::Busy(_)) if tries_left > 0 && store.keeps_others_waiting() => {}
            Ok(outcomes) => {
                if store.keeps_others_waiting() {
                    thread::sleep(begun.elapsed().min(PAUSE_MAX));
                }
                return Ok(outcomes);
            }
            failed => return failed,
        }
    }
    unreachable!("the last try returns")
}
