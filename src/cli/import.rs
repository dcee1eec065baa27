//! `plantstore import`: plants from a file, decoded as the server decodes them. What is reported as added or replayed is
//! durable, so an import can be run again at any time, and continues where it was interrupted.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write as _};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use clap::Args;
use clap::builder::{PathBufValueParser, TypedValueParser};
use jiff::Timestamp;

use crate::cli::open_or_create;
use crate::cli::terminal::{PROBLEMS_SHOWN_MAX, ProgressBar, Unit, count, print};
use crate::config::{BodySettings, StoreSettings, WalSettings};
use crate::formats::{COMMENT, Format, Reader, Rejection, Text};
use crate::fs::{AtomicFile, Replace, WriteError};
use crate::logging::write_stderr;
use crate::store::{
    Addition, DryRun, Mode, OpenError, Outcome, Store, StoreError, TokenId, TokenRecord, WalFull,
};
use crate::token::{Token, parse_name};

/// The most plants in one transaction, if a server waits for its end and if not; and about the most bytes.
const BATCH_LEN_SHARED: usize = 4096;
const BATCH_LEN_EXCLUSIVE: usize = 16384;
const BATCH_BYTES: u64 = 2 << 20;

/// Batches that are decoded while another one is stored.
const BATCHES_AHEAD: usize = 2;

/// How often a batch is tried while other processes use the store. Each attempt waits for some seconds.
const BUSY_ATTEMPTS: usize = 12;

/// How long a batch waits for a reader that prevents the reset of the WAL, and how often it tries.
const READER_TIMEOUT: Duration = Duration::from_secs(600);
const READER_PAUSE: Duration = Duration::from_millis(200);

/// The longest pause between two batches, which a server can use.
const PAUSE_MAX: Duration = Duration::from_millis(100);

const READ_BUFFER: usize = 256 << 10;

/// Add plants from a file or standard input; can be repeated safely
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  plantstore import plants.csv
  plantstore import --dry-run plants.csv
  plantstore import --rejects rejected.csv plants.csv
  gunzip -c plants.ndjson.gz | plantstore import -")]
pub(super) struct Import {
    /// File to read, or - for standard input
    file: PathBuf,

    /// Format [default: csv if FILE ends with .csv or .tsv, otherwise ndjson]
    #[arg(long)]
    format: Option<Format>,

    /// Report the outcome of each plant without storing anything
    #[arg(long)]
    dry_run: bool,

    /// Stop at the first problem
    #[arg(long)]
    strict: bool,

    /// Write rejected rows with the reasons to this new file, which can be corrected and imported
    #[arg(long, value_name = "FILE", conflicts_with = "strict", value_parser = rejects_file())]
    rejects: Option<PathBuf>,

    /// Name of the token that is recorded as having added the plants; created without access if it does not exist
    #[arg(long, value_name = "NAME", default_value = "import", value_parser = parse_name)]
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
        let (input, bytes) = open(&self.file)?;
        let rejects = self.rejects.as_deref();
        let rejects = rejects.map(|path| Rejects::create(path, self.store.location.file()));
        let mut rejects = rejects.transpose()?;
        let mut sink = self.sink()?;
        let format = self.format.unwrap_or_else(|| Format::of(&self.file));
        let input = BufReader::with_capacity(READ_BUFFER, input);
        let reader = Reader::new(input, format, self.body.max_body_bytes, rejects.is_some());
        let (sender, batches) = sync_channel(BATCHES_AHEAD);
        let (token, len_max, strict) = (sink.token, sink.len_max(), self.strict);
        let token = token.unwrap_or(TokenId(0));
        let reading = thread::spawn(move || read(reader, token, len_max, strict, &sender));

