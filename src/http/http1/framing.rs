//! Where a request ends. Hyper accepts framing that others read differently: lines that end without CR, `Content-Length` next
//! to `Transfer-Encoding`, a repeated one of either. If a proxy in front disagrees with the service about where a request
//! ends, a client can hide a second request in the first one; so all of this is rejected here, before hyper reads it.

use memchr::memchr;

use crate::http::error::ErrorKind;

/// Follows the bytes of a connection, up to a request with a chunked body, which is the last one of its connection.
#[derive(Default)]
pub(super) struct Framing {
    position: Position,
    /// The start of a line whose end has not arrived. Hyper limits its length.
    line: Vec<u8>,
    content_length: Option<u64>,
    is_chunked: bool,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Position {
    /// Empty lines before a request are ignored.
    #[default]
    RequestLine,
    Header,
    /// So much of the body is still to come.
    Body(u64),
    Chunks,
}

/// Bytes that are not a valid request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rejection {
    pub(super) kind: ErrorKind,
    pub(super) message: &'static str,
}

impl Framing {
    /// The next bytes of the connection. If they are not valid, returns how many of them belong to what came before.
    pub(super) fn follow(&mut self, bytes: &[u8]) -> Result<(), (usize, Rejection)> {
        let mut rest = bytes;
        while !rest.is_empty() {
            match &mut self.position {
                Position::Chunks => break,
                Position::Body(left) => {
                    let here =
                        usize::try_from(*left).map_or(rest.len(), |left| left.min(rest.len()));
                    *left -= here as u64;
                    rest = &rest[here..];
                    if *left == 0 {
                        self.position = Position::RequestLine;
                    }
                }
                Position::RequestLine | Position::Header => {
                    let Some(end) = memchr(b'\n', rest) else {
                        self.line.extend_from_slice(rest);
                        break;
                    };
                    let (line, after) = (&rest[..end], &rest[end + 1..]);
                    let checked = if self.line.is_empty() {
                        self.follow_line(line)
                    } else {
                        let mut whole = std::mem::take(&mut self.line);
                        whole.extend_from_slice(line);
                        self.follow_line(&whole)
                    };
                    checked.map_err(|rejection| (bytes.len() - rest.len(), rejection))?;
                    rest = after;
                }
            }
        }
        Ok(())
    }

    fn follow_line(&mut self, line: &[u8]) -> Result<(), Rejection> {
        let [line @ .., b'\r'] = line else {
            return Err(malformed(
                "A line of the headers ends without a carriage return.",
            ));
        };
        match (self.position, line) {
            (Position::RequestLine, []) => {}
            // Hyper would close the connection without a response.
            (Position::RequestLine, [b'P', b'R', b'I', b' ', ..]) => {
                return Err(malformed("HTTP/2 needs TLS with ALPN; use HTTP/1.1."));
            }
            (Position::RequestLine, _) => self.position = Position::Header,
            (_, []) => {
                self.position = match self.content_length.take() {
                    _ if self.is_chunked => Position::Chunks,
                    Some(length @ 1..) => Position::Body(length),
                    _ => Position::RequestLine,
                };
            }
            (_, [b'c' | b'C' | b't' | b'T', ..]) => self.follow_length(line)?,
            _ => {}
        }
        Ok(())
    }

    fn follow_length(&mut self, line: &[u8]) -> Result<(), Rejection> {
        if let Some(length) = value(line, b"content-length:") {
            if self.content_length.is_some() {
                return Err(malformed(
                    "The Content-Length header is given more than once; send one.",
                ));
            }
            self.content_length = Some(parse_length(length)?);
        } else if let Some(encoding) = value(line, b"transfer-encoding:") {
            if self.is_chunked || !encoding.eq_ignore_ascii_case(b"chunked") {
                return Err(malformed(
                    "The only Transfer-Encoding is chunked, given once.",
                ));
            }
            self.is_chunked = true;
        }
        if self.is_chunked && self.content_length.is_some() {
            return Err(malformed(
                "Send Content-Length or Transfer-Encoding, not both.",
            ));
        }
        Ok(())
    }
}

