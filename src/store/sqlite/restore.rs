//! A backup becomes a store. A crash at any moment leaves the store that was there or the one that was restored, and
//! what was there is kept under another name.

use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use jiff::Timestamp;

use crate::store::contract::Location;
use crate::store::error::{OpenError, SaveError};
use crate::store::sqlite::files;
use crate::store::sqlite::open::{self, Lock, beside};
use crate::store::sqlite::partial::{Partial, failed_to, is_backup, is_same, unfinished};

/// Bytes between two words about how far it is.
const CHUNK: usize = 1 << 20;

/// A store in the making, out of a backup.
pub struct Restoration {
    partial: Partial,
    store: PathBuf,
    replace: bool,
    /// Nobody serves the store meanwhile.
    _lock: Lock,
}

impl Restoration {
    /// Copies a backup beside the place of the store, and tells how many bytes of how many it has.
    pub fn begin(
        backup: &Path,
        store: &Path,
        replace: bool,
        tell: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, SaveError> {
        let name = |path: &Path| path.display().to_string();
        let from = match File::open(backup) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(OpenError::NoFile(name(backup)).into());
            }
            opened => opened.map_err(failed_to("read", backup))?,
        };
        let real = open::real(store)?;
        for own in [real.clone(), unfinished(&real)] {
            if is_same(from.metadata(), fs::metadata(own)) {
                return Err(SaveError::OwnFile(name(backup)));
            }
        }
        if real.is_dir() {
            return Err(SaveError::NotAFile(name(store)));
        }
        let lock = open::take_lock(&real)?;
        if real.exists() && !replace {
            return Err(SaveError::Exists(name(store)));
        }
        if !from.metadata().is_ok_and(|found| found.is_file())
            || !is_backup(&from).map_err(failed_to("read", backup))?
        {
            return Err(OpenError::NotABackup(name(backup)).into());
        }
        let partial = Partial::claim(real.clone())?;
        copy(from, backup, &partial, tell)?;
        partial.sync()?;
        Ok(Self {
            partial,
            store: real,
            replace,
            _lock: lock,
        })
    }

    /// Where it is until it is whole, to be read: still at rest.
    pub fn location(&self) -> Location {
        Location::Sqlite(self.partial.path().to_owned())
    }

    /// Puts it in place. Gives the name under which the store is kept that was there.
    pub fn finish(self) -> Result<Option<PathBuf>, SaveError> {
        if self.store.exists() && !self.replace {
            return Err(SaveError::Exists(self.store.display().to_string()));
        }
        self.partial.mark_in_use()?;
        files::give_to_owner_of(&self.store, self.partial.file());
        self.partial.sync()?;
        let kept = set_aside(&self.store)?;
        self.partial.put_in_place()?;
        Ok(kept)
    }
}

fn copy(
    mut from: File,
    backup: &Path,
    partial: &Partial,
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
        let written = partial.file().write_all(&chunk[..len]);
        written.map_err(failed_to("write to", partial.path()))?;
        copied += len as u64;
        tell(copied, size);
    }
}

/// Keeps what is there under another name as well, and sees to it that there is no log: beside another database, SQLite
/// would take it for that one's.
///
/// The order matters. A sound store is first laid to rest, so that it is whole without its log, and then stays under its
/// name until another one takes it. A damaged one, which cannot be laid to rest, is without its log for a moment.
fn set_aside(store: &Path) -> Result<Option<PathBuf>, SaveError> {
    if store.exists() {
        let rested = open::lay_to_rest(store);
        if let Err(held @ OpenError::Held(_)) = rested {
            return Err(held.into());
        }
    }
    let now = Timestamp::now().strftime("%Y%m%dT%H%M%S.%3fZ");
    let kept = beside(store, &format!("-before-{now}"));
    if kept.exists() {
        return Err(SaveError::Exists(kept.display().to_string()));
    }
    let mut found = false;
    for suffix in ["", "-wal", "-journal"] {
        let (there, aside) = (beside(store, suffix), beside(&kept, suffix));
        if !there.exists() {
            continue;
        }
        // Not every file system has links. Without them nothing is under its name for a moment.
        let linked = suffix.is_empty() && fs::hard_link(&there, &aside).is_ok();
        if !linked {
            fs::rename(&there, &aside).map_err(failed_to("keep", &aside))?;
        }
        found = true;
    }
    match fs::remove_file(beside(store, "-shm")) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(failed_to("remove", &beside(store, "-shm"))(error));
        }
        _ => {}
    }
    open::sync_directory_of(store).map_err(failed_to("sync the directory of", store))?;
    Ok(found.then_some(kept))
}
