//! HTTP/2 as far as this load generator needs it (RFC 9113): requests of one HEADERS and one DATA frame on many streams, and the
//! status and the end of their responses. The `h2` crate would take several times the processor time, which is the server's.

use std::collections::HashMap;
use std::io;

use crate::connection::{Response, broken};
use crate::requests::Request;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const HEADER_LEN: usize = 9;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;

const END_STREAM: u8 = 1;
const ACK: u8 = 1;
const END_HEADERS: u8 = 4;

/// The server may send this much more than the initial window before it needs a WINDOW_UPDATE.
const WINDOW_BYTES: u32 = 1 << 30;

/// The first of the statuses in HPACK's static table (RFC 7541, appendix A), as an indexed field.
const STATUS_INDEX: u8 = 0x80 | 8;
const STATUSES: [u16; 7] = [200, 204, 206, 304, 400, 404, 500];

/// A status that is not in the static table, or a stream that was reset. The error body shows which status it was.
const OTHER_STATUS: u16 = 0;

pub struct Http2 {
    input: Vec<u8>,
    output: Vec<u8>,
    next_stream: u32,
    streams: HashMap<u32, Stream>,
    /// Bytes of responses since the last WINDOW_UPDATE.
    received: u32,
}

struct Stream {
    slot: usize,
    status: u16,
    /// If the status is not the expected one.
    body: Vec<u8>,
}

impl Http2 {
    pub fn new() -> Self {
        let mut http2 = Self {
            input: Vec::new(),
            output: PREFACE.to_vec(),
            next_stream: 1,
            streams: HashMap::new(),
            received: 0,
        };
        http2.write(SETTINGS, 0, 0, &[]);
        http2.write(WINDOW_UPDATE, 0, 0, &WINDOW_BYTES.to_be_bytes());
        http2
    }

    /// What has been received and not been parsed.
    pub fn input(&mut self) -> &mut Vec<u8> {
        &mut self.input
    }

    /// What is to be sent.
    pub fn output(&mut self) -> &mut Vec<u8> {
        &mut self.output
    }

    /// Bodies are much smaller than the windows of a server divided by the number of streams, so the windows are never full.
    pub fn send(&mut self, slot: usize, request: &mut Request<'_>) {
        let stream = self.next_stream;
        self.next_stream += 2;
        let is_first = stream == 1;
        self.write(HEADERS, END_HEADERS, stream, request.header_block(is_first));
        self.write(DATA, END_STREAM, stream, request.body());
        let status = OTHER_STATUS;
        let body = Vec::new();
        self.streams.insert(stream, Stream { slot, status, body });
    }

    fn write(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        let len = u32::try_from(payload.len()).expect("a small frame");
        self.output.extend_from_slice(&len.to_be_bytes()[1..]);
        self.output.extend_from_slice(&[kind, flags]);
        self.output.extend_from_slice(&stream.to_be_bytes());
        self.output.extend_from_slice(payload);
    }

    /// Parses the frames that are complete.
    pub fn receive(&mut self, expect: u16, responses: &mut Vec<Response>) -> io::Result<()> {
        let input = std::mem::take(&mut self.input);
        let mut rest = input.as_slice();
        while let Some((header, after)) = rest.split_at_checked(HEADER_LEN) {
            let len = u32::from_be_bytes([0, header[0], header[1], header[2]]);
            let Some((payload, after)) = after.split_at_checked(len as usize) else {
                break;
            };
            let stream = [header[5], header[6], header[7], header[8]];
            let stream = u32::from_be_bytes(stream);
            let response = self.receive_frame(expect, header[3], header[4], stream, payload)?;
            responses.extend(response);
            rest = after;
        }
        let parsed_len = input.len() - rest.len();
        self.input = input;
        self.input.drain(..parsed_len);
        if self.received >= WINDOW_BYTES / 2 {
            let received = std::mem::take(&mut self.received);
            self.write(WINDOW_UPDATE, 0, 0, &received.to_be_bytes());
        }
        Ok(())
    }

    fn receive_frame(
        &mut self,
        expect: u16,
        kind: u8,
        flags: u8,
        stream: u32,
        payload: &[u8],
    ) -> io::Result<Option<Response>> {
        match kind {
            SETTINGS if flags & ACK == 0 => self.write(SETTINGS, ACK, 0, &[]),
            PING if flags & ACK == 0 => self.write(PING, ACK, 0, payload),
            GOAWAY => return Err(broken("the server closes the connection (GOAWAY)")),
            CONTINUATION => return Err(broken("headers in several frames are not supported")),
            HEADERS | DATA | RST_STREAM => {
                let known = self.streams.get_mut(&stream);
                let found = known.ok_or_else(|| broken("a response without a request"))?;
                if kind == HEADERS {
                    found.status = status(payload);
                } else if kind == DATA {
                    self.received += u32::try_from(payload.len()).expect("at most 2^24");
                    if found.status != expect {
                        found.body.extend_from_slice(payload);
                    }
                }
                if kind == RST_STREAM || flags & END_STREAM != 0 {
                    return Ok(self.end(stream, kind == RST_STREAM, expect));
                }
            }
            _ => {}
        }
        Ok(None)
    }

    fn end(&mut self, stream: u32, is_reset: bool, expect: u16) -> Option<Response> {
        let Stream { slot, status, body } = self.streams.remove(&stream)?;
        let status = if is_reset { OTHER_STATUS } else { status };
        let text = || String::from_utf8_lossy(&body).into_owned();
        let unexpected = (status != expect).then(text);
        Some(Response {
            slot,
            status,
            unexpected,
        })
    }
}

/// The status is the first field of a response.
fn status(header_block: &[u8]) -> u16 {
    let first = header_block.first().copied().unwrap_or(0);
    let index = usize::from(first.wrapping_sub(STATUS_INDEX));
    STATUSES.get(index).copied().unwrap_or(OTHER_STATUS)
}
