//! A panic in a request handler is a 50000 response and does not affect the next request.

use std::sync::Arc;
use std::time::Duration;

use hyper::Request;
use hyper::body::Incoming;
use plantstore::{
    AppState, ConnectionState, ErrorKind, Handled, KnownTokens, Metrics, Mode, Peer,
    RequestContext, RuntimeTokens, Shutdown, Store, Writer, serve_connection,
};
use tokio::net::TcpListener;

use crate::harness::{Client, directory};

async fn panics(_: Arc<AppState>, request: Request<Incoming>, context: RequestContext) -> Handled {
    assert_ne!(request.uri().path(), "/panic", "deliberate");
    Handled {
        result: Err(ErrorKind::NotFound.into()),
        context,
    }
}

#[test]
fn a_panic_is_50000_and_the_next_request_is_served() {
    // No request makes the service panic, so this test has a handler that does.
    let directory = directory();
    let location = format!(
        "sqlite:{}",
        directory.path().join("plantstore.db").display()
    );
    let location = location.parse().expect("a location");
    let open = || Store::open(&location, Mode::Create).expect("a store");
    let timeout = Duration::from_secs(60);
    let runtime = tokio::runtime::Runtime::new().expect("threads");
    let _here = runtime.enter();
    let metrics = Arc::new(Metrics::new([50000, 40400].into_iter()));
    let (writer, _thread) = Writer::spawn(vec![open()], 1, timeout, Arc::clone(&metrics));
    let tokens = KnownTokens::start(open(), writer.clone(), Arc::clone(&metrics), timeout, None);
    let state = Arc::new(AppState {
        tokens: RuntimeTokens::new(&tokens, None),
        writer,
        metrics: metrics.for_runtime(),
        limits: Arc::default(),
        shutdown: Shutdown::default(),
    });
    let listener = runtime
        .block_on(TcpListener::bind("127.0.0.1:0"))
        .expect("a port");
    let address = listener.local_addr().expect("an address");
    runtime.spawn(async move {
        let (stream, _) = listener.accept().await.expect("a connection");
        let peer = Peer::new(address.ip(), &[]);
        let connection = ConnectionState::new(peer, Arc::default());
        serve_connection(stream, state, connection, panics).await;
    });

    let mut client = Client::connect(address);
    let response = client.request("GET /panic", "");
    assert_eq!(response.error(), 50000);
    assert!(!response.body.contains("deliberate"));
    assert_eq!(client.request("GET /", "").error(), 40400);
    let counted = metrics.responses();
    assert!(counted.contains(&(500, Some(50000), 1)), "{counted:?}");
}
