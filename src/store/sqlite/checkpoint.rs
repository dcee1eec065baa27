//! Moving the log into the database while adds go on.
//!
//! SQLite would do this by itself inside a commit, but it would keep a failed fsync to itself as well: the
//! next attempt would seem to succeed, the log would be overwritten, and the plants in it would be gone.
//! And with random ids every plant is a page somewhere else, which takes a disk longer than the adds
//! themselves; so most of it is done by a thread with a connection of its own.

use std::fs::File;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rusqlite::Connection;
use rusqlite::config::DbConfig;

use crate::store::error::StoreError;
use crate::store::sqlite::open;

/// The log is moved whenever it has grown by this many pages of 4 KiB.
const PAGES_LONG: i32 = 1000;

/// So few pages are moved between two batches. Only then can the log begin again: while the thread moves what
/// there was, more is added.
const PAGES_FEW: i32 = 400;

/// A log that has grown by this many is moved before anything else, as a start after a crash has to move it all.
const PAGES_MAX: i32 = 4000;

/// How long a batch waits for the thread to move all of a WAL that is to be reset, and then for short readers to end.
const RESET_TIMEOUT: Duration = Duration::from_secs(1);
const READER_TIMEOUT: Duration = Duration::from_millis(50);

/// When to move it, and who does.
pub struct Checkpoints {
    /// How long the log was when it had been moved.
    moved_at: i32,
    /// The thread moves what was in the log before this.
    moving: Option<i32>,
    mover: Mover,
}

/// A checkpoint that is due.
#[derive(Clone, Copy)]
pub enum Step {
    InBackground,
    AtOnce,
}

struct Mover {
    thread: Option<JoinHandle<()>>,
    requests: Option<SyncSender<()>>,
    results: Receiver<Result<(), StoreError>>,
}

impl Checkpoints {
    /// With a connection besides the one that adds, and the file to be synced.
    pub fn new(connection: Connection, database: File) -> Self {
        Self {
            moved_at: 0,
            moving: None,
            mover: Mover::start(connection, database),
        }
    }

    /// What is to be done before the next batch, given the length of the WAL. After a failure nothing may be acknowledged
    /// any more.
    pub fn next_step(&mut self, pages: i32) -> Result<Option<Step>, StoreError> {
        if pages < self.moved_at {
            self.moved_at = 0; // the log has begun again
        }
        let grown = pages - self.moved_at;
        let Some(up_to) = self.moving else {
            return Ok((grown >= PAGES_LONG).then_some(Step::InBackground));
        };
        let patience = if grown >= PAGES_MAX {
            Duration::MAX
        } else {
            Duration::ZERO
        };
        let Some(result) = self.mover.result(patience) else {
            return Ok(None);
        };
        self.moving = None;
        result?;
        let is_much = grown < PAGES_MAX && pages - up_to > PAGES_FEW;
        Ok(Some(if is_much {
            Step::InBackground
        } else {
            Step::AtOnce
        }))
    }

    /// Does it, with the connection that adds.
    pub fn run(&mut self, step: Step, adding: &Connection, pages: i32) -> Result<(), StoreError> {
        match step {
            Step::InBackground => {
                self.have_moved(pages);
                Ok(())
            }
            Step::AtOnce => {
                self.moved_at = pages;
                move_log(adding)
            }
        }
    }

    /// Moves all of the WAL into the database and resets it. False if a reader prevents that, or if it takes longer than a moment; then the
    /// thread goes on with it.
    pub fn reset(&mut self, adding: &Connection, pages: i32) -> Result<bool, StoreError> {
        if self.moving.is_none() {
            self.have_moved(pages);
        }
        let Some(result) = self.mover.result(RESET_TIMEOUT) else {
            return Ok(false);
        };
        self.moving = None;
        result?;
        let is_reset = reset(adding)?;
        if is_reset {
            self.moved_at = 0;
        }
        Ok(is_reset)
    }

    fn have_moved(&mut self, up_to: i32) {
        self.mover.ask();
        self.moving = Some(up_to);
    }
}

impl Mover {
    fn start(connection: Connection, database: File) -> Self {
        let (requests, asked) = mpsc::sync_channel(1);
        let (done, results) = mpsc::sync_channel(1);
        let thread = thread::Builder::new()
            .name("checkpoints".to_owned())
            .spawn(move || {
                // SQLite leaves the sync to whoever moves the last page; with all of it still to be written that
                // is a long wait.
                let work = || {
                    move_log(&connection)?;
                    let synced = database.sync_data();
                    synced.map_err(|error| StoreError::Fatal(error.into()))
                };
                while let Ok(()) = asked.recv()
                    && done.send(work()).is_ok()
                {}
                // In this order: closing a file drops every lock that the process has on it, SQLite's included.
                drop(connection);
                drop(database);
            })
            .expect("a process that has just started can start a thread");
        Self {
            thread: Some(thread),
            requests: Some(requests),
            results,
        }
    }

    fn ask(&self) {
        if let Some(requests) = &self.requests {
            // A thread that is gone has no result, and that is noticed.
            let _ = requests.try_send(());
        }
    }

    /// What came of it, if it is over within this time.
    fn result(&self, patience: Duration) -> Option<Result<(), StoreError>> {
        match self.results.recv_timeout(patience) {
            Ok(result) => Some(result),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => {
                panic!("the thread of the checkpoints has panicked")
            }
        }
    }
}

impl Drop for Mover {
    fn drop(&mut self) {
        self.requests = None;
        if let Some(thread) = self.thread.take() {
            // Whatever it has not moved, the next start moves.
            let _ = thread.join();
        }
    }
}

/// Moves all of the WAL into the database and resets it, unless a reader prevents that for longer than a moment.
pub(super) fn reset(connection: &Connection) -> Result<bool, StoreError> {
    connection.busy_timeout(READER_TIMEOUT)?;
    let is_reset = checkpoint(connection, "TRUNCATE");
    connection.busy_timeout(open::BUSY_TIMEOUT)?;
    match is_reset {
        Err(StoreError::Busy(_)) => Ok(false),
        other => other,
    }
}

/// A reader in the way, or a full disk, leaves the rest for next time.
pub(super) fn move_log(connection: &Connection) -> Result<(), StoreError> {
    match checkpoint(connection, "PASSIVE") {
        Ok(_) | Err(StoreError::Full(_) | StoreError::Busy(_) | StoreError::Unusable(_)) => Ok(()),
        Err(failed) => Err(failed),
    }
}

fn checkpoint(connection: &Connection, mode: &str) -> Result<bool, StoreError> {
    let done = open::checkpoint(connection, mode).map_err(StoreError::from);
    if let Err(StoreError::Fatal(_)) = &done {
        // After a failed fsync another one may claim success, so closing must not run a checkpoint.
        connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
    }
    done
}
