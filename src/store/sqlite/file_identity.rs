//! Checks whether the path of a store still leads to the files that this process has open. If one of them is moved, deleted or replaced,
//! SQLite goes on with the open file, and everything that is added would be lost with the process. Then the content is rescued, as long
//! as this process still has the files open.

use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use rusqlite::{Connection, Error};

use crate::fs::{AtomicFile, directory_of, with_suffix};
use crate::sqlite_format::{LOCK_BYTE, WAL_FRAME_HEADER_LEN, WAL_HEADER_LEN, WAL_MAGIC};
use crate::store::error::{OpenError, chain};
use crate::store::sqlite::backup::copy_pages;
use crate::store::sqlite::connection::checkpoint;

/// The time between two checks, unless a checkpoint is due.
const INTERVAL: Duration = Duration::from_millis(250);

/// The files as they were when the store was opened, and what was found in them at the last check.
pub(super) struct FileIdentity {
    /// The path of `--store`, made absolute but with its links: a link may be changed, and a directory may be moved.
    given: PathBuf,
    /// The database itself.
    real: PathBuf,
    /// Dropped only when this process has no connection to the database: closing a file releases SQLite's locks on it.
    database: File,
    wal: File,
    /// Of `FILES`.
    ids: [FileId; 3],
    /// The last frame of the WAL at the last check, and the salts of its cycle.
    wal_mark: Option<(i32, [u8; 8])>,
    database_len: u64,
    /// The database file has no holes up to here: a checkpoint that a reader interrupts leaves holes.
    written_len: u64,
    /// The row of the table `store` in the database file, and the page that it is on: the identity never changes, and the
    /// number of the WAL cycle never falls.
    identity: [u8; 16],
    wal_cycle: u64,
    page: Vec<u8>,
    page_offset: u64,
    next_check: Instant,
}

/// Device and inode.
pub(super) type FileId = (u64, u64);

/// The suffixes of the files that SQLite has open: the database, its WAL, and the shared memory of that.
const FILES: [&str; 3] = ["", "-wal", "-shm"];

/// The number of frames of the WAL that are checked, and of pages of the database (at most twice as many).
const SAMPLES: i32 = 64;
const PAGE_SAMPLES: u64 = 32;

/// Every 16th frame since the last check is checked.
const NEW_FRAMES_STEP: usize = 16;

/// Another process may be writing to the WAL, so a problem is reported only if it is found this many times.
const ATTEMPTS: usize = 3;

/// What happened to the files while they were in use.
#[derive(Debug, thiserror::Error)]
pub(super) enum FileProblem {
    /// The path of the database leads to another file, or to none.
    #[error("the database file was moved, deleted or replaced while it was in use")]
    DatabaseNotAtPath,
    /// The path of the WAL or of its shared memory leads to another file, or to none.
    #[error("{0} was moved, deleted or replaced while it was in use")]
    SidecarMoved(PathBuf),
    #[error("{0} was truncated or overwritten while it was in use")]
    ContentDestroyed(PathBuf),
}

impl FileIdentity {
    /// `identity` is that in the table `store`.
    pub(super) fn new(
        connection: &Connection,
        path: &Path,
        identity: [u8; 16],
    ) -> io::Result<Self> {
        let real = path.canonicalize()?;
        let database = File::open(&real)?;
        let [database_id, wal_id, shared_memory_id] =
            FILES.map(|suffix| fs::metadata(with_suffix(&real, suffix)).map(|found| id(&found)));
        let mut files = Self {
            given: std::path::absolute(path)?,
            ids: [database_id?, wal_id?, shared_memory_id?],
            wal: File::open(with_suffix(&real, "-wal"))?,
            wal_mark: None,
            database_len: database.metadata()?.len(),
            written_len: 0,
            real,
            database,
            identity,
            wal_cycle: 0,
            page: Vec::new(),
            page_offset: 0,
            next_check: Instant::now() + INTERVAL,
        };
        files.find_page(connection).map_err(io::Error::other)?;
        files.check_identity(); // so that the first check knows the WAL cycle
        if wal_frames_now(connection).is_some_and(|(frames, checkpointed)| frames == checkpointed) {
            files.written_len = files.database_len;
        }
        Ok(files)
    }

    /// True if it is time for another check.
    pub(super) fn is_due(&self) -> bool {
        Instant::now() >= self.next_check
    }

    /// `wal_frames` is the length of the WAL after the last commit of this connection.
    pub(super) fn check(
        &mut self,
        connection: &Connection,
        wal_frames: i32,
    ) -> Result<(), FileProblem> {
        self.next_check = Instant::now() + INTERVAL;
        if !has_id(&self.given, self.ids[0]) || !has_id(&self.real, self.ids[0]) {
            return Err(FileProblem::DatabaseNotAtPath);
        }
        for (suffix, expected) in FILES.iter().zip(self.ids).skip(1) {
            let path = with_suffix(&self.real, suffix);
            if !has_id(&path, expected) {
                return Err(FileProblem::SidecarMoved(path));
            }
        }
        let (len_before, salts_before) = (self.database_len, self.salts());
        if !self.check_content(connection) {
            return Err(FileProblem::ContentDestroyed(self.real.clone()));
        }
        // Another process may have reset the WAL, perhaps just now.
        let has_frames = self.check_frames(wal_frames)
            || (1..ATTEMPTS).any(|_| {
                wal_frames_now(connection).is_none_or(|(frames, _)| self.check_frames(frames))
            });
        if !has_frames {
            let wal = with_suffix(&self.real, "-wal");
            return Err(FileProblem::ContentDestroyed(wal));
        }
        if salts_before.is_some() && salts_before != self.salts() {
            // The WAL was reset, so all of it had been written back to the database.
            self.written_len = len_before.min(self.database_len);
        }
        Ok(())
    }

