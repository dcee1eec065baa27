//! The one process that may serve a store at a time: its lock, and the generation that shows afterwards whether all it wrote
//! is still there.
//!
//! The generation is a counter in the database. It grows in the first transactions of a session, of each new cycle of the
//! WAL, and at the end. After each commit that raised it, it is noted in the lock file. A database (with its WAL) whose
//! generation is lower than noted lacks transactions: its WAL was deleted, or an older copy was put in its place.

use std::fmt::Write as _;
use std::fs::{self, File, TryLockError};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_encode};
use rusqlite::config::DbConfig;
use rusqlite::{Connection, Error, OpenFlags, Transaction, TransactionBehavior};

use crate::fs::{create_empty, is_same_file, open_existing, with_suffix};
use crate::store::error::OpenError;
use crate::store::sqlite::open::failed_to;
use crate::store::sqlite::wal_check;

/// Which store a database is, and how far it has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Generation {
    pub(super) identity: [u8; 16],
    number: i64,
}

impl Generation {
    /// Reads it from a database; none if that was made before there were generations.
    pub(super) fn read(connection: &Connection) -> Result<Option<Self>, Error> {
        let exists = "SELECT EXISTS (SELECT 1 FROM sqlite_schema WHERE name = 'store')";
        if !connection.query_row(exists, [], |row| row.get(0))? {
            return Ok(None);
        }
        let select = "SELECT identity, generation FROM store";
        let read = connection.query_row(select, [], |row| {
            Ok(Self {
                identity: row.get(0)?,
                number: row.get(1)?,
            })
        })?;
        Ok(Some(read))
    }

    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_ascii_whitespace();
        let (Some("store"), Some(identity)) = (words.next(), words.next()) else {
            return None;
        };
        let (Some("generation"), Some(number)) = (words.next(), words.next()) else {
            return None;
        };
        let identity = u128::from_str_radix(identity, 16).ok()?;
        Some(Self {
            identity: identity.to_be_bytes(),
            number: number.parse().ok()?,
        })
    }
}

/// Excludes other servers, imports without a server, upgrades and restores for as long as it is held.
///
/// The lock file is locked, and so is the database itself: the first also excludes others while there is no database yet, the
/// second also holds if the lock file is deleted or the database is opened under another name. (These are `flock` locks;
/// SQLite's own are independent of them.)
#[derive(Debug)]
pub struct Lock {
    file: File,
    noted: Option<Generation>,
    /// Dropped only when this process has no connection to the database: closing a file releases SQLite's locks on it.
    _database: Option<File>,
}

impl Lock {
    /// Takes the lock on a store, which need not exist yet. The path is that of the file itself.
    pub(super) fn take(store: &Path) -> Result<Self, OpenError> {
        let path = with_suffix(store, "-lock");
        let mut file = create_empty(&path, store)
            .and_then(|_| open_existing(&path, true))
            .map_err(failed_to("open", &path))?;
        let locked = || OpenError::Locked {
            path: store.display().to_string(),
            pid: holder(&path),
        };
        if !try_lock(&file, &path)? {
            return Err(locked());
        }
        let database = match open_existing(store, true) {
            Ok(database) if !try_lock(&database, store)? => return Err(locked()),
            Ok(database) => Some(database),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(failed_to("open", store)(error)),
        };
        let mut text = String::new();
        let _ = (&mut file).take(1024).read_to_string(&mut text);
        let lock = Self {
            file,
            noted: text.lines().nth(1).and_then(Generation::parse),
            _database: database,
        };
        lock.write(lock.noted);
        Ok(lock)
    }

