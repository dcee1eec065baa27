//! What RFC 9113 (HTTP/2) and RFC 7541 (HPACK) say about single frames, as a table: what a client sends, and what the server must do.
//! It has the cases of h2spec, which is in none of the package registries, and some that RFC 9113 has added.

use crate::harness::http2::{
    ACK, CANCEL, COMPRESSION_ERROR, CONTINUATION, Connection, DATA, END_HEADERS, END_STREAM,
    FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR, GOAWAY, HEADERS, NO_ERROR, PADDED, PING, PREFACE,
    PRIORITY, PROTOCOL_ERROR, PUSH_PROMISE, REFUSED_STREAM, RST_STREAM, SETTINGS, STREAM_CLOSED,
    Tls, WINDOW_UPDATE, WITH_PRIORITY, frame, headers, start, status,
};

const UNKNOWN: u8 = 0x16;

const HEADER_TABLE_SIZE: u16 = 1;
const ENABLE_PUSH: u16 = 2;
const INITIAL_WINDOW_SIZE: u16 = 4;
const MAX_FRAME_SIZE: u16 = 5;

/// 2^31 - 1.
const WINDOW_MAX: u32 = u32::MAX >> 1;

/// The size that every endpoint must accept, and that this server does not raise.
const FRAME_SIZE: usize = 1 << 14;

/// `SETTINGS_MAX_CONCURRENT_STREAMS` of this server.
const STREAMS_MAX: u32 = 256;

/// A stream that no case uses.
const LAST_STREAM: u32 = 9_999;

const PLANT: &[u8] = br#"{"id":1,"name":"x"}"#;

/// A literal without indexing: its name is `x-test`, in Huffman code, and its value follows.
const HUFFMAN_NAME: &[u8] = &[0x00, 0x85, 0xf2, 0xb2, 0x4a, 0x84, 0xff];

const UNDECODABLE: &str = "h2 has one code for all frames and header blocks that it cannot decode";
const STATE: &str = "h2 has one code for all frames that the state of a stream does not allow";
const WHITESPACE: &str = "h2 does not check it, and no field of the service changes its meaning";

