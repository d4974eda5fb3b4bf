//! Opens what the server stands on: the broker, and the use cases over it.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use super::{Error, dispatch::Services, node, preload, pushing::Pushing};
use crate::{
    api::grpc::{self, Gate},
    broker::{
        Broker, BrokerError,
        embedded::{self, Embedded},
        redis,
    },
    connector::{self, Connector, Options},
    settings::{BrokerUrl, Durability, Settings},
};

/// Pause between two tries to reach a broker that is not there; the second is the longest.
const RETRY_PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));

/// The parts behind the API.
pub struct Core {
    pub broker: Arc<dyn Broker>,
    pub connector: Arc<Connector>,
    pub push: Pushing,
}

/// Opens everything once. `port` is the one that the server listens on.
///
/// # Errors
/// [`Error::Broker`], which [may pass](may_pass) where the broker is another process; [`Error::NodeId`];
/// [`Error::Preload`]; [`Error::Push`].
pub async fn open(settings: &Settings, port: u16) -> Result<Core, Error> {
    let broker = open_broker(settings).await?;
    let node_id = node::id(&settings.connector.node_id, data_folder(settings)).map_err(Error::NodeId)?;
    let connector = Connector::open(broker.clone(), Options { node_id, ..settings.connector.clone() }).await;
    let connector = connector.map_err(|error| Error::Broker(broker_error(error)))?;
    preload::create(settings, &connector).await?;
    let push = Pushing::start(settings, &connector, port)?;
    Ok(Core { broker, connector, push })
}

/// The services that need the broker.
pub fn services(connector: &Arc<Connector>, gate: &Gate) -> Services {
    let services = Services::default()
        .with(grpc::publisher(connector.clone(), gate.clone()))
        .with(grpc::subscriber(connector.clone(), gate.clone()))
        .with(grpc::iam(connector.clone(), gate.clone()))
        .with(grpc::scaler(connector.clone(), gate.clone()));
    #[cfg(feature = "schemas")]
    let services = services.with(grpc::schemas(connector.clone(), gate.clone()));
    #[cfg(feature = "transforms")]
    let services = services.with(grpc::transforms(connector.clone(), gate.clone()));
    services
}

/// What kept the use cases from starting was the broker, told in their words.
fn broker_error(error: connector::Error) -> BrokerError {
    let text = error.internal().map_or_else(|| error.to_string(), str::to_owned);
    match error {
        connector::Error::Internal(_) => BrokerError::Damaged(text),
        connector::Error::Full(_) => BrokerError::Full(text),
        _ => BrokerError::Unavailable(text),
    }
}

/// Opens everything, however often it takes.
///
/// # Errors
/// Only what does not pass by waiting.
pub async fn open_patiently(settings: &Settings, port: u16) -> Result<Core, Error> {
    let (mut pause, longest) = RETRY_PAUSES;
    loop {
        tokio::time::sleep(pause).await;
        match open(settings, port).await {
            Err(error) if may_pass(&error, settings) => tracing::warn!(%error, "still not ready"),
            opened => return opened,
        }
        pause = (pause * 2).min(longest);
    }
}

/// True for a broker that may come back by itself: another process that can't be reached.
pub fn may_pass(error: &Error, settings: &Settings) -> bool {
    matches!((error, &settings.broker), (Error::Broker(BrokerError::Unavailable(_)), BrokerUrl::Redis(_)))
}

fn data_folder(settings: &Settings) -> Option<&Path> {
    match &settings.broker {
        BrokerUrl::Embedded(path) => Some(path),
        BrokerUrl::Memory | BrokerUrl::Redis(_) => None,
    }
}

async fn open_broker(settings: &Settings) -> Result<Arc<dyn Broker>, Error> {
    match &settings.broker {
        BrokerUrl::Embedded(path) => open_embedded(path.clone(), embedded_durability(settings.durability)).await,
        BrokerUrl::Memory => Ok(Embedded::memory()),
        BrokerUrl::Redis(url) => {
            // What is wrong with it does not pass by waiting.
            redis::check_url(url).map_err(Error::BrokerUrl)?;
            let options = redis::Options { durability: redis_durability(settings), ..redis::Options::default() };
            Ok(redis::Redis::open(url, options).await?)
        }
    }
}

/// What nobody asked for is not insisted on: a Redis as it comes works, with a warning.
fn redis_durability(settings: &Settings) -> redis::Durability {
    match settings.durability {
        _ if !settings.durability_given => redis::Durability::AsConfigured,
        Durability::None => redis::Durability::None,
        Durability::Fsync => redis::Durability::Fsync,
        Durability::Replicas(count) => redis::Durability::Replicas(u32::from(count)),
    }
}

/// Reading a large log takes a while, in which signals should be heard.
async fn open_embedded(path: PathBuf, durability: embedded::Durability) -> Result<Arc<dyn Broker>, Error> {
    let opened = tokio::task::spawn_blocking(move || Embedded::open(&path, durability)).await;
    Ok(opened.map_err(|error| BrokerError::Damaged(error.to_string()))??)
}

/// The settings refuse to ask the embedded broker for replicas.
fn embedded_durability(durability: Durability) -> embedded::Durability {
    match durability {
        Durability::None => embedded::Durability::None,
        Durability::Fsync | Durability::Replicas(_) => embedded::Durability::Fsync,
    }
}
