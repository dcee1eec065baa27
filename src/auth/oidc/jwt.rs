//! Verifies JWTs with the keys of an identity provider: algorithm, signature and claims. No I/O.

use std::sync::Arc;

use jiff::Timestamp;
use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::{Validation, decode, decode_header};
use serde::Deserialize;

use crate::auth::oidc::keys::{KeySet, NoKey};
use crate::token::SUBJECT_PREFIX;

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
    /// `oidc:SUBJECT@ISSUER`.
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
    /// The name of the claim before RFC 9068, and what some providers put in its place for programs without a user.
    scp: Option<Scopes>,
    roles: Option<Scopes>,
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
        NoKey::Ambiguous => {
            Rejection::Invalid("several keys of the provider have its kid, or it has none")
        }
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
    let claims = claims.map_err(|error| match error.kind() {
        // Without a kid, the provider may have another key by now.
        ErrorKind::InvalidSignature if header.kid.is_none() => Rejection::UnknownKey,
        kind => rejection(kind),
    });
    let claims = claims?.claims;
    let scopes = [&claims.scope, &claims.scp, &claims.roles]
        .into_iter()
        .flatten();
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
        ErrorKind::Json(_) | ErrorKind::MissingRequiredClaim(_) => Rejection::Invalid(
            "its claims are malformed, or one of iss, sub, aud and exp is missing",
        ),
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
    Ok(format!("{SUBJECT_PREFIX}{subject}@{issuer}").into())
}

fn valid_until(expires_at: f64) -> Timestamp {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a number beyond the range of i64 becomes its limit"
    )]
    let seconds = (expires_at.round() as i64).saturating_add(LEEWAY_S.into());
    Timestamp::from_second(seconds).unwrap_or(Timestamp::MAX)
}

#[cfg(test)]
mod tests {
    use base64::Engine;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD as BASE64;
    use ring::rand::SystemRandom;
    use ring::signature::{Ed25519KeyPair, KeyPair};
    use serde_json::{Value, json};

    use super::*;

