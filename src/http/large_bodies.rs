//! The memory for large bodies: each of them needs a permit until its plant is stored. A token has at most a quarter of the
//! permits, so that no client can take them all by sending bodies slowly.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::store::TokenId;
use crate::writer::MemoryPermits;

/// Bodies up to this size are many and need no permit.
pub(super) const SMALL_BODY_BYTES: usize = 16 << 10;

/// What all larger bodies together may take.
const LARGE_BODIES_BYTES: usize = 256 << 20;

/// Semaphores that are not in use are dropped when there are so many.
const TOKENS_MAX: usize = 1024;

pub(crate) struct LargeBodies {
    all: Arc<Semaphore>,
    per_token: usize,
    by_token: Mutex<HashMap<TokenId, Arc<Semaphore>>>,
}

impl LargeBodies {
    pub(crate) fn new(body_bytes_max: usize) -> Self {
        let count = (LARGE_BODIES_BYTES / body_bytes_max).max(1);
        Self {
            all: Arc::new(Semaphore::new(count)),
            per_token: (count / 4).max(1),
            by_token: Mutex::default(),
        }
    }

    pub(super) async fn permits(&self, token: TokenId) -> Option<Box<MemoryPermits>> {
        let of_token = self.of_token(token).acquire_owned().await.ok()?;
        let of_all = Arc::clone(&self.all).acquire_owned().await.ok()?;
        Some(Box::new([of_token, of_all]))
    }

    fn of_token(&self, token: TokenId) -> Arc<Semaphore> {
        let mut by_token = self.by_token.lock();
        if by_token.len() >= TOKENS_MAX {
            by_token.retain(|_, semaphore| Arc::strong_count(semaphore) > 1);
        }
        let semaphore = by_token
            .entry(token)
            .or_insert_with(|| Arc::new(Semaphore::new(self.per_token)));
        Arc::clone(semaphore)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn a_token_has_a_quarter_of_the_permits() {
        let bodies = LargeBodies::new(LARGE_BODIES_BYTES / 8);
        let take = |token| bodies.permits(TokenId(token)).now_or_never().flatten();
        let first = [take(1), take(1), take(1)];
        assert!(first[1].is_some() && first[2].is_none());
        let others: Vec<_> = (2..5)
            .flat_map(|token| [take(token), take(token)])
            .collect();
        assert!(others.iter().all(Option::is_some));
        assert!(take(5).is_none());
        drop(first);
        assert!(take(5).is_some());
    }

    #[test]
    fn unused_semaphores_are_dropped() {
        let bodies = LargeBodies::new(1 << 20);
        for token in 0..10_000 {
            let _ = bodies.permits(TokenId(token)).now_or_never();
        }
        assert!(bodies.by_token.lock().len() <= TOKENS_MAX);
    }
}
