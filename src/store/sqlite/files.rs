//! The files of a store: for their owner alone, and of one owner, so that a command of root's never makes one that the
//! service may not open.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, fchown};
use std::path::Path;

use rustix::fs::OFlags;
use rustix::process::geteuid;

/// Makes an empty file. False if there is one already.
///
/// What root makes goes to whoever owns `of`: SQLite does the same with its log. If that is not there yet, as before a
/// restore, it goes to the owner of the directory. Only a file that is new is given away.
pub(super) fn make(path: &Path, of: &Path) -> io::Result<bool> {
    let mut options = OpenOptions::new();
    match options.write(true).create_new(true).mode(0o600).open(path) {
        Ok(file) => {
            if geteuid().is_root() {
                let owner = fs::metadata(of).or_else(|_| fs::metadata(directory_of(path)))?;
                // A root that may not give away, in a container or over NFS, keeps it as it always did.
                let _ = fchown(&file, Some(owner.uid()), Some(owner.gid()));
            }
            Ok(true)
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error),
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
