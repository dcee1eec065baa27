//! The tables of plantstore, all in the schema `plantstore`. Before a connection is used, they are compared with what is expected; missing
//! ones are created; those of an earlier version are moved here from the schema in which that version created them. Tables of other
//! applications are neither used nor changed.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use tokio::time::sleep;
use tokio_postgres::Error;
use tokio_postgres::error::SqlState;

use crate::store::error::OpenError;
use crate::store::postgres::client::Client;
use crate::store::postgres::session::classify_connect_error;

/// The number of steps in `migrations/postgres`.
pub(in crate::store) const VERSION: i64 = 4;

/// One statement each, which can be run again: not every engine runs two of them in one transaction.
const STEPS: [&str; 4] = [
    include_str!("../../../migrations/postgres/0001_tokens.sql"),
    include_str!("../../../migrations/postgres/0002_plants.sql"),
    include_str!("../../../migrations/postgres/0003_newest_first.sql"),
    include_str!("../../../migrations/postgres/0004_nodes.sql"),
];
const _: () = assert!(STEPS.len() as u64 == VERSION.unsigned_abs());

const CREATE_SCHEMA: &str = "CREATE SCHEMA IF NOT EXISTS plantstore";
const CREATE_VERSIONS: &str =
    "CREATE TABLE IF NOT EXISTS plantstore.schema_version (version BIGINT PRIMARY KEY)";

fn insert_version() -> String {
    format!(
        "INSERT INTO plantstore.schema_version (version) VALUES ({VERSION}) ON CONFLICT (version) DO NOTHING"
    )
}

/// Up to this version the tables were in the first schema of the search path, and their version was in `plantstore_schema`. That table
/// stays, with the new version in it, so that an older plantstore rejects the database instead of creating its tables again.
const VERSION_BEFORE_OWN_SCHEMA: i64 = 3;

/// Attempts to create or move tables while another session locks them.
const ATTEMPTS: usize = 5;
const PAUSE: Duration = Duration::from_millis(200);

/// The constraint of a column.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Constraint {
    /// Not null, and unique by itself.
    Unique,
    /// Not null.
    Required,
    Optional,
}

type Columns = &'static [(&'static str, &'static str, Constraint)];

const TIME: &str = "timestamp with time zone";

const TABLES: [(&str, Columns); 4] = [
    (
        "tokens",
        &[
            ("id", "bigint", Constraint::Unique),
            ("name", "text", Constraint::Unique),
            ("digest", "bytea", Constraint::Unique),
            ("rate_limit", "bigint", Constraint::Optional),
            ("created_at", TIME, Constraint::Required),
            ("expires_at", TIME, Constraint::Optional),
            ("revoked_at", TIME, Constraint::Optional),
            ("last_used_at", TIME, Constraint::Optional),
        ],
    ),
    (
        "plants",
        &[
            ("id", "bigint", Constraint::Unique),
            ("name", "text", Constraint::Required),
            ("tag", "text", Constraint::Optional),
            ("added_at", TIME, Constraint::Required),
            ("added_by", "bigint", Constraint::Required),
        ],
    ),
    (
        "nodes",
        &[
            ("id", "bigint", Constraint::Unique),
            ("started_at", TIME, Constraint::Required),
            ("seen_at", TIME, Constraint::Required),
        ],
    ),
    ("schema_version", VERSIONS),
];

const VERSIONS: Columns = &[("version", "bigint", Constraint::Unique)];

/// Every relation in the schema `plantstore`, and those of an earlier version elsewhere, a row a column. One row without a
/// relation if the schema is empty. The catalogue can be read without any rights on the tables.
const RELATIONS: &str = "
    SELECT n.nspname::TEXT, c.relname::TEXT, c.relkind::TEXT, c.relpersistence::TEXT,
           a.attname::TEXT, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.atthasdef OR a.attidentity <> '',
           EXISTS (SELECT 1 FROM pg_catalog.pg_constraint AS k
                   WHERE k.conrelid = c.oid AND k.contype IN ('p', 'u') AND k.conkey = ARRAY[a.attnum])
    FROM pg_catalog.pg_namespace AS n
    LEFT JOIN pg_catalog.pg_class AS c
      ON c.relnamespace = n.oid AND c.relkind IN ('r', 'p', 'v', 'm', 'f')
      AND (n.nspname = 'plantstore' OR c.relname IN ('plantstore_schema', 'tokens', 'plants'))
    LEFT JOIN pg_catalog.pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
    WHERE n.nspname = 'plantstore'
       OR n.oid IN (SELECT relnamespace FROM pg_catalog.pg_class WHERE relname = 'plantstore_schema' AND relkind = 'r')";

