//! The requests. Id, name and body depend only on the number of the request, so every server gets the same plants.

use std::fs;
use std::io::Write;

use anyhow::{Context, ensure};

use crate::Settings;

const NAMES: [&str; 8] = [
    "Monstera deliciosa",
    "Fern",
    "Snake plant",
    "Ficus lyrata",
    "Jade",
    "Peace lily",
    "Zamioculcas zamiifolia",
    "Aloe vera",
];

/// The template of the requests.
pub struct Requests {
    /// The start of an HTTP/1.1 request.
    head: String,
    /// The start of an HTTP/2 header block: of the first request of a connection, whose headers go into HPACK's dynamic table,
    /// and of the others, which refer to them.
    first_block: Vec<u8>,
    later_block: Vec<u8>,
    tokens: Vec<String>,
    bodies: Vec<Vec<Piece>>,
    first: u64,
    random: bool,
    body: Vec<u8>,
    request: Vec<u8>,
}

enum Piece {
    Text(String),
    Id,
    Name,
}

/// One request. Its bytes depend on the version of HTTP.
pub struct Request<'a> {
    requests: &'a mut Requests,
    number: u64,
}

impl Requests {
    pub fn new(settings: &Settings) -> anyhow::Result<Self> {
        let mut head = format!(
            "{} {} HTTP/1.1\r\nHost: {}\r\n",
            settings.method, settings.path, settings.address
        );
        for header in &settings.header {
            head.push_str(header);
            head.push_str("\r\n");
        }
        let tokens = match &settings.tokens {
            Some(path) => fs::read_to_string(path).context("read the tokens")?,
            None => String::new(),
        };
        let (first_block, later_block) = header_blocks(settings)?;
        Ok(Self {
            head,
            first_block,
            later_block,
            tokens: tokens.lines().map(str::to_owned).collect(),
            bodies: settings.body.iter().map(|body| pieces(body)).collect(),
            first: settings.first,
            random: settings.random,
            body: Vec::new(),
            request: Vec::new(),
        })
    }

    /// The request with this number.
    pub fn make(&mut self, number: u64) -> Request<'_> {
        let number = self.first + number;
        let id = if self.random {
            shuffled(number)
        } else {
            number
        };
        self.body.clear();
        for piece in cycle(&self.bodies, number) {
            match piece {
                Piece::Text(text) => self.body.extend_from_slice(text.as_bytes()),
                Piece::Id => write!(self.body, "{id}").expect("a Vec takes anything"),
                Piece::Name => self
                    .body
                    .extend_from_slice(cycle(&NAMES, number).as_bytes()),
            }
        }
        Request {
            requests: self,
            number,
        }
    }
}

impl Request<'_> {
    pub fn body(&self) -> &[u8] {
        &self.requests.body
    }

    pub fn as_http1(&mut self) -> &[u8] {
        let Requests {
            head,
            tokens,
            body,
            request,
            ..
        } = &mut *self.requests;
        request.clear();
        request.extend_from_slice(head.as_bytes());
        if !tokens.is_empty() {
            let token = cycle(tokens, self.number);
            write!(request, "Authorization: Bearer {token}\r\n").expect("a Vec takes anything");
        }
        write!(request, "Content-Length: {}\r\n\r\n", body.len()).expect("a Vec takes anything");
        request.extend_from_slice(body);
        request
    }

    /// The headers for HTTP/2.
    pub fn header_block(&mut self, is_first_of_connection: bool) -> &[u8] {
        let Requests {
            first_block,
            later_block,
            tokens,
            body,
            request,
            ..
        } = &mut *self.requests;
        request.clear();
        request.extend_from_slice(if is_first_of_connection {
            first_block
        } else {
            later_block
        });
        if !tokens.is_empty() {
            let token = cycle(tokens, self.number);
            request.extend_from_slice(&WITHOUT_INDEXING_AUTHORIZATION);
            hpack_string(request, &format!("Bearer {token}"));
        }
        request.extend_from_slice(&WITHOUT_INDEXING_CONTENT_LENGTH);
        hpack_string(request, &body.len().to_string());
        request
    }
}

