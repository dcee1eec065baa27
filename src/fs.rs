//! Files that commands write. A file is created exclusively under a temporary name with mode 0600, synced, and renamed
//! into place, so that under its final name it is either complete or absent. No file of a store, no backup and no other
//! database is ever overwritten, except a backup by a newer backup.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, OFlags, RenameFlags, renameat_with};
use rustix::process::geteuid;

use crate::sqlite_format::{Content, SIDECAR_SUFFIXES};

/// The ending of temporary names. Before it stand a random number and a checksum, so that a leftover of a killed process is
/// recognised and a file of another program is not mistaken for one.
const TEMPORARY: &str = ".plantstore-tmp";

/// File names may have 255 bytes; the rest is for the random part, the ending and the suffixes of SQLite.
const NAME_LEN_MAX: usize = 200;

/// Why a file cannot be used or written. Each message says what to do.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("{0} already exists; choose another name or use --force")]
    Exists(PathBuf),
    /// The file must not be written, for the reason in the message.
    #[error("{0}")]
    Rejected(String),
    #[error(
        "cannot {action} {path}; check that its directory exists, that the disk has room and that this user may write there"
    )]
    Io {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
}

/// What may have the final name already, and is replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replace {
    /// A backup made by plantstore, or an empty file.
    Backup,
    /// Any regular file that is neither a database nor a part of one.
    RegularFile,
    /// Any regular file but the database of another program. It is kept under another name: see
    /// `persist_and_keep`.
    Store,
}

/// A file that is being written. It is locked, and removed when this is dropped before `persist`.
pub struct AtomicFile {
    target: PathBuf,
    temporary: PathBuf,
    file: File,
    replace: Option<Replace>,
}