    /// Takes the lock if nobody has it, without creating any file.
    fn take_if_free(store: &Path) -> io::Result<Option<[Option<File>; 2]>> {
        let mut locked = [None, None];
        for (locked, path) in locked
            .iter_mut()
            .zip([with_suffix(store, "-lock"), store.to_owned()])
        {
            match open_existing(&path, true) {
                Ok(file) => match file.try_lock() {
                    Ok(()) => *locked = Some(file),
                    Err(_) => return Ok(None),
                },
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Some(locked))
    }

    /// Checks that a database is not older than the one that was served here last.
    pub(super) fn check(&self, found: Option<Generation>, store: &Path) -> Result<(), OpenError> {
        match (self.noted, found) {
            (Some(noted), Some(found)) if is_older(found, noted) => {
                Err(OpenError::Older(store.display().to_string()))
            }
            (Some(noted), Some(found)) if found.identity != noted.identity => {
                tracing::warn!(store = %store.display(), "this is not the store that was served here last");
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Creates the lock file again if somebody has deleted or replaced it, and returns true then: the generation in it must
    /// outlive this process.
    fn recreate_file(&mut self, store: &Path) -> bool {
        let path = with_suffix(store, "-lock");
        if is_same_file(self.file.metadata(), fs::symlink_metadata(&path)) {
            return false;
        }
        let file = create_empty(&path, store).and_then(|_| open_existing(&path, true));
        match file {
            Ok(file) if file.try_lock().is_ok() => {
                tracing::warn!(file = %path.display(), "the lock file was deleted or replaced; it was created again");
                self.file = file;
                true
            }
            // The lock on the database still holds.
            _ => false,
        }
    }

    /// Any database will do from now on.
    pub(super) fn forget_generation(&self) {
        self.write(None);
    }

    /// Not synced: a generation that a power failure takes back is one that is not checked for.
    fn write(&self, generation: Option<Generation>) {
        let mut text = format!("{:<20}\n", std::process::id());
        if let Some(Generation { identity, number }) = generation {
            let identity = u128::from_be_bytes(identity);
            // Of one length, so that one write replaces all of it.
            let _ = writeln!(text, "store {identity:032x} generation {number:020}");
        }
        let written = self.file.write_all_at(text.as_bytes(), 0);
        let written = written.and_then(|()| self.file.set_len(text.len() as u64));
        if let Err(error) = written {
            tracing::warn!(%error, "cannot write to the lock file");
        }
    }
}

fn is_older(found: Generation, noted: Generation) -> bool {
    found.identity == noted.identity && found.number < noted.number
}

fn try_lock(file: &File, path: &Path) -> Result<bool, OpenError> {
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(failed_to("lock", path)(error)),
    }
}

/// The process id in a lock file.
fn holder(path: &Path) -> Option<String> {
    let mut text = String::new();
    let file = open_existing(path, false).ok()?;
    file.take(1024).read_to_string(&mut text).ok()?;
    let pid = text.lines().next()?.trim();
    (!pid.is_empty() && pid.bytes().all(|byte| byte.is_ascii_digit())).then(|| pid.to_owned())
}

/// What the lock file of this store has noted.
pub(super) fn noted(store: &Path) -> Option<Generation> {
    let mut text = String::new();
    let file = open_existing(&with_suffix(store, "-lock"), false).ok()?;
    file.take(1024).read_to_string(&mut text).ok()?;
    Generation::parse(text.lines().nth(1)?)
}

/// True if a database lacks transactions that were committed while it was served here.
pub(super) fn is_behind(connection: &Connection) -> Result<bool, Error> {
    let noted = connection.path().and_then(|path| noted(path.as_ref()));
    let found = Generation::read(connection)?;
    Ok(noted
        .zip(found)
        .is_some_and(|(noted, found)| is_older(found, noted)))
}

/// A store that this process serves.
#[derive(Debug)]
pub(super) struct Session {
    lock: Lock,
    generation: Generation,
    /// Frames in the WAL after the last batch.
    wal_frames: i32,
    /// True if the WAL has started again since the generation was raised.
    is_new_cycle: bool,
}

impl Session {
    /// Begins a session on a database that was checked against the lock.
    pub(super) fn begin(connection: &mut Connection, lock: Lock) -> Result<Self, Error> {
        let generation = Generation::read(connection)?.ok_or(Error::QueryReturnedNoRows)?;
        let mut session = Self {
            lock,
            generation,
            wal_frames: 0,
            is_new_cycle: false,
        };
        session.advance_alone(connection)?;
        Ok(session)
    }

    /// Looks after the lock file, which somebody may have deleted.
    pub(super) fn keep_lock_file(&mut self, store: &Path) {
        if self.lock.recreate_file(store) {
            self.lock.write(Some(self.generation));
        }
    }

    /// True if the WAL has started again from its beginning since the generation was raised. A transaction then has to raise it.
    pub(super) fn is_new_cycle(&mut self, wal_frames: i32) -> bool {
        self.is_new_cycle |= wal_frames < self.wal_frames;
        self.wal_frames = wal_frames;
        self.is_new_cycle
    }

    /// Raises the generation within a transaction. Call `committed` after its commit.
    pub(super) fn advance(&self, transaction: &Transaction<'_>) -> Result<(), Error> {
        let mut update = transaction.prepare_cached("UPDATE store SET generation = ?1")?;
        update.execute([self.generation.number + 1])?;
        Ok(())
    }

    /// Notes the raised generation, which is durable now.
    pub(super) fn committed(&mut self) {
        self.generation.number += 1;
        self.is_new_cycle = false;
        self.lock.write(Some(self.generation));
    }

    /// Ends the session: a copy of the database that was made during it is older from now on.
    pub(super) fn end(&mut self, connection: &mut Connection) {
        // Without it such a copy is not noticed; nothing else depends on it.
        let _ = self.advance_alone(connection);
    }

    fn advance_alone(&mut self, connection: &mut Connection) -> Result<(), Error> {
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        self.advance(&transaction)?;
        transaction.commit()?;
        self.committed();
        Ok(())
    }
}

/// Generations are raised at most this often while the WAL is in one cycle: at its start, and at the end of the session.
const RAISED_PER_CYCLE: i64 = 2;

/// Everything but what may stand in the path of a URI as it is.
const ENCODED: AsciiSet = NON_ALPHANUMERIC
    .remove(b'/')
    .remove(b'.')
    .remove(b'-')
    .remove(b'_');

/// Checks that the WAL next to a database belongs to it: SQLite would apply any. Nothing is changed, whatever is found.
///
/// While the store is served this is not checked: then the WAL changes all the time, and it was checked at the start.
pub(super) fn check_wal(store: &Path) -> Result<(), OpenError> {
    let wal = with_suffix(store, "-wal");
    if fs::metadata(&wal).map_or(0, |found| found.len()) == 0 {
        return Ok(());
    }
    // Without the right to lock, nothing can be written either.
    let Ok(Some(_locked)) = Lock::take_if_free(store) else {
        return Ok(());
    };
    let foreign = || OpenError::ForeignWal {
        database: store.display().to_string(),
        wal: wal.display().to_string(),
    };
    if wal_check::lacks_pages(&wal, store).map_err(failed_to("read", &wal))? {
        return Err(foreign());
    }
    let Some(without_wal) = read_without_wal(store) else {
        return Ok(());
    };
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let with_wal = Connection::open_with_flags(store, flags).and_then(|connection| {
        connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
        Generation::read(&connection)
    });
    match with_wal {
        Ok(Some(with_wal))
            if with_wal.identity == without_wal.identity
                && with_wal.number - without_wal.number <= RAISED_PER_CYCLE =>
        {
            Ok(())
        }
        Err(error) if !is_damage(&error) => Ok(()), // the connection that follows will report it
        _ => Err(foreign()),
    }
}

fn is_damage(error: &Error) -> bool {
    use rusqlite::ErrorCode::{DatabaseCorrupt, NotADatabase};
    matches!(
        error.sqlite_error_code(),
        Some(DatabaseCorrupt | NotADatabase)
    )
}

/// The generation in the database file alone; none if it cannot be read.
fn read_without_wal(store: &Path) -> Option<Generation> {
    let path = percent_encode(store.as_os_str().as_bytes(), &ENCODED);
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY
        | OpenFlags::SQLITE_OPEN_NO_MUTEX
        | OpenFlags::SQLITE_OPEN_URI;
    let connection = Connection::open_with_flags(format!("file:{path}?immutable=1"), flags).ok()?;
    Generation::read(&connection).ok()?
}
