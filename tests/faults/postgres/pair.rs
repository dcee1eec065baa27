//! A PostgreSQL primary with a synchronous standby, which can switch roles.

use crate::harness::wait_until;
use crate::postgres::cluster::{Postgres, free_port};

pub struct Pair {
    pub primary: Postgres,
    pub standby: Postgres,
}

impl Pair {
    /// The database has to be prepared before commits wait for a standby.
    pub fn start_new(prepare: impl FnOnce(&Postgres)) -> Self {
        let primary = Postgres::start_new();
        prepare(&primary);
        Self::with(primary, free_port())
    }

    fn with(primary: Postgres, port: u16) -> Self {
        // Set before the standby exists: when it connects, every backend of the primary uses the setting.
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

    /// The store URL of the nodes, with both hosts: they use the one that accepts writes.
    pub fn store(&self) -> String {
        let (one, two) = (
            self.primary.port().min(self.standby.port()),
            self.primary.port().max(self.standby.port()),
        );
        format!("postgres://postgres@127.0.0.1:{one},127.0.0.1:{two}/plants")
    }

    /// Kills the primary and promotes the standby, which then runs without a standby.
    pub fn fail_over(&mut self) {
        self.primary.kill();
        self.standby.promote();
        self.standby.wait_for_standby(false);
        self.exchange();
    }

    /// Kills the primary after the standby was promoted.
    pub fn exchange(&mut self) {
        self.primary.kill();
        std::mem::swap(&mut self.primary, &mut self.standby);
    }

    /// Replaces the old primary by a standby of the new one.
    pub fn rejoin(self) -> Self {
        let Self { primary, standby } = self;
        let port = standby.port();
        drop(standby);
        Self::with(primary, port)
    }
}