    /// The new path of a database that was moved; none if it was deleted.
    fn new_path(&self) -> Option<PathBuf> {
        use std::os::fd::AsRawFd;
        let link = format!("/proc/self/fd/{}", self.database.as_raw_fd());
        let path = fs::read_link(link).ok()?;
        has_id(&path, self.ids[0]).then_some(path)
    }

    pub(super) fn shared_memory_id(&self) -> FileId {
        self.ids[2]
    }

    pub(super) fn path(&self) -> &Path {
        &self.real
    }

    /// False if the database file was truncated or overwritten. Records its new length.
    fn check_content(&mut self, connection: &Connection) -> bool {
        let Ok(len) = self.database.metadata().map(|found| found.len()) else {
            return true; // a disk error, which SQLite will report
        };
        if len < self.database_len && !self.has_whole_len(len) {
            return false;
        }
        self.database_len = len;
        self.written_len = self.written_len.min(len);
        // `VACUUM` by another program may have moved the page, and left pages that were never written.
        (self.check_identity() || (self.find_page(connection).is_ok() && self.check_identity()))
            && (self.has_pages() || has_free_pages(connection))
    }

    /// False if the database file has a hole: after a truncation a checkpoint goes on writing beyond its end. The same pages are checked
    /// each time, until the database is twice as large, so that they are cached.
    fn has_pages(&self) -> bool {
        let size = self.page.len() as u64;
        let pages = self.written_len / size;
        let distance = (pages / PAGE_SAMPLES).next_power_of_two().max(1);
        let mut samples = (0..pages).step_by(usize::try_from(distance).unwrap_or(usize::MAX));
        let mut content = vec![0; self.page.len()];
        samples.all(|page| {
            let offset = page * size;
            let read = self.database.read_exact_at(&mut content, offset);
            read.is_err() || offset == LOCK_BYTE || content.iter().any(|byte| *byte != 0)
        })
    }

    /// True if the file is as long as the number of pages in its header says.
    fn has_whole_len(&self, len: u64) -> bool {
        let mut header = [0; 4];
        let read = self.database.read_exact_at(&mut header, 28);
        read.is_ok() && u64::from(u32::from_be_bytes(header)) * self.page.len() as u64 == len
    }

    /// False if the database file is that of another store, or an older copy. Records its WAL cycle.
    fn check_identity(&mut self) -> bool {
        let read = self
            .database
            .read_exact_at(&mut self.page, self.page_offset);
        match row_of_store(&self.page) {
            Some((identity, wal_cycle)) if read.is_ok() => {
                let is_it = identity == self.identity && wal_cycle >= self.wal_cycle;
                self.wal_cycle = self.wal_cycle.max(wal_cycle);
                is_it
            }
            _ => false,
        }
    }

    fn find_page(&mut self, connection: &Connection) -> Result<(), Error> {
        let sql =
            "SELECT rootpage, page_size FROM sqlite_schema, pragma_page_size WHERE name = 'store'";
        let (page, size): (u32, u32) =
            connection.query_row(sql, [], |row| Ok((row.get(0)?, row.get(1)?)))?;
        self.page.resize(size as usize, 0);
        self.page_offset = u64::from(page.saturating_sub(1)) * u64::from(size);
        Ok(())
    }

    /// False if the WAL is too short, or has a hole: after a truncation SQLite goes on writing beyond its end. Records its last frame.
    fn check_frames(&mut self, wal_frames: i32) -> bool {
        let mut header = [0; 24];
        if wal_frames == 0 || self.wal.read_exact_at(&mut header, 0).is_err() {
            return wal_frames == 0;
        }
        let salts: [u8; 8] = *header.last_chunk().expect("a header is longer");
        let has_frame = |frame: i32| {
            let mut found = [0; 8];
            let at = self.offset_of_frame(frame) + 8;
            self.wal.read_exact_at(&mut found, at).is_ok() && found == salts
        };
        let distance = (wal_frames / SAMPLES).max(1);
        let samples = (0..SAMPLES)
            .map(|number| wal_frames - number * distance)
            .take_while(|frame| *frame > 0);
        let marked = self.wal_mark.filter(|(_, marked)| *marked == salts);
        let new = marked.map_or(1, |(frame, _)| frame)..=wal_frames;
        let has_all = header.starts_with(&WAL_MAGIC.to_be_bytes()[..3])
            && samples.chain(new.step_by(NEW_FRAMES_STEP)).all(has_frame);
        if has_all {
            self.wal_mark = Some((wal_frames, salts));
        }
        has_all
    }

