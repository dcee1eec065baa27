//! The limit of open files, raised as far as it can be. Connections get what the rest of the process does not need: a
//! public listener that uses up all file descriptors would stop the store and the private listener too.

use std::thread;

use rustix::process::{Resource, getrlimit, setrlimit};

use crate::config::Settings;
use crate::ops;
use crate::store::Location;

/// Standard streams, listeners, the files of a store (each several times), `/proc`, and room for what libraries open.
const BASE: usize = 48;

/// A runtime: two for epoll, one to wake it, one for signals.
const PER_RUNTIME: usize = 4;

/// A connection to a database: a runtime, and the sockets of an old and a new connection.
const PER_DATABASE_CONNECTION: usize = PER_RUNTIME + 4;

/// As many connections as are wanted, or as the limit of open files leaves room for. An error if that is none.
pub(super) fn max_connections(settings: &Settings) -> anyhow::Result<usize> {
    let wanted = settings.max_connections;
    let Some(limit) = raised_limit() else {
        return Ok(wanted);
    };
    let reserve = reserve(settings);
    let room = limit.saturating_sub(reserve);
    anyhow::ensure!(
        room > 0,
        "the limit of open files is {limit}, and the server needs more than {reserve}; \
         raise it (`ulimit -n`, or LimitNOFILE= of a systemd unit)"
    );
    if wanted > room {
        tracing::warn!(
            max_connections = room,
            "--max-connections is {wanted}, but the limit of open files is {limit}, which leaves room for {room}; \
             raise that limit (`ulimit -n`, or LimitNOFILE= of a systemd unit), or lower --max-connections"
        );
    }
    Ok(wanted.min(room))
}

/// What is kept for everything but connections to the public listener.
fn reserve(settings: &Settings) -> usize {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let database_connections = match settings.store.store {
        Location::Sqlite(_) => 0,
        Location::Postgres(_) => settings.store_connections + 1,
    };
    // Besides the workers, the main thread and that of the private listener have a runtime.
    BASE + ops::CONNECTIONS_MAX
        + (cores + 2) * PER_RUNTIME
        + database_connections * PER_DATABASE_CONNECTION
}

/// The limit, after raising the soft one to the hard one. None if there is no limit.
fn raised_limit() -> Option<usize> {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::debug!(%error, "cannot raise the limit of open files");
    }
    let limit = getrlimit(Resource::Nofile).current?;
    Some(usize::try_from(limit).unwrap_or(usize::MAX))
}
