//! `plantstore backup`, `restore` and `check`. A backup gets its name after it has been read to the end and found sound, and is
//! read to the end again before a restore changes anything.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use rustix::process::nice;

use crate::cli::copy::{NamedStore, Transfer};
use crate::cli::file_path;
use crate::cli::terminal::{
    PROBLEMS_SHOWN_MAX, Unit, count, counts, print, print_message, progress_bar,
};
use crate::config::StoreSettings;
use crate::fs::{AtomicFile, Replace};
use crate::store::{
    Checked, Finding, Location, Mode, OpenError, Restoration, Store, accept_loss, is_backup,
};

const NOT_A_FILE: &str = "a backup is verified by reading it again, so it must be a file; `plantstore export -` and `plantstore import -` use \
     standard output and input";

const BACKUP_ADVICE: &str =
    "do not rely on it: use another backup, or make a new one with `plantstore backup`";

/// Write a verified backup of the store to a file
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  plantstore backup /backups/plants.backup
  plantstore backup --force /backups/plants.backup
  plantstore backup plants.backup --store postgres://plants@db.example/plants")]
pub(super) struct Backup {
    /// File to create
    #[arg(value_parser = file_path(NOT_A_FILE))]
    file: PathBuf,

    /// Replace an existing backup of that name once the new one is complete
    #[arg(long)]
    force: bool,

    #[command(flatten)]
    store: StoreSettings,
}

impl Backup {
    pub(super) fn run(self) -> anyhow::Result<()> {
        lower_priority();
        let location = &self.store.location;
        let mut source = NamedStore::open(location, Mode::Read)?;
        let replace = self.force.then_some(Replace::Backup);
        let backup = AtomicFile::create(&self.file, replace, location.file())?;
        let copy = Location::Sqlite(backup.path().to_owned());
        let progress = progress_bar("copying", Some(0), Unit::Items);
        let is_copied = source.store.copy_pages(&backup, &mut |done, all| {
            progress.set_length(all);
            progress.set_position(done);
        })?;
        drop(progress);
        if !is_copied {
            // Plants are never changed, so the backup has all that existed when it began, some that were added since, and the
            // tokens that added those.
            let target = NamedStore::open(&copy, Mode::FillBackup)?;
            Transfer::run(source, target, false)?.copy_tokens()?;
        }
        backup.sync()?;

        let mut copy = Store::open(&copy, Mode::Read)?;
        copy.throttle()?;
        let (checked, problems) = verify(&mut copy)?;
        drop(copy);
        if problems > 0 {
            bail!(
                "the copy is damaged: {} found; no backup was made; run `plantstore check` to see whether the store is \
                 damaged",
                count(problems, "problem")
            );
        }
        backup.persist()?;
        let counts = counts(checked.plants, checked.tokens);
        print_message(format_args!(
            "{} is complete and verified: {counts}",
            self.file.display()
        ));
        Ok(())
    }
}

/// Restore a store from a backup; stop the server first
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  plantstore restore /backups/plants.backup
  plantstore restore --force plants.backup --store sqlite:/srv/plants.db")]
pub(super) struct Restore {
    /// Backup made by `plantstore backup`
    #[arg(value_parser = file_path(NOT_A_FILE))]
    file: PathBuf,

    /// Replace an existing SQLite store, which is kept under another name; in PostgreSQL, add to the existing plants
    #[arg(long)]
    force: bool,

    #[command(flatten)]
    store: StoreSettings,
}

impl Restore {
    pub(super) fn run(self) -> anyhow::Result<()> {
        match self.store.location.file() {
            Some(store) => self.to_file(store),
            None => self.to_database(),
        }
    }

    fn to_file(&self, store: &Path) -> anyhow::Result<()> {
        let progress = progress_bar("copying", Some(0), Unit::Bytes);
        let report = &mut |done, all| {
            progress.set_length(all);
            progress.set_position(done);
        };
        let replace = self.force.then_some(Replace::Store);
        let restoration = Restoration::begin(&self.file, store, replace, report)?;
        drop(progress);
        let (copy, checked) = self.open_and_verify(&restoration.location(), Mode::Read)?;
        drop(copy);
        let kept = restoration.finish()?;
        let counts = counts(checked.plants, checked.tokens);
        print_message(format_args!(
            "restored to {}: {counts}",
            self.store.location
        ));
        if let Some(kept) = kept {
            print_message(format_args!(
                "the previous store is kept as {}",
                kept.display()
            ));
        }
        Ok(())
    }

