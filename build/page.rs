//! Renders the contract as the docs page, which reads without a script. Whatever the contract says is on
//! the page, or the build fails.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::contract::{Contract, Example, Media, Operation, OrRef, Response, Schema};
use crate::html::{escape, fill};

type Result<T> = std::result::Result<T, String>;

/// The page.
pub fn render(contract: &Contract, template: &str) -> Result<String> {
    let (path, method, operation) = the_operation(contract)?;
    let body = json_of(&operation.request_body.content)?;
    let example = body.example.as_ref().ok_or("the body has no example")?;
    let member = |name: &str| match &example[name] {
        Value::String(text) => escape(text),
        other => escape(&other.to_string()),
    };
    let done = operation.responses.get("200").ok_or("there is no 200")?;
    let common = common_headers(contract, operation)?;
    let info = &contract.info;
    fill(
        template,
        &[
            ("openapi", escape(&contract.openapi)),
            ("title", escape(&info.title)),
            ("version", escape(&info.version)),
            ("license", escape(&info.license.name)),
            ("description", prose(&info.description)),
            ("description_text", escape(&info.description)),
            ("operation_id", escape(&operation.id)),
            ("method", escape(&method.to_uppercase())),
            ("path", escape(path)),
            ("summary", escape(&operation.summary)),
            ("operation", prose(&operation.description)),
            ("authentication", authentication(contract)?),
            ("required", required(operation.request_body.required)),
            ("body", schema(contract, &body.schema)?),
            ("body_example", escape(&spaced(example))),
            ("curl_body", escape(&example.to_string())),
            ("example_id", member("id")),
            ("example_name", member("name")),
            ("example_tag", member("tag")),
            ("done", prose(&done.description)),
            ("response", success(contract, done, &common)?),
            ("headers", list(common.values().cloned())),
            ("error_schema", error_schema(contract, operation)?),
            ("errors", errors(contract, operation, &common)?),
        ],
    )
}

/// The page is made for one operation on one server. A second one needs another page.
fn the_operation(contract: &Contract) -> Result<(&str, &str, &Operation)> {
    if !matches!(&contract.servers[..], [server] if server.url == "/") {
        return Err("the page sends to its own server, but there is another one".into());
    }
    let all: Vec<_> = contract
        .paths
        .iter()
        .flat_map(|(path, methods)| methods.iter().map(move |(method, it)| (path, method, it)))
        .collect();
    match all[..] {
        [(path, method, operation)] => Ok((path, method, operation)),
        _ => Err("the page shows one operation, and there is another number of them".into()),
    }
}

fn authentication(contract: &Contract) -> Result<String> {
    let names = contract.security.iter().flat_map(BTreeMap::keys);
    names
        .map(|name| {
            let scheme = contract.components.security_schemes.get(name);
            let scheme = scheme.ok_or(format!("there is no {name}"))?;
            Ok(format!(
                "<p>{} <span class=\"aside\">({}: {} {})</span></p>",
                prose(&scheme.description),
                escape(name),
                escape(&scheme.kind.to_uppercase()),
                escape(&scheme.scheme),
            ))
        })
        .collect()
}

fn json_of(content: &BTreeMap<String, Media>) -> Result<&Media> {
    match content.iter().next() {
        Some((kind, media)) if kind == "application/json" && content.len() == 1 => Ok(media),
        _ => Err("a body is something other than JSON".into()),
    }
}

/// JSON on one line, with room to breathe.
fn spaced(value: &Value) -> String {
    match value {
        Value::Object(members) => {
            let member = |(name, value): (&String, &Value)| {
                format!("{}: {}", Value::from(name.clone()), spaced(value))
            };
            let members: Vec<_> = members.iter().map(member).collect();
            format!("{{{}}}", members.join(", "))
        }
        other => other.to_string(),
    }
}

/// The members of an object, those that must be there first.
fn schema(contract: &Contract, schema: &OrRef<Schema>) -> Result<String> {
    let (name, schema) = schema.find(&contract.components.schemas)?;
    let mut members = BTreeMap::new();
    gather(contract, schema, &mut members)?;
    let (must, may): (Vec<_>, Vec<_>) = members.iter().partition(|(_, (must, _))| *must);
    let rows: Result<String> = must
        .into_iter()
        .chain(may)
        .map(|(name, (must, member))| {
            let about = member.description.as_deref();
            let about = about.ok_or("a member says nothing")?;
            Ok(row(name, &kind(member)?, *must, about))
        })
        .collect();
    Ok(format!(
        "<h4 class=\"schema\" id=\"{0}\">{0}</h4><dl class=\"members\">{1}</dl>",
        escape(name.ok_or("a schema has no name")?),
        rows?
    ))
}

fn row(name: &str, kind: &str, must: bool, about: &str) -> String {
    format!(
        "<div><dt><code>{}</code></dt><dd><span class=\"type\">{}</span> {}<p>{}</p></dd></div>",
        escape(name),
        escape(kind),
        required(must),
        prose(about),
    )
}

