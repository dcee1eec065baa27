//! The tables of plantstore, all in the schema `plantstore`. Before a connection is used, they are compared with what is expected; missing
//! ones are created; those of an earlier version are moved here from the schema in which that version created them. Tables of other
//! applications are neither used nor changed.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::sleep;
use tokio_postgres::Error;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::Type;

use crate::store::error::OpenError;
use crate::store::postgres::Values;
use crate::store::postgres::session::{Session, classify_connect_error};

/// The newest version of the tables that this plantstore can use. It is raised by a change that the previous plantstore can ignore:
/// docs/decisions/schema-changes.md.
pub(in crate::store) const VERSION: i64 = 6;

/// The version that this plantstore makes: that of the oldest plantstore whose nodes can use the tables. It follows `VERSION` one
/// release later, when older tables are no longer used.
const VERSION_MADE: i64 = 6;
const _: () = assert!(VERSION_MADE <= VERSION);

/// One statement each, which can be run again: not every engine runs two of them in one transaction. The last one inserts `VERSION_MADE`.
const STEPS: [&str; 11] = [
    include_str!("../../../migrations/postgres/0001_tokens.sql"),
    include_str!("../../../migrations/postgres/0002_plants.sql"),
    include_str!("../../../migrations/postgres/0003_newest_first.sql"),
    include_str!("../../../migrations/postgres/0004_nodes.sql"),
    include_str!("../../../migrations/postgres/0005_token_events.sql"),
    include_str!("../../../migrations/postgres/0006_rotated_at.sql"),
    include_str!("../../../migrations/postgres/0007_previous_digest.sql"),
    include_str!("../../../migrations/postgres/0008_previous_expires_at.sql"),
    include_str!("../../../migrations/postgres/0009_by_user.sql"),
    "CREATE TABLE IF NOT EXISTS plantstore.schema_version (version BIGINT PRIMARY KEY)",
    "INSERT INTO plantstore.schema_version (version) VALUES (6) ON CONFLICT (version) DO NOTHING",
];

const CREATE_SCHEMA: &str = "CREATE SCHEMA IF NOT EXISTS plantstore";

/// Up to this version the tables were in the first schema of the search path, and their version was in `plantstore_schema`. That table
/// stays, with `VERSION_MOVED` in it, so that an older plantstore rejects the database instead of creating its tables again.
const VERSION_BEFORE_OWN_SCHEMA: i64 = 3;
const VERSION_MOVED: i64 = 4;

/// Attempts to create or move tables while another session locks them.
const ATTEMPTS: usize = 5;
const PAUSE: Duration = Duration::from_millis(200);

/// The tables of this version; the first two are also those of an earlier one.
const TABLES: [&str; 5] = [
    "tokens",
    "plants",
    "nodes",
    "token_events",
    "schema_version",
];

/// Those of `TABLES` that were added since `VERSION_MADE`. They are created if they are missing; any other missing table is damage.
const ADDED_TABLES: [&str; 0] = [];

