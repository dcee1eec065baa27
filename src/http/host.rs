//! Rejects requests whose host is not certain.

use hyper::header::{HOST, HeaderValue};
use hyper::{Request, Version};
use memchr::memchr;

use crate::http::error::{ApiError, ErrorKind};

/// HTTP/2 has `:authority` in place of the `Host` header, or both.
pub(super) fn check_host<B>(request: &Request<B>) -> Result<(), ApiError> {
    let reject = |message| Err(ApiError::new(ErrorKind::MalformedRequest, message));
    let mut hosts = request.headers().get_all(HOST).iter();
    let host = hosts.next().map(HeaderValue::as_bytes);
    if hosts.next().is_some() {
        return reject("The Host header is given more than once; send one.");
    }
    let authority = request.uri().authority();
    match host {
        None if request.version() == Version::HTTP_11 => return reject("Send a Host header."),
        None if request.version() == Version::HTTP_2 && authority.is_none() => {
            return reject("Send an :authority.");
        }
        None if authority.is_some_and(|host| !is_host(host.as_str().as_bytes())) => {
            return reject("The :authority is malformed.");
        }
        Some(host) if !is_host(host) => return reject("The Host header is malformed."),
        _ => {}
    }
    // A target such as http://plants.example/plants has a host of its own.
    if let (Some(target), Some(host)) = (authority, host)
        && !target.as_str().as_bytes().eq_ignore_ascii_case(host)
    {
        return reject("The host of the request target is not that of the Host header.");
    }
    Ok(())
}

/// A name or an address, with or without a port. The characters are those of RFC 3986.
fn is_host(host: &[u8]) -> bool {
    const IS_ALLOWED: [bool; 256] = {
        let mut is_allowed = [false; 256];
        let mut byte = b'!';
        while byte <= b'~' {
            is_allowed[byte as usize] = byte.is_ascii_alphanumeric()
                || matches!(byte, b'!' | b'$'..=b'.' | b':' | b';' | b'=' | b'_' | b'~');
            byte += 1;
        }
        is_allowed
    };
    let (name, port) = match host {
        // An IPv6 address.
        [b'[', rest @ ..] => match memchr(b']', rest) {
            Some(end) => (&rest[..end], &rest[end + 1..]),
            None => return false,
        },
        _ => host.split_at(memchr(b':', host).unwrap_or(host.len())),
    };
    let is_port = match port {
        [] => true,
        [b':', digits @ ..] => digits.iter().all(u8::is_ascii_digit),
        _ => false,
    };
    !name.is_empty() && is_port && name.iter().all(|byte| IS_ALLOWED[usize::from(*byte)])
}
