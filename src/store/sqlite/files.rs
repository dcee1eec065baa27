//! The files of a store: for their owner alone, and of one owner, so that a command of root's never makes one that the
//! service may not open.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, fchown};
use std::path::Path;

use rustix::fs::OFlags;
use rustix::process::geteuid;

/// Makes an empty file. False if there is one already.
///
/// What root makes goes to whoever owns the store. Only a file that is new is given away.
pub(super) fn make(path: &Path, store: &Path) -> io::Result<bool> {
    let owner = owner_of(store); // before the store itself is made
    let mut options = OpenOptions::new();
    match options.write(true).create_new(true).mode(0o600).open(path) {
        Ok(file) => {
            give(&file, owner);
            Ok(true)
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error),
    }
}

/// Gives a file that root has made to whoever owns the store, or the directory where it will be. SQLite does the same
/// with its log. A root that may not give away, in a container or over NFS, keeps it.
pub(super) fn give_to_owner_of(store: &Path, file: &File) {
    give(file, owner_of(store));
}

fn owner_of(store: &Path) -> Option<Metadata> {
    let owner = fs::metadata(store).or_else(|_| fs::metadata(directory_of(store)));
    owner.ok().filter(|_| geteuid().is_root())
}

fn give(file: &File, owner: Option<Metadata>) {
    if let Some(owner) = owner {
        let _ = fchown(file, Some(owner.uid()), Some(owner.gid()));
    }
}

/// Opens a file that we write to. Whoever may put a link there could otherwise have root write to any file.
pub(super) fn open(path: &Path) -> io::Result<File> {
    let no_link = OFlags::NOFOLLOW.bits().cast_signed();
    let mut options = OpenOptions::new();
    options
        .read(true)
        .write(true)
        .custom_flags(no_link)
        .open(path)
}

/// The directory that a file is in.
pub(super) fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}
