//! What can be saved when the files of a running server were moved, deleted or replaced: the process still has them open,
//! and may be the last to do so.

use std::path::{Path, PathBuf};

use jiff::Timestamp;
use rusqlite::Connection;

use crate::fs::{directory_of, with_suffix};
use crate::store::error::{SaveError, chain};
use crate::store::sqlite::backup::{BackupFile, copy_pages};
use crate::store::sqlite::file_identity::{Accident, FileIdentity};
use crate::store::sqlite::open::checkpoint;

/// Saves what the connection can still read, and says in a sentence where it is.
pub(super) fn rescue(
    connection: &mut Connection,
    files: &FileIdentity,
    accident: &Accident,
) -> String {
    match accident {
        Accident::DatabaseElsewhere => match files.where_moved() {
            Some(moved) => {
                let complete = if is_checkpointed(connection) {
                    "it is complete"
                } else {
                    "a part of it is still in the WAL file"
                };
                let moved = moved.display();
                format!("it is now {moved}, and {complete}; move it back, then start again")
            }
            None => match copy(connection, files.path()) {
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
        Accident::CompanionElsewhere(_) if is_checkpointed(connection) => {
            "the database is complete without it; start again".to_owned()
        }
        Accident::CompanionElsewhere(_) => "put it back, then start again".to_owned(),
        // Nothing is written: what is left may be of use.
        Accident::ContentDestroyed(_) => "run `plantstore check` and restore a backup".to_owned(),
    }
}

/// Moves everything from the WAL to the database.
fn is_checkpointed(connection: &Connection) -> bool {
    checkpoint(connection, "TRUNCATE").unwrap_or(false)
}

/// Copies everything to a backup next to the store, or as near to it as possible.
fn copy(connection: &mut Connection, store: &Path) -> Result<PathBuf, SaveError> {
    // So that no WAL with content remains at the path: there is no database any more that it belongs to.
    is_checkpointed(connection);
    let now = Timestamp::now().strftime("%Y%m%dT%H%M%S.%3fZ").to_string();
    let path_in = |directory: &Path| {
        let name = store.file_name().unwrap_or_default();
        with_suffix(&directory.join(name), &format!("-rescued-{now}"))
    };
    let directory = directory_of(store);
    let temporary = std::env::temp_dir();
    let mut result = copy_to(connection, path_in(directory));
    for elsewhere in [directory_of(directory), &temporary] {
        if result.is_err() {
            result = copy_to(connection, path_in(elsewhere));
        }
    }
    result
}

fn copy_to(connection: &mut Connection, path: PathBuf) -> Result<PathBuf, SaveError> {
    let backup = BackupFile::begin(&path, None, false)?;
    copy_pages(connection, &backup, &mut |_, _| ())?;
    backup.finish()?;
    Ok(path)
}
