//! `axum-peer ADDRESS TOKEN [DATABASE]`: adds plants to an SQLite database, or, without one, only returns them.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header::AUTHORIZATION};
use axum::routing::post;
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqliteSynchronous};

#[derive(Deserialize, Serialize)]
struct Plant {
    id: i64,
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    tag: Option<String>,
}

#[derive(Clone)]
struct Server {
    authorization: Arc<str>,
    pool: Option<SqlitePool>,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let (address, token, database) = match &arguments[..] {
        [_, address, token] => (address, token, None),
        [_, address, token, database] => (address, token, Some(database)),
        _ => return Err("usage: axum-peer ADDRESS TOKEN [DATABASE]".into()),
    };
    let pool = match database {
        Some(database) => Some(open(database).await?),
        None => None,
    };
    let authorization = format!("Bearer {token}").into();
    let server = Server { authorization, pool };
    let router = Router::new().route("/plants", post(add)).with_state(server);
    let listener = tokio::net::TcpListener::bind(address).await?;
    Ok(axum::serve(listener, router).await?)
}

async fn open(database: &str) -> sqlx::Result<SqlitePool> {
    let options = SqliteConnectOptions::new()
        .filename(database)
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Full);
    let pool = SqlitePool::connect_with(options).await?;
    sqlx::query("CREATE TABLE IF NOT EXISTS plants (id INTEGER PRIMARY KEY, name TEXT NOT NULL, tag TEXT) STRICT")
        .execute(&pool)
        .await?;
    Ok(pool)
}

async fn add(
    State(server): State<Server>,
    headers: HeaderMap,
    Json(plant): Json<Plant>,
) -> Result<Json<Plant>, StatusCode> {
    if headers.get(AUTHORIZATION).map(|value| value.as_bytes()) != Some(server.authorization.as_bytes()) {
        return Err(StatusCode::UNAUTHORIZED);
    }
    if let Some(pool) = &server.pool {
        sqlx::query("INSERT INTO plants (id, name, tag) VALUES (?, ?, ?)")
            .bind(plant.id)
            .bind(&plant.name)
            .bind(&plant.tag)
            .execute(pool)
            .await
            .map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
    }
    Ok(Json(plant))
}
