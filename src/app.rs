//! Puts the parts together: the process from start to drain.

pub mod apply;
mod body;
pub mod cli;
mod coalesce;
mod connection;
mod dispatch;
mod exchange;
mod exporting;
mod files;
pub mod floor;
mod health;
pub mod healthcheck;
pub mod import;
pub mod keys;
mod listen;
pub mod logs;
pub mod mirror;
mod node;
mod preload;
mod pushing;
mod reflection;
pub mod reset;
mod security;
mod signals;
mod start;
pub mod wait;
mod workers;

use std::{
    io::{self, Write},
    net::SocketAddr,
    sync::Arc,
    time::Duration,
};

use prost_reflect::{DescriptorPool, MethodDescriptor, ServiceDescriptor};
use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::{net::TcpListener, task::JoinSet};
use tokio_util::sync::CancellationToken;
use tonic_health::pb::health_server::HealthServer;

use self::{
    connection::Server,
    dispatch::{Dispatch, Services},
    exporting::Exporting,
    health::Readiness,
    security::Security,
    signals::Signals,
    start::Core,
    workers::Workers,
};
use crate::{
    admin::{Admin, Requests},
    api::proto::FILE_DESCRIPTOR_SET,
    auth::KeysError,
    broker::BrokerError,
    settings::{BrokerUrl, Settings},
    tls::{Acceptor, TlsError},
};

