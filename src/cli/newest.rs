//! Plants, newest first, a page at a time: along the index as long as that leads somewhere, and otherwise by one look
//! at all of them. A rare tag in a large store would be a walk of minutes, from one end of the disk to the other.

use crate::cli::progress::Progress;
use crate::store::{Cursor, Filter, Store, StoreError};

/// Plants in one step along the index.
const STEP_LEN: u32 = 1000;

/// Plants that are looked at before it is decided whether to go on.
const WALK_MIN: u64 = 10_000;

/// Plants that may have to be looked at: about what one look at ten million of them takes.
const WALK_MAX: u64 = 100_000;

/// Plants whose places are kept at a time, of 24 bytes each.
const FOUND_MAX: u32 = 1_000_000;

pub(super) struct Newest {
    /// What is left to look for.
    wanted: Filter,
    /// How many of them are wanted at most, in all.
    len: u64,
    found: u64,
    looked_at: u64,
    is_over: bool,
}

impl Newest {
    pub(super) fn of(wanted: Filter, len: u64) -> Self {
        Self {
            wanted,
            len,
            found: 0,
            looked_at: 0,
            is_over: false,
        }
    }

    /// Where the next of them stand, in order; none at the end.
    pub(super) fn next_page(&mut self, store: &mut Store) -> Result<Vec<Cursor>, StoreError> {
        while !self.is_over {
            let found = if self.walking_pays() {
                self.walk(store)?
            } else {
                self.search(store)?
            };
            self.found += found.len() as u64;
            if !found.is_empty() {
                return Ok(found);
            }
        }
        Ok(Vec::new())
    }

    /// Whether all were found.
    pub(super) fn is_over(&self) -> bool {
        self.is_over
    }

    fn walk(&mut self, store: &mut Store) -> Result<Vec<Cursor>, StoreError> {
        let len = match u32::try_from(self.left()) {
            Ok(left) if self.wanted.is_any() => left.min(STEP_LEN),
            _ => STEP_LEN,
        };
        let walk = store.walk(&self.wanted, len)?;
        self.looked_at += walk.looked_at;
        self.go_on_from(walk.last)?;
        Ok(walk.found)
    }

    fn search(&mut self, store: &mut Store) -> Result<Vec<Cursor>, StoreError> {
        let len = u32::try_from(self.left())
            .unwrap_or(FOUND_MAX)
            .min(FOUND_MAX);
        let progress = Progress::counting("looking at");
        let found = store.search(&self.wanted, len, &mut |read| progress.advance(read))?;
        let is_full = found.len() as u64 == u64::from(len);
        self.go_on_from(found.last().copied().filter(|_| is_full))?;
        Ok(found)
    }

    /// How many are still wanted; one, if somebody asks for more.
    fn left(&self) -> u64 {
        self.len.saturating_sub(self.found).max(1)
    }

    /// What comes next stands before this one; nothing does, if there is none.
    fn go_on_from(&mut self, last: Option<Cursor>) -> Result<(), StoreError> {
        match last {
            // In an index that is damaged there may be a circle.
            Some(last) if last >= self.wanted.before => {
                Err(StoreError::Damaged("the index is not in order".into()))
            }
            Some(last) => {
                self.wanted.before = last;
                Ok(())
            }
            None => {
                self.is_over = true;
                Ok(())
            }
        }
    }

    /// Whether those that are wanted are so frequent that they are all found soon.
    fn walking_pays(&self) -> bool {
        let expected = self.looked_at.saturating_mul(self.len) / self.found.max(1);
        self.wanted.is_any() || self.looked_at < WALK_MIN || expected <= WALK_MAX
    }
}