/// What was found in the database.
enum Found {
    /// The tables of this version.
    Current,
    /// No tables, or some of them.
    Incomplete { has_schema: bool },
    /// The tables of an earlier version, in this other schema.
    Earlier {
        schema: String,
        version: i64,
        has_schema: bool,
    },
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

/// Verifies, creates or upgrades the tables.
pub(super) async fn ensure(client: &Client, schema_check: SchemaCheck) -> Result<(), OpenError> {
    let is_first = schema_check != SchemaCheck::Repeated;
    let mut attempt = 1;
    loop {
        let found = match inspect(client, is_first).await {
            // Another node may be moving the tables between two of our queries.
            Err(OpenError::Unsafe { .. }) => inspect(client, is_first).await?,
            found => found?,
        };
        let migrated = match found {
            Found::Current => return Ok(()),
            _ if schema_check == SchemaCheck::Repeated => {
                return Err(unsafe_to_use(
                    client,
                    "its schema plantstore, which this process has used, is no longer there; restore it"
                        .to_owned(),
                ));
            }
            _ if schema_check == (SchemaCheck::First { create: false }) => {
                let found = match found {
                    Found::Earlier { version, .. } => Some(version),
                    _ => None,
                };
                return Err(not_migrated(client, found));
            }
            Found::Earlier {
                schema, version, ..
            } => move_tables(client, &schema, version).await,
            Found::Incomplete { has_schema } => create_missing_tables(client, has_schema).await,
        };
        match migrated {
            Ok(()) if attempt < ATTEMPTS => {}
            Ok(()) => return Err(not_migrated(client, None)),
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

async fn create_missing_tables(client: &Client, has_schema: bool) -> Result<(), OpenError> {
    // A role that may create tables in the schema need not have the right to create schemas.
    let schema = (!has_schema).then_some(CREATE_SCHEMA);
    let steps = schema.into_iter().chain(STEPS);
    for step in steps.chain([CREATE_VERSIONS, &insert_version()]) {
        match client.batch_execute(step).await {
            // Another node has created it at the same time.
            Err(error) if exists(&error) => {}
            done => done.map_err(migration(client))?,
        }
    }
    Ok(())
}

/// Moves the tables of an earlier version into our schema, all of them or none.
async fn move_tables(client: &Client, from: &str, version: i64) -> Result<(), OpenError> {
    let schema = quoted(from);
    if version < VERSION_BEFORE_OWN_SCHEMA {
        // It can take long, and adds go on meanwhile if it is not part of the move.
        let index =
            format!("CREATE INDEX IF NOT EXISTS plants_by_time ON {schema}.plants (added_at, id)");
        client
            .batch_execute(&index)
            .await
            .map_err(migration(client))?;
    }
    // One node at a time. Waiting longer for the lock would block the nodes of the earlier version, too.
    let begin = format!(
        "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = '3s'; LOCK TABLE {schema}.plantstore_schema IN ACCESS EXCLUSIVE MODE"
    );
    let moved = match client.batch_execute(&begin).await {
        Ok(()) => move_locked_tables(client, from).await,
        Err(error) => Err(migration(client)(error)),
    };
    if moved.is_err() {
        // If that fails as well, the connection is lost, and the transaction with it.
        let _ = client.batch_execute("ROLLBACK").await;
    }
    moved
}

async fn move_locked_tables(client: &Client, from: &str) -> Result<(), OpenError> {
    let Found::Earlier { has_schema, .. } = inspect(client, true).await? else {
        // Another node has moved them.
        return client
            .batch_execute("ROLLBACK")
            .await
            .map_err(classify_connect_error(&client.database));
    };
    let schema = quoted(from);
    let mut sql = String::new();
    if !has_schema {
        let _ = writeln!(sql, "{CREATE_SCHEMA};");
    }
    for table in ["tokens", "plants"] {
        let _ = writeln!(sql, "ALTER TABLE {schema}.{table} SET SCHEMA plantstore;");
    }
    for step in STEPS.iter().chain(&[CREATE_VERSIONS, &insert_version()]) {
        let _ = writeln!(sql, "{step};");
    }
    for (role, adds_plants) in roles(client, from).await? {
        let _ = writeln!(
            sql,
            "GRANT USAGE ON SCHEMA plantstore TO {role}; GRANT SELECT ON plantstore.schema_version TO {role};"
        );
        if adds_plants {
            let _ = writeln!(
                sql,
                "GRANT SELECT, INSERT, UPDATE, DELETE ON plantstore.nodes TO {role};"
            );
        }
    }
    let _ = write!(
        sql,
        "INSERT INTO {schema}.plantstore_schema (version) VALUES ({VERSION}); COMMIT"
    );
    client.batch_execute(&sql).await.map_err(migration(client))
}

/// The roles, quoted, that have rights on the tables of an earlier version, their owners included; and whether they may add plants.
async fn roles(client: &Client, schema: &str) -> Result<Vec<(String, bool)>, OpenError> {
    let sql = "SELECT CASE grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(grantee)) END,
                      bool_or(c.relname = 'plants' AND privilege_type = 'INSERT')
               FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace,
                    aclexplode(coalesce(c.relacl, acldefault('r', c.relowner)))
               WHERE n.nspname = $1 AND c.relname IN ('plantstore_schema', 'tokens', 'plants')
               GROUP BY grantee";
    let rows = client
        .query(sql, &[&schema])
        .await
        .map_err(migration(client))?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
}

/// A table or view according to the system catalogue.
#[derive(Default)]
struct Relation {
    is_table: bool,
    is_logged: bool,
    columns: BTreeMap<String, Column>,
}

struct Column {
    sql_type: String,
    is_required: bool,
    has_default: bool,
    is_unique: bool,
}

/// Relations by schema and name.
type Schemas = BTreeMap<String, BTreeMap<String, Relation>>;

async fn inspect(client: &Client, is_first: bool) -> Result<Found, OpenError> {
    let mut schemas = relations(client).await?;
    let ours = schemas.remove("plantstore");
    let has_schema = ours.is_some();
    let ours = ours.unwrap_or_default();
    let reject = |problem| Err(unsafe_to_use(client, problem));

    let version = match ours.get("schema_version") {
        Some(table) if table.problem(VERSIONS).is_none() => {
            version(client, "plantstore.schema_version").await?
        }
        _ => None,
    };
    if let Some(found) = version.filter(|version| *version > VERSION) {
        return Err(OpenError::Newer {
            path: client.database.clone(),
            found,
            known: VERSION,
        });
    }
    let is_current = version == Some(VERSION);
    for (name, columns) in TABLES {
        let problem = match ours.get(name) {
            Some(table) => table.problem(columns),
            None if is_current => Some("it is missing".to_owned()),
            None => None,
        };
        if let Some(problem) = problem {
            return reject(format!(
                "the table plantstore.{name} is not what this plantstore creates ({problem}); \
                 restore it, or use another database"
            ));
        }
    }
    if version.is_none() {
        let is_ours = |name: &&String| TABLES.iter().any(|(ours, _)| ours == name);
        if let Some(other) = ours.keys().find(|name| !is_ours(name)) {
            return reject(format!(
                "its schema plantstore belongs to another application: it has {other}, which plantstore does not create; \
                 rename that schema, or use another database"
            ));
        }
    }
    if is_current && !is_first {
        return Ok(Found::Current);
    }

    let mut earlier = None;
    for (schema, tables) in &schemas {
        let table = format!("{}.plantstore_schema", quoted(schema));
        let their_version = match self::version(client, &table).await {
            // Our own tables can be used without rights on those of an earlier version.
            Err(OpenError::Unsafe { .. }) if version.is_some() => continue,
            found => found?,
        };
        match their_version {
            // Was never completed, and is empty.
            None => {}
            Some(VERSION..) if version.is_some() => {}
            Some(VERSION..) => {
                return reject(format!(
                    "the tables of its schema {schema} were moved to the schema plantstore, which is not there; restore that schema"
                ));
            }
            Some(_) if version.is_some() => {
                return reject(format!(
                    "besides the schema plantstore it has tables of an earlier plantstore in the schema {schema}, so an older \
                     plantstore has been used; stop that one, save what was added to {schema}.plants, \
                     and drop {schema}.plantstore_schema"
                ));
            }
            Some(their_version) => {
                if let Some((other, _)) = &earlier {
                    return reject(format!(
                        "it has tables of an earlier plantstore in two schemas, {other} and {schema}; \
                         rename plantstore_schema in the one that is not to be used"
                    ));
                }
                for (name, columns) in TABLES.iter().take(2) {
                    let problem = tables.get(*name).map(|table| table.problem(columns));
                    if let Some(problem) = problem.unwrap_or(Some("it is missing".to_owned())) {
                        return reject(format!(
                            "the table {schema}.{name} is not what an earlier plantstore made ({problem}); \
                             restore it, or rename {schema}.plantstore_schema if it is not plantstore's"
                        ));
                    }
                }
                earlier = Some((schema.clone(), their_version));
            }
        }
    }
    Ok(match (version, earlier) {
        (Some(VERSION), _) => Found::Current,
        (None, Some((schema, version))) => Found::Earlier {
            schema,
            version,
            has_schema,
        },
        _ => Found::Incomplete { has_schema },
    })
}

async fn relations(client: &Client) -> Result<Schemas, OpenError> {
    let mut schemas = Schemas::new();
    for row in client
        .query(RELATIONS, &[])
        .await
        .map_err(classify_connect_error(&client.database))?
    {
        let relations = schemas.entry(row.get(0)).or_default();
        let Some(name) = row.get::<_, Option<String>>(1) else {
            continue;
        };
        let relation = relations.entry(name).or_default();
        relation.is_table = ["r", "p"].contains(&row.get(2));
        relation.is_logged = row.get::<_, &str>(3) == "p";
        let Some(column) = row.get::<_, Option<String>>(4) else {
            continue;
        };
        let what = Column {
            sql_type: row.get(5),
            is_required: row.get(6),
            has_default: row.get(7),
            is_unique: row.get(8),
        };
        relation.columns.insert(column, what);
    }
    Ok(schemas)
}

/// The highest version in a table.
async fn version(client: &Client, table: &str) -> Result<Option<i64>, OpenError> {
    let sql = format!("SELECT max(version)::BIGINT FROM {table}");
    match client.query_one(&sql, &[]).await {
        Ok(row) => Ok(row.get(0)),
        Err(error) if error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) => {
            let message = error.as_db_error().map_or("", |error| error.message());
            Err(unsafe_to_use(
                client,
                format!(
                    "its role lacks rights ({message}); grant those that docs/high-availability.md lists"
                ),
            ))
        }
        // Moved or dropped since it was seen; or not a version of ours.
        Err(error)
            if [
                Some(&SqlState::UNDEFINED_TABLE),
                Some(&SqlState::UNDEFINED_COLUMN),
                Some(&SqlState::UNDEFINED_FUNCTION),
            ]
            .contains(&error.code()) =>
        {
            Ok(None)
        }
        Err(error) => Err(classify_connect_error(&client.database)(error)),
    }
}

impl Relation {
    /// How this differs from a table with these columns. Further columns are ignored, unless they require a value.
    fn problem(&self, columns: Columns) -> Option<String> {
        if !self.is_table {
            return Some("it is not a table".to_owned());
        }
        if !self.is_logged {
            return Some("it is not logged: a crash would empty it".to_owned());
        }
        for (name, sql_type, is) in columns {
            let Some(column) = self.columns.get(*name) else {
                return Some(format!("it has no column {name}"));
            };
            if column.sql_type != *sql_type {
                let found = &column.sql_type;
                return Some(format!("column {name} is {found} instead of {sql_type}"));
            }
            if column.is_required != (*is != Constraint::Optional) {
                let null = if column.is_required { "not" } else { "" };
                return Some(format!("column {name} can{null} be null"));
            }
            if *is == Constraint::Unique && !column.is_unique {
                return Some(format!("column {name} is not unique"));
            }
        }
        let mut others = self.columns.iter();
        let required = others.find(|(name, column)| {
            let is_ours = columns.iter().any(|(ours, ..)| ours == name);
            !is_ours && column.is_required && !column.has_default
        });
        required.map(|(name, _)| format!("it has a further column {name}, which cannot be null"))
    }
}

fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

fn migration(client: &Client) -> impl FnOnce(Error) -> OpenError {
    |source| match source.code() {
        Some(_) => OpenError::Migration {
            database: client.database.clone(),
            source,
        },
        None => classify_connect_error(&client.database)(source),
    }
}

fn not_migrated(client: &Client, found: Option<i64>) -> OpenError {
    let database = client.database.clone();
    OpenError::NotMigrated { database, found }
}

fn unsafe_to_use(client: &Client, problem: String) -> OpenError {
    let database = client.database.clone();
    OpenError::Unsafe { database, problem }
}

fn exists(error: &Error) -> bool {
    let exists = [
        SqlState::DUPLICATE_SCHEMA,
        SqlState::DUPLICATE_TABLE,
        SqlState::DUPLICATE_OBJECT,
        SqlState::UNIQUE_VIOLATION,
    ];
    error.code().is_some_and(|code| exists.contains(code))
}

/// True if another session may have been the cause.
fn is_temporary(error: &Error) -> bool {
    let code = error.code().map_or("", SqlState::code);
    exists(error)
        || error.code() == Some(&SqlState::UNDEFINED_TABLE)
        || ["40", "55"].contains(&code.get(..2).unwrap_or_default())
}
