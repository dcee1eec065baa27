//! `plantstore openapi`; `completions` and `man`, which are generated from the descriptions of the command line.

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
use crate::http::docs::{OPENAPI_YAML, openapi_3_0};
use crate::version::COMMIT_DATE;

/// The sections FILES and EXIT STATUS, which all pages have.
const COMMON_SECTIONS: &str = include_str!("man.roff");

/// Print the OpenAPI description (YAML)
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  plantstore openapi > openapi.yaml
  plantstore openapi --version 3.0 > openapi-3.0.yaml")]
pub(super) struct Openapi {
    /// Version of OpenAPI; 3.0 is for tools that do not support 3.1
    #[arg(long, value_name = "VERSION", default_value = "3.1", value_parser = ["3.0", "3.1"])]
    version: String,
}

impl Openapi {
    pub(super) fn run(&self) -> anyhow::Result<()> {
        match self.version.as_str() {
            "3.0" => print(&openapi_3_0()),
            _ => print(OPENAPI_YAML),
        }
    }
}

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
    let help = command.get_after_help().map(ToString::to_string);
    let help = help.unwrap_or_default();
    // The help has the examples at its end.
    let (note, examples) = help.split_once("Examples:\n").unwrap_or((&help, ""));
    // The synopsis of clap_mangen lists all options, without their values.
    let usage = command.clone().render_usage().to_string();
    let mut synopsis = Roff::new();
    synopsis.control("SH", ["SYNOPSIS"]);
    synopsis.text([roman(usage.trim_start_matches("Usage: "))]);
    synopsis.to_writer(&mut text)?;
    page.render_description_section(&mut text)?;
    if !note.is_empty() {
        let mut paragraph = Roff::new();
        paragraph.control("PP", []);
        paragraph.text([roman(note.replace('\n', " ").trim_end())]);
        paragraph.to_writer(&mut text)?;
    }
    page.render_options_section(&mut text)?;
    if command.has_subcommands() {
        page.render_subcommands_section(&mut text)?;
    }
    let mut more = Roff::new();
    if !examples.is_empty() {
        more.control("SH", ["EXAMPLES"]);
        more.control("nf", []);
        for example in examples.lines() {
            more.text([roman(example.trim_start())]);
        }
        more.control("fi", []);
    }
    let mut variables = command
        .get_arguments()
        .filter_map(|arg| Some((arg.get_env()?.to_str()?, arg.get_long()?)))
        .peekable();
    if variables.peek().is_some() {
        more.control("SH", ["ENVIRONMENT"]);
    }
    for (variable, flag) in variables {
        more.control("TP", []);
        more.text([bold(variable)]);
        more.text([roman(format!("Used if --{flag} is not given."))]);
    }
    more.to_writer(&mut text)?;
    text.extend_from_slice(COMMON_SECTIONS.as_bytes());
    let mut last = Roff::new();
    last.control("SH", ["SEE ALSO"]);
    last.text([roman(see_also(command, parent))]);
    last.to_writer(&mut text)?;
    Ok(String::from_utf8(text)?)
}

/// The pages of the parent command and of all its subcommands.
fn see_also(command: &Command, parent: Option<&Command>) -> String {
    let Some(parent) = parent else {
        return "curl(1), and the pages in share/doc/plantstore".to_owned();
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
