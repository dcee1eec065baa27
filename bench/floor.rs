//! The floor: the same HTTP stack, authenticating and decoding, that answers without storing
//! anything. What it can do is what a store that costs nothing could do.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::routing::post;
use plantstore::http::error::{ApiError, Kind};
use plantstore::http::stream::Deadlines;
use plantstore::http::{
    BodyLimits, Caller, Created, Draining, JsonBody, Parts, Tokens, complete, connection,
};
use plantstore::metrics::Metrics;
use plantstore::plant::NewPlant;
use plantstore::server::Workers;
use plantstore::store::{Mode, Store};
use plantstore::telemetry;
use plantstore::writer::Writer;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// `floor ADDRESS STORE LOG_LEVEL`, with a store that has been made and served before.
#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, address, store, log_level] = &arguments[..] else {
        anyhow::bail!("usage: floor ADDRESS STORE LOG_LEVEL");
    };
    let _log = telemetry::start(log_level.parse()?);
    let location = store.parse().map_err(anyhow::Error::msg)?;
    let timeout = Duration::from_secs(60);
    let metrics = Arc::new(Metrics::new(Kind::ALL.iter().map(|kind| kind.number())));
    let stores = vec![Store::open(&location, Mode::Read)?];
    let (writer, _thread) = Writer::spawn(stores, 4096, timeout, Arc::clone(&metrics));
    let reader = Store::open(&location, Mode::Read)?;
    let tokens = Tokens::new(reader, writer.clone(), Arc::clone(&metrics), timeout);
    let workers = Workers::start(|| {
        let answers = metrics.answers_of_a_worker();
        let parts = Parts {
            writer: writer.for_this_runtime(),
            tokens: tokens.clone(),
            answers: Arc::clone(&answers),
            body_limits: BodyLimits {
                bytes_max: 1 << 20,
                timeout,
            },
            draining: Draining::default(),
        };
        let router = complete(Router::new().route("/plants", post(answer)), parts);
        (router, answers)
    })?;
    let deadlines = Deadlines {
        header: timeout,
        idle: timeout,
    };
    let listener = TcpListener::bind(address).await?;
    let stop = watch::Sender::new(());
    let mut tasks = JoinSet::new();
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let stop = stop.subscribe();
        workers.spawn(&mut tasks, stream.into_std()?, async move |stream, own| {
            connection::serve(stream, own, deadlines, Draining::default(), stop).await;
        });
    }
}

async fn answer(_caller: Caller, JsonBody(body): JsonBody) -> Result<Created, ApiError> {
    Ok(Created(NewPlant::from_json(&body)?.plant))
}