    fn key_pair() -> Ed25519KeyPair {
        let pair = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).expect("a key");
        Ed25519KeyPair::from_pkcs8(pair.as_ref()).expect("a key")
    }

    fn jwk(pair: &Ed25519KeyPair, changes: &Value) -> Value {
        let x = BASE64.encode(pair.public_key());
        changed(json!({"kty": "OKP", "crv": "Ed25519", "x": x}), changes)
    }

    fn key_set(keys: &[Value]) -> KeySet {
        let jwks = serde_json::from_value(json!({ "keys": keys })).expect("keys");
        KeySet::new(jwks)
    }

    /// Null removes a member.
    fn changed(mut object: Value, changes: &Value) -> Value {
        for (name, value) in changes.as_object().expect("an object") {
            object[name] = value.clone();
        }
        let members = object.as_object_mut().expect("an object");
        members.retain(|_, value| !value.is_null());
        object
    }

    fn sign(pair: &Ed25519KeyPair, header: &Value, claims: &Value) -> String {
        let [header, claims] = [header, claims].map(|part| BASE64.encode(part.to_string()));
        let message = format!("{header}.{claims}");
        let signature = BASE64.encode(pair.sign(message.as_bytes()));
        format!("{message}.{signature}")
    }

    fn expected() -> Expected {
        Expected {
            issuer: "https://login.example".to_owned(),
            audience: "plants".to_owned(),
            scope: Some("plants:write".into()),
        }
    }

    fn claims(changes: &Value) -> Value {
        let exp = Timestamp::now().as_second() + 3600;
        let usual = json!({"iss": "https://login.example", "aud": "plants", "sub": "alice", "exp": exp, "scope": "plants:write"});
        changed(usual, changes)
    }

    /// The result with a key that has the kid `a`: whether the scope is granted.
    fn check(header: &Value, changes: &Value) -> Result<bool, Rejection> {
        let pair = key_pair();
        let keys = key_set(&[jwk(&pair, &json!({"kid": "a"}))]);
        let header = changed(json!({"alg": "EdDSA", "kid": "a"}), header);
        let jwt = sign(&pair, &header, &claims(changes));
        verify(&jwt, &keys, &expected()).map(|verified| verified.has_scope)
    }

    #[test]
    fn the_header_decides_which_jwts_are_for_another_purpose() {
        for (header, is_accepted) in [
            (json!({}), true),
            (json!({"typ": "JWT"}), true),
            (json!({"typ": "at+jwt"}), true),
            (json!({"typ": "application/AT+JWT"}), true),
            (json!({"typ": "logout+jwt"}), false),
            (json!({"typ": "dpop+jwt"}), false),
            (json!({"crit": ["exp"]}), false),
            (json!({"crit": []}), false),
        ] {
            assert_eq!(check(&header, &json!({})).is_ok(), is_accepted, "{header}");
        }
    }

    #[test]
    fn every_claim_is_checked() {
        let now = Timestamp::now().as_second();
        for (changes, is_accepted) in [
            (json!({}), true),
            (json!({"iss": null}), false),
            (json!({"iss": "https://login.example/"}), false),
            (json!({"iss": ["https://login.example"]}), false),
            (json!({"aud": null}), false),
            (json!({"aud": "plants2"}), false),
            (json!({"aud": ["other", "plants"]}), true),
            (json!({"aud": []}), false),
            (json!({"sub": null}), false),
            (json!({"sub": ""}), false),
            (json!({"sub": "a\nb"}), false),
            (json!({"sub": "é"}), false),
            (json!({"sub": "x".repeat(255)}), true),
            (json!({"sub": "x".repeat(256)}), false),
            (json!({"exp": null}), false),
            (json!({"exp": "never"}), false),
            (json!({"exp": -1}), false),
            (json!({"exp": now - 3600}), false),
            (json!({"exp": 4_102_444_800.5}), true),
            (json!({"exp": 1e300}), false),
            (json!({"nbf": now - 10}), true),
            (json!({"nbf": now + 3600}), false),
            (json!({"nbf": "later"}), false),
        ] {
            assert_eq!(
                check(&json!({}), &changes).is_ok(),
                is_accepted,
                "{changes}"
            );
        }
        let expired = check(&json!({}), &json!({"exp": now - 3600}));
        assert_eq!(expired, Err(Rejection::Expired));
    }

    #[test]
    fn the_scope_is_one_of_a_list_in_any_of_three_claims() {
        for (changes, has_scope) in [
            (json!({"scope": null}), false),
            (json!({"scope": ""}), false),
            (json!({"scope": "plants:write2"}), false),
            (json!({"scope": "a plants:write b"}), true),
            (json!({"scope": ["a", "plants:write"]}), true),
            (json!({"scope": null, "scp": "plants:write"}), true),
            (json!({"scope": "a", "scp": ["plants:write"]}), true),
            (json!({"scope": null, "roles": ["plants:write"]}), true),
            (json!({"scope": null, "roles": ["a"]}), false),
        ] {
            assert_eq!(check(&json!({}), &changes), Ok(has_scope), "{changes}");
        }
    }

    #[test]
    fn a_key_is_found_by_its_kid_or_because_it_is_the_only_one() {
        let (pair, other) = (key_pair(), key_pair());
        let named = jwk(&pair, &json!({"kid": "a"}));
        let unnamed = jwk(&pair, &json!({}));
        let others = jwk(&other, &json!({"kid": "b"}));
        let encryption = jwk(&other, &json!({"kid": "a", "use": "enc"}));
        let ambiguous =
            Rejection::Invalid("several keys of the provider have its kid, or it has none");
        for (keys, kid, expected) in [
            (vec![&named, &others], Some("a"), None),
            (vec![&named, &encryption], Some("a"), None),
            (vec![&named], None, None),
            (vec![&unnamed], None, None),
            (vec![&unnamed], Some("a"), Some(Rejection::UnknownKey)),
            (vec![&others], None, Some(Rejection::UnknownKey)),
            (vec![], None, Some(Rejection::UnknownKey)),
            (vec![&named, &others], None, Some(ambiguous)),
            (
                vec![&others],
                Some("b"),
                Some(Rejection::Invalid("its signature is not valid")),
            ),
        ] {
            let keys: Vec<_> = keys.into_iter().cloned().collect();
            let header = changed(json!({"alg": "EdDSA"}), &json!({"kid": kid}));
            let jwt = sign(&pair, &header, &claims(&json!({})));
            let result = verify(&jwt, &key_set(&keys), &self::expected());
            assert_eq!(result.err(), expected, "{keys:?} {kid:?}");
        }
    }

    #[test]
    fn keys_that_cannot_be_used_are_left_out() {
        let pair = key_pair();
        let modulus = |bytes: &[u8]| BASE64.encode(bytes);
        let rsa = |n: String| json!({"kty": "RSA", "e": "AQAB", "n": n});
        for (key, is_used) in [
            (jwk(&pair, &json!({})), true),
            (jwk(&pair, &json!({"alg": "EdDSA"})), true),
            (jwk(&pair, &json!({"alg": "RS256"})), false),
            (jwk(&pair, &json!({"alg": "HS256"})), false),
            (jwk(&pair, &json!({"use": "enc"})), false),
            (jwk(&pair, &json!({"key_ops": ["sign"]})), false),
            (jwk(&pair, &json!({"key_ops": ["verify"]})), true),
            (json!({"kty": "oct", "k": "AAAA", "alg": "HS256"}), false),
            (
                json!({"kty": "EC", "crv": "P-384", "x": "AAAA", "y": "AAAA"}),
                false,
            ),
            (json!({"kty": "unknown"}), false),
            (json!("text"), false),
            (rsa(modulus(&[255; 256])), true),
            // With the sign of the number before it.
            (rsa(modulus(&[&[0][..], &[255; 256]].concat())), true),
            (rsa(modulus(&[255; 128])), false),
            (rsa(modulus(&[255; 2048])), false),
        ] {
            let keys = key_set(std::slice::from_ref(&key));
            assert_eq!(keys.len() == 1, is_used, "{key}");
            assert_eq!(keys.ignored, usize::from(!is_used));
        }
        let many = vec![jwk(&pair, &json!({})); 1000];
        assert_eq!(key_set(&many).len(), 100);
    }
}
