//! A TCP proxy in front of a server: it simulates an outage, a slow server, an address that leads to another server, and whatever a
//! `Carrier` does to the bytes.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
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
    carriers: Carriers,
    open: Option<Open>,
}

/// Makes the carrier of a new connection, before that is connected to the server.
type Carriers = Arc<dyn Fn(&TcpStream) -> Box<dyn Carrier> + Send + Sync>;

/// Forwards the bytes of one connection. No bytes are the end of what one side sends; after them, the connection is closed.
pub trait Carrier: Send + Sync {
    /// Forwards what the client has sent; none closes the connection.
    fn request(&self, bytes: &[u8], mut server: &TcpStream) -> Option<()> {
        server.write_all(bytes).ok()
    }

    /// Forwards what the server has sent.
    fn response(&self, bytes: &[u8], mut client: &TcpStream) -> Option<()> {
        client.write_all(bytes).ok()
    }
}

struct Unchanged;

impl Carrier for Unchanged {}

#[derive(Clone, Default)]
struct Open {
    is_closed: Arc<AtomicBool>,
    connections: Arc<Mutex<Vec<Weak<Connection>>>>,
}

struct Connection {
    client: TcpStream,
    server: TcpStream,
    carrier: Box<dyn Carrier>,
}

impl TcpProxy {
    /// One that is open.
    pub fn to(server: SocketAddr) -> Self {
        Self::carrying(server, |_| Box::new(Unchanged))
    }

    /// One that is open, whose connections have these carriers.
    pub fn carrying(
        server: SocketAddr,
        carriers: impl Fn(&TcpStream) -> Box<dyn Carrier> + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let mut proxy = Self {
            address: listener.local_addr().expect("an address"),
            server,
            delay: Duration::ZERO,
            carriers: Arc::new(carriers),
            open: None,
        };
        proxy.accept(listener);
        proxy
    }

    /// One that refuses connections until it is opened.
    pub fn closed(server: SocketAddr) -> Self {
        Self {
            address: (Ipv4Addr::LOCALHOST, free_port()).into(),
            server,
            delay: Duration::ZERO,
            carriers: Arc::new(|_| Box::new(Unchanged)),
            open: None,
        }
    }

    pub fn open(&mut self) {
        let mut listener = None;
        wait_until("the port is free", || {
            listener = TcpListener::bind(self.address).ok();
            listener.is_some()
        });
        self.accept(listener.expect("just bound"));
    }

    fn accept(&mut self, listener: TcpListener) {
        let open = Open::default();
        self.open = Some(open.clone());
        let (server, delay, carriers) = (self.server, self.delay, Arc::clone(&self.carriers));
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                if open.is_closed.load(Ordering::SeqCst) {
                    return;
                }
                let (open, carriers) = (open.clone(), Arc::clone(&carriers));
                thread::spawn(move || {
                    thread::sleep(delay);
                    let carrier = carriers(&client);
                    // If the server is away, the connection is closed.
                    if let Ok(server) = TcpStream::connect(server) {
                        open.forward(Connection {
                            client,
                            server,
                            carrier,
                        });
                    }
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
        for connection in open.connections.lock().expect("no panic").drain(..) {
            if let Some(connection) = connection.upgrade() {
                connection.close();
            }
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
    /// Forwards bytes until one side ends the connection.
    fn forward(&self, connection: Connection) {
        let connection = Arc::new(connection);
        let mut connections = self.connections.lock().expect("no panic");
        // The proxy may have been closed in the meantime.
        if self.is_closed.load(Ordering::SeqCst) {
            return;
        }
        connections.retain(|connection| connection.strong_count() > 0);
        connections.push(Arc::downgrade(&connection));
        drop(connections);
        let Connection {
            client,
            server,
            carrier,
        } = &*connection;
        let _ = (client.set_nodelay(true), server.set_nodelay(true));
        thread::scope(|scope| {
            scope.spawn(|| {
                copy(client, |bytes| carrier.request(bytes, server));
                connection.close();
            });
            copy(server, |bytes| carrier.response(bytes, client));
            connection.close();
        });
    }
}

impl Connection {
    fn close(&self) {
        let _ = self.client.shutdown(Shutdown::Both);
        let _ = self.server.shutdown(Shutdown::Both);
    }
}

fn copy(mut from: &TcpStream, carry: impl Fn(&[u8]) -> Option<()>) {
    let mut buffer = vec![0; 1 << 16];
    loop {
        let len = from.read(&mut buffer).unwrap_or(0);
        if carry(&buffer[..len]).is_none() || len == 0 {
            return;
        }
    }
}
