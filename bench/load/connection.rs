//! One connection to the server: HTTP/1.1 with one request at a time, or HTTP/2 with several.

use std::io::{self, ErrorKind};

use mio::{Poll, Token};

use crate::Settings;
use crate::http2::Http2;
use crate::requests::Request;
use crate::transport::{Tls, Transport};

pub struct Connection {
    transport: Transport,
    protocol: Protocol,
    pub open: bool,
}

enum Protocol {
    /// The received part of the response.
    Http1(Vec<u8>),
    Http2(Http2),
}

/// A complete response.
pub struct Response {
    /// The request of the connection that it belongs to: always 0 for HTTP/1.1.
    pub slot: usize,
    pub status: u16,
    /// As it was received, if the status is not the expected one.
    pub unexpected: Option<String>,
}

impl Connection {
    pub fn open(
        settings: &Settings,
        tls: Option<&Tls>,
        poll: &Poll,
        token: Token,
    ) -> anyhow::Result<Self> {
        let transport = Transport::connect(settings.address, tls, poll, token)?;
        let mut connection = Self {
            transport,
            protocol: match settings.streams {
                Some(_) => Protocol::Http2(Http2::new()),
                None => Protocol::Http1(Vec::with_capacity(4096)),
            },
            open: true,
        };
        connection.flush()?;
        Ok(connection)
    }

    /// Sends a request. With HTTP/2, several of them are sent with one `flush`.
    pub fn send(&mut self, slot: usize, request: &mut Request<'_>) -> io::Result<()> {
        match &mut self.protocol {
            Protocol::Http1(_) => self.transport.write(request.as_http1()),
            Protocol::Http2(http2) => {
                http2.send(slot, request);
                Ok(())
            }
        }
    }

    pub fn flush(&mut self) -> io::Result<()> {
        if let Protocol::Http2(http2) = &mut self.protocol {
            let output = http2.output();
            self.transport.write(output)?;
            output.clear();
        }
        Ok(())
    }

    /// Reads what has arrived, and appends the responses that are complete.
    pub fn receive(&mut self, expect: u16, responses: &mut Vec<Response>) -> io::Result<()> {
        self.transport.send_rest()?;
        match &mut self.protocol {
            Protocol::Http1(input) => loop {
                if !self.transport.read(input)? {
                    return Ok(());
                }
                let Some(status) = complete_response(input) else {
                    continue;
                };
                let text = || String::from_utf8_lossy(input).into_owned();
                let unexpected = (status != expect).then(text);
                input.clear();
                responses.push(Response {
                    slot: 0,
                    status,
                    unexpected,
                });
                return Ok(());
            },
            Protocol::Http2(http2) => {
                while self.transport.read(http2.input())? {
                    http2.receive(expect, responses)?;
                }
                self.flush()
            }
        }
    }
}

/// The status of a complete response.
fn complete_response(input: &[u8]) -> Option<u16> {
    let head_len = 4 + input.windows(4).position(|bytes| bytes == b"\r\n\r\n")?;
    let (head, body) = input.split_at(head_len);
    let status = std::str::from_utf8(head.get(9..12)?).ok()?.parse().ok()?;
    let header = |name: &str| {
        let mut lines = head.split(|byte| *byte == b'\n');
        let line = lines.find(|line| {
            line.get(..name.len())
                .is_some_and(|start| start.eq_ignore_ascii_case(name.as_bytes()))
        })?;
        std::str::from_utf8(&line[name.len()..]).ok()
    };
    let whole = match header("content-length:") {
        Some(len) => body.len() >= len.trim().parse().ok()?,
        None if header("transfer-encoding:").is_some() => body.ends_with(b"0\r\n\r\n"),
        None => true,
    };
    whole.then_some(status)
}

/// The server has closed the connection, or has sent what is not valid.
pub fn broken(reason: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, reason)
}
