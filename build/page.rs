//! Renders the contract as the docs page, which reads without a script. Whatever the contract says is on
//! the page, or the build fails.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::contract::{Contract, Media, Operation, OrRef, Response, Schema};
use crate::html::{escape, fill, prose};

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
            ("operation_id", escape(&operation.operation_id)),
            ("method", escape(&method.to_uppercase())),
            ("path", escape(path)),
            ("summary", escape(&operation.summary)),
            ("operation", prose(&operation.description)),
            ("credentials", credentials(contract)?),
            ("required", required(operation.request_body.required)),
            ("body", schema(contract, &body.schema)?),
            ("body_example", escape(&spaced(example))),
            ("curl_body", escape(&example.to_string())),
            ("example_id", member("id")),
            ("example_name", member("name")),
            ("example_tag", member("tag")),
            ("done", prose(&done.description)),
            ("answer", answer(contract, done)?),
            ("headers", list(common_headers(contract, operation)?.into_values())),
            ("error_schema", error_schema(contract, operation)?),
            ("errors", errors(contract, operation)?),
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

fn credentials(contract: &Contract) -> Result<String> {
    let names = contract.security.iter().flat_map(BTreeMap::keys);
    let mut html = String::new();
    for name in names {
        let scheme = contract.components.security_schemes.get(name);
        let scheme = scheme.ok_or(format!("there is no {name}"))?;
        html += &format!(
            "<p>{} <span class=\"aside\">({}: {} {})</span></p>",
            prose(&scheme.description),
            escape(name),
            escape(&scheme.kind.to_uppercase()),
            escape(&scheme.scheme),
        );
    }
    Ok(html)
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
    let mut html = String::from("<dl class=\"members\">");
    for (name, (must, member)) in must.into_iter().chain(may) {
        html += &format!(
            "<div><dt><code>{}</code></dt><dd><span class=\"type\">{}</span> {}<p>{}</p></dd></div>",
            escape(name),
            escape(&kind(member)?),
            required(*must),
            prose(member.description.as_deref().ok_or("a member says nothing")?),
        );
    }
    html += "</dl>";
    let name = name.ok_or("a schema has no name")?;
    Ok(format!(
        "<h4 class=\"schema\" id=\"{0}\">{0}</h4>{html}",
        escape(name)
    ))
}

/// Whether a member must be there, and what it is.
type Members<'a> = BTreeMap<&'a str, (bool, &'a Schema)>;

fn gather<'a>(
    contract: &'a Contract,
    schema: &'a Schema,
    members: &mut Members<'a>,
) -> Result<()> {
    for part in &schema.all_of {
        gather(contract, part.find(&contract.components.schemas)?.1, members)?;
    }
    for (name, member) in &schema.properties {
        members.insert(name, (schema.required.contains(name), member));
    }
    Ok(())
}

fn kind(schema: &Schema) -> Result<String> {
    let mut kind = schema.kind.clone().ok_or("a schema has no type")?;
    if let Some(format) = &schema.format {
        kind += &format!(" ({format})");
    }
    if let Some(minimum) = schema.minimum {
        kind += &format!(", at least {minimum}");
    }
    Ok(kind)
}

fn required(must: bool) -> String {
    let (class, word) = if must {
        ("required", "required")
    } else {
        ("optional", "optional")
    };
    format!("<span class=\"{class}\">{word}</span>")
}

fn answer(contract: &Contract, response: &Response) -> Result<String> {
    let media = json_of(&response.content)?;
    let example = media.example.as_ref().ok_or("the answer has no example")?;
    Ok(format!(
        "{}<pre><code>{}</code></pre>",
        schema(contract, &media.schema)?,
        escape(&spaced(example)),
    ))
}

/// A header as it is shown, under its name.
fn headers<'a>(contract: &Contract, response: &'a Response) -> Result<BTreeMap<&'a str, String>> {
    let mut shown = BTreeMap::new();
    for (name, header) in &response.headers {
        let (_, header) = header.find(&contract.components.headers)?;
        let html = format!(
            "<div><dt><code>{}</code></dt><dd><span class=\"type\">{}</span> {}<p>{}</p></dd></div>",
            escape(name),
            escape(&kind(&header.schema)?),
            required(header.required),
            prose(&header.description),
        );
        shown.insert(&**name, html);
    }
    Ok(shown)
}

/// What every answer has is said once.
fn common_headers<'a>(contract: &Contract, operation: &'a Operation) -> Result<BTreeMap<&'a str, String>> {
    let mut common: Option<BTreeMap<_, _>> = None;
    for response in operation.responses.values() {
        let here = headers(contract, response)?;
        match &mut common {
            None => common = Some(here),
            Some(common) => common.retain(|name, html| here.get(name) == Some(html)),
        }
    }
    common.ok_or("there are no answers".into())
}

fn list(headers: impl Iterator<Item = String>) -> String {
    let headers: String = headers.collect();
    if headers.is_empty() {
        return headers;
    }
    format!("<dl class=\"members headers\">{headers}</dl>")
}

fn refusals(operation: &Operation) -> impl Iterator<Item = (&String, &Response)> {
    operation
        .responses
        .iter()
        .filter(|(status, _)| *status != "200")
}

/// One schema for all errors, so it is shown once.
fn error_schema(contract: &Contract, operation: &Operation) -> Result<String> {
    let mut shown = None;
    for (status, response) in refusals(operation) {
        let html = schema(contract, &json_of(&response.content)?.schema)?;
        if *shown.get_or_insert(html.clone()) != html {
            return Err(format!("{status} has another schema than other errors"));
        }
    }
    shown.ok_or("there are no errors".into())
}

fn errors(contract: &Contract, operation: &Operation) -> Result<String> {
    let common = common_headers(contract, operation)?;
    let mut html = String::new();
    for (status, response) in refusals(operation) {
        html += &format!(
            "<section class=\"status\"><h4><span class=\"code\">{}</span> {}</h4><dl class=\"numbers\">",
            escape(status),
            prose(&response.description)
        );
        for (number, example) in &json_of(&response.content)?.examples {
            let message = example.value["message"].as_str();
            // Where a status has one number, what is said of the status is said of the number.
            let meaning = example.summary.as_deref().map(prose).map(|meaning| format!("<p>{meaning}</p>"));
            html += &format!(
                "<div id=\"error-{0}\"><dt>{0}</dt><dd>{1}<p class=\"message\">{2}</p></dd></div>",
                escape(number),
                meaning.unwrap_or_default(),
                prose(message.ok_or("an example has no message")?),
            );
        }
        let own = headers(contract, response)?;
        let own = own.into_iter().filter(|(name, _)| !common.contains_key(name));
        html += &format!("</dl>{}</section>", list(own.map(|(_, html)| html)));
    }
    Ok(html)
}