/// Every relation in the schema `plantstore`, and those of an earlier version elsewhere, with how it differs from the table that
/// plantstore creates, if it does, and the columns of this version that it does not have. Further columns are ignored, unless they
/// require a value. One row without a relation if the schema is empty. The catalogue can be read without any rights on the tables.
const RELATIONS: &str = "
    WITH added (relation, name, type) AS (VALUES
      ('tokens', 'rotated_at', 'timestamp with time zone'),
      ('tokens', 'previous_digest', 'bytea'),
      ('tokens', 'previous_expires_at', 'timestamp with time zone'),
      ('token_events', 'by_user', 'text')
    ), expected (relation, name, type, is_required, is_unique) AS (VALUES
      ('tokens', 'id', 'bigint', TRUE, TRUE),
      ('tokens', 'name', 'text', TRUE, TRUE),
      ('tokens', 'digest', 'bytea', TRUE, TRUE),
      ('tokens', 'rate_limit', 'bigint', FALSE, FALSE),
      ('tokens', 'created_at', 'timestamp with time zone', TRUE, FALSE),
      ('tokens', 'expires_at', 'timestamp with time zone', FALSE, FALSE),
      ('tokens', 'revoked_at', 'timestamp with time zone', FALSE, FALSE),
      ('tokens', 'last_used_at', 'timestamp with time zone', FALSE, FALSE),
      ('plants', 'id', 'bigint', TRUE, TRUE),
      ('plants', 'name', 'text', TRUE, FALSE),
      ('plants', 'tag', 'text', FALSE, FALSE),
      ('plants', 'added_at', 'timestamp with time zone', TRUE, FALSE),
      ('plants', 'added_by', 'bigint', TRUE, FALSE),
      ('nodes', 'id', 'bigint', TRUE, TRUE),
      ('nodes', 'started_at', 'timestamp with time zone', TRUE, FALSE),
      ('nodes', 'seen_at', 'timestamp with time zone', TRUE, FALSE),
      ('token_events', 'number', 'bigint', TRUE, TRUE),
      ('token_events', 'token', 'bigint', TRUE, FALSE),
      ('token_events', 'event', 'text', TRUE, FALSE),
      ('token_events', 'at', 'timestamp with time zone', TRUE, FALSE),
      ('schema_version', 'version', 'bigint', TRUE, TRUE)
      UNION ALL SELECT relation, name, type, FALSE, FALSE FROM added
    ), found AS (
      SELECT n.nspname::TEXT AS schema, c.oid, c.relname::TEXT AS relation, c.relkind, c.relpersistence
      FROM pg_catalog.pg_namespace AS n
      LEFT JOIN pg_catalog.pg_class AS c
        ON c.relnamespace = n.oid AND c.relkind IN ('r', 'p', 'v', 'm', 'f')
        AND (n.nspname = 'plantstore' OR c.relname IN ('plantstore_schema', 'tokens', 'plants'))
      WHERE n.nspname = 'plantstore'
         OR n.oid IN (SELECT relnamespace FROM pg_catalog.pg_class WHERE relname = 'plantstore_schema' AND relkind = 'r')
    ), columns AS (
      SELECT attrelid, attnum, attname::TEXT AS name, format_type(atttypid, atttypmod) AS type, attnotnull AS is_required,
             atthasdef OR attidentity <> '' AS has_default
      FROM pg_catalog.pg_attribute WHERE attnum > 0 AND NOT attisdropped
    )
    SELECT schema, relation, string_agg(DISTINCT CASE
        WHEN relkind NOT IN ('r', 'p') THEN 'it is not a table'
        WHEN relpersistence <> 'p' THEN 'it is not logged: a crash would empty it'
        WHEN a.name IS NULL AND e.name IN (SELECT name FROM added) THEN NULL
        WHEN a.name IS NULL THEN 'it has no column ' || e.name
        WHEN a.type <> e.type THEN 'column ' || e.name || ' is ' || a.type || ' instead of ' || e.type
        WHEN a.is_required AND NOT e.is_required THEN 'column ' || e.name || ' cannot be null'
        WHEN e.is_required AND NOT a.is_required THEN 'column ' || e.name || ' can be null'
        WHEN e.is_unique AND NOT EXISTS (
            SELECT 1 FROM pg_catalog.pg_constraint
            WHERE conrelid = found.oid AND contype IN ('p', 'u') AND conkey = ARRAY[a.attnum]
          ) THEN 'column ' || e.name || ' is not unique'
        ELSE (
            SELECT 'it has a further column ' || min(name) || ', which cannot be null' FROM columns
            WHERE attrelid = found.oid AND is_required AND NOT has_default
              AND name NOT IN (SELECT name FROM expected WHERE expected.relation = found.relation)
          )
      END, ', '),
      string_agg(DISTINCT CASE
        WHEN a.name IS NULL AND e.name IN (SELECT name FROM added) THEN 'it has no column ' || e.name
      END, ', ')
    FROM found LEFT JOIN expected AS e USING (relation)
    LEFT JOIN columns AS a ON a.attrelid = found.oid AND a.name = e.name
    GROUP BY schema, relation";

/// What was found in the database.
struct Found {
    has_schema: bool,
    version: Option<i64>,
    /// True if there is nothing to add to the tables of this version.
    is_complete: bool,
    /// The schema and the version of the tables of an earlier version, if there are no others.
    earlier: Option<(String, i64)>,
}

