//! A backup becomes a store. A crash at any moment leaves the store that was there or the one that was restored, and
//! what was there is kept under another name.

use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use jiff::Timestamp;

use crate::fs::{
    AtomicFile, Content, JournalMode, Replace, WriteError, failed_to, give_to_owner_of,
    is_same_file, sync_directory_of, with_suffix,
};
use crate::store::error::{OpenError, SaveError};
use crate::store::sqlite::session::{Lock, State, set_clean};
use crate::store::sqlite::{backup, open};
use crate::store::types::Location;

/// Bytes between two words about how far it is.
const CHUNK: usize = 1 << 20;

/// A store that is being made out of a backup.
pub struct Restoration {
    file: AtomicFile,
    store: PathBuf,
    /// Held so that the store is not served meanwhile.
    lock: Lock,
}

impl Restoration {
    /// Copies a backup next to the store, and reports how many bytes of how many are copied.
    pub fn begin(
        backup: &Path,
        store: &Path,
        replace: bool,
        tell: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, SaveError> {
        let name = |path: &Path| path.display().to_string();
        // Looked at before it is opened: opening a named pipe would wait for somebody to write to it.
        match fs::metadata(backup) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(OpenError::NoFile(name(backup)).into());
            }
            Ok(found) if !found.is_file() => {
                return Err(OpenError::NotABackup(name(backup)).into());
            }
            _ => {}
        }
        let from = File::open(backup).map_err(failed_to("read", backup))?;
        let real = open::real(store)?;
        if is_same_file(from.metadata(), fs::metadata(&real)) {
            return Err(WriteError::OwnFile(name(backup)).into());
        }
        if real.is_dir() {
            return Err(WriteError::NotAFile(name(store)).into());
        }
        let lock = Lock::take(&real)?;
        if Content::of(&from).map_err(failed_to("read", backup))? != Content::Backup {
            return Err(OpenError::NotABackup(name(backup)).into());
        }
        let replace = if replace {
            Replace::Store
        } else {
            Replace::Nothing
        };
        let file = AtomicFile::create(&real, replace, None)?;
        copy(from, backup, &file, tell)?;
        file.sync()?;
        Ok(Self {
            file,
            store: real,
            lock,
        })
    }

    /// The temporary file, to be checked: still a backup.
    pub fn location(&self) -> Location {
        Location::Sqlite(self.file.path().to_owned())
    }

    /// Puts it in place. Returns the name under which the store that was there is kept.
    pub fn finish(self) -> Result<Option<PathBuf>, SaveError> {
        let connection = backup::scratch(self.file.path())?;
        if State::read(&connection)?.is_some() {
            set_clean(&connection, true)?;
        }
        drop(connection);
        self.file.set_journal_mode(JournalMode::Wal)?;
        give_to_owner_of(&self.store, self.file.file());
        let now = Timestamp::now().strftime("%Y%m%dT%H%M%S.%3fZ");
        let kept = with_suffix(&self.store, &format!("-before-{now}"));
        let moved = set_companions_aside(&self.store, &kept)?;
        // A store with an older state than the one that was served here is what was asked for.
        self.lock.forget_batch();
        if self.store.exists() {
            self.file.persist_and_keep(&kept)?;
            return Ok(Some(kept));
        }
        self.file.persist()?;
        Ok(moved.then_some(kept))
    }
}

fn copy(
    mut from: File,
    backup: &Path,
    to: &AtomicFile,
    tell: &mut dyn FnMut(u64, u64),
) -> Result<(), SaveError> {
    let size = from.metadata().map_err(failed_to("read", backup))?.len();
    let mut chunk = vec![0; CHUNK];
    let mut copied = 0;
    loop {
        let len = from.read(&mut chunk).map_err(failed_to("read", backup))?;
        if len == 0 {
            return Ok(());
        }
        let written = to.file().write_all(&chunk[..len]);
        written.map_err(failed_to("write to", to.path()))?;
        copied += len as u64;
        tell(copied, size);
    }
}

/// Moves the WAL and journal of the old store aside, since SQLite would apply them to the new one. True if there were any.
///
/// A sound store is first checkpointed completely, so that it is complete without its WAL. A damaged one cannot be: it is
/// kept together with its WAL.
fn set_companions_aside(store: &Path, kept: &Path) -> Result<bool, SaveError> {
    if store.exists() {
        let checkpointed = open::lay_to_rest(store);
        if let Err(held @ OpenError::Held(_)) = checkpointed {
            return Err(held.into());
        }
    }
    let mut found = false;
    for suffix in ["-wal", "-journal"] {
        let (there, aside) = (with_suffix(store, suffix), with_suffix(kept, suffix));
        match fs::rename(&there, &aside) {
            Ok(()) => found = true,
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(failed_to("rename", &there)(error).into()),
        }
    }
    let shared_memory = with_suffix(store, "-shm");
    match fs::remove_file(&shared_memory) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(failed_to("remove", &shared_memory)(error).into());
        }
        _ => {}
    }
    sync_directory_of(store).map_err(failed_to("sync the directory of", store))?;
    Ok(found)
}
