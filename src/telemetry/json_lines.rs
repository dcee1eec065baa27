//! An event as one line of JSON. The formatter that comes with tracing-subscriber takes nearly
//! three times as long for it, and every request has such a line.

use std::fmt::{self, Debug};

use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// `{"timestamp":…,"level":…,"target":…,` and the fields of the event as they are.
pub(super) struct JsonLines;

impl<S, N> FormatEvent<S, N> for JsonLines
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
        writer.write_str(r#"","level":""#)?;
        writer.write_str(metadata.level().as_str())?;
        writer.write_str(r#"","target":"#)?;
        write_string(&mut writer, metadata.target())?;
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
    fn field(&mut self, field: &Field, write: impl FnOnce(&mut Writer<'_>) -> fmt::Result) {
        if self.result.is_ok() {
            self.result = self.writer.write_char(',');
        }
        // The name of a field is an identifier of ours.
        if self.result.is_ok() {
            self.result = write!(self.writer, "\"{}\":", field.name());
        }
        if self.result.is_ok() {
            self.result = write(self.writer);
        }
    }
}

impl Visit for Fields<'_, '_> {
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.field(field, |writer| write!(writer, "{value}"));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.field(field, |writer| write!(writer, "{value}"));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.field(field, |writer| write!(writer, "{value}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.field(field, |writer| write_string(writer, value));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.field(field, |writer| write_string(writer, &format!("{value:?}")));
    }
}

fn write_string(writer: &mut Writer<'_>, text: &str) -> fmt::Result {
    if text
        .bytes()
        .any(|byte| byte < b' ' || byte == b'"' || byte == b'\\')
    {
        let json = serde_json::to_string(text).map_err(|_| fmt::Error)?;
        return writer.write_str(&json);
    }
    writer.write_char('"')?;
    writer.write_str(text)?;
    writer.write_char('"')
}
