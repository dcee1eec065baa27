//! Damage inside the log. SQLite reads its log up to the first frame that does not add up and
//! forgets the rest: after a power cut that is right, because what was cut off was never synced.
//! It is wrong when a commit and further frames follow, for SQLite goes on only when the commit
//! before is on disk. Then a disk has changed what it had kept, and to open the store would be to
//! lose, in silence, what was acknowledged.

use std::fs::File;
use std::io::{self, BufReader, ErrorKind, Read};
use std::path::Path;

const HEADER: usize = 32;
const FRAME_HEADER: usize = 24;
const PAGE: usize = 4096;

/// A server may be writing while this reads, so a first impression is looked at again.
const LOOKS: usize = 3;

/// Whether something that was synced can no longer be read from this log.
pub(super) fn is_damaged(log: &Path) -> io::Result<bool> {
    for _ in 0..LOOKS {
        match look(log) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            Ok(false) => return Ok(false),
            Err(error) => return Err(error),
            Ok(true) => {}
        }
    }
    Ok(true)
}

fn look(log: &Path) -> io::Result<bool> {
    let mut log = BufReader::with_capacity(1 << 16, File::open(log)?);
    let mut header = [0; HEADER];
    if !fills(&mut log, &mut header)? {
        return Ok(false);
    }
    // The lowest bit of the magic number says in which order the checksums take their bytes.
    let mut sum = Checksum::new(header[3] & 1 == 1);
    sum.add(&header[..24]);
    let mut reads = sum.is(&header[24..]);
    let mut salts: Option<[u8; 8]> = reads.then(|| part(&header[16..24]));
    let page = match u32::from_be_bytes(part(&header[8..12])) as usize {
        page if reads && page.is_power_of_two() => page,
        _ => PAGE,
    };

    let mut frame = vec![0; FRAME_HEADER + page];
    let mut unread_commit = false;
    while fills(&mut log, &mut frame)? {
        let frame_salts = part(&frame[8..16]);
        if *salts.get_or_insert(frame_salts) != frame_salts {
            break; // what an earlier round of the log has left
        }
        if unread_commit {
            return Ok(true);
        }
        sum.add(&frame[..8]);
        sum.add(&frame[FRAME_HEADER..]);
        reads &= sum.is(&frame[16..24]);
        let commits = frame[4..8] != [0; 4];
        unread_commit = !reads && commits;
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
