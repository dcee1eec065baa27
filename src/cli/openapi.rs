//! `plantstore openapi`.

use std::io::{self, Write};

use anyhow::Context;

use crate::http::docs::OPENAPI_YAML;

pub(super) fn run() -> anyhow::Result<()> {
    io::stdout()
        .write_all(OPENAPI_YAML.as_bytes())
        .context("cannot write to standard output")
}
