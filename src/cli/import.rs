//! `plantstore import`: plants from a file, decoded as the server decodes them. What is reported as added or replayed is
//! durable, so an import can be run again at any time, and continues where it was interrupted.

use std::fmt::{self, Display};
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::mem::{self, ManuallyDrop};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use clap::Args;
use indicatif::ProgressBar;
use jiff::Timestamp;

use crate::cli::terminal::{PROBLEMS_SHOWN_MAX, Unit, count, print, print_message, progress_bar};
use crate::cli::{file_path, open_or_create};
use crate::config::{BodySettings, StoreSettings, WalSettings};
use crate::formats::{COMMENT, Format, Reader, Rejection, Text};
use crate::fs::{AtomicFile, FileError};
use crate::logging::write_stderr;
use crate::store::{
    Addition, DryRun, Failure, Mode, OpenError, Outcome, Store, StoreError, TokenId, TokenRecord,
    WalFull,
};
use crate::token::{Token, parse_name};
use crate::user::current_user;

/// The most plants in one transaction, if a server waits for its end and if not; and about the most bytes.
const BATCH_LEN_SHARED: usize = 4096;
const BATCH_LEN_EXCLUSIVE: usize = 16384;
const BATCH_BYTES: u64 = 2 << 20;

/// Batches that are decoded while another one is stored.
const BATCHES_AHEAD: usize = 2;

/// How long a batch waits for other processes that use the store, and for a reader that prevents the reset of the WAL.
const BUSY_TIMEOUT: Duration = Duration::from_secs(60);
const READER_TIMEOUT: Duration = Duration::from_secs(600);

/// The pause before the next attempt.
const RETRY_PAUSE: Duration = Duration::from_millis(200);

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
    #[arg(long, value_name = "FILE", conflicts_with = "strict", value_parser = file_path("expected a file: the summary is on standard output"))]
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
        let (input, bytes) =
            open(&self.file).with_context(|| format!("cannot read {}", self.file.display()))?;
        let rejects_file = self.create_rejects_file()?;
        let mut sink = self.sink()?;
        let format = self.format.unwrap_or_else(|| Format::of(&self.file));
        let input = BufReader::with_capacity(READ_BUFFER, input);
        let keeps_text = rejects_file.is_some();
        let reader = Reader::new(input, format, self.body.max_body_bytes, keeps_text);
        let (sender, batches) = sync_channel(BATCHES_AHEAD);
        let (token, len_max, strict) = (sink.token, sink.len_max(), self.strict);
        let reading = thread::spawn(move || read(reader, token, len_max, strict, &sender));

        let progress = progress_bar("importing", bytes, Unit::Bytes);
        let counts = self.store_all(&batches, &mut sink, rejects_file.as_ref(), &progress)?;
        drop(progress);
        drop(ManuallyDrop::into_inner(sink));
        let (dry_run, verb) = if self.dry_run {
            ("dry run: ", "would be rejected")
        } else {
            ("", "rejected")
        };
        let printed = print(&format!("{dry_run}{counts}\n"));
        let rejected = counts.rejected();
        // The thread may be waiting for more input, so it is not joined.
        if self.strict && rejected > 0 {
            bail!("stopped at the first problem (--strict); correct it and run the command again");
        }
        let read = reading.join().map_err(|_| anyhow!("a bug in plantstore"))?;
        read.with_context(|| format!("cannot read {} to the end", self.file.display()))?;
        if rejected == 0 {
            return printed; // without a file of rejected rows
        }
        let advice = match (rejects_file, &self.rejects) {
            (Some(file), Some(path)) => {
                file.persist()?;
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
        // Also with --rejects, because the other rows are not stored either.
        let advice = if self.dry_run {
            "correct the input and run the command without --dry-run"
        } else {
            &advice
        };
        bail!("{} {verb}; {advice}", count(rejected, "plant"))
    }

    /// Stores the batches, and reports the rows that are rejected.
    fn store_all(
        &self,
        batches: &Receiver<Batch>,
        sink: &mut Sink,
        rejects_file: Option<&AtomicFile>,
        progress: &ProgressBar,
    ) -> anyhow::Result<Counts> {
        let (mut counts, mut header) = (Counts::default(), Vec::new());
        let mut rejects = rejects_file.zip(self.rejects.as_deref()).map(Rejects::new);
        for mut batch in batches {
            let line = batch.rows.first().map_or(1, |(text, _)| text.lines.first);
            let outcomes = sink.store(&mut batch.additions).with_context(|| {
                format!("stopped before line {line}; fix the problem and run the command again")
            })?;
            progress.set_position(batch.bytes_read);
            header.append(&mut batch.header);
            let mut outcomes = outcomes.into_iter();
            for (text, invalid) in batch.rows {
                let is_end = text.is_end;
                if is_end && let Some(invalid) = &invalid {
                    counts.invalid += invalid.lines;
                }
                let rejection = invalid.or_else(|| counts.count(outcomes.next()?));
                let Some(rejection) = rejection else {
                    continue;
                };
                if let Some(rejects) = &mut rejects {
                    let written = rejects.write(&header, &text, &rejection);
                    written.with_context(|| rejects.cannot_write())?;
                }
                if is_end {
                    counts.problems += 1;
                    if counts.problems <= PROBLEMS_SHOWN_MAX {
                        progress.suspend(|| {
                            print_message(format_args!("{}: {}", text.lines, rejection.problem));
                        });
                    }
                    if self.strict {
                        return Ok(counts);
                    }
                }
            }
        }
        if let Some(rejects) = &mut rejects {
            let flushed = rejects.file.flush();
            flushed.with_context(|| rejects.cannot_write())?;
        }
        if let more @ 1.. = counts.problems.saturating_sub(PROBLEMS_SHOWN_MAX) {
            progress.suspend(|| print_message(format_args!("and {more} more problems")));
        }
        Ok(counts)
    }

    /// `--rejects FILE`, which appears when it is complete.
    fn create_rejects_file(&self) -> anyhow::Result<Option<AtomicFile>> {
        let Some(path) = &self.rejects else {
            return Ok(None);
        };
        match AtomicFile::create(path, None, self.store.location.file()) {
            Err(FileError::Exists(path)) => {
                let path = path.display();
                bail!("{path} already exists; choose another name for --rejects")
            }
            created => Ok(Some(created?)),
        }
    }

    /// After an error the store is not closed: closing would sync again, and after a failed fsync that may report success.
    fn sink(&self) -> anyhow::Result<ManuallyDrop<Sink>> {
        let location = &self.store.location;
        let dry_run = (self.dry_run || self.strict).then(DryRun::new).transpose();
        let mut sink = ManuallyDrop::new(Sink {
            store: None,
            token: None,
            dry_run: dry_run.context("cannot create a temporary file")?,
        });
        if self.dry_run {
            sink.store = match Store::open(location, Mode::Read) {
                Err(OpenError::Missing(_) | OpenError::NotMigrated { .. }) => None,
                opened => Some(opened?),
            };
        } else {
            let store = sink.store.insert(open_or_create(location, Mode::Import)?);
            store.limit_wal(self.wal.max_wal_bytes);
            sink.token = Some(token_named(store, &self.token)?);
        }
        Ok(sink)
    }
}