/// True if the tables can be used once what this plantstore has added to them is there.
fn is_current(version: Option<i64>) -> bool {
    version.is_some_and(|version| (VERSION_MADE..=VERSION).contains(&version))
}

/// Relations by schema and name, each with how it differs from the table of plantstore.
type Schemas = BTreeMap<String, BTreeMap<String, Difference>>;

#[derive(Default)]
struct Difference {
    /// In what all versions have.
    common: Option<String>,
    /// In what this version has added.
    added: Option<String>,
}

/// Whether this is the first time that this process verifies the tables.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum SchemaCheck {
    /// This process has not used the database before.
    First {
        /// If true, missing tables are created, and those of an earlier version moved.
        create: bool,
    },
    /// This process has used the tables. If they are missing now, they are not created again: new ones would be empty.
    Repeated,
}

/// Verifies, creates or upgrades the tables. Calls `before_upgrade` before it writes.
pub(super) async fn ensure(
    session: &Session,
    schema_check: SchemaCheck,
    mut before_upgrade: impl FnMut(),
) -> Result<(), OpenError> {
    let is_first = schema_check != SchemaCheck::Repeated;
    let mut attempt = 1;
    loop {
        let found = match inspect(session, is_first).await {
            // Another node may be moving the tables between two of our queries.
            Err(OpenError::Unsafe { .. }) => inspect(session, is_first).await?,
            found => found?,
        };
        if is_current(found.version) && found.is_complete {
            return Ok(());
        }
        let not_migrated = |found| OpenError::NotMigrated {
            database: session.database.clone(),
            found,
        };
        let migrated = match (schema_check, found.earlier) {
            (SchemaCheck::Repeated, _) => {
                let problem = "its schema plantstore, which this process has used, is no longer there; restore it";
                return Err(session.must_not_be_used(problem.to_owned()));
            }
            (SchemaCheck::First { create: false }, earlier) => {
                let earlier = earlier.map(|(_, version)| version);
                return Err(not_migrated(earlier.or(found.version)));
            }
            (_, Some((schema, version))) => {
                before_upgrade();
                move_tables(session, &schema, version).await
            }
            (_, None) => {
                before_upgrade();
                create_missing_tables(session, found.has_schema).await
            }
        };
        match migrated {
            Ok(()) if attempt < ATTEMPTS => {}
            Ok(()) => return Err(not_migrated(None)),
            Err(OpenError::Migration { source, .. })
                if attempt < ATTEMPTS && is_temporary(&source) =>
            {
                sleep(PAUSE).await;
            }
            Err(error) => return Err(error),
        }
        attempt += 1;
    }
}

async fn create_missing_tables(session: &Session, has_schema: bool) -> Result<(), OpenError> {
    // A role that may create tables in the schema need not have the right to create schemas.
    let schema = (!has_schema).then_some(CREATE_SCHEMA);
    for step in schema.into_iter().chain(STEPS) {
        // Waiting longer for a lock would block the nodes that use the tables.
        let step = format!("SET LOCAL lock_timeout = '3s'; {step}");
        match session.client.batch_execute(&step).await {
            // Another node has created it at the same time.
            Err(error) if exists(&error) => {}
            done => done.map_err(migration(session))?,
        }
    }
    Ok(())
}

/// Moves the tables of an earlier version into our schema, all of them or none.
async fn move_tables(session: &Session, from: &str, version: i64) -> Result<(), OpenError> {
    let schema = quoted(from);
    if version < VERSION_BEFORE_OWN_SCHEMA {
        // It can take long, and adds go on meanwhile if it is not part of the move.
        let index =
            format!("CREATE INDEX IF NOT EXISTS plants_by_time ON {schema}.plants (added_at, id)");
        let created = session.client.batch_execute(&index).await;
        created.map_err(migration(session))?;
    }
    // One node at a time. Waiting longer for the lock would block the nodes of the earlier version, too.
    let begin = format!(
        "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = '3s'; LOCK TABLE {schema}.plantstore_schema IN ACCESS EXCLUSIVE MODE"
    );
    let moved = match session.client.batch_execute(&begin).await {
        Ok(()) => move_locked_tables(session, from).await,
        Err(error) => Err(migration(session)(error)),
    };
    if moved.is_err() {
        // If that fails as well, the connection is lost, and the transaction with it.
        let _ = session.client.batch_execute("ROLLBACK").await;
    }
    moved
}

