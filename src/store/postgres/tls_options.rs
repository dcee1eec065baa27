//! The TLS options of a database URL, with the meaning that they have in libpq.

use std::path::PathBuf;

/// How to connect with TLS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TlsOptions {
    pub(super) verify: Verify,
    pub(super) client: Option<ClientFiles>,
    pub(super) send_sni: bool,
    pub(super) versions: Versions,
}

/// What is verified before anything is sent to the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verify {
    Nothing,
    /// The certificate is signed by a trusted authority, for any host.
    Authority(Roots),
    AuthorityAndHostName(Roots),
}

/// The trusted certificates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Roots {
    File(PathBuf),
    System,
}

/// The certificate of the client, and its key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ClientFiles {
    pub(super) certificate: PathBuf,
    pub(super) key: PathBuf,
}

/// Which of the versions that rustls has are allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Versions {
    pub(super) tls12: bool,
    pub(super) tls13: bool,
}

impl Default for Versions {
    fn default() -> Self {
        Self {
            tls12: true,
            tls13: true,
        }
    }
}

/// The options of a URL as they are read.
#[derive(Default)]
pub(super) struct Parser {
    mode: Option<String>,
    roots: Option<Roots>,
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
    channel_binding_required: bool,
    without_sni: bool,
    versions: Versions,
}

impl Parser {
    /// Returns false for an option that is not about TLS.
    pub(super) fn set(&mut self, name: &str, value: &str) -> Result<bool, String> {
        let version = value.to_ascii_lowercase();
        match (name, value) {
            ("sslmode", _) => self.mode = Some(value.to_owned()),
            ("sslrootcert", "system") => self.roots = Some(Roots::System),
            ("sslrootcert", _) => self.roots = Some(Roots::File(file(name, value)?)),
            ("sslcert", _) => self.certificate = Some(file(name, value)?),
            ("sslkey", _) => self.key = Some(file(name, value)?),
            ("sslsni", "0" | "1") => self.without_sni = value == "0",
            ("sslsni", _) => return Err("sslsni is 0 or 1".into()),
            ("ssl_min_protocol_version", _) => match &*version {
                "tlsv1" | "tlsv1.1" | "tlsv1.2" => self.versions.tls12 = true,
                "tlsv1.3" => self.versions.tls12 = false,
                _ => return Err("ssl_min_protocol_version is TLSv1.2 or TLSv1.3".into()),
            },
            ("ssl_max_protocol_version", _) => match &*version {
                "tlsv1.2" => self.versions.tls13 = false,
                "tlsv1.3" => self.versions.tls13 = true,
                _ => return Err("ssl_max_protocol_version is TLSv1.2 or TLSv1.3".into()),
            },
            ("channel_binding", "require") => self.channel_binding_required = true,
            ("channel_binding", "prefer" | "disable") => self.channel_binding_required = false,
            ("channel_binding", _) => {
                return Err("channel_binding is require, prefer or disable".into());
            }
            ("sslcompression", "0") | ("sslnegotiation", "postgres") | ("sslcertmode", "allow") => {
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// None without TLS.
    pub(super) fn finish(self) -> Result<Option<TlsOptions>, String> {
        let needs_tls = [
            ("sslrootcert", self.roots.is_some()),
            ("sslcert", self.certificate.is_some()),
            ("sslkey", self.key.is_some()),
            ("channel_binding=require", self.channel_binding_required),
        ];
        let needs_tls = needs_tls.iter().find(|(_, is_given)| *is_given);
        let verify = match (self.mode.as_deref(), self.roots) {
            (mode @ (None | Some("disable")), _) => {
                return match (needs_tls, mode) {
                    (None, _) => Ok(None),
                    (Some((name, _)), None) => {
                        Err(format!("{name} needs TLS: add sslmode=verify-full"))
                    }
                    (Some((name, _)), Some(_)) => Err(format!(
                        "{name} needs TLS: write sslmode=verify-full instead of disable, or remove {name}"
                    )),
                };
            }
            (Some("require" | "verify-ca"), Some(Roots::System)) => {
                return Err(
                    "sslrootcert=system needs sslmode=verify-full: a public authority issues certificates to anyone"
                        .into(),
                );
            }
            (Some("require"), None) => Verify::Nothing,
            // As in libpq, for compatibility with its earlier versions.
            (Some("require" | "verify-ca"), Some(roots)) => Verify::Authority(roots),
            (Some("verify-full"), Some(roots)) => Verify::AuthorityAndHostName(roots),
            (Some(mode @ ("verify-ca" | "verify-full")), None) => {
                let or_system = if mode == "verify-full" {
                    " or sslrootcert=system"
                } else {
                    ""
                };
                return Err(format!("sslmode={mode} needs sslrootcert=FILE{or_system}"));
            }
            (Some(mode @ ("prefer" | "allow")), _) => {
                return Err(format!(
                    "sslmode={mode} would connect without encryption if the server, or an attacker, rejects TLS; \
                     write verify-full, verify-ca or require, or disable"
                ));
            }
            (Some("no-verify"), _) => return Err("write sslmode=require for no-verify".into()),
            _ => return Err("sslmode is disable, require, verify-ca or verify-full".into()),
        };
        let client = match (self.certificate, self.key) {
            (None, None) => None,
            (Some(certificate), Some(key)) => Some(ClientFiles { certificate, key }),
            (Some(_), None) => return Err("sslcert needs sslkey=FILE, its private key".into()),
            (None, Some(_)) => return Err("sslkey needs sslcert=FILE, its certificate".into()),
        };
        if !self.versions.tls12 && !self.versions.tls13 {
            return Err("ssl_min_protocol_version is above ssl_max_protocol_version".into());
        }
        Ok(Some(TlsOptions {
            verify,
            client,
            send_sni: !self.without_sni,
            versions: self.versions,
        }))
    }
}

fn file(name: &str, value: &str) -> Result<PathBuf, String> {
    if value.is_empty() {
        return Err(format!("{name}: expected a file"));
    }
    Ok(value.into())
}
