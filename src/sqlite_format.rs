//! Constants of the SQLite file format (<https://sqlite.org/fileformat2.html>), and what a file is according to its first bytes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// The files that SQLite or plantstore keep next to a database, by their suffix.
pub const SIDECAR_SUFFIXES: [&str; 4] = ["-wal", "-shm", "-journal", "-lock"];

/// "Plnt", in the header of every database that plantstore makes (`file plantstore.db` shows it).
pub const APPLICATION_ID: u32 = 0x506c_6e74;

/// The page size of a store.
pub const PAGE_LEN: u32 = 4096;

/// SQLite locks bytes from here on, so it never uses the page that contains them.
pub const LOCK_BYTE: u64 = 1 << 30;

/// The first four bytes of a WAL; the lowest bit is the byte order of its checksums.
pub const WAL_MAGIC: u32 = 0x377f_0682;
pub const WAL_HEADER_LEN: usize = 32;

/// The header of a frame, which is followed by a page.
pub const WAL_FRAME_HEADER_LEN: usize = 24;

/// The journal mode in the header of a database, and its position. A backup is in rollback-journal mode: all data is in the
/// database file. The data of a store may also be in its WAL.
pub const JOURNAL_MODE_OFFSET: u64 = 18;
pub const JOURNAL_MODE_ROLLBACK: [u8; 2] = [1, 1];
pub const JOURNAL_MODE_WAL: [u8; 2] = [2, 2];

/// What a file contains, as far as its first bytes show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// Nothing.
    Empty,
    /// A backup made by plantstore: a database in rollback-journal mode.
    Backup,
    /// The database of a store, or one in which nothing has been stored yet.
    Store,
    /// Another SQLite database, or the WAL or journal of any.
    Database,
    /// Anything else.
    Other,
}

impl Content {
    /// Reads the first bytes of a file.
    ///
    /// Must not be called for a database that this process has open through SQLite: closing the file would release
    /// SQLite's locks on it.
    pub fn of(file: &File) -> io::Result<Self> {
        let mut header = [0; 100];
        let mut len = 0;
        while len < header.len() {
            match file.read_at(&mut header[len..], len as u64)? {
                0 => break,
                read => len += read,
            }
        }
        Ok(match &header[..len] {
            [] => Self::Empty,
            // A WAL, or a rollback journal.
            [0x37, 0x7f, 0x06, 0x82 | 0x83, ..]
            | [0xd9, 0xd5, 0x05, 0xf9, 0x20, 0xa1, 0x63, 0xd7, ..] => Self::Database,
            header if header.starts_with(b"SQLite format 3\0") => {
                let application_id = header.get(68..72).unwrap_or_default();
                let has_wal = header.get(18..20) == Some(&JOURNAL_MODE_WAL);
                match (application_id == APPLICATION_ID.to_be_bytes(), has_wal) {
                    (true, false) => Self::Backup,
                    (true, true) => Self::Store,
                    // The first transaction may still be in the WAL.
                    (false, true) if file.metadata()?.len() <= 4096 => Self::Store,
                    _ => Self::Database,
                }
            }
            _ => Self::Other,
        })
    }
}
