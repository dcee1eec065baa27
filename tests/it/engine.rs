//! What an engine with PostgreSQL's protocol has of what plantstore uses. `scripts/check-engine` runs it and reads what it prints.

use tokio_postgres::{Client, SimpleQueryMessage};

use crate::harness::postgres::with_client;

/// What is expected of the statements of a feature.
enum Expected {
    /// They succeed.
    Success,
    /// The first column of the last row.
    Value(&'static str),
    /// The last one fails with this SQLSTATE.
    Error(&'static str),
}
use Expected::{Error, Success, Value};

struct Feature {
    name: &'static str,
    /// What plantstore needs it for; `optional: …` if it works without.
    purpose: &'static str,
    statements: &'static [&'static str],
    expected: Expected,
}

const fn feature(
    name: &'static str,
    purpose: &'static str,
    statements: &'static [&'static str],
    expected: Expected,
) -> Feature {
    Feature {
        name,
        purpose,
        statements,
        expected,
    }
}

/// What an earlier run has left. An engine may have only one database, so the features are checked in a schema of the database `postgres`.
const CLEAN_UP: [&str; 3] = [
    "DROP SCHEMA IF EXISTS plantstore_check CASCADE",
    "DROP TABLE IF EXISTS plantstore_check_old",
    "DROP DATABASE IF EXISTS plantstore_check",
];

