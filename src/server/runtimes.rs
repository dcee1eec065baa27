//! The runtimes that serve connections: one single-threaded runtime per core. A connection stays on one of them, and so in
//! the caches of one core; one runtime for all cores takes a seventh more CPU time per add.

use std::net::TcpStream;
use std::sync::Arc;
use std::thread;

use anyhow::Context;
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use tokio::task::JoinSet;

/// Each runtime has a value of its own, such as a router. The threads end when this is dropped.
pub struct Runtimes<T>(Vec<Runtime<T>>);

struct Runtime<T> {
    handle: Handle,
    value: T,
    /// One clone per connection.
    connections: Arc<()>,
    _end: oneshot::Sender<()>,
}

impl<T: Clone> Runtimes<T> {
    /// Starts one per core; `make_value` is called within each runtime.
    pub fn start(make_value: impl Fn() -> T) -> anyhow::Result<Self> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        (0..cores)
            .map(|_| Runtime::start(&make_value))
            .collect::<Result<_, _>>()
            .map(Self)
    }

    /// Serves a connection on the runtime that has the fewest.
    pub fn spawn<F>(
        &self,
        tasks: &mut JoinSet<()>,
        stream: TcpStream,
        serve: impl FnOnce(tokio::net::TcpStream, T) -> F + Send + 'static,
    ) where
        F: Future<Output = ()> + Send,
        T: Send + 'static,
    {
        let least_loaded = self
            .0
            .iter()
            .min_by_key(|runtime| Arc::strong_count(&runtime.connections));
        let runtime = least_loaded.expect("there is a core");
        let (value, counted) = (runtime.value.clone(), Arc::clone(&runtime.connections));
        let task = async move {
            match tokio::net::TcpStream::from_std(stream) {
                Ok(stream) => serve(stream, value).await,
                Err(error) => tracing::warn!(%error, "cannot serve a connection"),
            }
            drop(counted);
        };
        tasks.spawn_on(task, &runtime.handle);
    }
}

impl<T> Runtime<T> {
    fn start(make_value: impl Fn() -> T) -> anyhow::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.context("cannot start a runtime")?;
        let handle = runtime.handle().clone();
        let value = {
            let _guard = handle.enter();
            make_value()
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
            value,
            connections: Arc::new(()),
            _end: end,
        })
    }
}
