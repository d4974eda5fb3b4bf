//! Calls to any Pub/Sub endpoint over gRPC: Landline, Google's service or its emulator.
//!
//! An endpoint with `https` gets TLS; a key file makes every call say whose it is, with tokens that the key signs itself,
//! as Google's own clients do. Landline and Google take them alike.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use clap::Args;
use http::{HeaderValue, Request, Response, header};
use parking_lot::Mutex;
use tonic::{
    body::Body,
    transport::{Channel, Endpoint},
};
use tower::Service;

use crate::{
    auth::KeyFile,
    tls::{self, Trust},
};

/// What tokens are for, as Google's clients name this service whatever its address.
const AUDIENCE: &str = "https://pubsub.googleapis.com/";
/// Tokens are good for an hour; a new one is signed well before that ends.
const TOKEN_LIFE: Duration = Duration::from_secs(45 * 60);
/// Windows as large as the server's, so that the transport does not hold messages up.
const CONNECTION_WINDOW: u32 = 16 << 20;
const STREAM_WINDOW: u32 = 4 << 20;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How soon a peer that went away without a word is noticed. Google's Python client pings at the same rate.
const KEEP_ALIVE: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(20));
/// The default of [`Target::endpoint`].
const LOCAL: &str = "http://127.0.0.1:8085";

/// Where a server is and how to speak to it.
#[derive(Debug, Clone, Args)]
pub struct Target {
    /// Where the server is: a URL or HOST:PORT. Without a scheme it is spoken to without TLS, unless it is Google's
    #[arg(long, value_name = "URL", default_value = LOCAL)]
    pub endpoint: String,

    /// Roots of the server's certificate, PEM, for an https endpoint; by default those of the machine
    #[arg(long, value_name = "FILE")]
    pub ca_file: Option<PathBuf>,

    /// Key file of the service account whose calls these are, of Google or as `landline keys create` makes it
    #[arg(long, value_name = "FILE")]
    pub key_file: Option<PathBuf>,

    /// Client certificate, PEM, for a server that asks for one
    #[arg(long, value_name = "FILE", requires = "client_key_file")]
    pub client_cert_file: Option<PathBuf>,

    /// Private key of the client certificate, PEM
    #[arg(long, value_name = "FILE", requires = "client_cert_file")]
    pub client_key_file: Option<PathBuf>,
}

impl Target {
    /// A server without TLS and credentials.
    pub fn plain(endpoint: &str) -> Self {
        let (ca_file, key_file, client_cert_file, client_key_file) = (None, None, None, None);
        Self { endpoint: endpoint.to_owned(), ca_file, key_file, client_cert_file, client_key_file }
    }

    /// The endpoint with a scheme.
    fn url(&self) -> String {
        let google = |host: &str| host == "googleapis.com" || host.ends_with(".googleapis.com");
        match self.endpoint.as_str() {
            with_scheme if with_scheme.contains("://") => with_scheme.trim_end_matches('/').to_owned(),
            host if google(host.split(':').next().unwrap_or_default()) => format!("https://{host}"),
            host => format!("http://{host}"),
        }
    }

