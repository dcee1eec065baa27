//! `plantstore backup`, `restore` and `check`. A backup gets its name after it has been read to the end and found sound, and is
//! read to the end again before a restore changes anything.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use clap::builder::{PathBufValueParser, TypedValueParser};
use rustix::process::nice;

use crate::cli::copy::{self, Side, Target};
use crate::cli::terminal::{Progress, print};
use crate::config::StoreSettings;
use crate::store::{
    BackupFile, Checked, Finding, Location, Mode, OpenError, Restoration, Store, accept_loss,
    is_backup,
};

#[derive(Debug, Args)]
pub(super) struct Backup {
    /// The file to make
    #[arg(value_parser = backup_file())]
    file: PathBuf,

    /// Replace a backup of that name, once the new one is whole
    #[arg(long)]
    force: bool,

    #[command(flatten)]
    store: StoreSettings,
}

impl Backup {
    pub(super) fn run(self) -> anyhow::Result<()> {
        step_back();
        let location = &self.store.store;
        let mut source = Store::open(location, Mode::Read)?;
        let backup = BackupFile::begin(&self.file, location.file(), self.force)?;
        let progress = Progress::of(0, "copying");
        if !source.copy_pages(&backup, &mut |done, all| progress.reach(done, all))? {
            fill(source, &backup, location.to_string())?;
        }
        drop(progress);
        backup.settle()?;

        let mut copy = Store::open(&backup.location(), Mode::Read)?;
        copy.throttle()?;
        let (checked, problems) = verify(&mut copy)?;
        drop(copy);
        if problems > 0 {
            bail!(
                "the copy is damaged, problems found: {problems}; no backup was made; \
                 `plantstore check` tells whether the store is"
            );
        }
        backup.finish()?;
        let (file, plants, tokens) = (self.file.display(), checked.plants, checked.tokens);
        eprintln!("{file} is complete and was checked: plants {plants}, tokens {tokens}");
        Ok(())
    }
}

/// Copies what is no file. Plants are never changed, so all that were there at the beginning are in it, and some that
/// came meanwhile; and so are the tokens that added those.
fn fill(source: Store, backup: &BackupFile, name: String) -> anyhow::Result<()> {
    let mut from = Side {
        store: source,
        name,
    };
    let mut to = Side {
        store: Store::open(&backup.location(), Mode::FillBackup)?,
        name: backup.location().to_string(),
    };
    let mut transfer = copy::copy(&mut from, &mut to, Target::Copy)?;
    transfer.copy_tokens(&mut from, &mut to)
}

#[derive(Debug, Args)]
pub(super) struct Restore {
    /// What `plantstore backup` made
    #[arg(value_parser = backup_file())]
    file: PathBuf,

    /// Replace a store that is there, which is kept under another name; in a database, add to what is there
    #[arg(long)]
    force: bool,

    #[command(flatten)]
    store: StoreSettings,
}

impl Restore {
    pub(super) fn run(self) -> anyhow::Result<()> {
        match self.store.store.file() {
            Some(store) => self.to_file(store),
            None => self.to_database(),
        }
    }

    fn to_file(&self, store: &Path) -> anyhow::Result<()> {
        let progress = Progress::of_bytes(Some(0), "copying");
        let tell = &mut |done, all| progress.reach(done, all);
        let restoration = Restoration::begin(&self.file, store, self.force, tell)?;
        drop(progress);
        let copy = Store::open(&restoration.location(), Mode::Read);
        let (plants, tokens) = self.verify(&mut copy.map_err(|error| self.damaged(error))?)?;
        let kept = restoration.finish()?;
        let store = &self.store.store;
        eprintln!("restored to {store}: plants {plants}, tokens {tokens}");
        if let Some(kept) = kept {
            eprintln!("what was there is kept as {}", kept.display());
        }
        Ok(())
    }

    fn to_database(&self) -> anyhow::Result<()> {
        let location = &self.store.store;
        let mut from = Side {
            store: Store::open(&Location::Sqlite(self.file.clone()), Mode::ReadBackup)
                .map_err(|error| self.damaged(error))?,
            name: self.file.display().to_string(),
        };
        self.verify(&mut from.store)?;
        let mut to = Side {
            store: Store::open(location, Mode::Create)?,
            name: location.to_string(),
        };
        if !self.force && (to.store.has_tokens()? || to.store.count_plants()? > 0) {
            bail!(
                "{location} is not empty; choose an empty database, or have what is missing added with --force"
            );
        }
        let target = if self.force {
            Target::Any
        } else {
            Target::Copy
        };
        let copied = copy::copy(&mut from, &mut to, target)?.compare(&mut from, &mut to)?;
        let (plants, tokens) = (copied.plants, copied.tokens);
        eprintln!("restored to {location}: plants {plants}, tokens {tokens}");
        copied.report_added_otherwise();
        Ok(())
    }

