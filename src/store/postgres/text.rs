//! Every JSON string as text of PostgreSQL, which holds any character but U+0000. What has neither U+0000 nor
//! U+001A, and that is nearly everything, is stored as it is.

use std::borrow::Cow;

/// "Substitute", which it is.
const ESCAPE: char = '\u{1a}';
const NUL: char = '0';
const ITSELF: char = '1';

/// As it is stored.
pub fn stored(text: &str) -> Cow<'_, str> {
    if !text.contains(['\0', ESCAPE]) {
        return Cow::Borrowed(text);
    }
    let mut stored = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        match c {
            '\0' => stored.extend([ESCAPE, NUL]),
            ESCAPE => stored.extend([ESCAPE, ITSELF]),
            c => stored.push(c),
        }
    }
    Cow::Owned(stored)
}

/// What was stored; nothing if that was not written by us.
pub fn original(stored: &str) -> Option<Cow<'_, str>> {
    if !stored.contains(ESCAPE) {
        return Some(Cow::Borrowed(stored));
    }
    let mut text = String::with_capacity(stored.len());
    let mut chars = stored.chars();
    while let Some(c) = chars.next() {
        text.push(match c {
            ESCAPE => match chars.next()? {
                NUL => '\0',
                ITSELF => ESCAPE,
                _ => return None,
            },
            c => c,
        });
    }
    Some(Cow::Owned(text))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_people_write_is_stored_as_it_is() {
        for text in [
            "",
            "Monstera",
            "Ficus \"lyrata\"",
            "C:\\plants",
            "🌱\u{301}",
        ] {
            assert_eq!(stored(text), text);
        }
    }

    proptest! {
        #[test]
        fn every_string_comes_back_and_none_holds_a_nul(text in "[\0\u{1a}01a🌱]*") {
            let stored = stored(&text);
            prop_assert!(!stored.contains('\0'));
            let back = original(&stored);
            prop_assert_eq!(back.as_deref(), Some(&*text));
        }
    }
}
