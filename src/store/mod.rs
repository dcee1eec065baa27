//! The store. A batch is committed as one: when `Store::add` returns, every plant that it reports
//! as added, or as there already, is on disk; when it fails, its error says whether anything can
//! have been stored.

mod contract;
mod error;
mod sqlite;

pub use contract::{Addition, Checked, Location, NewToken, Outcome, TokenId, TokenRecord};
pub use error::{OpenError, StoreError};
pub use sqlite::{Lock, Sqlite as Store, sync_directory_of};