impl AtomicFile {
    /// Creates the temporary file. Without `replace` the final name must be free. `store` is the database in use, whose files are
    /// never written to.
    pub fn create(
        target: &Path,
        replace: Option<Replace>,
        store: Option<&Path>,
    ) -> Result<Self, FileError> {
        check_target(target, replace, store)?;
        let target = resolve(target).map_err(failed_to("find the directory of", target))?;
        remove_leftovers(&target)?;
        let random = getrandom::u32().unwrap_or_else(|_| std::process::id());
        let name = target.file_name().unwrap_or_default();
        let temporary = target.with_file_name(temporary_name(name, random));
        let file = create_new(&temporary).map_err(failed_to("create", &temporary))?;
        let created = Self {
            target,
            temporary,
            file,
            replace,
        };
        match created.file.try_lock() {
            // Another process may have taken the file for a leftover before it was locked.
            Ok(()) if created.is_in_place() => Ok(created),
            Ok(()) | Err(TryLockError::WouldBlock) => Err(in_use(&created.target)),
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
    pub fn sync(&self) -> Result<(), FileError> {
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

    /// Syncs the file and gives it its final name.
    pub fn persist(self) -> Result<(), FileError> {
        self.sync_and_rename(|from, to| match self.replace {
            None => rename_to_new(from, to),
            Some(_) => fs::rename(from, to),
        })
    }

    /// Syncs the file and gives it its final name; what had that name is kept under `kept`. At every moment one of the two
    /// is complete under the final name, unless the file system cannot exchange names.
    pub fn persist_and_keep(self, kept: &Path) -> Result<(), FileError> {
        self.sync_and_rename(|from, to| {
            rename_to_new(from, kept)?;
            if renameat_with(CWD, kept, CWD, to, RenameFlags::EXCHANGE).is_err() {
                fs::rename(kept, from)?;
                rename_to_new(to, kept)?;
                rename_to_new(from, to)?;
            }
            Ok(())
        })
    }

    fn sync_and_rename(
        &self,
        rename: impl FnOnce(&Path, &Path) -> io::Result<()>,
    ) -> Result<(), FileError> {
        self.sync()?;
        remove_sidecars(&self.temporary);
        // Again, since anything can have been put there in the meantime.
        check_target(&self.target, self.replace, None)?;
        let renamed = rename(&self.temporary, &self.target);
        renamed.map_err(|error| match (error.kind(), self.replace) {
            (ErrorKind::AlreadyExists, None) => FileError::Exists(self.target.clone()),
            _ => failed_to("rename a finished file to", &self.target)(error),
        })?;
        sync_directory_of(&self.target).map_err(failed_to("sync the directory of", &self.target))
    }

    fn is_in_place(&self) -> bool {
        is_same_file(self.file.metadata(), fs::symlink_metadata(&self.temporary))
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if self.is_in_place() {
            remove_sidecars(&self.temporary);
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

fn remove_sidecars(database: &Path) {
    for suffix in SIDECAR_SUFFIXES {
        let _ = fs::remove_file(with_suffix(database, suffix));
    }
}

/// Checks that a file may be written under this name.
fn check_target(
    target: &Path,
    replace: Option<Replace>,
    store: Option<&Path>,
) -> Result<(), FileError> {
    let name = target.display();
    let reject = |problem: &str| Err(FileError::Rejected(format!("{name} {problem}")));
    let found = if_exists(fs::symlink_metadata(target)).map_err(failed_to("write", target))?;
    let resolved = resolve(target).map_err(failed_to("find the directory of", target))?;
    // First of all, without opening the file: it may be open through SQLite.
    if let Some(store) = store
        && is_file_of_store(&resolved, store)
    {
        return reject("belongs to the store itself; choose another name");
    }
    if let Some(database) = database_of_sidecar(&resolved) {
        let database = database.display();
        return reject(&format!(
            "belongs to the database {database}; choose another name"
        ));
    }
    if replace != Some(Replace::Store)
        && let Some(orphan) = orphan_of(&resolved)
    {
        return Err(FileError::Rejected(format!(
            "{} is not empty and belongs to a database that is not there; move it away together with its database first",
            orphan.display()
        )));
    }
    let Some(found) = found else {
        return Ok(());
    };
    if found.is_symlink() {
        return reject(
            "is a symbolic link, which is not followed; give the path of the file itself",
        );
    }
    if !found.is_file() {
        return reject("is not a regular file; choose another name");
    }
    let Some(replace) = replace else {
        return Err(FileError::Exists(target.to_owned()));
    };
    let content = open_existing(&resolved, false).and_then(|file| Content::of(&file));
    match (content.map_err(failed_to("read", target))?, replace) {
        (Content::Empty, _)
        | (Content::Backup, Replace::Backup)
        | (Content::Store | Content::Backup, Replace::Store)
        | (Content::Other, Replace::RegularFile | Replace::Store) => Ok(()),
        (_, Replace::RegularFile | Replace::Store) => {
            reject("is a database or a part of one, so it is not replaced; choose another name")
        }
        _ => reject("exists and is not a backup, so it is not replaced; choose another name"),
    }
}

/// True for the database of a store, its sidecars and the file with its first token, under any name.
fn is_file_of_store(path: &Path, store: &Path) -> bool {
    let Ok(store) = resolve_links(store) else {
        return false;
    };
    let sidecars = SIDECAR_SUFFIXES.map(|suffix| with_suffix(&store, suffix));
    let token = store.with_file_name("plantstore.token");
    [store, token]
        .iter()
        .chain(&sidecars)
        .any(|own| path == own || is_same_file(fs::metadata(path), fs::metadata(own)))
}

/// A WAL with content next to a database that is missing or empty, or a rollback journal next to one that is missing. SQLite
/// would delete it, or apply it to whatever database gets that name. (A journal next to an empty database is what a crash
/// leaves while the database is created.)
pub fn orphan_of(database: &Path) -> Option<PathBuf> {
    let [wal, journal] = ["-wal", "-journal"].map(|suffix| with_suffix(database, suffix));
    if is_empty(database) && !is_empty(&wal) {
        return Some(wal);
    }
    (!database.exists() && !is_empty(&journal)).then_some(journal)
}

/// The database that a name such as `plants.db-wal` belongs to, if that is there.
pub fn database_of_sidecar(path: &Path) -> Option<PathBuf> {
    let name = path.file_name()?.as_bytes();
    let base = SIDECAR_SUFFIXES
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

/// A temporary name for a target of this name, with a checksum of both.
fn temporary_name(target: &OsStr, random: u32) -> OsString {
    let name = target.as_bytes();
    let mut checksum = crc32fast::Hasher::new();
    checksum.update(name);
    checksum.update(&random.to_be_bytes());
    let checksum = checksum.finalize();
    let mut temporary = OsStr::from_bytes(&name[..name.len().min(NAME_LEN_MAX)]).to_owned();
    temporary.push(format!(".{random:08x}{checksum:08x}{TEMPORARY}"));
    temporary
}

/// Whether `temporary_name` made this name for this target.
fn is_temporary_name(candidate: &OsStr, target: &OsStr) -> bool {
    let numbers = candidate.as_bytes().strip_suffix(TEMPORARY.as_bytes());
    let numbers = numbers.and_then(|name| name.last_chunk::<16>());
    let random = numbers.and_then(|numbers| str::from_utf8(&numbers[..8]).ok());
    let random = random.and_then(|random| u32::from_str_radix(random, 16).ok());
    random.is_some_and(|random| candidate == temporary_name(target, random))
}

/// Removes what killed processes have left of this target. A process that is still writing it is an error.
fn remove_leftovers(target: &Path) -> Result<(), FileError> {
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
                remove_sidecars(&path);
                let _ = fs::remove_file(&path);
            }
            Ok(()) => {} // renamed into place just now
            Err(_) => return Err(in_use(target)),
        }
    }
    Ok(())
}

/// The error for a file that another process is writing.
pub fn in_use(path: &Path) -> FileError {
    FileError::Rejected(format!(
        "{} is being written by another plantstore; wait for it or choose another name",
        path.display()
    ))
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

fn create_new(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true).mode(0o600);
    options.open(path)
}

/// Creates an empty file with mode 0600. False if the name exists.
///
/// A file that root creates is given to the owner of the store, so that the service can open it.
pub fn create_empty(path: &Path, store: &Path) -> io::Result<bool> {
    let owner = owner_of(store); // before the store itself is created
    match create_new(path) {
        Ok(file) => {
            change_owner(&file, owner);
            Ok(true)
        }
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error),
    }
}

/// The owner of the store, or of its directory if there is no store yet; none unless this process runs as root.
pub fn owner_of(store: &Path) -> Option<Metadata> {
    let owner = fs::metadata(store).or_else(|_| fs::metadata(directory_of(store)));
    owner.ok().filter(|_| geteuid().is_root())
}

/// Gives a file that root created to the owner of the store.
pub fn change_owner(file: &File, owner: Option<Metadata>) {
    if let Some(owner) = owner {
        // This fails in a container or over NFS if root is not allowed to change owners; the file then belongs to root.
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

/// The result of an operation on a file; none if there is no file.
pub fn if_exists<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

/// True if there is no file, or an empty one.
pub fn is_empty(path: &Path) -> bool {
    fs::metadata(path).map_or(0, |found| found.len()) == 0
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
    if_exists(path.canonicalize())?.map_or_else(|| resolve(path), Ok)
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

/// Adds the action and the path to an error of the file system; an argument of `map_err`.
pub fn failed_to(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FileError {
    let path = path.to_owned();
    move |source| FileError::Io {
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
        let target = OsStr::new("plants.db");
        let temporary = temporary_name(target, 4711);
        assert!(is_temporary_name(&temporary, target));
        assert!(!is_temporary_name(&temporary, OsStr::new("plants")));
        for other in [
            "plants.db.plantstore-tmp",
            "plants.db.0123456789abcdef.plantstore-tmp",
            "plants.db-partial",
        ] {
            assert!(!is_temporary_name(OsStr::new(other), target));
        }
    }

    #[test]
    fn a_long_name_has_a_temporary_name_that_fits() {
        let target = OsString::from("x".repeat(255));
        let temporary = temporary_name(&target, 4711);
        assert!(temporary.len() + "-journal".len() <= 255);
        assert!(is_temporary_name(&temporary, &target));
    }
}
