//! The most frequent of any number of things, in bounded memory: what is more frequent than one in as many as are told
//! apart is never missed, and what is counted in the end is counted exactly.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};

/// Counts by the hash of a thing, so that the length of things does not matter.
pub(super) struct Tally {
    len_max: usize,
    hashes: RandomState,
    counts: HashMap<u64, Count>,
    /// How often every count was lowered by one to make room: what is not counted was there at most so often.
    lowered: u64,
}

/// Of one thing.
#[derive(Clone, Copy)]
pub(super) struct Count {
    /// How often it was there.
    pub(super) times: u64,
    /// Where it was, once.
    pub(super) example: i64,
}

impl Tally {
    /// Tells so many things apart at a time.
    pub(super) fn new(len_max: usize) -> Self {
        Self {
            len_max,
            hashes: RandomState::new(),
            counts: HashMap::new(),
            lowered: 0,
        }
    }

    /// One more of these, and where it is (Misra and Gries).
    pub(super) fn add(&mut self, thing: &str, example: i64) {
        let hash = self.hashes.hash_one(thing);
        if let Some(count) = self.counts.get_mut(&hash) {
            count.times += 1;
        } else if self.counts.len() < self.len_max {
            self.counts.insert(hash, Count { times: 1, example });
        } else {
            self.lowered += 1;
            self.counts.retain(|_, count| {
                count.times -= 1;
                count.times > 0
            });
        }
    }

    /// Whether everything was counted.
    pub(super) fn is_exact(&self) -> bool {
        self.lowered == 0
    }

    /// Before all are counted again, with `add_again`.
    pub(super) fn begin_again(&mut self) {
        self.counts.values_mut().for_each(|count| count.times = 0);
    }

    /// One more of these, if it can be one of the most frequent.
    pub(super) fn add_again(&mut self, thing: &str) {
        if let Some(count) = self.counts.get_mut(&self.hashes.hash_one(thing)) {
            count.times += 1;
        }
    }

    /// The most frequent, if nothing that is not counted can be more frequent.
    pub(super) fn most(&self, len: usize) -> Vec<Count> {
        let certain = |count: &&Count| count.times >= self.lowered;
        let mut counts: Vec<_> = self.counts.values().filter(certain).copied().collect();
        counts.sort_by_key(|count| (std::cmp::Reverse(count.times), count.example));
        counts.truncate(len);
        counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_things_are_counted_at_once() {
        let mut tally = Tally::new(100);
        for (example, thing) in (0..).zip(["a", "b", "a", "c", "a", "b"]) {
            tally.add(thing, example);
        }
        assert!(tally.is_exact());
        let most: Vec<_> = tally
            .most(2)
            .iter()
            .map(|count| (count.times, count.example))
            .collect();
        assert_eq!(most, [(3, 0), (2, 1)]);
    }

    #[test]
    fn what_is_frequent_is_found_among_any_number_and_nothing_else_is_claimed() {
        let mut tally = Tally::new(100);
        let things = || {
            (0..10_000).map(|i| match i % 50 {
                0 => (i, "often".to_owned()),
                1 if i < 150 => (i, "thrice".to_owned()),
                _ => (i, i.to_string()),
            })
        };
        for (example, thing) in things() {
            tally.add(&thing, example);
        }
        assert!(!tally.is_exact());
        assert!(tally.counts.len() <= 100);
        tally.begin_again();
        for (_, thing) in things() {
            tally.add_again(&thing);
        }
        let most = tally.most(10);
        assert_eq!(most.len(), 1);
        assert_eq!((most[0].times, most[0].example % 50), (200, 0));
    }
}
