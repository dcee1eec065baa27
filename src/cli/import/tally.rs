//! What became of the plants: counted, and told with the number of the line where something is to be done.

use std::fmt::Write;

use crate::cli::import::batches::Batch;
use crate::cli::progress::Progress;
use crate::store::Outcome;

/// After so many problems the rest is only counted.
const TOLD_MAX: u64 = 100;

#[derive(Default)]
pub(super) struct Tally {
    is_rehearsal: bool,
    added: u64,
    already_there: u64,
    taken: u64,
    damaged: u64,
    invalid: u64,
}

impl Tally {
    pub(super) fn new(is_rehearsal: bool) -> Self {
        Self {
            is_rehearsal,
            ..Self::default()
        }
    }

    /// Counts a batch, and tells what is wrong with it.
    pub(super) fn take(&mut self, batch: Batch, outcomes: &[Outcome], progress: &Progress) {
        let mut problems = batch.problems;
        let told_before = self.refused();
        self.invalid += problems.len() as u64;
        for (line, outcome) in batch.lines.iter().zip(outcomes) {
            let problem = match outcome {
                Outcome::Added => {
                    self.added += 1;
                    continue;
                }
                Outcome::AlreadyThere => {
                    self.already_there += 1;
                    continue;
                }
                Outcome::Taken => {
                    self.taken += 1;
                    "id: belongs to a different plant"
                }
                Outcome::Damaged => {
                    self.damaged += 1;
                    "id: belongs to a plant that is damaged; run `plantstore check`"
                }
            };
            problems.push((*line, problem.to_owned()));
        }
        problems.sort_unstable();
        let left = TOLD_MAX.saturating_sub(told_before);
        for (line, problem) in problems.iter().take(usize::try_from(left).unwrap_or(0)) {
            progress.say(&format!("line {line}: {problem}"));
        }
    }

    /// Says how many problems have not been told.
    pub(super) fn tell_rest(&self, progress: &Progress) {
        if let rest @ 1.. = self.refused().saturating_sub(TOLD_MAX) {
            progress.say(&format!("and {rest} more problems"));
        }
    }

    /// How many were not stored, nor would be.
    pub(super) fn refused(&self) -> u64 {
        self.taken + self.damaged + self.invalid
    }

    /// What those have in common.
    pub(super) fn fate(&self) -> &'static str {
        if self.is_rehearsal {
            "would not be stored"
        } else {
            "not stored"
        }
    }

    pub(super) fn summary(&self) -> String {
        let added = if self.is_rehearsal {
            "would be added"
        } else {
            "added"
        };
        let mut text = format!(
            "{added} {}, already there {}, taken {}, invalid {}",
            self.added, self.already_there, self.taken, self.invalid
        );
        if self.damaged > 0 {
            let _ = write!(text, ", damaged {}", self.damaged);
        }
        text.push('\n');
        text
    }
}
