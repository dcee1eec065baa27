//! The description of the interface, compiled in: `openapi.yaml` is the contract, the JSON is made
//! from it by `build.rs`.

use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;

/// The contract.
pub const OPENAPI_YAML: &str = include_str!("../../openapi.yaml");

/// The contract as JSON.
const OPENAPI_JSON: &str = include_str!(concat!(env!("OUT_DIR"), "/openapi.json"));

/// `GET /openapi.yaml`.
pub async fn openapi_yaml() -> impl IntoResponse {
    ([(CONTENT_TYPE, "application/yaml")], OPENAPI_YAML)
}

/// `GET /openapi.json`.
pub async fn openapi_json() -> impl IntoResponse {
    ([(CONTENT_TYPE, "application/json")], OPENAPI_JSON)
}
