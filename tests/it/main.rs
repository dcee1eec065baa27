//! Black-box tests of the real binary: one subject per file, each test named after the fact that it checks.

mod architecture;
mod backup;
mod backup_files;
#[path = "../faults/breaks.rs"]
#[allow(
    dead_code,
    reason = "only its test, which fails early when the source changes"
)]
mod breaks;
mod clock;
mod cluster_backup;
mod command_line;
mod connections;
mod contract;
mod copy;
mod damage;
mod database_file;
mod docs_page;
mod documentation;
mod earlier_versions;
mod engine;
mod error_catalogue;
mod errors;
mod faults;
mod first_run;
mod framing;
#[allow(dead_code, reason = "the fault suite uses the rest")]
mod harness;
mod http2;
mod http2_conformance;
mod import_export;
mod limits;
mod list;
mod logging;
mod markdown;
mod monitoring;
mod oidc;
mod outage;
mod packaging;
mod panics;
mod postgres;
mod proxies;
mod rolling_upgrade;
mod status_page;
mod tls;
mod tokens;
mod wal_limit;
