//! The command line: arguments, environment variables and the configuration file become a command. Exit codes: 0 success,
//! 1 failure, 2 usage error.

mod backup;
mod copy;
mod export;
mod generate;
mod import;
mod plants;
mod redact;
mod serve;
mod status;
mod terminal;
mod token;

use std::collections::HashMap;
use std::env;
use std::error::Error;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Read;
use std::num::{IntErrorKind, ParseIntError};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::builder::{PathBufValueParser, TypedValueParser};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgMatches, Command, CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::cli::redact::{redacted, redacted_with};
use crate::cli::terminal::{is_closed_pipe, terminal_columns};
use crate::logging;
use crate::store::{Location, Mode, OpenError, Store, chain, schema};
use crate::version::VERSION;

/// Help is not wider than this on any terminal, and 80 columns wide elsewhere.
const HELP_COLUMNS_MAX: usize = 100;

const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// The value of each setting, by its name.
type Settings = HashMap<String, String>;

/// Add plants over HTTP: a 200 means the plant is durable, and retrying is always safe
#[derive(Debug, Parser)]
#[command(
    name = "plantstore",
    version = VERSION,
    after_help = "\
Stop the server before restore and check --accept-loss, and with SQLite before
a migrate that upgrades the schema. All other commands work while it runs.

Examples:
  plantstore serve
  plantstore token create ci --expires-in 90d
  plantstore backup /backups/plants.backup"
)]
struct Cli {
    #[command(subcommand)]
    command: Subcommands,
}

#[derive(Debug, Subcommand)]
enum Subcommands {
    Serve(Box<serve::Serve>),
    Status(status::Status),
    /// Create, list, rotate and revoke bearer tokens
    #[command(
        subcommand,
        after_help = "\
Examples:
  plantstore token create ci
  plantstore token list
  plantstore token rotate ci
  plantstore token revoke ci"
    )]
    Token(token::TokenCommand),
    List(plants::List),
    Get(plants::Get),
    Stats(plants::Stats),
    Backup(backup::Backup),
    Restore(backup::Restore),
    Check(backup::Check),
    Export(export::Export),
    Import(import::Import),
    Copy(copy::Copy),
    Migrate(serve::Migrate),
    Openapi(generate::Openapi),
    Completions(generate::Completions),
    Man(generate::Man),
}

pub fn run() -> ExitCode {
    let cli = match parse() {
        Ok(cli) => cli,
        Err(usage) => return fail_usage(&usage),
    };
    let result = match cli.command {
        Subcommands::Serve(serve) => serve.run(),
        Subcommands::Status(status) => status.run(),
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
        Subcommands::Openapi(openapi) => openapi.run(),
        Subcommands::Completions(completions) => completions.run(command(&Settings::new())),
        Subcommands::Man(man) => man.run(command(&Settings::new())),
    };
    match result {
        Err(error) if !is_closed_pipe(&error) => {
            logging::write_stderr(redacted(&format!("plantstore: {}\n", chain(&*error))));
            ExitCode::FAILURE
        }
        _ => ExitCode::SUCCESS,
    }
}

/// Opens a store, and reports if it was created: with the wrong `--store` or without `--config` that is a mistake.
fn open_or_create(location: &Location, mode: Mode) -> Result<Store, OpenError> {
    let exists = match location.file() {
        Some(path) => fs::metadata(path).is_ok_and(|found| found.len() > 0),
        None => schema(location)?.is_some(),
    };
    let store = Store::open(location, mode)?;
    if !exists {
        logging::write_stderr(format!("created the store {location}\n"));
    }
    Ok(store)
}

/// The parser of a path that must not be `-`, for the reason in the message.
fn file_path(reason: &'static str) -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(move |path| match path.to_str() {
        Some("-") => Err(reason),
        _ => Ok(path),
    })
}

/// Prints the help, or a usage error without secrets.
fn fail_usage(usage: &clap::Error) -> ExitCode {
    let text = usage.render().to_string();
    let clean = redacted(&text);
    if !usage.use_stderr() || clean == text {
        usage.exit(); // in colour, on a terminal
    }
    logging::write_stderr(clean);
    u8::try_from(usage.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from)
}

