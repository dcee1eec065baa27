//! Files that commands write. A file is created exclusively under a temporary name with mode 0600, synced, and renamed
//! into place, so that under its final name it is either complete or absent. No file of a store, no backup and no other
//! database is ever overwritten, except a backup by a newer backup.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, OFlags, RenameFlags, renameat_with};
use rustix::process::geteuid;

/// The files that SQLite or plantstore keep next to a database, by their suffix.
pub const COMPANIONS: [&str; 4] = ["-wal", "-shm", "-journal", "-lock"];

/// "Plnt", in the header of every database that plantstore makes (`file plantstore.db` shows it).
pub const APPLICATION_ID: u32 = 0x506c_6e74;

/// The ending of temporary names. Before it stand a random number and a checksum, so that a leftover of a killed process is
/// recognised and a file of another program is not taken for one.
const TEMPORARY: &str = ".plantstore-tmp";

/// File names may have 255 bytes; the rest is for the random part, the ending and the suffixes of SQLite.
const NAME_LEN_MAX: usize = 200;

/// Why a file was not written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    #[error("{0} already exists; choose another name or use --force")]
    Exists(String),
    #[error("{0} exists and is not a backup, so it is not replaced; choose another name")]
    NotABackup(String),
    #[error("{0} is not a regular file; choose another name")]
    NotAFile(String),
    #[error("{0} is a symbolic link, which is not followed; give the path of the file itself")]
    SymbolicLink(String),
    #[error("{0} belongs to the store itself; choose another name")]
    OwnFile(String),
    #[error("{file} belongs to the database {database}; choose another name")]
    Companion { file: String, database: String },
    #[error("{0} is a database or a part of one, so it is not replaced; choose another name")]
    Database(String),
    #[error(
        "{0} is not empty and belongs to a database that is not there; move it away together with its database first"
    )]
    Orphan(String),
    #[error("{0} is being written by another plantstore; wait for it or choose another name")]
    InUse(String),
    #[error(
        "cannot {action} {path}; check that its directory exists, that the disk has room and that this user may write there"
    )]
    Io {
        action: &'static str,
        path: String,
        source: io::Error,
    },
}

/// What may have the final name already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replace {
    /// Nothing.
    Nothing,
    /// A backup made by plantstore, or an empty file.
    Backup,
    /// Any regular file that is neither a database nor a part of one.
    RegularFile,
    /// Any regular file but the database of another program. It is kept under another name: see
    /// `persist_and_keep`.
    Store,
}

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
                let has_wal = header.get(18..20) == Some(&JournalMode::Wal.bytes());
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

/// The journal mode in the header of a SQLite database.
#[derive(Debug, Clone, Copy)]
pub enum JournalMode {
    /// All data is in the database file: a backup.
    Rollback,
    /// Data may also be in the WAL: a store.
    Wal,
}

impl JournalMode {
    const OFFSET: u64 = 18;

    fn bytes(self) -> [u8; 2] {
        match self {
            Self::Rollback => [1, 1],
            Self::Wal => [2, 2],
        }
    }
}

/// A file that is being written. It is locked, and removed when this is dropped before `persist`.
pub struct AtomicFile {
    target: PathBuf,
    temporary: PathBuf,
    file: File,
    replace: Replace,
}

