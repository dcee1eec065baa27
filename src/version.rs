//! The version of this build; the build script asks git for the commit. The commit and its date are empty if it was built
//! outside a git repository.

/// `1.0.0 (abcdef123456 2026-11-15)`, or the version alone.
pub(crate) const VERSION: &str = env!("BUILT_VERSION");

/// `abcdef123456`, or `abcdef123456-dirty` if there were uncommitted changes.
pub(crate) const COMMIT: &str = env!("BUILT_COMMIT");

/// `2026-11-15`.
pub(crate) const COMMIT_DATE: &str = env!("BUILT_COMMIT_DATE");
