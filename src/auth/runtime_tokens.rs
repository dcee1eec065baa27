//! The tokens that one runtime has seen, by the value of the `Authorization` header: most requests are authorised without
//! computing a digest and without memory that other cores write to.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use crate::auth::known_tokens::{KnownToken, KnownTokens};
use crate::auth::{AuthError, Authorized};
use crate::token::Token;

/// The most tokens that a runtime remembers, and the longest value of a header: one with more spaces than needed is looked up
/// every time.
const ENTRIES_MAX: usize = 1 << 17;
const HEADER_LEN_MAX: usize = 64;

/// The map hashes with a random key and compares values only if their hashes are equal, so the response time reveals
/// nothing about the tokens in it.
pub struct RuntimeTokens {
    tokens: Arc<KnownTokens>,
    entries: Mutex<HashMap<Box<[u8]>, Entry>>,
}

struct Entry {
    /// A copy of the name in the record: its reference count is used by this runtime only.
    name: Arc<str>,
    token: Arc<KnownToken>,
}

impl RuntimeTokens {
    pub fn new(tokens: &Arc<KnownTokens>) -> Self {
        Self {
            tokens: Arc::clone(tokens),
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
        let entries = self.entries.lock();
        let entry = entries.get(authorization)?;
        (!entry.token.is_superseded()).then(|| {
            *token_name = Some(Arc::clone(&entry.name));
            entry.token.authorize(&self.tokens)
        })
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
        let name: Arc<str> = (*token.record.name).into();
        *token_name = Some(Arc::clone(&name));
        let authorized = token.authorize(&self.tokens);
        if authorization.len() <= HEADER_LEN_MAX {
            let mut entries = self.entries.lock();
            if entries.len() >= ENTRIES_MAX {
                entries.clear();
            }
            entries.insert(authorization.into(), Entry { name, token });
        }
        authorized
    }
}
