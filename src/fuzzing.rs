//! What must hold for arbitrary bytes from outside: entry points for `fuzz/`, and a test that replays the corpus.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use hyper::Request;
use hyper::body::{Body, Bytes};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::runtime::{Builder, Runtime};

use crate::auth::{KnownTokens, RuntimeTokens, verify_jwt};
use crate::cli::parse_config;
use crate::formats::{Format, Reader};
use crate::http::client::Peer;
use crate::http::connection::ConnectionState;
use crate::http::error::ErrorKind;
use crate::http::{
    AppState, Credentials, Handled, Limits, RequestContext, decode_request, http1, http2,
};
use crate::metrics::Metrics;
use crate::plant::oracle::{Verdict, judge};
use crate::plant::{Invalid, NewPlant};
use crate::shutdown::Shutdown;
use crate::store::{Location, Mode, Store, inspect_wal};
use crate::token::Token;
use crate::writer::Writer;

pub type Target = fn(&[u8]);

/// The name of each target is that of its directory in `fuzz/corpus`.
pub const TARGETS: [(&str, Target); 9] = [
    ("plant", plant),
    ("credentials", credentials),
    ("jwt", jwt),
    ("client_address", client_address),
    ("import", import),
    ("configuration", configuration),
    ("wal", wal),
    ("http", http),
    ("http2", http2),
];

/// The decoder agrees with an oracle that was written without looking at it.
pub fn plant(bytes: &[u8]) {
    let decoded = match NewPlant::from_json(bytes) {
        Ok(NewPlant { id, plant }) => Verdict::Plant(id, plant.name, plant.tag),
        Err(Invalid::NotAPlant(_)) => Verdict::NotAPlant,
        Err(Invalid::NotJson(_)) => Verdict::NotJson,
    };
    // The oracle is recursive; the decoder has a limit of its own.
    let depth = bytes.iter().filter(|byte| b"[{".contains(byte)).count();
    if depth < 100 {
        assert_eq!(decoded, judge(bytes), "{}", bytes.escape_ascii());
    }
}

/// Whatever is accepted as a token is well-formed, and is the token that was sent.
pub fn credentials(bytes: &[u8]) {
    let Ok(value) = hyper::header::HeaderValue::from_bytes(bytes) else {
        return;
    };
    let parsed = crate::http::credentials(Some(&value), false, false);
    if let Ok(Credentials::Token(token)) = parsed {
        let text = value.to_str().expect("a token is ASCII");
        assert!(text.ends_with(token.reveal()) || text.trim_end().ends_with(token.reveal()));
        assert_eq!(token.reveal().len(), 42);
        assert!(Token::parse(token.reveal()).is_some());
    }
}

/// A first line with keys, and a JWT: it is verified with these keys, and it is not accepted with the key of another.
pub fn jwt(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let (keys, jwt) = text.split_once('\n').unwrap_or(("{}", text));
    verify_jwt(keys, jwt);
    let other = r#"{"keys":[{"kty":"OKP","crv":"Ed25519","x":"11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"}]}"#;
    assert!(!verify_jwt(other, jwt), "{jwt}");
}

/// The client has an address in its canonical form, as it is logged; and nothing before what the proxy has added matters.
pub fn client_address(bytes: &[u8]) {
    use hyper::header::{FORWARDED, HeaderMap, HeaderName, HeaderValue};
    let trusted = ["10.0.0.0/8".parse().expect("a network")];
    let peer = Peer::new([10, 0, 0, 1].into(), &trusted);
    for (name, last) in [
        (FORWARDED, "for=192.0.2.7"),
        (HeaderName::from_static("x-forwarded-for"), "192.0.2.7"),
    ] {
        let mut headers = HeaderMap::new();
        for line in bytes.split(|byte| *byte == b'\n') {
            if let Ok(value) = HeaderValue::from_bytes(line) {
                headers.append(&name, value);
            }
        }
        let (address, text) = peer.client(&headers, &trusted);
        assert_eq!(address.to_string(), text);
        assert_eq!(address, address.to_canonical());
        headers.append(&name, HeaderValue::from_static(last));
        assert_eq!(peer.client(&headers, &trusted).1, "192.0.2.7");
    }
}

