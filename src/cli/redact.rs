//! Removes passwords and tokens from error messages, which may be logged or shown. A message may repeat any argument, also one
//! that was given in the wrong place, so messages are cleaned, not arguments. Crates for secrets protect values, not messages.

use std::env;
use std::ops::Range;

const HIDDEN: &str = "…";

/// The fewest letters and digits after `plant_` that are taken for a token, or for a part of one.
const TOKEN_LEN_MIN: usize = 16;

/// Parameters whose names end with these contain a password.
const PASSWORD_NAMES: [&str; 4] = ["password", "passwd", "passphrase", "pwd"];

/// An error message without the secrets of the command line and the environment.
pub(super) fn redacted(message: &str) -> String {
    let arguments = env::args_os().skip(1);
    let variables = env::vars_os().filter(|(name, _)| {
        let name = name.to_string_lossy();
        name.starts_with("PLANTSTORE_")
    });
    let values = arguments.chain(variables.map(|(_, value)| value));
    let values: Vec<_> = values
        .map(|value| value.to_string_lossy().into_owned())
        .collect();
    redacted_with(message, values.iter().map(String::as_str))
}

/// An error message without the secrets in these values, and without what looks like one.
pub(super) fn redacted_with<'a>(message: &str, values: impl Iterator<Item = &'a str>) -> String {
    let mut message = message.to_owned();
    // Only the whole value shows where its password ends if that contains spaces or quotes.
    for value in values {
        let after_flag = value.split_once('=').map(|(_, value)| value);
        for value in [Some(value), after_flag].into_iter().flatten() {
            let clean = without_secrets(value);
            if clean != value {
                message = message.replace(value, &clean);
            }
        }
    }
    let is_boundary = |c: char| c.is_whitespace() || "'\"`".contains(c);
    let words = message.split_inclusive(is_boundary);
    words
        .map(|word| {
            let end = word.trim_end_matches(is_boundary).len();
            without_secrets(&word[..end]) + &word[end..]
        })
        .collect()
}

/// One value, such as a URL, without its secrets.
fn without_secrets(value: &str) -> String {
    let mut clean = value.to_owned();
    for find in [password_parameter, user_password, token] {
        let mut from = 0;
        while let Some(secret) = find(&clean, from) {
            from = secret.start + HIDDEN.len();
            clean.replace_range(secret, HIDDEN);
        }
    }
    clean
}

/// Finds the password in `scheme://user:password@host`, also without a scheme or a host.
fn user_password(value: &str, from: usize) -> Option<Range<usize>> {
    let is_file = value.starts_with("sqlite:") || value.contains("=sqlite:");
    if from > 0 || is_file {
        return None;
    }
    let scheme_end = value.find("://").map(|at| at + 3);
    let rest = &value[scheme_end.unwrap_or(0)..];
    let (first, last) = if let Some(at) = rest.rfind('@') {
        let colon = rest[..at].find(':')?;
        if scheme_end.is_none() && rest[..colon].contains('/') {
            return None; // the path of a file
        }
        (colon + 1, at)
    } else {
        // Without a host, what should be a port is a password, unless it is a number.
        scheme_end?;
        let authority = rest.split(['/', '?', '#']).next().unwrap_or(rest);
        let is_port = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        let is_address = |host: &str| {
            host.starts_with('[') || host.split_once(':').is_none_or(|(_, port)| is_port(port))
        };
        if authority.split(',').all(is_address) {
            return None;
        }
        (authority.find(':')? + 1, rest.len())
    };
    let start = scheme_end.unwrap_or(0);
    Some(start + first..start + last).filter(|secret| &value[secret.clone()] != HIDDEN)
}

/// Finds the value of `password=…` in a URL or in a key/value connection string.
fn password_parameter(value: &str, from: usize) -> Option<Range<usize>> {
    let equals = value.match_indices('=').map(|(at, _)| at);
    equals.filter(|at| *at >= from).find_map(|at| {
        let before = value[..at].trim_end();
        let name_start = before.rfind(|c: char| !is_name(c));
        let name = &before[name_start.map_or(0, |at| at + 1)..];
        let name = name.to_ascii_lowercase();
        if !PASSWORD_NAMES.iter().any(|known| name.ends_with(known)) {
            return None;
        }
        let after = &value[at + 1..];
        let start = at + 1 + (after.len() - after.trim_start().len());
        let secret = start..start + parameter_len(&value[start..]);
        (!secret.is_empty() && &value[secret.clone()] != HIDDEN).then_some(secret)
    })
}

/// The value ends at the closing quote, the next parameter, or the end of the text.
fn parameter_len(text: &str) -> usize {
    if let Some(quoted) = text.strip_prefix('\'') {
        let mut is_escaped = false;
        for (at, c) in quoted.char_indices() {
            match c {
                '\'' if !is_escaped => return at + 2,
                _ => is_escaped = c == '\\' && !is_escaped,
            }
        }
        return text.len();
    }
    let is_separator = |c: char| c == '&' || c.is_whitespace();
    let separators = text.match_indices(is_separator);
    let next_parameter = |(at, separator): (usize, &str)| {
        let rest = &text[at + separator.len()..];
        let name = rest.trim_start_matches(is_name);
        (name.len() < rest.len() && name.trim_start().starts_with('=')).then_some(at)
    };
    separators
        .into_iter()
        .find_map(next_parameter)
        .unwrap_or(text.len())
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// Finds the random part of a token, or of a part of one.
fn token(value: &str, from: usize) -> Option<Range<usize>> {
    let starts = value
        .match_indices("plant_")
        .map(|(at, start)| at + start.len());
    starts.filter(|start| *start >= from).find_map(|start| {
        let rest = &value[start..];
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric());
        let len = end.unwrap_or(rest.len());
        (len >= TOKEN_LEN_MIN).then_some(start..start + len)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_removed_and_the_rest_stays() {
        for (value, expected) in [
            ("postgres://u:secret@h/d", "postgres://u:…@h/d"),
            ("postgres://u:a@b:c@h/d", "postgres://u:…@h/d"),
            ("postgres://u@h:1,i:2/d", "postgres://u@h:1,i:2/d"),
            ("postgres://u:secret/d", "postgres://u:…"),
            ("u:secret@h", "u:…@h"),
            ("x=postgres://u:secret@h", "x=postgres://u:…@h"),
            ("sqlite:a:b@c.db", "sqlite:a:b@c.db"),
            (
                "postgres://h/d?password=a&b&user=u",
                "postgres://h/d?password=…&user=u",
            ),
            (
                "host=h Password = 'a b\\' c' user=u",
                "host=h Password = … user=u",
            ),
            ("password=a b sslpassword=c", "password=… sslpassword=…"),
            ("plant_0123456789abcdefgh!", "plant_…!"),
            (
                "plant_watering plant_0123456789abcdef",
                "plant_watering plant_…",
            ),
            ("line 5: id: missing", "line 5: id: missing"),
        ] {
            assert_eq!(redacted_with(value, [value].into_iter()), expected);
        }
    }

    #[test]
    fn no_text_makes_it_panic_or_loop() {
        for text in [
            "@",
            ":@",
            "://",
            "://:@",
            "password=",
            "=",
            "plant_",
            "…:…@…",
            "'",
            "password='",
        ] {
            let once = redacted_with(text, [text].into_iter());
            assert_eq!(redacted_with(&once, [text].into_iter()), once);
        }
    }
}
