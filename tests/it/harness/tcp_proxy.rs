//! A TCP proxy in front of a database server: it simulates an outage, a slow server, and an address that leads to another server.

use std::io;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use super::{free_port, wait_until};

/// It ends with the test.
pub struct TcpProxy {
    pub address: SocketAddr,
    /// Where it leads to from the next `open` on.
    pub server: SocketAddr,
    /// How long a new connection waits before it is connected to the server, from the next `open` on.
    pub delay: Duration,
    open: Option<Open>,
}

#[derive(Clone, Default)]
struct Open {
    is_closed: Arc<AtomicBool>,
    streams: Arc<Mutex<Vec<TcpStream>>>,
}

impl TcpProxy {
    /// One that is open.
    pub fn to(server: SocketAddr) -> Self {
        let mut proxy = Self::closed(server);
        proxy.open();
        proxy
    }

    /// One that refuses connections until it is opened.
    pub fn closed(server: SocketAddr) -> Self {
        Self {
            address: (Ipv4Addr::LOCALHOST, free_port()).into(),
            server,
            delay: Duration::ZERO,
            open: None,
        }
    }

    pub fn open(&mut self) {
        let mut listener = None;
        wait_until("the port is free", || {
            listener = TcpListener::bind(self.address).ok();
            listener.is_some()
        });
        let listener = listener.expect("just bound");
        let open = Open::default();
        self.open = Some(open.clone());
        let (server, delay) = (self.server, self.delay);
        thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                if open.is_closed.load(Ordering::SeqCst) {
                    return;
                }
                let open = open.clone();
                thread::spawn(move || {
                    thread::sleep(delay);
                    // If the server is away, the connection is closed.
                    let _ = open.connect(near, server);
                });
            }
        });
    }

    /// Closes every connection; new ones are refused.
    pub fn close(&mut self) {
        let open = self.open.take().expect("it is open");
        open.is_closed.store(true, Ordering::SeqCst);
        drop(TcpStream::connect(self.address)); // wakes the thread, which drops the listener
        wait_until("connections are refused", || {
            TcpStream::connect(self.address).is_err()
        });
        for stream in open.streams.lock().expect("no panic").drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for TcpProxy {
    fn drop(&mut self) {
        if self.open.is_some() && !thread::panicking() {
            self.close();
        }
    }
}

impl Open {
    fn connect(&self, near: TcpStream, server: SocketAddr) -> io::Result<()> {
        let far = TcpStream::connect(server)?;
        let mut streams = self.streams.lock().expect("no panic");
        // The proxy may have been closed in the meantime.
        if self.is_closed.load(Ordering::SeqCst) {
            return Ok(());
        }
        streams.extend([near.try_clone()?, far.try_clone()?]);
        drop(streams);
        for (mut from, mut to) in [(near.try_clone()?, far.try_clone()?), (far, near)] {
            thread::spawn(move || {
                let _ = io::copy(&mut from, &mut to);
                let _ = to.shutdown(Shutdown::Both);
            });
        }
        Ok(())
    }
}
