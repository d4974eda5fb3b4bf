//! The use cases of Pub/Sub, in the model's terms and the same on every engine.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::task::AbortHandle;

use crate::{
    broker::{Broker, Kind},
    model::{SubscriptionName, TopicName},
    telemetry::Tracer,
};

pub mod ack_id;
pub mod catalog;
mod channel;
pub mod dead_letter;
pub mod draft;
pub mod error;
mod janitor;
mod listing;
mod mask;
pub mod meters;
pub mod peek;
mod policies;
pub mod publish;
pub mod pull;
pub mod record;
pub mod replay;
#[cfg(test)]
mod rig;
#[cfg_attr(not(feature = "schemas"), path = "connector/schemas/off.rs")]
pub mod schemas;
mod screen;
mod secret;
mod seek;
pub mod session;
mod settle;
mod snapshots;
mod subscriptions;
mod topics;
pub mod traces;
#[cfg_attr(not(feature = "transforms"), path = "connector/transforms/off.rs")]
pub mod transforms;
pub mod validate;

pub use catalog::{SubscriptionEntry, TopicEntry};
pub use error::{AckFailure, Error, SchemaViolation};
pub use listing::{Page, PageRequest};
pub use screen::note_settled;
pub use secret::Secret;
pub use seek::SeekTo;
pub use snapshots::SnapshotView;
pub use subscriptions::SubscriptionView;
pub use topics::TopicView;

/// Settings the use cases obey.
#[derive(Debug, Clone)]
pub struct Options {
    /// Ack deadline of a subscription that names none, 10 to 600.
    pub default_ack_deadline_seconds: u32,
    /// Ceiling of a stream's outstanding messages when the client asks for no limit.
    pub max_outstanding_messages: u64,
    /// Leased messages of one subscription over all streams and nodes.
    pub max_inflight_per_subscription: u64,
    /// A stream is closed with UNAVAILABLE after this long, give or take a tenth.
    pub stream_close_seconds: u64,
    /// Bytes of the data of one message.
    pub max_message_bytes: usize,
    /// Total life of one lease; 0 sets no bound.
    pub max_ack_extension_seconds: u32,
    /// Shortest extension that is not refused, 0 to 10.
    pub min_ack_extension_seconds: u32,
    /// A nack is redelivered at once even under a retry policy.
    pub nack_bypasses_backoff: bool,
    /// Which nodes may settle a lease of an exactly-once subscription.
    pub exactly_once_scope: Scope,
    /// Names this node in ack ids.
    pub node_id: String,
    /// Records spans; none where nothing is traced.
    pub tracer: Option<Arc<Tracer>>,
}

/// Reach of exactly-once leases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Any node settles any lease.
    Cluster,
    /// Only the node that delivered a message settles it.
    Node,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            default_ack_deadline_seconds: 10,
            max_outstanding_messages: 1000,
            max_inflight_per_subscription: 20_000,
            stream_close_seconds: 1800,
            max_message_bytes: 10_485_760,
            max_ack_extension_seconds: 0,
            min_ack_extension_seconds: 10,
            nack_bypasses_backoff: false,
            exactly_once_scope: Scope::Cluster,
            node_id: String::new(),
            tracer: None,
        }
    }
}

/// The use cases, on top of one broker. One per process; the transports share it.
pub struct Connector {
    broker: Arc<dyn Broker>,
    options: Options,
    secret: Secret,
    catalog: Arc<catalog::Catalog>,
    delivery: channel::Delivery,
    #[cfg(feature = "transforms")]
    transforms: transforms::Pool,
    meters: Arc<meters::Meters>,
    tasks: Mutex<Vec<AbortHandle>>,
}

