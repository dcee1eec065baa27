//! Text becomes HTML here: nothing of the contract reaches the page but through `escape`.

/// Text, safe inside an element and inside a quoted attribute.
pub fn escape(text: &str) -> String {
    let mut html = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => html.push_str("&amp;"),
            '<' => html.push_str("&lt;"),
            '>' => html.push_str("&gt;"),
            '"' => html.push_str("&quot;"),
            '\'' => html.push_str("&#39;"),
            _ => html.push(character),
        }
    }
    html
}

/// Prose of the contract: what stands between two backticks is code.
pub fn prose(text: &str) -> String {
    let parts: Vec<String> = text.split('`').map(escape).collect();
    if parts.len().is_multiple_of(2) {
        return escape(text); // a backtick without its other half
    }
    let spell = |(at, part): (usize, &String)| match at % 2 {
        0 => part.clone(),
        _ => format!("<code>{part}</code>"),
    };
    parts.iter().enumerate().map(spell).collect()
}

/// Replaces each `{{name}}` of the template by its value. A name without a value is an error, and so is a value whose name
/// the template does not contain. Placeholders inside values are not replaced.
pub fn fill(template: &str, values: &[(&str, String)]) -> Result<String, String> {
    let mut html = String::new();
    let mut used = Vec::new();
    let mut rest = template;
    while let Some((before, after)) = rest.split_once("{{") {
        let (name, after) = after.split_once("}}").ok_or("{{ without }}")?;
        let found = values.iter().find(|(known, _)| *known == name);
        let (name, value) = found.ok_or(format!("the template asks for {name}"))?;
        html.push_str(before);
        html.push_str(value);
        used.push(*name);
        rest = after;
    }
    html.push_str(rest);
    match values.iter().find(|(name, _)| !used.contains(name)) {
        Some((name, _)) => Err(format!("the template has no place for {name}")),
        None => Ok(html),
    }
}