        let mut report = Report::new(self.dry_run);
        let progress = ProgressBar::new("importing", bytes, Unit::Bytes);
        let stored = self.store_all(
            &batches,
            &mut sink,
            &mut report,
            &progress,
            rejects.as_mut(),
        );
        if stored.is_err() {
            leave_open(sink);
            return stored;
        }
        if let more @ 1.. = report.problems.saturating_sub(PROBLEMS_SHOWN_MAX) {
            progress.say(&format!("and {more} more problems"));
        }
        drop(progress);
        print(&report.summary())?;
        // The thread may be waiting for more input, so it is not joined.
        if self.strict && report.rejected() > 0 {
            bail!("stopped at the first problem (--strict); correct it and run the command again");
        }
        let read = reading.join().map_err(|_| anyhow!("a bug in plantstore"))?;
        read.with_context(|| format!("cannot read {} to the end", self.file.display()))?;
        let advice = match (rejects, &self.rejects) {
            (Some(rejects), Some(path)) => {
                rejects.finish().with_context(cannot_write(path))?;
                let flag = match format {
                    _ if Format::of(path) == format => "",
                    Format::Csv => " --format csv",
                    Format::Ndjson => " --format ndjson",
                };
                let path = path.display();
                format!("correct {path} and run `plantstore import{flag} {path}`")
            }
            _ => "correct the input and run the command again".to_owned(),
        };
        let verb = if self.dry_run {
            "would be rejected"
        } else {
            "rejected"
        };
        match report.rejected() {
            0 => Ok(()),
            rejected => bail!("{} {verb}; {advice}", count(rejected, "plant")),
        }
    }

    fn store_all(
        &self,
        batches: &Receiver<ImportBatch>,
        sink: &mut Sink,
        report: &mut Report,
        progress: &ProgressBar,
        mut rejects: Option<&mut Rejects>,
    ) -> anyhow::Result<()> {
        for mut batch in batches {
            let line = batch.line();
            let outcomes = sink.store(&mut batch, self.strict).with_context(|| {
                format!("stopped before line {line}; fix the problem and run the command again")
            })?;
            progress.set(batch.bytes_read);
            let header = std::mem::take(&mut batch.header);
            let problems = report.count(batch, &outcomes, progress);
            if let (Some(rejects), Some(path)) = (&mut rejects, &self.rejects) {
                let mut written = problems
                    .iter()
                    .map(|problem| rejects.write(&header, problem));
                written.try_for_each(|written| written.with_context(cannot_write(path)))?;
            }
            if self.strict && report.rejected() > 0 {
                break;
            }
        }
        Ok(())
    }

    fn sink(&self) -> anyhow::Result<Sink> {
        let location = &self.store.location;
        let dry_run = (self.dry_run || self.strict).then(DryRun::new).transpose();
        let dry_run = dry_run.context("cannot create a temporary file")?;
        if self.dry_run {
            let store = match Store::open(location, Mode::Read) {
                Err(OpenError::Missing(_) | OpenError::NotMigrated { .. }) => None,
                opened => Some(opened?),
            };
            return Ok(Sink {
                store,
                token: None,
                dry_run,
            });
        }
        let mut store = open_or_create(location, Mode::Import)?;
        store.limit_wal(self.wal.max_wal_bytes);
        match token_named(&mut store, &self.token) {
            Ok(token) => Ok(Sink {
                store: Some(store),
                token: Some(token),
                dry_run,
            }),
            Err(error) => {
                leave_open(store);
                Err(error)
            }
        }
    }
}

/// Leaves a store open until the process ends: closing would sync again, and after a failed fsync that may report success.
fn leave_open<T>(store: T) {
    std::mem::forget(store);
}

/// Opens the input. Returns its size too, if that is known.
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
    PathBufValueParser::new().try_map(|path| match path.to_str() {
        Some("-") => Err("expected a file: the summary is on standard output"),
        _ => Ok(path),
    })
}

fn cannot_write(path: &Path) -> impl FnOnce() -> String {
    move || format!("cannot write {}", path.display())
}

/// The token of this name, created if there is none: revoked from the start, so that it records where plants come from and
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
    let free = (1..=i64::MAX)
        .find(is_free)
        .expect("there are fewer tokens than ids");
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
    bail!("cannot create the token {name}; run the command again");
}

/// Where the plants go.
struct Sink {
    /// None if it does not exist and is not to be created.
    store: Option<Store>,
    /// None if nothing is to be stored.
    token: Option<TokenId>,
    /// Determines the outcomes before anything is stored, or instead of it.
    dry_run: Option<DryRun>,
}

impl Sink {
    fn len_max(&self) -> usize {
        match &self.store {
            Some(store) if store.is_shared() => BATCH_LEN_SHARED,
            _ => BATCH_LEN_EXCLUSIVE,
        }
    }

