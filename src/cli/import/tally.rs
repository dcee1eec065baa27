//! What became of the plants: counted, and told with the number of the line where something is to be done.

use std::fmt::Write;
use std::io;

use crate::cli::import::batches::{Batch, Problem};
use crate::cli::import::rejects::Rejects;
use crate::cli::progress::Progress;
use crate::exchange::{Part, Rejection};
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
    /// In lines: a row of a wrong form may have taken in others.
    invalid: u64,
    problems: u64,
}

impl Tally {
    pub(super) fn new(is_rehearsal: bool) -> Self {
        Self {
            is_rehearsal,
            ..Self::default()
        }
    }

    /// Counts a batch, reports its problems, and writes the rejected rows.
    pub(super) fn take(
        &mut self,
        batch: Batch,
        outcomes: &[Outcome],
        progress: &Progress,
        rejects: Option<&mut Rejects>,
    ) -> io::Result<()> {
        let mut problems = batch.problems;
        for problem in problems.iter().filter(|problem| is_end(problem)) {
            self.invalid += problem.rejection.lines;
        }
        for ((lines, raw), outcome) in batch.rows.into_iter().zip(outcomes) {
            let problem = match outcome {
                Outcome::Added => {
                    self.added += 1;
                    continue;
                }
                Outcome::Replayed => {
                    self.already_there += 1;
                    continue;
                }
                Outcome::Conflict => {
                    self.taken += 1;
                    "id: belongs to a different plant"
                }
                Outcome::Damaged => {
                    self.damaged += 1;
                    "id: belongs to a plant that is damaged; run `plantstore check`"
                }
            };
            problems.push(Problem {
                lines,
                rejection: Rejection {
                    problem: problem.to_owned(),
                    lines: 1,
                },
                raw,
                part: Part::Whole,
            });
        }
        // The parts of a row stay in their order.
        problems.sort_by_key(|problem| problem.lines.first);
        for problem in problems.iter().filter(|problem| is_end(problem)) {
            self.problems += 1;
            if self.problems <= TOLD_MAX {
                progress.say(&format!("{}: {}", problem.lines, problem.rejection.problem));
            }
        }
        match rejects {
            Some(rejects) => problems
                .iter()
                .try_for_each(|problem| rejects.write(&batch.header, problem)),
            None => Ok(()),
        }
    }

    /// Says how many problems have not been told.
    pub(super) fn tell_rest(&self, progress: &Progress) {
        if let rest @ 1.. = self.problems.saturating_sub(TOLD_MAX) {
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

/// Whether all of it has been read, so that it is known where it ends.
fn is_end(problem: &Problem) -> bool {
    matches!(problem.part, Part::Whole | Part::Last)
}
