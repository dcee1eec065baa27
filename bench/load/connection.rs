//! One connection: sends a request and parses its response.

use std::io::{self, ErrorKind, Read};
use std::net::SocketAddr;
use std::time::Instant;

use anyhow::Context;
use mio::net::TcpStream;
use mio::{Interest, Poll, Token};

/// Waits for at most one response.
pub struct Connection {
    pub stream: TcpStream,
    /// The received part of the response.
    pub input: Vec<u8>,
    /// The scheduled send time of the request.
    pub due: Instant,
    pub open: bool,
}

impl Connection {
    pub fn open(address: SocketAddr, poll: &Poll, token: Token) -> anyhow::Result<Self> {
        // One after the other, so that no server's backlog overflows.
        let stream = std::net::TcpStream::connect(address).context("connect")?;
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        let mut stream = TcpStream::from_std(stream);
        poll.registry()
            .register(&mut stream, token, Interest::READABLE)?;
        Ok(Self {
            stream,
            input: Vec::with_capacity(4096),
            due: Instant::now(),
            open: true,
        })
    }

    /// The status of the response, once it is complete.
    pub fn receive(&mut self) -> io::Result<Option<u16>> {
        let mut buffer = [0; 4096];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(len) => self.input.extend_from_slice(&buffer[..len]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error),
            }
            if let Some(status) = complete_response(&self.input) {
                return Ok(Some(status));
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
