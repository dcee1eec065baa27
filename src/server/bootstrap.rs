//! The first start with a new SQLite store: creates a token named `first` in a file next to the database, and prints a
//! command that uses it. The token itself is never logged.

use std::fs::Permissions;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::fs::{AtomicFile, if_exists, open_existing};
use crate::logging;
use crate::store::{Store, TokenRecord};
use crate::token::Token;
use crate::user::current_user;

const TOKEN_FILE_LEN_MAX: u64 = 1024;

/// Creates the first token if there are no tokens, and returns the path of its file.
pub(super) fn create_first_token(
    store: &mut Store,
    database: &Path,
) -> anyhow::Result<Option<PathBuf>> {
    if store.has_tokens()? {
        return Ok(None);
    }
    let path = database.with_file_name("plantstore.token");
    // The file comes first: after a crash in between, the next start uses the token of the file.
    let token = if let Some(token) = read_token(&path)? {
        token
    } else {
        let token = Token::generate().context("cannot get random numbers")?;
        write_token(&path, &token)?;
        token
    };
    let record = TokenRecord::new("first", token.digest());
    store.create_token(&record, &current_user())?;
    Ok(Some(path))
}

/// Prints a command that adds a plant. Not a log line, so that it can be copied.
pub(super) fn print_example_request(token_path: &Path, origin: &str) {
    let path = token_path
        .canonicalize()
        .unwrap_or_else(|_| token_path.to_owned());
    let path = shell_quoted(&path.display().to_string());
    let example = format!(
        "\nThis is a new store. Its first token is in {path}. Add a plant:\n\n\
         curl {origin}/plants -H \"Authorization: Bearer $(cat {path})\" \
         -H 'Content-Type: application/json' \
         -d '{{\"id\":1,\"name\":\"Monstera\",\"tag\":\"indoor\"}}'\n\n\
         or in a browser: {origin}/docs\n\n"
    );
    logging::write_stderr(example);
}

fn write_token(path: &Path, token: &Token) -> anyhow::Result<()> {
    let file = AtomicFile::create(path, None, None)?;
    writeln!(file.file(), "{}", token.reveal())
        .with_context(|| format!("cannot write {}", path.display()))?;
    Ok(file.persist()?)
}

/// The token that an earlier start has written.
fn read_token(path: &Path) -> anyhow::Result<Option<Token>> {
    let cannot_read = || format!("cannot read {}", path.display());
    let Some(file) = if_exists(open_existing(path, false)).with_context(cannot_read)? else {
        return Ok(None);
    };
    let mut text = String::new();
    let read = (&file).take(TOKEN_FILE_LEN_MAX).read_to_string(&mut text);
    let token = read.ok().and_then(|_| Token::parse(text.trim()));
    let token = token.with_context(|| {
        let path = path.display();
        format!("{path} exists but contains no token; move it away, then start again")
    })?;
    file.set_permissions(Permissions::from_mode(0o600))
        .with_context(|| format!("cannot make {} private", path.display()))?;
    Ok(Some(token))
}

fn shell_quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:@".contains(c);
    if text.chars().all(plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}
