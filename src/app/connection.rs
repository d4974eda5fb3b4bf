//! One connection, from its first byte to its last.

use std::{
    future::Future,
    io,
    net::TcpStream,
    pin::pin,
    sync::Arc,
    task::{Poll, ready},
    time::Duration,
};

use hyper::server::conn::{http1, http2};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::graceful::GracefulConnection,
};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::sync::CancellationToken;

use super::{
    coalesce::{Coalesce, Flusher, Protocol, coalesce},
    dispatch::Dispatch,
};
use crate::{
    auth::Peer,
    settings::Settings,
    tls::{Acceptor, PeerName},
};

/// Time from the connection to its first bytes; a client that means to speak does it at once.
const FIRST_BYTES_TIMEOUT: Duration = Duration::from_secs(30);
/// Time a TLS handshake may take: a few round trips, and processor time when many come at once.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// HTTP/1: time from the end of one request to the end of the next one's head. Longer than the 60 seconds that load
/// balancers keep idle connections by default, so that theirs is the side that closes.
const HTTP1_HEAD_TIMEOUT: Duration = Duration::from_secs(75);
/// Larger frames save the sender's and our time: 10 KB messages cost a third.
const FRAME_BYTES: u32 = 256 * 1024;
/// A peer's small frames are charged against half of this window until they are read: at HTTP/2's default one burst of
/// 5,000 acknowledgements ends the connection. 16 MiB takes 200,000.
const CONNECTION_WINDOW_BYTES: u32 = 16 * 1024 * 1024;
/// 4 MiB keeps a stream of 10 MB publishes going over a round trip of tens of milliseconds.
const STREAM_WINDOW_BYTES: u32 = 4 * 1024 * 1024;
/// Bytes of a request's head. Clients put routing parameters, tokens and trace state there; HTTP/2's own count adds 32
/// a field. Google's front end takes at least 16 KiB.
pub const HEADER_LIST_BYTES: u32 = 256 * 1024;
/// Answer bytes a stream may hold that its peer has not made room for.
const SEND_BUFFER_BYTES: usize = 256 * 1024;
/// Streams opened and reset before we took them: one read of [`super::coalesce::BUFFER_BYTES`] holds about 2,000 pairs
/// of a small request and its reset, as when a client cancels many calls at once.
const PENDING_RESETS: usize = 2048;
/// Resets we send for the peer's mistakes before the connection is given up; a client that races its cancellations
/// against our answers collects some.
const LOCAL_RESETS: usize = 4096;
/// A ping after this much silence, and the time its answer may take: leases of a client whose machine went away should
/// not wait for ever behind a dead connection.
const PING_INTERVAL: Duration = Duration::from_secs(60);
const PING_TIMEOUT: Duration = Duration::from_secs(20);

/// How connections are served; cheap to clone.
#[derive(Clone)]
pub struct Server {
    shared: Arc<Shared>,
}

struct Shared {
    http1: http1::Builder,
    http2: http2::Builder<TokioExecutor>,
    tls: Option<Acceptor>,
    dispatch: Dispatch,
    drain: CancellationToken,
}

impl Server {
    /// `drain` tells every connection to end after the calls under way. With `tls` every connection must begin with it.
    pub fn new(settings: &Settings, tls: Option<Acceptor>, dispatch: Dispatch, drain: CancellationToken) -> Self {
        let mut http1 = http1::Builder::new();
        http1.timer(TokioTimer::new()).header_read_timeout(HTTP1_HEAD_TIMEOUT).max_buf_size(HEADER_LIST_BYTES as usize);
        let mut http2 = http2::Builder::new(TokioExecutor::new());
        http2
            .timer(TokioTimer::new())
            .adaptive_window(false)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .max_frame_size(FRAME_BYTES)
            .max_header_list_size(HEADER_LIST_BYTES)
            .max_send_buf_size(SEND_BUFFER_BYTES)
            .max_concurrent_streams(settings.max_concurrent_streams)
            .max_pending_accept_reset_streams(PENDING_RESETS)
            .max_local_error_reset_streams(LOCAL_RESETS)
            .keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_TIMEOUT);
        Self { shared: Arc::new(Shared { http1, http2, tls, dispatch, drain }) }
    }

    /// Serves one connection to its end.
    pub async fn serve(&self, stream: TcpStream) {
        let outcome = match tokio::net::TcpStream::from_std(stream) {
            Ok(stream) => match &self.shared.tls {
                Some(tls) => self.serve_tls(tls, stream).await,
                None => self.serve_stream(stream, Peer::default()).await,
            },
            Err(error) => Err(error.into()),
        };
        if let Err(error) = outcome {
            // Clients come and go as they like: of interest only when one is looked at closely.
            tracing::debug!(%error, "connection ended");
        }
    }

    async fn serve_tls(&self, tls: &Acceptor, stream: tokio::net::TcpStream) -> Result<(), Ended> {
        let stream = tokio::select! {
            stream = tokio::time::timeout(HANDSHAKE_TIMEOUT, tls.accept(stream)) => stream.unwrap_or(Err(io::ErrorKind::TimedOut.into()))?,
            () = self.shared.drain.cancelled() => return Ok(()),
        };
        let certificate = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
        let name = certificate.and_then(PeerName::of);
        self.serve_stream(stream, Peer::new(name.as_ref().map(|name| name.0.as_str()))).await
    }

    async fn serve_stream<S>(&self, stream: S, peer: Peer) -> Result<(), Ended>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let Shared { http1, http2, dispatch, drain, .. } = &*self.shared;
        let (io, flusher) = coalesce(stream);
        let protocol = tokio::select! {
            protocol = tokio::time::timeout(FIRST_BYTES_TIMEOUT, io.protocol()) => protocol.unwrap_or(Err(io::ErrorKind::TimedOut.into()))?,
            () = drain.cancelled() => return Ok(()),
        };
        let io: TokioIo<Coalesce<S>> = TokioIo::new(io);
        let dispatch = dispatch.for_peer(peer);
        match protocol {
            Protocol::Http1 => drive(http1.serve_connection(io, dispatch), &flusher, drain).await,
            Protocol::Http2 => drive(http2.serve_connection(io, dispatch), &flusher, drain).await,
        }
    }
}

/// Why a connection ended early.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Http(#[from] hyper::Error),
}

/// Runs the protocol, writes out at the end of each turn what it left to write, and passes the wish to drain on.
async fn drive<C, S>(connection: C, flusher: &Flusher<S>, drain: &CancellationToken) -> Result<(), Ended>
where
    C: GracefulConnection<Error = hyper::Error>,
    S: AsyncWrite + Unpin,
{
    let mut connection = pin!(connection);
    let mut drained = pin!(drain.cancelled());
    let mut told = false;
    let mut outcome = None;
    std::future::poll_fn(|cx| {
        if !told && drained.as_mut().poll(cx).is_ready() {
            told = true;
            connection.as_mut().graceful_shutdown();
        }
        if outcome.is_none()
            && let Poll::Ready(ended) = connection.as_mut().poll(cx)
        {
            outcome = Some(ended);
        }
        ready!(flusher.poll_drain(cx))?;
        match outcome.take() {
            Some(ended) => Poll::Ready(ended.map_err(Ended::from)),
            None => Poll::Pending,
        }
    })
    .await
}
