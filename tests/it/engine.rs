//! What an engine with PostgreSQL's protocol has of what plantstore uses. `scripts/check-engine` runs it and reads what it prints.

use std::time::SystemTime;

use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, SimpleQueryMessage};

use crate::harness::postgres::with_client;

/// What is expected of the statements of a feature.
enum Expected {
    /// They succeed.
    Success,
    /// The first column of the last row.
    Value(&'static str),
    /// The first column of the only statement, with parameters in binary format: without a name as behind a pooler, or prepared.
    Unnamed(i64),
    Prepared(i64),
    /// The last one fails with this SQLSTATE.
    Error(&'static str),
    /// The last one fails with this SQLSTATE, and the error names this table.
    ErrorOf(&'static str, &'static str),
}
use Expected::{Error, ErrorOf, Prepared, Success, Unnamed, Value};

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
const CLEAN_UP: [&str; 4] = [
    "DROP SCHEMA IF EXISTS plantstore_check CASCADE",
    "DROP TABLE IF EXISTS plantstore_check_old",
    "DROP DATABASE IF EXISTS plantstore_check",
    "DROP ROLE IF EXISTS plantstore_check",
];

/// All that the statements in `src/store/postgres` and `migrations/postgres` use. Every statement is sent by itself. The first two features
/// make the tables of the others.
const FEATURES: [Feature; 50] = [
    // Tables and upgrades.
    feature("CREATE SCHEMA IF NOT EXISTS", "own schema", &["CREATE SCHEMA IF NOT EXISTS plantstore_check"], Success),
    feature("CREATE TABLE IF NOT EXISTS with BIGINT, TEXT, BYTEA, TIMESTAMPTZ, UNIQUE", "tables", &[
        "CREATE TABLE IF NOT EXISTS plantstore_check.t (id BIGINT PRIMARY KEY, name TEXT NOT NULL UNIQUE, digest BYTEA UNIQUE, at TIMESTAMPTZ)",
        "INSERT INTO plantstore_check.t VALUES (1, 'a', NULL, now())",
    ], Success),
    feature("CREATE INDEX IF NOT EXISTS", "newest first", &["CREATE INDEX IF NOT EXISTS t_at ON plantstore_check.t (at, id)"], Success),
    feature("ALTER TABLE ADD COLUMN IF NOT EXISTS", "upgrades", &["ALTER TABLE plantstore_check.t ADD COLUMN IF NOT EXISTS more TEXT"], Success),
    feature("SET LOCAL lock_timeout with a DDL statement", "upgrades", &[
        "SET LOCAL lock_timeout = '3s'; ALTER TABLE plantstore_check.t ADD COLUMN IF NOT EXISTS more TEXT",
    ], Success),
    feature("INSERT … ON CONFLICT (column) DO NOTHING", "schema version, copies", &[
        "INSERT INTO plantstore_check.t (id, name) VALUES (1, 'a') ON CONFLICT (id) DO NOTHING",
    ], Success),
    feature("ALTER TABLE SET SCHEMA and LOCK TABLE in a transaction", "optional: upgrade from schema version 3", &[
        "CREATE TABLE plantstore_check_old (id BIGINT)",
        "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = '3s'; LOCK TABLE plantstore_check_old IN ACCESS EXCLUSIVE MODE;
         ALTER TABLE plantstore_check_old SET SCHEMA plantstore_check; COMMIT",
    ], Success),
    feature("aclexplode, acldefault, quote_ident, pg_get_userbyid, bool_or", "optional: upgrade from schema version 3", &[
        "SELECT string_agg(role, '') <> '' FROM (
           SELECT CASE grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(grantee)) END AS role, bool_or(privilege_type = 'INSERT')
           FROM pg_catalog.pg_class AS c, aclexplode(coalesce(c.relacl, acldefault('r', c.relowner))) WHERE c.relname = 't' GROUP BY grantee
         ) AS roles",
    ], Value("t")),
    feature("CREATE ROLE, GRANT", "optional: nodes with few privileges", &[
        "CREATE ROLE plantstore_check",
        "GRANT USAGE ON SCHEMA plantstore_check TO plantstore_check",
        "GRANT SELECT, INSERT, UPDATE, DELETE ON plantstore_check.t TO plantstore_check",
    ], Success),
    feature("pg_namespace, pg_class, pg_attribute, pg_constraint, format_type", "verification of the tables", &[
        "SELECT count(*) FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
         JOIN pg_catalog.pg_attribute AS a ON a.attrelid = c.oid JOIN pg_catalog.pg_constraint AS k ON k.conrelid = c.oid
         WHERE nspname = 'plantstore_check' AND relname = 't' AND relkind IN ('r', 'p') AND relpersistence = 'p'
           AND attname = 'id' AND attnum > 0 AND attnotnull AND NOT attisdropped AND NOT (atthasdef OR attidentity <> '')
           AND contype IN ('p', 'u') AND conkey = ARRAY[attnum] AND format_type(atttypid, atttypmod) = 'bigint'",
    ], Value("1")),
    feature("VALUES in WITH, LEFT JOIN USING, string_agg(DISTINCT …)", "verification of the tables", &[
        "WITH expected (id, name) AS (VALUES (1, 'a'), (1, 'b'), (1, 'a') UNION ALL SELECT 2, 'c'), found (id) AS (VALUES (1))
         SELECT string_agg(DISTINCT CASE WHEN name <> 'c' THEN name END, ', ') FROM found LEFT JOIN expected USING (id) GROUP BY id",
    ], Value("a, b")),
    // Settings and servers.
    feature("current_setting(name, true)", "settings that can lose plants", &["SELECT current_setting('no.such', true) IS NULL"], Value("t")),
    feature("no setting that can lose plants", "durable commits", &[
        "SELECT CASE WHEN current_setting('fsync', true) = 'off' THEN 'fsync is off'
                     WHEN current_setting('full_page_writes', true) = 'off' THEN 'full_page_writes is off'
                     WHEN current_setting('data_sync_retry', true) = 'on' THEN 'data_sync_retry is on'
                     WHEN current_setting('synchronous_commit', true) = 'off' THEN 'synchronous_commit is off'
                     WHEN current_setting('synchronous_standby_names', true) <> ''
                       AND current_setting('synchronous_commit', true) NOT IN ('on', 'remote_apply') THEN 'synchronous_commit is too low for the standbys'
                     ELSE 'safe' END",
    ], Value("safe")),
    feature("setting fsync", "optional: a missing setting is taken for safe", &["SHOW fsync"], Success),
    feature("setting full_page_writes", "optional: a missing setting is taken for safe", &["SHOW full_page_writes"], Success),
    feature("setting data_sync_retry", "optional: a missing setting is taken for safe", &["SHOW data_sync_retry"], Success),
    feature("setting synchronous_standby_names", "optional: a missing setting is taken for safe", &["SHOW synchronous_standby_names"], Success),
    feature("transaction_read_only", "a server that accepts writes", &["SHOW transaction_read_only"], Value("off")),
    feature("server_encoding UTF8", "names", &["SELECT upper(current_setting('server_encoding', true))"], Value("UTF8")),
    feature("clock_timestamp", "comparison of clocks", &["SELECT clock_timestamp() >= now()"], Value("t")),
    feature("pg_backend_pid", "optional: prepared statements", &["SELECT pg_backend_pid() IS NOT NULL"], Value("t")),
    feature("pg_control_system, pg_walfile_name, pg_current_wal_lsn, pg_stat_activity", "optional: stale primaries are recognized", &[
        "SELECT (SELECT backend_start FROM pg_catalog.pg_stat_activity WHERE pid = pg_backend_pid()) IS NOT NULL
           AND (SELECT system_identifier FROM pg_catalog.pg_control_system()) IS NOT NULL
           AND length(pg_walfile_name(pg_current_wal_lsn())) = 24
           AND NOT EXISTS (
             SELECT 1 FROM pg_catalog.pg_stat_activity
             WHERE usename = current_user AND wait_event = 'SyncRep' AND query_start < clock_timestamp() - INTERVAL '2 s'
           )",
    ], Value("t")),
    feature("pg_terminate_backend", "optional: lost connections are ended", &[
        "SELECT pg_terminate_backend(pid) FROM pg_catalog.pg_stat_activity WHERE pid = 0",
    ], Success),
    // Batches.
    feature("unnest with several arrays", "batches", &[
        "SELECT count(*) FROM unnest(ARRAY[1, 2]::BIGINT[], ARRAY['a', NULL]::TEXT[]) AS new (id, name)",
    ], Value("2")),
    feature("arrays as binary parameters", "batches", &[
        "SELECT count(*) FROM unnest($1::BIGINT[], $2::TEXT[], $3::TIMESTAMPTZ[]) AS new (id, name, at) WHERE name IS NULL",
    ], Unnamed(1)),
    feature("prepared statements", "batches", &[
        "SELECT count(*) FROM unnest($1::BIGINT[], $2::TEXT[], $3::TIMESTAMPTZ[]) AS new (id, name, at) WHERE name IS NULL",
    ], Prepared(1)),
    feature("set_config of synchronous_commit in FROM", "durable commits", &[
        "SELECT id FROM unnest(ARRAY[7]::BIGINT[]) AS new (id), set_config('synchronous_commit',
           CASE current_setting('synchronous_commit') WHEN 'remote_apply' THEN 'remote_apply' ELSE 'on' END, true)",
    ], Value("7")),
    feature("INSERT … ON CONFLICT DO UPDATE … WHERE … RETURNING in WITH", "replays and conflicts", &[
        "WITH stored AS (
           INSERT INTO plantstore_check.t (id, name, at) SELECT id, name, now() FROM unnest(ARRAY[1, 2]::BIGINT[], ARRAY['b', 'c']) AS new (id, name) ORDER BY id
           ON CONFLICT (id) DO UPDATE SET name = excluded.name WHERE t.name = excluded.name AND t.more IS NOT DISTINCT FROM excluded.more
           RETURNING id, at = now() AS is_new)
         SELECT coalesce(array_agg(id), '{}')::TEXT || coalesce(array_agg(is_new), '{}')::TEXT FROM stored",
    ], Value("{2}{t}")),
    feature("IS NOT DISTINCT FROM with NULL", "replays and conflicts", &[
        "WITH stored AS (
           INSERT INTO plantstore_check.t (id, name) VALUES (2, 'c')
           ON CONFLICT (id) DO UPDATE SET name = excluded.name WHERE t.name = excluded.name AND t.more IS NOT DISTINCT FROM excluded.more
           RETURNING id)
         SELECT coalesce(array_agg(id), '{}')::TEXT FROM stored",
    ], Value("{2}")),
    feature("INSERT … ON CONFLICT DO UPDATE … RETURNING", "readiness", &[
        "INSERT INTO plantstore_check.t (id, name, at) VALUES (3, 'd', now()) ON CONFLICT (id) DO UPDATE SET at = excluded.at RETURNING at = now()",
    ], Value("t")),
    feature("DELETE … WHERE id IN (SELECT …), FOR UPDATE SKIP LOCKED in WITH", "nodes that have ended", &[
        "WITH old AS (
           SELECT id, set_config('synchronous_commit', 'local', true) FROM plantstore_check.t WHERE at < now() - INTERVAL '1 day' FOR UPDATE SKIP LOCKED)
         DELETE FROM plantstore_check.t WHERE id IN (SELECT id FROM old)",
    ], Success),
    // Tokens.
    feature("INSERT … ON CONFLICT DO NOTHING without a column", "tokens", &["INSERT INTO plantstore_check.t (id, name) VALUES (4, 'a') ON CONFLICT DO NOTHING"], Success),
    feature("FOR UPDATE OF … SKIP LOCKED with a join, UPDATE … FROM", "last use of tokens", &[
        "WITH used AS (
           SELECT id, set_config('synchronous_commit', 'local', true) FROM plantstore_check.t
           JOIN unnest(ARRAY[1]::BIGINT[]) AS new (token) ON id = token FOR UPDATE OF t SKIP LOCKED)
         UPDATE plantstore_check.t SET at = now() FROM used WHERE t.id = used.id",
    ], Success),
    feature("a WITH that changes two tables", "history of tokens", &[
        "CREATE TABLE plantstore_check.events (number BIGINT PRIMARY KEY, token BIGINT)",
        "WITH changed AS (UPDATE plantstore_check.t SET more = coalesce(more, 'x') WHERE id = 1 RETURNING id), recorded AS (
           INSERT INTO plantstore_check.events SELECT (SELECT coalesce(max(number), 0) FROM plantstore_check.events) + 1, id FROM changed)
         SELECT * FROM changed",
        "SELECT count(*) FROM plantstore_check.events",
    ], Value("1")),
    feature("a WITH whose parts see the tables before the statement", "history of tokens", &[
        "WITH changed AS (UPDATE plantstore_check.t SET more = 'y' WHERE id = 1 RETURNING id)
         SELECT id FROM changed WHERE NOT EXISTS (SELECT 1 FROM plantstore_check.t WHERE id = 1 AND more = 'y')",
    ], Value("1")),
    // Commands.
    feature("id = ANY(array)", "`get`", &["SELECT count(*) FROM plantstore_check.t WHERE id = ANY(ARRAY[1, 2]::BIGINT[])"], Value("2")),
    feature("row comparison, LIMIT and OFFSET in a subquery", "`list`", &[
        "SELECT id FROM (
           SELECT at, id FROM plantstore_check.t WHERE (at, id) < (now() + INTERVAL '1 day', 1::BIGINT) OFFSET 0
         ) AS found ORDER BY at DESC, id DESC LIMIT 1::BIGINT",
    ], Success),
    feature("translate, replace, strpos, repeat, chr", "`list --name-contains`", &[
        "SELECT strpos(replace(translate('AB', 'AB', 'ab'), 'x', repeat(chr(26), 2)), 'b')",
    ], Value("2")),
    feature("sum as a window function, octet_length", "exports, copies", &[
        "SELECT count(*) FROM (
           SELECT candidates.*, sum(bytes) OVER (ORDER BY id) - bytes AS bytes_before FROM (
             SELECT id, octet_length(name) + coalesce(octet_length(more), 0) AS bytes FROM plantstore_check.t WHERE id < 3 ORDER BY id LIMIT 10
           ) AS candidates
         ) AS page WHERE bytes_before < 1",
    ], Value("1")),
    feature("REPEATABLE READ READ ONLY", "exports", &["BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SELECT 1; COMMIT"], Success),
    feature("extract(epoch), floor, GROUP BY 1", "`stats`", &[
        "SELECT floor(extract(epoch FROM day) / 86400)::BIGINT, count(*) FROM (SELECT TIMESTAMPTZ '1970-01-02 00:00:00Z' AS day) AS days GROUP BY 1",
    ], Value("1")),
    feature("ORDER BY count(*), min(id)", "`stats`", &[
        "SELECT more, count(*) FROM plantstore_check.t WHERE more IS NOT NULL GROUP BY more ORDER BY count(*) DESC, min(id) LIMIT 1::BIGINT",
    ], Value("y")),
    feature("pg_total_relation_size", "optional: size in `stats`", &["SELECT pg_total_relation_size('plantstore_check.t') >= 0"], Value("t")),
    feature("regular expressions", "`check`", &["SELECT chr(26) || '2' ~ (chr(26) || '([^01]|$)')"], Value("t")),
    // Errors.
    feature("SQLSTATE 23505 for a taken id", "replays and conflicts", &["INSERT INTO plantstore_check.t (id, name) VALUES (1, 'z')"], Error("23505")),
    feature("the table in an error 23505", "changes of tokens at the same time", &[
        "INSERT INTO plantstore_check.events (number, token) VALUES (1, 1)",
    ], ErrorOf("23505", "events")),
    feature("SQLSTATE 25006 for a write to a read-only server", "failover", &[
        "BEGIN READ ONLY; INSERT INTO plantstore_check.t (id, name) VALUES (9, 'z')",
    ], Error("25006")),
    feature("SQLSTATE 42P01 for a missing table", "concurrent upgrades", &["SELECT 1 FROM plantstore_check.missing"], Error("42P01")),
    feature("SQLSTATE 42501 for missing privileges", "optional: nodes with few privileges", &[
        "SET ROLE plantstore_check",
        "SELECT 1 FROM plantstore_check.events",
    ], Error("42501")),
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