impl AtomicFile {
    /// Creates the temporary file. `store` is the database in use, whose files are never written to.
    pub fn create(
        target: &Path,
        replace: Replace,
        store: Option<&Path>,
    ) -> Result<Self, WriteError> {
        check_target(target, replace, store)?;
        let target = resolve(target).map_err(failed_to("find the directory of", target))?;
        remove_leftovers(&target)?;
        let temporary = temporary_name(&target);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&temporary)
            .map_err(failed_to("create", &temporary))?;
        let created = Self {
            target,
            temporary,
            file,
            replace,
        };
        match created.file.try_lock() {
            // Another process may have taken the file for a leftover before it was locked.
            Ok(()) if created.is_in_place() => Ok(created),
            Ok(()) | Err(TryLockError::WouldBlock) => {
                Err(WriteError::InUse(created.target.display().to_string()))
            }
            Err(TryLockError::Error(error)) => Err(failed_to("lock", &created.temporary)(error)),
        }
    }

    /// The temporary path, for programs that need one.
    pub fn path(&self) -> &Path {
        &self.temporary
    }

    /// The file to write to.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Syncs the file and drops it from the page cache, so that it is read back from disk.
    pub fn sync(&self) -> Result<(), WriteError> {
        let synced = self.file.sync_all();
        synced.map_err(failed_to("sync", &self.temporary))?;
        #[cfg(target_os = "linux")]
        {
            use rustix::fs::{Advice, fadvise};
            // The result does not matter: it is only a hint.
            let _ = fadvise(&self.file, 0, None, Advice::DontNeed);
        }
        Ok(())
    }

    /// Writes the journal mode into the header of a database. (SQLite would create a WAL next to it for that.)
    pub fn set_journal_mode(&self, mode: JournalMode) -> Result<(), WriteError> {
        let written = self.file.write_all_at(&mode.bytes(), JournalMode::OFFSET);
        written.map_err(failed_to("write to", &self.temporary))
    }

    /// Syncs the file and gives it its final name.
    pub fn persist(self) -> Result<(), WriteError> {
        self.sync()?;
        self.remove_companions();
        let name = self.target.display().to_string();
        if self.replace == Replace::Nothing {
            rename_to_new(&self.temporary, &self.target).map_err(|error| match error.kind() {
                ErrorKind::AlreadyExists => WriteError::Exists(name),
                _ => failed_to("rename a finished file to", &self.target)(error),
            })?;
        } else {
            // Again, since anything can have been put there in the meantime.
            check_target(&self.target, self.replace, None)?;
            fs::rename(&self.temporary, &self.target)
                .map_err(failed_to("rename a finished file to", &self.target))?;
        }
        sync_directory_of(&self.target).map_err(failed_to("sync the directory of", &self.target))
    }

    /// Syncs the file and gives it its final name; what had that name is kept under `kept`. At every moment one of the two
    /// is complete under the final name, unless the file system cannot exchange names.
    pub fn persist_and_keep(self, kept: &Path) -> Result<(), WriteError> {
        self.sync()?;
        self.remove_companions();
        let exchange = || {
            rename_to_new(&self.temporary, kept)?;
            if renameat_with(CWD, kept, CWD, &self.target, RenameFlags::EXCHANGE).is_err() {
                fs::rename(kept, &self.temporary)?;
                rename_to_new(&self.target, kept)?;
                rename_to_new(&self.temporary, &self.target)?;
            }
            sync_directory_of(&self.target)
        };
        exchange().map_err(failed_to("rename a finished file to", &self.target))
    }

    fn is_in_place(&self) -> bool {
        is_same_file(self.file.metadata(), fs::symlink_metadata(&self.temporary))
    }

    fn remove_companions(&self) {
        for suffix in COMPANIONS {
            let _ = fs::remove_file(with_suffix(&self.temporary, suffix));
        }
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if self.is_in_place() {
            self.remove_companions();
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

/// Checks that a file may be written under this name.
fn check_target(target: &Path, replace: Replace, store: Option<&Path>) -> Result<(), WriteError> {
    let name = target.display().to_string();
    let found = match fs::symlink_metadata(target) {
        Ok(found) => Some(found),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => return Err(failed_to("write", target)(error)),
    };
    let resolved = resolve(target).map_err(failed_to("find the directory of", target))?;
    // First of all, without opening the file: it may be open through SQLite.
    if let Some(store) = store
        && is_file_of_store(&resolved, store)
    {
        return Err(WriteError::OwnFile(name));
    }
    if let Some(database) = database_of_companion(&resolved) {
        let database = database.display().to_string();
        return Err(WriteError::Companion {
            file: name,
            database,
        });
    }
    if replace != Replace::Store
        && let Some(orphan) = orphan_of(&resolved)
    {
        return Err(WriteError::Orphan(orphan.display().to_string()));
    }
    let Some(found) = found else {
        return Ok(());
    };
    if found.is_symlink() {
        return Err(WriteError::SymbolicLink(name));
    }
    if !found.is_file() {
        return Err(WriteError::NotAFile(name));
    }
    if replace == Replace::Nothing {
        return Err(WriteError::Exists(name));
    }
    let content = open_existing(&resolved, false).and_then(|file| Content::of(&file));
    match (content.map_err(failed_to("read", target))?, replace) {
        (Content::Empty, _)
        | (Content::Backup, Replace::Backup)
        | (Content::Store | Content::Backup, Replace::Store)
        | (Content::Other, Replace::RegularFile | Replace::Store) => Ok(()),
        (_, Replace::RegularFile | Replace::Store) => Err(WriteError::Database(name)),
        _ => Err(WriteError::NotABackup(name)),
    }
}

/// True for the database of a store, its companions and the file with its first token, under any name.
fn is_file_of_store(path: &Path, store: &Path) -> bool {
    let Ok(store) = resolve_links(store) else {
        return false;
    };
    let companions = COMPANIONS.map(|suffix| with_suffix(&store, suffix));
    let token = store.with_file_name("plantstore.token");
    [store, token]
        .iter()
        .chain(&companions)
        .any(|own| path == own || is_same_file(fs::metadata(path), fs::metadata(own)))
}

/// A WAL with content next to a database that is missing or empty, or a rollback journal next to one that is missing. SQLite
/// would delete it, or apply it to whatever database gets that name. (A journal next to an empty database is what a crash
/// leaves while the database is created.)
pub fn orphan_of(database: &Path) -> Option<PathBuf> {
    let len = |path: &Path| fs::metadata(path).map_or(0, |found| found.len());
    let (wal, journal) = (
        with_suffix(database, "-wal"),
        with_suffix(database, "-journal"),
    );
    if len(database) == 0 && len(&wal) > 0 {
        return Some(wal);
    }
    (!database.exists() && len(&journal) > 0).then_some(journal)
}

/// The database that a name such as `plants.db-wal` belongs to, if that is there.
pub fn database_of_companion(path: &Path) -> Option<PathBuf> {
    let name = path.file_name()?.as_bytes();
    let base = COMPANIONS
        .iter()
        .find_map(|suffix| name.strip_suffix(suffix.as_bytes()))?;
    let database = path.with_file_name(OsStr::from_bytes(base));
    let file = open_existing(&database, true).ok()?;
    let content = Content::of(&file).ok()?;
    matches!(
        content,
        Content::Database | Content::Store | Content::Backup
    )
    .then_some(database)
}

/// A temporary name for this target: random, with a checksum that includes the target's name.
fn temporary_name(target: &Path) -> PathBuf {
    let random = getrandom::u32().unwrap_or_else(|_| std::process::id());
    let name = target.file_name().unwrap_or_default().as_bytes();
    let mut temporary = OsString::from(OsStr::from_bytes(&name[..name.len().min(NAME_LEN_MAX)]));
    temporary.push(format!(
        ".{random:08x}{:08x}{TEMPORARY}",
        checksum(name, random)
    ));
    target.with_file_name(temporary)
}

/// Whether `temporary_name` made this name for this target.
fn is_temporary_name(candidate: &OsStr, target: &OsStr) -> bool {
    let target = target.as_bytes();
    let middle = candidate
        .as_bytes()
        .strip_prefix(&target[..target.len().min(NAME_LEN_MAX)])
        .and_then(|rest| rest.strip_prefix(b"."))
        .and_then(|rest| rest.strip_suffix(TEMPORARY.as_bytes()))
        .and_then(|middle| std::str::from_utf8(middle).ok())
        .filter(|middle| middle.len() == 16);
    let number = middle.and_then(|middle| u64::from_str_radix(middle, 16).ok());
    number.is_some_and(|number| {
        let random = u32::try_from(number >> 32).unwrap_or_default();
        number & u64::from(u32::MAX) == u64::from(checksum(target, random))
    })
}

fn checksum(name: &[u8], random: u32) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(name);
    hasher.update(&random.to_be_bytes());
    hasher.finalize()
}

/// Removes what killed processes have left of this target. A process that is still writing it is an error.
fn remove_leftovers(target: &Path) -> Result<(), WriteError> {
    let directory = directory_of(target);
    let failed = || failed_to("read the directory", directory);
    for entry in fs::read_dir(directory).map_err(failed())? {
        let entry = entry.map_err(failed())?;
        if !is_temporary_name(&entry.file_name(), target.file_name().unwrap_or_default()) {
            continue;
        }
        let path = entry.path();
        let Ok(file) = open_existing(&path, true) else {
            continue; // a link, or not ours to open
        };
        match file.try_lock() {
            Ok(()) if is_same_file(file.metadata(), fs::symlink_metadata(&path)) => {
                for suffix in COMPANIONS {
                    let _ = fs::remove_file(with_suffix(&path, suffix));
                }
                let _ = fs::remove_file(&path);
            }
            Ok(()) => {} // renamed into place just now
            Err(_) => return Err(WriteError::InUse(target.display().to_string())),
        }
    }
    Ok(())
}

/// Renames without replacing anything. Not every file system can do that in one step; with two, the new name appears
/// atomically as well.
fn rename_to_new(from: &Path, to: &Path) -> io::Result<()> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS | rustix::io::Errno::NOTSUP) => {
            fs::hard_link(from, to)?;
            fs::remove_file(from)
        }
        done => Ok(done?),
    }
}

