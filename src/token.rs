//! A bearer token: its format, checksum and digest. The secret leaves a `Token` only through `reveal`.

use std::fmt;

use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

const PREFIX: &str = "plant_";
const RANDOM_LEN: usize = 30;
const CHECKSUM_LEN: usize = 6;
const BASE62: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/// `plant_`, 30 random base62 characters, and the CRC-32 of those 30 as 6 base62 digits.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// From random numbers of the operating system: 30 characters are 178 bits.
    pub fn generate() -> Result<Self, getrandom::Error> {
        let mut random = String::new();
        let mut bytes = [0; 64];
        while random.len() < RANDOM_LEN {
            getrandom::fill(&mut bytes)?;
            // 248 is the largest multiple of 62 in a byte; with larger numbers `%` would favour some characters.
            let unbiased = bytes.iter().filter(|&&byte| byte < 248);
            random.extend(unbiased.map(|byte| char::from(BASE62[usize::from(byte % 62)])));
        }
        random.truncate(RANDOM_LEN);
        let checksum = checksum(&random);
        Ok(Self(format!("{PREFIX}{random}{checksum}")))
    }

    /// Checks the format and the checksum, not whether the token exists.
    pub fn parse(text: &str) -> Option<Self> {
        let rest = text.strip_prefix(PREFIX)?;
        let (random, check) = rest.split_at_checked(RANDOM_LEN)?;
        let well_formed =
            random.bytes().all(|byte| byte.is_ascii_alphanumeric()) && check == checksum(random);
        well_formed.then(|| Self(text.to_owned()))
    }

    pub fn digest(&self) -> TokenDigest {
        TokenDigest(Sha256::digest(&self.0).into())
    }

    /// The secret itself, to be shown once to its owner.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(secret)")
    }
}

/// How the name of a subject of an identity provider starts. No other name has a colon.
pub(crate) const SUBJECT_PREFIX: &str = "oidc:";

/// Parses the name of a token that may exist; the subject of an identity provider has a longer one.
pub(crate) fn parse_existing_name(text: &str) -> Result<String, String> {
    match Token::parse(text) {
        Some(_) => {
            Err("this is a token itself, not the name of a token; keep it secret".to_owned())
        }
        None => Ok(text.to_owned()),
    }
}

/// Parses the name of a new token, which needs no quoting in a log or on a command line.
pub(crate) fn parse_name(text: &str) -> Result<String, String> {
    let text = &parse_existing_name(text)?;
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || "._@-".contains(c);
    if (1..=64).contains(&text.len()) && text.chars().all(is_allowed) {
        Ok(text.to_owned())
    } else {
        Err("expected 1 to 64 letters, digits, and . _ @ -".to_owned())
    }
}

/// The SHA-256 of a token, which is what the store has of it. Compared in constant time, so that the response time reveals
/// nothing about stored digests.
#[derive(Clone, Copy, Eq)]
pub struct TokenDigest(pub [u8; 32]);

impl TokenDigest {
    /// For a subject of an identity provider, which has no secret here. No token has this digest: a name is not a token.
    pub(crate) fn of_name(name: &str) -> Self {
        debug_assert!(Token::parse(name).is_none());
        Self(Sha256::digest(name).into())
    }
}

impl PartialEq for TokenDigest {
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl std::hash::Hash for TokenDigest {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

impl fmt::Debug for TokenDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenDigest(…)")
    }
}

fn checksum(random: &str) -> String {
    let mut rest = crc32fast::hash(random.as_bytes());
    let mut digits = [b'0'; CHECKSUM_LEN];
    for digit in digits.iter_mut().rev() {
        *digit = BASE62[(rest % 62) as usize];
        rest /= 62;
    }
    digits.iter().map(|&digit| char::from(digit)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_generated_token_has_the_documented_shape_and_parses() {
        let token = Token::generate().expect("randomness");
        assert_eq!(token.reveal().len(), 42);
        assert!(token.reveal().starts_with("plant_"));
        assert_eq!(Token::parse(token.reveal()), Some(token.clone()));
        assert_ne!(token, Token::generate().expect("randomness"));
    }

    #[test]
    fn the_checksum_is_the_crc_32_of_the_random_part_in_base62() {
        // zlib.crc32(b"0" * 30) in Python is 2011552642, which is 2C8GjS in base62.
        assert!(Token::parse(&format!("plant_{}2C8GjS", "0".repeat(30))).is_some());
    }

    #[test]
    fn one_changed_character_breaks_the_checksum() {
        let token = Token::generate().expect("randomness").reveal().to_owned();
        for at in 0..token.len() {
            let mut changed = token.clone().into_bytes();
            changed[at] = if changed[at] == b'x' { b'y' } else { b'x' };
            let changed = String::from_utf8(changed).expect("ASCII");
            assert_eq!(Token::parse(&changed), None, "position {at}");
        }
    }

    #[test]
    fn other_text_is_rejected_without_a_panic() {
        for text in [
            "",
            "plant_",
            "plant_é",
            "Plant_",
            &"plant_é".repeat(9),
            &"x".repeat(42),
        ] {
            assert_eq!(Token::parse(text), None);
        }
    }

    #[test]
    fn debug_shows_neither_the_token_nor_its_digest() {
        let token = Token::generate().expect("randomness");
        assert_eq!(
            format!("{token:?} {:?}", token.digest()),
            "Token(secret) TokenDigest(…)"
        );
    }
}
