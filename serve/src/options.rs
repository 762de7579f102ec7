//! What the operator decides: addresses, batching, and what a client may ask for at most.

use std::net::SocketAddr;
use std::time::Duration;

/// Everything that can be set. The defaults suit one machine behind a reverse proxy, or a developer's own.
#[derive(Clone, Debug)]
pub struct Options {
    /// HTTP and gRPC are served here.
    pub listen: SocketAddr,
    /// Another address, for gRPC and HTTP as well.
    pub grpc_listen: Option<SocketAddr>,
    /// What `Authorization: Bearer` must hold, except for `/v2/health/live` and the page, which holds nothing of the models.
    pub token: Option<String>,
    /// Samples of one execution at most.
    pub max_batch: usize,
    /// How long a request may wait for others to share its execution, while several clients are active.
    pub max_delay: Duration,
    /// Requests that wait for the engine.
    pub max_queue: usize,
    /// Bytes of one body, as it came and unpacked.
    pub max_body: usize,
    /// Bytes of all bodies that are being served, and of answers on their way.
    pub max_memory: usize,
    pub max_connections: usize,
    /// From a complete request to its answer.
    pub deadline: Duration,
    /// As `deadline`, for training.
    pub train_deadline: Duration,
    /// From the first to the last byte of a body.
    pub body_timeout: Duration,
    /// For the head of a request, and between requests of a connection.
    pub header_timeout: Duration,
    /// How long requests may take to finish once the server stops.
    pub drain: Duration,
    /// Steps of one training request at most; 0 where the routes for training do not exist.
    pub max_train_steps: u64,
    /// Whether every request is logged, or only what went wrong.
    pub log_requests: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            listen: SocketAddr::from(([127, 0, 0, 1], 8080)),
            grpc_listen: None,
            token: None,
            max_batch: 16,
            max_delay: Duration::from_millis(2),
            max_queue: 256,
            max_body: 64 << 20,
            max_memory: 1 << 30,
            max_connections: 512,
            deadline: Duration::from_secs(30),
            train_deadline: Duration::from_secs(600),
            body_timeout: Duration::from_secs(30),
            header_timeout: Duration::from_secs(30),
            drain: Duration::from_secs(30),
            max_train_steps: 0,
            log_requests: false,
        }
    }
}
