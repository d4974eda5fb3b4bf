//! What operators see: metrics, readiness and liveness, over plain HTTP on an address of their own.

mod collect;
mod console;
mod exposition;
mod families;
mod process;
mod requests;
mod server;

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicUsize, Ordering},
};

use futures::future::BoxFuture;

pub use self::{
    families::markdown,
    requests::{Call, Requests},
};
use crate::{auth::Authenticator, connector::Connector};

/// Asks whether the server serves, as its health service answers it.
pub type Ready = Box<dyn Fn() -> BoxFuture<'static, bool> + Send + Sync>;

/// Everything the admin address answers from. One per process.
pub struct Admin {
    ready: Ready,
    requests: Arc<Requests>,
    connector: OnceLock<Arc<Connector>>,
    /// Open connections of the API's port.
    connections: OnceLock<Arc<AtomicUsize>>,
    authenticator: OnceLock<Arc<Authenticator>>,
    /// Scrapes go one by one: the second would only do the same work at the same time.
    turn: tokio::sync::Mutex<()>,
}

impl Admin {
    /// Answers from now on, first without what lies behind the API.
    pub fn new(ready: Ready, requests: Arc<Requests>) -> Arc<Self> {
        let turn = tokio::sync::Mutex::new(());
        let (connector, connections, authenticator) = (OnceLock::new(), OnceLock::new(), OnceLock::new());
        Arc::new(Self { ready, requests, connector, connections, authenticator, turn })
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

    fn open_connections(&self) -> usize {
        self.connections.get().map_or(0, |connections| connections.load(Ordering::Relaxed))
    }
}