/// Creates an empty file with mode 0600. False if the name exists.
///
/// A file that root creates is given to the owner of the store, so that the service can open it.
pub fn create_empty(path: &Path, store: &Path) -> io::Result<bool> {
    let owner = owner_of(store); // before the store itself is created
    let mut options = OpenOptions::new();
    match options.write(true).create_new(true).mode(0o600).open(path) {
        Ok(file) => {
            change_owner(&file, owner);
            Ok(true)
        }
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error),
    }
}

/// Gives a file that root created to the owner of the store, or of its directory if there is no store yet.
pub fn give_to_owner_of(store: &Path, file: &File) {
    change_owner(file, owner_of(store));
}

fn owner_of(store: &Path) -> Option<Metadata> {
    let owner = fs::metadata(store).or_else(|_| fs::metadata(directory_of(store)));
    owner.ok().filter(|_| geteuid().is_root())
}

fn change_owner(file: &File, owner: Option<Metadata>) {
    if let Some(owner) = owner {
        // In a container or over NFS root may not be allowed to; the file then stays root's.
        let _ = fchown(file, Some(owner.uid()), Some(owner.gid()));
    }
}

/// Opens an existing regular file without following a symbolic link and without waiting for the other end of a pipe.
pub fn open_existing(path: &Path, write: bool) -> io::Result<File> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = OpenOptions::new()
        .read(true)
        .write(write)
        .custom_flags(flags.bits().cast_signed())
        .open(path)?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::other("not a regular file"))
    }
}

