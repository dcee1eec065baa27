//! W3C Trace Context: which trace a request belongs to, if its `traceparent` says so without a doubt. It is for the log
//! alone: we make no spans.

use std::ops::Range;

use axum::http::{HeaderMap, HeaderName};

/// The header.
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// `00-` + 32 digits + `-` + 16 digits + `-` + 2 digits.
const LEN: usize = 55;
const TRACE_ID: Range<usize> = 3..35;
const PARENT_ID: Range<usize> = 36..52;

/// The ids of a `traceparent`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceContext([u8; LEN]);

impl TraceContext {
    /// What the header says; none if it is not there, given twice, or not valid.
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        let mut values = headers.get_all(TRACEPARENT).iter();
        let value = values.next()?;
        match values.next() {
            None => Self::parse(value.as_bytes()),
            Some(_) => None,
        }
    }

    fn parse(value: &[u8]) -> Option<Self> {
        let (known, more) = value.split_at_checked(LEN)?;
        let (version, trace_id) = (&known[..2], &known[TRACE_ID]);
        let (parent_id, flags) = (&known[PARENT_ID], &known[53..]);
        let digit = |byte: &u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        let id = |id: &[u8]| id.iter().all(digit) && id.iter().any(|byte| *byte != b'0');
        let valid = [2, 35, 52].iter().all(|at| known[*at] == b'-')
            && version.iter().chain(flags).all(digit)
            && version != b"ff"
            && id(trace_id)
            && id(parent_id)
            // A later version may say more, after another dash.
            && (more.is_empty() || (version != b"00" && more[0] == b'-'));
        valid.then(|| Self(known.try_into().expect("as long as was asked for")))
    }

    /// Of the whole trace.
    pub fn trace_id(&self) -> &str {
        self.part(TRACE_ID)
    }

    /// Of the caller's span.
    pub fn parent_id(&self) -> &str {
        self.part(PARENT_ID)
    }

    fn part(&self, range: Range<usize>) -> &str {
        str::from_utf8(&self.0[range]).expect("hexadecimal digits")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALID: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn ids(value: &str) -> Option<(String, String)> {
        let context = TraceContext::parse(value.as_bytes())?;
        Some((context.trace_id().into(), context.parent_id().into()))
    }

    #[test]
    fn both_ids_are_taken_from_a_valid_header_of_this_or_a_later_version() {
        let expected = (
            "4bf92f3577b34da6a3ce929d0e0e4736".to_owned(),
            "00f067aa0ba902b7".to_owned(),
        );
        assert_eq!(ids(VALID), Some(expected.clone()));
        for later in [
            VALID.replace("00-4", "cc-4"),
            VALID.replace("00-4", "cc-4") + "-what the future brings",
            VALID.replace("00-4", "01-4") + "-",
            VALID.replace("-01", "-ff"),
        ] {
            assert_eq!(ids(&later), Some(expected.clone()), "{later}");
        }
    }

    #[test]
    fn anything_else_is_no_header() {
        let zeros = |len: usize| "0".repeat(len);
        for bad in [
            String::new(),
            "00".to_owned(),
            VALID[..54].to_owned(),
            VALID.to_owned() + "-00",
            VALID.to_owned() + "0",
            VALID.replace("00-4", "ff-4"),
            VALID.replace("00-4", "0X-4"),
            VALID.replace("00-4", "01-4") + "0",
            VALID.to_uppercase(),
            VALID.replace("4bf9", "4BF9"),
            VALID.replace("-01", "-0g"),
            VALID.replace("-01", "--1"),
            VALID.replace("4736-00", "473600-"),
            VALID.replacen('-', "_", 1),
            VALID.replace("4bf92f3577b34da6a3ce929d0e0e4736", &zeros(32)),
            VALID.replace("00f067aa0ba902b7", &zeros(16)),
            VALID.replace("4bf9", "4bé"),
        ] {
            assert_eq!(ids(&bad), None, "{bad}");
        }
    }

    #[test]
    fn two_headers_are_none() {
        let mut headers = HeaderMap::new();
        headers.append(TRACEPARENT, VALID.parse().expect("a value"));
        assert!(TraceContext::of(&headers).is_some());
        headers.append(TRACEPARENT, VALID.parse().expect("a value"));
        assert_eq!(TraceContext::of(&headers), None);
    }
}
