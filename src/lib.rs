//! Plant Store: one operation, `POST /plants`, and one promise: a 200 means that the plant is durable.
//!
//! A request passes through these modules, and each imports only modules below it:
//!
//! 1. `server` accepts the connection and hands it to a single-threaded runtime, one per core.
//! 2. `http` reads the request with timeouts, authenticates it with `auth` (token cache, rate limits), decodes the plant
//!    and turns every failure into an error response with a code.
//! 3. `writer` does group commit: a bounded queue, a batch per transaction, and a reply to each request after the commit.
//! 4. `store` commits the batch to SQLite or PostgreSQL.
//! 5. `plant` and `token` are the two data types.
//!
//! Around them: `cli` with `config` and `formats` (NDJSON, CSV) for the operator, `ops` with health checks, `metrics` and the
//! status page, `html` and `web_page` for both pages, `http_client`, `logging`, and `fs` for atomic files.
//!
//! The modules are private. The binary calls [`run`]; the other items are public for the benchmarks and the tests.

// These macros panic if the output cannot be written.
#![warn(clippy::print_stdout, clippy::print_stderr)]

mod auth;
mod cli;
mod config;
mod formats;
mod fs;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod html;
mod http;
mod http_client;
mod logging;
mod metrics;
mod ops;
mod plant;
mod server;
mod shutdown;
mod sqlite_format;
mod store;
mod token;
mod user;
mod version;
mod web_page;
mod writer;

pub use auth::{KnownTokens, RuntimeTokens};
pub use cli::run;
pub use http::client::Peer;
pub use http::connection::{ConnectionState, respond};
pub use http::docs::OPENAPI_JSON;
pub use http::error::{ApiError, ErrorKind};
pub use http::http1::serve as serve_connection;
pub use http::{AppState, Handled, Limits, RequestContext, plant_response, read_plant};
pub use logging::start as start_logging;
pub use metrics::Metrics;
pub use plant::NewPlant;
pub use server::Runtimes;
pub use shutdown::Shutdown;
pub use store::{Addition, Location, Mode, Outcome, Store, TokenId, TokenRecord};
pub use token::Token;
pub use writer::Writer;

/// Plants are allocated by the runtime of their request and freed by a writer thread; with the allocator of the C library
/// an add takes a tenth more CPU time. Without huge pages, because the buffers of an idle connection are mostly untouched.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;
