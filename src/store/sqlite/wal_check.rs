//! Checks of the WAL file that SQLite does not make: whether it is damaged, and whether it belongs to its database.
//!
//! SQLite reads a WAL up to the first frame with an invalid checksum and ignores all frames after it. That is correct after a power
//! failure, when those frames were never synced. But with `synchronous=FULL`, SQLite syncs a commit before it writes the next frame. So
//! if the invalid frame is followed by a commit and by another frame whose checksum continues from that commit, the invalid frame had
//! been synced and was changed on disk later. Opening such a store would silently lose acknowledged plants, so it is rejected.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, BufReader, ErrorKind, Read, Seek};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use percent_encoding::{NON_ALPHANUMERIC, percent_encode};
use rusqlite::{Connection, ErrorCode, OpenFlags};

use crate::fs::{failed_to, if_exists, is_empty, with_suffix};
use crate::sqlite_format::{
    Content, LOCK_BYTE, PAGE_LEN, WAL_FRAME_HEADER_LEN, WAL_HEADER_LEN, WAL_MAGIC,
};
use crate::store::error::OpenError;
use crate::store::sqlite::connection::run_checkpoint_on_close;
use crate::store::sqlite::lock::{LastBatch, Lock, State};

/// A command may be writing while this reads, so damage is reported only if it is found this many times.
const ATTEMPTS: usize = 3;

/// What a disk writes completely or not at all.
const SECTOR_LEN: u64 = 512;

/// Whether a damaged WAL may be used.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Damage {
    Accepted,
    Rejected,
}

/// Checks that the WAL next to a database belongs to it: SQLite would apply any. Nothing is changed, whatever is found.
///
/// While the store is served this is not checked: then the WAL changes all the time, and it was checked at the start.
pub(super) fn check_wal(store: &Path, damage: Damage) -> Result<(), OpenError> {
    let wal = with_suffix(store, "-wal");
    if is_empty(&wal) {
        return Ok(());
    }
    // A process that may not lock the files cannot write to them either.
    let Some([_, database]) = Lock::take_if_free(store) else {
        return Ok(());
    };
    let mut problems = Problems::default();
    for _ in 0..ATTEMPTS {
        problems = inspect(&wal, store).map_err(failed_to("read", &wal))?;
        if !problems.is_damaged {
            break;
        }
    }
    if problems.is_damaged && damage == Damage::Rejected {
        return Err(OpenError::other(format!(
            "{} is damaged: plants that were acknowledged can no longer be read from it; \
             move it away together with its database and restore a backup",
            wal.display()
        )));
    }
    let foreign = || {
        let (database, wal) = (store.display(), wal.display());
        OpenError::other(format!(
            "{wal} does not belong to {database}: an older copy or another database was put in its place; \
             put the right database file back, or move {wal} away and restore a backup"
        ))
    };
    let content = database.as_ref().map(Content::of).transpose();
    let content = content.map_err(failed_to("read", store))?;
    if content == Some(Content::Backup) || problems.lacks_pages {
        return Err(foreign());
    }
    let Some(without_wal) = read_without_wal(store) else {
        return Ok(());
    };
    if LastBatch::read(store).is_some_and(|last| last.identity != without_wal.identity) {
        return Err(foreign());
    }
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let with_wal = Connection::open_with_flags(store, flags).and_then(|connection| {
        run_checkpoint_on_close(&connection, false)?;
        State::read(&connection)
    });
    match with_wal {
        // A WAL raises the number of the cycle at most once. An older database lacks the cycles between.
        Ok(Some(with_wal))
            if with_wal.identity == without_wal.identity
                && with_wal.wal_cycle - without_wal.wal_cycle <= 1 =>
        {
            Ok(())
        }
        Ok(_) => Err(foreign()),
        Err(error) => match error.sqlite_error_code() {
            Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => Err(foreign()),
            _ => Ok(()), // the connection that follows will report it
        },
    }
}

/// The state in the database file alone; none if it cannot be read.
fn read_without_wal(store: &Path) -> Option<State> {
    let path = percent_encode(store.as_os_str().as_bytes(), NON_ALPHANUMERIC);
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY
        | OpenFlags::SQLITE_OPEN_NO_MUTEX
        | OpenFlags::SQLITE_OPEN_URI;
    let connection = Connection::open_with_flags(format!("file:{path}?immutable=1"), flags).ok()?;
    State::read(&connection).ok()?
}

/// Reads a WAL from memory.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn inspect_bytes(wal: &[u8], database_len: u64) {
    inspect_file(io::Cursor::new(wal), database_len).expect("memory can be read");
}

