//! What a plant is: a request body is decoded exactly into a `NewPlant`, or into an `Invalid` that lists every problem.

use std::borrow::Cow;
use std::fmt;

use serde::Serialize;
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

/// The body of `POST /plants`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewPlant {
    pub id: i64,
    pub plant: Plant,
}

/// The body of the response: a plant without its id.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Plant {
    /// Any Unicode string, stored exactly.
    pub name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
}

/// Why a body is not a `NewPlant`. The message never contains a value of the body.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Invalid {
    /// With line and column.
    #[error("{0}")]
    NotJson(String),
    /// Every problem, separated by semicolons.
    #[error("{0}")]
    NotAPlant(String),
}

impl NewPlant {
    pub fn from_json(body: &[u8]) -> Result<Self, Invalid> {
        // serde_json does not check the bytes of strings that it skips, so UTF-8 is checked first.
        let text = std::str::from_utf8(body).map_err(|error| {
            let (line, column) = line_and_column(&body[..error.valid_up_to()]);
            Invalid::NotJson(format!("invalid UTF-8 at line {line} column {column}"))
        })?;
        let not_json = |error: serde_json::Error| Invalid::NotJson(error.to_string());

        let first = text.trim_start_matches([' ', '\t', '\n', '\r']);
        if !first.starts_with('{') {
            if first.is_empty() {
                return Err(Invalid::NotJson("it is empty".to_owned()));
            }
            serde_json::from_str::<IgnoredAny>(text).map_err(not_json)?;
            let problem = format!("expected an object, found {}", kind(first));
            return Err(Invalid::NotAPlant(problem));
        }
        let Members { id, name, tag } = serde_json::from_str(text).map_err(not_json)?;
        let mut problems = Vec::new();
        let id = id.required("id", integer, &mut problems);
        let name = name.required("name", string, &mut problems);
        let tag = tag.optional("tag", string, &mut problems);
        Self::from_members(id, name, tag, &problems)
    }

    /// Decodes a row of a table by the same rules: a cell has text, that of the id the text of a JSON number.
    pub fn from_cells(
        id: Option<&str>,
        name: Option<String>,
        tag: Option<String>,
    ) -> Result<Self, Invalid> {
        let mut problems = Vec::new();
        let id = match id.map(str::trim) {
            None => Err("missing".to_owned()),
            Some(cell) if serde_json::from_str::<&RawValue>(cell).is_ok() => integer(cell),
            Some(_) => Err("expected an integer, found text".to_owned()),
        };
        let id = id.map_err(|problem| problems.push(format!("id: {problem}")));
        if name.is_none() {
            problems.push("name: missing".to_owned());
        }
        Self::from_members(id.ok(), name, tag, &problems)
    }

    fn from_members(
        id: Option<i64>,
        name: Option<String>,
        tag: Option<String>,
        problems: &[String],
    ) -> Result<Self, Invalid> {
        match (id, name) {
            (Some(id), Some(name)) if problems.is_empty() => Ok(Self {
                id,
                plant: Plant { name, tag },
            }),
            _ => Err(Invalid::NotAPlant(problems.join("; "))),
        }
    }
}

/// The known members as JSON text. They are decoded when all of the body is known to be JSON.
#[derive(Default)]
struct Members<'a> {
    id: Member<'a>,
    name: Member<'a>,
    tag: Member<'a>,
}

#[derive(Default)]
struct Member<'a> {
    value: Option<&'a RawValue>,
    is_repeated: bool,
}

/// Decodes the JSON text of a member, or says what is wrong with it.
type Decoder<T> = fn(&str) -> Result<T, String>;

impl Member<'_> {
    fn required<T>(&self, name: &str, decode: Decoder<T>, problems: &mut Vec<String>) -> Option<T> {
        if self.value.is_none() {
            problems.push(format!("{name}: missing"));
        }
        self.optional(name, decode, problems)
    }

    fn optional<T>(&self, name: &str, decode: Decoder<T>, problems: &mut Vec<String>) -> Option<T> {
        if self.is_repeated {
            problems.push(format!("{name}: given more than once"));
        }
        let value = decode(self.value?.get());
        value
            .map_err(|problem| problems.push(format!("{name}: {problem}")))
            .ok()
    }
}

