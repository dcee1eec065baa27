//! A fixed run of one of the two paths of an add, for counting its instructions: `instructions PATH ADDS`, where PATH is
//! `decode-and-reply` (routing, token, body, plant, response, access log) or `write` (batches of 64 into a store).
//! `bench/instructions` runs it twice with different ADDS and takes the difference.

use std::sync::Arc;
use std::time::Duration;

use anyhow::bail;
use http_body_util::Full;
use hyper::Request;
use hyper::body::Bytes;
use plantstore::{
    Addition, AppState, ConnectionState, ErrorKind, Handled, KnownTokens, Location, Metrics, Mode,
    NewPlant, Peer, RequestContext, RuntimeTokens, Shutdown, Store, Token, TokenId, TokenRecord,
    Writer, plant_response, read_plant, respond, start_logging,
};
use tokio::time::Instant;
use tracing::level_filters::LevelFilter;

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
    store.create_token(&TokenRecord::new("first", token.digest()), "bench")?;
    let timeout = Duration::from_secs(60);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let _here = runtime.enter();
    let metrics = Arc::new(Metrics::new(ErrorKind::ALL.iter().map(|kind| kind.code())));
    let (writer, _thread) = Writer::spawn(vec![store], 1024, timeout, Arc::clone(&metrics));
    let reader = Store::open(location, Mode::Read)?;
    let tokens = KnownTokens::start(reader, writer.clone(), Arc::clone(&metrics), timeout, None);
    let state = Arc::new(AppState {
        tokens: RuntimeTokens::new(&tokens, None),
        writer,
        metrics: metrics.for_runtime(),
        limits: Arc::default(),
        shutdown: Shutdown::default(),
    });
    let peer = Peer::new([127, 0, 0, 1].into(), &[]);
    let connection = ConnectionState::new(peer, Arc::default());
    runtime.block_on(async {
        for id in 0..adds {
            let request = Request::post("/plants")
                .header("authorization", format!("Bearer {}", token.reveal()))
                .header("content-type", "application/json")
                .body(Full::<Bytes>::from(body(id)))?;
            let response =
                respond(&state, &connection, request, Instant::now(), without_store).await;
            if response.status() != 200 {
                bail!("{}", response.status());
            }
        }
        Ok(())
    })
}

async fn without_store(
    state: Arc<AppState>,
    request: Request<Full<Bytes>>,
    mut context: RequestContext,
) -> Handled {
    let read = read_plant(&state, request, &mut context).await;
    let result = read.map(|(_, plant, _)| plant_response(&plant.plant));
    Handled { result, context }
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
