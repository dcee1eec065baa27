//! `plantstore import`: plants from a file, through the decoding of the service. What is reported as added or replayed is
//! on disk, so an import can be run again at any time, and continues where it was interrupted.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write as _};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use clap::Args;
use clap::builder::{PathBufValueParser, TypedValueParser};
use jiff::Timestamp;

use crate::cli::terminal::{Progress, print};
use crate::config::{BodySettings, StoreSettings, WalSettings, token_name};
use crate::formats::{COMMENT, Format, Lines, Part, Reader, Rejection};
use crate::fs::{AtomicFile, Replace, WriteError};
use crate::logging::write_stderr;
use crate::store::{
    Addition, DryRun, Mode, OpenError, Outcome, Store, StoreError, TokenId, TokenRecord, WalFull,
};
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
            let store = match Store::open(location, Mode::Read) {
                Err(OpenError::Missing(_) | OpenError::NotMigrated(_)) => None,
                opened => Some(opened?),
            };
            return Ok(Sink {
                store,
                token: None,
                rehearsal,
            });
        }
        let mut store = Store::open(location, Mode::Import)?;
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
            Some(store) if store.is_shared() => LEN_BESIDE,
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
                    write_stderr(format!("waiting: {cause}\n"));
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
            Err(StoreError::Busy(_)) if tries_left > 0 && store.is_shared() => {}
            Ok(outcomes) => {
                if store.is_shared() {
                    thread::sleep(begun.elapsed().min(PAUSE_MAX));
                }
                return Ok(outcomes);
            }
            failed => return failed,
        }
    }
    unreachable!("the last try returns")
}

/// After so many problems the rest is only counted.
const TOLD_MAX: u64 = 100;

#[derive(Default)]
pub(super) struct Tally {
    is_rehearsal: bool,
    added: u64,
    already_there: u64,
    taken: u64,
    damaged: u64,
    /// In lines: a row of a wrong form may have taken in others.
    invalid: u64,
    problems: u64,
}

impl Tally {
    pub(super) fn new(is_rehearsal: bool) -> Self {
        Self {
            is_rehearsal,
            ..Self::default()
        }
    }

    /// Counts a batch, reports its problems, and writes the rejected rows.
    pub(super) fn take(
        &mut self,
        batch: Batch,
        outcomes: &[Outcome],
        progress: &Progress,
        rejects: Option<&mut Rejects>,
    ) -> io::Result<()> {
        let mut problems = batch.problems;
        for problem in problems.iter().filter(|problem| is_end(problem)) {
            self.invalid += problem.rejection.lines;
        }
        for ((lines, raw), outcome) in batch.rows.into_iter().zip(outcomes) {
            let problem = match outcome {
                Outcome::Added => {
                    self.added += 1;
                    continue;
                }
                Outcome::Replayed => {
                    self.already_there += 1;
                    continue;
                }
                Outcome::Conflict => {
                    self.taken += 1;
                    "id: belongs to a different plant"
                }
                Outcome::Damaged => {
                    self.damaged += 1;
                    "id: belongs to a plant that is damaged; run `plantstore check`"
                }
            };
            problems.push(Problem {
                lines,
                rejection: Rejection {
                    problem: problem.to_owned(),
                    lines: 1,
                },
                raw,
                part: Part::Whole,
            });
        }
        // The parts of a row stay in their order.
        problems.sort_by_key(|problem| problem.lines.first);
        for problem in problems.iter().filter(|problem| is_end(problem)) {
            self.problems += 1;
            if self.problems <= TOLD_MAX {
                progress.say(&format!("{}: {}", problem.lines, problem.rejection.problem));
            }
        }
        match rejects {
            Some(rejects) => problems
                .iter()
                .try_for_each(|problem| rejects.write(&batch.header, problem)),
            None => Ok(()),
        }
    }

    /// Says how many problems have not been told.
    pub(super) fn tell_rest(&self, progress: &Progress) {
        if let rest @ 1.. = self.problems.saturating_sub(TOLD_MAX) {
            progress.say(&format!("and {rest} more problems"));
        }
    }

    /// How many were not stored, nor would be.
    pub(super) fn refused(&self) -> u64 {
        self.taken + self.damaged + self.invalid
    }

    /// What those have in common.
    pub(super) fn fate(&self) -> &'static str {
        if self.is_rehearsal {
            "would not be stored"
        } else {
            "not stored"
        }
    }

    pub(super) fn summary(&self) -> String {
        let added = if self.is_rehearsal {
            "would be added"
        } else {
            "added"
        };
        let mut text = format!(
            "{added} {}, already there {}, taken {}, invalid {}",
            self.added, self.already_there, self.taken, self.invalid
        );
        if self.damaged > 0 {
            let _ = write!(text, ", damaged {}", self.damaged);
        }
        text.push('\n');
        text
    }
}

/// Whether all of it has been read, so that it is known where it ends.
fn is_end(problem: &Problem) -> bool {
    matches!(problem.part, Part::Whole | Part::Last)
}

/// Bytes that are written at a time.
const BUFFER_LEN: usize = 64 << 10;

/// A new file that gets its name when it is complete.
pub(super) struct Rejects {
    file: AtomicFile,
    buffer: Vec<u8>,
    is_empty: bool,
}

