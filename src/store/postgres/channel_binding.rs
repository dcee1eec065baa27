//! Channel binding of SCRAM: the hash of the server's certificate, `tls-server-end-point` of RFC 5929. With it a password cannot be used
//! by a server in between that has another certificate.

use sha2::{Digest, Sha224, Sha256, Sha384, Sha512};
use x509_cert::Certificate;
use x509_cert::der::asn1::{ContextSpecific, ObjectIdentifier};
use x509_cert::der::{Decode, SliceReader, TagNumber};
use x509_cert::spki::{AlgorithmIdentifierOwned, AlgorithmIdentifierRef};

/// RSASSA-PSS: the hash is a parameter.
const RSA_PSS: &str = "1.2.840.113549.1.1.10";

/// The hash of a certificate in DER; none if its signature algorithm has no hash of its own, such as Ed25519.
pub(super) fn server_end_point(certificate: &[u8]) -> Option<Vec<u8>> {
    let parsed = Certificate::from_der(certificate).ok()?;
    let algorithm = parsed.signature_algorithm();
    let oid = if algorithm.oid.to_string() == RSA_PSS {
        pss_hash(algorithm)?.to_string()
    } else {
        algorithm.oid.to_string()
    };
    Some(match &*oid {
        // MD5 and SHA-1, with RSA or ECDSA or as the hash of RSASSA-PSS: SHA-256 instead, by the RFC. Then SHA-256 itself.
        "1.2.840.113549.1.1.4"
        | "1.2.840.113549.1.1.5"
        | "1.2.840.10045.4.1"
        | "1.3.14.3.2.26"
        | "1.2.840.113549.1.1.11"
        | "1.2.840.10045.4.3.2"
        | "2.16.840.1.101.3.4.2.1" => Sha256::digest(certificate).to_vec(),
        "1.2.840.113549.1.1.14" | "1.2.840.10045.4.3.1" | "2.16.840.1.101.3.4.2.4" => {
            Sha224::digest(certificate).to_vec()
        }
        "1.2.840.113549.1.1.12" | "1.2.840.10045.4.3.3" | "2.16.840.1.101.3.4.2.2" => {
            Sha384::digest(certificate).to_vec()
        }
        "1.2.840.113549.1.1.13" | "1.2.840.10045.4.3.4" | "2.16.840.1.101.3.4.2.3" => {
            Sha512::digest(certificate).to_vec()
        }
        _ => return None,
    })
}

/// The hash in the parameters of RSASSA-PSS; SHA-1 by default.
fn pss_hash(algorithm: &AlgorithmIdentifierOwned) -> Option<ObjectIdentifier> {
    let parameters = algorithm.parameters.as_ref()?;
    let mut fields = SliceReader::new(parameters.value()).ok()?;
    let hash =
        ContextSpecific::<AlgorithmIdentifierRef<'_>>::decode_explicit(&mut fields, TagNumber(0));
    let sha1 = || ObjectIdentifier::new_unwrap("1.3.14.3.2.26");
    Some(hash.ok()?.map_or_else(sha1, |hash| hash.value.oid))
}
