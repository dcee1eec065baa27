//! `plantstore completions` and `man`: generated from the descriptions of the command line.

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
use crate::version::COMMIT_DATE;

const FILES: [(&str, &str); 4] = [
    (
        "plantstore.db",
        "The SQLite database, unless --store names another one.",
    ),
    (
        "plantstore.db-wal, plantstore.db-shm, plantstore.db-lock",
        "Its WAL, shared memory and lock file. Never delete or move them without the database.",
    ),
    (
        "plantstore.token",
        "The first token, which the server creates next to the database of an empty store.",
    ),
    (
        "/etc/plantstore/plantstore.toml",
        "The configuration file of the packaged service.",
    ),
];

const EXIT_STATUS: [(&str, &str); 3] = [
    ("0", "Success."),
    ("1", "Failure; the reason is on standard error."),
    ("2", "Usage error."),
];

/// Print a shell completion script
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  plantstore completions bash > /etc/bash_completion.d/plantstore
  plantstore completions zsh > _plantstore")]
pub(super) struct Completions {
    /// Shell to generate the script for
    shell: Shell,
}

impl Completions {
    pub(super) fn run(&self, mut command: Command) -> anyhow::Result<()> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut command, "plantstore", &mut script);
        print(&String::from_utf8(script)?)
    }
}

/// Print the manual page, or write the pages of all commands
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  plantstore man | man -l -
  plantstore man --to /usr/local/share/man/man1")]
pub(super) struct Man {
    /// Write the pages of all commands, one file each, to this directory
    #[arg(long, value_name = "DIR")]
    to: Option<PathBuf>,
}

impl Man {
    pub(super) fn run(&self, command: Command) -> anyhow::Result<()> {
        let mut command = command.disable_help_subcommand(true);
        command.build();
        let Some(directory) = &self.to else {
            return print(&page(&command, None)?);
        };
        fs::create_dir_all(directory)
            .with_context(|| format!("cannot create {}", directory.display()))?;
        write_pages(&command, None, directory)
    }
}

/// Writes the pages of a command and of its subcommands.
fn write_pages(
    command: &Command,
    parent: Option<&Command>,
    directory: &Path,
) -> anyhow::Result<()> {
    let path = directory.join(format!("{}.1", name(command)));
    let file = AtomicFile::create(&path, Some(Replace::RegularFile), None)?;
    let written = file.file().write_all(page(command, parent)?.as_bytes());
    written.with_context(|| format!("cannot write {}", path.display()))?;
    file.file().set_permissions(Permissions::from_mode(0o644))?;
    file.persist()?;
    let mut below = command
        .get_subcommands()
        .filter(|below| !below.is_hide_set());
    below.try_for_each(|below| write_pages(below, Some(command), directory))
}

fn page(command: &Command, parent: Option<&Command>) -> anyhow::Result<String> {
    // An empty date would be left out, and the rest of the line would move up.
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
    let has_store = command.get_arguments().any(|arg| arg.get_id() == "store");
    let variables = command.get_arguments().filter_map(|arg| {
        let flag = format!("Used if --{} is not given.", arg.get_long()?);
        Some((arg.get_env()?.to_str()?, flag))
    });
    let mut rest = Roff::new();
    examples(&mut rest, command);
    if has_store || command.get_name() == "plantstore" {
        list(&mut rest, "FILES", FILES);
    }
    if has_store {
        list(&mut rest, "ENVIRONMENT", variables);
    }
    list(&mut rest, "EXIT STATUS", EXIT_STATUS);
    rest.control("SH", ["SEE ALSO"]);
    rest.text([roman(see_also(command, parent))]);
    rest.to_writer(&mut text)?;
    Ok(String::from_utf8(text)?)
}

/// The examples from the help, line by line.
fn examples(page: &mut Roff, command: &Command) {
    let help = command.get_after_help().map(ToString::to_string);
    let help = help.unwrap_or_default();
    let Some((_, examples)) = help.split_once("Examples:\n") else {
        return;
    };
    page.control("SH", ["EXAMPLES"]);
    page.control("nf", []);
    for example in examples.lines() {
        page.text([roman(example.trim_start())]);
    }
    page.control("fi", []);
}

fn list<'a, T: Into<String>>(
    page: &mut Roff,
    section: &str,
    items: impl IntoIterator<Item = (&'a str, T)>,
) {
    page.control("SH", [section]);
    for (name, meaning) in items {
        page.control("TP", []);
        page.text([bold(name)]);
        page.text([roman(meaning)]);
    }
}

/// The page of the command above, and those beside this one.
fn see_also(command: &Command, parent: Option<&Command>) -> String {
    let Some(parent) = parent else {
        return "curl(1)".to_owned();
    };
    let pages = std::iter::once(parent).chain(parent.get_subcommands());
    let others = pages.map(name).filter(|other| *other != name(command));
    others
        .map(|page| format!("{page}(1)"))
        .collect::<Vec<_>>()
        .join(", ")
}

/// For example `plantstore-token-create`.
fn name(command: &Command) -> &str {
    command
        .get_display_name()
        .unwrap_or_else(|| command.get_name())
}
