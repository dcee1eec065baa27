//! A TCP proxy between a node and its database, which cuts connections within a batch or delays responses.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::Duration;

use crate::random::Random;

/// The probability of a cut per batch, in 256ths.
const CUTS_OF_256: u64 = 40;

/// Where a batch is cut.
#[derive(Clone, Copy)]
enum Cut {
    /// PostgreSQL receives a part of the request: nothing is stored.
    InTheRequest,
    /// PostgreSQL receives the request; the outcome is unknown.
    AfterTheRequest,
    /// The batch is committed, and the response is discarded.
    BeforeResponse,
    /// The batch is committed, and a part of the response arrives.
    InResponse,
}

const CUTS: [Cut; 4] = [
    Cut::InTheRequest,
    Cut::AfterTheRequest,
    Cut::BeforeResponse,
    Cut::InResponse,
];

/// Closes all connections when it is dropped.
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    server: SocketAddr,
    random: Mutex<Random>,
    cuts: [AtomicUsize; CUTS.len()],
    is_cutting: AtomicBool,
    /// Responses are delayed while this is set.
    is_holding: AtomicBool,
    has_ended: AtomicBool,
    links: Mutex<Vec<Weak<Link>>>,
}

impl Proxy {
    pub fn start(server: SocketAddr, seed: u64) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let address = listener.local_addr().expect("an address");
        let shared = Arc::new(Shared {
            server,
            random: Mutex::new(Random::new(seed)),
            cuts: [const { AtomicUsize::new(0) }; CUTS.len()],
            is_cutting: AtomicBool::new(false),
            is_holding: AtomicBool::new(false),
            has_ended: AtomicBool::new(false),
            links: Mutex::default(),
        });
        let for_thread = Arc::clone(&shared);
        thread::spawn(move || accept(&listener, &for_thread));
        Self { address, shared }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn cut(&self, cut: bool) {
        self.shared.is_cutting.store(cut, Ordering::SeqCst);
    }

    pub fn hold_responses(&self, hold: bool) {
        self.shared.is_holding.store(hold, Ordering::SeqCst);
    }

    /// The number of cuts, in the order of `CUTS`.
    pub fn cuts(&self) -> [usize; CUTS.len()] {
        let count = |cut: Cut| self.shared.cuts[cut as usize].load(Ordering::SeqCst);
        CUTS.map(count)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.has_ended.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address); // wakes up the accept loop
        let links = self.shared.links.lock().expect("no panic");
        links
            .iter()
            .filter_map(Weak::upgrade)
            .for_each(|link| link.end());
    }
}

/// A connection: the node's side and the server's side.
struct Link {
    node: TcpStream,
    server: TcpStream,
    /// The cut that is planned for the next response.
    planned: Mutex<Option<Cut>>,
}

impl Link {
    fn end(&self) {
        let _ = self.node.shutdown(Shutdown::Both);
        let _ = self.server.shutdown(Shutdown::Both);
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    for node in listener.incoming() {
        if shared.has_ended.load(Ordering::SeqCst) {
            return;
        }
        let Ok(node) = node else { continue };
        let Ok(server) = TcpStream::connect(shared.server) else {
            continue; // the node sees a closed connection
        };
        let _ = (node.set_nodelay(true), server.set_nodelay(true));
        let planned = Mutex::default();
        let link = Arc::new(Link {
            node,
            server,
            planned,
        });
        let mut links = shared.links.lock().expect("no panic");
        links.retain(|link| link.strong_count() > 0);
        links.push(Arc::downgrade(&link));
        drop(links);
        for carry in [requests, responses] {
            let (link, shared) = (Arc::clone(&link), Arc::clone(shared));
            thread::spawn(move || {
                carry(&link, &shared);
                link.end();
            });
        }
    }
}

/// Forwards requests until either side closes the connection or it is cut.
fn requests(link: &Link, shared: &Shared) -> Option<()> {
    let mut buffer = vec![0; 1 << 16];
    let mut adds = false;
    loop {
        let bytes = read(&link.node, &mut buffer)?;
        // Only the statement of a batch is prepared, so a message that starts with Bind is a batch. If nothing is prepared, because
        // there may be a pooler, the statement is executed where it is sent.
        let has_insert = bytes
            .windows(29)
            .any(|part| part == b"INSERT INTO plantstore.plants");
        adds |= has_insert;
        let is_batch = (adds && bytes[0] == b'B') || (has_insert && has_execute(bytes));
        let cut = is_batch.then(|| shared.plan()).flatten();
        match cut {
            Some(Cut::InTheRequest) => {
                let part = shared.below(bytes.len());
                (&link.server).write_all(&bytes[..part]).ok()?;
                return shared.count(Cut::InTheRequest);
            }
            Some(Cut::AfterTheRequest) => {
                (&link.server).write_all(bytes).ok()?;
                let micros = shared.below(2000).saturating_sub(1000); // half of them at once
                thread::sleep(Duration::from_micros(micros as u64));
                return shared.count(Cut::AfterTheRequest);
            }
            later => {
                *link.planned.lock().expect("no panic") = later;
                (&link.server).write_all(bytes).ok()?;
            }
        }
    }
}

/// Whether there is an Execute message. A message is its type and a length, which includes itself.
fn has_execute(mut bytes: &[u8]) -> bool {
    while let [kind, a, b, c, d, ..] = bytes {
        if *kind == b'E' {
            return true;
        }
        let len = u32::from_be_bytes([*a, *b, *c, *d]) as usize;
        bytes = bytes.get(1 + len..).unwrap_or_default();
    }
    false
}

/// Forwards responses.
fn responses(link: &Link, shared: &Shared) -> Option<()> {
    let mut buffer = vec![0; 1 << 16];
    loop {
        let bytes = read(&link.server, &mut buffer)?;
        while shared.is_holding.load(Ordering::SeqCst) && !shared.has_ended.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(2));
        }
        let planned = link.planned.lock().expect("no panic").take();
        if let Some(cut) = planned {
            if matches!(cut, Cut::InResponse) {
                let part = shared.below(bytes.len());
                let _ = (&link.node).write_all(&bytes[..part]);
            }
            return shared.count(cut);
        }
        (&link.node).write_all(bytes).ok()?;
    }
}

fn read<'a>(mut from: &TcpStream, buffer: &'a mut [u8]) -> Option<&'a [u8]> {
    let len = from.read(buffer).ok()?;
    (len > 0).then(|| &buffer[..len])
}

impl Shared {
    fn plan(&self) -> Option<Cut> {
        let mut random = self.random.lock().expect("no panic");
        let chosen = self.is_cutting.load(Ordering::SeqCst) && random.chance(CUTS_OF_256);
        chosen.then(|| CUTS[random.index(CUTS.len())])
    }

    fn below(&self, end: usize) -> usize {
        self.random.lock().expect("no panic").index(end)
    }

    /// Counts a cut and closes the connection.
    fn count(&self, cut: Cut) -> Option<()> {
        self.cuts[cut as usize].fetch_add(1, Ordering::SeqCst);
        None
    }
}