/// Parses a second time if there is a configuration file: its values are the defaults then, so that they are validated and
/// overridden as those of flags are.
fn parse() -> Result<Cli, clap::Error> {
    let matches = command(&Settings::new())
        .try_get_matches()
        .map_err(explained)?;
    let Some(path) = config_file(&matches) else {
        return from_matches(&matches);
    };
    let in_file = |problem: String| {
        let path = path.display();
        usage_error(&format!("in the configuration file {path}: {problem}"))
    };
    let file = read_config(path).map_err(in_file)?;
    // The flags and variables were valid, so any error is in the file.
    let matches = command(&file).try_get_matches().map_err(|error| {
        let text = explained(error).to_string();
        let text = redacted_with(&text, file.values());
        // With the possible values, without the usage.
        let lines: Vec<_> = text.lines().take_while(|line| !line.is_empty()).collect();
        let text = lines.join("").replace("  ", " ");
        in_file(text.trim_start_matches("error: ").to_owned())
    })?;
    from_matches(&matches)
}

fn usage_error(problem: &str) -> clap::Error {
    clap::Error::raw(ErrorKind::ValueValidation, format!("{problem}\n"))
}

fn from_matches(matches: &ArgMatches) -> Result<Cli, clap::Error> {
    let mut cli = Cli::from_arg_matches(matches)?;
    if let (Subcommands::Serve(serve), Some((_, matches))) =
        (&mut cli.command, matches.subcommand())
    {
        let settings = setting_names().into_iter().map(|name| {
            let values = matches.get_raw(&name).into_iter().flatten();
            let values: Vec<_> = values.map(|value| value.to_string_lossy()).collect();
            let value = values.join(",");
            (name, value)
        });
        serve.show(settings.collect());
        if let Some(problem) = serve.contradiction() {
            return Err(usage_error(problem));
        }
    }
    Ok(cli)
}

/// `--config`, which only commands with settings have.
fn config_file(matches: &ArgMatches) -> Option<&PathBuf> {
    match matches.subcommand() {
        Some((_, matches)) => config_file(matches),
        None => matches.try_get_one("config").ok().flatten(),
    }
}

/// The command line with an environment variable for every setting, and the values of the configuration file as defaults.
fn command(file: &Settings) -> Command {
    let columns = terminal_columns().unwrap_or(80).min(HELP_COLUMNS_MAX);
    with_settings(Cli::command(), &setting_names(), file).term_width(columns)
}

fn with_settings(mut command: Command, settings: &[String], file: &Settings) -> Command {
    let is_setting = |arg: &Arg| settings.contains(&arg.get_id().to_string());
    if command.get_arguments().any(is_setting) {
        let config = Arg::new("config").long("config").value_name("FILE");
        let config = config.value_parser(clap::value_parser!(PathBuf));
        let help = "TOML file with settings, which flags and environment variables override";
        command = command.arg(config.env("PLANTSTORE_CONFIG").help(help));
    }
    command
        .mut_args(|mut arg| {
            let id = arg.get_id().to_string();
            if settings.contains(&id) {
                arg = arg.env(format!("PLANTSTORE_{}", id.to_uppercase()));
            }
            // The help must not show the values: that of the store may contain a password.
            arg = arg.hide_env_values(true);
            match file.get(&id) {
                Some(value) => arg.default_value(value.clone()),
                None => arg,
            }
        })
        .mut_subcommands(|subcommand| with_settings(subcommand, settings, file))
}

/// Every argument of `serve` is a setting.
fn setting_names() -> Vec<String> {
    let cli = Cli::command();
    let serve = cli.find_subcommand("serve").expect("serve is a command");
    let names = serve.get_arguments().map(|arg| arg.get_id().to_string());
    names.collect()
}

fn read_config(path: &Path) -> Result<Settings, String> {
    let mut text = String::new();
    let read =
        File::open(path).and_then(|file| file.take(CONFIG_BYTES_MAX + 1).read_to_string(&mut text));
    match read.map_err(|error| error.to_string())? {
        len if len as u64 > CONFIG_BYTES_MAX => {
            Err(format!("it is larger than {CONFIG_BYTES_MAX} bytes"))
        }
        _ => parse_config(&text),
    }
}