/// Opens the input. Returns its size too, if that is known.
fn open(path: &Path) -> io::Result<(File, Option<u64>)> {
    let file = if path == Path::new("-") {
        File::from(io::stdin().as_fd().try_clone_to_owned()?)
    } else {
        File::open(path)?
    };
    let metadata = file.metadata()?;
    if metadata.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    Ok((file, metadata.is_file().then_some(metadata.len())))
}

/// The token of this name, created if there is none: revoked from the start, so that it records where plants come from and
/// gives no access.
fn token_named(store: &mut Store, name: &str) -> anyhow::Result<TokenId> {
    let find = |tokens: Vec<TokenRecord>| tokens.into_iter().find(|token| *token.name == *name);
    if let Some(token) = find(store.tokens()?) {
        return Ok(token.id);
    }
    let secret = Token::generate().context("cannot get random numbers")?;
    let new = TokenRecord::new(name, secret.digest());
    // False if another process has created one at the same time.
    let new = TokenRecord {
        revoked_at: Some(new.created_at),
        ..new
    };
    store.create_token(&new, &current_user())?;
    let token = find(store.tokens()?);
    let token = token.with_context(|| format!("cannot create the token {name}"))?;
    Ok(token.id)
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
    fn store(&mut self, batch: &mut Vec<Addition>) -> Result<Vec<Outcome>, StoreError> {
        if batch.is_empty() {
            return Ok(Vec::new());
        }
        if let Some(dry_run) = &mut self.dry_run {
            let expected = dry_run.add(batch, self.store.as_mut())?;
            let is_rejected =
                |outcome: &Outcome| matches!(outcome, Outcome::Conflict | Outcome::Damaged);
            match (self.token, expected.iter().position(is_rejected)) {
                (None, _) => return Ok(expected),
                (Some(_), Some(rejected)) => batch.truncate(rejected + 1),
                (Some(_), None) => {}
            }
        }
        match (&mut self.store, self.token) {
            (Some(store), Some(token)) => add(store, token, batch),
            _ => Ok(Vec::new()),
        }
    }
}