    /// Connections that are opened at the first call and again whenever they break. At least one.
    ///
    /// # Errors
    /// A file or an endpoint that is not legal. Whether there is a server shows at the first call.
    pub fn connections(&self, count: usize) -> Result<Vec<Connection>, String> {
        let url = self.url();
        let bad = |e: &dyn std::fmt::Display| format!("endpoint {}: {e}", self.endpoint);
        if !(url.starts_with("http://") || url.starts_with("https://")) {
            return Err(bad(&"must be a URL with http:// or https://, or HOST:PORT"));
        }
        let credentials = self.key_file.as_deref().map(Credentials::load).transpose()?;
        let tls = url.strip_prefix("https://").map(|address| self.tls().map(|client| (client, format!("http://{address}"))));
        let tls = tls.transpose()?;
        // The transport has no TLS of its own: the connector brings it.
        let address = tls.as_ref().map_or(&url, |(_, address)| address);
        let endpoint = Endpoint::from_shared(address.clone())
            .map_err(|e| bad(&e))?
            .tcp_nodelay(true)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .initial_stream_window_size(STREAM_WINDOW)
            .http2_keep_alive_interval(KEEP_ALIVE.0)
            .keep_alive_timeout(KEEP_ALIVE.1)
            .keep_alive_while_idle(true)
            .connect_timeout(CONNECT_TIMEOUT);
        let endpoint = if tls.is_some() { endpoint.origin(url.parse().map_err(|e| bad(&e))?) } else { endpoint };
        let open = || match &tls {
            None => endpoint.connect_lazy(),
            Some((client, _)) => {
                let client = client.clone();
                endpoint.connect_with_connector_lazy(tower::service_fn(move |address| {
                    let client = client.clone();
                    async move { client.connect(address).await }
                }))
            }
        };
        Ok((0..count.max(1)).map(|_| Connection { channel: open(), credentials: credentials.clone() }).collect())
    }

    fn tls(&self) -> Result<tls::Client, String> {
        let trust = self.ca_file.clone().map_or(Trust::System, Trust::Roots);
        let identity = self.client_cert_file.as_deref().zip(self.client_key_file.as_deref());
        tls::Client::new(&trust, identity).map_err(|e| e.to_string())
    }
}

/// Tokens of one key, each for as long as it is good.
struct Credentials {
    key: KeyFile,
    token: Mutex<(HeaderValue, Instant)>,
}

impl Credentials {
    fn load(path: &Path) -> Result<Arc<Self>, String> {
        let key = KeyFile::read(path).map_err(|e| e.to_string())?;
        let token = Mutex::new((sign(&key)?, Instant::now()));
        Ok(Arc::new(Self { key, token }))
    }

    fn token(&self) -> HeaderValue {
        let mut held = self.token.lock();
        if held.1.elapsed() > TOKEN_LIFE
            && let Ok(token) = sign(&self.key)
        {
            *held = (token, Instant::now());
        }
        held.0.clone()
    }
}

fn sign(key: &KeyFile) -> Result<HeaderValue, String> {
    let token = key.sign(AUDIENCE).map_err(|e| e.to_string())?;
    let mut value = HeaderValue::try_from(format!("Bearer {token}")).map_err(|_| "the token is not text".to_owned())?;
    value.set_sensitive(true);
    Ok(value)
}

/// A connection whose calls say who makes them; cheap to clone.
#[derive(Clone)]
pub struct Connection {
    channel: Channel,
    credentials: Option<Arc<Credentials>>,
}

impl Service<Request<Body>> for Connection {
    type Response = Response<Body>;
    type Error = tonic::transport::Error;
    type Future = <Channel as Service<Request<Body>>>::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Service::poll_ready(&mut self.channel, context)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        if let Some(credentials) = &self.credentials {
            request.headers_mut().insert(header::AUTHORIZATION, credentials.token());
        }
        Service::call(&mut self.channel, request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_without_a_scheme_is_plain_unless_it_is_googles() {
        for (endpoint, url) in [
            ("localhost:8085", "http://localhost:8085"),
            ("https://h:1/", "https://h:1"),
            ("pubsub.googleapis.com", "https://pubsub.googleapis.com"),
            ("pubsub.googleapis.com:443", "https://pubsub.googleapis.com:443"),
            ("googleapis.com.example:80", "http://googleapis.com.example:80"),
        ] {
            assert_eq!(Target::plain(endpoint).url(), url);
        }
        for endpoint in ["ftp://h", "http://", "a b"] {
            let error = Target::plain(endpoint).connections(1).err().unwrap_or_default();
            assert!(error.contains(endpoint), "{endpoint}: {error}");
        }
    }
}
