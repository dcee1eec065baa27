//! The tokens that one runtime has seen, by the value of the `Authorization` header: most requests are authorised without
//! computing a digest and without memory that other cores write to.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use sha2::{Digest, Sha256};

use crate::auth::known_tokens::{KnownToken, KnownTokens};
use crate::auth::oidc::{IdentityProvider, Verified};
use crate::auth::{AuthError, Authorized};
use crate::token::Token;

/// The most tokens that a runtime remembers.
const ENTRIES_MAX: usize = 1 << 17;

/// The longest value of a header with a token of this service: one with more spaces than needed is looked up every time. JWTs are longer;
/// of these the digest is remembered.
const HEADER_LEN_MAX: usize = 64;

/// The map hashes with a random key and compares values only if their hashes are equal, so the response time reveals
/// nothing about the tokens in it.
pub struct RuntimeTokens {
    tokens: Arc<KnownTokens>,
    provider: Option<Arc<IdentityProvider>>,
    entries: Mutex<HashMap<Box<[u8]>, Entry>>,
}

struct Entry {
    /// A copy of the name in the record: its reference count is used by this runtime only.
    name: Arc<str>,
    token: Arc<KnownToken>,
    /// If the value is a JWT.
    jwt: Option<Verified>,
}

impl RuntimeTokens {
    pub fn new(tokens: &Arc<KnownTokens>, provider: Option<Arc<IdentityProvider>>) -> Self {
        Self {
            tokens: Arc::clone(tokens),
            provider,
            entries: Mutex::default(),
        }
    }

    /// Authorises a request by the value of its `Authorization` header, if that was used before. Sets the name of the token,
    /// valid or not.
    pub(crate) fn cached(
        &self,
        authorization: &[u8],
        now: Instant,
        token_name: &mut Option<Arc<str>>,
    ) -> Option<Result<Authorized, AuthError>> {
        if !self.tokens.is_current(now) {
            return None;
        }
        let digest;
        let key = if authorization.len() <= HEADER_LEN_MAX {
            authorization
        } else {
            self.provider.as_ref()?;
            digest = jwt_key(authorization);
            &digest
        };
        let entries = self.entries.lock();
        let entry = entries.get(key)?;
        if !self.is_current(entry) {
            return None;
        }
        *token_name = Some(Arc::clone(&entry.name));
        Some(entry.token.authorize(&self.tokens))
    }

    /// Authorises a request by the token in its `Authorization` header. Calls `if_unknown` before it waits for the store.
    pub(crate) async fn look_up(
        &self,
        authorization: &[u8],
        token: &Token,
        token_name: &mut Option<Arc<str>>,
        if_unknown: impl FnOnce() -> Result<(), AuthError>,
    ) -> Result<Authorized, AuthError> {
        let token = self.tokens.find(&token.digest(), if_unknown).await?;
        let key = (authorization.len() <= HEADER_LEN_MAX).then_some(authorization);
        self.remember(key, token, None, token_name)
    }

    pub(crate) fn accepts_jwts(&self) -> bool {
        self.provider.is_some()
    }

    /// Authorises a request by the JWT in its `Authorization` header. Calls `if_unknown` before it waits for the provider.
    pub(crate) async fn look_up_jwt(
        &self,
        authorization: &[u8],
        jwt: &str,
        token_name: &mut Option<Arc<str>>,
        if_unknown: impl Fn() -> Result<(), AuthError>,
    ) -> Result<Authorized, AuthError> {
        let provider = self.provider.as_ref().ok_or(AuthError::UnknownToken)?;
        let subject = provider.verify(jwt, token_name, if_unknown).await?;
        let token = self.tokens.find_or_create(&subject.name).await?;
        let key = jwt_key(authorization);
        self.remember(Some(&key), token, Some(subject.verified), token_name)
    }

    /// False if the token has changed, or a JWT has to be verified again.
    fn is_current(&self, entry: &Entry) -> bool {
        let is_jwt_current = |jwt| {
            let provider = self.provider.as_ref();
            provider.is_some_and(|provider| provider.is_current(jwt))
        };
        !entry.token.is_superseded() && entry.jwt.is_none_or(is_jwt_current)
    }

    fn remember(
        &self,
        key: Option<&[u8]>,
        token: Arc<KnownToken>,
        jwt: Option<Verified>,
        token_name: &mut Option<Arc<str>>,
    ) -> Result<Authorized, AuthError> {
        let name: Arc<str> = (*token.record.name).into();
        *token_name = Some(Arc::clone(&name));
        let authorized = token.authorize(&self.tokens);
        if let Some(key) = key {
            let mut entries = self.entries.lock();
            if entries.len() >= ENTRIES_MAX {
                entries.retain(|_, entry| self.is_current(entry));
                // It must not be done again soon.
                if entries.len() > ENTRIES_MAX / 2 {
                    entries.clear();
                }
            }
            entries.insert(key.into(), Entry { name, token, jwt });
        }
        authorized
    }
}

/// The digest after a byte that no header value has: another client cannot send it.
fn jwt_key(authorization: &[u8]) -> [u8; 33] {
    let mut key = [0; 33];
    key[1..].copy_from_slice(&Sha256::digest(authorization));
    key
}
