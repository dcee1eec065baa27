//! The error catalogue is the same in the code, in `openapi.yaml` and in `docs/errors.md`.

use std::collections::BTreeMap;

use plantstore::{ErrorKind, OPENAPI_JSON};
use serde_json::Value;

/// Number → (status, condition), from the code.
fn in_code() -> BTreeMap<u64, (String, String)> {
    let entry = |kind: &ErrorKind| {
        let status = kind.status().as_u16().to_string();
        (u64::from(kind.code()), (status, kind.when().to_owned()))
    };
    ErrorKind::ALL.iter().map(entry).collect()
}

#[test]
fn the_page_lists_every_error_with_its_status_and_condition() {
    let page = include_str!("../../docs/errors.md");
    let mut on_page = BTreeMap::new();
    for line in page.lines() {
        let cells: Vec<_> = line.trim_matches('|').split('|').map(str::trim).collect();
        if let [number, status, when, ..] = cells[..]
            && let Ok(number) = number.parse::<u64>()
        {
            let before = on_page.insert(number, (status.to_owned(), when.to_owned()));
            assert!(before.is_none(), "{number} is listed twice");
        }
    }
    assert_eq!(on_page, in_code());
}

#[test]
fn the_description_has_every_error_under_its_status_and_no_other() {
    let contract: Value = serde_json::from_str(OPENAPI_JSON).expect("JSON");
    let responses = contract["paths"]["/plants"]["post"]["responses"]
        .as_object()
        .expect("responses");
    let mut described = BTreeMap::new();
    for (status, response) in responses.iter().filter(|(status, _)| *status != "200") {
        let media = &response["content"]["application/json"];
        assert_eq!(
            media["schema"]["$ref"], "#/components/schemas/Error",
            "{status}"
        );
        let request_id = &response["headers"]["x-request-id"]["$ref"];
        assert_eq!(request_id, "#/components/headers/RequestId", "{status}");
        for (name, example) in media["examples"].as_object().expect("examples") {
            let number = example["value"]["error"].as_u64().expect("a number");
            assert_eq!(*name, number.to_string());
            let summary = example["summary"]
                .as_str()
                .unwrap_or_default()
                .to_lowercase();
            described.insert(number, (status.clone(), summary));
        }
    }
    let in_code = in_code();
    let statuses = |all: &BTreeMap<u64, (String, String)>| -> Vec<(u64, String)> {
        all.iter()
            .map(|(number, (status, _))| (*number, status.clone()))
            .collect()
    };
    assert_eq!(statuses(&described), statuses(&in_code));
    for (number, (_, summary)) in described
        .into_iter()
        .filter(|(_, (_, summary))| !summary.is_empty())
    {
        assert_eq!(summary, in_code[&number].1.to_lowercase());
    }
}
