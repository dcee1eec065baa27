//! Which plantstore this is; the build script asks git for the commit.

/// `0.1.0 (abcdef123456 2026-11-15)`: the version, the commit and its date. The version alone when nobody knew the
/// commit where it was built.
pub const VERSION: &str = env!("BUILT_VERSION");

/// `abcdef123456`, or `abcdef123456-dirty` when something had been changed since. Empty when nobody knew.
pub const COMMIT: &str = env!("BUILT_COMMIT");

/// `2026-11-15`. Empty when nobody knew.
pub const COMMIT_DATE: &str = env!("BUILT_COMMIT_DATE");