/// What is wrong with a WAL.
#[derive(Default)]
struct Problems {
    /// Something that was synced can no longer be read from it.
    is_damaged: bool,
    /// Pages beyond the end of the database file are not in the WAL either. Then the WAL belongs to another, later state of the
    /// database: an older copy was put in its place. (A checkpoint writes pages in order, so that a file that was cut off in one lacks
    /// only pages that are still in the WAL.)
    lacks_pages: bool,
}

/// Reads a WAL to its end.
fn inspect(wal: &Path, database: &Path) -> io::Result<Problems> {
    let Some(wal) = if_exists(File::open(wal))? else {
        return Ok(Problems::default());
    };
    let database_len = fs::metadata(database)?.len();
    inspect_file(wal, database_len)
}

fn inspect_file(wal: impl Read + Seek, database_len: u64) -> io::Result<Problems> {
    let Some(mut wal) = Wal::read_header(wal)? else {
        return Ok(Problems::default());
    };
    // A header is synced before any frame is written, so an invalid one is damaged.
    let mut is_readable = wal.is_valid;
    if !wal.is_valid {
        wal.page_size = PAGE_LEN;
        wal.is_big_endian = cfg!(target_endian = "big");
    }
    let page_size = u64::from(wal.page_size);
    let pages_in_file = database_len / page_size;
    let mut pages_in_wal = HashSet::new(); // beyond the end of the file
    let mut pages = 0; // of the database, after the last commit
    let mut is_damaged = false;
    let mut follows_commit = false;
    let mut offset = WAL_HEADER_LEN as u64;
    // The rest of a transaction that was rolled back does not continue from the commit that was written over its beginning.
    while !is_damaged && fill(&mut wal.file, &mut wal.frame)? {
        let is_valid = if wal.is_valid && wal.frame[8..16] != wal.header[16..24] {
            // Other salts: left from before the WAL was reset, or damaged.
            wal.file.seek_relative(wal.page_size.into())?;
            false
        } else {
            let Some(is_valid) = wal.read_page()? else {
                break;
            };
            is_damaged = is_valid && follows_commit && !is_readable;
            is_valid
        };
        is_readable &= is_valid;
        let (page, pages_after_commit) = (u32_at(&wal.frame, 0), u32_at(&wal.frame, 4));
        // A power failure may leave the commit of an older frame in front of the checksum of the frame that was to replace it.
        let is_torn = !is_valid && offset % SECTOR_LEN + WAL_FRAME_HEADER_LEN as u64 > SECTOR_LEN;
        follows_commit = pages_after_commit != 0 && !is_torn;
        offset += WAL_FRAME_HEADER_LEN as u64 + page_size;
        if is_readable && u64::from(page) > pages_in_file {
            pages_in_wal.insert(u64::from(page));
        }
        if is_readable && follows_commit {
            pages = u64::from(pages_after_commit);
        }
        // The next frame continues from what this one says, damaged or not.
        wal.sums = sums_at(&wal.frame, 16);
    }
    let lock_page = LOCK_BYTE / page_size + 1;
    let mut beyond_the_file = (pages_in_file + 1)..=pages;
    Ok(Problems {
        is_damaged,
        lacks_pages: beyond_the_file.any(|page| page != lock_page && !pages_in_wal.contains(&page)),
    })
}

/// A WAL file (file format of SQLite, section 4.1).
struct Wal<R> {
    file: BufReader<R>,
    header: [u8; WAL_HEADER_LEN],
    /// True if SQLite would read this WAL.
    is_valid: bool,
    page_size: u32,
    /// The byte order of the checksums.
    is_big_endian: bool,
    /// The checksum of everything read so far.
    sums: [u32; 2],
    /// The header of the current frame.
    frame: [u8; WAL_FRAME_HEADER_LEN],
    page: Vec<u8>,
}

impl<R: Read> Wal<R> {
    /// None if the file is too short for a header.
    fn read_header(file: R) -> io::Result<Option<Self>> {
        let mut file = BufReader::with_capacity(1 << 16, file);
        let mut header = [0; WAL_HEADER_LEN];
        if !fill(&mut file, &mut header)? {
            return Ok(None);
        }
        let magic = u32_at(&header, 0);
        let is_big_endian = magic & 1 == 1;
        let sums = add_to([0; 2], is_big_endian, &header[..24]);
        let page_size = u32_at(&header, 8);
        let is_page_size = (512..=65536).contains(&page_size) && page_size.is_power_of_two();
        let is_valid = magic & !1 == WAL_MAGIC && sums == sums_at(&header, 24) && is_page_size;
        Ok(Some(Self {
            file,
            header,
            is_valid,
            page_size,
            is_big_endian,
            sums: if is_valid { sums } else { [0; 2] },
            frame: [0; WAL_FRAME_HEADER_LEN],
            page: Vec::new(),
        }))
    }

