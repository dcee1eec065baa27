//! What a plant is: a request body becomes a `NewPlant` exactly, or an `Invalid` that names every
//! problem of it.

use std::fmt;

use serde::Serialize;
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

/// A plant with the id it is to be stored under: the body of `POST /plants`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewPlant {
    /// Identification number of the plant.
    pub id: i64,
    /// Everything else about it.
    pub plant: Plant,
}

/// A plant as the service answers it: without its id.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Plant {
    /// The name of the plant: any Unicode string, kept exactly.
    pub name: String,
    /// Tag to specify the type.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
}

/// Why a body is no `NewPlant`. `Display` never repeats a value of the body.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Invalid {
    /// Not JSON at all; the reason has a line and a column.
    #[error("{0}")]
    NotJson(String),
    /// JSON, but not a `NewPlant`; every problem of it.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    NotAPlant(Vec<Problem>),
}

/// One thing that is wrong with a plant.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Problem {
    /// The body is some other JSON value.
    #[error("expected an object, found {0}")]
    NotAnObject(&'static str),
    /// A required member is not there.
    #[error("{0}: missing")]
    Missing(&'static str),
    /// A member appears more than once.
    #[error("{0}: given more than once")]
    Repeated(&'static str),
    /// A member is of another JSON type.
    #[error("{0}: expected {1}, found {2}")]
    WrongType(&'static str, &'static str, &'static str),
    /// A number that is not whole.
    #[error("{0}: expected an integer, found a number with a fraction")]
    Fraction(&'static str),
    /// A whole number that int64 does not hold.
    #[error("{0}: outside the range of int64")]
    OutOfRange(&'static str),
    /// An escape such as `\ud800` that stands for no character.
    #[error("{0}: contains an unpaired surrogate")]
    LoneSurrogate(&'static str),
}

impl NewPlant {
    /// Decodes a request body.
    pub fn from_json(body: &[u8]) -> Result<Self, Invalid> {
        // serde_json does not look at the bytes of strings that it skips, so UTF-8 is checked up
        // front.
        let text = std::str::from_utf8(body).map_err(|error| {
            let (line, column) = line_and_column(&body[..error.valid_up_to()]);
            Invalid::NotJson(format!("invalid UTF-8 at line {line} column {column}"))
        })?;
        let not_json = |error: serde_json::Error| Invalid::NotJson(error.to_string());

        let first = text.trim_start_matches([' ', '\t', '\n', '\r']);
        if !first.starts_with('{') {
            serde_json::from_str::<IgnoredAny>(text).map_err(not_json)?;
            return Err(Invalid::NotAPlant(vec![Problem::NotAnObject(kind(first))]));
        }
        let members: Members<'_> = serde_json::from_str(text).map_err(not_json)?;
        members.into_plant()
    }

    /// Decodes a row of a table, by the same rules: its cells are text, and the id one that would be a number in JSON.
    pub fn from_cells(
        id: Option<&str>,
        name: Option<String>,
        tag: Option<String>,
    ) -> Result<Self, Invalid> {
        let id = match id.map(str::trim) {
            None => Err(Problem::Missing("id")),
            Some(cell) if serde_json::from_str::<&RawValue>(cell).is_ok() => integer("id", cell),
            Some(_) => Err(Problem::WrongType("id", "an integer", "text")),
        };
        match (id, name) {
            (Ok(id), Some(name)) => Ok(Self {
                id,
                plant: Plant { name, tag },
            }),
            (id, name) => {
                let name = name.ok_or(Problem::Missing("name"));
                let problems = [id.err(), name.err()];
                Err(Invalid::NotAPlant(problems.into_iter().flatten().collect()))
            }
        }
    }
}

/// The members we know, still as JSON text: what they mean is decided once all of the body is
/// known to be JSON.
#[derive(Default)]
struct Members<'a> {
    id: Member<'a>,
    name: Member<'a>,
    tag: Member<'a>,
}

#[derive(Default)]
struct Member<'a> {
    value: Option<&'a RawValue>,
    repeated: bool,
}

impl Members<'_> {
    fn into_plant(self) -> Result<NewPlant, Invalid> {
        let mut problems = Vec::new();
        let id = self.id.required("id", integer, &mut problems);
        let name = self.name.required("name", string, &mut problems);
        let tag = self.tag.optional("tag", string, &mut problems);
        match (id, name) {
            (Some(id), Some(name)) if problems.is_empty() => Ok(NewPlant {
                id,
                plant: Plant { name, tag },
            }),
            _ => Err(Invalid::NotAPlant(problems)),
        }
    }
}

/// Reads the JSON text of one member.
type Reader<T> = fn(&'static str, &str) -> Result<T, Problem>;

impl Member<'_> {
    fn required<T>(
        &self,
        member: &'static str,
        read: Reader<T>,
        problems: &mut Vec<Problem>,
    ) -> Option<T> {
        if self.value.is_none() {
            problems.push(Problem::Missing(member));
        }
        self.optional(member, read, problems)
    }

    fn optional<T>(
        &self,
        member: &'static str,
        read: Reader<T>,
        problems: &mut Vec<Problem>,
    ) -> Option<T> {
        if self.repeated {
            problems.push(Problem::Repeated(member));
        }
        read(member, self.value?.get())
            .map_err(|problem| problems.push(problem))
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
            let member = match &*unescaped(key.get()) {
                "id" => &mut members.id,
                "name" => &mut members.name,
                "tag" => &mut members.tag,
                _ => {
                    let _: IgnoredAny = map.next_value()?;
                    continue;
                }
            };
            let value: &RawValue = map.next_value()?;
            if member.value.is_some() {
                member.repeated = true;
            } else {
                member.value = Some(value);
            }
        }
        Ok(members)
    }
}

/// The member name that a JSON string spells. One that is no Unicode string is none of ours.
fn unescaped(key: &str) -> std::borrow::Cow<'_, str> {
    if key.contains('\\') {
        serde_json::from_str::<String>(key)
            .unwrap_or_default()
            .into()
    } else {
        key[1..key.len() - 1].into()
    }
}

fn string(member: &'static str, json: &str) -> Result<String, Problem> {
    if !json.starts_with('"') {
        return Err(Problem::WrongType(member, "a string", kind(json)));
    }
    // The text was found to be JSON already, so this is all that can be wrong with a string.
    serde_json::from_str(json).map_err(|_: serde_json::Error| Problem::LoneSurrogate(member))
}

/// Reads a JSON number as int64, exactly: `1.0`, `1e3` and `-0` are integers, and no digit takes a
/// detour through f64.
fn integer(member: &'static str, json: &str) -> Result<i64, Problem> {
    if !json.starts_with(|first: char| first == '-' || first.is_ascii_digit()) {
        return Err(Problem::WrongType(member, "an integer", kind(json)));
    }
    if let Ok(plain) = json.parse() {
        return Ok(plain);
    }

    // The number is `digits` × 10^`exponent`, `digits` without zeros at either end.
    let (mantissa, exponent) = json.split_once(['e', 'E']).unwrap_or((json, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let (negative, whole) = match whole.strip_prefix('-') {
        Some(whole) => (true, whole),
        None => (false, whole),
    };
    let all_digits = [whole, fraction].concat();
    let digits = all_digits.trim_start_matches('0');
    let significant = digits.trim_end_matches('0');
    if significant.is_empty() {
        return Ok(0);
    }
    let trailing_zeros = length(digits) - length(significant);
    let exponent = saturating_exponent(exponent) - length(fraction) + trailing_zeros;

    if exponent < 0 {
        return Err(Problem::Fraction(member));
    }
    let out_of_range = || Problem::OutOfRange(member);
    // int64 has at most 19 digits, and 19 digits always fit in i128.
    if length(significant) + exponent > 19 {
        return Err(out_of_range());
    }
    let magnitude: i128 = significant.parse().map_err(|_| out_of_range())?;
    let scale = 10_i128.pow(u32::try_from(exponent).map_err(|_| out_of_range())?);
    let value = magnitude * scale * if negative { -1 } else { 1 };
    i64::try_from(value).map_err(|_| out_of_range())
}

/// An exponent too long for i64 becomes one that no body is long enough to make up for with
/// digits.
fn saturating_exponent(text: &str) -> i64 {
    const HUGE: i64 = 1 << 60;
    text.parse().map_or_else(
        |_| if text.starts_with('-') { -HUGE } else { HUGE },
        |exponent: i64| exponent.clamp(-HUGE, HUGE),
    )
}

fn length(text: &str) -> i64 {
    i64::try_from(text.len()).expect("a string is shorter than i64::MAX")
}

/// Names the kind of a JSON value by its first character.
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

/// Where the byte after `before` stands, counted from 1.
fn line_and_column(before: &[u8]) -> (usize, usize) {
    let line = before.iter().filter(|&&byte| byte == b'\n').count() + 1;
    let column = before
        .iter()
        .rev()
        .take_while(|&&byte| byte != b'\n')
        .count()
        + 1;
    (line, column)
}

#[cfg(test)]
mod tests;
