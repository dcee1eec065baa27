//! A TCP connection between two programs that can be cut as a network is: nothing arrives any more, and neither side is notified.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// Listens on a port of its own and forwards connections to another one.
pub struct Link {
    pub port: u16,
    shared: Arc<Shared>,
}

struct Shared {
    to: u16,
    is_cut: AtomicBool,
    has_ended: AtomicBool,
}

impl Link {
    pub fn new(to: u16) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let shared = Arc::new(Shared {
            to,
            is_cut: AtomicBool::new(false),
            has_ended: AtomicBool::new(false),
        });
        let for_thread = Arc::clone(&shared);
        thread::spawn(move || accept(&listener, &for_thread));
        Self { port, shared }
    }

    /// What is sent while the link is cut arrives later, as with TCP.
    pub fn cut(&self, cut: bool) {
        self.shared.is_cut.store(cut, Ordering::SeqCst);
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.shared.has_ended.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)); // wakes up the accept loop
    }
}

impl Shared {
    /// Waits while the link is cut.
    fn pass(&self) {
        while self.is_cut.load(Ordering::SeqCst) && !self.has_ended.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(5));
        }
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    for client in listener.incoming() {
        if shared.has_ended.load(Ordering::SeqCst) {
            return;
        }
        let Ok(client) = client else { continue };
        let shared = Arc::clone(shared);
        thread::spawn(move || {
            shared.pass();
            let Ok(server) = TcpStream::connect((Ipv4Addr::LOCALHOST, shared.to)) else {
                return; // the client sees a closed connection
            };
            let _ = (client.set_nodelay(true), server.set_nodelay(true));
            thread::scope(|scope| {
                scope.spawn(|| forward(&client, &server, &shared));
                forward(&server, &client, &shared);
            });
        });
    }
}

/// Forwards bytes until one side closes the connection, which the other side learns when the link is not cut.
fn forward(mut from: &TcpStream, mut to: &TcpStream, shared: &Shared) {
    let mut buffer = vec![0; 1 << 16];
    loop {
        let len = from.read(&mut buffer).unwrap_or(0);
        shared.pass();
        if len == 0 || to.write_all(&buffer[..len]).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}