/// The directory that a file is in.
pub fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

/// Makes the entry of this file in its directory survive a power failure.
pub fn sync_directory_of(path: &Path) -> io::Result<()> {
    File::open(directory_of(path))?.sync_all()
}

/// The path with a resolved directory and the last component as it is.
fn resolve(path: &Path) -> io::Result<PathBuf> {
    match path.file_name() {
        Some(name) => Ok(directory_of(path).canonicalize()?.join(name)),
        None => path.canonicalize(),
    }
}

/// The path of the file itself, which may not exist yet.
pub fn resolve_links(path: &Path) -> io::Result<PathBuf> {
    path.canonicalize().or_else(|error| match error.kind() {
        ErrorKind::NotFound => resolve(path),
        _ => Err(error),
    })
}

/// `plants.db` and `-wal` → `plants.db-wal`
pub fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut path = path.as_os_str().to_owned();
    path.push(suffix);
    path.into()
}

/// True if both are the same file.
pub fn is_same_file(one: io::Result<Metadata>, other: io::Result<Metadata>) -> bool {
    let both = one.ok().zip(other.ok());
    both.is_some_and(|(a, b)| (a.dev(), a.ino()) == (b.dev(), b.ino()))
}

/// For `map_err`.
pub fn failed_to(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> WriteError {
    let path = path.display().to_string();
    move |source| WriteError::Io {
        action,
        path,
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_temporary_name_is_recognised_for_its_own_target_only() {
        let target = Path::new("/data/plants.db");
        let temporary = temporary_name(target);
        let temporary = temporary.file_name().expect("a name");
        assert!(is_temporary_name(temporary, OsStr::new("plants.db")));
        assert!(!is_temporary_name(temporary, OsStr::new("plants")));
        for other in [
            "plants.db.plantstore-tmp",
            "plants.db.0123456789abcdef.plantstore-tmp",
            "plants.db-partial",
        ] {
            assert!(!is_temporary_name(
                OsStr::new(other),
                OsStr::new("plants.db")
            ));
        }
    }

    #[test]
    fn a_long_name_has_a_temporary_name_that_fits() {
        let target = PathBuf::from("x".repeat(255));
        let temporary = temporary_name(&target);
        assert!(with_suffix(&temporary, "-journal").as_os_str().len() <= 255);
        assert!(is_temporary_name(temporary.as_os_str(), target.as_os_str()));
    }
}
