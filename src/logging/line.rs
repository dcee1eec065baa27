//! A line of the log: JSON, or readable text on a terminal. The access log and `tracing` events are written in the same way.
//! Formatted here because a formatter of tracing-subscriber takes several times as long, for a line per request, and does
//! not escape characters that a terminal acts on.

use std::cell::Cell;
use std::fmt::{Debug, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use jiff::Timestamp;
use tracing::Level;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;

use crate::logging::{OUTPUT, is_unprintable};

/// Room for most lines of the access log.
const CAPACITY: usize = 384;

pub(crate) struct Line {
    text: String,
    is_json: bool,
}

/// A piece of a line that is always the same, in JSON and in text.
#[derive(Clone, Copy)]
pub(crate) struct Piece {
    pub(crate) json: &'static str,
    pub(crate) text: &'static str,
}

/// The name of a field, as it is written before its value.
macro_rules! field_name {
    ($name:literal) => {
        $crate::logging::Piece {
            json: concat!(",\"", $name, "\":"),
            text: concat!(" ", $name, "="),
        }
    };
}
pub(crate) use field_name;

impl Line {
    /// `rest` follows the time. None if lines of this level are not logged.
    pub(crate) fn start(level: Level, rest: Piece) -> Option<Self> {
        let mut line = Self::with_time(level)?;
        line.piece(rest);
        Some(line)
    }

    /// The start of a line of `tracing`.
    pub(super) fn without_message(level: Level, target: &str) -> Option<Self> {
        let mut line = Self::with_time(level)?;
        if line.is_json {
            line.text.push_str(r#","level":""#);
            line.text.push_str(level.as_str());
            line.text.push_str(r#"","target":""#);
            line.text.push_str(target);
            line.text.push('"');
        } else {
            let _ = write!(line.text, " {level:>5}");
        }
        Some(line)
    }

    fn with_time(level: Level) -> Option<Self> {
        if level > LevelFilter::current() {
            return None;
        }
        let is_json = OUTPUT.get()?.is_json;
        let mut text = String::with_capacity(CAPACITY);
        if is_json {
            text.push_str(r#"{"timestamp":""#);
            push_time(&mut text);
            text.push('"');
        } else {
            push_time(&mut text);
        }
        Some(Self { text, is_json })
    }

    /// Text without time and level.
    pub(super) fn readable() -> Self {
        Self {
            text: String::new(),
            is_json: false,
        }
    }

    pub(super) fn into_text(self) -> String {
        self.text.trim_start().to_owned()
    }

    pub(crate) fn text(&mut self, name: Piece, value: &str) {
        self.piece(name);
        self.value(value);
    }

    pub(crate) fn optional_text(&mut self, name: Piece, value: Option<&str>) {
        if let Some(value) = value {
            self.text(name, value);
        }
    }

    /// A text in which nothing needs to be escaped.
    pub(crate) fn plain(&mut self, name: Piece, value: &str) {
        self.piece(name);
        if self.is_json {
            self.text.push('"');
            self.text.push_str(value);
            self.text.push('"');
        } else {
            self.text.push_str(value);
        }
    }

    pub(crate) fn number(&mut self, name: Piece, value: u64) {
        self.piece(name);
        self.text.push_str(itoa::Buffer::new().format(value));
    }

    fn piece(&mut self, piece: Piece) {
        let piece = if self.is_json { piece.json } else { piece.text };
        self.text.push_str(piece);
    }

    fn value(&mut self, value: &str) {
        if self.is_json {
            push_json(&mut self.text, value);
        } else {
            push_printable(&mut self.text, value);
        }
    }

    fn named_text(&mut self, name: &str, value: &str) {
        if name == "message" && !self.is_json {
            self.text.push(' ');
        } else {
            self.name(name);
        }
        self.value(value);
    }

    /// Names are identifiers and need no escaping.
    fn name(&mut self, name: &str) {
        if self.is_json {
            self.text.push_str(",\"");
            self.text.push_str(name);
            self.text.push_str("\":");
        } else {
            self.text.push(' ');
            self.text.push_str(name);
            self.text.push('=');
        }
    }

    pub(crate) fn write(mut self) {
        self.text.push_str(if self.is_json { "}\n" } else { "\n" });
        if let Some(output) = OUTPUT.get() {
            output.buffer.push(self.text.as_bytes());
        }
    }
}

impl Visit for Line {
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.name(field.name());
        self.text.push_str(itoa::Buffer::new().format(value));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.name(field.name());
        self.text.push_str(itoa::Buffer::new().format(value));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.name(field.name());
        self.text.push_str(if value { "true" } else { "false" });
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.named_text(field.name(), value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.named_text(field.name(), &format!("{value:?}"));
    }
}

/// `2026-11-16T12:00:07.123456Z`. The part up to the second is formatted once a second.
fn push_time(text: &mut String) {
    thread_local! {
        static SECOND: Cell<(u64, [u8; 19])> = const { Cell::new((u64::MAX, [0; 19])) };
    }
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let (mut second, mut formatted) = SECOND.get();
    if second != now.as_secs() {
        second = now.as_secs();
        let time = Timestamp::from_second(second.try_into().unwrap_or(i64::MAX));
        let time = time.unwrap_or(Timestamp::MAX).to_string();
        if let Some(whole_seconds) = time.as_bytes().first_chunk() {
            formatted = *whole_seconds;
        }
        SECOND.set((second, formatted));
    }
    text.push_str(str::from_utf8(&formatted).unwrap_or_default());
    let mut micros = now.subsec_micros();
    let mut fraction = *b".000000Z";
    for digit in fraction[1..7].iter_mut().rev() {
        *digit += (micros % 10) as u8;
        micros /= 10;
    }
    text.push_str(str::from_utf8(&fraction).unwrap_or_default());
}

/// Whether a byte needs no escaping in JSON: printable ASCII except `"` and `\`.
const IS_PLAIN: [bool; 256] = {
    let mut is_plain = [false; 256];
    let mut byte = b' ';
    while byte <= b'~' {
        is_plain[byte as usize] = byte != b'"' && byte != b'\\';
        byte += 1;
    }
    is_plain
};

/// A JSON string in which characters that a terminal or a viewer would act on are escaped.
fn push_json(text: &mut String, value: &str) {
    if value.bytes().all(|byte| IS_PLAIN[usize::from(byte)]) {
        text.push('"');
        text.push_str(value);
        text.push('"');
    } else {
        let json = serde_json::to_string(value).expect("a string can be written as JSON");
        push_printable(text, &json);
    }
}

fn push_printable(text: &mut String, value: &str) {
    for c in value.chars() {
        if is_unprintable(c) {
            for unit in c.encode_utf16(&mut [0; 2]) {
                let _ = write!(text, "\\u{unit:04x}");
            }
        } else {
            text.push(c);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_string_is_valid_json_without_unprintable_characters() {
        let mut text: String = ('\0'..='\u{a0}').collect();
        text += "\u{61c}\u{200e}\u{200f}\u{2028}\u{2029}\u{202a}\u{202e}\u{2066}\u{2069}\u{feff}Monstera シダ سرخس 👩\u{200d}🌾";
        for text in ["", "plain", "\"\\", &text] {
            let mut line = String::new();
            push_json(&mut line, text);
            assert_eq!(serde_json::from_str::<String>(&line).expect("JSON"), text);
            assert!(!line.chars().any(is_unprintable), "{line:?}");
        }
    }

    #[test]
    fn a_time_has_microseconds() {
        let mut text = String::new();
        push_time(&mut text);
        assert_eq!(text.len(), "2026-11-16T12:00:07.123456Z".len());
        let time: Timestamp = text.parse().expect("a time");
        assert!(time.duration_until(Timestamp::now()).as_secs() < 60);
    }
}
