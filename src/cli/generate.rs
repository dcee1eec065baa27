//! `plantstore openapi`, `completions` and `man`: text generated from the contract and from the command line.

use std::fs::{self, Permissions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, Command};
use clap_complete::Shell;
use clap_mangen::roff::{Roff, bold, roman};

use crate::cli::terminal::print;
use crate::fs::{AtomicFile, Replace};
use crate::http::docs::OPENAPI_YAML;
use crate::version::COMMIT_DATE;

pub(super) fn openapi() -> anyhow::Result<()> {
    print(OPENAPI_YAML)
}

#[derive(Debug, Args)]
pub(super) struct Completions {
    /// The shell that is to read it
    shell: Shell,
}

impl Completions {
    /// Of this command line.
    pub(super) fn run(&self, mut command: Command) -> anyhow::Result<()> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut command, "plantstore", &mut script);
        print(&String::from_utf8(script)?)
    }
}

#[derive(Debug, Args)]
pub(super) struct Man {
    /// Write the pages of all commands, a file each, into this directory instead
    #[arg(long, value_name = "DIR")]
    to: Option<PathBuf>,
}

impl Man {
    /// Of this command line.
    pub(super) fn run(&self, command: Command) -> anyhow::Result<()> {
        let mut command = command.disable_help_subcommand(true);
        command.build();
        match &self.to {
            Some(directory) => {
                fs::create_dir_all(directory)
                    .with_context(|| format!("cannot make {}", directory.display()))?;
                write_pages(&command, directory)
            }
            None => print(&page(&command)?),
        }
    }
}

/// The pages of a command and of those below it.
fn write_pages(command: &Command, directory: &Path) -> anyhow::Result<()> {
    let path = directory.join(format!("{}.1", name(command)));
    let file = AtomicFile::create(&path, Replace::RegularFile, None)?;
    let written = file.file().write_all(page(command)?.as_bytes());
    written.with_context(|| format!("cannot write {}", path.display()))?;
    // Manual pages are for everybody.
    file.file().set_permissions(Permissions::from_mode(0o644))?;
    file.persist()?;
    let below = command
        .get_subcommands()
        .filter(|below| !below.is_hide_set());
    below
        .into_iter()
        .try_for_each(|below| write_pages(below, directory))
}

fn page(command: &Command) -> anyhow::Result<String> {
    // Without a date the rest of the line would move up: an empty one is not written.
    let date = if COMMIT_DATE.is_empty() {
        " "
    } else {
        COMMIT_DATE
    };
    let page = clap_mangen::Man::new(command.clone())
        .title(name(command).to_uppercase())
        .date(date)
        .source(format!("plantstore {}", env!("CARGO_PKG_VERSION")))
        .manual("Plant Store");
    let mut text = Vec::new();
    page.render_title(&mut text)?;
    page.render_name_section(&mut text)?;
    page.render_synopsis_section(&mut text)?;
    page.render_description_section(&mut text)?;
    page.render_options_section(&mut text)?;
    if command.has_subcommands() {
        page.render_subcommands_section(&mut text)?;
    }
    exit_status().to_writer(&mut text)?;
    Ok(String::from_utf8(text)?)
}

/// `plantstore-token-create`.
fn name(command: &Command) -> &str {
    command
        .get_display_name()
        .unwrap_or_else(|| command.get_name())
}

fn exit_status() -> Roff {
    let mut section = Roff::new();
    section.control("SH", ["EXIT STATUS"]);
    for (code, meaning) in [("0", "Done."), ("1", "Failed."), ("2", "Wrong usage.")] {
        section.control("TP", []);
        section.text([bold(code)]);
        section.text([roman(meaning)]);
    }
    section
}
