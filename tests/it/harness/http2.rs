//! A client that sends single HTTP/2 frames, and a server with TLS for it.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{ClientConnection, StreamOwned};
use tempfile::TempDir;
use tokio_rustls::rustls;

use super::transport::Certificate;
use super::{PATIENCE, Server, directory};

pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

pub const DATA: u8 = 0;
pub const HEADERS: u8 = 1;
pub const PRIORITY: u8 = 2;
pub const RST_STREAM: u8 = 3;
pub const SETTINGS: u8 = 4;
pub const PUSH_PROMISE: u8 = 5;
pub const PING: u8 = 6;
pub const GOAWAY: u8 = 7;
pub const WINDOW_UPDATE: u8 = 8;
pub const CONTINUATION: u8 = 9;

pub const NO_ERROR: u32 = 0;
pub const PROTOCOL_ERROR: u32 = 1;
pub const FLOW_CONTROL_ERROR: u32 = 3;
pub const STREAM_CLOSED: u32 = 5;
pub const FRAME_SIZE_ERROR: u32 = 6;
pub const REFUSED_STREAM: u32 = 7;
pub const CANCEL: u32 = 8;
pub const COMPRESSION_ERROR: u32 = 9;

pub const END_STREAM: u8 = 1;
pub const ACK: u8 = 1;
pub const END_HEADERS: u8 = 4;
pub const PADDED: u8 = 8;
pub const WITH_PRIORITY: u8 = 0x20;

pub struct Frame {
    pub kind: u8,
    pub flags: u8,
    pub stream: u32,
    pub payload: Vec<u8>,
}

/// A server with TLS, and its certificate.
pub struct Tls {
    pub server: Server,
    certificate: Certificate,
    _directory: TempDir,
}

pub fn start(arguments: &[&str]) -> Tls {
    let directory = directory();
    let certificate = Certificate::create(directory.path(), "server", 2);
    let tls = ["--tls-cert", "server.crt", "--tls-key", "server.key"];
    let server = Server::start_in(directory.path(), &[&tls, arguments].concat());
    Tls {
        server,
        certificate,
        _directory: directory,
    }
}

impl Tls {
    /// A connection before its preface.
    pub fn open(&self) -> Connection {
        let config = Arc::new(self.certificate.client_config(&["h2"]));
        let address = self.server.address();
        let client = ClientConnection::new(config, ServerName::from(address.ip()));
        let stream = TcpStream::connect(address).expect("a connection");
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
        stream.set_nodelay(true).expect("a socket");
        Connection(StreamOwned::new(client.expect("a client"), stream))
    }

    /// A connection after the settings of both sides.
    pub fn connect(&self) -> Connection {
        let mut connection = self.open();
        connection.send_bytes(PREFACE);
        connection.send(SETTINGS, 0, 0, &[]);
        connection.wait_for(|frame| frame.kind == SETTINGS && frame.flags == 0);
        connection.send(SETTINGS, ACK, 0, &[]);
        connection
    }

    pub fn add_headers(&self) -> Vec<u8> {
        let token = format!("Bearer {}", self.server.token());
        headers(&[
            (":method", "POST"),
            (":scheme", "https"),
            (":path", "/plants"),
            (":authority", "localhost"),
            ("authorization", &token),
            ("content-type", "application/json"),
        ])
    }