/// The settings of a configuration file. Their values are parsed as those of flags are.
pub(crate) fn parse_config(text: &str) -> Result<Settings, String> {
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| {
        let line = error.span().map_or(String::new(), |span| {
            format!(" (line {})", text[..span.start].matches('\n').count() + 1)
        });
        let is_unquoted = error.message().starts_with("invalid");
        let advice = if is_unquoted {
            "; text needs quotes"
        } else {
            ""
        };
        format!("{}{line}{advice}", error.message())
    })?;
    let known = setting_names();
    let setting = |(key, value): (String, toml::Value)| match value {
        _ if key.contains('-') && known.contains(&key.replace('-', "_")) => {
            let name = key.replace('-', "_");
            Err(format!("there is no setting `{key}`; it is `{name}` here"))
        }
        _ if !known.contains(&key) => Err(format!(
            "there is no setting `{key}`; the settings are {}",
            known.join(", ")
        )),
        toml::Value::String(text) => Ok((key, text)),
        toml::Value::Integer(number) => Ok((key, number.to_string())),
        toml::Value::Boolean(is_on) => Ok((key, is_on.to_string())),
        toml::Value::Array(values) => {
            let texts = values.iter().map(toml::Value::as_str);
            let texts: Option<Vec<_>> = texts.collect();
            let texts = texts.ok_or_else(|| format!("`{key}` must be a list of strings"))?;
            Ok((key, texts.join(",")))
        }
        _ => Err(format!(
            "`{key}` must be a string, a whole number, true, false, or a list of strings"
        )),
    };
    table.into_iter().map(setting).collect()
}

/// An error of clap in the words of an operator: it names the variable that has the invalid value, and says what is expected instead of a
/// number. An invalid URL is not repeated: it may contain a password, and the message may be logged.
fn explained(mut error: clap::Error) -> clap::Error {
    let text = |error: &clap::Error, kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        _ => None,
    };
    let Some(mut argument) = text(&error, ContextKind::InvalidArg) else {
        return error;
    };
    let mut value = text(&error, ContextKind::InvalidValue);
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-/".contains(c);
    if argument.ends_with("<URL>") && value.as_ref().is_some_and(|url| !url.chars().all(is_plain)) {
        value = Some("…".to_owned());
    }
    let flag = argument.split(' ').next().unwrap_or_default();
    let name = flag
        .trim_start_matches('-')
        .replace('-', "_")
        .to_uppercase();
    let variable = format!("PLANTSTORE_{name}");
    let is_flag = |given: OsString| given.as_encoded_bytes().starts_with(flag.as_bytes());
    if env::var_os(&variable).is_some() && !env::args_os().any(is_flag) {
        argument = format!("{argument} (from {variable})");
    }
    let cause = error.source().and_then(<dyn Error>::downcast_ref);
    let is_text = |cause: &ParseIntError| *cause.kind() == IntErrorKind::InvalidDigit;
    if cause.is_some_and(is_text) {
        let value = value.unwrap_or_default();
        return usage_error(&format!(
            "invalid value '{value}' for '{argument}': expected a whole number"
        ));
    }
    error.insert(ContextKind::InvalidArg, ContextValue::String(argument));
    if let Some(value) = value {
        error.insert(ContextKind::InvalidValue, ContextValue::String(value));
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaves(command: &Command, found: &mut Vec<Command>) {
        if command.has_subcommands() {
            let below = command.get_subcommands();
            below.for_each(|below| leaves(below, found));
        } else if command.get_name() != "help" {
            found.push(command.clone());
        }
    }

    #[test]
    fn every_command_has_examples_that_parse() {
        let mut commands = Vec::new();
        leaves(&command(&Settings::new()), &mut commands);
        assert!(commands.len() >= 18);
        for example in commands {
            let name = example.get_name();
            let help = example.get_after_help().map(ToString::to_string);
            let help = help.unwrap_or_else(|| panic!("{name} has no examples"));
            let help = help.strip_prefix("Examples:\n").expect(name);
            for line in help.lines() {
                assert!(line.len() <= 80, "{line} would be wrapped");
                for part in line
                    .split(" | ")
                    .filter(|part| part.contains("plantstore "))
                {
                    let words = part.split_whitespace().take_while(|word| *word != ">");
                    let parsed = command(&Settings::new()).try_get_matches_from(words);
                    assert!(parsed.is_ok(), "{line}: {}", parsed.expect_err("an error"));
                }
            }
        }
    }

    #[test]
    fn help_fits_into_80_columns() {
        let mut commands = Vec::new();
        let mut all = command(&Settings::new()).term_width(80);
        all.build();
        commands.push(all.clone());
        leaves(&all, &mut commands);
        for mut command in commands {
            for line in command.render_long_help().to_string().lines() {
                assert!(line.chars().count() <= 80, "{line}");
            }
        }
    }

    #[test]
    fn only_commands_with_settings_have_a_config_file() {
        let mut commands = Vec::new();
        leaves(&command(&Settings::new()), &mut commands);
        for command in commands {
            let has = |name| command.get_arguments().any(|arg| arg.get_id() == name);
            let has_settings = has("store") || has("ops_listen");
            assert_eq!(has("config"), has_settings, "{}", command.get_name());
        }
    }
}
