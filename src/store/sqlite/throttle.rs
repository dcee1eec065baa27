//! Giving way to a server that shares the machine: work is done in small pieces, with a rest after each that is longer
//! the longer the piece took.

use std::thread;
use std::time::{Duration, Instant};

use rusqlite::{Connection, Error};

/// Steps of SQLite's machine, about a millisecond of them, between two rests of a connection that gives way, and how
/// many times as long as the work these are.
const STEPS_A_PIECE: i32 = 20_000;
const REST: u32 = 3;

/// However long a piece took: it may have been held up by something that is over.
const REST_MAX: Duration = Duration::from_secs(1);

pub(super) struct Pace {
    since: Instant,
    rest: u32,
}

impl Pace {
    /// With rests so many times as long as the work.
    pub(super) fn new(rest: u32) -> Self {
        let since = Instant::now();
        Self { since, rest }
    }

    /// To be called after each piece of work.
    pub(super) fn rest(&mut self) {
        thread::sleep((self.since.elapsed() * self.rest).min(REST_MAX));
        self.since = Instant::now();
    }
}

/// From now on whatever takes long on this connection leaves most of the time to others.
pub(super) fn throttle(connection: &mut Connection) -> Result<(), Error> {
    let mut pace = Pace::new(REST);
    let rest = move || {
        pace.rest();
        false // go on
    };
    connection.progress_handler(STEPS_A_PIECE, Some(rest))
}