    /// The service works for others.
    pub fn works(&self) {
        let mut connection = self.connect();
        connection.send(HEADERS, END_HEADERS, 1, &self.add_headers());
        connection.send(DATA, END_STREAM, 1, br#"{"id":1,"name":"x"}"#);
        assert_eq!(connection.response(1), (200, r#"{"name":"x"}"#.to_owned()));
    }
}

pub struct Connection(pub StreamOwned<ClientConnection, TcpStream>);

impl Connection {
    pub fn send_bytes(&mut self, bytes: &[u8]) {
        let _ = self.0.write_all(bytes);
    }

    pub fn send(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        self.send_bytes(&frame(kind, flags, stream, payload));
    }

    /// None when the connection is closed.
    pub fn receive(&mut self) -> Option<Frame> {
        let mut header = [0; 9];
        let mut payload = Vec::new();
        let read = self.0.read_exact(&mut header).and_then(|()| {
            let len = u32::from_be_bytes([0, header[0], header[1], header[2]]);
            payload = vec![0; len as usize];
            self.0.read_exact(&mut payload)
        });
        if let Err(error) = read {
            let is_timeout = [ErrorKind::WouldBlock, ErrorKind::TimedOut].contains(&error.kind());
            assert!(!is_timeout, "nothing arrives");
            return None;
        }
        let [_, _, _, kind, flags, stream @ ..] = header;
        Some(Frame {
            kind,
            flags,
            stream: u32::from_be_bytes(stream) & (u32::MAX >> 1),
            payload,
        })
    }

    pub fn wait_for(&mut self, is_so: impl Fn(&Frame) -> bool) -> Frame {
        std::iter::from_fn(|| self.receive())
            .find(is_so)
            .expect("such a frame before the end")
    }

    /// The status and the body of a response without Huffman coding in its status.
    pub fn response(&mut self, stream: u32) -> (u16, String) {
        let head = self.wait_for(|frame| frame.kind == HEADERS && frame.stream == stream);
        let mut body = Vec::new();
        let mut is_end = head.flags & END_STREAM != 0;
        while !is_end {
            let data = self.wait_for(|frame| frame.kind == DATA && frame.stream == stream);
            body.extend_from_slice(&data.payload);
            is_end = data.flags & END_STREAM != 0;
        }
        let body = String::from_utf8(body).expect("text");
        (status(&head.payload), body)
    }

    /// Reads until the server closes the connection; the error code of its GOAWAY.
    pub fn ends(&mut self) -> Option<u32> {
        let mut code = None;
        while let Some(frame) = self.receive() {
            if frame.kind == GOAWAY {
                code = frame.payload[4..8].try_into().ok().map(u32::from_be_bytes);
            }
        }
        code
    }
}

pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let len = u32::try_from(payload.len()).expect("short").to_be_bytes();
    let head = [&len[1..], &[kind, flags], &stream.to_be_bytes()].concat();
    [&head, payload].concat()
}

/// HPACK without tables and Huffman codes.
pub fn headers(fields: &[(&str, &str)]) -> Vec<u8> {
    let text = |text: &str| {
        let mut prefix = Vec::new();
        let mut rest = text.len();
        if rest >= 127 {
            prefix.push(127);
            rest -= 127;
            while rest >= 128 {
                prefix.push(u8::try_from(rest % 128).expect("a byte") | 128);
                rest /= 128;
            }
        }
        prefix.push(u8::try_from(rest).expect("a byte"));
        [&prefix, text.as_bytes()].concat()
    };
    let field = |(name, value): &(&str, &str)| [vec![0], text(name), text(value)].concat();
    fields.iter().flat_map(field).collect()
}

/// The status is the first field, and one of the static table or a literal.
pub fn status(block: &[u8]) -> u16 {
    // Updates of the table size come first.
    let block = &block[block
        .iter()
        .take_while(|byte| **byte & 0xe0 == 0x20)
        .count()..];
    if let indexed @ 0x88..=0x8e = block[0] {
        return [200, 204, 206, 304, 400, 404, 500][usize::from(indexed - 0x88)];
    }
    let is_huffman = block[1] & 0x80 != 0;
    let text = &block[2..];
    if is_huffman {
        digits(text)
    } else {
        text_number(&text[..3])
    }
}

fn text_number(text: &[u8]) -> u16 {
    let text = std::str::from_utf8(text).expect("digits");
    text.parse().expect("a status")
}

/// Three digits in the Huffman code of HPACK: 0 to 2 have five bits, the others six.
fn digits(bytes: &[u8]) -> u16 {
    let bits = bytes
        .iter()
        .take(3)
        .fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte));
    let mut left = 24;
    (0..3).fold(0, |number, _| {
        let short = bits >> (left - 5) & 31;
        let digit = if short < 3 {
            left -= 5;
            short
        } else {
            left -= 6;
            (bits >> left & 63) - 0x19 + 3
        };
        number * 10 + u16::try_from(digit).expect("a digit")
    })
}
