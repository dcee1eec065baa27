//! Plant Store: one operation, `POST /plants`, and one promise: a 200 means the plant is on disk.
//!
//! The modules, in the order in which a request meets them. Each imports only what stands below
//! it.
//!
//! 1. [`cli`] turns what was typed into a command.
//! 2. [`server`] assembles everything, accepts connections, and drains them at the end.
//! 3. [`config`] is what can be set, each setting once.
//! 4. [`formats`] is plants as text, for moving them in and out.
//! 5. [`http`] is the public interface: the connection, the caller, the body, the answer, and the
//!    catalogue of errors.
//! 6. [`ops`] is the private interface: health, readiness and figures.
//! 7. [`writer`] gathers plants into batches and answers each once its batch is committed.
//! 8. [`store`] commits a batch, and keeps the tokens.
//! 9. [`plant`] and [`token`] are the two things the service knows of.
//! 10. [`metrics`] are the figures, [`telemetry`] is the log, [`fs`] writes files, [`version`] is the version of this build.

pub mod cli;
pub mod config;
pub mod formats;
pub mod fs;
pub mod http;
pub mod metrics;
pub mod ops;
pub mod plant;
pub mod server;
pub mod store;
pub mod telemetry;
pub mod token;
pub mod version;
pub mod writer;

/// Many requests wait for one commit, and what they hold was allocated by one thread and is looked at by another:
/// with the allocator of the C library an add took a tenth more of the processor.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;
