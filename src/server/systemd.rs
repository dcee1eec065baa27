//! What systemd is told (`Type=notify`): ready once connections are taken, stopping once they are drained. Where nobody
//! listens nothing is told, and a service manager that does not take it holds up nothing.

use std::env;
use std::ffi::OsStr;
use std::io;
use std::net::SocketAddr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{self, UnixDatagram};
use std::time::Duration;

/// How long systemd may take to take a message; it is as good as always there.
const TIMEOUT: Duration = Duration::from_secs(1);

/// What ending takes beside draining: the last commit and the log, with room.
const END: Duration = Duration::from_secs(5);

/// Connections are taken.
pub(super) fn ready(address: SocketAddr) {
    tell(&format!("READY=1\nSTATUS=Listening on {address}"));
}

/// We end, and it takes this long at most. So that `TimeoutStopSec=` need not know of `--drain-timeout`.
pub(super) fn stopping(drain_timeout: Duration) {
    let timeout = drain_timeout.saturating_add(END).as_micros();
    tell(&format!(
        "STOPPING=1\nSTATUS=Draining\nEXTEND_TIMEOUT_USEC={timeout}"
    ));
}

fn tell(state: &str) {
    let Some(socket) = env::var_os("NOTIFY_SOCKET") else {
        return;
    };
    if let Err(error) = send(&socket, state) {
        tracing::warn!(%error, "systemd was not told; see NOTIFY_SOCKET");
    }
}

fn send(name: &OsStr, state: &str) -> io::Result<()> {
    let socket = UnixDatagram::unbound()?;
    socket.set_write_timeout(Some(TIMEOUT))?;
    socket.send_to_addr(state.as_bytes(), &address(name)?)?;
    Ok(())
}

/// A path, or with `@` a name that is no file.
fn address(name: &OsStr) -> io::Result<net::SocketAddr> {
    #[cfg(target_os = "linux")]
    if let Some(name) = name.as_bytes().strip_prefix(b"@") {
        use std::os::linux::net::SocketAddrExt;
        return net::SocketAddr::from_abstract_name(name);
    }
    net::SocketAddr::from_pathname(name)
}
