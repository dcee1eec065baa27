//! Removes passwords and tokens from error messages, which may be logged or shown. A message may repeat any argument, also one
//! that was given in the wrong place, so messages are cleaned, not arguments. Crates for secrets protect values, not messages.

use std::env;

const HIDDEN: &str = "…";

/// The fewest letters and digits after `plant_` that are taken for a token, or for a part of one.
const TOKEN_LEN_MIN: usize = 16;

/// Parameters whose names end with these contain a password.
const PASSWORD_NAMES: [&str; 4] = ["password", "passwd", "passphrase", "pwd"];

/// An error message without the secrets of the command line and the environment.
pub(super) fn redacted(message: &str) -> String {
    let variables =
        env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(b"PLANTSTORE_"));
    let values = env::args_os()
        .skip(1)
        .chain(variables.map(|(_, value)| value));
    redacted_with(
        message,
        values.map(|value| value.to_string_lossy().into_owned()),
    )
}

/// An error message without the secrets in these values, and without what looks like one.
pub(super) fn redacted_with(
    message: &str,
    values: impl Iterator<Item = impl AsRef<str>>,
) -> String {
    let mut message = message.to_owned();
    // Only the whole value shows where its password ends if that contains spaces or quotes.
    for value in values {
        let value = value.as_ref();
        let after_flag = value.split_once('=').map(|(_, value)| value);
        for value in [Some(value), after_flag].into_iter().flatten() {
            let clean = without_secrets(value);
            if clean != value {
                message = message.replace(value, &clean);
            }
        }
    }
    let is_boundary = |c: char| c.is_whitespace() || "'\"`".contains(c);
    let words = message.split_inclusive(is_boundary).map(|word| {
        let end = word.trim_end_matches(is_boundary).len();
        without_secrets(&word[..end]) + &word[end..]
    });
    words.collect()
}

/// One value, such as a URL, without its secrets.
fn without_secrets(value: &str) -> String {
    let value = without_parameter(value).unwrap_or_else(|| value.to_owned());
    let value = without_user_password(&value).unwrap_or(value);
    without_tokens(&value)
}

/// Hides everything after `password=`, in a URL or in a key/value connection string: a password may contain separators.
fn without_parameter(value: &str) -> Option<String> {
    let lower = value.to_ascii_lowercase();
    let is_password = |(at, _): &(usize, &str)| {
        let name = lower[..*at].trim_end();
        PASSWORD_NAMES.iter().any(|known| name.ends_with(known))
    };
    let (at, _) = value.match_indices('=').find(is_password)?;
    let is_empty = value[at + 1..].trim().is_empty();
    (!is_empty).then(|| format!("{}{HIDDEN}", &value[..=at]))
}

/// Hides the password in `scheme://user:password@host`, also without a scheme or a host.
fn without_user_password(value: &str) -> Option<String> {
    if value.starts_with("sqlite:") || value.contains("=sqlite:") {
        return None;
    }
    let (scheme, rest) = value.split_at(value.find("://").map_or(0, |at| at + 3));
    let (user, host) = if let Some((before, host)) = rest.rsplit_once('@') {
        let (user, _) = before.split_once(':')?;
        if scheme.is_empty() && user.contains('/') {
            return None; // the path of a file
        }
        (user, format!("@{host}"))
    } else {
        // Without a host, what should be a port is a password, unless it is a number.
        let authority = rest.split(['/', '?', '#']).next().unwrap_or(rest);
        let is_port = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        let is_address = |host: &str| {
            host.starts_with('[') || host.split_once(':').is_none_or(|(_, port)| is_port(port))
        };
        if scheme.is_empty() || authority.split(',').all(is_address) {
            return None;
        }
        (authority.split_once(':')?.0, String::new())
    };
    Some(format!("{scheme}{user}:{HIDDEN}{host}"))
}

/// Hides the random part of tokens, or of parts of them.
fn without_tokens(value: &str) -> String {
    let mut parts = value.split("plant_");
    let mut clean = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let random_len = part.bytes().take_while(u8::is_ascii_alphanumeric).count();
        let (random, rest) = part.split_at(random_len);
        let shown = if random_len < TOKEN_LEN_MIN {
            random
        } else {
            HIDDEN
        };
        clean.extend(["plant_", shown, rest]);
    }
    clean
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
                "postgres://h/d?password=…",
            ),
            ("host=h Password = 'a b\\' c' user=u", "host=h Password =…"),
            ("sslmode=a password=a b c=d", "sslmode=a password=…"),
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