async fn move_locked_tables(session: &Session, from: &str) -> Result<(), OpenError> {
    let found = inspect(session, true).await?;
    if found.earlier.is_none() {
        // Another node has moved them.
        let rolled_back = session.client.batch_execute("ROLLBACK").await;
        return rolled_back.map_err(classify_connect_error(&session.database));
    }
    let create_schema = if found.has_schema { "" } else { CREATE_SCHEMA };
    let schema = quoted(from);
    let steps = STEPS.join(";\n");
    let grants = grants(session, from).await?;
    let sql = format!(
        "{create_schema};
         ALTER TABLE {schema}.tokens SET SCHEMA plantstore;
         ALTER TABLE {schema}.plants SET SCHEMA plantstore;
         {steps};
         {grants};
         INSERT INTO {schema}.plantstore_schema (version) VALUES ({VERSION_MOVED});
         COMMIT"
    );
    let moved = session.client.batch_execute(&sql).await;
    moved.map_err(migration(session))
}

/// Statements that give the rights on new tables to the roles that have rights on the tables of an earlier version, their owners
/// included: reading the version, and if they may add plants, probing and the changes of tokens.
async fn grants(session: &Session, schema: &str) -> Result<String, OpenError> {
    let sql = "SELECT string_agg(
                   'GRANT USAGE ON SCHEMA plantstore TO ' || role || '; GRANT SELECT ON plantstore.schema_version TO ' || role
                   || CASE WHEN adds_plants THEN
                        '; GRANT SELECT, INSERT, UPDATE, DELETE ON plantstore.nodes TO ' || role
                        || '; GRANT SELECT, INSERT ON plantstore.token_events TO ' || role
                      ELSE '' END,
                   '; ')
               FROM (
                 SELECT CASE grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(grantee)) END AS role,
                        bool_or(c.relname = 'plants' AND privilege_type = 'INSERT') AS adds_plants
                 FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace,
                      aclexplode(coalesce(c.relacl, acldefault('r', c.relowner)))
                 WHERE n.nspname = $1 AND c.relname IN ('plantstore_schema', 'tokens', 'plants')
                 GROUP BY grantee
               ) AS roles";
    let values: &Values<'_> = &[(&schema, Type::TEXT)];
    let row = session.client.query_typed_one(sql, values).await;
    let row = row.map_err(migration(session))?;
    Ok(row.get::<_, Option<String>>(0).unwrap_or_default())
}

async fn relations(session: &Session) -> Result<Schemas, OpenError> {
    let rows = session.client.query_typed(RELATIONS, &[]).await;
    let mut schemas = Schemas::new();
    for row in rows.map_err(classify_connect_error(&session.database))? {
        let relations = schemas.entry(row.get(0)).or_default();
        if let Some(name) = row.get(1) {
            let difference = Difference {
                common: row.get(2),
                added: row.get(3),
            };
            relations.insert(name, difference);
        }
    }
    Ok(schemas)
}