    fn salts(&self) -> Option<[u8; 8]> {
        self.wal_mark.map(|(_, salts)| salts)
    }

    /// Frames are numbered from 1.
    fn offset_of_frame(&self, frame: i32) -> u64 {
        let frames_before = u64::try_from(frame - 1).unwrap_or_default();
        let frame_len = WAL_FRAME_HEADER_LEN + self.page.len();
        WAL_HEADER_LEN as u64 + frames_before * frame_len as u64
    }
}

/// The identity and the WAL cycle in the page of the table `store`, which has one row. (File format of SQLite, sections 1.6 and
/// 2.1; the columns are `id`, `identity`, `clean`, `wal_cycle`.)
fn row_of_store(page: &[u8]) -> Option<(&[u8], u64)> {
    let cell = u16::from_be_bytes(page.get(8..10)?.try_into().ok()?);
    // After its length and its number, a byte each. The id is that number, and takes no bytes here.
    let record = page.get(usize::from(cell) + 2..)?;
    let (&[_, _, _, _, cycle_type], values) = record.split_first_chunk::<5>()?;
    let (identity, values) = values.split_at_checked(16)?;
    let len = match cycle_type {
        1..=4 => cycle_type.into(),
        5 => 6,
        6 => 8,
        8 | 9 => return Some((identity, u64::from(cycle_type - 8))),
        _ => return None,
    };
    let bytes = values.get(..len)?.iter();
    let cycle = bytes.fold(0, |cycle, byte| cycle << 8 | u64::from(*byte));
    Some((identity, cycle))
}

fn has_free_pages(connection: &Connection) -> bool {
    let count = connection.pragma_query_value(None, "freelist_count", |row| row.get::<_, i64>(0));
    count.is_ok_and(|count| count > 0)
}

/// The length of the WAL with the commits of all processes, and how much of it has been written back.
fn wal_frames_now(connection: &Connection) -> Option<(i32, i32)> {
    let sql = "PRAGMA wal_checkpoint(NOOP)";
    let frames = connection.query_row(sql, [], |row| Ok((row.get(1)?, row.get(2)?)));
    frames.ok()
}

pub(super) fn has_id(path: &Path, expected: FileId) -> bool {
    fs::metadata(path).is_ok_and(|found| id(&found) == expected)
}

fn id(found: &Metadata) -> FileId {
    (found.dev(), found.ino())
}

/// Saves what the connection can still read, and says in a sentence where it is.
pub(super) fn rescue(
    connection: &mut Connection,
    files: &FileIdentity,
    problem: &FileProblem,
) -> String {
    match problem {
        FileProblem::DatabaseNotAtPath => match files.new_path() {
            Some(moved) => {
                let complete = if checkpoint_and_truncate(connection) {
                    "it is complete"
                } else {
                    "a part of it is still in the WAL file"
                };
                let moved = moved.display();
                format!("it is now {moved}, and {complete}; move it back, then start again")
            }
            None => match copy_beside(connection, files.path()) {
                Ok(copy) => {
                    let (copy, store) = (copy.display(), files.path().display());
                    format!(
                        "everything that was stored is in {copy}; \
                         `plantstore restore {copy} --store sqlite:{store}` makes it a store again"
                    )
                }
                Err(error) => format!("it could not be copied: {}", chain(&error)),
            },
        },
        FileProblem::SidecarMoved(_) if checkpoint_and_truncate(connection) => {
            "the database is complete without it; start again".to_owned()
        }
        FileProblem::SidecarMoved(_) => "put it back, then start again".to_owned(),
        // Nothing is written: the rest may be useful.
        FileProblem::ContentDestroyed(_) => {
            "run `plantstore check` and restore a backup".to_owned()
        }
    }
}

/// True if the complete WAL was written back to the database.
fn checkpoint_and_truncate(connection: &Connection) -> bool {
    checkpoint(connection, "TRUNCATE").unwrap_or(false)
}

/// Copies everything to a backup next to the store, in the directory above, or in the temporary directory.
fn copy_beside(connection: &mut Connection, store: &Path) -> Result<PathBuf, OpenError> {
    // So that no WAL with content remains at the path, where its database no longer is.
    checkpoint_and_truncate(connection);
    let suffix = Timestamp::now().strftime("-rescued-%Y%m%dT%H%M%S.%3fZ");
    let name = with_suffix(
        store.file_name().unwrap_or_default().as_ref(),
        &suffix.to_string(),
    );
    let (directory, temporary) = (directory_of(store), std::env::temp_dir());
    copy_to(connection, directory.join(&name))
        .or_else(|_| copy_to(connection, directory_of(directory).join(&name)))
        .or_else(|_| copy_to(connection, temporary.join(&name)))
}

fn copy_to(connection: &mut Connection, path: PathBuf) -> Result<PathBuf, OpenError> {
    let backup = AtomicFile::create(&path, None, None)?;
    copy_pages(connection, &backup, &mut |_, _| ())?;
    backup.persist()?;
    Ok(path)
}
