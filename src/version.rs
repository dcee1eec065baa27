//! The version of this build; the build script gets the commit from git.

/// `0.1.0 (abcdef123456 2026-11-15)`: version, commit and its date; without the parentheses if the commit is unknown.
pub const VERSION: &str = env!("BUILT_VERSION");

/// `abcdef123456`, or `abcdef123456-dirty` with local changes. Empty if unknown.
pub const COMMIT: &str = env!("BUILT_COMMIT");

/// `2026-11-15`. Empty if unknown.
pub const COMMIT_DATE: &str = env!("BUILT_COMMIT_DATE");