/// The first column of the last row of a statement.
async fn run(
    client: &Client,
    statement: &str,
    expected: &Expected,
) -> Result<Option<String>, tokio_postgres::Error> {
    let (ids, names) = (vec![1_i64, 2], vec![Some("a"), None]);
    let times = vec![SystemTime::UNIX_EPOCH; 2];
    let rows = match expected {
        Unnamed(_) => {
            let values: [(&(dyn ToSql + Sync), Type); 3] = [
                (&ids, Type::INT8_ARRAY),
                (&names, Type::TEXT_ARRAY),
                (&times, Type::TIMESTAMPTZ_ARRAY),
            ];
            client.query_typed(statement, &values).await?
        }
        Prepared(_) => {
            let statement = client.prepare(statement).await?;
            client.query(&statement, &[&ids, &names, &times]).await?
        }
        _ => {
            let messages = client.simple_query(statement).await?;
            return Ok(messages.iter().rev().find_map(|message| match message {
                SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
                _ => None,
            }));
        }
    };
    let Some(row) = rows.last() else {
        return Ok(None);
    };
    let number: i64 = row.try_get(0)?;
    Ok(Some(number.to_string()))
}

/// None if the engine has it.
async fn problem(client: &Client, feature: &Feature) -> Option<String> {
    let mut last = Ok(None);
    for statement in feature.statements {
        last = run(client, statement, &feature.expected).await;
        if last.is_err() {
            break;
        }
    }
    let explain = |error: &tokio_postgres::Error| match error.as_db_error() {
        Some(error) => format!("{} {}", error.code().code(), error.message()),
        None => error.to_string(),
    };
    let expected = match feature.expected {
        Success => return last.as_ref().err().map(explain),
        Value(expected) => expected.to_owned(),
        Unnamed(expected) | Prepared(expected) => expected.to_string(),
        Error(code) | ErrorOf(code, _) => format!("an error {code}"),
    };
    match (&feature.expected, last) {
        (Error(code), Err(error)) if has_code(&error, code) => None,
        (ErrorOf(code, table), Err(error)) if has_code(&error, code) => {
            let found = error.as_db_error().and_then(|error| error.table());
            (found != Some(table)).then(|| format!("the table is {found:?} instead of {table}"))
        }
        (_, Err(error)) => Some(explain(&error)),
        (_, Ok(Some(value))) if value == expected => None,
        (_, Ok(value)) => {
            let value = value.unwrap_or_else(|| "no value".to_owned());
            Some(format!("{value} instead of {expected}"))
        }
    }
}

fn has_code(error: &tokio_postgres::Error, code: &str) -> bool {
    error.code().is_some_and(|found| found.code() == code)
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