/// Every statement is sent by itself. The first two features make the tables of the others.
const FEATURES: [Feature; 33] = [
    feature("CREATE SCHEMA IF NOT EXISTS", "own schema", &["CREATE SCHEMA IF NOT EXISTS plantstore_check"], Success),
    feature("CREATE TABLE IF NOT EXISTS with BIGINT, TEXT, BYTEA, TIMESTAMPTZ, UNIQUE", "tables", &[
        "CREATE TABLE IF NOT EXISTS plantstore_check.t (id BIGINT PRIMARY KEY, name TEXT NOT NULL UNIQUE, digest BYTEA, at TIMESTAMPTZ)",
        "INSERT INTO plantstore_check.t VALUES (1, 'a', NULL, now())",
    ], Success),
    feature("CREATE INDEX IF NOT EXISTS", "newest first", &["CREATE INDEX IF NOT EXISTS t_at ON plantstore_check.t (at, id)"], Success),
    feature("ALTER TABLE ADD COLUMN IF NOT EXISTS", "upgrades", &["ALTER TABLE plantstore_check.t ADD COLUMN IF NOT EXISTS more TEXT"], Success),
    feature("SET LOCAL lock_timeout with a DDL statement", "upgrades", &[
        "SET LOCAL lock_timeout = '3s'; ALTER TABLE plantstore_check.t ADD COLUMN IF NOT EXISTS more TEXT",
    ], Success),
    feature("ALTER TABLE SET SCHEMA and LOCK TABLE in a transaction", "optional: upgrade from schema version 3", &[
        "CREATE TABLE plantstore_check_old (id BIGINT)",
        "BEGIN; LOCK TABLE plantstore_check_old IN ACCESS EXCLUSIVE MODE; ALTER TABLE plantstore_check_old SET SCHEMA plantstore_check; COMMIT",
    ], Success),
    feature("pg_namespace, pg_class, pg_attribute, pg_constraint", "verification of the tables", &[
        "SELECT count(*) FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
         JOIN pg_catalog.pg_attribute AS a ON a.attrelid = c.oid JOIN pg_catalog.pg_constraint AS k ON k.conrelid = c.oid
         WHERE nspname = 'plantstore_check' AND relname = 't' AND relpersistence = 'p' AND attname = 'id' AND attnotnull
           AND contype = 'p' AND conkey = ARRAY[attnum] AND format_type(atttypid, atttypmod) = 'bigint'",
    ], Value("1")),
    feature("aclexplode, acldefault", "optional: upgrade from schema version 3", &[
        "SELECT count(*) > 0 FROM pg_class, aclexplode(coalesce(relacl, acldefault('r', relowner))) WHERE relname = 't'",
    ], Value("t")),
    feature("unnest with several arrays", "batches", &[
        "SELECT count(*) FROM unnest(ARRAY[1, 2]::BIGINT[], ARRAY['a', NULL]::TEXT[]) AS new (id, name)",
    ], Value("2")),
    feature("set_config in FROM", "durable commits", &[
        "SELECT id FROM unnest(ARRAY[7]::BIGINT[]) AS new (id), set_config('synchronous_commit',
           CASE current_setting('synchronous_commit') WHEN 'remote_apply' THEN 'remote_apply' ELSE 'on' END, true)",
    ], Value("7")),
    feature("current_setting(name, true)", "settings that can lose plants", &["SELECT current_setting('no.such', true) IS NULL"], Value("t")),
    feature("no setting that can lose plants", "durable commits", &[
        "SELECT CASE WHEN current_setting('fsync', true) = 'off' THEN 'fsync is off'
                     WHEN current_setting('full_page_writes', true) = 'off' THEN 'full_page_writes is off'
                     WHEN current_setting('data_sync_retry', true) = 'on' THEN 'data_sync_retry is on'
                     WHEN current_setting('synchronous_commit', true) = 'off' THEN 'synchronous_commit is off'
                     ELSE 'safe' END",
    ], Value("safe")),
    feature("setting fsync", "optional: a missing setting is taken for safe", &["SHOW fsync"], Success),
    feature("setting full_page_writes", "optional: a missing setting is taken for safe", &["SHOW full_page_writes"], Success),
    feature("setting data_sync_retry", "optional: a missing setting is taken for safe", &["SHOW data_sync_retry"], Success),
    feature("setting synchronous_standby_names", "optional: a missing setting is taken for safe", &["SHOW synchronous_standby_names"], Success),
    feature("transaction_read_only", "a server that accepts writes", &["SHOW transaction_read_only"], Value("off")),
    feature("server_encoding UTF8", "names", &["SELECT upper(current_setting('server_encoding', true))"], Value("UTF8")),
    feature("INSERT … ON CONFLICT DO UPDATE … WHERE … RETURNING in WITH", "replays and conflicts", &[
        "WITH stored AS (
           INSERT INTO plantstore_check.t (id, name, at) SELECT id, name, now() FROM unnest(ARRAY[1, 2]::BIGINT[], ARRAY['b', 'c']) AS new (id, name) ORDER BY id
           ON CONFLICT (id) DO UPDATE SET name = excluded.name WHERE t.name = excluded.name
           RETURNING id, at = now() AS is_new)
         SELECT coalesce(array_agg(id), '{}')::TEXT || coalesce(array_agg(is_new), '{}')::TEXT FROM stored",
    ], Value("{2}{t}")),
    feature("INSERT … ON CONFLICT DO NOTHING without a target", "tokens", &["INSERT INTO plantstore_check.t (id, name) VALUES (1, 'a') ON CONFLICT DO NOTHING"], Success),
    feature("FOR UPDATE OF … SKIP LOCKED with a join, UPDATE … FROM", "last use of tokens", &[
        "WITH used AS (SELECT id FROM plantstore_check.t JOIN unnest(ARRAY[1]::BIGINT[]) AS new (token) ON id = token FOR UPDATE OF t SKIP LOCKED)
         UPDATE plantstore_check.t SET at = now() FROM used WHERE t.id = used.id",
    ], Success),
    feature("DELETE … WHERE id IN (SELECT … FOR UPDATE SKIP LOCKED)", "nodes that have ended", &[
        "DELETE FROM plantstore_check.t WHERE id IN (SELECT id FROM plantstore_check.t WHERE at < now() - INTERVAL '1 day' FOR UPDATE SKIP LOCKED)",
    ], Success),
    feature("a WITH that changes two tables", "history of tokens", &[
        "CREATE TABLE plantstore_check.events (number BIGINT PRIMARY KEY, token BIGINT)",
        "WITH changed AS (UPDATE plantstore_check.t SET more = 'x' WHERE id = 1 RETURNING id), recorded AS (
           INSERT INTO plantstore_check.events SELECT (SELECT coalesce(max(number), 0) FROM plantstore_check.events) + 1, id FROM changed)
         SELECT id FROM changed",
        "SELECT count(*) FROM plantstore_check.events",
    ], Value("1")),
    feature("row comparison", "pages", &["SELECT (at, id) < (now() + INTERVAL '1 day', 1::BIGINT) FROM plantstore_check.t WHERE id = 1"], Value("t")),
    feature("translate, strpos, repeat, chr", "search by name", &["SELECT strpos(translate('AB', 'AB', 'ab') || repeat(chr(26), 2), 'b')"], Value("2")),
    feature("extract(epoch), floor", "statistics", &["SELECT floor(extract(epoch FROM TIMESTAMPTZ '1970-01-02 00:00:00Z') / 86400)::BIGINT"], Value("1")),
    feature("pg_total_relation_size", "optional: size in statistics", &["SELECT pg_total_relation_size('plantstore_check.t') >= 0"], Value("t")),
    feature("REPEATABLE READ READ ONLY", "exports", &["BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SELECT 1; COMMIT"], Success),
    feature("SQLSTATE 23505 for a taken id", "replays and conflicts", &["INSERT INTO plantstore_check.t (id, name) VALUES (1, 'z')"], Error("23505")),
    feature("SQLSTATE 25006 for a write to a read-only server", "failover", &[
        "BEGIN READ ONLY; INSERT INTO plantstore_check.t (id, name) VALUES (9, 'z')",
    ], Error("25006")),
    feature("SQLSTATE 42P01 for a missing table", "concurrent upgrades", &["SELECT 1 FROM plantstore_check.missing"], Error("42P01")),
    feature("pg_backend_pid", "optional: prepared statements", &["SELECT pg_backend_pid() IS NOT NULL"], Value("t")),
    feature(
        "CREATE DATABASE",
        "optional: the tests of this check",
        &["CREATE DATABASE plantstore_check"],
        Success,
    ),
];