/// Whether a member must be there, and what it is.
type Members<'a> = BTreeMap<&'a str, (bool, &'a Schema)>;

fn gather<'a>(contract: &'a Contract, schema: &'a Schema, members: &mut Members<'a>) -> Result<()> {
    for part in &schema.all_of {
        gather(
            contract,
            part.find(&contract.components.schemas)?.1,
            members,
        )?;
    }
    for (name, member) in &schema.properties {
        members.insert(name, (schema.required.contains(name), member));
    }
    Ok(())
}

fn kind(schema: &Schema) -> Result<String> {
    let kind = schema.kind.as_deref().ok_or("a schema has no type")?;
    let format = schema.format.as_ref().map(|format| format!(" ({format})"));
    let minimum = schema.minimum.map(|least| format!(", at least {least}"));
    let [format, minimum] = [format, minimum].map(Option::unwrap_or_default);
    Ok(format!("{kind}{format}{minimum}"))
}

fn required(must: bool) -> String {
    let word = if must { "required" } else { "optional" };
    format!("<span class=\"{word}\">{word}</span>")
}

fn success(contract: &Contract, response: &Response, common: &Headers<'_>) -> Result<String> {
    let media = json_of(&response.content)?;
    let example = media
        .example
        .as_ref()
        .ok_or("the response has no example")?;
    Ok(format!(
        "{}<pre><code>{}</code></pre>{}",
        schema(contract, &media.schema)?,
        escape(&spaced(example)),
        own_headers(contract, response, common)?,
    ))
}

/// Headers as they are shown, each under its name.
type Headers<'a> = BTreeMap<&'a str, String>;

fn headers<'a>(contract: &Contract, response: &'a Response) -> Result<Headers<'a>> {
    let shown = response.headers.iter().map(|(name, header)| {
        let (_, header) = header.find(&contract.components.headers)?;
        let kind = format!("header, {}", kind(&header.schema)?);
        let html = row(name, &kind, header.required, &header.description);
        Ok((&**name, html))
    });
    shown.collect()
}

/// The headers that all responses have are shown once.
fn common_headers<'a>(contract: &Contract, operation: &'a Operation) -> Result<Headers<'a>> {
    let mut common: Option<Headers<'_>> = None;
    for response in operation.responses.values() {
        let here = headers(contract, response)?;
        match &mut common {
            None => common = Some(here),
            Some(common) => common.retain(|name, html| here.get(name) == Some(html)),
        }
    }
    common.ok_or("there are no responses".into())
}

fn own_headers(contract: &Contract, response: &Response, common: &Headers<'_>) -> Result<String> {
    let mut own = headers(contract, response)?;
    own.retain(|name, _| !common.contains_key(name));
    Ok(list(own.into_values()))
}

fn list(headers: impl Iterator<Item = String>) -> String {
    let headers: String = headers.collect();
    if headers.is_empty() {
        return headers;
    }
    format!("<dl class=\"members headers\">{headers}</dl>")
}

fn error_responses(operation: &Operation) -> impl Iterator<Item = (&String, &Response)> {
    operation
        .responses
        .iter()
        .filter(|(status, _)| *status != "200")
}

/// One schema for all errors, so it is shown once.
fn error_schema(contract: &Contract, operation: &Operation) -> Result<String> {
    let mut shown = None;
    for (status, response) in error_responses(operation) {
        let html = schema(contract, &json_of(&response.content)?.schema)?;
        if *shown.get_or_insert(html.clone()) != html {
            return Err(format!("{status} has another schema than other errors"));
        }
    }
    shown.ok_or("there are no errors".into())
}

fn errors(contract: &Contract, operation: &Operation, common: &Headers<'_>) -> Result<String> {
    let status = |(status, response): (&String, &Response)| {
        let examples = &json_of(&response.content)?.examples;
        let numbers: Result<String> = examples.iter().map(number).collect();
        Ok(format!(
            "<section class=\"status\"><h4><span class=\"code\">{}</span> <span>{}</span></h4><dl class=\"numbers\">{}</dl>{}</section>",
            escape(status),
            prose(&response.description),
            numbers?,
            own_headers(contract, response, common)?,
        ))
    };
    error_responses(operation).map(status).collect()
}

/// Where a status has one number, what is said of the status is said of the number.
fn number((number, example): (&String, &Example)) -> Result<String> {
    let meaning = example.summary.as_deref().map(prose);
    let message = example.value["message"].as_str();
    Ok(format!(
        "<div id=\"error-{0}\"><dt>{0}</dt><dd>{1}<p class=\"message\">{2}</p></dd></div>",
        escape(number),
        meaning.map_or(String::new(), |meaning| format!("<p>{meaning}</p>")),
        escape(message.ok_or("an example has no message")?),
    ))
}

/// Prose of the contract: what stands between two backticks is code.
fn prose(text: &str) -> String {
    let part = |(index, part): (usize, &str)| match index % 2 {
        0 => escape(part),
        _ => format!("<code>{}</code>", escape(part)),
    };
    text.split('`').enumerate().map(part).collect()
}