    fn to_database(&self) -> anyhow::Result<()> {
        let location = &self.store.location;
        let backup = Location::Sqlite(self.file.clone());
        let (from, _) = self.open_and_verify(&backup, Mode::ReadBackup)?;
        let mut to = NamedStore::open(location, Mode::Create)?;
        if !self.force && (to.store.has_tokens()? || to.store.count_plants()? > 0) {
            bail!(
                "{location} is not empty; choose an empty database, or add what is missing with --force"
            );
        }
        Transfer::run(from, to, self.force)?.compare(&format!("restored to {location}"))
    }

    /// Opens the backup or a copy of it, and reads it to its end.
    fn open_and_verify(
        &self,
        location: &Location,
        mode: Mode,
    ) -> anyhow::Result<(NamedStore, Checked)> {
        let file = self.file.display();
        let advice = "nothing was changed; choose another backup";
        let mut backup = match NamedStore::open(location, mode) {
            Err(OpenError::Sqlite { source, .. }) => {
                return Err(source).context(format!("{file} is damaged; {advice}"));
            }
            opened => opened?,
        };
        let (checked, problems) = verify(&mut backup.store)?;
        if problems > 0 {
            let problems = count(problems, "problem");
            bail!("{file} is damaged: {problems} found; {advice}");
        }
        Ok((backup, checked))
    }
}

/// Read a whole store or backup and report damage (SQLite: file structure and row checksums; PostgreSQL: text that cannot be
/// decoded, plants without a token)
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  plantstore check
  plantstore check /backups/plants.backup")]
pub(super) struct Check {
    /// Backup or database file to check [default: the store]
    #[arg(value_parser = file_path(NOT_A_FILE))]
    file: Option<PathBuf>,

    /// Accept that committed transactions are missing, for example after the WAL file was deleted, and let the store be
    /// opened again
    #[arg(long)]
    accept_loss: bool,

    #[command(flatten)]
    store: StoreSettings,
}

impl Check {
    pub(super) fn run(self) -> anyhow::Result<()> {
        lower_priority();
        let is_file = self.file.is_some();
        let location = self.file.map_or(self.store.location, Location::Sqlite);
        let is_backup = is_backup(&location);
        if self.accept_loss && !is_backup {
            accept_loss(&location)?;
        }
        let mut store = match Store::open(&location, Mode::Read) {
            Err(OpenError::Missing(path)) if path.exists() => {
                bail!(
                    "{} is empty; restore a backup, or use another one",
                    path.display()
                )
            }
            Err(OpenError::Missing(path)) if is_file => {
                bail!("there is no file {}", path.display())
            }
            Err(OpenError::NotOurs(path)) if is_file => bail!(
                "{} is not a store or a backup of plantstore, or its header is damaged; if it was a backup, {BACKUP_ADVICE}",
                path.display()
            ),
            Err(OpenError::Sqlite { path, source }) if is_backup => {
                let problem = format!("the backup {} is damaged; {BACKUP_ADVICE}", path.display());
                return Err(source).context(problem);
            }
            opened => opened?,
        };
        let (checked, problems) = verify(&mut store)?;
        if problems == 0 {
            let counts = counts(checked.plants, checked.tokens);
            return print(&format!("no damage found: {counts}\n"));
        }
        let (kind, advice) = if is_backup {
            ("the backup ", BACKUP_ADVICE)
        } else {
            ("", "restore a backup")
        };
        let problems = count(problems, "problem");
        bail!("{kind}{location} is damaged: {problems} found; {advice}")
    }
}

/// Everything else on the machine has precedence.
fn lower_priority() {
    let _ = nice(19); // if it fails, a server has a little less of the CPU
}

/// Reads a store to its end and prints what is wrong with it. Returns the number of problems, too.
fn verify(store: &mut Store) -> anyhow::Result<(Checked, u64)> {
    let mut problems = 0;
    let mut progress = progress_bar("checking", None, Unit::Items);
    progress.enable_steady_tick(Duration::from_millis(100));
    let checked = store.check(&mut |finding| match finding {
        Finding::Total(count) => progress = progress_bar("checking", Some(count), Unit::Items),
        Finding::Read(count) => progress.inc(count as u64),
        Finding::Problem(problem) => {
            problems += 1;
            if problems <= PROBLEMS_SHOWN_MAX {
                // The error of the command has their number, also if they cannot be printed.
                let _ = print(&format!("{problem}\n"));
            }
        }
    })?;
    Ok((checked, problems))
}
