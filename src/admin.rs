//! What operators see: metrics, readiness, liveness and the console, over plain HTTP on an address of their own.

mod collect;
mod console;
mod drained;
mod exposition;
mod families;
mod otlp;
mod process;
mod requests;
mod server;

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicUsize, Ordering},
};

use futures::future::BoxFuture;

pub use self::{
    console::{Console, ConsoleOptions},
    families::markdown,
    requests::{Call, Requests},
};
use crate::{
    auth::Authenticator,
    connector::Connector,
    telemetry::{Counts, wire},
};

/// Asks whether the server serves, as its health service answers it.
pub type Ready = Box<dyn Fn() -> BoxFuture<'static, bool> + Send + Sync>;

/// Everything the admin address answers from. One per process.
pub struct Admin {
    ready: Ready,
    requests: Arc<Requests>,
    console: Arc<Console>,
    connector: OnceLock<Arc<Connector>>,
    /// Open connections of the API's port.
    connections: OnceLock<Arc<AtomicUsize>>,
    authenticator: OnceLock<Arc<Authenticator>>,
    exports: OnceLock<Arc<Counts>>,
    /// Scrapes go one by one: the second would only do the same work at the same time.
    turn: tokio::sync::Mutex<()>,
}

impl Admin {
    /// Answers from now on, first without what lies behind the API.
    pub fn new(ready: Ready, requests: Arc<Requests>, console: Arc<Console>) -> Arc<Self> {
        let turn = tokio::sync::Mutex::new(());
        let (connector, connections, authenticator, exports) =
            (OnceLock::new(), OnceLock::new(), OnceLock::new(), OnceLock::new());
        Arc::new(Self { ready, requests, console, connector, connections, authenticator, exports, turn })
    }

    /// From now on topics and subscriptions are shown.
    pub fn open(&self, connector: Arc<Connector>) {
        let _ = self.connector.set(connector);
    }

    /// The counter of open connections.
    pub fn watch_connections(&self, connections: Arc<AtomicUsize>) {
        let _ = self.connections.set(connections);
    }

    /// The counters of refused calls.
    pub fn watch_refusals(&self, authenticator: Arc<Authenticator>) {
        let _ = self.authenticator.set(authenticator);
    }

    /// The counters of telemetry that is sent.
    pub fn watch_exports(&self, counts: Arc<Counts>) {
        let _ = self.exports.set(counts);
    }

    /// All metrics now, as OTLP has them.
    pub async fn report(&self) -> Vec<wire::Metric> {
        let mut report = otlp::Report::default();
        self.collect(&mut report).await;
        report.into_metrics()
    }

    fn open_connections(&self) -> usize {
        self.connections.get().map_or(0, |connections| connections.load(Ordering::Relaxed))
    }
}
