//! The limit of the WAL. A read transaction that stays open keeps SQLite from resetting the WAL, which then grows with every write.
//! At the limit nothing more is written until the WAL has been reset.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rusqlite::Connection;

use crate::fs::with_suffix;
use crate::sqlite_format::{PAGE_LEN, WAL_FRAME_HEADER_LEN, WAL_HEADER_LEN};
use crate::store::error::{Failure, StoreError, WalFull};

/// The limit unless `Store::limit_wal` sets another.
const BYTES_MAX: u64 = 1 << 30;

const HEADER_BYTES: u64 = WAL_HEADER_LEN as u64;
const FRAME_BYTES: u64 = WAL_FRAME_HEADER_LEN as u64 + PAGE_LEN as u64;

/// The bytes of the `-shm` file that a reader locks, according to the WAL-index format of SQLite.
const READ_LOCKS: std::ops::RangeInclusive<u64> = 123..=127;

pub(super) struct WalLimit {
    bytes_max: u64,
    frames_max: u64,
    /// How many halves of the limit were used when that was last logged.
    halves_logged: u64,
}

impl Default for WalLimit {
    fn default() -> Self {
        Self::new(BYTES_MAX)
    }
}

impl WalLimit {
    pub(super) fn new(bytes_max: u64) -> Self {
        Self {
            bytes_max,
            frames_max: (bytes_max.saturating_sub(HEADER_BYTES) / FRAME_BYTES).max(2),
            halves_logged: 0,
        }
    }

    /// True if a WAL of this many frames is to be reset: it has reached the limit, or half of it for the first time.
    pub(super) fn is_reached(&self, frames: i32) -> bool {
        let used = self.halves_used(frames);
        used == 2 || used > self.halves_logged
    }

    /// How many halves of the limit a WAL of this many frames uses: 0, 1 or 2.
    fn halves_used(&self, frames: i32) -> u64 {
        let frames = u64::try_from(frames).unwrap_or_default();
        (2 * frames / self.frames_max).min(2)
    }

    /// Calls `reset` if the limit is reached, which returns false if a reader prevents it. Returns whether the WAL was reset; fails if
    /// it stays at the limit.
    pub(super) fn enforce(
        &mut self,
        frames: i32,
        connection: &Connection,
        reset: impl FnOnce() -> Result<bool, StoreError>,
    ) -> Result<bool, StoreError> {
        let used = self.halves_used(frames);
        if !self.is_reached(frames) {
            if used < self.halves_logged {
                self.log_reset();
            }
            return Ok(false);
        }
        if reset()? {
            self.log_reset();
            return Ok(true);
        }
        let (bytes_max, held_by) = (self.bytes_max, readers(connection.path()));
        if used > self.halves_logged {
            self.halves_logged = used;
            let message = if used == 2 {
                "the WAL has reached its limit because a read transaction keeps it from being reset; adds are rejected until that ends"
            } else {
                "the WAL has reached half of its limit because a read transaction keeps it from being reset"
            };
            let wal_bytes = HEADER_BYTES + u64::from(frames.unsigned_abs()) * FRAME_BYTES;
            tracing::warn!(wal_bytes, max_wal_bytes = bytes_max, held_by, "{message}");
        }
        if used == 2 {
            return Err(Failure::Full.because(WalFull { bytes_max, held_by }));
        }
        Ok(false)
    }

    fn log_reset(&mut self) {
        match std::mem::take(&mut self.halves_logged) {
            0 => {}
            1 => tracing::info!("the WAL was reset"),
            _ => tracing::info!("the WAL was reset; adds are accepted again"),
        }
    }
}

/// The other processes that have a read transaction open on this database, as far as the kernel lists their locks.
fn readers(database: Option<&str>) -> String {
    let found = database.and_then(|database| {
        let index = with_suffix(Path::new(database), "-shm");
        let inode = fs::metadata(index).ok()?.ino();
        let locks = fs::read_to_string("/proc/locks").ok()?;
        let mut pids: Vec<u32> = locks
            .lines()
            .filter_map(|lock| reader(lock, inode))
            .filter(|pid| *pid != std::process::id())
            .collect();
        pids.sort_unstable();
        pids.dedup();
        let name = |pid: &u32| match fs::read_to_string(format!("/proc/{pid}/comm")) {
            Ok(name) => format!("process {pid} ({})", name.trim_end()),
            Err(_) => format!("process {pid}"),
        };
        let names: Vec<_> = pids.iter().map(name).collect();
        (!names.is_empty()).then(|| names.join(", "))
    });
    found.unwrap_or_else(|| "an unknown process".to_owned())
}

/// The process of a line such as `3: POSIX  ADVISORY  READ 4711 08:01:131130 124 124`, if it is the lock of a reader of this file. The
/// device is not compared: for some file systems the kernel names another one here than it does elsewhere.
fn reader(lock: &str, inode: u64) -> Option<u32> {
    let fields: Vec<_> = lock.split_whitespace().collect();
    let [_, "POSIX", _, "READ", pid, file, first, last] = fields[..] else {
        return None;
    };
    let is_of_file = file.rsplit(':').next()?.parse() == Ok(inode);
    let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
    let is_of_reader = first <= *READ_LOCKS.end() && last >= *READ_LOCKS.start();
    // A process of another namespace has no number here.
    let pid = pid.parse().ok().filter(|pid| *pid > 0)?;
    (is_of_file && is_of_reader).then_some(pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_is_recognized_by_its_lock() {
        let of = |line| reader(line, 131_130);
        assert_eq!(
            of("3: POSIX  ADVISORY  READ 4711 08:01:131130 124 124"),
            Some(4711)
        );
        for other in [
            "3: POSIX  ADVISORY  READ 4711 08:01:131131 124 124",
            "3: POSIX  ADVISORY  WRITE 4711 08:01:131130 124 124",
            "3: POSIX  ADVISORY  READ 4711 08:01:131130 128 128",
            "3: POSIX  ADVISORY  READ -1 08:01:131130 124 124",
            "3: POSIX  ADVISORY  READ 4711 08:01:131130 128 EOF",
            "3: -> POSIX  ADVISORY  READ 4711 08:01:131130 124 124",
            "3: FLOCK  ADVISORY  WRITE 4711 08:01:131130 0 EOF",
            "",
        ] {
            assert_eq!(of(other), None, "{other}");
        }
    }
}
