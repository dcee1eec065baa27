//! Damage inside the log. SQLite reads its log up to the first frame that does not add up and
//! forgets the rest: after a power cut that is right, because what was cut off was never synced.
//! It is wrong when a commit follows, and then a frame that goes on from it: with
//! `synchronous=FULL` SQLite goes on only when the commit before is on disk. Then a disk has changed
//! what it had kept, and to open the store would be to lose, in silence, what was acknowledged.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, BufReader, ErrorKind, Read};
use std::path::Path;

const MAGIC: u32 = 0x377f_0682;
const HEADER: usize = 32;
const FRAME_HEADER: usize = 24;
const PAGE: u32 = 4096;

/// A command may be writing while this reads, so a first impression is looked at again.
const LOOKS: usize = 3;

/// Whether something that was synced can no longer be read from this log.
pub(super) fn is_damaged(log: &Path) -> io::Result<bool> {
    for _ in 0..LOOKS {
        match look(log) {
            Ok(true) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            other => return other,
        }
    }
    Ok(true)
}

/// The page that SQLite never uses: the one with the bytes that it locks.
const LOCK_BYTE: u64 = 0x4000_0000;

/// True if pages beyond the end of the database file are not in the WAL either. Then the WAL belongs to another, later
/// state of the database: an older copy was put in its place. (A checkpoint writes pages in order, so that a file that was cut
/// off in one lacks only pages that are still in the WAL.)
pub(super) fn lacks_pages(wal: &Path, database: &Path) -> io::Result<bool> {
    let mut wal = BufReader::with_capacity(1 << 16, File::open(wal)?);
    let mut header = [0; HEADER];
    if !fills(&mut wal, &mut header)? {
        return Ok(false);
    }
    let magic = u32::from_be_bytes(part(&header[..4]));
    let mut sum = Checksum::new(magic & 1 == 1);
    sum.add(&header[..24]);
    let page_size = u32::from_be_bytes(part(&header[8..12]));
    if magic & !1 != MAGIC || !sum.is(&header[24..]) || !page_size.is_power_of_two() {
        return Ok(false); // SQLite will not apply it
    }
    let page_size = u64::from(page_size);
    let pages_in_file = std::fs::metadata(database)?.len() / page_size;

    let mut frame = [0; FRAME_HEADER];
    let mut content = vec![0; usize::try_from(page_size).map_err(io::Error::other)?];
    let mut pages = 0; // of the database, after the last commit
    let mut beyond_the_file = HashSet::new();
    while fills(&mut wal, &mut frame)? && fills(&mut wal, &mut content)? {
        sum.add(&frame[..8]);
        sum.add(&content);
        if frame[8..16] != header[16..24] || !sum.is(&frame[16..24]) {
            break;
        }
        let page = u64::from(u32::from_be_bytes(part(&frame[..4])));
        if page > pages_in_file {
            beyond_the_file.insert(page);
        }
        let pages_after_commit = u32::from_be_bytes(part(&frame[4..8]));
        if pages_after_commit != 0 {
            pages = u64::from(pages_after_commit);
        }
    }
    let lock_page = LOCK_BYTE / page_size + 1;
    let needed = (pages_in_file + 1)..=pages;
    let present = beyond_the_file
        .iter()
        .filter(|page| needed.contains(page))
        .count() as u64;
    let unused = u64::from(needed.contains(&lock_page));
    Ok(present + unused < pages.saturating_sub(pages_in_file))
}

fn look(log: &Path) -> io::Result<bool> {
    let mut log = BufReader::with_capacity(1 << 16, File::open(log)?);
    let mut header = [0; HEADER];
    if !fills(&mut log, &mut header)? {
        return Ok(false);
    }
    // The lowest bit of the magic number says in which order the checksums take their bytes.
    let magic = u32::from_be_bytes(part(&header[..4]));
    let mut sum = Checksum::new(magic & 1 == 1);
    sum.add(&header[..24]);
    let mut reads = magic & !1 == MAGIC && sum.is(&header[24..]);
    // A header is synced before any frame is written: one that does not read is damaged.
    let salts: Option<[u8; 8]> = reads.then(|| part(&header[16..24]));
    let page = match u32::from_be_bytes(part(&header[8..12])) {
        page @ 512..=65536 if reads && page.is_power_of_two() => page,
        _ => PAGE,
    };
    if !reads {
        sum = Checksum::new(cfg!(target_endian = "big"));
    }

    let mut frame = [0; FRAME_HEADER];
    let mut content = vec![0; page as usize];
    let mut after_commit = false;
    // What a transaction that was rolled back has left does not add up with the commit that was
    // written over its beginning, and so accuses nobody.
    while fills(&mut log, &mut frame)? {
        if salts.is_some_and(|salts| salts != frame[8..16]) {
            reads = false; // what an earlier round of the log has left, or damage
            log.seek_relative(page.into())?;
        } else {
            if !fills(&mut log, &mut content)? {
                break;
            }
            sum.add(&frame[..8]);
            sum.add(&content);
            let follows = sum.is(&frame[16..24]);
            if follows && after_commit && !reads {
                return Ok(true);
            }
            reads &= follows;
        }
        // What the frame says of itself, damaged or not, is what the next one was summed up from.
        sum.sums = [16, 20].map(|at| u32::from_be_bytes(part(&frame[at..at + 4])));
        after_commit = frame[4..8] != [0; 4];
    }
    Ok(false)
}

/// Reads all of the buffer, unless the file ends before.
fn fills(file: &mut impl Read, buffer: &mut [u8]) -> io::Result<bool> {
    match file.read_exact(buffer) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

fn part<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes.try_into().expect("a part of a known length")
}

/// The running checksum of the file format of SQLite (section 4.2).
struct Checksum {
    big_endian: bool,
    sums: [u32; 2],
}

impl Checksum {
    fn new(big_endian: bool) -> Self {
        let sums = [0; 2];
        Self { big_endian, sums }
    }

    fn add(&mut self, bytes: &[u8]) {
        let [mut a, mut b] = self.sums;
        let from_bytes = if self.big_endian {
            u32::from_be_bytes
        } else {
            u32::from_le_bytes
        };
        let word = |bytes| from_bytes(part(bytes));
        for pair in bytes.chunks_exact(8) {
            a = a.wrapping_add(word(&pair[..4])).wrapping_add(b);
            b = b.wrapping_add(word(&pair[4..])).wrapping_add(a);
        }
        self.sums = [a, b];
    }

    fn is(&self, stored: &[u8]) -> bool {
        let [a, b] = self.sums;
        part::<4>(&stored[..4]) == a.to_be_bytes() && part::<4>(&stored[4..]) == b.to_be_bytes()
    }
}
