//! What the kernel reports about the process, and about the files of the store.

use std::fs;
use std::time::Duration;

use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_gettime};

use crate::store::{FileSizes, Location, file_sizes};

/// `None` where the kernel reports nothing, or not in time.
#[derive(Default)]
pub(super) struct System {
    pub(super) cpu_seconds: Option<f64>,
    pub(super) resident_bytes: Option<u64>,
    pub(super) virtual_bytes: Option<u64>,
    /// None for PostgreSQL.
    pub(super) files: Option<FileSizes>,
}

impl System {
    /// Can block on a stuck disk.
    pub(super) fn read(location: &Location) -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let bytes = |name| {
            let value = status.lines().find_map(|line| line.strip_prefix(name))?;
            let kibibytes: u64 = value.trim().strip_suffix(" kB")?.parse().ok()?;
            Some(kibibytes * 1024)
        };
        let cpu = clock_gettime(ClockId::ProcessCPUTime);
        let cpu = Duration::try_from(cpu).ok();
        Self {
            cpu_seconds: cpu.map(|time| time.as_secs_f64()),
            resident_bytes: bytes("VmRSS:"),
            virtual_bytes: bytes("VmSize:"),
            files: file_sizes(location),
        }
    }
}

/// The open file descriptors, without the one that reads the directory.
pub(super) fn open_fds() -> Option<usize> {
    let fds = fs::read_dir("/proc/self/fd").ok()?;
    Some(fds.count().saturating_sub(1))
}

pub(super) fn max_fds() -> Option<u64> {
    getrlimit(Resource::Nofile).current
}
