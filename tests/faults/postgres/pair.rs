//! A primary of PostgreSQL and its synchronous standby, which change places.

use crate::harness::wait_until;
use crate::postgres::cluster::{Postgres, free_port};

/// A primary and its synchronous standby.
pub struct Pair {
    pub primary: Postgres,
    pub standby: Postgres,
}

impl Pair {
    /// The database has to be prepared while there is nobody to wait for.
    pub fn start_new(prepare: impl FnOnce(&Postgres)) -> Self {
        let primary = Postgres::start_new();
        prepare(&primary);
        Self::with(primary, free_port())
    }

    fn with(primary: Postgres, port: u16) -> Self {
        // Before the copy is made: by the time that it follows, every process of the primary has heard of it.
        primary.wait_for_standby(true);
        let standby = Postgres::start_standby(&primary, port);
        let pair = Self { primary, standby };
        pair.wait_until_in_step();
        pair
    }

    pub fn wait_until_in_step(&self) {
        wait_until("the standby follows", || {
            self.primary.has_synchronous_standby()
        });
    }

    /// The store as nodes are told of it: whichever of the two can be written to.
    pub fn store(&self) -> String {
        let (one, two) = (
            self.primary.port().min(self.standby.port()),
            self.primary.port().max(self.standby.port()),
        );
        format!("postgres://postgres@127.0.0.1:{one},127.0.0.1:{two}/plants")
    }

    /// The primary is killed and the standby takes its place, alone, as a tool for high availability would have it.
    pub fn fail_over(&mut self) {
        self.primary.kill();
        self.standby.promote();
        std::mem::swap(&mut self.primary, &mut self.standby);
        self.primary.wait_for_standby(false);
    }

    /// Where the old primary was, a standby follows the new one.
    pub fn rejoin(self) -> Self {
        let Self { primary, standby } = self;
        let port = standby.port();
        drop(standby);
        Self::with(primary, port)
    }
}