/// Adds a batch, and leaves a server its share of the store. Waits while the WAL has its maximum size.
fn add(store: &mut Store, token: TokenId, batch: &[Addition]) -> Result<Vec<Outcome>, StoreError> {
    let start = Instant::now();
    let mut is_waiting = false;
    loop {
        let attempt = Instant::now();
        // The use of the token makes every batch a write, whose sync covers all earlier writes: otherwise a plant that an
        // interrupted process had written and not synced could be reported as replayed.
        let error = match store.add(batch, &[(token, Timestamp::now())]) {
            Ok(outcomes) => {
                if store.is_shared() {
                    thread::sleep(attempt.elapsed().min(PAUSE_MAX));
                }
                return Ok(outcomes);
            }
            Err(error) => error,
        };
        let timeout = match error.kind {
            Failure::Busy if store.is_shared() => BUSY_TIMEOUT,
            Failure::Full if error.cause.is::<WalFull>() => READER_TIMEOUT,
            _ => return Err(error),
        };
        if start.elapsed() > timeout {
            return Err(error);
        }
        if !mem::replace(&mut is_waiting, true) {
            write_stderr(format!("waiting: {}\n", error.cause));
        }
        thread::sleep(RETRY_PAUSE);
    }
}

/// Plants that are stored together, and the rows between them that are rejected.
#[derive(Default)]
struct Batch {
    additions: Vec<Addition>,
    /// The text of every row: of the next addition, unless it is rejected.
    rows: Vec<(Text, Option<Rejection>)>,
    /// The header of a CSV file, in the first batch.
    header: Vec<u8>,
    /// The bytes of the input up to the end of this batch.
    bytes_read: u64,
}

/// Decodes batches until the end of the input, the first problem of a strict import, or the end of the receiver.
fn read(
    mut reader: Reader<impl BufRead>,
    token: Option<TokenId>,
    len_max: usize,
    is_strict: bool,
    batches: &SyncSender<Batch>,
) -> io::Result<()> {
    let token = token.unwrap_or(TokenId(0)); // a dry run
    let (mut batch, mut bytes_before) = (Batch::default(), 0);
    let ended = loop {
        let entry = match reader.next_entry() {
            Ok(Some(entry)) => entry,
            Ok(None) => break Ok(()),
            // The plants before the error are stored.
            Err(error) => break Err(error),
        };
        let additions = &mut batch.additions;
        let plant = entry
            .plant
            .map(|plant| additions.push(Addition { plant, token }));
        let is_last = is_strict && plant.is_err();
        batch.rows.push((entry.text, plant.err()));
        batch.bytes_read = reader.bytes_read;
        if is_last {
            break Ok(());
        }
        if batch.rows.len() >= len_max || batch.bytes_read - bytes_before >= BATCH_BYTES {
            bytes_before = batch.bytes_read;
            batch.header = mem::take(&mut reader.header);
            if batches.send(mem::take(&mut batch)).is_err() {
                return Ok(());
            }
        }
    };
    batch.header = mem::take(&mut reader.header);
    batch.bytes_read = reader.bytes_read;
    let _ = batches.send(batch);
    ended
}

#[derive(Default)]
struct Counts {
    added: u64,
    replayed: u64,
    conflict: u64,
    damaged: u64,
    /// Invalid lines, not rows: a malformed row may contain lines that should have been rows.
    invalid: u64,
    problems: u64,
}

impl Counts {
    fn rejected(&self) -> u64 {
        self.conflict + self.damaged + self.invalid
    }

    /// Counts an outcome. Returns why the plant was rejected.
    fn count(&mut self, outcome: Outcome) -> Option<Rejection> {
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
        let problem = problem?.to_owned();
        Some(Rejection { problem, lines: 1 })
    }
}

impl Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "added {}, replayed {}, conflict {}, invalid {}",
            self.added, self.replayed, self.conflict, self.invalid
        )?;
        match self.damaged {
            0 => Ok(()),
            damaged => write!(f, ", damaged {damaged}"),
        }
    }
}

/// The rejected rows as they were, each after a comment with the reason, which an import skips.
struct Rejects<'a> {
    path: &'a Path,
    file: BufWriter<&'a File>,
    has_header: bool,
    /// The last part was not the end of its row.
    is_within_row: bool,
}

impl<'a> Rejects<'a> {
    fn new((file, path): (&'a AtomicFile, &'a Path)) -> Self {
        Self {
            path,
            file: BufWriter::new(file.file()),
            has_header: false,
            is_within_row: false,
        }
    }

    /// Writes a row, or a part of it.
    fn write(&mut self, header: &[u8], text: &Text, rejection: &Rejection) -> io::Result<()> {
        if !mem::replace(&mut self.has_header, true) {
            self.file.write_all(header)?;
        }
        if !mem::replace(&mut self.is_within_row, !text.is_end) {
            writeln!(self.file, "{COMMENT}{}: {}", text.lines, rejection.problem)?;
        }
        self.file.write_all(&text.raw)?;
        // The last line of the input may have no newline.
        if text.is_end && !text.raw.ends_with(b"\n") {
            self.file.write_all(b"\n")?;
        }
        Ok(())
    }

    fn cannot_write(&self) -> String {
        format!("cannot write {}", self.path.display())
    }
}
