//! The keys of an identity provider (RFC 7517), and the verification of signatures with them.

use std::ops::RangeInclusive;

use jsonwebtoken::crypto::{CryptoProvider, JwtVerifier, KeyUtils};
use jsonwebtoken::errors::{ErrorKind, new_error};
use jsonwebtoken::jwk::{
    AlgorithmParameters, EllipticCurve, Jwk, KeyAlgorithm, KeyOperations, PublicKeyUse,
};
use jsonwebtoken::signature::{self, Verifier};
use jsonwebtoken::{Algorithm, DecodingKey, DecodingKeyKind};
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, ED25519, RSA_PKCS1_2048_8192_SHA256, RSA_PSS_2048_8192_SHA256,
    RsaPublicKeyComponents, UnparsedPublicKey,
};
use serde::Deserialize;

const SUPPORTED: [Algorithm; 4] = [
    Algorithm::RS256,
    Algorithm::PS256,
    Algorithm::ES256,
    Algorithm::EdDSA,
];

/// More than providers have; a larger set is cut off.
const KEYS_MAX: usize = 100;

/// The lengths of a modulus that ring accepts: 2048 to 8192 bits.
const RSA_BYTES: RangeInclusive<usize> = 256..=1024;

#[derive(Default)]
pub(super) struct KeySet {
    keys: Vec<Key>,
    /// How many keys of the provider are not in it.
    pub(super) ignored: usize,
}

struct Key {
    jwk: Jwk,
    algorithms: Vec<Algorithm>,
    public: DecodingKey,
}

/// Why a key set has no key for a JWT.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NoKey {
    Unknown,
    Ambiguous,
    OtherAlgorithm,
    UnsupportedAlgorithm,
}

/// As in the response of the provider. Keys of unknown types are left out one by one.
#[derive(Deserialize)]
pub(super) struct Jwks {
    keys: Vec<serde_json::Value>,
}