    /// Stores a batch, or determines what its outcomes would be. A strict import stores nothing after the first rejected
    /// plant.
    fn store(
        &mut self,
        batch: &mut ImportBatch,
        is_strict: bool,
    ) -> Result<Vec<Outcome>, StoreError> {
        let mut expected = match &mut self.dry_run {
            Some(dry_run) => {
                let stored = match &mut self.store {
                    Some(store) => store.compare(&batch.additions)?,
                    None => vec![None; batch.additions.len()],
                };
                dry_run.add(&batch.additions, stored)?
            }
            None => Vec::new(),
        };
        let is_rejected =
            |outcome: &Outcome| matches!(outcome, Outcome::Conflict | Outcome::Damaged);
        if is_strict && let Some(rejected) = expected.iter().position(is_rejected) {
            batch.truncate_after(rejected);
            expected.truncate(rejected + 1);
        }
        match (&mut self.store, self.token) {
            _ if batch.additions.is_empty() => Ok(Vec::new()),
            (Some(store), Some(token)) => add(store, token, &batch.additions),
            _ => Ok(expected),
        }
    }
}

/// Adds a batch, and leaves a server its share of the store. Waits while the WAL has its maximum size.
fn add(store: &mut Store, token: TokenId, batch: &[Addition]) -> Result<Vec<Outcome>, StoreError> {
    let mut waiting_since = None;
    let mut attempts = 1;
    loop {
        let start = Instant::now();
        // The use of the token makes every batch a write, whose sync covers all earlier writes: otherwise a plant that an
        // interrupted process had written and not synced could be reported as replayed.
        match store.add(batch, &[(token, Timestamp::now())]) {
            Ok(outcomes) => {
                if store.is_shared() {
                    thread::sleep(start.elapsed().min(PAUSE_MAX));
                }
                return Ok(outcomes);
            }
            Err(StoreError::Busy(_)) if attempts < BUSY_ATTEMPTS && store.is_shared() => {
                attempts += 1;
            }
            Err(StoreError::Full(cause)) if cause.is::<WalFull>() => {
                let since = *waiting_since.get_or_insert_with(|| {
                    write_stderr(format!("waiting: {cause}\n"));
                    start
                });
                if since.elapsed() > READER_TIMEOUT {
                    return Err(StoreError::Full(cause));
                }
                attempts = 1;
                thread::sleep(READER_PAUSE);
            }
            failed => return failed,
        }
    }
}

/// Plants that are stored together, and the problems found between them.
#[derive(Default)]
struct ImportBatch {
    additions: Vec<Addition>,
    /// The text of each addition.
    texts: Vec<Text>,
    problems: Vec<RejectedRow>,
    /// The header of a CSV file.
    header: Vec<u8>,
    /// The bytes of the input up to the end of this batch.
    bytes_read: u64,
}

/// A row that is not stored, or a part of one.
type RejectedRow = (Text, Rejection);

impl ImportBatch {
    /// The line where it begins.
    fn line(&self) -> u64 {
        let rejected = self.problems.iter().map(|(text, _)| text);
        let first = self
            .texts
            .iter()
            .chain(rejected)
            .map(|text| text.lines.first);
        first.min().unwrap_or(1)
    }

    fn truncate_after(&mut self, last: usize) {
        let lines = self.texts[last].lines;
        self.additions.truncate(last + 1);
        self.texts.truncate(last + 1);
        self.problems.retain(|(text, _)| text.lines < lines);
    }

    fn len(&self) -> usize {
        self.additions.len() + self.problems.len()
    }
}

