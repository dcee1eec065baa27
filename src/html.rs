//! HTML from text and templates, for the docs page (`build.rs`) and the status page.

/// Text, safe inside an element and inside a quoted attribute.
pub(crate) fn escape(text: &str) -> String {
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

/// Replaces each `{{name}}` of the template by its value. A name without a value is an error, and so is a value whose name
/// the template does not contain. Placeholders inside values are not replaced.
pub(crate) fn fill(template: &str, values: &[(&str, String)]) -> Result<String, String> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markup_in_a_value_is_text() {
        assert_eq!(escape("<b a='\"'>&"), "&lt;b a=&#39;&quot;&#39;&gt;&amp;");
    }

    #[test]
    fn a_template_and_its_values_have_the_same_names() {
        let x = ("x", "{{y}}".to_owned());
        let y = ("y", "2".to_owned());
        let both = [x.clone(), y];
        assert_eq!(fill("a{{x}}b{{y}}", &both), Ok("a{{y}}b2".to_owned()));
        assert!(fill("a{{x}}", &both).is_err());
        assert!(fill("a{{x}}b{{y}}", &[x]).is_err());
        assert!(fill("a{{x", &both).is_err());
    }
}
