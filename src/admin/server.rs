//! The HTTP server of the admin address.

use std::{convert::Infallible, net::IpAddr, sync::Arc, time::Duration};

use http::{Method, Request, StatusCode};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{net::TcpListener, sync::Semaphore};

use super::{
    Admin,
    console::{Answer, TEXT, answer as text},
    exposition,
};

/// Connections at a time: some scrapers, some probes, some people.
const MAX_CONNECTIONS: usize = 64;
/// Time for a request's head, also between two requests of a connection.
const HEAD_TIMEOUT: Duration = Duration::from_secs(60);
/// Pause after a connection could not be taken, as when files run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

const JSON: &str = "application/json";

impl Admin {
    /// Answers on the listener for as long as this is polled.
    pub async fn serve(self: Arc<Self>, listener: TcpListener) {
        let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        loop {
            // The semaphore is never closed.
            let Ok(place) = room.clone().acquire_owned().await else { return };
            let Ok((stream, peer)) = listener.accept().await else {
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            };
            let admin = self.clone();
            tokio::spawn(async move {
                let service = service_fn(move |request| {
                    let admin = admin.clone();
                    async move { Ok::<_, Infallible>(admin.answer(request, peer.ip()).await) }
                });
                let mut protocol = http1::Builder::new();
                protocol.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT);
                if let Err(error) = protocol.serve_connection(TokioIo::new(stream), service).await {
                    tracing::debug!(%error, "connection to the admin address ended");
                }
                drop(place);
            });
        }
    }

    async fn answer(&self, request: Request<Incoming>, peer: IpAddr) -> Answer {
        let is_read = request.method() == Method::GET || request.method() == Method::HEAD;
        let is_probe = ["/metrics", "/drained", "/livez", "/readyz"].contains(&request.uri().path());
        match request.uri().path() {
            "/metrics" if is_read => text(StatusCode::OK, exposition::CONTENT_TYPE, self.metrics().await),
            "/drained" if is_read => {
                let (status, body) = self.drained(request.uri().query().unwrap_or_default()).await;
                text(status, JSON, body + "\n")
            }
            "/livez" if is_read => text(StatusCode::OK, TEXT, "Ok\n"),
            "/readyz" if is_read && (self.ready)().await => text(StatusCode::OK, TEXT, "Ok\n"),
            "/readyz" if is_read => text(StatusCode::SERVICE_UNAVAILABLE, TEXT, "Not serving.\n"),
            _ if is_read || !is_probe && request.method() == Method::POST => {
                let (parts, body) = request.into_parts();
                self.visit(parts, body, peer).await
            }
            _ => text(StatusCode::METHOD_NOT_ALLOWED, TEXT, "Only GET, HEAD and POST.\n"),
        }
    }
}
