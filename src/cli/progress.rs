//! A bar for work that takes long: on a terminal, and nowhere else.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

pub(super) struct Progress(ProgressBar);

impl Progress {
    /// Of so many.
    pub(super) fn of(total: u64, what: &'static str) -> Self {
        let template = "{msg:10} {bar:30} {human_pos}/{human_len}  {per_sec}  {eta} left";
        Self::new(ProgressBar::new(total), template, what)
    }

    /// Of so many bytes, if that is known.
    pub(super) fn of_bytes(total: Option<u64>, what: &'static str) -> Self {
        let known = "{msg:10} {bar:30} {binary_bytes}/{binary_total_bytes}  {binary_bytes_per_sec}  {eta} left";
        let unknown = "{msg:10} {spinner} {binary_bytes}  {binary_bytes_per_sec}";
        let template = if total.is_some() { known } else { unknown };
        let bar = total.map_or_else(ProgressBar::no_length, ProgressBar::new);
        Self::new(bar, template, what)
    }

    /// Of nobody knows how many.
    pub(super) fn endless(what: &'static str) -> Self {
        let progress = Self::new(
            ProgressBar::no_length(),
            "{msg:10} {spinner} {elapsed}",
            what,
        );
        if !progress.0.is_hidden() {
            progress.0.enable_steady_tick(Duration::from_millis(100));
        }
        progress
    }

    /// Of plants, nobody knows how many.
    pub(super) fn counting(what: &'static str) -> Self {
        let template = "{msg:10} {human_pos}  {per_sec}";
        Self::new(ProgressBar::no_length(), template, what)
    }

    fn new(bar: ProgressBar, template: &str, what: &'static str) -> Self {
        let style = ProgressStyle::with_template(template).expect("a template that is known");
        Self(bar.with_message(what).with_style(style))
    }

    /// So many are done, of so many.
    pub(super) fn reach(&self, done: u64, total: u64) {
        self.0.set_length(total);
        self.0.set_position(done);
    }

    /// So many more are done.
    pub(super) fn advance(&self, done: usize) {
        self.0.inc(done as u64);
    }

    /// So many are done in all.
    pub(super) fn set(&self, done: u64) {
        self.0.set_position(done);
    }

    /// Says a line to a person, and leaves the bar where it is.
    pub(super) fn say(&self, line: &str) {
        self.0.suspend(|| eprintln!("{line}"));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
