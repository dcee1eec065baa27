//! Which user of the operating system runs this process, for the history of tokens and as the user of a database.

use std::env;
use std::fs;

use rustix::process::{Uid, geteuid, getuid};

/// The most bytes of a name that are recorded.
const NAME_LEN_MAX: usize = 64;

/// The name of the user; with sudo that of the user who ran it.
pub(crate) fn current_user() -> String {
    let uid = getuid();
    let name = local_name(uid).unwrap_or_else(|| format!("uid {}", uid.as_raw()));
    match env::var("SUDO_USER") {
        Ok(person) if uid.is_root() && is_plain(&person) => format!("{person} (sudo)"),
        _ => name,
    }
}

/// The name of the account whose rights this process has, which is the default user of a database.
pub(crate) fn account_name() -> Option<String> {
    local_name(geteuid())
}

/// None for a user of a directory service.
fn local_name(uid: Uid) -> Option<String> {
    let passwd = fs::read_to_string("/etc/passwd").unwrap_or_default();
    name_of(&passwd, uid.as_raw())
}

fn name_of(passwd: &str, uid: u32) -> Option<String> {
    let mut users = passwd.lines().map(|line| line.split(':'));
    users.find_map(|mut fields| {
        let name = fields.next()?;
        let is_same = fields.nth(1)?.parse() == Ok(uid);
        (is_same && is_plain(name)).then(|| name.to_owned())
    })
}

fn is_plain(name: &str) -> bool {
    (1..=NAME_LEN_MAX).contains(&name.len()) && !name.contains(char::is_control)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_found_by_number() {
        let passwd =
            "root:x:0:0:root:/root:/bin/bash\nbroken\nann:x:1000:1000::/home/ann:/bin/sh\n";
        assert_eq!(name_of(passwd, 0).as_deref(), Some("root"));
        assert_eq!(name_of(passwd, 1000).as_deref(), Some("ann"));
        assert_eq!(name_of(passwd, 1), None);
    }
}
