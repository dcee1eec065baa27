//! What `strace` wrote down, as events of the store's directory and responses to clients, in order.

use std::collections::HashMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// Something that happened, as far as a power cut cares.
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
    /// A file is synced: the call has returned.
    Sync(String),
    /// A sync of a file has failed: what was written to it since the last one may be gone.
    SyncFailed(String),
    /// The directory is synced: the call has returned.
    SyncDirectory,
    /// A response is on its way to a client: its bytes.
    Response(Vec<u8>),
}

/// The system calls to record, and how.
pub const RECORD: [&str; 6] = [
    "-y",
    "-xx",
    "-s",
    "2000000",
    "-e",
    "trace=openat,write,pwrite64,ftruncate,rename,renameat2,unlink,fsync,fdatasync,sendto",
];

/// Reads a recording made in this directory.
pub fn events(recording: &str, directory: &Path) -> Vec<Event> {
    let mut reader = Reader {
        directory: directory.to_str().expect("UTF-8").to_owned(),
        unfinished: HashMap::new(),
        positions: HashMap::new(),
    };
    recording
        .lines()
        .filter_map(|line| reader.line(line))
        .collect()
}

struct Reader {
    directory: String,
    /// What has begun, by thread.
    unfinished: HashMap<String, String>,
    /// Where a plain `write` goes on, by file.
    positions: HashMap<String, u64>,
}

impl Reader {
    fn line(&mut self, line: &str) -> Option<Event> {
        let (thread, call) = line.split_once(' ')?;
        let call = call.trim_start();
        if let Some(begun) = call.strip_suffix(" <unfinished ...>") {
            self.unfinished.insert(thread.to_owned(), begun.to_owned());
            // A write may have happened from now on, and a response may have arrived; a sync has not.
            let so_far = !begun.contains("sync(");
            return so_far.then(|| self.call(begun)).flatten();
        }
        if call.starts_with("<... ") {
            let begun = self.unfinished.remove(thread)?;
            let (_, result) = call.rsplit_once(" = ")?;
            let synced = begun.contains("sync(");
            return synced.then(|| self.sync(&begun, result)).flatten();
        }
        let (call, result) = call.rsplit_once(" = ")?;
        if call.contains("sync(") {
            return self.sync(call.trim_end(), result);
        }
        // `?` is a call that never returned, such as one that was killed.
        let failed = result.starts_with('-') || result.starts_with('?');
        (!failed).then(|| self.call(call.trim_end())).flatten()
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
        // The file behind the first argument.
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
            "sendto" => strings.into_iter().next().map(Event::Response),
            _ => None,
        }
    }

    /// The name of a file of the store. What SQLite makes anew after a power cut, and what is not the
    /// store's, does not count.
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

/// `\x61\x62` → `ab`.
fn bytes(hex: &str) -> Vec<u8> {
    let digits = hex.split("\\x").skip(1);
    digits
        .map(|pair| u8::from_str_radix(&pair[..2], 16).expect("hexadecimal digits"))
        .collect()
}
