//! `plantstore export`: all plants of one point in time as text, online.

use std::fs::{self, File};
use std::io::{self, BufWriter, IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use indicatif::ProgressBar;

use crate::cli::terminal::{Unit, count, print_message, progress_bar, writable_stdout};
use crate::config::StoreSettings;
use crate::formats::{Format, spreadsheet_safe};
use crate::fs::{AtomicFile, Replace};
use crate::store::{Mode, Store};

const WRITE_BUFFER: usize = 64 << 10;

/// Write all plants to a file or standard output
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  plantstore export plants.ndjson
  plantstore export --format csv | gzip > plants.csv.gz
  plantstore export --spreadsheet-safe plants.csv")]
pub(super) struct Export {
    /// File to write, replaced once the export is complete, or - for standard output
    #[arg(default_value = "-")]
    file: PathBuf,

    /// Format [default: csv if FILE ends with .csv or .tsv, otherwise ndjson]
    #[arg(long)]
    format: Option<Format>,

    /// Put an apostrophe before text that a spreadsheet would evaluate as a formula; such a CSV file is for reading, an
    /// import would add the changed names
    #[arg(long)]
    spreadsheet_safe: bool,

    #[command(flatten)]
    store: StoreSettings,
}

impl Export {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let location = &self.store.location;
        let mut store = Store::open(location, Mode::Read)?;
        let format = self.format.unwrap_or_else(|| Format::of(&self.file));
        if self.spreadsheet_safe && format != Format::Csv {
            bail!("--spreadsheet-safe is for CSV; add --format csv");
        }
        let cannot_write = || format!("cannot write {}", self.file.display());
        let is_stdout = self.file == Path::new("-");
        let is_special =
            |path: &Path| fs::metadata(path).is_ok_and(|found| !found.is_file() && !found.is_dir());
        let mut atomic = None;
        let out: Box<dyn Write + '_> = if is_stdout {
            let stdout = writable_stdout().context("cannot write to standard output")?;
            Box::new(stdout)
        } else if is_special(&self.file) {
            // A device or a named pipe cannot be replaced by a complete file.
            let opened = File::options().write(true).open(&self.file);
            Box::new(opened.with_context(cannot_write)?)
        } else {
            let file = AtomicFile::create(&self.file, Some(Replace::RegularFile), location.file())?;
            Box::new(atomic.insert(file).file())
        };
        let mut out = BufWriter::with_capacity(WRITE_BUFFER, out);
        // Counting takes a while, and only a bar needs it.
        let progress = if io::stderr().is_terminal() && !(is_stdout && io::stdout().is_terminal()) {
            progress_bar("exporting", Some(store.count_plants()?), Unit::Items)
        } else {
            ProgressBar::hidden()
        };
        let mut plants = 0;
        let mut written = format.write_head(&mut out);
        store.export(&mut |page| {
            for record in page {
                let plant = if self.spreadsheet_safe {
                    &spreadsheet_safe(&record.plant)
                } else {
                    &record.plant
                };
                if written.is_ok() {
                    written = format.write_plant(&mut out, record.id, plant);
                }
            }
            plants += page.len() as u64;
            progress.set_position(plants);
            match written {
                Ok(()) => ControlFlow::Continue(()),
                Err(_) => ControlFlow::Break(()),
            }
        })?;
        drop(progress);
        // If the reader has ended, as `head` does, the command succeeds.
        written
            .and_then(|()| out.flush())
            .with_context(cannot_write)?;
        drop(out);
        if let Some(file) = atomic {
            file.persist()?;
        }
        if !is_stdout {
            print_message(format_args!("exported {}", count(plants, "plant")));
        }
        Ok(())
    }
}
