//! The first run: a store without any token gets one named `first`, in a file beside the database,
//! and a greeting with a command that works when pasted. The token itself goes to no log.

use std::fs::{self, OpenOptions, Permissions};
use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::store::{NewToken, Store, sync_directory_of};
use crate::telemetry;
use crate::token::Token;

/// Makes the first token unless there is any token already; gives the file that holds it.
pub(super) fn make_first_token(
    store: &mut Store,
    database: &Path,
) -> anyhow::Result<Option<PathBuf>> {
    if store.has_tokens()? {
        return Ok(None);
    }
    let path = database.with_file_name("plantstore.token");
    // The file comes first: a crash between the two leaves a file whose token is then used.
    let token = match fs::read_to_string(&path) {
        Ok(text) => Token::parse(text.trim()).with_context(|| {
            let path = path.display();
            format!("{path} is there but holds no token; move it away, then start again")
        })?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let token = Token::generate().context("cannot get random numbers")?;
            write_token(&path, &token)
                .with_context(|| format!("cannot write {}", path.display()))?;
            token
        }
        Err(error) => {
            return Err(error).with_context(|| format!("cannot read {}", path.display()));
        }
    };
    fs::set_permissions(&path, Permissions::from_mode(0o600))
        .with_context(|| format!("cannot keep {} private", path.display()))?;
    store.create_token(&NewToken {
        name: "first",
        digest: token.digest(),
        expires_at: None,
        rate_limit: None,
    })?;
    Ok(Some(path))
}

/// Tells a person what to do next. It is not a log line, so that it can be pasted.
pub(super) fn greet(token_path: &Path, address: SocketAddr) {
    let path = token_path
        .canonicalize()
        .unwrap_or_else(|_| token_path.to_owned());
    let path = shell_quoted(&path.display().to_string());
    let greeting = format!(
        "\nThis is a new store. Its first token is in {path}. Add a plant:\n\n\
         curl http://{address}/plants -H \"Authorization: Bearer $(cat {path})\" \
         -H 'Content-Type: application/json' \
         -d '{{\"id\":1,\"name\":\"Monstera\",\"tag\":\"indoor\"}}'\n\n\
         or in a browser: http://{address}/docs\n\n"
    );
    telemetry::say(greeting);
}

fn write_token(path: &Path, token: &Token) -> io::Result<()> {
    let unfinished = path.with_extension("token.new");
    let _ = fs::remove_file(&unfinished); // of a run that was cut short
    let mut options = OpenOptions::new();
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&unfinished)?;
    writeln!(file, "{}", token.reveal())?;
    file.sync_all()?;
    fs::rename(&unfinished, path)?;
    sync_directory_of(path)
}

fn shell_quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:@".contains(c);
    if text.chars().all(plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}
