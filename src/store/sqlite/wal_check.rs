//! Checks of the WAL file that SQLite does not make: whether it is damaged, and whether it belongs to its database.
//!
//! SQLite reads a WAL up to the first frame with an invalid checksum and ignores all frames after it. That is correct after a power
//! failure, when those frames were never synced. But with `synchronous=FULL`, SQLite syncs a commit before it writes the next frame. So
//! if the invalid frame is followed by a commit and by another frame whose checksum continues from that commit, the invalid frame had
//! been synced and was changed on disk later. Opening such a store would silently lose acknowledged plants, so it is rejected.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, BufReader, ErrorKind, Read};
use std::path::Path;

const MAGIC: u32 = 0x377f_0682;
const HEADER: usize = 32;
const FRAME_HEADER: usize = 24;
const PAGE: u32 = 4096;

/// The page with this byte is never used: SQLite locks its bytes.
const LOCK_BYTE: u64 = 0x4000_0000;

/// A command may be writing while this reads, so damage is reported only if it is found this many times.
const ATTEMPTS: usize = 3;

/// True if something that was synced can no longer be read from this WAL.
pub(super) fn is_damaged(wal: &Path) -> io::Result<bool> {
    for _ in 0..ATTEMPTS {
        match looks_damaged(wal) {
            Ok(true) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            other => return other,
        }
    }
    Ok(true)
}

fn looks_damaged(wal: &Path) -> io::Result<bool> {
    let Some(mut wal) = Wal::open(wal)? else {
        return Ok(false);
    };
    // A header is synced before any frame is written, so an invalid one is damaged.
    let mut is_readable = wal.is_valid;
    let salts = wal.is_valid.then(|| wal.salts());
    if !wal.is_valid {
        wal.page_size = PAGE;
        wal.sum = Checksum::new(cfg!(target_endian = "big"));
    }
    let mut follows_commit = false;
    // The rest of a transaction that was rolled back does not continue from the commit that was written over its beginning.
    while fill(&mut wal.file, &mut wal.frame)? {
        if salts.is_some_and(|salts| salts != wal.frame[8..16]) {
            is_readable = false; // left from before the WAL was reset, or damaged
            wal.file.seek_relative(wal.page_size.into())?;
        } else {
            let Some(is_valid) = wal.read_page()? else {
                break;
            };
            if is_valid && follows_commit && !is_readable {
                return Ok(true);
            }
            is_readable &= is_valid;
        }
        // The next frame continues from what this one says, damaged or not.
        wal.sum.sums = [16, 20].map(|at| u32::from_be_bytes(part(&wal.frame[at..at + 4])));
        follows_commit = wal.frame[4..8] != [0; 4];
    }
    Ok(false)
}

/// True if pages beyond the end of the database file are not in the WAL either. Then the WAL belongs to another, later
/// state of the database: an older copy was put in its place. (A checkpoint writes pages in order, so that a file that was cut
/// off in one lacks only pages that are still in the WAL.)
pub(super) fn lacks_pages(wal: &Path, database: &Path) -> io::Result<bool> {
    let Some(mut wal) = Wal::open(wal)?.filter(|wal| wal.is_valid) else {
        return Ok(false); // SQLite will not apply it
    };
    let page_size = u64::from(wal.page_size);
    let pages_in_file = fs::metadata(database)?.len() / page_size;
    let mut pages = 0; // of the database, after the last commit
    let mut beyond_the_file = HashSet::new();
    while fill(&mut wal.file, &mut wal.frame)?
        && wal.read_page()? == Some(true)
        && wal.frame[8..16] == wal.salts()
    {
        let page = u64::from(u32::from_be_bytes(part(&wal.frame[..4])));
        if page > pages_in_file {
            beyond_the_file.insert(page);
        }
        let pages_after_commit = u32::from_be_bytes(part(&wal.frame[4..8]));
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

/// A WAL file (file format of SQLite, section 4.1).
struct Wal {
    file: BufReader<File>,
    header: [u8; HEADER],
    /// True if SQLite would read this WAL.
    is_valid: bool,
    page_size: u32,
    /// The checksum of everything read so far.
    sum: Checksum,
    /// The header of the current frame.
    frame: [u8; FRAME_HEADER],
    page: Vec<u8>,
}

impl Wal {
    /// None if the file is too short for a header.
    fn open(path: &Path) -> io::Result<Option<Self>> {
        let mut file = BufReader::with_capacity(1 << 16, File::open(path)?);
        let mut header = [0; HEADER];
        if !fill(&mut file, &mut header)? {
            return Ok(None);
        }
        // The lowest bit of the magic number is the byte order of the checksums.
        let magic = u32::from_be_bytes(part(&header[..4]));
        let mut sum = Checksum::new(magic & 1 == 1);
        sum.add(&header[..24]);
        let page_size = u32::from_be_bytes(part(&header[8..12]));
        let is_page_size = (512..=65536).contains(&page_size) && page_size.is_power_of_two();
        Ok(Some(Self {
            file,
            is_valid: magic & !1 == MAGIC && sum.is(&header[24..]) && is_page_size,
            header,
            page_size,
            sum,
            frame: [0; FRAME_HEADER],
            page: Vec::new(),
        }))
    }

    fn salts(&self) -> [u8; 8] {
        part(&self.header[16..24])
    }

    /// Reads the page of the current frame: whether its checksum matches; none at the end of the file.
    fn read_page(&mut self) -> io::Result<Option<bool>> {
        self.page.resize(self.page_size as usize, 0);
        if !fill(&mut self.file, &mut self.page)? {
            return Ok(None);
        }
        self.sum.add(&self.frame[..8]);
        self.sum.add(&self.page);
        Ok(Some(self.sum.is(&self.frame[16..24])))
    }
}

/// Reads all of the buffer, unless the file ends before.
fn fill(file: &mut impl Read, buffer: &mut [u8]) -> io::Result<bool> {
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
