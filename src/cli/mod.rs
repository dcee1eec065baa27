//! The command line: what was typed, completed from the environment and the file, becomes a
//! command. Exit codes: 0 done, 1 failed, 2 wrong usage.

mod backup;
mod copy;
mod export;
mod generate;
mod import;
mod plants;
mod redact;
mod serve;
mod terminal;
mod token;

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::cli::redact::{redacted, redacted_with};
use crate::cli::terminal::is_closed_pipe;
use crate::logging;
use crate::version::VERSION;

/// Adds plants over HTTP. A 200 means the plant is on disk; sending it again is always safe.
#[derive(Debug, Parser)]
#[command(name = "plantstore", version = VERSION)]
struct Cli {
    /// A TOML file with settings of `serve`; a flag or a variable goes before it
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,

    #[command(subcommand)]
    command: Subcommands,
}

#[derive(Debug, Subcommand)]
enum Subcommands {
    /// Run the service
    Serve(serve::Serve),
    /// Make, list and revoke tokens, also while the service runs
    #[command(subcommand)]
    Token(token::TokenCommand),
    /// List plants, newest first, also while the service runs
    List(plants::List),
    /// Show one plant, with who added it and when
    Get(plants::Get),
    /// Count plants, by tag and by day, and tell what they take on disk
    Stats(plants::Stats),
    /// Copy all that is stored to a file and check that, also while the service runs
    Backup(backup::Backup),
    /// Make a store of a backup, while no service runs
    Restore(backup::Restore),
    /// Read all that is stored and tell what is not as it was stored, also while the service runs
    Check(backup::Check),
    /// Write all plants to a file or a pipe, also while the service runs
    Export(export::Export),
    /// Add plants from a file or a pipe, also while the service runs; safe to run again
    Import(import::Import),
    /// Copy all plants and tokens to another store, and compare
    Copy(copy::Copy),
    /// Make the tables in a database, or bring them up to date; for a role that may
    Migrate(serve::Migrate),
    /// Print the description of the interface (OpenAPI, YAML)
    Openapi,
    /// Print what a shell needs to complete these commands
    Completions(generate::Completions),
    /// Print the manual page, or write those of all commands
    Man(generate::Man),
}

/// Parses, runs, prints an error once.
pub fn run() -> ExitCode {
    let cli = match parse() {
        Ok(cli) => cli,
        Err(usage) => return fail_usage(&usage),
    };
    let done = match cli.command {
        Subcommands::Serve(serve) => serve.run(),
        Subcommands::Token(token) => token.run(),
        Subcommands::List(list) => list.run(),
        Subcommands::Get(get) => get.run(),
        Subcommands::Stats(stats) => stats.run(),
        Subcommands::Backup(backup) => backup.run(),
        Subcommands::Restore(restore) => restore.run(),
        Subcommands::Check(check) => check.run(),
        Subcommands::Export(export) => export.run(),
        Subcommands::Import(import) => import.run(),
        Subcommands::Copy(copy) => copy.run(),
        Subcommands::Migrate(migrate) => migrate.run(),
        Subcommands::Openapi => generate::openapi(),
        Subcommands::Completions(completions) => completions.run(command(&HashMap::new())),
        Subcommands::Man(man) => man.run(command(&HashMap::new())),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            logging::write_stderr(redacted(&format!("plantstore: {error:#}\n")));
            ExitCode::FAILURE
        }
    }
}

/// Prints the help, or a usage error without its secrets.
fn fail_usage(usage: &clap::Error) -> ExitCode {
    let text = usage.render().to_string();
    let clean = redacted(&text);
    if !usage.use_stderr() || clean == text {
        usage.exit(); // in colour, on a terminal
    }
    logging::write_stderr(clean);
    u8::try_from(usage.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from)
}

/// Parses twice when there is a file: its values become the defaults of the second time, and so
/// are read, checked and overruled exactly as what is typed.
fn parse() -> Result<Cli, clap::Error> {
    let typed = command(&HashMap::new())
        .try_get_matches()
        .map_err(without_passwords)?;
    let typed = Cli::from_arg_matches(&typed)?;
    let Some(path) = typed.config else {
        return Ok(typed);
    };
    let wrong_usage = |problem: String| {
        let problem = format!("{}: {problem}", path.display());
        Cli::command().error(ErrorKind::InvalidValue, problem)
    };
    let file = read_settings(&path).map_err(wrong_usage)?;
    let matches = command(&file).try_get_matches();
    // The first time went well, so whatever is wrong now stands in the file.
    let matches = matches.map_err(|error| {
        let text = without_passwords(error).to_string();
        let text = redacted_with(&text, file.values().map(String::as_str));
        wrong_usage(first_sentence(&text))
    })?;
    Cli::from_arg_matches(&matches)
}

/// The command line, with a variable for every setting and the file's values as defaults.
fn command(file: &HashMap<String, String>) -> Command {
    complete(Cli::command(), &setting_names(), file)
}

fn complete(command: Command, settings: &[String], file: &HashMap<String, String>) -> Command {
    command
        .mut_args(|mut arg| {
            let id = arg.get_id().to_string();
            if id == "config" || settings.contains(&id) {
                // The help must not show what is in them: the store's may hold a password.
                let name = format!("PLANTSTORE_{}", id.to_uppercase());
                arg = arg.env(name).hide_env_values(true);
            }
            match file.get(&id) {
                Some(value) => arg.default_value(value.clone()),
                None => arg,
            }
        })
        .mut_subcommands(|subcommand| complete(subcommand, settings, file))
}

/// Whatever `serve` takes is a setting.
fn setting_names() -> Vec<String> {
    let cli = Cli::command();
    let serve = cli.find_subcommand("serve").expect("serve is a command");
    serve
        .get_arguments()
        .map(|arg| arg.get_id().to_string())
        .collect()
}

fn read_settings(path: &Path) -> Result<HashMap<String, String>, String> {
    let text = fs::read_to_string(path).map_err(|error| error.to_string())?;
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| {
        let line = error
            .span()
            .map(|span| text[..span.start].matches('\n').count() + 1);
        let line = line
            .map(|line| format!(" (line {line})"))
            .unwrap_or_default();
        format!("{}{line}", error.message())
    })?;
    let known = setting_names();
    table
        .into_iter()
        .map(|(key, value)| match value {
            _ if !known.contains(&key) => Err(format!(
                "there is no setting `{key}`; the settings are {}",
                known.join(", ")
            )),
            toml::Value::String(text) => Ok((key, text)),
            toml::Value::Integer(number) => Ok((key, number.to_string())),
            _ => Err(format!("`{key}` must be a string or a whole number")),
        })
        .collect()
}

/// A URL that cannot be understood is not repeated: it may hold a password, and this may go to a log.
fn without_passwords(mut error: clap::Error) -> clap::Error {
    let is_url = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(argument)) => argument.ends_with("<URL>"),
        _ => false,
    };
    if is_url {
        let hidden = ContextValue::String("…".to_owned());
        error.insert(ContextKind::InvalidValue, hidden);
    }
    error
}

fn first_sentence(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default();
    line.trim_start_matches("error: ").to_owned()
}
