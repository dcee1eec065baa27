//! A TCP proxy between a node and its database, which cuts connections within a batch or delays responses.

use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use crate::harness::tcp_proxy::{Carrier, TcpProxy};
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
    proxy: TcpProxy,
    shared: Arc<Shared>,
}

struct Shared {
    random: Mutex<Random>,
    cuts: [AtomicUsize; CUTS.len()],
    is_cutting: AtomicBool,
    /// Responses are delayed while this is set.
    is_holding: AtomicBool,
    has_ended: AtomicBool,
}

impl Proxy {
    pub fn start(server: SocketAddr, seed: u64) -> Self {
        let shared = Arc::new(Shared {
            random: Mutex::new(Random::new(seed)),
            cuts: [const { AtomicUsize::new(0) }; CUTS.len()],
            is_cutting: AtomicBool::new(false),
            is_holding: AtomicBool::new(false),
            has_ended: AtomicBool::new(false),
        });
        let for_connections = Arc::clone(&shared);
        let proxy = TcpProxy::carrying(server, move |_| {
            Box::new(Batches {
                shared: Arc::clone(&for_connections),
                adds: AtomicBool::new(false),
                planned: Mutex::default(),
            })
        });
        Self { proxy, shared }
    }

    pub fn address(&self) -> SocketAddr {
        self.proxy.address
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
    }
}

/// The batches of a connection.
struct Batches {
    shared: Arc<Shared>,
    /// Whether the statement of a batch was sent.
    adds: AtomicBool,
    /// The cut that is planned for the next response.
    planned: Mutex<Option<Cut>>,
}

impl Carrier for Batches {
    fn request(&self, bytes: &[u8], mut server: &TcpStream) -> Option<()> {
        // Only the statement of a batch is prepared, so a message that starts with Bind is a batch. If nothing is prepared, because
        // there may be a pooler, the statement is executed where it is sent.
        let has_insert = bytes
            .windows(29)
            .any(|part| part == b"INSERT INTO plantstore.plants");
        let adds = self.adds.fetch_or(has_insert, Ordering::SeqCst) || has_insert;
        let is_batch = (adds && bytes.starts_with(b"B")) || (has_insert && has_execute(bytes));
        let shared = &self.shared;
        let cut = is_batch.then(|| shared.plan()).flatten();
        match cut {
            Some(Cut::InTheRequest) => {
                let part = shared.below(bytes.len());
                server.write_all(&bytes[..part]).ok()?;
                shared.count(Cut::InTheRequest)
            }
            Some(Cut::AfterTheRequest) => {
                server.write_all(bytes).ok()?;
                let micros = shared.below(2000).saturating_sub(1000); // half of them at once
                thread::sleep(Duration::from_micros(micros as u64));
                shared.count(Cut::AfterTheRequest)
            }
            later => {
                *self.planned.lock().expect("no panic") = later;
                server.write_all(bytes).ok()
            }
        }
    }

    fn response(&self, bytes: &[u8], mut client: &TcpStream) -> Option<()> {
        if bytes.is_empty() {
            return None; // the server has ended the connection, which is not a cut
        }
        let shared = &self.shared;
        while shared.is_holding.load(Ordering::SeqCst) && !shared.has_ended.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(2));
        }
        let planned = self.planned.lock().expect("no panic").take();
        if let Some(cut) = planned {
            if matches!(cut, Cut::InResponse) {
                let part = shared.below(bytes.len());
                let _ = client.write_all(&bytes[..part]);
            }
            return shared.count(cut);
        }
        client.write_all(bytes).ok()
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