fn clean_up(url: &str) {
    with_client(url, async |client| {
        for statement in CLEAN_UP {
            let _ = client.simple_query(statement).await;
        }
    });
}

/// None if the engine has it.
async fn problem(client: &Client, feature: &Feature) -> Option<String> {
    let mut last = Ok(None);
    for statement in feature.statements {
        last = match client.simple_query(statement).await {
            Ok(messages) => Ok(messages.iter().rev().find_map(|message| match message {
                SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
                _ => None,
            })),
            Err(error) => Err(error),
        };
        if last.is_err() {
            break;
        }
    }
    let explain = |error: &tokio_postgres::Error| match error.as_db_error() {
        Some(error) => format!("{} {}", error.code().code(), error.message()),
        None => error.to_string(),
    };
    match (&feature.expected, last) {
        (Success, Ok(_)) => None,
        (Value(expected), Ok(Some(value))) if value == *expected => None,
        (Error(code), Err(error)) if error.code().is_some_and(|found| found.code() == *code) => {
            None
        }
        (_, Err(error)) => Some(explain(&error)),
        (Value(expected), Ok(value)) => {
            let value = value.unwrap_or_else(|| "NULL".to_owned());
            Some(format!("{value} instead of {expected}"))
        }
        (Error(code), Ok(_)) => Some(format!("no error instead of {code}")),
    }
}

#[test]
#[ignore = "scripts/check-engine runs it"]
fn features() {
    let server = std::env::var("TEST_POSTGRES").expect("scripts/check-engine runs this");
    let url = format!("{server}/postgres");
    clean_up(&url);
    let mut lacks = Vec::new();
    for feature in &FEATURES {
        // A connection each: an engine may close one after a statement that it does not know.
        let problem = with_client(&url, async |client| problem(client, feature).await);
        let is_optional = feature.purpose.starts_with("optional");
        let found = match &problem {
            None => "has",
            Some(_) if is_optional => "lacks (optional)",
            Some(_) => "lacks",
        };
        let problem = problem.unwrap_or_default();
        println!(
            "feature | {} | {} | {found} | {problem}",
            feature.name, feature.purpose
        );
        if found == "lacks" {
            lacks.push(feature.name);
        }
    }
    let version = with_client(&url, async |client| {
        let messages = client.simple_query("SELECT version()").await;
        let messages = messages.unwrap_or_default();
        messages.iter().find_map(|message| match message {
            SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
            _ => None,
        })
    });
    clean_up(&url);
    println!("version | {}", version.as_deref().unwrap_or("unknown"));
    assert!(lacks.is_empty(), "the engine lacks {lacks:?}");
}
