//! Verifies JWTs with the keys of an identity provider: algorithm, signature and claims. No I/O.

use std::sync::Arc;

use jiff::Timestamp;
use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::{Validation, decode, decode_header};
use serde::Deserialize;

use crate::auth::oidc::keys::{KeySet, NoKey};

/// How far the clocks of the provider and of this machine may be apart.
const LEEWAY_S: u8 = 30;

/// The most characters of a subject, which is part of the name in the log (OpenID Connect Core, section 2).
const SUBJECT_LEN_MAX: usize = 255;

/// RFC 9068 for access tokens; providers that are older than it use `JWT` or leave it out. Other types are for other purposes.
const TYPES: [&str; 3] = ["jwt", "at+jwt", "application/at+jwt"];

/// What a JWT must have to be accepted.
pub(super) struct Expected {
    pub issuer: String,
    pub audience: String,
    pub scope: Option<Arc<str>>,
}

#[derive(Debug)]
pub(super) struct VerifiedJwt {
    /// `oidc:SUBJECT@ISSUER`. The name of a token cannot contain a colon.
    pub name: Arc<str>,
    pub valid_until: Timestamp,
    pub has_scope: bool,
}

/// Why a JWT is not accepted.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Rejection {
    /// A newer version of the key set may have the key.
    UnknownKey,
    Expired,
    /// The end of a sentence for the client.
    Invalid(&'static str),
}

#[derive(Deserialize)]
struct Claims {
    /// A string: the crate would also accept a list that contains the issuer.
    #[serde(rename = "iss")]
    _issuer: String,
    #[serde(rename = "sub")]
    subject: String,
    #[serde(rename = "exp")]
    expires_at: f64,
    scope: Option<Scopes>,
    /// The name of the claim before RFC 9068, still used by some providers.
    scp: Option<Scopes>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Scopes {
    /// Separated by spaces.
    Text(String),
    List(Vec<String>),
}

impl Scopes {
    fn contain(&self, scope: &str) -> bool {
        match self {
            Self::Text(text) => text.split(' ').any(|granted| granted == scope),
            Self::List(list) => list.iter().any(|granted| granted == scope),
        }
    }
}

pub(super) fn verify(
    jwt: &str,
    keys: &KeySet,
    expected: &Expected,
) -> Result<VerifiedJwt, Rejection> {
    let header = decode_header(jwt).map_err(|_| {
        Rejection::Invalid("it is neither a token of this service nor a JWT with a signature")
    })?;
    let is_known = |name: &String| TYPES.iter().any(|known| name.eq_ignore_ascii_case(known));
    if !header.typ.as_ref().is_none_or(is_known) {
        return Err(Rejection::Invalid("its typ is not JWT or at+jwt"));
    }
    if header.crit.is_some() {
        return Err(Rejection::Invalid("it has extensions in crit"));
    }
    let key = keys.find(header.kid.as_deref(), header.alg);
    let key = key.map_err(|no_key| match no_key {
        NoKey::Unknown => Rejection::UnknownKey,
        NoKey::Ambiguous => Rejection::Invalid("it has no kid, and the provider has several keys"),
        NoKey::OtherAlgorithm => Rejection::Invalid("its key is not for its algorithm"),
        NoKey::UnsupportedAlgorithm => {
            Rejection::Invalid("its algorithm is not RS256, PS256, ES256 or EdDSA")
        }
    })?;
    let mut validation = Validation::new(header.alg);
    validation.leeway = LEEWAY_S.into();
    validation.validate_nbf = true;
    validation.set_required_spec_claims(&["exp", "iss", "aud", "sub"]);
    validation.set_issuer(&[&expected.issuer]);
    validation.set_audience(&[&expected.audience]);
    let claims = decode::<Claims>(jwt, key, &validation);
    let claims = claims.map_err(|error| rejection(error.kind()))?.claims;
    let scopes = [&claims.scope, &claims.scp].into_iter().flatten();
    let has_scope = expected.scope.as_ref().is_none_or(|scope| {
        let mut granted = scopes;
        granted.any(|scopes| scopes.contain(scope))
    });
    Ok(VerifiedJwt {
        name: name(&claims.subject, &expected.issuer)?,
        valid_until: valid_until(claims.expires_at),
        has_scope,
    })
}

fn rejection(error: &ErrorKind) -> Rejection {
    match error {
        ErrorKind::ExpiredSignature => Rejection::Expired,
        ErrorKind::ImmatureSignature => Rejection::Invalid("it is not valid yet"),
        ErrorKind::InvalidIssuer => Rejection::Invalid("it is from another issuer"),
        ErrorKind::InvalidAudience => Rejection::Invalid("it is for another audience"),
        ErrorKind::InvalidSignature => Rejection::Invalid("its signature is not valid"),
        ErrorKind::Json(_) | ErrorKind::MissingRequiredClaim(_) => {
            Rejection::Invalid("it needs the claims iss, sub, aud and exp")
        }
        _ => Rejection::Invalid("it is malformed"),
    }
}

/// The issuer has no `@`, so different subjects have different names.
fn name(subject: &str, issuer: &str) -> Result<Arc<str>, Rejection> {
    let is_printable = subject.bytes().all(|byte| matches!(byte, b' '..=b'~'));
    if !is_printable || !(1..=SUBJECT_LEN_MAX).contains(&subject.len()) {
        return Err(Rejection::Invalid(
            "its sub is not 1 to 255 printable ASCII characters",
        ));
    }
    let issuer = issuer.split_once("://").map_or(issuer, |(_, rest)| rest);
    Ok(format!("oidc:{subject}@{issuer}").into())
}

fn valid_until(expires_at: f64) -> Timestamp {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a number beyond the range of i64 becomes its limit"
    )]
    let seconds = (expires_at.round() as i64).saturating_add(LEEWAY_S.into());
    Timestamp::from_second(seconds).unwrap_or(Timestamp::MAX)
}
