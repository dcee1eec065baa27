//! Reading ahead: a thread decodes the next plants while those before are being stored. No more than a few batches exist at a
//! time.

use std::io::{self, BufRead};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

use crate::exchange::{Lines, Part, Reader, Rejection};
use crate::store::{Addition, TokenId};

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
