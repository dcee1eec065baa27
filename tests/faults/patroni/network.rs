//! The network between the machines, from which one can be cut off: nothing arrives any more, and neither side is notified.

use std::fs;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use crate::harness::tcp_proxy::{Carrier, TcpProxy};

/// Everything has the address 127.0.0.1 here. So the machine that a connection comes from is found by its process, which runs in the
/// directory of its machine; the others, such as Plant Store nodes, belong to none.
pub struct Network {
    directories: Vec<PathBuf>,
    cut_off: Mutex<Option<usize>>,
    has_ended: AtomicBool,
}

impl Network {
    /// With the directory of each machine.
    pub fn new(directories: &[PathBuf]) -> Self {
        // As in /proc: the directory of temporary files may be a symbolic link.
        let canonical = |directory| fs::canonicalize(directory).expect("a directory");
        Self {
            directories: directories.iter().map(canonical).collect(),
            cut_off: Mutex::default(),
            has_ended: AtomicBool::new(false),
        }
    }

    /// The address of a port of this machine for all other machines.
    pub fn route(self: &Arc<Self>, to: usize, port: u16) -> TcpProxy {
        let network = Arc::clone(self);
        let server = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        TcpProxy::carrying(server, move |client| {
            let from = network.machine_of(client);
            let network = Arc::clone(&network);
            let route = Route { network, from, to };
            route.wait();
            Box::new(route)
        })
    }

    /// Cuts off this machine, or none. What is sent meanwhile arrives later, as with TCP.
    pub fn cut_off(&self, machine: Option<usize>) {
        *self.cut_off.lock().expect("no panic") = machine;
    }

    /// Connections that wait go on, and see that the other side is closed.
    pub fn end(&self) {
        self.has_ended.store(true, Ordering::SeqCst);
    }

    fn machine_of(&self, client: &TcpStream) -> Option<usize> {
        let [client_port, our_port] = [client.peer_addr(), client.local_addr()]
            .map(|address| address.map_or(0, |address| address.port()));
        let socket = format!("socket:[{}]", inode(client_port, our_port)?);
        let processes = fs::read_dir("/proc").ok()?;
        processes.filter_map(Result::ok).find_map(|process| {
            let works_in = fs::read_link(process.path().join("cwd")).ok()?;
            let mut directories = self.directories.iter();
            let machine = directories.position(|directory| works_in.starts_with(directory))?;
            let mut files = fs::read_dir(process.path().join("fd")).ok()?;
            let is_its = |file: &Path| fs::read_link(file).is_ok_and(|to| to == Path::new(&socket));
            let has_socket = files.any(|file| file.is_ok_and(|file| is_its(&file.path())));
            has_socket.then_some(machine)
        })
    }
}

/// The inode of the socket with this local and this remote port of 127.0.0.1: a line is
/// `0: 0100007F:0CEA 0100007F:8AE2 01 00000000:00000000 00:00000000 00000000 0 0 16741 …`.
fn inode(local: u16, remote: u16) -> Option<String> {
    let connections = fs::read_to_string("/proc/net/tcp").ok()?;
    let ends = [local, remote].map(|port| format!("0100007F:{port:04X}"));
    connections.lines().find_map(|line| {
        let words: Vec<_> = line.split_whitespace().collect();
        let is_it = words.get(1..3)? == ends;
        is_it.then(|| words.get(9).map(|&inode| inode.to_owned()))?
    })
}

/// A connection, from one of the machines or from outside of them.
struct Route {
    network: Arc<Network>,
    from: Option<usize>,
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
        cut_off.is_some() && (self.from == cut_off) != (Some(self.to) == cut_off)
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
