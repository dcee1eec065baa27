//! Any text on a terminal: what would move the cursor, hide itself or turn the line around is shown as an escape, and
//! widths are columns, not characters.

use unicode_width::UnicodeWidthStr;

use crate::telemetry::is_unprintable;

/// What stands for the rest of a text that was cut.
const CUT: char = '…';

/// Shown on one line, as it is but for what does not print. No two texts look the same.
pub(super) fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if c == '\\' || c.is_control() {
            shown.extend(c.escape_debug());
        } else if is_unprintable(c) {
            shown.extend(c.escape_unicode());
        } else {
            shown.push(c);
        }
    }
    shown
}

/// In columns.
pub(super) fn width(text: &str) -> usize {
    text.width()
}

/// Cut to so many columns.
pub(super) fn cut(text: &str, columns: usize) -> String {
    // Whatever is longer than this in characters is wider, or has more signs on top of each other than anybody reads.
    let near = text.char_indices().nth(columns.saturating_mul(4));
    let near = near.map_or(text, |(end, _)| &text[..end]);
    if near.len() == text.len() && width(text) <= columns {
        return text.to_owned();
    }
    let ends = near.char_indices().map(|(end, _)| end);
    let fits = |end: &usize| width(&near[..*end]) < columns;
    let end = ends.take_while(fits).last().unwrap_or_default();
    format!("{}{CUT}", &near[..end])
}

/// With spaces up to so many columns.
pub(super) fn padded(text: &str, columns: usize) -> String {
    let spaces = columns.saturating_sub(width(text));
    format!("{text}{:spaces$}", "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_people_write_is_shown_as_it_is() {
        for text in ["", "Monstera", "シダ", "سرخس", "fougère", "👩‍🌾", "a b"] {
            assert_eq!(printable(text), text);
        }
    }

    #[test]
    fn what_does_not_print_is_shown_as_an_escape() {
        for (text, shown) in [
            ("a\nb", r"a\nb"),
            ("a\\nb", r"a\\nb"),
            ("\0\t\r", r"\0\t\r"),
            ("\u{1b}[31mred", r"\u{1b}[31mred"),
            ("\u{9b}31m", r"\u{9b}31m"),
            ("\u{202e}nref", r"\u{202e}nref"),
            ("\u{2066}a\u{2069}", r"\u{2066}a\u{2069}"),
            ("a\u{2028}b", r"a\u{2028}b"),
            ("\u{feff}a\u{200b}", r"\u{feff}a\u{200b}"),
        ] {
            assert_eq!(printable(text), shown);
        }
    }

    #[test]
    fn a_cut_is_as_wide_as_it_may_be() {
        for (text, columns, expected) in [
            ("Monstera", 8, "Monstera"),
            ("Monstera", 7, "Monste…"),
            ("Monstera", 1, "…"),
            ("シダシダ", 8, "シダシダ"),
            ("シダシダ", 7, "シダシ…"),
            ("シダシダ", 6, "シダ…"),
            ("e\u{301}e\u{301}e\u{301}", 3, "e\u{301}e\u{301}e\u{301}"),
            ("e\u{301}e\u{301}e\u{301}", 2, "e\u{301}…"),
        ] {
            let cut = cut(text, columns);
            assert_eq!(cut, expected);
            assert!(width(&cut) <= columns);
        }
        let marks = "\u{301}".repeat(1_000_000);
        assert!(cut(&marks, 10).chars().count() <= 41);
        assert!(width(&cut(&"x".repeat(1_000_000), 10)) == 10);
    }

    #[test]
    fn wide_characters_are_padded_by_columns() {
        assert_eq!(padded("シダ", 6), "シダ  ");
        assert_eq!(padded("fern", 6), "fern  ");
        assert_eq!(padded("fern", 2), "fern");
    }
}
