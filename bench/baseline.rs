//! The baseline of the benchmark: the same HTTP stack, with authentication and decoding, that responds without storing
//! anything: an upper bound for any store.

use std::sync::Arc;
use std::time::Duration;

use hyper::Request;
use hyper::body::Incoming;
use plantstore::{
    AppState, ConnectionState, ErrorKind, Handled, KnownTokens, Metrics, Mode, Peer,
    RequestContext, RuntimeTokens, Runtimes, Shutdown, Store, Writer, plant_response, read_plant,
    serve_connection, start_logging,
};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

/// `baseline ADDRESS STORE LOG_LEVEL`, with an existing store that has its first token.
#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, address, store, log_level] = &arguments[..] else {
        anyhow::bail!("usage: baseline ADDRESS STORE LOG_LEVEL");
    };
    let _log = start_logging(log_level.parse()?);
    let location = store.parse().map_err(anyhow::Error::msg)?;
    let timeout = Duration::from_secs(60);
    let metrics = Arc::new(Metrics::new(ErrorKind::ALL.iter().map(|kind| kind.code())));
    let stores = vec![Store::open(&location, Mode::Read)?];
    let (writer, _thread) = Writer::spawn(stores, 4096, timeout, Arc::clone(&metrics));
    let reader = Store::open(&location, Mode::Read)?;
    let tokens = KnownTokens::start(reader, writer.clone(), Arc::clone(&metrics), timeout, None);
    let runtimes = Runtimes::start(|| AppState {
        writer: writer.for_this_runtime(),
        tokens: RuntimeTokens::new(&tokens, None),
        metrics: metrics.for_runtime(),
        limits: Arc::default(),
        shutdown: Shutdown::default(),
    })?;
    let listener = TcpListener::bind(address).await?;
    let mut tasks = JoinSet::new();
    loop {
        let (stream, address) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let stream = stream.into_std()?;
        let connection = ConnectionState::new(Peer::new(address.ip(), &[]), Arc::default());
        runtimes.spawn(&mut tasks, |state| async move {
            if let Ok(stream) = TcpStream::from_std(stream) {
                serve_connection(stream, state, connection, without_store).await;
            }
        });
    }
}

async fn without_store(
    state: Arc<AppState>,
    request: Request<Incoming>,
    mut context: RequestContext,
) -> Handled {
    let read = read_plant(&state, request, &mut context).await;
    let result = read.map(|(_, plant, _)| plant_response(&plant.plant));
    Handled { result, context }
}
