//! Where the password of a database comes from. The password file is that of libpq: lines of `host:port:database:user:password`. Like
//! libpq, a file that other users can read is not used; unlike libpq, that is an error, so that the reason does not have to be guessed
//! from a rejected connection.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::{env, iter};

use tokio_postgres::config::Host;

use crate::store::error::OpenError;

/// Larger than any password file.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Where PostgreSQL has its Unix socket unless it is configured, by its own default and by that of Debian. A password file calls this host
/// `localhost`.
const SOCKET_DIRECTORIES: [&str; 2] = ["/tmp", "/var/run/postgresql"];

/// What the password is for.
pub(super) struct Login<'a> {
    pub(super) host: &'a Host,
    pub(super) port: u16,
    pub(super) database: &'a str,
    pub(super) user: &'a str,
}

/// The password of the URL, else of `PGPASSWORD`, else of the password file. An empty one is none.
pub(super) fn find(
    in_url: Option<&[u8]>,
    file: Option<&Path>,
    login: &Login<'_>,
) -> Result<Option<Vec<u8>>, OpenError> {
    let in_url = in_url.filter(|password| !password.is_empty());
    let in_variable = || Some(variable("PGPASSWORD")?.as_bytes().to_vec());
    match in_url.map(<[u8]>::to_vec).or_else(in_variable) {
        Some(password) => Ok(Some(password)),
        None => in_file(file, login),
    }
}

fn variable(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}

/// The password of the first line that matches: in the file of the URL, else in `PGPASSFILE`, else in `~/.pgpass`, if there is one.
fn in_file(given: Option<&Path>, login: &Login<'_>) -> Result<Option<Vec<u8>>, OpenError> {
    let named = given.map(Path::to_owned);
    let named = named.or_else(|| variable("PGPASSFILE").map(PathBuf::from));
    let in_home = || Some(PathBuf::from(variable("HOME")?).join(".pgpass"));
    let is_named = named.is_some();
    let Some(path) = named.or_else(in_home) else {
        return Ok(None);
    };
    let text = match read(&path) {
        // As with libpq, a user need not have this file, or a home directory that can be read.
        Err(ReadError::Io(_)) if !is_named => return Ok(None),
        text => text.map_err(|error| error.about(&path))?,
    };
    Ok(find_line(&text, login))
}

enum ReadError {
    Io(io::Error),
    NotAFile,
    OpenToOthers,
}

impl ReadError {
    fn about(self, path: &Path) -> OpenError {
        let path = path.display();
        match self {
            Self::Io(source) => {
                OpenError::caused_by(source, format!("cannot read the password file {path}"))
            }
            Self::NotAFile => OpenError::other(format!(
                "the password file {path} is not a file of at most {FILE_BYTES_MAX} bytes"
            )),
            Self::OpenToOthers => OpenError::other(format!(
                "other users have access to the password file {path}; run `chmod 600 {path}`"
            )),
        }
    }
}

fn read(path: &Path) -> Result<Vec<u8>, ReadError> {
    let found = fs::metadata(path).map_err(ReadError::Io)?;
    if !found.is_file() || found.len() > FILE_BYTES_MAX {
        return Err(ReadError::NotAFile);
    }
    if found.mode() & 0o077 != 0 {
        return Err(ReadError::OpenToOthers);
    }
    fs::read(path).map_err(ReadError::Io)
}

fn find_line(text: &[u8], login: &Login<'_>) -> Option<Vec<u8>> {
    let lines = text.split(|byte| *byte == b'\n');
    let lines = lines.map(|line| line.strip_suffix(b"\r").unwrap_or(line));
    let mut lines = lines.filter(|line| !line.starts_with(b"#"));
    let host = match login.host {
        Host::Tcp(name) => name.as_str().into(),
        Host::Unix(path)
            if SOCKET_DIRECTORIES
                .iter()
                .any(|known| path == Path::new(known)) =>
        {
            "localhost".into()
        }
        Host::Unix(path) => path.to_string_lossy(),
    };
    let port = login.port.to_string();
    let wanted = [&*host, &port, login.database, login.user];
    lines.find_map(|line| {
        let mut rest = line;
        for value in wanted {
            rest = match rest.strip_prefix(b"*:") {
                Some(rest) => rest,
                None => after_field(rest, value)?,
            };
        }
        let (password, _) = next_field(rest);
        Some(password)
    })
}

/// What follows a field that has this value.
fn after_field<'a>(line: &'a [u8], value: &str) -> Option<&'a [u8]> {
    let (field, rest) = next_field(line);
    rest.filter(|_| field == value.as_bytes())
}

/// The field up to a colon, without its escapes (`\:` and `\\`), and what follows the colon.
fn next_field(line: &[u8]) -> (Vec<u8>, Option<&[u8]>) {
    let mut bytes = line.iter().enumerate();
    let mut end = None;
    let field = iter::from_fn(|| match bytes.next()? {
        (at, b':') => {
            end = Some(at);
            None
        }
        (_, b'\\') => bytes.next().map(|(_, escaped)| *escaped).or(Some(b'\\')),
        (_, byte) => Some(*byte),
    });
    let field = field.collect();
    (field, end.map(|at| &line[at + 1..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_that_matches_has_the_password() {
        let login = Login {
            host: &Host::Tcp("db.example".to_owned()),
            port: 5432,
            database: "plants",
            user: "a:b\\c",
        };
        for (text, expected) in [
            ("db.example:5432:plants:a\\:b\\\\c:secret", Some("secret")),
            ("*:*:*:*:secret\n", Some("secret")),
            ("*:*:*:*:secret\r\n", Some("secret")),
            ("*:*:*:*:a\\:b\\\\c", Some("a:b\\c")),
            ("*:*:*:*:a:b", Some("a")),
            ("*:*:*:*:a\\", Some("a\\")),
            ("#*:*:*:*:comment\n*:*:*:*:secret", Some("secret")),
            (
                "other:*:*:*:first\n*:5432:*:*:second\n*:*:*:*:third",
                Some("second"),
            ),
            ("*:5433:*:*:secret", None),
            ("*:*:plant:*:secret", None),
            ("*:*:plants2:*:secret", None),
            ("*:*:*:a:secret", None),
            ("db.*:*:*:*:secret", None),
            ("*:*:*:*", None),
            ("db.example:5432:plants", None),
            ("", None),
        ] {
            let found = find_line(text.as_bytes(), &login);
            assert_eq!(found.as_deref(), expected.map(str::as_bytes), "{text}");
        }
    }
}
