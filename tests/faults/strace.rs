//! Parses the output of strace into events of the data directory and responses to clients, in order.

use std::collections::HashMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::checker::Sent;
use crate::harness::transport::Received;

/// An event that matters to a power cut.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    Create(String),
    Write {
        file: String,
        offset: u64,
        data: Vec<u8>,
    },
    Truncate {
        file: String,
        len: u64,
    },
    Rename {
        from: String,
        to: String,
    },
    Remove(String),
    /// A sync of a file has returned.
    Sync(String),
    /// A sync of a file has failed: what was written since the last one may be lost.
    SyncFailed(String),
    /// A sync of the directory has returned.
    SyncDirectory,
    /// The bytes of a response that is sent to a client.
    Response(Vec<u8>),
    /// Encrypted bytes that are sent to the client with this port, by their offsets in all that is sent to it.
    Encrypted {
        port: u16,
        from: u64,
        to: u64,
    },
}

/// The options of strace.
pub const RECORD: [&str; 6] = [
    "-yy",
    "-xx",
    "-s",
    "2000000",
    "-e",
    "trace=openat,write,pwrite64,ftruncate,rename,renameat2,unlink,fsync,fdatasync,sendto,writev",
];

/// Parses a recording of a server in this directory.
pub fn events(recording: &str, directory: &Path) -> Vec<Event> {
    let mut reader = Reader {
        directory: directory.to_str().expect("UTF-8").to_owned(),
        unfinished: HashMap::new(),
        positions: HashMap::new(),
        sent: HashMap::new(),
    };
    recording
        .lines()
        .filter_map(|line| reader.line(line))
        .collect()
}

struct Reader {
    directory: String,
    /// Unfinished calls by thread.
    unfinished: HashMap<String, String>,
    /// File positions for plain `write` calls.
    positions: HashMap<String, u64>,
    /// How many bytes were sent to the client with each port.
    sent: HashMap<u16, u64>,
}

impl Reader {
    fn line(&mut self, line: &str) -> Option<Event> {
        let (thread, call) = line.split_once(' ')?;
        let call = call.trim_start();
        if let Some(started) = call.strip_suffix(" <unfinished ...>") {
            self.unfinished
                .insert(thread.to_owned(), started.to_owned());
            // An unfinished write may have happened and a response may have arrived; a sync is not complete.
            let is_sync = started.contains("sync(");
            return (!is_sync).then(|| self.call(started)).flatten();
        }
        if call.starts_with("<... ") {
            let started = self.unfinished.remove(thread)?;
            let (_, result) = call.rsplit_once(" = ")?;
            let synced = started.contains("sync(");
            self.correct(&started, result);
            return synced.then(|| self.sync(&started, result)).flatten();
        }
        let (call, result) = call.rsplit_once(" = ")?;
        if call.contains("sync(") {
            return self.sync(call.trim_end(), result);
        }
        // `?` is a call that never returned, such as one that was killed.
        let failed = result.starts_with('-') || result.starts_with('?');
        let event = (!failed).then(|| self.call(call.trim_end())).flatten();
        if !failed {
            self.correct(call, result);
        }
        event
    }

    /// Fewer bytes may have been sent than were given to the call.
    fn correct(&mut self, call: &str, result: &str) {
        if let Some((port, bytes)) = sent_by(call) {
            let unsent = bytes.len() as u64 - result.parse().unwrap_or(0);
            *self.sent.entry(port).or_default() -= unsent;
        }
    }

    fn sync(&mut self, call: &str, result: &str) -> Option<Event> {
        match (self.call(call)?, result) {
            (synced, "0") => Some(synced),
            (Event::Sync(file), result) if result.starts_with("-1") => {
                Some(Event::SyncFailed(file))
            }
            _ => None,
        }
    }

