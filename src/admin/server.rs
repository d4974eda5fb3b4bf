//! The HTTP server of the admin address.

use std::{convert::Infallible, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{net::TcpListener, sync::Semaphore};

use super::{Admin, console::CONTENT_SECURITY_POLICY, exposition};

/// Connections at a time: some scrapers, some probes, some people.
const MAX_CONNECTIONS: usize = 64;
/// Time for a request's head, also between two requests of a connection.
const HEAD_TIMEOUT: Duration = Duration::from_secs(60);
/// Pause after a connection could not be taken, as when files run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

const HTML: &str = "text/html; charset=utf-8";
const TEXT: &str = "text/plain; charset=utf-8";
const JSON: &str = "application/json";

type Answer = Response<Full<Bytes>>;

impl Admin {
    /// Answers on the listener for as long as this is polled.
    pub async fn serve(self: Arc<Self>, listener: TcpListener) {
        let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        loop {
            // The semaphore is never closed.
            let Ok(place) = room.clone().acquire_owned().await else { return };
            let Ok((stream, _)) = listener.accept().await else {
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            };
            let admin = self.clone();
            tokio::spawn(async move {
                let service = service_fn(move |request| {
                    let admin = admin.clone();
                    async move { Ok::<_, Infallible>(admin.answer(&request).await) }
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

    async fn answer(&self, request: &Request<Incoming>) -> Answer {
        if request.method() != Method::GET && request.method() != Method::HEAD {
            return text(StatusCode::METHOD_NOT_ALLOWED, TEXT, "Only GET and HEAD.\n".into());
        }
        match request.uri().path() {
            "/" => page(self.page().await),
            "/metrics" => text(StatusCode::OK, exposition::CONTENT_TYPE, self.metrics().await),
            "/drained" => {
                let (status, body) = self.drained(request.uri().query().unwrap_or_default()).await;
                text(status, JSON, body + "\n")
            }
            "/livez" => text(StatusCode::OK, TEXT, "Ok\n".into()),
            "/readyz" if (self.ready)().await => text(StatusCode::OK, TEXT, "Ok\n".into()),
            "/readyz" => text(StatusCode::SERVICE_UNAVAILABLE, TEXT, "Not serving.\n".into()),
            _ => text(StatusCode::NOT_FOUND, TEXT, "There is nothing here. See / for what there is.\n".into()),
        }
    }
}

fn page(html: String) -> Answer {
    let mut answer = text(StatusCode::OK, HTML, html);
    answer.headers_mut().insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(CONTENT_SECURITY_POLICY));
    answer
}

fn text(status: StatusCode, content_type: &'static str, body: String) -> Answer {
    let mut answer = Response::new(Full::new(Bytes::from(body)));
    *answer.status_mut() = status;
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    answer.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    answer.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    answer
}