    /// Why the backup cannot be opened.
    fn damaged(&self, error: OpenError) -> anyhow::Error {
        match error {
            OpenError::Sqlite { source, .. } => anyhow::Error::new(source).context(format!(
                "{} is damaged; nothing was changed; choose another backup",
                self.file.display()
            )),
            other => other.into(),
        }
    }

    fn verify(&self, backup: &mut Store) -> anyhow::Result<(u64, u64)> {
        let (checked, problems) = verify(backup)?;
        if problems > 0 {
            bail!(
                "{} is damaged, problems found: {problems}; nothing was changed; choose another backup",
                self.file.display()
            );
        }
        Ok((checked.plants, checked.tokens))
    }
}

const BACKUP_ADVICE: &str =
    "do not rely on it: use another backup, or make a new one with `plantstore backup`";

#[derive(Debug, Args)]
pub(super) struct Check {
    /// A backup, or the file of a store; what --store says, unless given
    #[arg(value_parser = backup_file())]
    file: Option<PathBuf>,

    /// Open the store from now on although committed transactions are missing in it, as after its WAL file was deleted
    #[arg(long)]
    accept_loss: bool,

    #[command(flatten)]
    store: StoreSettings,
}

impl Check {
    pub(super) fn run(self) -> anyhow::Result<()> {
        step_back();
        let is_file = self.file.is_some();
        let location = self.file.map_or(self.store.store, Location::Sqlite);
        let is_backup = is_backup(&location);
        if self.accept_loss && !is_backup {
            accept_loss(&location)?;
        }
        let mut store = match Store::open(&location, Mode::Read) {
            Err(OpenError::Missing(path)) if is_file => bail!("there is no file {path}"),
            Err(OpenError::NotOurs(path)) if is_file => bail!(
                "{path} is not a store or a backup of plantstore, or its header is damaged; if it was a backup, \
                 {BACKUP_ADVICE}"
            ),
            Err(OpenError::Sqlite { path, source }) if is_backup => {
                let problem = format!("the backup {path} is damaged; {BACKUP_ADVICE}");
                return Err(source).context(problem);
            }
            opened => opened?,
        };
        let (checked, problems) = verify(&mut store)?;
        match problems {
            0 => {
                let (plants, tokens) = (checked.plants, checked.tokens);
                print(&format!("no damage: plants {plants}, tokens {tokens}\n"))
            }
            _ if is_backup => bail!(
                "the backup {location} is damaged, problems found: {problems}; {BACKUP_ADVICE}"
            ),
            _ => bail!("{location} is damaged, problems found: {problems}; restore a backup"),
        }
    }
}

/// After so many problems the rest is only counted.
const TOLD_MAX: usize = 100;

/// Whatever else the machine has to do goes before.
pub(super) fn step_back() {
    let _ = nice(19); // the least that can be asked for; without it a server has a little less
}

/// Parses the path of a backup, which `-` is not.
pub(super) fn backup_file() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(|path| {
        if path == Path::new("-") {
            Err(
                "a backup is checked by reading it again, so it must be a file; `plantstore export -` and \
                 `plantstore import -` use standard output and input",
            )
        } else {
            Ok(path)
        }
    })
}

/// What was read, and how many problems there are.
pub(super) fn verify(store: &mut Store) -> anyhow::Result<(Checked, usize)> {
    let mut problems = 0;
    let mut told = Ok(());
    let mut progress = Progress::endless("checking");
    let checked = store.check(&mut |finding| match finding {
        Finding::Total(count) => progress = Progress::of(count, "checking"),
        Finding::Read(count) => progress.advance(count),
        Finding::Problem(problem) => {
            problems += 1;
            if problems <= TOLD_MAX && told.is_ok() {
                told = print(&format!("{problem}\n"));
            }
        }
    })?;
    told?;
    Ok((checked, problems))
}