async fn inspect(session: &Session, is_first: bool) -> Result<Found, OpenError> {
    let mut schemas = relations(session).await?;
    let ours = schemas.remove("plantstore");
    let has_schema = ours.is_some();
    let ours = ours.unwrap_or_default();
    let reject = |problem| Err(session.must_not_be_used(problem));

    let version = match ours.get("schema_version") {
        Some(Difference { common: None, .. }) => {
            version(session, "plantstore.schema_version").await?
        }
        _ => None,
    };
    if let Some(found) = version.filter(|version| *version > VERSION) {
        return Err(OpenError::Newer {
            path: session.database.clone(),
            found,
            known: VERSION,
        });
    }
    let is_current = is_current(version);
    let mut is_complete = true;
    for name in TABLES {
        let (damage, added) = match ours.get(name) {
            Some(found) => (found.common.as_deref(), found.added.as_deref()),
            None if ADDED_TABLES.contains(&name) => (None, Some("it is missing")),
            None => (is_current.then_some("it is missing"), None),
        };
        is_complete &= added.is_none();
        // A process that starts adds what is missing; one that has used the tables has seen them complete.
        let problem = damage.or(added.filter(|_| is_current && !is_first));
        if let Some(problem) = problem {
            return reject(format!(
                "the table plantstore.{name} is not what this plantstore creates ({problem}); \
                 restore it, or use another database"
            ));
        }
    }
    if version.is_none()
        && let Some(other) = ours.keys().find(|name| !TABLES.contains(&name.as_str()))
    {
        return reject(format!(
            "its schema plantstore belongs to another application: it has {other}, which plantstore does not create; \
             rename that schema, or use another database"
        ));
    }
    let mut found = Found {
        has_schema,
        version,
        is_complete,
        earlier: None,
    };
    if is_current && !is_first {
        return Ok(found);
    }

    for (schema, tables) in &schemas {
        let table = format!("{}.plantstore_schema", quoted(schema));
        let their_version = match self::version(session, &table).await {
            // Our own tables can be used without rights on those of an earlier version.
            Err(OpenError::Unsafe { .. }) if version.is_some() => continue,
            found => found?,
        };
        match (their_version, version) {
            // Without a version it was never completed, and is empty.
            (None, _) | (Some(VERSION_MOVED..), Some(_)) => {}
            (Some(VERSION_MOVED..), None) => {
                return reject(format!(
                    "the tables of its schema {schema} were moved to the schema plantstore, which is not there; restore that schema"
                ));
            }
            (Some(_), Some(_)) => {
                return reject(format!(
                    "besides the schema plantstore it has tables of an earlier plantstore in the schema {schema}, so an older \
                     plantstore has been used; stop that one, save what was added to {schema}.plants, \
                     and drop {schema}.plantstore_schema"
                ));
            }
            (Some(their_version), None) => {
                if let Some((other, _)) = &found.earlier {
                    return reject(format!(
                        "it has tables of an earlier plantstore in two schemas, {other} and {schema}; \
                         rename plantstore_schema in the one that is not to be used"
                    ));
                }
                for name in &TABLES[..2] {
                    let found = tables.get(*name);
                    let problem = found.map(|found| found.common.as_deref());
                    if let Some(problem) = problem.unwrap_or(Some("it is missing")) {
                        return reject(format!(
                            "the table {schema}.{name} is not what an earlier plantstore made ({problem}); \
                             restore it, or rename {schema}.plantstore_schema if it is not plantstore's"
                        ));
                    }
                }
                found.earlier = Some((schema.clone(), their_version));
            }
        }
    }
    Ok(found)
}

/// The highest version in a table.
async fn version(session: &Session, table: &str) -> Result<Option<i64>, OpenError> {
    let sql = format!("SELECT max(version)::BIGINT FROM {table}");
    let error = match session.client.query_typed_one(&sql, &[]).await {
        Ok(row) => return Ok(row.get(0)),
        Err(error) => error,
    };
    match error.code() {
        Some(&SqlState::INSUFFICIENT_PRIVILEGE) => {
            let message = error.as_db_error().map_or("", |error| error.message());
            Err(session.must_not_be_used(format!(
                "its role lacks privileges ({message}); grant those that docs/high-availability.md lists"
            )))
        }
        // Moved or dropped since it was seen; or not a version of ours.
        Some(
            &(SqlState::UNDEFINED_TABLE
            | SqlState::UNDEFINED_COLUMN
            | SqlState::UNDEFINED_FUNCTION),
        ) => Ok(None),
        _ => Err(classify_connect_error(&session.database)(error)),
    }
}

fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

fn migration(session: &Session) -> impl FnOnce(Error) -> OpenError {
    |source| match source.code() {
        Some(_) => OpenError::Migration {
            database: session.database.clone(),
            source,
        },
        None => classify_connect_error(&session.database)(source),
    }
}

/// True if a schema, a table, another object or a row exists already.
fn exists(error: &Error) -> bool {
    let code = error.code().map_or("", SqlState::code);
    ["42P06", "42P07", "42710", "23505"].contains(&code)
}

/// True if another session may have been the cause: it has created or dropped a table, or holds a lock.
fn is_temporary(error: &Error) -> bool {
    let code = error.code().map_or("", SqlState::code);
    exists(error) || code == "42P01" || code.starts_with("40") || code.starts_with("55")
}
