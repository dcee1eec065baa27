//! Black-box tests of the real binary: a file a subject, facts as names.

mod architecture;
mod backup_files;
mod catalogue;
mod clock;
mod command_line;
mod contract;
mod copying;
mod damage;
mod defects;
mod docs_page;
mod errors;
mod faults;
mod first_run;
#[allow(dead_code, reason = "the fault suite uses the rest")]
mod harness;

mod log;
mod looking;
mod moving;
mod operations;
mod outage;
mod postgres;
mod readme;
mod saving;
mod serving;
mod shipping;
mod store;
mod tokens;
mod wal_limit;
mod watching;
