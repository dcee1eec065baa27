//! Decides what a body is from RFC 8259 and the schema alone: a tree, strings as UTF-16, numbers
//! of any size. Slow and recursive, and nothing like the decoder.

use num_bigint::BigInt;

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    NotJson,
    NotAPlant,
    Plant(i64, String, Option<String>),
}

pub(crate) fn judge(body: &[u8]) -> Verdict {
    let Ok(text) = String::from_utf8(body.to_vec()) else {
        return Verdict::NotJson;
    };
    let mut parser = Parser {
        rest: text.chars().collect::<Vec<_>>().into(),
    };
    match parser.document() {
        None => Verdict::NotJson,
        Some(Json::Object(members)) => plant(&members).unwrap_or(Verdict::NotAPlant),
        Some(_) => Verdict::NotAPlant,
    }
}

fn plant(members: &[(Vec<u16>, Json)]) -> Option<Verdict> {
    let find = |name: &str| {
        let name: Vec<u16> = name.encode_utf16().collect();
        let mut found = members.iter().filter(move |(member, _)| *member == name);
        (found.next().map(|(_, value)| value), found.next().is_some())
    };
    let text = |value: &Json| match value {
        Json::String(units) => String::from_utf16(units).ok(),
        _ => None,
    };
    let (id, name, tag) = (find("id"), find("name"), find("tag"));
    if id.1 || name.1 || tag.1 {
        return None;
    }
    let Json::Number(id) = id.0? else {
        return None;
    };
    let tag = match tag.0 {
        Some(value) => Some(text(value)?),
        None => None,
    };
    Some(Verdict::Plant(integer(id)?, text(name.0?)?, tag))
}

fn integer(number: &str) -> Option<i64> {
    let (mantissa, exponent) = number.split_once(['e', 'E']).unwrap_or((number, "0"));
    let decimals = mantissa
        .split_once('.')
        .map_or(0, |(_, decimals)| decimals.len());
    let mantissa: BigInt = mantissa.replace('.', "").parse().ok()?;
    if mantissa == BigInt::ZERO {
        return Some(0);
    }
    let shift = exponent.parse::<i64>().ok()? - i64::try_from(decimals).ok()?;
    // No body is so long that this could be made up for, and the power would take for ever.
    if shift.unsigned_abs() > 10_000 {
        return None;
    }
    let power = BigInt::from(10).pow(u32::try_from(shift.unsigned_abs()).ok()?);
    let value = if shift >= 0 {
        mantissa * power
    } else if &mantissa % &power == BigInt::ZERO {
        mantissa / power
    } else {
        return None;
    };
    value.try_into().ok()
}

enum Json {
    Literal,
    Number(String),
    String(Vec<u16>),
    Array,
    Object(Vec<(Vec<u16>, Json)>),
}

struct Parser {
    rest: std::collections::VecDeque<char>,
}

impl Parser {
    fn document(&mut self) -> Option<Json> {
        let value = self.value()?;
        self.rest.is_empty().then_some(value)
    }

    fn space(&mut self) {
        while self.rest.front().is_some_and(|c| " \t\n\r".contains(*c)) {
            self.rest.pop_front();
        }
    }

    fn take(&mut self, wanted: char) -> Option<()> {
        (self.rest.front() == Some(&wanted))
            .then(|| self.rest.pop_front())
            .map(drop)
    }

    fn value(&mut self) -> Option<Json> {
        self.space();
        let value = match self.rest.front()? {
            '"' => Json::String(self.string()?),
            '[' => {
                self.list('[', ']', |parser| parser.value().map(drop))?;
                Json::Array
            }
            '{' => Json::Object(self.list('{', '}', |parser| {
                parser.space();
                let name = parser.string()?;
                parser.space();
                parser.take(':')?;
                Some((name, parser.value()?))
            })?),
            't' => self.literal("true")?,
            'f' => self.literal("false")?,
            'n' => self.literal("null")?,
            _ => Json::Number(self.number()?),
        };
        self.space();
        Some(value)
    }

    fn literal(&mut self, word: &str) -> Option<Json> {
        word.chars().try_for_each(|c| self.take(c))?;
        Some(Json::Literal)
    }

    fn list<T>(
        &mut self,
        open: char,
        close: char,
        item: impl Fn(&mut Self) -> Option<T>,
    ) -> Option<Vec<T>> {
        self.take(open)?;
        self.space();
        let mut items = Vec::new();
        if self.take(close).is_some() {
            return Some(items);
        }
        loop {
            items.push(item(self)?);
            self.space();
            if self.take(close).is_some() {
                return Some(items);
            }
            self.take(',')?;
        }
    }

    fn digits(&mut self) -> Option<String> {
        let mut digits = String::new();
        while self.rest.front().is_some_and(char::is_ascii_digit) {
            digits.extend(self.rest.pop_front());
        }
        (!digits.is_empty()).then_some(digits)
    }

    fn number(&mut self) -> Option<String> {
        let mut number = String::new();
        if self.take('-').is_some() {
            number.push('-');
        }
        let whole = self.digits()?;
        if whole.len() > 1 && whole.starts_with('0') {
            return None;
        }
        number += &whole;
        if self.take('.').is_some() {
            number += ".";
            number += &self.digits()?;
        }
        if self.take('e').or_else(|| self.take('E')).is_some() {
            number += "e";
            if self.take('-').is_some() {
                number += "-";
            } else {
                let _ = self.take('+');
            }
            number += &self.digits()?;
        }
        Some(number)
    }

    fn string(&mut self) -> Option<Vec<u16>> {
        self.take('"')?;
        let mut units = Vec::new();
        loop {
            match self.rest.pop_front()? {
                '"' => return Some(units),
                '\\' => units.push(self.escape()?),
                c if c < ' ' => return None,
                c => units.extend_from_slice(c.encode_utf16(&mut [0; 2])),
            }
        }
    }

    fn escape(&mut self) -> Option<u16> {
        let c = match self.rest.pop_front()? {
            c @ ('"' | '\\' | '/') => c,
            'b' => '\u{8}',
            'f' => '\u{c}',
            'n' => '\n',
            'r' => '\r',
            't' => '\t',
            'u' => {
                let hex: String = (0..4).filter_map(|_| self.rest.pop_front()).collect();
                let all_hex = hex.len() == 4 && hex.chars().all(|c| c.is_ascii_hexdigit());
                return all_hex
                    .then(|| u16::from_str_radix(&hex, 16).ok())
                    .flatten();
            }
            _ => return None,
        };
        u16::try_from(u32::from(c)).ok()
    }
}
