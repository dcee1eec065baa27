//! How many connections there may be: in total, without authentication, and from one address. At a limit the oldest
//! connection that has not authenticated is closed for a new one, or else an idle one, so that no client can take all
//! connections by keeping them open; a quarter of them is kept for clients that have authenticated.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::timeout;

use crate::auth::client_network;
use crate::http::connection::{Activity, ConnectionState};
use crate::metrics::Metrics;

/// How often connections are looked at while none can be closed.
const RETRY: Duration = Duration::from_millis(20);

pub(super) struct ConnectionLimits {
    max: usize,
    unauthenticated_max: usize,
    per_address_max: usize,
    open: Mutex<Open>,
    /// How many of them have authenticated.
    pub(super) authenticated: Arc<AtomicUsize>,
    closed: Notify,
    metrics: Arc<Metrics>,
}

#[derive(Default)]
struct Open {
    slots: usize,
    by_address: HashMap<IpAddr, usize>,
    /// In the order in which they were opened. Those that have authenticated or ended since are still among them.
    unauthenticated: VecDeque<Connection>,
    authenticated: VecDeque<Connection>,
}

struct Connection {
    state: Weak<ConnectionState>,
    task: AbortHandle,
}

/// One of the connections that may be open. Its end makes room for another.
pub(super) struct Slot(Arc<ConnectionLimits>);

/// One of the connections that its address may have open.
pub(super) struct AddressSlot(Arc<ConnectionLimits>, IpAddr);

impl ConnectionLimits {
    pub(super) fn new(max: usize, per_address_max: usize, metrics: Arc<Metrics>) -> Arc<Self> {
        Arc::new(Self {
            max,
            unauthenticated_max: (max - max / 4).max(1),
            per_address_max,
            open: Mutex::default(),
            authenticated: Arc::default(),
            closed: Notify::new(),
            metrics,
        })
    }

    /// Waits for room for one more connection, and makes it if possible.
    pub(super) async fn slot(self: &Arc<Self>) -> Slot {
        loop {
            if let Some(slot) = self.try_slot() {
                return slot;
            }
            let closed = self.closed.notified();
            self.close_one();
            let _ = timeout(RETRY, closed).await;
        }
    }

    pub(super) fn try_slot(self: &Arc<Self>) -> Option<Slot> {
        let mut open = self.open.lock();
        let authenticated = self.authenticated.load(Ordering::Relaxed);
        let unauthenticated = open.slots.saturating_sub(authenticated);
        let has_room = open.slots < self.max && unauthenticated < self.unauthenticated_max;
        has_room.then(|| {
            open.slots += 1;
            Slot(Arc::clone(self))
        })
    }

    /// None if the address has too many connections.
    pub(super) fn address_slot(self: &Arc<Self>, address: IpAddr) -> Option<AddressSlot> {
        let address = client_network(address);
        let mut open = self.open.lock();
        let count = open.by_address.entry(address).or_default();
        if *count >= self.per_address_max {
            self.metrics.connections_rejected.add(1);
            return None;
        }
        *count += 1;
        Some(AddressSlot(Arc::clone(self), address))
    }

    /// Registers a connection, so that it can be closed for another one.
    pub(super) fn register(&self, state: &Arc<ConnectionState>, task: AbortHandle) {
        let state = Arc::downgrade(state);
        let mut open = self.open.lock();
        open.unauthenticated.push_back(Connection { state, task });
        if open.unauthenticated.len() + open.authenticated.len() > 2 * self.max {
            open.forget_ended();
        }
    }

    fn close_one(&self) {
        if self.open.lock().close_one() {
            self.metrics.connections_evicted.add(1);
        }
    }
}

impl Open {
    /// Closes the oldest connection that has not authenticated, or one that is idle.
    fn close_one(&mut self) -> bool {
        while let Some(connection) = self.unauthenticated.pop_front() {
            match connection.state.upgrade() {
                Some(state) if state.is_authenticated() => self.authenticated.push_back(connection),
                Some(_) => {
                    connection.task.abort();
                    return true;
                }
                None => {}
            }
        }
        for _ in 0..self.authenticated.len() {
            let Some(connection) = self.authenticated.pop_front() else {
                break;
            };
            match connection.state.upgrade() {
                Some(state) if state.activity() == Activity::Idle => {
                    connection.task.abort();
                    return true;
                }
                Some(_) => self.authenticated.push_back(connection),
                None => {}
            }
        }
        false
    }

    fn forget_ended(&mut self) {
        let is_open = |connection: &Connection| connection.state.strong_count() > 0;
        self.unauthenticated.retain(is_open);
        self.authenticated.retain(is_open);
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.open.lock().slots -= 1;
        self.0.closed.notify_one();
    }
}

impl Drop for AddressSlot {
    fn drop(&mut self) {
        let Self(limits, address) = self;
        let mut open = limits.open.lock();
        if let Some(count) = open.by_address.get_mut(address) {
            *count -= 1;
            if *count == 0 {
                open.by_address.remove(address);
            }
        }
    }
}