impl KeySet {
    pub(super) fn new(jwks: Jwks) -> Self {
        // Fails after the first time.
        let _ = RING.install_default();
        let published = jwks.keys.len();
        let keys = jwks.keys.into_iter().filter_map(|jwk| {
            let jwk = serde_json::from_value(jwk).ok()?;
            Key::new(jwk)
        });
        let keys: Vec<_> = keys.take(KEYS_MAX).collect();
        Self {
            ignored: published - keys.len(),
            keys,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.keys.len()
    }

    /// True if every key of the other set is in this one.
    pub(super) fn contains_all(&self, other: &Self) -> bool {
        let has = |key: &Key| self.keys.iter().any(|ours| ours.jwk == key.jwk);
        other.keys.iter().all(has)
    }

    /// The algorithm is chosen by the sender of the JWT: only one that the key is for is accepted.
    pub(super) fn find(
        &self,
        kid: Option<&str>,
        algorithm: Algorithm,
    ) -> Result<&DecodingKey, NoKey> {
        if !SUPPORTED.contains(&algorithm) {
            return Err(NoKey::UnsupportedAlgorithm);
        }
        let has_kid = |key: &&Key| kid.is_none() || key.jwk.common.key_id.as_deref() == kid;
        let mut named = self.keys.iter().filter(has_kid).peekable();
        if named.peek().is_none() {
            return Err(NoKey::Unknown);
        }
        let mut usable = named.filter(|key| key.algorithms.contains(&algorithm));
        match (usable.next(), usable.next()) {
            (Some(key), None) => Ok(&key.public),
            (Some(_), Some(_)) => Err(NoKey::Ambiguous),
            (None, _) if kid.is_none() => Err(NoKey::Unknown),
            (None, _) => Err(NoKey::OtherAlgorithm),
        }
    }
}

impl Key {
    /// None if it is not a public key for signatures with a supported algorithm.
    fn new(jwk: Jwk) -> Option<Self> {
        let by_type: &[Algorithm] = match &jwk.algorithm {
            AlgorithmParameters::RSA(_) => &[Algorithm::RS256, Algorithm::PS256],
            AlgorithmParameters::EllipticCurve(key) if key.curve == EllipticCurve::P256 => {
                &[Algorithm::ES256]
            }
            AlgorithmParameters::OctetKeyPair(key) if key.curve == EllipticCurve::Ed25519 => {
                &[Algorithm::EdDSA]
            }
            // Symmetric keys among others: a key that is published must not be used for HMAC.
            _ => return None,
        };
        let is_allowed = |algorithm: &&Algorithm| match jwk.common.key_algorithm {
            None => true,
            Some(only) => KeyAlgorithm::from(**algorithm) == only,
        };
        let algorithms: Vec<_> = by_type.iter().filter(is_allowed).copied().collect();
        let usage = jwk.common.public_key_use.as_ref();
        let is_for_signatures = usage.is_none_or(|usage| *usage == PublicKeyUse::Signature);
        let operations = jwk.common.key_operations.as_ref();
        let can_verify = operations.is_none_or(|all| all.contains(&KeyOperations::Verify));
        if algorithms.is_empty() || !is_for_signatures || !can_verify {
            return None;
        }
        let mut public = DecodingKey::from_jwk(&jwk).ok()?;
        if let DecodingKeyKind::RsaModulusExponent { n, e } = public.kind() {
            // Some providers write the sign of the number, which ring does not accept.
            let [n, e] = [n, e].map(|number| {
                let start = number.iter().position(|byte| *byte != 0);
                &number[start.unwrap_or(0)..]
            });
            if !RSA_BYTES.contains(&n.len()) {
                return None;
            }
            public = DecodingKey::from_rsa_raw_components(n, e);
        }
        Some(Self {
            jwk,
            algorithms,
            public,
        })
    }
}

/// Signatures are verified by *ring*, which TLS uses as well: the crate's own choices are a second C library or a second
/// implementation of everything.
static RING: CryptoProvider = CryptoProvider {
    signer_factory: |_, _| Err(new_error(ErrorKind::UnsupportedAlgorithm)),
    verifier_factory: |algorithm, key| match algorithm {
        algorithm if SUPPORTED.contains(algorithm) => Ok(Box::new(RingVerifier {
            algorithm: *algorithm,
            key: key.clone(),
        })),
        _ => Err(new_error(ErrorKind::UnsupportedAlgorithm)),
    },
    key_utils: KeyUtils::new_unimplemented(),
};

struct RingVerifier {
    algorithm: Algorithm,
    key: DecodingKey,
}

impl JwtVerifier for RingVerifier {
    fn algorithm(&self) -> Algorithm {
        self.algorithm
    }
}

impl Verifier<Vec<u8>> for RingVerifier {
    fn verify(&self, message: &[u8], signature: &Vec<u8>) -> Result<(), signature::Error> {
        use DecodingKeyKind::{RsaModulusExponent, SecretOrDer};
        let rsa = |n, e, parameters| {
            let key = RsaPublicKeyComponents { n, e };
            key.verify(parameters, message, signature)
        };
        let verified = match (self.algorithm, self.key.kind()) {
            (Algorithm::RS256, RsaModulusExponent { n, e }) => {
                rsa(n, e, &RSA_PKCS1_2048_8192_SHA256)
            }
            (Algorithm::PS256, RsaModulusExponent { n, e }) => rsa(n, e, &RSA_PSS_2048_8192_SHA256),
            (Algorithm::ES256, SecretOrDer(key)) => {
                UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, key).verify(message, signature)
            }
            (Algorithm::EdDSA, SecretOrDer(key)) => {
                UnparsedPublicKey::new(&ED25519, key).verify(message, signature)
            }
            _ => Err(ring::error::Unspecified),
        };
        verified.map_err(|_| signature::Error::new())
    }
}
