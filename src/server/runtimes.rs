//! The runtimes that serve connections: one single-threaded runtime per core. A connection stays on one of them, and so in
//! the caches of one core; one runtime for all cores takes a seventh more CPU time per add.

use std::sync::Arc;
use std::thread;

use anyhow::Context;
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use tokio::task::{AbortHandle, JoinSet};

use crate::http::AppState;

/// The threads end when this is dropped.
pub struct Runtimes(Vec<Runtime>);

struct Runtime {
    handle: Handle,
    state: Arc<AppState>,
    /// One clone per connection.
    connections: Arc<()>,
    _end: oneshot::Sender<()>,
}

impl Runtimes {
    /// Starts one per core, each with a state of its own; `make_state` is called within each runtime.
    pub fn start(make_state: impl Fn() -> AppState) -> anyhow::Result<Self> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let runtimes = (0..cores).map(|_| Runtime::start(&make_state));
        runtimes.collect::<Result<_, _>>().map(Self)
    }

    /// Serves a connection on the runtime that has the fewest. `serve` gets the state of that runtime.
    pub fn spawn<F>(
        &self,
        tasks: &mut JoinSet<()>,
        serve: impl FnOnce(Arc<AppState>) -> F,
    ) -> AbortHandle
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let runtimes = self.0.iter();
        let least_loaded = runtimes.min_by_key(|runtime| Arc::strong_count(&runtime.connections));
        let runtime = least_loaded.expect("there is a core");
        let counted = Arc::clone(&runtime.connections);
        let served = serve(Arc::clone(&runtime.state));
        let task = async move {
            served.await;
            drop(counted);
        };
        tasks.spawn_on(task, &runtime.handle)
    }
}

impl Runtime {
    fn start(make_state: impl Fn() -> AppState) -> anyhow::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.context("cannot start a runtime")?;
        let handle = runtime.handle().clone();
        let state = {
            let _guard = handle.enter();
            Arc::new(make_state())
        };
        let (end, ended) = oneshot::channel();
        thread::Builder::new()
            .name("runtime".to_owned())
            .spawn(move || {
                let _ = runtime.block_on(ended);
                // Do not wait for a query that is blocked by a stuck disk.
                runtime.shutdown_background();
            })
            .context("cannot start a thread")?;
        Ok(Self {
            handle,
            state,
            connections: Arc::new(()),
            _end: end,
        })
    }
}
