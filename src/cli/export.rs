//! `plantstore export`: all plants of one point in time as text, online.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, IsTerminal, Stdout, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;

use crate::cli::terminal::Progress;
use crate::config::StoreSettings;
use crate::formats::{self, Format};
use crate::fs::{AtomicFile, Replace};
use crate::store::{Mode, PlantPage, Store, StoreError};

const WRITE_BUFFER: usize = 64 << 10;

#[derive(Debug, Args)]
pub(super) struct Export {
    /// Where to, or - for standard output. A file appears when it is whole, in place of one that was there
    #[arg(default_value = "-")]
    file: PathBuf,

    /// How to write it; csv if the name ends so, or else ndjson
    #[arg(long)]
    format: Option<Format>,

    /// Put an apostrophe before names and tags that a spreadsheet would evaluate as a formula; such a CSV file is for reading,
    /// and an import of it would add other names
    #[arg(long)]
    spreadsheet_safe: bool,

    #[command(flatten)]
    store: StoreSettings,
}

impl Export {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let location = &self.store.store;
        let mut store = Store::open(location, Mode::Read)?;
        let format = self.format.unwrap_or_else(|| Format::of(&self.file));
        if self.spreadsheet_safe && format != Format::Csv {
            bail!("--spreadsheet-safe is for CSV; add --format csv");
        }
        let cannot_write = || format!("cannot write {}", self.file.display());
        let target = Target::open(&self.file, location.file())?;
        let mut out = BufWriter::with_capacity(WRITE_BUFFER, target);
        let is_watched = io::stderr().is_terminal()
            && !(out.get_ref().is_standard_output() && io::stdout().is_terminal());
        let written = write_all(
            &mut store,
            format,
            self.spreadsheet_safe,
            &mut out,
            is_watched,
        )?;
        let written = written.and_then(|plants| Ok((plants, out.into_inner()?)));
        match written {
            Ok((plants, target)) => {
                target.finish()?;
                if self.file != Path::new("-") {
                    eprintln!("exported: plants {plants}");
                }
                Ok(())
            }
            // The reader has ended.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            Err(error) => Err(error).with_context(cannot_write),
        }
    }
}

/// Writes all plants; gives how many, or why they could not be written.
fn write_all(
    store: &mut Store,
    format: Format,
    spreadsheet_safe: bool,
    out: &mut impl Write,
    is_watched: bool,
) -> Result<io::Result<u64>, StoreError> {
    // To count them takes a while, and only a bar needs it.
    let progress = if is_watched {
        Some(Progress::of(store.count_plants()?, "exporting"))
    } else {
        None
    };
    let mut plants = 0;
    let mut written = format.write_head(out);
    if written.is_ok() {
        store.export(&mut |page| {
            written = write_page(format, spreadsheet_safe, out, page);
            plants += page.plants.len() as u64;
            if let Some(progress) = &progress {
                progress.advance(page.plants.len());
            }
            match written {
                Ok(()) => ControlFlow::Continue(()),
                Err(_) => ControlFlow::Break(()),
            }
        })?;
    }
    Ok(written.map(|()| plants))
}

fn write_page(
    format: Format,
    spreadsheet_safe: bool,
    out: &mut impl Write,
    page: &PlantPage,
) -> io::Result<()> {
    let mut plants = page.plants.iter();
    plants.try_for_each(|record| {
        if spreadsheet_safe {
            let plant = formats::spreadsheet_safe(&record.plant);
            format.write_plant(out, record.id, &plant)
        } else {
            format.write_plant(out, record.id, &record.plant)
        }
    })
}

/// Something to write to.
pub(super) enum Target {
    StandardOutput(Stdout),
    /// A device or a named pipe.
    Device(File),
    File(AtomicFile),
}

impl Target {
    /// `store` is the database that is exported, if that is a file: it is never written to.
    pub(super) fn open(path: &Path, store: Option<&Path>) -> anyhow::Result<Self> {
        if path == Path::new("-") {
            return Ok(Self::StandardOutput(io::stdout()));
        }
        match fs::metadata(path) {
            Ok(found) if !found.is_file() && !found.is_dir() => {
                let device = OpenOptions::new().write(true).open(path);
                let device = device.with_context(|| format!("cannot write {}", path.display()))?;
                Ok(Self::Device(device))
            }
            _ => Ok(Self::File(AtomicFile::create(
                path,
                Replace::RegularFile,
                store,
            )?)),
        }
    }

    pub(super) fn is_standard_output(&self) -> bool {
        matches!(self, Self::StandardOutput(_))
    }

    /// To be called when all is written.
    pub(super) fn finish(mut self) -> anyhow::Result<()> {
        self.flush()?;
        match self {
            Self::File(file) => Ok(file.persist()?),
            Self::StandardOutput(_) | Self::Device(_) => Ok(()),
        }
    }
}

impl Write for Target {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::StandardOutput(out) => out.write(bytes),
            Self::Device(file) => file.write(bytes),
            Self::File(file) => file.file().write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::StandardOutput(out) => out.flush(),
            Self::Device(file) => file.flush(),
            Self::File(file) => file.file().flush(),
        }
    }
}
