//! `plantstore completions`: what a shell needs to complete our commands.

use clap::{Args, Command};
use clap_complete::Shell;

use crate::cli::output::print;

#[derive(Debug, Args)]
pub(super) struct Completions {
    /// The shell that is to read it
    shell: Shell,
}

impl Completions {
    /// Of this command line.
    pub(super) fn run(&self, mut command: Command) -> anyhow::Result<()> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut command, "plantstore", &mut script);
        print(&String::from_utf8(script)?)
    }
}
