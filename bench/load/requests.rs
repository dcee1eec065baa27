//! The requests. Id, name and body depend only on the number of the request, so every server gets the same plants.

use std::fs;
use std::io::Write;

use anyhow::Context;

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
    head: String,
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
        Ok(Self {
            head,
            tokens: tokens.lines().map(str::to_owned).collect(),
            bodies: settings.body.iter().map(|body| pieces(body)).collect(),
            first: settings.first,
            random: settings.random,
            body: Vec::new(),
            request: Vec::new(),
        })
    }

    /// The bytes of the request with this number.
    pub fn make(&mut self, number: u64) -> &[u8] {
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
        self.request.clear();
        self.request.extend_from_slice(self.head.as_bytes());
        if !self.tokens.is_empty() {
            let token = cycle(&self.tokens, number);
            write!(self.request, "Authorization: Bearer {token}\r\n")
                .expect("a Vec takes anything");
        }
        write!(self.request, "Content-Length: {}\r\n\r\n", self.body.len())
            .expect("a Vec takes anything");
        self.request.extend_from_slice(&self.body);
        &self.request
    }
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
