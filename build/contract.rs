//! As much of OpenAPI as `openapi.yaml` uses. A member that is not listed here fails the build, so that
//! the docs page never leaves out what the contract says.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::Value;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Contract {
    pub openapi: String,
    pub info: Info,
    pub servers: Vec<Server>,
    pub security: Vec<BTreeMap<String, Vec<String>>>,
    /// For generators of clients, as those of an operation.
    #[serde(rename = "tags")]
    _tags: IgnoredAny,
    pub paths: BTreeMap<String, BTreeMap<String, Operation>>,
    pub components: Components,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Info {
    pub title: String,
    pub description: String,
    pub version: String,
    pub license: License,
    /// For linters.
    #[serde(rename = "contact")]
    _contact: IgnoredAny,
}

#[derive(Deserialize)]
pub struct License {
    pub name: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Server {
    pub url: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Operation {
    #[serde(rename = "operationId")]
    pub id: String,
    #[serde(rename = "tags")]
    _tags: IgnoredAny,
    pub summary: String,
    pub description: String,
    pub request_body: RequestBody,
    pub responses: BTreeMap<String, Response>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RequestBody {
    pub required: bool,
    pub content: BTreeMap<String, Media>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Response {
    pub description: String,
    pub headers: BTreeMap<String, OrRef<Header>>,
    pub content: BTreeMap<String, Media>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Media {
    pub schema: OrRef<Schema>,
    pub example: Option<Value>,
    #[serde(default)]
    pub examples: BTreeMap<String, Example>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Example {
    pub summary: Option<String>,
    pub value: Value,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    pub description: String,
    #[serde(default)]
    pub required: bool,
    pub schema: Schema,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Components {
    pub security_schemes: BTreeMap<String, SecurityScheme>,
    pub headers: BTreeMap<String, Header>,
    pub schemas: BTreeMap<String, Schema>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SecurityScheme {
    #[serde(rename = "type")]
    pub kind: String,
    pub scheme: String,
    pub description: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Schema {
    #[serde(rename = "type")]
    pub kind: Option<String>,
    pub format: Option<String>,
    pub description: Option<String>,
    pub minimum: Option<i64>,
    #[serde(default)]
    pub required: Vec<String>,
    #[serde(default)]
    pub properties: BTreeMap<String, Schema>,
    #[serde(default)]
    pub all_of: Vec<OrRef<Schema>>,
}

/// A thing, or where among the components it stands.
#[derive(Deserialize)]
#[serde(untagged)]
pub enum OrRef<T> {
    Ref(Reference),
    Here(T),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reference {
    #[serde(rename = "$ref")]
    pub target: String,
}

impl<T: DeserializeOwned> OrRef<T> {
    /// The thing itself, and the name it has among the components.
    pub fn find<'a>(
        &'a self,
        components: &'a BTreeMap<String, T>,
    ) -> Result<(Option<&'a str>, &'a T), String> {
        match self {
            Self::Here(thing) => Ok((None, thing)),
            Self::Ref(Reference { target }) => {
                let name = target.rsplit('/').next().unwrap_or_default();
                let thing = components.get(name);
                Ok((Some(name), thing.ok_or(format!("there is no {target}"))?))
            }
        }
    }
}
