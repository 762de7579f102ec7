//! [`Server`]: engine, listeners and signals together.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;

use serde_json::json;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::watch;

use crate::connection;
use crate::engine::{self, Batching, EngineHandle, Load, Started};
use crate::frontend::Frontend;
use crate::http::router;
use crate::log::log;
use crate::metrics::Metrics;
use crate::options::Options;

/// Why a server does not start. `E` is what the models say.
#[derive(Debug, thiserror::Error)]
pub enum ServeError<E> {
    #[error(transparent)]
    Load(E),
    #[error("the engine does not start")]
    Engine,
    #[error("cannot listen at {address}: {source}")]
    Listen { address: SocketAddr, source: io::Error },
    #[error("the server does not start: {0}")]
    Start(#[from] io::Error),
    #[error("there is nothing to serve")]
    Empty,
    #[error("two models have the name {0:?}")]
    SameName(String),
    #[error("{0} must be at least 1")]
    Zero(&'static str),
}

/// The thread that owns the models panicked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("internal error, please report it: the engine stopped; the reason stands above")]
pub struct EngineFailed;

/// A server that listens. [`Server::run`] serves.
pub struct Server {
    runtime: Runtime,
    listeners: Vec<TcpListener>,
    addresses: Vec<SocketAddr>,
    frontend: Arc<Frontend>,
    engine: EngineHandle,
    thread: JoinHandle<()>,
    stop: watch::Sender<bool>,
}

/// Stops a server from another thread. What was begun is finished.
#[derive(Clone)]
pub struct Stop(watch::Sender<bool>);

impl Stop {
    pub fn stop(&self) {
        self.0.send_replace(true);
    }
}

impl Server {
    /// Loads models on the engine's thread, and listens.
    ///
    /// # Errors
    /// The models cannot be loaded or have one name, an address is taken, or an option makes no sense.
    pub fn start<E: Send + 'static>(options: Options, load: Load<E>) -> Result<Self, ServeError<E>> {
        let positive = [
            ("the largest batch", options.max_batch),
            ("the length of the queue", options.max_queue),
            ("the size of bodies", options.max_body),
            ("the number of connections", options.max_connections),
        ];
        if let Some((what, _)) = positive.into_iter().find(|(_, value)| *value == 0) {
            return Err(ServeError::Zero(what));
        }
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        let addresses = std::iter::once(options.listen).chain(options.grpc_listen);
        let listen = |address| {
            let bound = runtime.block_on(TcpListener::bind(address));
            bound.map_err(|source| ServeError::Listen { address, source })
        };
        let listeners = addresses.map(listen).collect::<Result<Vec<_>, _>>()?;
        let addresses = listeners.iter().map(TcpListener::local_addr).collect::<Result<Vec<_>, _>>()?;

        let metrics = Arc::new(Metrics::new());
        let stop = watch::channel(false).0;
        let stopper = Stop(stop.clone());
        let batching = Batching { max_batch: options.max_batch, max_delay: options.max_delay };
        let started = engine::start(load, batching, options.max_queue, metrics.clone(), move || stopper.stop());
        let Started { handle, cards, thread } = started.map_err(|e| e.map_or(ServeError::Engine, ServeError::Load))?;
        metrics.name_models(cards.iter().map(|card| card.name.as_str()));
        for (index, card) in cards.iter().enumerate() {
            if cards.iter().take(index).any(|other| other.name == card.name) {
                handle.stop();
                return Err(ServeError::SameName(card.name.clone()));
            }
            log("model", json!({ "name": card.name, "batched": card.batched }));
        }
        if cards.is_empty() {
            handle.stop();
            return Err(ServeError::Empty);
        }
        let frontend = Arc::new(Frontend::new(options, cards, handle.clone(), metrics));
        Ok(Server { runtime, listeners, addresses, frontend, engine: handle, thread, stop })
    }

    /// Where it listens: HTTP's address first.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    pub fn stopper(&self) -> Stop {
        Stop(self.stop.clone())
    }

    /// Serves until it is stopped, or until SIGINT or SIGTERM comes. Then it takes no more connections, finishes what was begun, and returns.
    ///
    /// # Errors
    /// The engine's thread panicked. What waited was answered with 503.
    pub fn run(self) -> Result<(), EngineFailed> {
        let Server { runtime, listeners, addresses, frontend, engine, thread, stop } = self;
        for address in &addresses {
            log("listening", json!({ "address": address.to_string() }));
        }
        runtime.block_on(async {
            let signals = tokio::spawn(stop_at_signal(stop.clone()));
            let router = router(frontend.clone());
            let mut stopped = stop.subscribe();
            let draining = tokio::spawn({
                let frontend = frontend.clone();
                async move {
                    let _ = stopped.wait_for(|stop| *stop).await;
                    frontend.drain();
                    log("stopping", json!({ "queued": frontend.engine.queued() }));
                }
            });
            connection::serve(listeners, router, frontend, stop.subscribe()).await;
            let _ = draining.await;
            signals.abort();
        });
        engine.stop();
        let ended = thread.join();
        runtime.shutdown_timeout(std::time::Duration::from_secs(1));
        log("stopped", json!({}));
        ended.map_err(|_| EngineFailed)
    }
}

async fn stop_at_signal(stop: watch::Sender<bool>) {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let Ok(mut terminate) = signal(SignalKind::terminate()) else { return };
        tokio::select! {
            _ = tokio::signal::ctrl_c() => {}
            _ = terminate.recv() => {}
        }
    }
    #[cfg(not(unix))]
    let _ = tokio::signal::ctrl_c().await;
    stop.send_replace(true);
}