impl Connector {
    /// Starts the use cases: reads the cluster secret, creating it in a new store, and begins to follow the broker's events.
    /// Must be called on a tokio runtime.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when the broker can't be reached, [`Error::Internal`] when its records can't be read.
    pub async fn open(broker: Arc<dyn Broker>, options: Options) -> Result<Arc<Self>, Error> {
        let secret = Secret::load_or_create(broker.as_ref()).await?;
        let catalog = Arc::new(catalog::Catalog::new(broker.clone()));
        let follower = tokio::spawn(catalog::follow(Arc::downgrade(&catalog), broker.events()));
        let tasks = Mutex::new(vec![follower.abort_handle()]);
        let meters = Arc::new(meters::Meters::default());
        let delivery = channel::Delivery::new(broker.clone(), &options, &secret, meters.clone());
        let connector = Arc::new(Self {
            broker,
            options,
            secret,
            catalog,
            delivery,
            #[cfg(feature = "transforms")]
            transforms: transforms::Pool::new(),
            meters,
            tasks,
        });
        let forwarder =
            dead_letter::run(Arc::downgrade(&connector), connector.broker.events(), connector.delivery.draining.clone());
        let forwarder = connector.delivery.tasks.spawn(forwarder);
        connector.tasks.lock().push(forwarder.abort_handle());
        let janitor = tokio::spawn(janitor::run(Arc::downgrade(&connector)));
        connector.tasks.lock().push(janitor.abort_handle());
        Ok(connector)
    }

    /// Prepares for the end: streams end with UNAVAILABLE, long polls answer, and whatever clients have sent is settled when
    /// this returns. The broker may be closed then. New streams are refused.
    pub async fn drain(&self) {
        self.delivery.drain().await;
    }

    /// Resolves once [`drain`](Self::drain) was called.
    pub async fn stopping(&self) {
        self.delivery.draining.cancelled().await;
    }

    /// The broker behind the use cases.
    pub fn broker(&self) -> &Arc<dyn Broker> {
        &self.broker
    }

    /// What this node counts.
    pub fn meters(&self) -> &meters::Meters {
        &self.meters
    }

    /// The settings in force.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// The cluster's secret.
    pub fn secret(&self) -> &Secret {
        &self.secret
    }

    /// Finds a topic; remembered from earlier calls where possible.
    ///
    /// # Errors
    /// [`Error::NotFound`] when there is no such topic.
    pub async fn topic(&self, name: &TopicName) -> Result<Arc<TopicEntry>, Error> {
        self.catalog.topic(name).await?.ok_or_else(|| Error::not_found(name))
    }

    /// Finds a subscription; remembered from earlier calls where possible. Hold the entry and watch
    /// [`SubscriptionEntry::retired`] to hear when it must be looked up again.
    ///
    /// # Errors
    /// [`Error::NotFound`] when there is no such subscription.
    pub async fn subscription(&self, name: &SubscriptionName) -> Result<Arc<SubscriptionEntry>, Error> {
        self.catalog.subscription(name).await?.ok_or_else(|| Error::not_found(name))
    }

    /// Forgets what is remembered of a subscription, so that the next look-up reads its record. To be called when the broker
    /// answers that the queue is gone.
    pub fn forget_subscription(&self, name: &SubscriptionName) {
        self.catalog.forget_subscription(name.as_str());
    }

    /// To be called when the broker answers that it knows of a later record than this entry's. It is forgotten, unless the
    /// store lost the later record: then the entry is the latest there is, and its holder may ask again.
    ///
    /// # Errors
    /// The broker's.
    pub async fn outdated(&self, entry: &SubscriptionEntry) -> Result<(), Error> {
        let name = &entry.subscription.name;
        if self.catalog.version(Kind::Subscription, name.as_str()).await? == Some(entry.version) {
            entry.set_latest();
        } else {
            self.forget_subscription(name);
        }
        Ok(())
    }

    /// The subscription as it is now where another node may have changed it a moment ago.
    async fn current(&self, entry: Arc<SubscriptionEntry>) -> Result<Arc<SubscriptionEntry>, Error> {
        let name = &entry.subscription.name;
        if !self.broker.is_shared() || self.catalog.version(Kind::Subscription, name.as_str()).await? == Some(entry.version) {
            return Ok(entry);
        }
        self.forget_subscription(name);
        self.subscription(name).await
    }
}

impl Drop for Connector {
    fn drop(&mut self) {
        for task in self.tasks.get_mut().drain(..) {
            task.abort();
        }
    }
}

#[cfg(test)]
mod tests;
