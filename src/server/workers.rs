//! The threads that serve connections: one for each core, each with a runtime of its own. A
//! connection stays with one of them, and so in the caches of its core; with one runtime for all
//! cores an add took a seventh more of the processor.

use std::net::TcpStream;
use std::sync::Arc;
use std::thread;

use anyhow::Context;
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use tokio::task::JoinSet;

/// All of them, each with something of its own to serve with. They end when this is dropped.
pub struct Workers<T>(Vec<Worker<T>>);

struct Worker<T> {
    runtime: Handle,
    own: T,
    /// As many clones as it has connections.
    connections: Arc<()>,
    _end: oneshot::Sender<()>,
}

impl<T: Clone> Workers<T> {
    /// Starts one for each core, and makes in its runtime what it is to have.
    pub fn start(make_own: impl Fn() -> T) -> anyhow::Result<Self> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        (0..cores)
            .map(|_| Worker::start(&make_own))
            .collect::<Result<_, _>>()
            .map(Self)
    }

    /// Gives a connection to the one that has the fewest. The task makes its stream there.
    pub fn spawn<F>(
        &self,
        tasks: &mut JoinSet<()>,
        stream: TcpStream,
        serve: impl FnOnce(tokio::net::TcpStream, T) -> F + Send + 'static,
    ) where
        F: Future<Output = ()> + Send,
        T: Send + 'static,
    {
        let least = self
            .0
            .iter()
            .min_by_key(|worker| Arc::strong_count(&worker.connections));
        let worker = least.expect("there is a core");
        let (own, counted) = (worker.own.clone(), Arc::clone(&worker.connections));
        let task = async move {
            match tokio::net::TcpStream::from_std(stream) {
                Ok(stream) => serve(stream, own).await,
                Err(error) => tracing::warn!(%error, "cannot serve a connection"),
            }
            drop(counted);
        };
        tasks.spawn_on(task, &worker.runtime);
    }
}

impl<T> Worker<T> {
    fn start(make_own: impl Fn() -> T) -> anyhow::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.context("cannot start a runtime")?;
        let handle = runtime.handle().clone();
        let own = {
            let _here = handle.enter();
            make_own()
        };
        let (end, ended) = oneshot::channel();
        thread::Builder::new()
            .name("worker".to_owned())
            .spawn(move || {
                let _ = runtime.block_on(ended);
                // A query that a stuck disk does not answer is not waited for.
                runtime.shutdown_background();
            })
            .context("cannot start a thread")?;
        Ok(Self {
            runtime: handle,
            own,
            connections: Arc::new(()),
            _end: end,
        })
    }
}