    fn call(&mut self, call: &str) -> Option<Event> {
        let (name, arguments) = call.split_once('(')?;
        let arguments = arguments.strip_suffix(')').unwrap_or(arguments);
        let strings: Vec<Vec<u8>> = arguments.split('"').skip(1).step_by(2).map(bytes).collect();
        let number =
            |at: usize| -> Option<u64> { arguments.rsplit(", ").nth(at)?.trim().parse().ok() };
        // The file of the descriptor that is the first argument.
        let descriptor = || {
            let (_, path) = arguments.split_once('<')?;
            let path = bytes(path.split('>').next()?);
            Some(String::from_utf8_lossy(&path).into_owned())
        };
        match name {
            "openat" => {
                let path = String::from_utf8_lossy(strings.first()?).into_owned();
                let file = self.file(&path)?;
                if arguments.contains("O_TRUNC") {
                    self.positions.insert(file.clone(), 0);
                }
                arguments.contains("O_CREAT").then_some(Event::Create(file))
            }
            "pwrite64" => Some(Event::Write {
                file: self.file(&descriptor()?)?,
                offset: number(0)?,
                data: strings.into_iter().next()?,
            }),
            "write" => {
                let file = self.file(&descriptor()?)?;
                let data = strings.into_iter().next()?;
                let position = self.positions.entry(file.clone()).or_default();
                let offset = *position;
                *position += data.len() as u64;
                Some(Event::Write { file, offset, data })
            }
            "ftruncate" => Some(Event::Truncate {
                file: self.file(&descriptor()?)?,
                len: number(0)?,
            }),
            "rename" | "renameat2" => {
                let mut paths = strings
                    .iter()
                    .map(|path| String::from_utf8_lossy(path).into_owned());
                let (from, to) = (self.file(&paths.next()?)?, self.file(&paths.next()?)?);
                Some(Event::Rename { from, to })
            }
            "unlink" => {
                let path = String::from_utf8_lossy(strings.first()?).into_owned();
                self.file(&path).map(Event::Remove)
            }
            "fsync" | "fdatasync" => {
                let path = descriptor()?;
                if path == self.directory {
                    return Some(Event::SyncDirectory);
                }
                self.file(&path).map(Event::Sync)
            }
            "sendto" | "writev" => {
                let (port, bytes) = sent_by(call)?;
                let end = self.sent.entry(port).or_default();
                let from = *end;
                *end += bytes.len() as u64;
                let to = *end;
                Some(if bytes.starts_with(b"HTTP/1.1 ") {
                    Event::Response(bytes)
                } else {
                    Event::Encrypted { port, from, to }
                })
            }
            _ => None,
        }
    }

    /// The name of a file of the store; none for files that SQLite creates again after a power cut, and for others.
    fn file(&self, path: &str) -> Option<String> {
        let name = match path.strip_prefix(&self.directory) {
            Some(below) => below.strip_prefix('/')?,
            None if !path.contains('/') => path,
            None => return None,
        };
        let ours = name.starts_with("plantstore.");
        let kept = ours && !name.ends_with("-shm");
        kept.then(|| name.to_owned())
    }
}

/// The port of the client, and the bytes that a call is to send to it.
fn sent_by(call: &str) -> Option<(u16, Vec<u8>)> {
    let is_send = call.starts_with("sendto(") || call.starts_with("writev(");
    let (_, address) = call.split_once("<TCP:[").filter(|_| is_send)?;
    let (address, buffers) = address.split_once("]>")?;
    let (_, client) = address.split_once("->")?;
    let port = client.rsplit(':').next()?.parse().ok()?;
    let buffers = buffers.split('"').skip(1).step_by(2);
    Some((port, buffers.flat_map(bytes).collect()))
}

/// Replaces encrypted bytes by the 200s that clients have read in them.
pub fn decrypt(events: Vec<Event>, received: &[(Sent, Received)]) -> Vec<Event> {
    let responses_in = |port, from, to| {
        let is_in =
            move |read: &Received| read.port == port && from < read.bytes && read.bytes <= to;
        let read = received.iter().filter(move |(_, read)| is_in(read));
        read.map(|((_, name, _), _)| {
            let body = serde_json::json!({ "name": name });
            Event::Response(format!("HTTP/1.1 200 OK\r\n\r\n{body}").into_bytes())
        })
    };
    let mut decrypted = Vec::new();
    for event in events {
        match event {
            Event::Encrypted { port, from, to } => decrypted.extend(responses_in(port, from, to)),
            event => decrypted.push(event),
        }
    }
    decrypted
}

/// `\x61\x62` → `ab`.
fn bytes(hex: &str) -> Vec<u8> {
    let digits = hex.split("\\x").skip(1);
    digits
        .map(|pair| u8::from_str_radix(&pair[..2], 16).expect("hexadecimal digits"))
        .collect()
}