    /// Reads the page of the current frame: whether its checksum matches; none at the end of the file.
    fn read_page(&mut self) -> io::Result<Option<bool>> {
        self.page.resize(self.page_size as usize, 0);
        if !fill(&mut self.file, &mut self.page)? {
            return Ok(None);
        }
        for bytes in [&self.frame[..8], &self.page] {
            self.sums = add_to(self.sums, self.is_big_endian, bytes);
        }
        Ok(Some(self.sums == sums_at(&self.frame, 16)))
    }
}

/// Reads all of the buffer, unless the file ends before.
fn fill(file: &mut impl Read, buffer: &mut [u8]) -> io::Result<bool> {
    match file.read_exact(buffer) {
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(false),
        read => read.map(|()| true),
    }
}

/// Continues a checksum (file format of SQLite, section 4.2).
fn add_to([mut a, mut b]: [u32; 2], is_big_endian: bool, bytes: &[u8]) -> [u32; 2] {
    let word_at = |pair: &[u8], at| {
        let word = u32_at(pair, at);
        if is_big_endian {
            word
        } else {
            word.swap_bytes()
        }
    };
    for pair in bytes.chunks_exact(8) {
        a = a.wrapping_add(word_at(pair, 0)).wrapping_add(b);
        b = b.wrapping_add(word_at(pair, 4)).wrapping_add(a);
    }
    [a, b]
}

fn sums_at(bytes: &[u8], at: usize) -> [u32; 2] {
    [u32_at(bytes, at), u32_at(bytes, at + 4)]
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let bytes = bytes[at..].first_chunk().expect("a header is longer");
    u32::from_be_bytes(*bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE_LEN: usize = 512;
    const FRAME_LEN: usize = WAL_FRAME_HEADER_LEN + PAGE_LEN;

    /// A WAL whose frames, all of them commits, have these salts.
    fn wal(salt: u8, frames: u8) -> Vec<u8> {
        let mut wal = WAL_MAGIC.to_be_bytes().to_vec();
        for word in [3_007_000_u32, 512, 0] {
            wal.extend_from_slice(&word.to_be_bytes());
        }
        wal.extend_from_slice(&[salt; 8]);
        let mut sums = add_to([0; 2], false, &wal);
        wal.extend(sums.iter().flat_map(|sum| sum.to_be_bytes()));
        for frame in 0..frames {
            let start = wal.len();
            wal.extend_from_slice(&[0, 0, 0, 1, 0, 0, 0, 1]);
            let page = [salt ^ frame; PAGE_LEN];
            for bytes in [&wal[start..], &page] {
                sums = add_to(sums, false, bytes);
            }
            wal.extend_from_slice(&[salt; 8]);
            wal.extend(sums.iter().flat_map(|sum| sum.to_be_bytes()));
            wal.extend_from_slice(&page);
        }
        wal
    }

    fn is_damaged(wal: &[u8]) -> bool {
        let problems = inspect_file(io::Cursor::new(wal), PAGE_LEN as u64).expect("memory");
        problems.is_damaged
    }

    #[test]
    fn a_changed_frame_before_others_is_damage() {
        let whole = wal(1, 120);
        assert!(!is_damaged(&whole));
        for frame in 0..117 {
            let mut changed = whole.clone();
            changed[WAL_HEADER_LEN + frame * FRAME_LEN + 100] ^= 1;
            assert!(is_damaged(&changed), "{frame}");
        }
    }

    /// The header of some frames crosses a boundary, so that a power failure may leave a half of an older one.
    #[test]
    fn a_frame_that_was_half_written_is_no_damage() {
        let before = wal(1, 120);
        let mut crossing = 0;
        for frame in 0..120 {
            let start = WAL_HEADER_LEN + usize::from(frame) * FRAME_LEN;
            let boundary = start.next_multiple_of(512);
            if boundary >= start + WAL_FRAME_HEADER_LEN {
                continue;
            }
            crossing += 1;
            // The last transaction has this frame and the next one, and none of it was synced.
            let after = wal(2, frame + 2);
            let mut torn = before.clone();
            torn[..start].copy_from_slice(&after[..start]);
            torn[boundary..after.len()].copy_from_slice(&after[boundary..]);
            assert!(!is_damaged(&torn), "{frame}");
        }
        assert!(crossing > 2);
    }
}
