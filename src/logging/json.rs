//! Log events as JSON lines. Written here because the JSON formatter of tracing-subscriber takes nearly three times as
//! long, for a line per request, and does not escape characters that a terminal acts on.

use std::fmt::{self, Debug, Display, Formatter, Write};

use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::logging::is_unprintable;

/// `{"timestamp":…,"level":…,"target":…,"message":…` and the other fields of the event.
pub(super) struct Json;

impl<S, N> FormatEvent<S, N> for Json
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let metadata = event.metadata();
        writer.write_str(r#"{"timestamp":""#)?;
        SystemTime.format_time(&mut writer)?;
        let (level, target) = (metadata.level().as_str(), metadata.target());
        write!(writer, r#"","level":"{level}","target":"{target}""#)?;
        let mut fields = Fields {
            writer: &mut writer,
            result: Ok(()),
        };
        event.record(&mut fields);
        fields.result?;
        writer.write_str("}\n")
    }
}

struct Fields<'a, 'writer> {
    writer: &'a mut Writer<'writer>,
    result: fmt::Result,
}

impl Fields<'_, '_> {
    /// Field names are identifiers and need no escaping.
    fn write(&mut self, field: &Field, value: impl Display) {
        if self.result.is_ok() {
            self.result = write!(self.writer, ",\"{}\":{value}", field.name());
        }
    }
}

impl Visit for Fields<'_, '_> {
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.write(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.write(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.write(field, value);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.write(field, JsonString(value));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.write(field, JsonString(&format!("{value:?}")));
    }
}

/// A JSON string in which characters that a terminal or a viewer would act on are escaped.
struct JsonString<'a>(&'a str);

impl Display for JsonString<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let is_plain = |byte: u8| matches!(byte, b' '..=b'~') && byte != b'"' && byte != b'\\';
        if self.0.bytes().all(is_plain) {
            // Not with `write!`, which takes longer, for several strings per request.
            f.write_char('"')?;
            f.write_str(self.0)?;
            return f.write_char('"');
        }
        let json = serde_json::to_string(self.0).map_err(|_| fmt::Error)?;
        for c in json.chars() {
            if is_unprintable(c) {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    write!(f, "\\u{unit:04x}")?;
                }
            } else {
                f.write_char(c)?;
            }
        }
        Ok(())
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
            let line = JsonString(text).to_string();
            assert_eq!(serde_json::from_str::<String>(&line).expect("JSON"), text);
            assert!(!line.chars().any(is_unprintable), "{line:?}");
        }
    }
}