/// Decodes batches until the end of the input, the first problem of a strict import, or the end of the receiver.
fn read(
    mut reader: Reader<impl BufRead>,
    token: TokenId,
    len_max: usize,
    is_strict: bool,
    batches: &SyncSender<ImportBatch>,
) -> io::Result<()> {
    let (mut batch, mut bytes_before) = (ImportBatch::default(), 0);
    let ended = loop {
        let entry = match reader.next_entry() {
            Ok(Some(entry)) => entry,
            Ok(None) => break Ok(()),
            // The plants before the error are stored.
            Err(error) => break Err(error),
        };
        match entry.plant {
            Ok(plant) => {
                batch.additions.push(Addition { plant, token });
                batch.texts.push(entry.text);
            }
            Err(rejection) => batch.problems.push((entry.text, rejection)),
        }
        if batch.header.is_empty() {
            batch.header = reader.header().to_vec();
        }
        batch.bytes_read = reader.bytes_read();
        if is_strict && !batch.problems.is_empty() {
            break Ok(());
        }
        if batch.len() >= len_max || batch.bytes_read - bytes_before >= BATCH_BYTES {
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

/// Counts the outcomes.
#[derive(Default)]
struct Report {
    is_dry_run: bool,
    added: u64,
    replayed: u64,
    conflict: u64,
    damaged: u64,
    /// Invalid lines, not rows: a malformed row may contain lines that should have been rows.
    invalid: u64,
    problems: u64,
}

impl Report {
    fn new(is_dry_run: bool) -> Self {
        Self {
            is_dry_run,
            ..Self::default()
        }
    }

    /// Counts a batch and prints its problems. Returns them in the order of their lines.
    fn count(
        &mut self,
        batch: ImportBatch,
        outcomes: &[Outcome],
        progress: &ProgressBar,
    ) -> Vec<RejectedRow> {
        let mut problems = batch.problems;
        let complete = problems.iter().filter(|(text, _)| text.part.is_end);
        self.invalid += complete.map(|(_, rejection)| rejection.lines).sum::<u64>();
        for (text, outcome) in batch.texts.into_iter().zip(outcomes) {
            let (count, problem) = match outcome {
                Outcome::Added => (&mut self.added, None),
                Outcome::Replayed => (&mut self.replayed, None),
                Outcome::Conflict => (&mut self.conflict, Some("id: belongs to a different plant")),
                Outcome::Damaged => (
                    &mut self.damaged,
                    Some("id: belongs to a plant that is damaged; run `plantstore check`"),
                ),
            };
            *count += 1;
            if let Some(problem) = problem.map(str::to_owned) {
                problems.push((text, Rejection { problem, lines: 1 }));
            }
        }
        // A stable sort keeps the parts of a row in order.
        problems.sort_by_key(|(text, _)| text.lines.first);
        for (text, rejection) in problems.iter().filter(|(text, _)| text.part.is_end) {
            self.problems += 1;
            if self.problems <= PROBLEMS_SHOWN_MAX {
                progress.say(&format!("{}: {}", text.lines, rejection.problem));
            }
        }
        problems
    }

    fn rejected(&self) -> u64 {
        self.conflict + self.damaged + self.invalid
    }

    fn summary(&self) -> String {
        let mut text = format!(
            "{}added {}, replayed {}, conflict {}, invalid {}",
            if self.is_dry_run { "dry run: " } else { "" },
            self.added,
            self.replayed,
            self.conflict,
            self.invalid
        );
        if self.damaged > 0 {
            let _ = write!(text, ", damaged {}", self.damaged);
        }
        text + "\n"
    }
}

/// `--rejects FILE`: the rejected rows as they were, each after a comment with the reason, which an import skips. The file
/// appears when it is complete.
struct Rejects {
    file: AtomicFile,
    is_empty: bool,
    is_line_open: bool,
}

impl Rejects {
    /// `store` is the database file, which is never written to.
    fn create(path: &Path, store: Option<&Path>) -> anyhow::Result<Self> {
        let file = match AtomicFile::create(path, Replace::Nothing, store) {
            Err(WriteError::Exists(path)) => {
                bail!("{path} already exists; choose another name for --rejects")
            }
            created => created?,
        };
        Ok(Self {
            file,
            is_empty: true,
            is_line_open: false,
        })
    }

    /// Writes a row, or a part of it.
    fn write(&mut self, header: &[u8], (text, rejection): &RejectedRow) -> io::Result<()> {
        if std::mem::replace(&mut self.is_empty, false) {
            self.write_text(header, true)?;
        }
        if text.part.is_start {
            let comment = format!("{COMMENT}{}: {}\n", text.lines, rejection.problem);
            self.write_text(comment.as_bytes(), true)?;
        }
        self.write_text(&text.raw, text.part.is_end)
    }

    /// The last line of the input may have no newline.
    fn write_text(&mut self, text: &[u8], is_end: bool) -> io::Result<()> {
        let mut file = self.file.file();
        file.write_all(text)?;
        self.is_line_open = text.last().map_or(self.is_line_open, |last| *last != b'\n');
        if is_end && std::mem::replace(&mut self.is_line_open, false) {
            file.write_all(b"\n")?;
        }
        Ok(())
    }

    /// Creates no file if there is no rejected row.
    fn finish(self) -> anyhow::Result<()> {
        if !self.is_empty {
            self.file.persist()?;
        }
        Ok(())
    }
}
