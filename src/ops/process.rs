//! What the kernel says of this process. What it does not say here is left out.

use std::fs;

use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_gettime};

/// Figures of the whole process.
pub struct Process {
    /// Seconds of processor time.
    pub cpu_seconds: f64,
    /// Memory that it has.
    pub resident_bytes: Option<u64>,
    /// Memory that it has asked for.
    pub virtual_bytes: Option<u64>,
    /// Files and connections.
    pub open_fds: Option<u64>,
    /// As many as it may have.
    pub max_fds: Option<u64>,
}

impl Process {
    /// As it is now.
    pub fn look() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let bytes = |name| Some(kibibytes(&status, name)? * 1024);
        let cpu = clock_gettime(ClockId::ProcessCPUTime);
        Self {
            #[expect(
                clippy::cast_precision_loss,
                reason = "it has been less than a century"
            )]
            cpu_seconds: cpu.tv_sec as f64 + cpu.tv_nsec as f64 / 1e9,
            resident_bytes: bytes("VmRSS:"),
            virtual_bytes: bytes("VmSize:"),
            // The directory is open too, while it is read.
            open_fds: fs::read_dir("/proc/self/fd")
                .ok()
                .map(|fds| (fds.count() as u64).saturating_sub(1)),
            max_fds: getrlimit(Resource::Nofile).current,
        }
    }
}

fn kibibytes(status: &str, name: &str) -> Option<u64> {
    let value = status.lines().find_map(|line| line.strip_prefix(name))?;
    value.trim().strip_suffix(" kB")?.parse().ok()
}
