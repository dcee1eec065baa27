//! A bar for work that takes long: on a terminal, and nowhere else.

use indicatif::{ProgressBar, ProgressStyle};

pub(super) struct Progress(ProgressBar);

impl Progress {
    /// Of so many.
    pub(super) fn of(total: u64, what: &'static str) -> Self {
        let style = ProgressStyle::with_template(
            "{msg:10} {bar:30} {human_pos}/{human_len}  {per_sec}  {eta} left",
        );
        let bar = ProgressBar::new(total).with_message(what);
        Self(bar.with_style(style.expect("a template that is known")))
    }

    /// So many more are done.
    pub(super) fn advance(&self, done: usize) {
        self.0.inc(done as u64);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