/// Why the program failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("can't listen on {0}: {1}")]
    Listen(SocketAddr, #[source] io::Error),
    #[error("{0}")]
    Broker(#[from] BrokerError),
    #[error("CONNECTORS_GCP_BROKER_URL: {0}")]
    BrokerUrl(String),
    #[error("{0}")]
    Tls(#[from] TlsError),
    #[error("{0}")]
    Auth(String),
    #[error("{0}")]
    Console(String),
    #[error("{0}")]
    File(String),
    #[error(transparent)]
    Keys(#[from] KeysError),
    #[error("can't keep the node id in the data folder: {0}")]
    NodeId(#[source] io::Error),
    #[error("can't create {0}: {1}")]
    Preload(String, String),
    #[error("the API's own descriptors are faulty: {0}")]
    Descriptors(String),
    #[error("the system refused a thread, a signal handler or an event queue: {0}")]
    System(#[source] io::Error),
    #[error("can't write to standard output: {0}")]
    Output(#[source] io::Error),
    #[error("{0}: {1}")]
    Unhealthy(String, String),
    #[error("inspect {0}")]
    Inspect(String),
    #[error("apply: {0}")]
    Apply(String),
    #[error("mirror: {0}")]
    Mirror(String),
    #[error("reset: {0}")]
    Reset(String),
    #[error("wait: {0}")]
    Wait(String),
    #[error("import: {0}")]
    Import(String),
    #[error("bench: {0}")]
    Bench(String),
    #[error("push: {0}")]
    Push(String),
    #[error("{0}")]
    Telemetry(String),
}

/// Exit code when a second signal cuts the drain short.
const EXIT_CUT_SHORT: i32 = 130;
/// Time the broker gets, after the drain, to write what is pending.
const BROKER_CLOSE_TIMEOUT: Duration = Duration::from_secs(30);

/// Runs the server until it is asked to stop and has drained.
///
/// # Errors
/// Whatever keeps it from serving.
pub fn serve(settings: Settings) -> Result<(), Error> {
    raise_open_files();
    keep_small_pages();
    // Connections have threads of their own; this one starts, watches and ends things.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Error::System)?;
    let done = runtime.block_on(run(settings.clone())).map_err(|error| files::blame(&settings, error));
    runtime.shutdown_background();
    done
}

async fn run(mut settings: Settings) -> Result<(), Error> {
    let mut signals = Signals::new().map_err(Error::System)?;
    // First, so that a busy port is noticed before anything is touched. Nothing is answered yet.
    let listeners = listen::open(&settings)?;
    let tls = settings.tls.is_set().then(|| Acceptor::open(&settings.tls)).transpose()?;
    let security = Security::open(&settings)?;
    let admin_listener = listen::open_admin(&settings)?;
    let exporting = Exporting::open(&settings.telemetry).map_err(Error::Telemetry)?;
    settings.connector.tracer = exporting.tracer().cloned();
    let readiness = Readiness::default();
    let port = listeners.first().and_then(|listener| listener.local_addr().ok()).map_or(settings.port, |address| address.port());
    let requests = Requests::new(methods()?);
    let early = early_services(&settings, &readiness)?;
    let traced = exporting.tracer().is_some();
    let dispatch = Dispatch::new(early, security.authenticator.clone(), requests.clone(), &settings.cors_origins, traced)
        .map_err(|e| Error::Descriptors(e.to_string()))?;
    let admin = Admin::new(readiness.probe(), requests, security::console(&settings)?);
    let admin_address = serve_admin(&admin, admin_listener);

    let mut core = tokio::select! {
        opened = start::open(&settings, port) => match opened {
            Err(error) if start::may_pass(&error, &settings) => {
                tracing::warn!(%error, "the broker is not ready: health is NOT_SERVING, calls answer UNAVAILABLE");
                None
            }
            opened => Some(opened?),
        },
        _ = signals.next() => return Ok(()),
    };
    let front = Front { security: &security, dispatch: &dispatch, readiness: &readiness, admin: &admin, exporting: &exporting };
    if let Some(core) = &core {
        front.open(core)?;
    }

    let drain = CancellationToken::new();
    if let Some(tls) = &tls {
        tokio::spawn(tls.clone().follow());
    }
    let server = Server::new(&settings, tls, dispatch.clone(), drain.clone());
    let serving = Serving::start(&settings, listeners, &server, drain).map_err(Error::System)?;
    admin.watch_connections(serving.workers.counter());
    admin.watch_refusals(security.authenticator.clone());
    announce(&settings, &serving.addresses, admin_address, core.as_ref())?;

    let signal = tokio::select! {
        signal = signals.next() => signal,
        error = front.open_later(&settings, port, &mut core) => return Err(error),
    };
    tracing::info!(signal, seconds = settings.drain_seconds, "draining");
    tokio::select! {
        () = serving.stop(&settings, core, &front) => {
            tracing::info!("stopped");
            Ok(())
        }
        signal = signals.next() => {
            tracing::warn!(signal, "stopped without waiting");
            std::process::exit(EXIT_CUT_SHORT)
        }
    }
}

/// Services that answer whether or not the broker is there.
fn early_services(settings: &Settings, readiness: &Readiness) -> Result<Services, Error> {
    let services = Services::default().with(HealthServer::new(readiness.clone()));
    if settings.enable_reflection { reflection::add(services).map_err(Error::Descriptors) } else { Ok(services) }
}

/// What stands before the core, and hears of it once it is there.
struct Front<'r> {
    security: &'r Security,
    dispatch: &'r Dispatch,
    readiness: &'r Readiness,
    admin: &'r Arc<Admin>,
    exporting: &'r Exporting,
}

impl Front<'_> {
    /// Serves everything from now on.
    fn open(&self, core: &Core) -> Result<(), Error> {
        let services = start::services(&core.connector, &self.security.start(&core.connector)?);
        #[cfg(feature = "push")]
        self.dispatch.publish(core.push.issuer.clone());
        self.dispatch.open(services);
        self.readiness.open(core.broker.clone());
        self.admin.open(core.connector.clone());
        self.exporting.begin(&core.connector.options().node_id, self.admin);
        Ok(())
    }

    /// Opens the core if it is not open; comes back only with an error that waiting does not mend.
    async fn open_later(&self, settings: &Settings, port: u16, core: &mut Option<Core>) -> Error {
        if core.is_none() {
            match start::open_patiently(settings, port).await {
                Ok(opened) => {
                    if let Err(error) = self.open(&opened) {
                        return error;
                    }
                    tracing::info!(node = opened.connector.options().node_id, "the broker is ready");
                    *core = Some(opened);
                }
                Err(error) => return error,
            }
        }
        std::future::pending().await
    }
}

/// Paths of all methods of the API, and whether they are streams.
fn methods() -> Result<Vec<(String, bool)>, Error> {
    let pool = DescriptorPool::decode(FILE_DESCRIPTOR_SET).map_err(|e| Error::Descriptors(e.to_string()))?;
    let of_service = |service: ServiceDescriptor| {
        let path = |method: MethodDescriptor| {
            let streaming = method.is_client_streaming() || method.is_server_streaming();
            (format!("/{}/{}", service.full_name(), method.name()), streaming)
        };
        service.methods().map(path).collect::<Vec<_>>()
    };
    Ok(pool.services().flat_map(of_service).collect())
}

/// Serves the admin address until the process ends; answers where.
fn serve_admin(admin: &Arc<Admin>, listener: Option<TcpListener>) -> Option<SocketAddr> {
    let listener = listener?;
    let address = listener.local_addr().ok();
    tokio::spawn(admin.clone().serve(listener));
    address
}

/// The open sockets and the threads behind them.
struct Serving {
    addresses: Vec<SocketAddr>,
    workers: Arc<Workers>,
    accepting: JoinSet<()>,
    /// Ends the taking of connections.
    stop: CancellationToken,
    /// Tells connections to end after the calls under way.
    drain: CancellationToken,
}

impl Serving {
    fn start(settings: &Settings, listeners: Vec<TcpListener>, server: &Server, drain: CancellationToken) -> io::Result<Self> {
        let workers = Arc::new(Workers::start(settings.workers, server)?);
        let stop = CancellationToken::new();
        let mut accepting = JoinSet::new();
        let mut addresses = Vec::new();
        for listener in listeners {
            addresses.push(listener.local_addr()?);
            accepting.spawn(listen::accept(listener, workers.clone(), settings.max_connections, stop.clone()));
        }
        Ok(Self { addresses, workers, accepting, stop, drain })
    }

    /// Ends in order: health, no new work, the calls under way, the connections, the telemetry, the broker.
    async fn stop(mut self, settings: &Settings, mut core: Option<Core>, front: &Front<'_>) {
        front.readiness.drain();
        // Whoever asks for health learns it meanwhile, and sends no new clients here.
        tokio::time::sleep(Duration::from_secs(settings.drain_delay_seconds)).await;
        let limit = tokio::time::sleep(Duration::from_secs(settings.drain_seconds));
        let calls = async {
            self.stop.cancel();
            while self.accepting.join_next().await.is_some() {}
            if let Some(core) = &mut core {
                core.push.stop().await;
                core.connector.drain().await;
            }
            self.drain.cancel();
            self.workers.close();
            self.workers.ended().await;
        };
        tokio::select! {
            () = calls => {}
            () = limit => tracing::warn!(connections = self.workers.connections(), "the drain took too long, ending the rest"),
        }
        self.workers.abort();
        self.workers.ended().await;
        front.exporting.end().await;
        if let Some(core) = core
            && tokio::time::timeout(BROKER_CLOSE_TIMEOUT, core.broker.close()).await.is_err()
        {
            tracing::error!("the broker did not close in time; what was confirmed is safe");
        }
    }
}

/// Prints the address to standard output, for scripts, and everything else to the log.
fn announce(settings: &Settings, addresses: &[SocketAddr], admin: Option<SocketAddr>, core: Option<&Core>) -> Result<(), Error> {
    let texts: Vec<_> = addresses.iter().map(ToString::to_string).collect();
    let mut out = io::stdout().lock();
    // One address, as every reader understands: with several they share the port.
    writeln!(out, "landline listening on {}", texts[0]).and_then(|()| out.flush()).map_err(Error::Output)?;
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        addresses = texts.join(" "),
        admin = admin.map(|address| address.to_string()),
        advertised = settings.advertised_endpoint,
        tls = settings.tls.is_set(),
        auth = ?settings.auth.mode(),
        broker = %settings.broker,
        durability = durability(settings),
        node = core.map_or("", |core| core.connector.options().node_id.as_str()),
        "landline started"
    );
    Ok(())
}

/// What a confirmed message is safe from, for the log.
fn durability(settings: &Settings) -> String {
    match settings.broker {
        BrokerUrl::Memory => "none".into(),
        BrokerUrl::Redis(_) if !settings.durability_given => "as Redis is set up".into(),
        _ => settings.durability.to_string(),
    }
}

/// Buffers are made as large as a request says it is, and only what arrives is to take memory. The allocator asks for huge
/// pages, with which the first byte of a buffer takes 2 MiB.
fn keep_small_pages() {
    if let Err(error) = rustix::thread::disable_transparent_huge_pages(true) {
        tracing::debug!(%error, "can't do without huge pages");
    }
}

/// Takes as many file descriptors as the system allows: each connection needs one, and the usual soft limit is 1,024.
fn raise_open_files() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::debug!(%error, "can't raise the limit of open files");
    }
}