/// Every row is a plant or a rejection, whether its text is kept or not; and what is written is read back.
pub fn import(bytes: &[u8]) {
    let Some((first, bytes)) = bytes.split_first() else {
        return;
    };
    let format = [Format::Ndjson, Format::Csv][usize::from(first % 2)];
    let plants = |keeps_text: bool| {
        let mut reader = Reader::new(bytes, format, 1000, keeps_text);
        let mut plants = Vec::new();
        while let Ok(Some(entry)) = reader.next_entry() {
            plants.extend(entry.plant.ok());
        }
        plants
    };
    let read = plants(false);
    assert_eq!(read, plants(true));
    let mut written = Vec::new();
    format.write_head(&mut written).expect("memory");
    for NewPlant { id, plant } in &read {
        format
            .write_plant(&mut written, *id, plant)
            .expect("memory");
    }
    let mut reader = Reader::new(&written[..], format, 10_000, false);
    for plant in read {
        let entry = reader.next_entry().expect("memory").expect("a plant");
        assert_eq!(entry.plant.ok(), Some(plant));
    }
}

/// Any text is a configuration or is rejected with a message.
pub fn configuration(bytes: &[u8]) {
    if let Ok(text) = std::str::from_utf8(bytes)
        && let Err(problem) = parse_config(text)
    {
        assert!(!problem.is_empty());
    }
}

/// The check reads to the end of any file.
pub fn wal(bytes: &[u8]) {
    let Some((pages, bytes)) = bytes.split_first() else {
        return;
    };
    inspect_wal(bytes, u64::from(*pages) * 4096);
}

/// A connection that receives arbitrary bytes in arbitrary pieces: whatever comes back is a sequence of responses, one for each
/// request that was handled and at most one more, after which the connection is closed.
pub fn http(bytes: &[u8]) {
    SERVER.with_borrow(|server| server.receive(bytes));
}

/// The same after the start of an HTTP/2 connection: it ends, and whatever comes back is a sequence of frames.
pub fn http2(bytes: &[u8]) {
    let Some((piece, bytes)) = bytes.split_first() else {
        return;
    };
    // An empty SETTINGS frame follows the preface.
    let start = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    let bytes = [&start[..], bytes].concat();
    let received = SERVER.with_borrow(|server| {
        server.exchange(&bytes, *piece, |stream, connection| {
            http2::serve(stream, Arc::clone(&server.state), connection, decode)
        })
    });
    HANDLED.take();
    let mut rest = &received[..];
    while let [high, middle, low, _, _, _, _, _, _, payload @ ..] = rest {
        let len = u32::from_be_bytes([0, *high, *middle, *low]) as usize;
        let next = payload.get(len..);
        rest = next.unwrap_or_else(|| panic!("{}", received.escape_ascii()));
    }
    assert!(rest.is_empty(), "{}", received.escape_ascii());
}

thread_local! {
    static SERVER: RefCell<HttpServer> = RefCell::new(HttpServer::start());

    /// For each request that was handled, whether its response has no body.
    static HANDLED: RefCell<Vec<bool>> = const { RefCell::new(Vec::new()) };
}

/// More would take most of the time of a run.
const PIECES_MAX: usize = 16;

struct HttpServer {
    runtime: Runtime,
    state: Arc<AppState>,
}

