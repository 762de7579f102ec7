//! Connections: accepted up to a limit, served as HTTP/1 or HTTP/2, and closed where nothing happens.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::server::graceful::GracefulShutdown;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, Sleep, sleep};
use tower::ServiceExt;

use crate::frontend::Frontend;

/// The head of a request at most, with all its headers.
const MAX_HEAD_BYTES: usize = 64 << 10;
/// Concurrent calls of one HTTP/2 connection.
const MAX_STREAMS: u32 = 128;
/// What a connection beyond the limit gets.
const REFUSED: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: 42\r\n\
    connection: close\r\n\r\n{\"error\":\"there are no connections left\"}\n";

/// Serves `listeners` until `stop` turns true; then what was begun may finish for as long as the options say.
pub(crate) async fn serve(listeners: Vec<TcpListener>, router: Router, frontend: Arc<Frontend>, stop: watch::Receiver<bool>) {
    let graceful = GracefulShutdown::new();
    let free = Arc::new(Semaphore::new(frontend.options.max_connections));
    let accepting = listeners.into_iter().map(|listener| {
        let (router, frontend, free, graceful) = (router.clone(), frontend.clone(), free.clone(), &graceful);
        let mut stop = stop.clone();
        async move {
            loop {
                let stream = tokio::select! {
                    accepted = listener.accept() => accepted,
                    _ = stop.wait_for(|stop| *stop) => return,
                };
                match stream {
                    Ok((stream, _)) => accept(stream, &router, &frontend, &free, graceful),
                    // Descriptors are used up, or the peer went away.
                    Err(_) => sleep(Duration::from_millis(20)).await,
                }
            }
        }
    });
    all(accepting.map(Box::pin).collect()).await;
    let _ = tokio::time::timeout(frontend.options.drain, graceful.shutdown()).await;
}

/// Runs all futures to their end.
async fn all(mut futures: Vec<impl Future<Output = ()> + Unpin>) {
    std::future::poll_fn(move |context| {
        futures.retain_mut(|future| Pin::new(future).poll(context).is_pending());
        if futures.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

fn accept(mut stream: TcpStream, router: &Router, frontend: &Arc<Frontend>, free: &Arc<Semaphore>, graceful: &GracefulShutdown) {
    let Ok(permit) = free.clone().try_acquire_owned() else {
        frontend.metrics.connection_refused();
        tokio::spawn(async move {
            let _ = tokio::time::timeout(Duration::from_secs(1), stream.write_all(REFUSED)).await;
        });
        return;
    };
    // Answers are small, and clients wait for them.
    let _ = stream.set_nodelay(true);
    let active = Arc::new(AtomicUsize::new(0));
    let timeout = frontend.options.header_timeout;
    let io = TokioIo::new(Watched { stream, active: active.clone(), timeout, sleep: Box::pin(sleep(timeout)) });
    let router = router.clone();
    let service = hyper::service::service_fn(move |request: hyper::Request<Incoming>| {
        let guard = Active::new(&active);
        let answer = router.clone().oneshot(request.map(axum::body::Body::new));
        async move {
            let answer = answer.await;
            drop(guard);
            answer
        }
    });
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(timeout).half_close(true).max_buf_size(MAX_HEAD_BYTES);
    builder.http2().timer(TokioTimer::new()).max_concurrent_streams(MAX_STREAMS).max_header_list_size(MAX_HEAD_BYTES as u32);
    builder.http2().initial_stream_window_size(1 << 20).initial_connection_window_size(2 << 20);
    let connection = graceful.watch(builder.serve_connection(io, service).into_owned());
    let frontend = frontend.clone();
    tokio::spawn(async move {
        frontend.metrics.connection(1);
        // Whatever ended it, there is nobody to tell.
        let _ = connection.await;
        frontend.metrics.connection(-1);
        drop(permit);
    });
}

/// Counts a request as long as it is being answered.
struct Active(Arc<AtomicUsize>);

impl Active {
    fn new(active: &Arc<AtomicUsize>) -> Self {
        active.fetch_add(1, Ordering::AcqRel);
        Active(active.clone())
    }
}

impl Drop for Active {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A stream that fails where neither side moves for too long and no request is being answered.
struct Watched {
    stream: TcpStream,
    active: Arc<AtomicUsize>,
    timeout: Duration,
    sleep: Pin<Box<Sleep>>,
}

impl Watched {
    fn moved(&mut self) {
        let deadline = Instant::now() + self.timeout;
        self.sleep.as_mut().reset(deadline);
    }

    /// An error once the time is over.
    fn idle<T>(&mut self, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        while self.sleep.as_mut().poll(context).is_ready() {
            if self.active.load(Ordering::Acquire) == 0 {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            self.moved();
        }
        Poll::Pending
    }

    fn settle<T>(&mut self, context: &mut Context<'_>, polled: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        match polled {
            Poll::Pending => self.idle(context),
            ready => {
                self.moved();
                ready
            }
        }
    }
}

impl AsyncRead for Watched {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_read(context, buffer);
        self.settle(context, polled)
    }
}

impl AsyncWrite for Watched {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.settle(context, polled)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write_vectored(context, bytes);
        self.settle(context, polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
