//! Further cases for the example in Rust.

use super::*;

async fn rejection(client: &Client, id: i64, name: &str) -> String {
    let rejected = add(client, &plant(id, name)).await;
    rejected.expect_err("it was accepted")
}

fn plant(id: i64, name: &str) -> types::NewPlant {
    types::NewPlant {
        id,
        name: name.to_owned(),
        tag: None,
    }
}

fn client(token: &str) -> Client {
    let mut headers = reqwest::header::HeaderMap::new();
    headers.insert(
        "authorization",
        format!("Bearer {token}").parse().expect("a header"),
    );
    let http = reqwest::Client::builder().default_headers(headers);
    let url = std::env::var("PLANTSTORE_URL").expect("a URL");
    Client::new_with_client(&url, http.build().expect("a client"))
}

#[tokio::test]
async fn further_cases() {
    let known = client(&std::env::var("PLANTSTORE_TOKEN").expect("a token"));
    for _ in 0..2 {
        let added = add(&known, &plant(1, "Fern")).await.expect("accepted");
        assert_eq!((added.name.as_str(), added.tag), ("Fern", None));
    }
    let (another, large) = ("Another", "x".repeat(2 << 20));
    let stranger = client("plant_unknown");
    for (client, name, code) in [
        (&known, another, "error: 40009"),
        (&known, &large, "error: 40013"),
        (&stranger, "Fern", "error: 40101"),
    ] {
        let problem = rejection(client, 1, name).await;
        assert!(problem.contains(code), "{problem}");
    }
}
