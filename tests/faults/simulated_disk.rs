//! A simulated disk: after a power cut it has everything that was synced, and a random part of what was only written.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::random::Random;
use crate::strace::Event;

/// The unit in which unsynced writes survive or are lost.
const SECTOR: u64 = 512;

/// Files by number, and the directory entries that point to them.
#[derive(Clone, Default)]
pub struct Disk {
    files: Vec<File>,
    /// The directory as processes see it, and as of its last sync.
    names: BTreeMap<String, usize>,
    synced_names: BTreeMap<String, usize>,
    renamings: Vec<Renaming>,
}

#[derive(Clone, Default)]
struct File {
    synced: Vec<u8>,
    unsynced: Vec<Change>,
}

#[derive(Clone)]
enum Change {
    Write(u64, Vec<u8>),
    Truncate(u64),
}

/// An unsynced change of the directory.
#[derive(Clone)]
enum Renaming {
    Add(String, usize),
    Remove(String),
    Move(String, String, usize),
}

impl Disk {
    /// Applies one event. Responses change nothing.
    pub fn apply(&mut self, event: &Event) {
        match event {
            Event::Create(name) => {
                if !self.names.contains_key(name) {
                    self.files.push(File::default());
                    let number = self.files.len() - 1;
                    self.names.insert(name.clone(), number);
                    self.renamings.push(Renaming::Add(name.clone(), number));
                }
            }
            Event::Write { file, offset, data } => {
                self.change(file, Change::Write(*offset, data.clone()));
            }
            Event::Truncate { file, len } => self.change(file, Change::Truncate(*len)),
            Event::Rename { from, to } => {
                if let Some(number) = self.names.remove(from) {
                    self.names.insert(to.clone(), number);
                    self.renamings
                        .push(Renaming::Move(from.clone(), to.clone(), number));
                }
            }
            Event::Remove(name) => {
                if self.names.remove(name).is_some() {
                    self.renamings.push(Renaming::Remove(name.clone()));
                }
            }
            Event::Sync(name) => {
                if let Some(&number) = self.names.get(name) {
                    let file = &mut self.files[number];
                    for change in std::mem::take(&mut file.unsynced) {
                        change.apply(&mut file.synced);
                    }
                }
            }
            Event::SyncFailed(name) => {
                // The kernel drops the dirty pages, and the next sync succeeds.
                if let Some(&number) = self.names.get(name) {
                    self.files[number].unsynced.clear();
                }
            }
            Event::SyncDirectory => {
                self.synced_names = self.names.clone();
                self.renamings.clear();
            }
            Event::Response(_) | Event::Encrypted { .. } => {}
        }
    }

    fn change(&mut self, name: &str, change: Change) {
        if let Some(&number) = self.names.get(name) {
            self.files[number].unsynced.push(change);
        }
    }

    /// Cuts the power, and writes the surviving files into a directory.
    pub fn cut(&self, random: &mut Random, directory: &Path) {
        // How much of the unsynced data survives, of 256; the extremes expose most faults.
        let survival = [0, 32, 128, 224, 256][random.index(5)];
        let mut names = self.synced_names.clone();
        for renaming in &self.renamings {
            if random.chance(survival) {
                match renaming {
                    Renaming::Add(name, number) => {
                        names.insert(name.clone(), *number);
                    }
                    Renaming::Remove(name) => {
                        names.remove(name);
                    }
                    Renaming::Move(from, to, number) => {
                        names.remove(from);
                        names.insert(to.clone(), *number);
                    }
                }
            }
        }
        for (name, number) in names {
            let file = &self.files[number];
            let mut content = file.synced.clone();
            for change in &file.unsynced {
                change.survive(&mut content, random, survival);
            }
            fs::write(directory.join(name), content).expect("a file");
        }
    }
}

impl Change {
    fn apply(&self, content: &mut Vec<u8>) {
        match self {
            Change::Write(offset, data) => write(content, *offset, data),
            Change::Truncate(len) => content.resize(usize::try_from(*len).expect("a length"), 0),
        }
    }

    fn survive(&self, content: &mut Vec<u8>, random: &mut Random, survival: u64) {
        match self {
            Change::Truncate(_) => {
                if random.chance(survival) {
                    self.apply(content);
                }
            }
            Change::Write(offset, data) => {
                let mut from = 0;
                while from < data.len() {
                    let start = offset + from as u64;
                    let piece = usize::try_from(SECTOR - start % SECTOR).expect("small");
                    let to = data.len().min(from + piece);
                    if random.chance(survival) {
                        write(content, start, &data[from..to]);
                    }
                    from = to;
                }
            }
        }
    }
}

fn write(content: &mut Vec<u8>, offset: u64, data: &[u8]) {
    let start = usize::try_from(offset).expect("an offset");
    let end = start + data.len();
    if content.len() < end {
        content.resize(end, 0);
    }
    content[start..end].copy_from_slice(data);
}