fn malformed(message: &'static str) -> Rejection {
    Rejection {
        kind: ErrorKind::MalformedRequest,
        message,
    }
}

/// The value of a header of this name.
fn value<'a>(line: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let (start, mut value) = line.split_at_checked(name.len())?;
    // Most lines differ in the colon already.
    if start.last() != name.last() || !start.eq_ignore_ascii_case(name) {
        return None;
    }
    while let [b' ' | b'\t', rest @ ..] | [rest @ .., b' ' | b'\t'] = value {
        value = rest;
    }
    Some(value)
}

fn parse_length(digits: &[u8]) -> Result<u64, Rejection> {
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return Err(malformed("The Content-Length is not a number."));
    }
    let length = digits.iter().try_fold(0_u64, |length, digit| {
        let digit = u64::from(digit - b'0');
        length.checked_mul(10)?.checked_add(digit)
    });
    // Hyper rejects the highest ones too, for the wrong reason.
    length
        .filter(|length| *length < u64::MAX / 2)
        .ok_or(Rejection {
            kind: ErrorKind::BodyTooLarge,
            message: "The Content-Length is larger than any limit.",
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    const POST: &str = "POST /plants HTTP/1.1\r\nHost: x\r\n";

    /// The number of bytes that are followed, whole and one at a time.
    fn follow(text: &str) -> Result<bool, (usize, ErrorKind)> {
        let mut whole = Framing::default();
        let result = whole.follow(text.as_bytes());
        let mut by_byte = Framing::default();
        let mut bytes = text.as_bytes().chunks(1);
        let is_rejected = bytes.any(|byte| by_byte.follow(byte).is_err());
        assert_eq!(is_rejected, result.is_err(), "{text:?}");
        match result {
            Ok(()) => {
                assert!(whole.position == by_byte.position, "{text:?}");
                Ok(whole.position == Position::Chunks)
            }
            Err((at, rejection)) => Err((at, rejection.kind)),
        }
    }

    #[test]
    fn requests_are_followed_from_one_to_the_next() {
        let with_body = format!("{POST}content-LENGTH:  3 \r\n\r\n\n\n\n");
        let chunked = format!("{POST}Transfer-Encoding: Chunked\r\n\r\n1\n");
        assert_eq!(follow(&with_body), Ok(false));
        assert_eq!(
            follow(&format!("{with_body}\r\n{with_body}{POST}\r\n")),
            Ok(false)
        );
        assert_eq!(follow(&format!("{with_body}{chunked}")), Ok(true));
        assert_eq!(
            follow(&format!("{POST}Content-Lengthy: x\r\nTrailer: x\r\n\r\n")),
            Ok(false)
        );
    }

    #[test]
    fn what_others_may_read_differently_is_rejected_at_the_line() {
        for bad in [
            "X: y\n",
            "\n",
            "Content-Length: 3\r\nContent-Length: 3\r\n",
            "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n",
            "Transfer-Encoding: chunked\r\nContent-Length: 3\r\n",
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
            "Transfer-Encoding: gzip, chunked\r\n",
            "Transfer-Encoding: chunked, chunked\r\n",
            "Transfer-Encoding: \u{b}chunked\r\n",
            "Content-Length: +3\r\n",
            "Content-Length: 3, 3\r\n",
            "Content-Length: 0x3\r\n",
            "Content-Length:\r\n",
        ] {
            let (at, kind) = follow(&format!("{POST}{bad}")).expect_err(bad);
            assert_eq!(kind, ErrorKind::MalformedRequest, "{bad:?}");
            let last_line = bad.trim_end().rfind('\n').map_or(0, |end| end + 1);
            assert_eq!(at, POST.len() + last_line, "{bad:?}");
        }
        for large in [
            "18446744073709551615",
            "9223372036854775807",
            &"9".repeat(99),
        ] {
            let (_, kind) = follow(&format!("{POST}Content-Length: {large}\r\n")).expect_err(large);
            assert_eq!(kind, ErrorKind::BodyTooLarge, "{large}");
        }
    }
}