struct Case {
    /// Of RFC 9113, unless it names another.
    section: &'static str,
    what: &'static str,
    steps: Vec<Step>,
    expected: Expected,
    /// What the server does instead, and why that is accepted.
    deviation: Option<(Outcome, &'static str)>,
    has_preface: bool,
}

enum Step {
    Send(Vec<u8>),
    /// Waits for the end of the response on this stream.
    Response(u32),
    /// Waits for the acknowledgement of settings.
    SettingsAck,
    /// Waits for a DATA frame.
    Data,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    /// A GOAWAY frame with this code, and the end of the connection.
    ConnectionError(u32),
    /// A RST_STREAM frame with this code. An endpoint may treat it as a connection error (section 5.4).
    StreamError(u32),
    /// One of two codes.
    StreamErrorOf(u32, u32),
    Response(u16),
    /// The next DATA frame has this length.
    DataOf(usize),
    /// A frame of this type with the flag ACK and this payload.
    Acknowledged(u8, &'static [u8]),
    /// No error; the connection and its other streams can be used.
    Accepted,
    /// The first frame of the server is its SETTINGS frame.
    SettingsFirst,
    /// The connection is closed, with or without an error.
    Closed,
}

impl Expected {
    /// After an error of the connection it gets no response; after everything else it does.
    fn is_decided_by_another_request(self) -> bool {
        use Expected::{Accepted, ConnectionError, StreamError, StreamErrorOf};
        matches!(
            self,
            Accepted | ConnectionError(_) | StreamError(_) | StreamErrorOf(..)
        )
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Outcome {
    Goaway(u32),
    Reset(u32),
    Closed,
    Response(u16),
    Data(usize),
    Acknowledged,
    Accepted,
    SettingsFirst,
}

fn case<const N: usize>(
    section: &'static str,
    what: &'static str,
    steps: [Step; N],
    expected: Expected,
) -> Case {
    Case {
        section,
        what,
        steps: steps.into(),
        expected,
        deviation: None,
        has_preface: true,
    }
}

impl Case {
    fn but(self, outcome: Outcome, reason: &'static str) -> Self {
        let deviation = Some((outcome, reason));
        Self { deviation, ..self }
    }

    fn without_preface(self) -> Self {
        let has_preface = false;
        Self {
            has_preface,
            ..self
        }
    }

    fn run(&self, tls: &Tls) -> Outcome {
        let mut connection = if self.has_preface {
            tls.connect()
        } else {
            tls.open()
        };
        for step in &self.steps {
            match step {
                Step::Send(bytes) => connection.send_bytes(bytes),
                Step::Response(stream) => {
                    connection.response(*stream);
                }
                Step::SettingsAck => {
                    connection.wait_for(|frame| frame.kind == SETTINGS && frame.flags == ACK);
                }
                Step::Data => {
                    connection.wait_for(|frame| frame.kind == DATA);
                }
            }
        }
        if self.expected.is_decided_by_another_request() {
            connection.send_bytes(&get(LAST_STREAM));
        }
        outcome(&mut connection, self.expected)
    }
}

/// The first event that decides a case.
fn outcome(connection: &mut Connection, expected: Expected) -> Outcome {
    let mut found_status = 0;
    while let Some(frame) = connection.receive() {
        let is_end = frame.flags & END_STREAM != 0;
        match (frame.kind, expected) {
            (GOAWAY, _) => {
                let code = number(&frame.payload[4..]);
                // An endpoint must close the connection after an error.
                connection.ends();
                return Outcome::Goaway(code);
            }
            // A response may be complete before the request is.
            (RST_STREAM, _) if number(&frame.payload) != NO_ERROR => {
                return Outcome::Reset(number(&frame.payload));
            }
            (SETTINGS, Expected::SettingsFirst) if frame.flags & ACK == 0 => {
                return Outcome::SettingsFirst;
            }
            (_, Expected::SettingsFirst) => panic!("a frame of type {} comes first", frame.kind),
            (kind, Expected::Acknowledged(expected, payload))
                if kind == expected && frame.flags & ACK != 0 && frame.payload == payload =>
            {
                return Outcome::Acknowledged;
            }
            (HEADERS, Expected::Response(_)) if frame.stream == 1 => {
                found_status = status(&frame.payload);
                if is_end {
                    return Outcome::Response(found_status);
                }
            }
            (DATA, Expected::Response(_)) if frame.stream == 1 && is_end => {
                return Outcome::Response(found_status);
            }
            (DATA, Expected::DataOf(_)) => return Outcome::Data(frame.payload.len()),
            (HEADERS, _) if frame.stream == LAST_STREAM => {
                assert_eq!(status(&frame.payload), 200);
                return Outcome::Accepted;
            }
            _ => {}
        }
    }
    Outcome::Closed
}

fn meets(outcome: &Outcome, expected: Expected) -> bool {
    match expected {
        Expected::ConnectionError(code) => *outcome == Outcome::Goaway(code),
        Expected::StreamError(code) => {
            [Outcome::Reset(code), Outcome::Goaway(code)].contains(outcome)
        }
        Expected::StreamErrorOf(one, other) => [one, other]
            .iter()
            .any(|code| meets(outcome, Expected::StreamError(*code))),
        Expected::Response(status) => *outcome == Outcome::Response(status),
        Expected::DataOf(len) => *outcome == Outcome::Data(len),
        Expected::Acknowledged(..) => *outcome == Outcome::Acknowledged,
        Expected::Accepted => *outcome == Outcome::Accepted,
        Expected::SettingsFirst => *outcome == Outcome::SettingsFirst,
        Expected::Closed => matches!(outcome, Outcome::Closed | Outcome::Goaway(_)),
    }
}

fn number(bytes: &[u8]) -> u32 {
    u32::from_be_bytes(bytes[..4].try_into().expect("four bytes"))
}

/// Frames that are sent at once.
fn send(frames: &[Vec<u8>]) -> Step {
    Step::Send(frames.concat())
}

const GET: [(&str, &str); 4] = [
    (":method", "GET"),
    (":scheme", "https"),
    (":path", "/openapi.json"),
    (":authority", "localhost"),
];

/// A GET request with another value of this field, or with this field as its last.
fn get_block_with(name: &str, value: &str) -> Vec<u8> {
    let mut fields = GET.to_vec();
    match fields.iter_mut().find(|field| field.0 == name) {
        Some(field) => field.1 = value,
        None => fields.push((name, value)),
    }
    headers(&fields)
}

fn get_block_without(name: &str) -> Vec<u8> {
    let fields = GET.iter().copied().filter(|field| field.0 != name);
    headers(&fields.collect::<Vec<_>>())
}

fn get_block() -> Vec<u8> {
    headers(&GET)
}

fn request(block: &[u8]) -> Vec<u8> {
    frame(HEADERS, END_HEADERS | END_STREAM, 1, block)
}

fn get(stream: u32) -> Vec<u8> {
    frame(HEADERS, END_HEADERS | END_STREAM, stream, &get_block())
}

/// A GET request on stream 1 with one more field, or another value of it.
fn get_with(name: &str, value: &str) -> Step {
    send(&[request(&get_block_with(name, value))])
}

/// A GET request on stream 1, with bytes of HPACK after its fields.
fn get_then(bytes: &[u8]) -> Step {
    send(&[request(&[&get_block(), bytes].concat())])
}

fn data(stream: u32) -> Vec<u8> {
    frame(DATA, END_STREAM, stream, PLANT)
}

fn priority(stream: u32, on: u32) -> Vec<u8> {
    frame(
        PRIORITY,
        0,
        stream,
        &[&on.to_be_bytes()[..], &[255]].concat(),
    )
}

fn reset(stream: u32, code: u32) -> Vec<u8> {
    frame(RST_STREAM, 0, stream, &code.to_be_bytes())
}

fn window_update(stream: u32, by: u32) -> Vec<u8> {
    frame(WINDOW_UPDATE, 0, stream, &by.to_be_bytes())
}

fn settings<const N: usize>(values: [(u16, u32); N]) -> Vec<u8> {
    let bytes = |(id, value): (u16, u32)| [&id.to_be_bytes()[..], &value.to_be_bytes()].concat();
    frame(SETTINGS, 0, 0, &values.map(bytes).concat())
}

/// The body of a response cannot be sent, so its stream stays half-closed (remote).
fn no_window() -> Vec<u8> {
    settings([(INITIAL_WINDOW_SIZE, 0)])
}

fn continuation(stream: u32, flags: u8) -> Vec<u8> {
    frame(CONTINUATION, flags, stream, &headers(&[("x-more", "x")]))
}

fn ping(flags: u8) -> Vec<u8> {
    frame(PING, flags, 0, b"12345678")
}

/// Connections, frames and header blocks (sections 3 and 4).
#[rustfmt::skip] // One case per line.
fn frame_cases(add: &[u8]) -> Vec<Case> {
    use Expected::{
        Accepted, Acknowledged, Closed, ConnectionError, Response, SettingsFirst, StreamError,
    };
    let open = || frame(HEADERS, END_HEADERS, 1, add);
    let padded_plant = [PLANT, &vec![b' '; FRAME_SIZE - PLANT.len()]].concat();
    let too_large = vec![b' '; FRAME_SIZE + 1];
    let preface = || [PREFACE, &settings([])].concat();
    let half_headers = || frame(HEADERS, END_STREAM, 1, &get_block());
    vec![
        case("3.4", "a client preface", [send(&[preface()])], SettingsFirst).without_preface(),
        case("3.4", "a request right after the preface", [send(&[preface(), get(1)])], Response(200)).without_preface(),
        case("3.4", "an invalid preface", [Step::Send(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n".to_vec())], Closed).without_preface(),
        case("3.4", "a preface without settings", [send(&[PREFACE.to_vec(), ping(0)])], ConnectionError(PROTOCOL_ERROR)).without_preface().but(Outcome::Accepted, "h2 accepts other frames before the SETTINGS frame of the client; they have the initial settings"),
        case("4.1", "an unknown type", [send(&[frame(UNKNOWN, 0, 0, &[0; 8])])], Accepted),
        case("4.1", "an undefined flag", [send(&[ping(0x16)])], Acknowledged(PING, b"12345678")),
        case("4.1", "the reserved bit", [send(&[frame(PING, 0, 1 << 31, b"12345678")])], Acknowledged(PING, b"12345678")),
        case("4.2", "DATA of 2^14 bytes", [send(&[open(), frame(DATA, END_STREAM, 1, &padded_plant)])], Response(200)),
        case("4.2", "DATA above SETTINGS_MAX_FRAME_SIZE", [send(&[open(), frame(DATA, END_STREAM, 1, &too_large)])], StreamError(FRAME_SIZE_ERROR)),
        case("4.2", "HEADERS above SETTINGS_MAX_FRAME_SIZE", [send(&[request(&[&get_block(), &too_large[..]].concat())])], ConnectionError(FRAME_SIZE_ERROR)),
        case("4.3", "an incomplete header block", [send(&[request(&[0x40])])], ConnectionError(COMPRESSION_ERROR)).but(Outcome::Goaway(PROTOCOL_ERROR), UNDECODABLE),
        case("4.3", "PRIORITY within a header block", [send(&[half_headers(), priority(1, 0), continuation(1, END_HEADERS)])], ConnectionError(PROTOCOL_ERROR)),
        case("4.3", "HEADERS of another stream within a header block", [send(&[half_headers(), get(3), continuation(1, END_HEADERS)])], ConnectionError(PROTOCOL_ERROR)),
    ]
}

/// Streams (section 5).
#[rustfmt::skip] // One case per line.
fn stream_cases(add: &[u8]) -> Vec<Case> {
    use Expected::{Accepted, ConnectionError, DataOf, StreamError, StreamErrorOf};
    let open = || frame(HEADERS, END_HEADERS, 1, add);
    let half_headers = || frame(HEADERS, END_STREAM, 1, &get_block());
    let too_many = || {
        (0..=STREAMS_MAX)
            .flat_map(|number| get(2 * number + 1))
            .collect()
    };
    let depends_on_itself = [&[0, 0, 0, 1, 255][..], &get_block()].concat();
    vec![
        case("5.1", "idle: DATA", [send(&[data(1)])], ConnectionError(PROTOCOL_ERROR)),
        case("5.1", "idle: RST_STREAM", [send(&[reset(1, CANCEL)])], ConnectionError(PROTOCOL_ERROR)),
        case("5.1", "idle: WINDOW_UPDATE", [send(&[window_update(1, 100)])], ConnectionError(PROTOCOL_ERROR)),
        case("5.1", "idle: CONTINUATION", [send(&[continuation(1, END_HEADERS)])], ConnectionError(PROTOCOL_ERROR)),
        case("5.1", "idle: PRIORITY", [send(&[priority(1, 0)])], Accepted),
        case("5.1", "half-closed (remote): DATA", [send(&[no_window(), get(1), data(1)])], StreamError(STREAM_CLOSED)).but(Outcome::Goaway(PROTOCOL_ERROR), STATE),
        case("5.1", "half-closed (remote): HEADERS", [send(&[no_window(), get(1), get(1)])], StreamError(STREAM_CLOSED)).but(Outcome::Goaway(PROTOCOL_ERROR), STATE),
        case("5.1", "half-closed (remote): CONTINUATION", [send(&[no_window(), get(1), continuation(1, END_HEADERS)])], ConnectionError(PROTOCOL_ERROR)),
        case("5.1", "half-closed (remote): WINDOW_UPDATE", [send(&[no_window(), get(1), window_update(1, 1)])], DataOf(1)),
        case("5.1", "half-closed (remote): PRIORITY", [send(&[no_window(), get(1), priority(1, 0), window_update(1, 1)])], DataOf(1)),
        case("5.1", "half-closed (remote): RST_STREAM", [send(&[no_window(), get(1), reset(1, CANCEL)])], Accepted),
        case("5.1", "closed by RST_STREAM: DATA", [send(&[open(), reset(1, CANCEL), data(1)])], StreamError(STREAM_CLOSED)),
        case("5.1", "closed by RST_STREAM: HEADERS", [send(&[open(), reset(1, CANCEL), get(1)])], StreamError(STREAM_CLOSED)).but(Outcome::Goaway(PROTOCOL_ERROR), STATE),
        case("5.1", "closed by RST_STREAM: CONTINUATION", [send(&[open(), reset(1, CANCEL), continuation(1, END_HEADERS)])], ConnectionError(PROTOCOL_ERROR)),
        case("5.1", "closed: DATA", [send(&[get(1)]), Step::Response(1), send(&[data(1)])], StreamError(STREAM_CLOSED)),
        case("5.1", "closed: HEADERS", [send(&[get(1)]), Step::Response(1), send(&[get(1)])], ConnectionError(STREAM_CLOSED)).but(Outcome::Goaway(PROTOCOL_ERROR), STATE),
        case("5.1", "closed: CONTINUATION", [send(&[get(1)]), Step::Response(1), send(&[continuation(1, END_HEADERS)])], ConnectionError(PROTOCOL_ERROR)),
        case("5.1", "closed: PRIORITY", [send(&[get(1)]), Step::Response(1), send(&[priority(1, 0)])], Accepted),
        case("5.1", "closed: WINDOW_UPDATE", [send(&[get(1)]), Step::Response(1), send(&[window_update(1, 1)])], Accepted),
        case("5.1", "closed: RST_STREAM", [send(&[get(1)]), Step::Response(1), send(&[reset(1, CANCEL)])], Accepted),
        case("5.1.1", "an even stream identifier", [send(&[frame(HEADERS, END_HEADERS | END_STREAM, 2, &get_block())])], ConnectionError(PROTOCOL_ERROR)),
        case("5.1.1", "a smaller stream identifier", [send(&[get(5), get(3)])], ConnectionError(PROTOCOL_ERROR)),
        case("5.1.2", "more streams than SETTINGS_MAX_CONCURRENT_STREAMS", [send(&[no_window(), too_many()])], StreamErrorOf(PROTOCOL_ERROR, REFUSED_STREAM)),
        case("RFC 7540 5.3.1", "HEADERS that depend on their own stream", [send(&[frame(HEADERS, END_HEADERS | END_STREAM | WITH_PRIORITY, 1, &depends_on_itself)])], StreamError(PROTOCOL_ERROR)),
        case("RFC 7540 5.3.1", "PRIORITY that depends on its own stream", [send(&[priority(1, 1)])], StreamError(PROTOCOL_ERROR)),
        case("5.3", "PRIORITY of weight 1", [send(&[frame(PRIORITY, 0, 1, &[0; 5])])], Accepted),
        case("5.3", "PRIORITY that depends on another stream", [send(&[priority(1, 0), priority(3, 1)])], Accepted),
        case("5.3", "PRIORITY that is exclusive", [send(&[priority(3, 1 | 1 << 31)])], Accepted),
        case("5.3", "PRIORITY of an idle stream, and a request with a lower identifier", [send(&[priority(5, 3), get(1)])], Expected::Response(200)),
        case("5.4.1", "a connection error: GOAWAY, then the end", [send(&[frame(PING, 0, 3, &[0; 8])])], ConnectionError(PROTOCOL_ERROR)),
        case("5.5", "an unknown frame on a stream", [send(&[open(), frame(UNKNOWN, 0, 1, &[0; 8]), data(1)])], Expected::Response(200)),
        case("5.5", "an unknown frame within a header block", [send(&[half_headers(), frame(UNKNOWN, 0, 0, &[0; 8]), continuation(1, END_HEADERS)])], ConnectionError(PROTOCOL_ERROR)),
    ]
}

/// DATA, HEADERS, PRIORITY, RST_STREAM and CONTINUATION (sections 6.1 to 6.4 and 6.10).
#[rustfmt::skip] // One case per line.
fn request_frame_cases(add: &[u8]) -> Vec<Case> {
    use Expected::{Accepted, ConnectionError, Response, StreamError};
    let open = || frame(HEADERS, END_HEADERS, 1, add);
    let half_headers = || frame(HEADERS, END_STREAM, 1, &get_block());
    let padded = |pad_len: u8, bytes: &[u8]| [&[pad_len], bytes].concat();
    let padding = vec![0; 10];
    let block = get_block();
    let (first_half, second_half) = PLANT.split_at(8);
    let with_flags =
        |flags: u8, payload: &[u8]| frame(HEADERS, END_HEADERS | END_STREAM | flags, 1, payload);
    vec![
        case("6.1", "DATA", [send(&[open(), data(1)])], Response(200)),
        case("6.1", "several DATA frames", [send(&[open(), frame(DATA, 0, 1, first_half), frame(DATA, END_STREAM, 1, second_half)])], Response(200)),
        case("6.1", "DATA with padding", [send(&[open(), frame(DATA, END_STREAM | PADDED, 1, &padded(10, &[PLANT, &padding].concat()))])], Response(200)),
        case("6.1", "DATA on stream 0", [send(&[data(0)])], ConnectionError(PROTOCOL_ERROR)),
        case("6.1", "DATA with more padding than payload", [send(&[open(), frame(DATA, END_STREAM | PADDED, 1, &padded(6, b"test"))])], ConnectionError(PROTOCOL_ERROR)),
        case("6.1", "DATA without its pad length", [send(&[open(), frame(DATA, END_STREAM | PADDED, 1, &[])])], ConnectionError(FRAME_SIZE_ERROR)).but(Outcome::Goaway(PROTOCOL_ERROR), UNDECODABLE),
        case("6.2", "HEADERS", [send(&[get(1)])], Response(200)),
        case("6.2", "HEADERS with padding", [send(&[with_flags(PADDED, &padded(10, &[&block[..], &padding].concat()))])], Response(200)),
        case("6.2", "HEADERS with a priority", [send(&[with_flags(WITH_PRIORITY, &[&[0, 0, 0, 0, 255][..], &block].concat())])], Response(200)),
        case("6.2", "HEADERS on stream 0", [send(&[frame(HEADERS, END_HEADERS | END_STREAM, 0, &block)])], ConnectionError(PROTOCOL_ERROR)),
        case("6.2", "HEADERS with more padding than payload", [send(&[with_flags(PADDED, &padded(255, &block))])], ConnectionError(PROTOCOL_ERROR)),
        case("6.2", "HEADERS, and DATA within its block", [send(&[half_headers(), data(1), continuation(1, END_HEADERS)])], ConnectionError(PROTOCOL_ERROR)),
        case("6.3", "PRIORITY on stream 0", [send(&[priority(0, 0)])], ConnectionError(PROTOCOL_ERROR)),
        case("6.3", "PRIORITY of 4 bytes", [send(&[frame(PRIORITY, 0, 1, &[0; 4])])], StreamError(FRAME_SIZE_ERROR)).but(Outcome::Goaway(PROTOCOL_ERROR), UNDECODABLE),
        case("6.4", "RST_STREAM", [send(&[open(), reset(1, CANCEL)])], Accepted),
        case("6.4", "RST_STREAM on stream 0", [send(&[reset(0, CANCEL)])], ConnectionError(PROTOCOL_ERROR)),
        case("6.4", "RST_STREAM on an idle stream", [send(&[reset(7, CANCEL)])], ConnectionError(PROTOCOL_ERROR)),
        case("6.4", "RST_STREAM of 3 bytes", [send(&[open(), frame(RST_STREAM, 0, 1, &[0; 3])])], ConnectionError(FRAME_SIZE_ERROR)).but(Outcome::Goaway(PROTOCOL_ERROR), UNDECODABLE),
        case("6.10", "CONTINUATION", [send(&[half_headers(), continuation(1, END_HEADERS)])], Response(200)),
        case("6.10", "several CONTINUATION frames", [send(&[half_headers(), continuation(1, 0), continuation(1, END_HEADERS)])], Response(200)),
        case("6.10", "CONTINUATION, then DATA", [send(&[half_headers(), continuation(1, 0), data(1), continuation(1, END_HEADERS)])], ConnectionError(PROTOCOL_ERROR)),
        case("6.10", "CONTINUATION on stream 0", [send(&[half_headers(), continuation(0, END_HEADERS), continuation(1, END_HEADERS)])], ConnectionError(PROTOCOL_ERROR)),
        case("6.10", "CONTINUATION of another stream", [send(&[half_headers(), continuation(3, END_HEADERS), continuation(1, END_HEADERS)])], ConnectionError(PROTOCOL_ERROR)),
        case("6.10", "CONTINUATION after HEADERS with END_HEADERS", [send(&[open(), continuation(1, END_HEADERS)])], ConnectionError(PROTOCOL_ERROR)),
        case("6.10", "CONTINUATION after CONTINUATION with END_HEADERS", [send(&[half_headers(), continuation(1, END_HEADERS), continuation(1, END_HEADERS)])], ConnectionError(PROTOCOL_ERROR)),
        case("6.10", "CONTINUATION after DATA", [send(&[open(), frame(DATA, 0, 1, PLANT), continuation(1, END_HEADERS)])], ConnectionError(PROTOCOL_ERROR)),
    ]
}

/// SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE and error codes (sections 6.5 to 6.9 and 7).
#[rustfmt::skip] // One case per line.
fn connection_frame_cases(add: &[u8]) -> Vec<Case> {
    use Expected::{Accepted, Acknowledged, ConnectionError, DataOf, StreamError};
    let open = || frame(HEADERS, END_HEADERS, 1, add);
    let setting = |id: u16, value: u32| send(&[settings([(id, value)])]);
    let goaway =
        |stream: u32, code: u32| frame(GOAWAY, 0, stream, &[[0; 4], code.to_be_bytes()].concat());
    let push = [&[0, 0, 0, 2][..], &get_block()].concat();
    vec![
        case("6.5", "SETTINGS", [setting(HEADER_TABLE_SIZE, 4096)], Acknowledged(SETTINGS, b"")),
        case("6.5", "SETTINGS with ACK and a payload", [send(&[frame(SETTINGS, ACK, 0, &[0; 6])])], ConnectionError(FRAME_SIZE_ERROR)).but(Outcome::Goaway(PROTOCOL_ERROR), UNDECODABLE),
        case("6.5", "SETTINGS on a stream", [send(&[frame(SETTINGS, 0, 1, &[])])], ConnectionError(PROTOCOL_ERROR)),
        case("6.5", "SETTINGS of 3 bytes", [send(&[frame(SETTINGS, 0, 0, &[0; 3])])], ConnectionError(FRAME_SIZE_ERROR)).but(Outcome::Goaway(PROTOCOL_ERROR), UNDECODABLE),
        case("6.5.2", "ENABLE_PUSH of 2", [setting(ENABLE_PUSH, 2)], ConnectionError(PROTOCOL_ERROR)),
        case("6.5.2", "INITIAL_WINDOW_SIZE of 2^31", [setting(INITIAL_WINDOW_SIZE, WINDOW_MAX + 1)], ConnectionError(FLOW_CONTROL_ERROR)).but(Outcome::Goaway(PROTOCOL_ERROR), UNDECODABLE),
        case("6.5.2", "MAX_FRAME_SIZE of 2^14 - 1", [setting(MAX_FRAME_SIZE, 16_383)], ConnectionError(PROTOCOL_ERROR)),
        case("6.5.2", "MAX_FRAME_SIZE of 2^24", [setting(MAX_FRAME_SIZE, 1 << 24)], ConnectionError(PROTOCOL_ERROR)),
        case("6.5.2", "an unknown setting", [setting(0xff, 1)], Accepted),
        case("6.5.3", "two values of one setting", [send(&[settings([(INITIAL_WINDOW_SIZE, 100), (INITIAL_WINDOW_SIZE, 1)])]), Step::SettingsAck, send(&[get(1)])], DataOf(1)),
        case("6.5.3", "a setting is acknowledged", [setting(ENABLE_PUSH, 0)], Acknowledged(SETTINGS, b"")),
        case("6.6", "PUSH_PROMISE", [send(&[open(), frame(PUSH_PROMISE, END_HEADERS, 1, &push)])], ConnectionError(PROTOCOL_ERROR)),
        case("6.7", "PING", [send(&[ping(0)])], Acknowledged(PING, b"12345678")),
        case("6.7", "PING with ACK", [send(&[ping(ACK)])], Accepted),
        case("6.7", "PING on a stream", [send(&[frame(PING, 0, 1, &[0; 8])])], ConnectionError(PROTOCOL_ERROR)),
        case("6.7", "PING of 6 bytes", [send(&[frame(PING, 0, 0, &[0; 6])])], ConnectionError(FRAME_SIZE_ERROR)).but(Outcome::Goaway(PROTOCOL_ERROR), UNDECODABLE),
        case("6.8", "GOAWAY: open requests are completed", [send(&[open(), goaway(0, NO_ERROR), data(1)])], Expected::Response(200)),
        case("6.8", "GOAWAY on a stream", [send(&[goaway(1, NO_ERROR)])], ConnectionError(PROTOCOL_ERROR)),
        case("6.9", "WINDOW_UPDATE of the connection", [send(&[window_update(0, 1)])], Accepted),
        case("6.9", "WINDOW_UPDATE of a stream", [send(&[open(), window_update(1, 1), data(1)])], Expected::Response(200)),
        case("6.9", "WINDOW_UPDATE of 0", [send(&[window_update(0, 0)])], ConnectionError(PROTOCOL_ERROR)),
        case("6.9", "WINDOW_UPDATE of 0 on a stream", [send(&[open(), window_update(1, 0)])], StreamError(PROTOCOL_ERROR)),
        case("6.9", "WINDOW_UPDATE of 3 bytes", [send(&[frame(WINDOW_UPDATE, 0, 0, &[0, 0, 1])])], ConnectionError(FRAME_SIZE_ERROR)).but(Outcome::Goaway(PROTOCOL_ERROR), UNDECODABLE),
        case("6.9.1", "a window of 1", [setting(INITIAL_WINDOW_SIZE, 1), Step::SettingsAck, send(&[get(1)])], DataOf(1)),
        case("6.9.1", "a window of the connection above 2^31 - 1", [send(&[window_update(0, WINDOW_MAX), window_update(0, WINDOW_MAX)])], ConnectionError(FLOW_CONTROL_ERROR)),
        case("6.9.1", "a window of a stream above 2^31 - 1", [send(&[open(), window_update(1, WINDOW_MAX), window_update(1, WINDOW_MAX)])], StreamError(FLOW_CONTROL_ERROR)),
        case("6.9.2", "INITIAL_WINDOW_SIZE changes the windows of open streams", [setting(INITIAL_WINDOW_SIZE, 0), Step::SettingsAck, send(&[get(1), settings([(INITIAL_WINDOW_SIZE, 1)])])], DataOf(1)),
        case("6.9.2", "a window below 0", [setting(INITIAL_WINDOW_SIZE, 3), Step::SettingsAck, send(&[get(1)]), Step::Data, setting(INITIAL_WINDOW_SIZE, 2), Step::SettingsAck, send(&[window_update(1, 2)])], DataOf(1)),
        case("6.9.2", "INITIAL_WINDOW_SIZE raises the window of a stream above 2^31 - 1", [send(&[open(), window_update(1, WINDOW_MAX - 65_535), settings([(INITIAL_WINDOW_SIZE, 65_536)])])], ConnectionError(FLOW_CONTROL_ERROR)),
        case("7", "GOAWAY with an unknown code", [send(&[open(), goaway(0, 0xff), data(1)])], Expected::Response(200)),
        case("7", "RST_STREAM with an unknown code", [send(&[open(), reset(1, 0xff)])], Accepted),
    ]
}

/// Requests (section 8).
#[rustfmt::skip] // One case per line.
fn message_cases(add: &[u8]) -> Vec<Case> {
    use Expected::{ConnectionError, Response, StreamError};
    let open = || frame(HEADERS, END_HEADERS, 1, add);
    let open_with = |name: &str, value: &str| {
        frame(
            HEADERS,
            END_HEADERS,
            1,
            &[add, &headers(&[(name, value)])].concat(),
        )
    };
    let trailers =
        |flags: u8, name: &str| frame(HEADERS, END_HEADERS | flags, 1, &headers(&[(name, "x")]));
    let part = || frame(DATA, 0, 1, PLANT);
    let get_again = |name: &str, value: &str| {
        send(&[request(
            &[get_block(), headers(&[(name, value)])].concat(),
        )])
    };
    let get_without = |name: &str| send(&[request(&get_block_without(name))]);
    let push = [&[0, 0, 0, 2][..], &get_block()].concat();
    let malformed = StreamError(PROTOCOL_ERROR);
    vec![
        case("8.1", "a HEAD request", [get_with(":method", "HEAD")], Response(200)),
        case("8.1", "a POST request", [send(&[open(), data(1)])], Response(200)),
        case("8.1", "a POST request with trailers", [send(&[open(), part(), trailers(END_STREAM, "x-test")])], Response(200)),
        case("8.1", "a second HEADERS frame without END_STREAM", [send(&[open(), part(), trailers(0, "x-test")])], malformed),
        case("8.1.1", "content-length above the length of DATA", [send(&[open_with("content-length", "100"), data(1)])], malformed),
        case("8.1.1", "content-length below the length of DATA", [send(&[open_with("content-length", "1"), data(1)])], malformed),
        case("8.1.1", "content-length below the length of several DATA frames", [send(&[open_with("content-length", "20"), part(), data(1)])], malformed),
        case("8.2.1", "a field name in upper case", [get_with("X-Test", "x")], malformed),
        case("8.2.1", "a field name with a space", [get_with("x test", "x")], malformed),
        case("8.2.1", "an empty field name", [get_with("", "x")], malformed),
        case("8.2.1", "a field name with a colon inside", [get_with("x:test", "x")], malformed),
        case("8.2.1", "a field value with NUL", [get_with("x-test", "a\0b")], malformed),
        case("8.2.1", "a field value with CR", [get_with("x-test", "a\rb")], malformed),
        case("8.2.1", "a field value with LF", [get_with("x-test", "a\nb")], malformed),
        case("8.2.1", "a field value that starts with a space", [get_with("x-test", " a")], malformed).but(Outcome::Accepted, WHITESPACE),
        case("8.2.1", "a field value that ends with a tab", [get_with("x-test", "a\t")], malformed).but(Outcome::Accepted, WHITESPACE),
        case("8.2.2", "connection", [get_with("connection", "keep-alive")], malformed),
        case("8.2.2", "keep-alive", [get_with("keep-alive", "timeout=5")], malformed),
        case("8.2.2", "proxy-connection", [get_with("proxy-connection", "keep-alive")], malformed),
        case("8.2.2", "transfer-encoding", [get_with("transfer-encoding", "chunked")], malformed),
        case("8.2.2", "upgrade", [get_with("upgrade", "h2c")], malformed),
        case("8.2.2", "te: trailers, deflate", [get_with("te", "trailers, deflate")], malformed),
        case("8.2.2", "te: trailers", [get_with("te", "trailers")], Response(200)),
        case("8.3", "an unknown pseudo-header", [get_with(":test", "x")], malformed),
        case("8.3", "a pseudo-header of responses", [get_with(":status", "200")], malformed),
        case("8.3", "a pseudo-header in trailers", [send(&[open(), part(), trailers(END_STREAM, ":method")])], malformed).but(Outcome::Accepted, "h2 drops pseudo-headers of trailers, and the service uses no trailers"),
        case("8.3", "a pseudo-header after other fields", [send(&[request(&[headers(&[("x-test", "x")]), get_block()].concat())])], malformed),
        case("8.3.1", "an empty :path", [get_with(":path", "")], malformed),
        case("8.3.1", "no :method", [get_without(":method")], malformed),
        case("8.3.1", "no :scheme", [get_without(":scheme")], malformed),
        case("8.3.1", "no :path", [get_without(":path")], malformed),
        case("8.3.1", ":method twice", [get_again(":method", "GET")], malformed),
        case("8.3.1", ":scheme twice", [get_again(":scheme", "https")], malformed),
        case("8.3.1", ":path twice", [get_again(":path", "/")], malformed),
        case("8.3.1", ":authority twice", [get_again(":authority", "localhost")], malformed),
        case("8.3.1", "an :authority with user information", [get_with(":authority", "user@localhost")], Response(400)),
        case("8.3.1", "a :path that is not absolute", [get_with(":path", "openapi.json")], malformed),
        case("8.4", "PUSH_PROMISE of a client", [send(&[frame(PUSH_PROMISE, END_HEADERS, 1, &push)])], ConnectionError(PROTOCOL_ERROR)),
        case("8.5", "CONNECT with :path", [get_with(":method", "CONNECT")], malformed),
    ]
}

/// Header compression (RFC 7541).
#[rustfmt::skip] // One case per line.
fn hpack_cases() -> Vec<Case> {
    use Expected::{ConnectionError, Response};
    let error = ConnectionError(COMPRESSION_ERROR);
    let before_get = |bytes: &[u8]| send(&[request(&[bytes, &get_block()].concat())]);
    // The name user-agent is 58 in the static table; the value is `custom-value`, in Huffman code as in appendix C.4.3.
    let plain = b"\x0ccustom-value";
    let huffman = b"\x89\x25\xa8\x49\xe9\x5b\xb8\xe8\xb4\xbf";
    let plain_name = b"\x0acustom-key";
    let huffman_name = b"\x88\x25\xa8\x49\xe9\x5b\xa9\x7d\x7f";
    let literal =
        |first: &[u8], name: &[u8], value: &[u8]| get_then(&[first, name, value].concat());
    // Indexed by an earlier field of the same block: the first entry of the dynamic table.
    let indexed = [&[0x40][..], plain_name, plain, &[0xbe]].concat();
    let ok = Response(200);
    vec![
        case("RFC 7541 2.3.3", "an index beyond both tables", [get_then(&[0xff, 0x07])], error).but(Outcome::Goaway(PROTOCOL_ERROR), UNDECODABLE),
        case("RFC 7541 2.3.3", "the name of an index beyond both tables", [get_then(&[0x7f, 0x07, 0x00])], error).but(Outcome::Goaway(PROTOCOL_ERROR), UNDECODABLE),
        case("RFC 7541 4.2", "a table size update after a field", [get_then(&[0x21])], error).but(Outcome::Goaway(PROTOCOL_ERROR), UNDECODABLE),
        case("RFC 7541 4.2", "two table size updates", [before_get(&[0x3f, 0x61, 0x3f, 0xe1, 0x1f])], ok),
        case("RFC 7541 5.1", "an integer without end", [get_then(&[&[0xff][..], &[0x80; 20]].concat())], error).but(Outcome::Goaway(PROTOCOL_ERROR), UNDECODABLE),
        case("RFC 7541 5.2", "padding of more than 7 bits", [literal(HUFFMAN_NAME, &[], &[0x84, 0x49, 0x50, 0x9f, 0xff])], error).but(Outcome::Goaway(PROTOCOL_ERROR), UNDECODABLE),
        case("RFC 7541 5.2", "padding of zeros", [literal(HUFFMAN_NAME, &[], &[0x83, 0x49, 0x50, 0x90])], error).but(Outcome::Goaway(PROTOCOL_ERROR), UNDECODABLE),
        case("RFC 7541 5.2", "the EOS symbol", [literal(HUFFMAN_NAME, &[], &[0x87, 0x49, 0x51, 0xff, 0xff, 0xff, 0xfa, 0x7f])], error).but(Outcome::Goaway(PROTOCOL_ERROR), UNDECODABLE),
        case("RFC 7541 5.2", "a string beyond the end of the block", [literal(HUFFMAN_NAME, &[], &[0x7f, 0x01])], error).but(Outcome::Goaway(PROTOCOL_ERROR), UNDECODABLE),
        case("RFC 7541 6.1", "index 0", [get_then(&[0x80])], error).but(Outcome::Goaway(PROTOCOL_ERROR), UNDECODABLE),
        case("RFC 7541 6.1", "an indexed field of the dynamic table", [get_then(&indexed)], ok),
        case("RFC 7541 6.1", "indexed fields of the static table", [send(&[request(&[&[0x82, 0x87][..], &headers(&[(":path", "/openapi.json"), (":authority", "localhost")])] .concat())])], ok),
        case("RFC 7541 6.2.1", "incremental indexing, indexed name", [literal(&[0x7a], &[], plain)], ok),
        case("RFC 7541 6.2.1", "incremental indexing, indexed name, Huffman code", [literal(&[0x7a], &[], huffman)], ok),
        case("RFC 7541 6.2.1", "incremental indexing, new name", [literal(&[0x40], plain_name, plain)], ok),
        case("RFC 7541 6.2.1", "incremental indexing, new name, Huffman code", [literal(&[0x40], huffman_name, huffman)], ok),
        case("RFC 7541 6.2.2", "without indexing, indexed name", [literal(&[0x0f, 0x2b], &[], plain)], ok),
        case("RFC 7541 6.2.2", "without indexing, indexed name, Huffman code", [literal(&[0x0f, 0x2b], &[], huffman)], ok),
        case("RFC 7541 6.2.2", "without indexing, new name", [literal(&[0x00], plain_name, plain)], ok),
        case("RFC 7541 6.2.2", "without indexing, new name, Huffman code", [literal(&[0x00], huffman_name, huffman)], ok),
        case("RFC 7541 6.2.3", "never indexed, indexed name", [literal(&[0x1f, 0x2b], &[], plain)], ok),
        case("RFC 7541 6.2.3", "never indexed, indexed name, Huffman code", [literal(&[0x1f, 0x2b], &[], huffman)], ok),
        case("RFC 7541 6.2.3", "never indexed, new name", [literal(&[0x10], plain_name, plain)], ok),
        case("RFC 7541 6.2.3", "never indexed, new name, Huffman code", [literal(&[0x10], huffman_name, huffman)], ok),
        case("RFC 7541 6.3", "a table size update", [before_get(&[0x3f, 0x61])], ok),
        case("RFC 7541 6.3", "a table size above SETTINGS_HEADER_TABLE_SIZE", [before_get(&[0x3f, 0xe2, 0x1f])], error).but(Outcome::Goaway(PROTOCOL_ERROR), UNDECODABLE),
    ]
}

fn all_cases(add: &[u8]) -> Vec<Case> {
    let tables = [
        frame_cases(add),
        stream_cases(add),
        request_frame_cases(add),
        connection_frame_cases(add),
        message_cases(add),
        hpack_cases(),
    ];
    tables.into_iter().flatten().collect()
}

#[test]
fn the_server_does_what_the_standard_says_about_every_frame() {
    let tls = start(&[]);
    let cases = all_cases(&tls.add_headers());
    let mut problems = Vec::new();
    for case in &cases {
        let outcome = case.run(&tls);
        let Case {
            section,
            what,
            expected,
            deviation,
            ..
        } = case;
        let is_met = meets(&outcome, *expected);
        match deviation {
            None if !is_met => problems.push(format!(
                "{section}, {what}: {outcome:?}, expected {expected:?}"
            )),
            Some((known, reason)) if outcome != *known => {
                problems.push(format!(
                    "{section}, {what}: {outcome:?}, not the deviation {known:?} ({reason})"
                ));
            }
            Some(_) if is_met => problems.push(format!("{section}, {what}: no deviation any more")),
            _ => {}
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    tls.works();
    let deviations = cases.iter().filter(|case| case.deviation.is_some());
    let documented = format!(
        "{} cases, {} of which deviate",
        cases.len(),
        deviations.count()
    );
    let guide = include_str!("../../docs/security.md");
    assert!(guide.contains(&documented), "{documented}");
}
