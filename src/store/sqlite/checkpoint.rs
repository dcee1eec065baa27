//! Checkpoints while adds go on.
//!
//! SQLite would run them by itself inside a commit, but it would hide a failed fsync: the next attempt would seem to succeed, the WAL
//! would be overwritten, and the plants in it would be lost. And with random ids every plant is on a different page, which takes a disk
//! longer to write than the adds themselves; so most of the work is done by a thread with its own connection.

use std::fs::File;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::thread;
use std::time::Duration;

use rusqlite::Connection;

use crate::store::error::{Failure, StoreError};
use crate::store::sqlite::connection;

/// A checkpoint is due whenever the WAL has grown by this many frames of 4 KiB.
const CHECKPOINT_FRAMES: i32 = 1000;

/// A checkpoint of at most this many frames runs between two batches instead of in the thread. Only such a checkpoint can reset the WAL:
/// during a checkpoint of the thread more frames are added.
const SHORT_CHECKPOINT_FRAMES: i32 = 800;

/// If the WAL has grown by this many frames, the next batch waits for the checkpoint: after a crash the next start has to checkpoint all
/// of it.
const UNCHECKPOINTED_FRAMES_MAX: i32 = 3000;

/// How long a batch waits for the thread's checkpoint before a WAL is reset, and then for short readers to end.
const RESET_TIMEOUT: Duration = Duration::from_secs(1);
const READER_TIMEOUT: Duration = Duration::from_millis(50);

/// Decides when a checkpoint is due, and where it runs.
pub(super) struct Checkpointer {
    /// The length of the WAL at the last checkpoint between two batches.
    frames_at_last_checkpoint: i32,
    /// The length of the WAL when the checkpoint began that the thread runs now.
    frames_at_start: Option<i32>,
    requests: Option<SyncSender<()>>,
    results: Receiver<Result<(), StoreError>>,
}

/// A checkpoint that is due.
#[derive(Clone, Copy)]
pub(super) enum Step {
    InBackground,
    BetweenBatches,
}

impl Checkpointer {
    /// Takes a second connection to the store for the thread, and the database file, which the thread syncs.
    pub(super) fn new(connection: Connection, database: File) -> Self {
        let (requests, requested) = mpsc::sync_channel(1);
        let (done, results) = mpsc::sync_channel(1);
        thread::Builder::new()
            .name("checkpoints".to_owned())
            .spawn(move || {
                // SQLite leaves the sync to the connection that writes back the last page; with everything still to be written that
                // takes long.
                let checkpoint = || {
                    passive(&connection)?;
                    let synced = database.sync_data();
                    synced.map_err(|error| Failure::Fatal.because(error))
                };
                while let Ok(()) = requested.recv()
                    && done.send(checkpoint()).is_ok()
                {}
                // In this order: closing a file drops every lock that the process has on it, SQLite's included.
                drop(connection);
                drop(database);
            })
            .expect("a process that has just started can start a thread");
        Self {
            frames_at_last_checkpoint: 0,
            frames_at_start: None,
            requests: Some(requests),
            results,
        }
    }

    /// What is to be done before the next batch, given the length of the WAL. After a failure nothing may be acknowledged
    /// any more.
    pub(super) fn next_step(&mut self, frames: i32) -> Result<Option<Step>, StoreError> {
        if frames < self.frames_at_last_checkpoint {
            self.frames_at_last_checkpoint = 0; // the WAL was reset
        }
        let grown = frames - self.frames_at_last_checkpoint;
        let Some(frames_at_start) = self.frames_at_start else {
            return Ok((grown >= CHECKPOINT_FRAMES).then_some(Step::InBackground));
        };
        let timeout = if grown >= UNCHECKPOINTED_FRAMES_MAX {
            Duration::MAX
        } else {
            Duration::ZERO
        };
        if !self.wait(timeout)? {
            return Ok(None);
        }
        let is_long =
            grown < UNCHECKPOINTED_FRAMES_MAX && frames - frames_at_start > SHORT_CHECKPOINT_FRAMES;
        Ok(Some(if is_long {
            Step::InBackground
        } else {
            Step::BetweenBatches
        }))
    }

    /// Runs or starts a checkpoint; `adding` is the connection that adds.
    pub(super) fn run(
        &mut self,
        step: Step,
        adding: &Connection,
        frames: i32,
    ) -> Result<(), StoreError> {
        match step {
            Step::InBackground => {
                self.start(frames);
                Ok(())
            }
            Step::BetweenBatches => {
                self.frames_at_last_checkpoint = frames;
                passive(adding)
            }
        }
    }

    /// Writes all of the WAL back and resets it. False if a reader prevents that, or if it takes too long; then the thread goes on.
    pub(super) fn reset(&mut self, adding: &Connection, frames: i32) -> Result<bool, StoreError> {
        if self.frames_at_start.is_none() {
            self.start(frames);
        }
        if !self.wait(RESET_TIMEOUT)? {
            return Ok(false);
        }
        let is_reset = reset(adding)?;
        if is_reset {
            self.frames_at_last_checkpoint = 0;
        }
        Ok(is_reset)
    }

    fn start(&mut self, frames: i32) {
        if let Some(requests) = &self.requests {
            // If the thread has ended, `wait` panics.
            let _ = requests.try_send(());
        }
        self.frames_at_start = Some(frames);
    }

    /// False if the thread's checkpoint has not ended within this time.
    fn wait(&mut self, timeout: Duration) -> Result<bool, StoreError> {
        match self.results.recv_timeout(timeout) {
            Ok(result) => {
                self.frames_at_start = None;
                result.map(|()| true)
            }
            Err(RecvTimeoutError::Timeout) => Ok(false),
            Err(RecvTimeoutError::Disconnected) => panic!("the checkpoint thread has panicked"),
        }
    }
}

impl Drop for Checkpointer {
    /// Waits until the thread has ended. The next start checkpoints the frames that are left.
    fn drop(&mut self) {
        self.requests = None;
        self.results.iter().for_each(drop);
    }
}

/// Writes all of the WAL back and resets it. False if a reader prevents that for longer than `READER_TIMEOUT`.
pub(super) fn reset(connection: &Connection) -> Result<bool, StoreError> {
    connection.busy_timeout(READER_TIMEOUT)?;
    let is_reset = checkpoint(connection, "TRUNCATE");
    connection.busy_timeout(connection::BUSY_TIMEOUT)?;
    match is_reset {
        Err(error) if error.kind == Failure::Busy => Ok(false),
        other => other,
    }
}

/// Writes back as many frames as possible. If a reader or a full disk prevents some, a later checkpoint writes them.
pub(super) fn passive(connection: &Connection) -> Result<(), StoreError> {
    match checkpoint(connection, "PASSIVE") {
        Err(error) if matches!(error.kind, Failure::Damaged | Failure::Fatal) => Err(error),
        _ => Ok(()),
    }
}

fn checkpoint(connection: &Connection, mode: &str) -> Result<bool, StoreError> {
    let done = connection::checkpoint(connection, mode).map_err(StoreError::from);
    if done
        .as_ref()
        .is_err_and(|error| error.kind == Failure::Fatal)
    {
        // After a failed fsync another one may claim success, so closing must not run a checkpoint.
        connection::run_checkpoint_on_close(connection, false)?;
    }
    done
}
