//! A fixed run of one of the two paths of an add, for counting its instructions: `instructions PATH ADDS`, where PATH is
//! `decode-and-reply` (routing, token, body, plant, response, access log) or `write` (batches of 64 into a store).
//! `bench/instructions` runs it twice with different ADDS and takes the difference.

use std::sync::Arc;
use std::time::Duration;

use anyhow::bail;
use axum::Router;
use axum::body::Body;
use axum::http::Request;
use axum::routing::post;
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use plantstore::{
    Addition, ApiError, AppState, Caller, ErrorKind, JsonBody, Location, Metrics, Mode, NewPlant,
    PlantResponse, Shutdown, Store, Token, TokenCache, TokenId, TokenRecord, Writer, respond,
    start_logging, with_fallbacks,
};
use tracing_subscriber::filter::LevelFilter;

const BATCH: u64 = 64;

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, path, adds] = &arguments[..] else {
        bail!("usage: instructions decode-and-reply|write ADDS");
    };
    let adds: u64 = adds.parse()?;
    let directory = tempfile::tempdir()?;
    let location = Location::Sqlite(directory.path().join("plantstore.db"));
    match path.as_str() {
        "decode-and-reply" => decode_and_reply(&location, adds),
        "write" => write(&location, adds),
        _ => bail!("there is no path {path}"),
    }
}

fn body(id: u64) -> String {
    format!(r#"{{"id":{id},"name":"Monstera deliciosa {id}","tag":"indoor"}}"#)
}

fn decode_and_reply(location: &Location, adds: u64) -> anyhow::Result<()> {
    let _log = start_logging(LevelFilter::INFO);
    let mut store = Store::open(location, Mode::Create)?;
    let token = Token::generate()?;
    store.create_token(&TokenRecord::new("first", token.digest()))?;
    let timeout = Duration::from_secs(60);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let _here = runtime.enter();
    let metrics = Arc::new(Metrics::new(ErrorKind::ALL.iter().map(|kind| kind.code())));
    let (writer, _thread) = Writer::spawn(vec![store], 1024, timeout, Arc::clone(&metrics));
    let state = Arc::new(AppState {
        tokens: TokenCache::new(
            Store::open(location, Mode::Read)?,
            writer.clone(),
            Arc::clone(&metrics),
            timeout,
        ),
        writer,
        metrics: metrics.for_runtime(),
        header_timeout: timeout,
        body_bytes_max: 1 << 20,
        body_timeout: timeout,
        idle_timeout: timeout,
        shutdown: Shutdown::default(),
    });
    let router = with_fallbacks(
        Router::new().route("/plants", post(create_without_store)),
        Arc::clone(&state),
    );
    let service = TowerToHyperService::new(router);
    runtime.block_on(async {
        for id in 0..adds {
            let request = Request::post("/plants")
                .header("authorization", format!("Bearer {}", token.reveal()))
                .header("content-type", "application/json")
                .body(Body::from(body(id)))?;
            let call = |request| service.call(request);
            let response = respond(&state, request, call).await;
            if response.status() != 200 {
                bail!("{}", response.status());
            }
        }
        Ok(())
    })
}

async fn create_without_store(
    _caller: Caller,
    JsonBody(body): JsonBody,
) -> Result<PlantResponse, ApiError> {
    Ok(PlantResponse(NewPlant::from_json(&body)?.plant))
}

fn write(location: &Location, adds: u64) -> anyhow::Result<()> {
    let mut stores = Store::open_writers(location, 1, Duration::from_secs(60))?;
    let store = &mut stores[0];
    let mut id = 0;
    while id < adds {
        let batch = (id..id + BATCH).map(|id| {
            let plant = NewPlant::from_json(body(id).as_bytes()).expect("a plant");
            let token = TokenId(1);
            Addition { plant, token }
        });
        store.add(&batch.collect::<Vec<_>>(), &[])?;
        id += BATCH;
    }
    Ok(())
}