impl HttpServer {
    fn start() -> Self {
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.expect("a runtime");
        let _here = runtime.enter();
        let directory =
            std::env::temp_dir().join(format!("plantstore-fuzz-{}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a directory");
        let location = Location::Sqlite(directory.join("plantstore.db"));
        let open = || Store::open(&location, Mode::Create).expect("a store");
        let metrics = Arc::new(Metrics::new(ErrorKind::ALL.iter().map(|kind| kind.code())));
        let timeout = Duration::from_secs(60);
        let (writer, _threads) = Writer::spawn(vec![open()], 1, timeout, Arc::clone(&metrics));
        let tokens =
            KnownTokens::start(open(), writer.clone(), Arc::clone(&metrics), timeout, None);
        let state = Arc::new(AppState {
            tokens: RuntimeTokens::new(&tokens, None),
            writer,
            metrics: metrics.for_runtime(),
            shutdown: Shutdown::default(),
            limits: Arc::new(Limits::default()),
        });
        Self { runtime, state }
    }

    /// Sends the bytes in pieces of this length, of which there are not many more than `PIECES_MAX`. Returns what comes back.
    fn exchange<F: Future<Output = ()>>(
        &self,
        bytes: &[u8],
        piece: u8,
        serve: impl FnOnce(DuplexStream, Arc<ConnectionState>) -> F,
    ) -> Vec<u8> {
        self.runtime.block_on(async {
            let (server, mut client) = duplex(1 << 16);
            let peer = Peer::new([127, 0, 0, 1].into(), &[]);
            let connection = ConnectionState::new(peer, Arc::default());
            let serve = serve(server, connection);
            let talk = async {
                let piece = usize::from(piece).max(bytes.len() / PIECES_MAX).max(1);
                for piece in bytes.chunks(piece) {
                    if client.write_all(piece).await.is_err() {
                        break;
                    }
                    tokio::task::yield_now().await;
                }
                let _ = client.shutdown().await;
                let mut received = Vec::new();
                let _ = client.read_to_end(&mut received).await;
                received
            };
            tokio::join!(serve, talk).1
        })
    }

    /// The first byte says how long the pieces are.
    fn receive(&self, bytes: &[u8]) {
        let Some((piece, bytes)) = bytes.split_first() else {
            return;
        };
        HANDLED.take();
        let received = self.exchange(bytes, *piece, |stream, connection| {
            http1::serve(stream, Arc::clone(&self.state), connection, decode)
        });
        let handled = HANDLED.take();
        let mut rest = &received[..];
        let mut responses = 0;
        while !rest.is_empty() {
            let is_head = handled.get(responses) == Some(&true);
            let response = next_response(&mut rest, is_head);
            let response = response.unwrap_or_else(|| panic!("{}", received.escape_ascii()));
            responses += usize::from(!response.starts_with("HTTP/1.1 100"));
        }
        let expected = handled.len()..=handled.len() + 1;
        assert!(
            expected.contains(&responses),
            "{expected:?} {}",
            received.escape_ascii()
        );
    }
}

/// Decodes a plant without a token.
async fn decode<B>(state: Arc<AppState>, request: Request<B>, context: RequestContext) -> Handled
where
    B: Body<Data = Bytes> + Unpin,
{
    HANDLED.with_borrow_mut(|handled| handled.push(request.method() == hyper::Method::HEAD));
    decode_request(state, request, context).await
}

/// Takes a response with a length from the start of the bytes.
fn next_response<'a>(bytes: &mut &'a [u8], is_head: bool) -> Option<&'a str> {
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n")? + 4;
    let head = std::str::from_utf8(&bytes[..end]).ok()?;
    let length = head
        .lines()
        .find_map(|line| line.strip_prefix("content-length: "));
    let length = length.filter(|_| !is_head);
    let length = length.map_or(Some(0), |length| length.parse().ok())?;
    *bytes = bytes.get(end + length..)?;
    head.starts_with("HTTP/1.").then_some(head)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn the_corpus_is_replayed() {
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus");
        for (name, target) in TARGETS {
            let files = fs::read_dir(corpus.join(name)).expect(name);
            let count = files
                .map(|file| target(&fs::read(file.expect("a file").path()).expect("a file")))
                .count();
            assert!(count > 5, "{name}: {count} inputs");
        }
    }
}