impl Rejects {
    /// Fails if there is a file of that name. `store` is the database that is imported to, if that is a file.
    pub(super) fn create(path: &Path, store: Option<&Path>) -> anyhow::Result<Self> {
        let file = match AtomicFile::create(path, Replace::Nothing, store) {
            Err(WriteError::Exists(path)) => {
                bail!("{path} already exists; choose another name for --rejects")
            }
            created => created?,
        };
        Ok(Self {
            file,
            buffer: Vec::new(),
            is_empty: true,
        })
    }

    /// Writes a row, or a part of it.
    pub(super) fn write(&mut self, header: &[u8], problem: &Problem) -> io::Result<()> {
        if self.is_empty {
            self.push(header, true);
            self.is_empty = false;
        }
        if matches!(problem.part, Part::Whole | Part::First) {
            let (lines, reason) = (problem.lines, &problem.rejection.problem);
            writeln!(self.buffer, "{COMMENT}{lines}: {reason}")?;
        }
        let is_end = matches!(problem.part, Part::Whole | Part::Last);
        self.push(&problem.raw, is_end);
        if self.buffer.len() >= BUFFER_LEN {
            self.flush()?;
        }
        Ok(())
    }

    /// The last line of a file may have no end.
    fn push(&mut self, text: &[u8], is_end: bool) {
        self.buffer.extend_from_slice(text);
        if is_end && self.buffer.last().is_some_and(|last| *last != b'\n') {
            self.buffer.push(b'\n');
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.file().write_all(&self.buffer)?;
        self.buffer.clear();
        Ok(())
    }

    /// Gives it its name. Without any row there is no file.
    pub(super) fn finish(mut self) -> anyhow::Result<()> {
        if !self.is_empty {
            self.flush()?;
            self.file.persist()?;
        }
        Ok(())
    }
}

/// About the most bytes in one transaction.
const BYTES_MAX: u64 = 2 << 20;

/// Batches that wait to be stored.
const AHEAD: usize = 2;

/// Plants that are stored together, and what stood between them.
#[derive(Default)]
pub(super) struct Batch {
    pub(super) additions: Vec<Addition>,
    /// Where each of them is, and its text if that is kept.
    pub(super) rows: Vec<(Lines, Vec<u8>)>,
    /// What is no plant, where, and why.
    pub(super) problems: Vec<Problem>,
    /// What belongs before the text of any row: the header of a CSV file.
    pub(super) header: Vec<u8>,
    /// How much has been read with it.
    pub(super) bytes_read: u64,
}

/// A row that is not stored.
pub(super) struct Problem {
    pub(super) lines: Lines,
    pub(super) rejection: Rejection,
    /// Its text, if that is kept.
    pub(super) raw: Vec<u8>,
    pub(super) part: Part,
}

impl Batch {
    /// Where it begins.
    pub(super) fn line(&self) -> u64 {
        let problems = self.problems.iter().map(|problem| problem.lines);
        let rows = self.rows.iter().map(|(lines, _)| *lines);
        rows.chain(problems).min().map_or(1, |lines| lines.first)
    }

    /// Leaves out all that stands after this plant.
    pub(super) fn cut_after(&mut self, last: usize) {
        let (lines, _) = self.rows[last];
        self.additions.truncate(last + 1);
        self.rows.truncate(last + 1);
        self.problems.retain(|problem| problem.lines < lines);
    }

    fn len(&self) -> usize {
        self.additions.len() + self.problems.len()
    }
}

/// The thread that reads.
pub(super) struct Reading(JoinHandle<io::Result<()>>);

impl Reading {
    /// Starts it. It ends with what there is to read, at the first problem if there must be none, or when nobody takes its
    /// batches any more.
    pub(super) fn start(
        reader: Reader<impl BufRead + Send + 'static>,
        token: TokenId,
        len_max: usize,
        stop_at_problem: bool,
    ) -> (Self, Receiver<Batch>) {
        let (sender, batches) = sync_channel(AHEAD);
        let thread = thread::spawn(move || read(reader, token, len_max, stop_at_problem, &sender));
        (Self(thread), batches)
    }

    /// How it ended.
    pub(super) fn end(self) -> thread::Result<io::Result<()>> {
        self.0.join()
    }
}

fn read(
    mut reader: Reader<impl BufRead>,
    token: TokenId,
    len_max: usize,
    stop_at_problem: bool,
    batches: &SyncSender<Batch>,
) -> io::Result<()> {
    let (mut batch, mut bytes_before) = (Batch::default(), 0);
    let ended = loop {
        let entry = match reader.next_entry() {
            Ok(Some(entry)) => entry,
            Ok(None) => break Ok(()),
            // What was read before it is stored.
            Err(error) => break Err(error),
        };
        match entry.plant {
            Ok(plant) => {
                batch.additions.push(Addition { plant, token });
                batch.rows.push((entry.lines, entry.raw));
            }
            Err(rejection) => batch.problems.push(Problem {
                lines: entry.lines,
                rejection,
                raw: entry.raw,
                part: entry.part,
            }),
        }
        if batch.header.is_empty() {
            batch.header = reader.header().to_vec();
        }
        batch.bytes_read = reader.bytes_read();
        if stop_at_problem && !batch.problems.is_empty() {
            break Ok(());
        }
        let bytes = batch.bytes_read - bytes_before;
        if batch.len() >= len_max || bytes >= BYTES_MAX {
            bytes_before = batch.bytes_read;
            if batches.send(std::mem::take(&mut batch)).is_err() {
                return Ok(());
            }
        }
    };
    if batch.len() > 0 {
        let _ = batches.send(batch);
    }
    ended
}
