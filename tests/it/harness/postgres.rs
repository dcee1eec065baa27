//! Runs the same tests against PostgreSQL: if `TEST_POSTGRES` is set (`scripts/with-postgres`), each directory stands for a
//! database of that server instead of a database file.

use std::collections::HashSet;
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::{LazyLock, Mutex};
use std::time::Duration;

use tokio::time::timeout;
use tokio_postgres::{Client, NoTls};

use super::{HANG, PATIENCE};

/// The URL of a server, without a database.
const TEST_POSTGRES: &str = "TEST_POSTGRES";

/// Whether the tests run against PostgreSQL.
pub fn is_under_test() -> bool {
    std::env::var_os(TEST_POSTGRES).is_some()
}

/// The database URL for this directory, created if necessary; none if the tests run against SQLite.
pub fn store(directory: &Path) -> Option<String> {
    static MADE: LazyLock<Mutex<HashSet<String>>> = LazyLock::new(Mutex::default);
    let server = std::env::var(TEST_POSTGRES).ok()?;
    let name = directory.file_name().expect("a name").to_string_lossy();
    let database: String = name.chars().filter(char::is_ascii_alphanumeric).collect();
    let url = format!("{server}/{database}");
    let mut made = MADE.lock().expect("no panic");
    if made.insert(url.clone()) {
        with_client(&format!("{server}/postgres"), async |client| {
            let sql = format!("CREATE DATABASE \"{database}\"");
            client.batch_execute(&sql).await.expect("a database");
        });
    }
    Some(url)
}

/// All stored plants.
pub fn plants(store: &str) -> Vec<(i64, String, Option<String>)> {
    plants_in(store, i64::MIN..=i64::MAX)
}

/// The stored plants with these ids. `id + 0` is not indexed, so the table is read: a damaged index could hide rows of it.
pub fn plants_in(store: &str, ids: RangeInclusive<i64>) -> Vec<(i64, String, Option<String>)> {
    with_client(store, async |client| {
        let sql = "SELECT id, name, tag FROM plantstore.plants WHERE id + 0 BETWEEN $1 AND $2 ORDER BY id + 0";
        let rows = client.query(sql, &[ids.start(), ids.end()]).await;
        let rows = rows.expect("rows");
        let plant = |row: &tokio_postgres::Row| {
            let tag: Option<&str> = row.get(2);
            (row.get(0), original(row.get(1)), tag.map(original))
        };
        rows.iter().map(plant).collect()
    })
}

/// How long a closure may use a connection: longer than a wait inside it.
const WORK_MAX: Duration = PATIENCE.saturating_mul(2);

/// Runs a closure with a connection.
pub fn with_client<T>(url: &str, work: impl AsyncFnOnce(&Client) -> T) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let connected = timeout(PATIENCE, tokio_postgres::connect(url, NoTls)).await;
        let connected = connected.unwrap_or_else(|_| panic!("{HANG}: a connection to {url}"));
        let (client, connection) = connected.expect("a server");
        tokio::spawn(connection);
        let done = timeout(WORK_MAX, work(&client)).await;
        done.unwrap_or_else(|_| panic!("{HANG}: statements at {url}"))
    })
}

/// U+0000 is stored as U+001A '0', and U+001A as U+001A '1'.
fn original(stored: &str) -> String {
    let mut parts = stored.split('\u{1a}');
    let mut text = parts.next().expect("a part").to_owned();
    for part in parts {
        match part.strip_prefix('0') {
            Some(rest) => text.extend(["\0", rest]),
            None => text.extend(["\u{1a}", part.strip_prefix('1').expect("0 or 1")]),
        }
    }
    text
}