/// HPACK (RFC 7541): `:scheme: https`, and fields whose name is in the static table.
const SCHEME_HTTPS: u8 = 0x80 | 7;
const WITHOUT_INDEXING_AUTHORIZATION: [u8; 2] = [0x0f, 23 - 0x0f];
const WITHOUT_INDEXING_CONTENT_LENGTH: [u8; 2] = [0x0f, 28 - 0x0f];
const WITH_INDEXING_NEW_NAME: u8 = 0x40;

/// The first index of the dynamic table, which is that of the newest field, and the size of the table.
const DYNAMIC: usize = 62;
const DYNAMIC_BYTES_MAX: usize = 4096;

fn header_blocks(settings: &Settings) -> anyhow::Result<(Vec<u8>, Vec<u8>)> {
    let authority = settings.address.to_string();
    let mut fields = vec![
        (":method".to_owned(), settings.method.as_str()),
        (":path".to_owned(), settings.path.as_str()),
        (":authority".to_owned(), authority.as_str()),
    ];
    for header in &settings.header {
        let (name, value) = header
            .split_once(": ")
            .context("a header without a colon")?;
        fields.push((name.to_ascii_lowercase(), value));
    }
    let sizes = fields
        .iter()
        .map(|(name, value)| name.len() + value.len() + 32);
    ensure!(
        sizes.sum::<usize>() <= DYNAMIC_BYTES_MAX,
        "too many headers"
    );
    let (mut first, mut later) = (vec![SCHEME_HTTPS], vec![SCHEME_HTTPS]);
    for (number, (name, value)) in fields.iter().enumerate() {
        first.push(WITH_INDEXING_NEW_NAME);
        hpack_string(&mut first, name);
        hpack_string(&mut first, value);
        let index = DYNAMIC + fields.len() - 1 - number;
        let index = u8::try_from(index).ok().filter(|index| *index < 0x7f);
        later.push(0x80 | index.context("too many headers")?);
    }
    Ok((first, later))
}

/// Without Huffman coding.
fn hpack_string(to: &mut Vec<u8>, text: &str) {
    let mut len = text.len();
    if len < 0x7f {
        to.extend(u8::try_from(len));
    } else {
        to.push(0x7f);
        len -= 0x7f;
        while len >= 0x80 {
            to.push(0x80 | u8::try_from(len % 0x80).expect("less than 0x80"));
            len /= 0x80;
        }
        to.extend(u8::try_from(len));
    }
    to.extend_from_slice(text.as_bytes());
}

fn cycle<T>(items: &[T], number: u64) -> &T {
    let index = number % items.len() as u64;
    &items[usize::try_from(index).expect("less than a length")]
}

fn pieces(body: &str) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for (index, part) in body.split('@').enumerate() {
        let text = match part {
            _ if index == 0 => part,
            _ if part.starts_with("id") => {
                pieces.push(Piece::Id);
                &part[2..]
            }
            _ if part.starts_with("name") => {
                pieces.push(Piece::Name);
                &part[4..]
            }
            _ => panic!("--body knows @id and @name, not @{part}"),
        };
        pieces.push(Piece::Text(text.to_owned()));
    }
    pieces
}

/// A permutation of the integers below 2^53, the range that JavaScript represents exactly.
fn shuffled(number: u64) -> u64 {
    const MASK: u64 = (1 << 53) - 1;
    let number = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) & MASK;
    let number = (number ^ (number >> 27)).wrapping_mul(0xbf58_476d_1ce4_e5b9) & MASK;
    let number = (number ^ (number >> 25)).wrapping_mul(0x94d0_49bb_1331_11eb) & MASK;
    number ^ (number >> 28)
}
