//! systemd's notification protocol (`Type=notify`): ready once connections are accepted, stopping once the server drains.
//! Nothing is sent without `NOTIFY_SOCKET`. The `sd-notify` crate sends without a timeout, so a service manager that hangs
//! would block the start; this does not.

use std::env;
use std::ffi::OsStr;
use std::io;
use std::net::SocketAddr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{self, UnixDatagram};
use std::time::Duration;

const SEND_TIMEOUT: Duration = Duration::from_secs(1);

/// How long a shutdown takes after the drain timeout at most: the final commit and the log.
const AFTER_DRAIN_MAX: Duration = Duration::from_secs(5);

pub(super) fn ready(address: SocketAddr) {
    notify(&format!("READY=1\nSTATUS=Listening on {address}"));
}

/// Extends the timeout of the unit, so that `TimeoutStopSec=` does not have to follow `--drain-timeout`.
pub(super) fn stopping(drain_timeout: Duration) {
    let timeout = drain_timeout.saturating_add(AFTER_DRAIN_MAX).as_micros();
    notify(&format!(
        "STOPPING=1\nSTATUS=Draining\nEXTEND_TIMEOUT_USEC={timeout}"
    ));
}

fn notify(state: &str) {
    let Some(socket) = env::var_os("NOTIFY_SOCKET") else {
        return;
    };
    if let Err(error) = send(&socket, state) {
        tracing::warn!(%error, "cannot notify systemd; see NOTIFY_SOCKET");
    }
}

fn send(name: &OsStr, state: &str) -> io::Result<()> {
    let socket = UnixDatagram::unbound()?;
    socket.set_write_timeout(Some(SEND_TIMEOUT))?;
    socket.send_to_addr(state.as_bytes(), &address(name)?)?;
    Ok(())
}

/// A path, or with `@` a name in the abstract namespace.
fn address(name: &OsStr) -> io::Result<net::SocketAddr> {
    #[cfg(target_os = "linux")]
    if let Some(name) = name.as_bytes().strip_prefix(b"@") {
        use std::os::linux::net::SocketAddrExt;
        return net::SocketAddr::from_abstract_name(name);
    }
    net::SocketAddr::from_pathname(name)
}
