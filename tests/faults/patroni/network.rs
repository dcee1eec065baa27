//! The network between the machines, from which one can be cut off: nothing arrives any more, and neither side is notified.

use std::collections::HashMap;
use std::fs;
use std::io::{self, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::Duration;

use crate::harness::tcp_proxy::{Carrier, TcpProxy};

/// Everything has the address 127.0.0.1 here. So the machine that a connection comes from is found by its process, which runs in the
/// directory of its machine; the others, such as Plant Store nodes, belong to none. Processes are looked up only while a
/// machine is cut off: that can take longer than the timeouts of Patroni and etcd if this machine does other work.
pub struct Network {
    directories: Vec<PathBuf>,
    cut_off: Mutex<Option<usize>>,
    connections: Mutex<Connections>,
    has_ended: AtomicBool,
}

/// The machine of each connection, by its local and its remote port; none for those of other processes.
type Connections = HashMap<Ports, Option<usize>>;
type Ports = (u16, u16);

impl Network {
    /// With the directory of each machine.
    pub fn new(directories: &[PathBuf]) -> Self {
        // As in /proc: the directory of temporary files may be a symbolic link.
        let canonical = |directory| fs::canonicalize(directory).expect("a directory");
        Self {
            directories: directories.iter().map(canonical).collect(),
            cut_off: Mutex::default(),
            connections: Mutex::default(),
            has_ended: AtomicBool::new(false),
        }
    }

    /// The address of a port of this machine for all other machines.
    pub fn route(self: &Arc<Self>, to: usize, port: u16) -> TcpProxy {
        let network = Arc::clone(self);
        let server = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        TcpProxy::carrying(server, move |client| {
            let port = |address: io::Result<SocketAddr>| address.map_or(0, |at| at.port());
            let route = Route {
                network: Arc::clone(&network),
                ports: (port(client.peer_addr()), port(client.local_addr())),
                from: OnceLock::new(),
                to,
            };
            route.wait();
            Box::new(route)
        })
    }

    /// Cuts off this machine, or none. What is sent meanwhile arrives later, as with TCP.
    pub fn cut_off(&self, machine: Option<usize>) {
        if machine.is_some() {
            let all = self.all_connections();
            *self.connections.lock().expect("no panic") = all;
        }
        *self.cut_off.lock().expect("no panic") = machine;
    }

    /// Connections that wait go on, and see that the other side is closed.
    pub fn end(&self) {
        self.has_ended.store(true, Ordering::SeqCst);
    }

    fn machine_of(&self, connection: Ports) -> Option<usize> {
        let mut connections = self.connections.lock().expect("no panic");
        if !connections.contains_key(&connection) {
            *connections = self.all_connections(); // it is new
        }
        connections.get(&connection).copied().flatten()
    }

    fn all_connections(&self) -> Connections {
        let sockets = sockets();
        let mut connections: Connections = sockets.values().map(|ports| (*ports, None)).collect();
        let processes = fs::read_dir("/proc").expect("/proc");
        for process in processes.filter_map(Result::ok) {
            let Ok(works_in) = fs::read_link(process.path().join("cwd")) else {
                continue; // it has ended, or is no process
            };
            let mut directories = self.directories.iter();
            let machine = directories.position(|directory| works_in.starts_with(directory));
            let files = machine.and_then(|_| fs::read_dir(process.path().join("fd")).ok());
            for file in files.into_iter().flatten().filter_map(Result::ok) {
                let file = fs::read_link(file.path()).unwrap_or_default();
                if let Some(ports) = file.to_str().and_then(|name| sockets.get(name)) {
                    connections.insert(*ports, machine);
                }
            }
        }
        connections
    }
}

/// The ports of all connections, by the name of the socket as a file. In /proc/net/tcp, a line is
/// `0: 0100007F:0CEA 0100007F:8AE2 01 00000000:00000000 00:00000000 00000000 0 0 16741 …`.
fn sockets() -> HashMap<String, Ports> {
    let lines = fs::read_to_string("/proc/net/tcp").expect("/proc");
    let port = |end: &str| u16::from_str_radix(end.split_once(':')?.1, 16).ok();
    let socket = |line: &str| {
        let words: Vec<_> = line.split_whitespace().collect();
        let ports = (port(words.get(1)?)?, port(words.get(2)?)?);
        Some((format!("socket:[{}]", words.get(9)?), ports))
    };
    lines.lines().filter_map(socket).collect()
}

/// A connection, from one of the machines or from outside of them.
struct Route {
    network: Arc<Network>,
    ports: Ports,
    /// Looked up once: a connection that the client has closed belongs to no process any more.
    from: OnceLock<Option<usize>>,
    to: usize,
}

impl Route {
    /// Waits while one end is cut off from the other.
    fn wait(&self) {
        while self.is_cut() && !self.network.has_ended.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn is_cut(&self) -> bool {
        let cut_off = *self.network.cut_off.lock().expect("no panic");
        cut_off.is_some_and(|machine| {
            let from = self
                .from
                .get_or_init(|| self.network.machine_of(self.ports));
            (*from == Some(machine)) != (self.to == machine)
        })
    }
}

impl Carrier for Route {
    fn request(&self, bytes: &[u8], mut server: &TcpStream) -> Option<()> {
        self.wait();
        server.write_all(bytes).ok()
    }

    fn response(&self, bytes: &[u8], mut client: &TcpStream) -> Option<()> {
        self.wait();
        client.write_all(bytes).ok()
    }
}