impl<'de> Deserialize<'de> for Members<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(MembersVisitor)
    }
}

struct MembersVisitor;

impl<'de> Visitor<'de> for MembersVisitor {
    type Value = Members<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut members = Members::default();
        while let Some(key) = map.next_key::<&RawValue>()? {
            // A name with an unpaired surrogate becomes the empty one, which is unknown as well.
            let member = match &*unescaped(key.get()).unwrap_or_default() {
                "id" => &mut members.id,
                "name" => &mut members.name,
                "tag" => &mut members.tag,
                _ => {
                    let _: IgnoredAny = map.next_value()?;
                    continue;
                }
            };
            let value: &RawValue = map.next_value()?;
            member.is_repeated = member.value.is_some();
            member.value.get_or_insert(value);
        }
        Ok(members)
    }
}

/// The text of a valid JSON string. None if it contains an unpaired surrogate: nothing else can be wrong with it.
fn unescaped(json: &str) -> Option<Cow<'_, str>> {
    if json.contains('\\') {
        serde_json::from_str(json).ok().map(Cow::Owned)
    } else {
        Some(json[1..json.len() - 1].into())
    }
}

fn string(json: &str) -> Result<String, String> {
    if !json.starts_with('"') {
        return Err(format!("expected a string, found {}", kind(json)));
    }
    let text = unescaped(json).ok_or("contains an unpaired surrogate")?;
    Ok(text.into_owned())
}

/// Decodes a JSON number as int64 exactly, without a conversion to f64: `1.0`, `1e3` and `-0` are integers.
fn integer(json: &str) -> Result<i64, String> {
    if !json.starts_with(|first: char| first == '-' || first.is_ascii_digit()) {
        return Err(format!("expected an integer, found {}", kind(json)));
    }
    if let Ok(plain) = json.parse() {
        return Ok(plain);
    }

    // The number is `significant` × 10^`exponent`, where `significant` has no zeros at either end.
    let (mantissa, exponent) = json.split_once(['e', 'E']).unwrap_or((json, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let digits = [whole.trim_start_matches('-'), fraction].concat();
    let digits = digits.trim_start_matches('0');
    let significant = digits.trim_end_matches('0');
    if significant.is_empty() {
        return Ok(0);
    }
    let trailing_zeros = length(digits) - length(significant);
    let exponent = saturating_exponent(exponent) - length(fraction) + trailing_zeros;
    if exponent < 0 {
        return Err("expected an integer, found a number with a fraction".to_owned());
    }
    let zeros = usize::try_from(exponent).unwrap_or(usize::MAX);
    let sign = if json.starts_with('-') { "-" } else { "" };
    // int64 has at most 19 digits.
    let plain = (significant.len().saturating_add(zeros) <= 19)
        .then(|| format!("{sign}{significant}{}", "0".repeat(zeros)));
    let integer = plain.and_then(|plain| plain.parse().ok());
    integer.ok_or_else(|| "outside the range of int64".to_owned())
}

/// An exponent that i64 cannot hold becomes one that the digits of no body can compensate.
fn saturating_exponent(text: &str) -> i64 {
    const HUGE: i64 = 1 << 60;
    match text.parse::<i64>() {
        Ok(exponent) => exponent.clamp(-HUGE, HUGE),
        Err(_) if text.starts_with('-') => -HUGE,
        Err(_) => HUGE,
    }
}

fn length(text: &str) -> i64 {
    i64::try_from(text.len()).expect("a string is shorter than i64::MAX")
}

/// The type of a JSON value, by its first character.
fn kind(json: &str) -> &'static str {
    match json.as_bytes().first() {
        Some(b'"') => "a string",
        Some(b'{') => "an object",
        Some(b'[') => "an array",
        Some(b't' | b'f') => "a boolean",
        Some(b'n') => "null",
        _ => "a number",
    }
}

/// The position of the byte after `before`, counted from 1.
fn line_and_column(before: &[u8]) -> (usize, usize) {
    let lines = before.split(|&byte| byte == b'\n');
    let column = lines.clone().next_back().map_or(0, <[u8]>::len) + 1;
    (lines.count(), column)
}

#[cfg(any(test, feature = "fuzzing"))]
#[path = "plant/tests/oracle.rs"]
pub(crate) mod oracle;

#[cfg(test)]
mod tests;
