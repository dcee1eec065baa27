//! `plantstore openapi`.

use crate::cli::output::print;
use crate::http::docs::OPENAPI_YAML;

pub(super) fn run() -> anyhow::Result<()> {
    print(OPENAPI_YAML)
}
