//! Resource records as the data path needs them: parsed, compiled and remembered.
//!
//! Reads go through to the broker on a miss. A change made here is forgotten at once, one made by another node when its
//! event arrives; until then a lagging view is caught by the broker, which answers `Stale` or `Gone`. What such a view alone
//! refuses is not refused before the records were looked at once more.

use std::{
    collections::HashMap,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use parking_lot::RwLock;
use serde::de::DeserializeOwned;
use tokio::sync::broadcast::{Receiver, error::RecvError};
use tokio_util::sync::CancellationToken;

#[cfg(feature = "schemas")]
use super::schemas::SchemaEntry;
use super::{
    Error,
    meters::{Meters, TopicMeter},
    record,
    transforms::{Pipeline, pipeline},
};
use crate::{
    broker::{Broker, BrokerError, Change, Event, Kind, QueueRef, Record, TopicRef},
    model::{Subscription, SubscriptionName, Topic, TopicName},
    rules::filter::Filter,
};

/// Entries remembered of one kind. Ten projects' worth of the API's own quota of 10,000; beyond it everything is forgotten
/// and read again, which costs one broker read an entry.
const MAX_ENTRIES: usize = 100_000;
/// Schemas remembered. Each may have megabytes of definitions.
#[cfg(feature = "schemas")]
const MAX_SCHEMAS: usize = 1000;
/// Reads of one record before giving up on a view that no change interrupts.
const LOAD_TRIES: usize = 16;

/// A topic as remembered.
#[derive(Debug)]
pub struct TopicEntry {
    pub topic: Topic,
    /// Version of the record.
    pub version: u64,
    /// How the broker knows the topic.
    pub reference: TopicRef,
    /// The enabled transforms.
    pub(super) transforms: Pipeline,
    meter: OnceLock<Arc<TopicMeter>>,
    route: RwLock<Option<Arc<Route>>>,
}

/// The queues of a topic and what they take.
#[derive(Debug, Default)]
pub(super) struct Route {
    /// As the broker counts it.
    pub version: u64,
    /// Version of the topic's schema; none without one.
    pub schema: Option<u64>,
    pub targets: Vec<RouteTarget>,
    /// The different filters of the targets.
    pub filters: Vec<Filter>,
}

/// One queue of a route.
#[derive(Debug)]
pub(super) struct RouteTarget {
    pub queue: QueueRef,
    /// Index of its filter; none takes every message.
    pub filter: Option<usize>,
}

impl Route {
    pub fn add(&mut self, queue: QueueRef, filter: Option<&Filter>) {
        let filter = filter.map(|filter| {
            self.filters.iter().position(|known| known == filter).unwrap_or_else(|| {
                self.filters.push(filter.clone());
                self.filters.len() - 1
            })
        });
        self.targets.push(RouteTarget { queue, filter });
    }
}

/// A subscription as remembered.
#[derive(Debug)]
pub struct SubscriptionEntry {
    pub subscription: Subscription,
    /// Version of the record.
    pub version: u64,
    /// How the broker knows the subscription's queue.
    pub queue: QueueRef,
    /// The compiled filter; none takes every message.
    pub filter: Option<Filter>,
    /// The enabled transforms.
    pub(super) transforms: Pipeline,
    retired: CancellationToken,
    /// The record is the latest there is, whatever the queue says.
    latest: AtomicBool,
}

impl TopicEntry {
    fn new(topic: Topic, version: u64) -> Self {
        let (reference, transforms) = (topic_ref(&topic.name, topic.incarnation), pipeline(&topic.message_transforms));
        Self { reference, transforms, topic, version, meter: OnceLock::new(), route: RwLock::new(None) }
    }

    /// Its counters, looked up once.
    pub(super) fn meter(&self, meters: &Meters) -> &TopicMeter {
        self.meter.get_or_init(|| meters.topics.get(&self.reference.channel))
    }

    pub(super) fn route(&self) -> Option<Arc<Route>> {
        self.route.read().clone()
    }

    pub(super) fn remember_route(&self, route: Arc<Route>) {
        let mut known = self.route.write();
        if known.as_ref().is_none_or(|known| known.version < route.version) {
            *known = Some(route);
        }
    }

    /// The broker called this version stale.
    pub(super) fn forget_route(&self, version: u64) {
        let mut known = self.route.write();
        if known.as_ref().is_some_and(|known| known.version <= version) {
            *known = None;
        }
    }
}

impl SubscriptionEntry {
    fn new(subscription: Subscription, version: u64) -> Result<Self, Error> {
        let queue = queue_ref(&subscription);
        let filter = match subscription.filter.as_str() {
            "" => None,
            text => Some(Filter::parse(text).map_err(|e| {
                Error::Internal(format!("the record {} has a filter that can't be read: {e}", subscription.name))
            })?),
        };
        let transforms = pipeline(&subscription.message_transforms);
        Ok(Self {
            subscription,
            version,
            queue,
            filter,
            transforms,
            retired: CancellationToken::new(),
            latest: AtomicBool::new(false),
        })
    }

    /// What a [lease request](crate::broker::LeaseRequest) names as the record's version.
    pub fn lease_version(&self) -> u64 {
        if self.latest.load(Ordering::Acquire) { 0 } else { self.version }
    }

    pub(super) fn set_latest(&self) {
        self.latest.store(true, Ordering::Release);
    }

    /// Resolves once the entry is out of date: the record changed or was deleted, or may have been. Look it up again then.
    pub async fn retired(&self) {
        self.retired.cancelled().await;
    }

    /// True once the entry is out of date.
    pub fn is_retired(&self) -> bool {
        self.retired.is_cancelled()
    }
}

/// How the broker knows a topic.
pub fn topic_ref(name: &TopicName, incarnation: u64) -> TopicRef {
    TopicRef { channel: format!("{}/{}", name.project(), name.id()).into(), incarnation }
}

/// How the broker knows a subscription's queue.
pub fn queue_ref(subscription: &Subscription) -> QueueRef {
    let name = &subscription.name;
    QueueRef { channel: format!("{}/{}", name.project(), name.id()).into(), incarnation: subscription.incarnation }
}

pub(super) trait Entry: Send + Sync {
    fn version(&self) -> u64;
    fn retire(&self);
}

impl Entry for TopicEntry {
    fn version(&self) -> u64 {
        self.version
    }
    fn retire(&self) {}
}

impl Entry for SubscriptionEntry {
    fn version(&self) -> u64 {
        self.version
    }
    fn retire(&self) {
        self.retired.cancel();
    }
}

/// Entries of one kind by full name. The generation counts what was forgotten, so that a read that began before a change
/// can't leave its outcome here after it.
struct Cache<E> {
    state: RwLock<State<E>>,
    max_entries: usize,
}

struct State<E> {
    entries: HashMap<Arc<str>, Arc<E>>,
    generation: u64,
}

impl<E: Entry> Cache<E> {
    fn new(max_entries: usize) -> Self {
        Self { state: RwLock::new(State { entries: HashMap::new(), generation: 0 }), max_entries }
    }

    fn get(&self, name: &str) -> Option<Arc<E>> {
        self.state.read().entries.get(name).cloned()
    }

    fn generation(&self) -> u64 {
        self.state.read().generation
    }

    /// Remembers what was read while the generation was `generation`; `None` when something was forgotten since.
    fn insert(&self, generation: u64, name: Arc<str>, entry: Arc<E>) -> Option<Arc<E>> {
        let mut state = self.state.write();
        if state.generation != generation {
            return None;
        }
        if state.entries.len() >= self.max_entries {
            state.forget_all();
        }
        match state.entries.get(&name) {
            Some(known) if known.version() >= entry.version() => Some(known.clone()),
            _ => {
                if let Some(old) = state.entries.insert(name, entry.clone()) {
                    old.retire();
                }
                Some(entry)
            }
        }
    }

    fn forget(&self, name: &str) {
        let mut state = self.state.write();
        state.generation += 1;
        if let Some(old) = state.entries.remove(name) {
            old.retire();
        }
    }

    fn forget_all(&self) {
        self.state.write().forget_all();
    }
}

impl<E: Entry> State<E> {
    fn forget_all(&mut self) {
        self.generation += 1;
        for (_, old) in self.entries.drain() {
            old.retire();
        }
    }
}

/// What the connector remembers of resources.
pub(super) struct Catalog {
    broker: Arc<dyn Broker>,
    topics: Cache<TopicEntry>,
    subscriptions: Cache<SubscriptionEntry>,
    #[cfg(feature = "schemas")]
    schemas: Cache<SchemaEntry>,
}

impl Catalog {
    pub fn new(broker: Arc<dyn Broker>) -> Self {
        Self {
            broker,
            topics: Cache::new(MAX_ENTRIES),
            subscriptions: Cache::new(MAX_ENTRIES),
            #[cfg(feature = "schemas")]
            schemas: Cache::new(MAX_SCHEMAS),
        }
    }

    pub async fn topic(&self, name: &TopicName) -> Result<Option<Arc<TopicEntry>>, Error> {
        match self.topics.get(name.as_str()) {
            Some(entry) => Ok(Some(entry)),
            None => {
                let make = |record: &Record| Ok(TopicEntry::new(record::decode(record)?, record.version));
                self.load(&self.topics, Kind::Topic, name.shared(), make).await
            }
        }
    }

    pub async fn subscription(&self, name: &SubscriptionName) -> Result<Option<Arc<SubscriptionEntry>>, Error> {
        match self.subscriptions.get(name.as_str()) {
            Some(entry) => Ok(Some(entry)),
            None => {
                let make = |record: &Record| SubscriptionEntry::new(record::decode(record)?, record.version);
                self.load(&self.subscriptions, Kind::Subscription, name.shared(), make).await
            }
        }
    }

    #[cfg(feature = "schemas")]
    pub async fn schema(&self, name: &crate::model::SchemaName) -> Result<Option<Arc<SchemaEntry>>, Error> {
        match self.schemas.get(name.as_str()) {
            Some(entry) => Ok(Some(entry)),
            None => {
                let make = |record: &Record| Ok(SchemaEntry::new(record::decode(record)?, record.version));
                self.load(&self.schemas, Kind::Schema, name.shared(), make).await
            }
        }
    }

    /// The version of a record past the cache; none when there is no such record.
    pub async fn version(&self, kind: Kind, name: &str) -> Result<Option<u64>, Error> {
        Ok(self.broker.get(kind, name).await?.map(|record| record.version))
    }

    /// Reads a record past the cache: the truth at this moment, with its version.
    pub async fn read<T: DeserializeOwned>(&self, kind: Kind, name: &str) -> Result<Option<(T, u64)>, Error> {
        match self.broker.get(kind, name).await? {
            Some(found) => Ok(Some((record::decode(&found)?, found.version))),
            None => Ok(None),
        }
    }

    async fn load<E: Entry>(
        &self,
        cache: &Cache<E>,
        kind: Kind,
        name: Arc<str>,
        make: impl Fn(&Record) -> Result<E, Error>,
    ) -> Result<Option<Arc<E>>, Error> {
        let mut tries = LOAD_TRIES;
        loop {
            let generation = cache.generation();
            let Some(found) = self.broker.get(kind, &name).await? else { return Ok(None) };
            let entry = Arc::new(make(&found)?);
            if let Some(remembered) = cache.insert(generation, name.clone(), entry.clone()) {
                return Ok(Some(remembered));
            }
            tries -= 1;
            if tries == 0 {
                // True when it was read. Nobody would retire it later, so its holder has to look again soon.
                entry.retire();
                return Ok(Some(entry));
            }
        }
    }

    /// Carries out a change and forgets the resource. The change goes on if the caller stops waiting, so that a remembered
    /// entry can't outlive it.
    pub async fn change(self: &Arc<Self>, change: Change) -> Result<u64, BrokerError> {
        let catalog = self.clone();
        let task = tokio::spawn(async move {
            let (kind, name) = (change.kind, change.name.clone());
            let outcome = catalog.broker.change(change).await;
            catalog.apply(&Event::RecordChanged { kind, name });
            outcome
        });
        task.await.unwrap_or_else(|e| Err(BrokerError::Unavailable(format!("the change was interrupted: {e}"))))
    }

    pub fn forget_topic(&self, name: &str) {
        self.topics.forget(name);
    }

    pub fn forget_subscription(&self, name: &str) {
        self.subscriptions.forget(name);
    }

    #[cfg(feature = "schemas")]
    pub fn forget_schema(&self, name: &str) {
        self.schemas.forget(name);
    }

    fn forget_all(&self) {
        self.topics.forget_all();
        self.subscriptions.forget_all();
        #[cfg(feature = "schemas")]
        self.schemas.forget_all();
    }

    fn apply(&self, event: &Event) {
        match event {
            Event::RecordChanged { kind: Kind::Topic, name } => self.forget_topic(name),
            Event::RecordChanged { kind: Kind::Subscription, name } => self.forget_subscription(name),
            #[cfg(feature = "schemas")]
            Event::RecordChanged { kind: Kind::Schema, name } => self.schemas.forget(name),
            Event::RecordChanged { .. } | Event::DeadLetters(_) => {}
            Event::Reset => self.forget_all(),
        }
    }
}

/// Forgets what changed elsewhere, until the broker or the connector is gone.
pub(super) async fn follow(catalog: Weak<Catalog>, mut events: Receiver<Event>) {
    loop {
        let event = match events.recv().await {
            Ok(event) => event,
            Err(RecvError::Lagged(_)) => Event::Reset,
            Err(RecvError::Closed) => return,
        };
        match catalog.upgrade() {
            Some(catalog) => catalog.apply(&event),
            None => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::broadcast;

    use super::*;
    use crate::{
        broker::embedded::Embedded,
        connector::{Connector, Options, draft::TopicDraft},
    };

    struct Numbered(u64, CancellationToken);

    impl Entry for Numbered {
        fn version(&self) -> u64 {
            self.0
        }
        fn retire(&self) {
            self.1.cancel();
        }
    }

    fn numbered(version: u64) -> Arc<Numbered> {
        Arc::new(Numbered(version, CancellationToken::new()))
    }

    #[test]
    fn what_was_read_before_a_change_is_not_remembered_after_it() {
        let cache = Cache::new(MAX_ENTRIES);
        let generation = cache.generation();
        cache.forget("another");
        assert!(cache.insert(generation, "name".into(), numbered(1)).is_none());
        assert!(cache.get("name").is_none());
    }

    #[test]
    fn of_two_reads_at_once_the_newer_version_stays() {
        let cache = Cache::new(MAX_ENTRIES);
        let (old, new) = (numbered(1), numbered(2));
        assert_eq!(cache.insert(0, "name".into(), old.clone()).unwrap().version(), 1);
        assert_eq!(cache.insert(0, "name".into(), new.clone()).unwrap().version(), 2);
        assert_eq!(cache.insert(0, "name".into(), numbered(1)).unwrap().version(), 2);
        assert_eq!((old.1.is_cancelled(), new.1.is_cancelled()), (true, false));
        cache.forget("name");
        assert!(new.1.is_cancelled() && cache.get("name").is_none());
    }

    #[tokio::test]
    async fn a_follower_that_fell_behind_forgets_everything() {
        let broker = Embedded::memory();
        let connector = Connector::open(broker.clone(), Options::default()).await.unwrap();
        let name = TopicName::new("p1", "t11").unwrap();
        connector.create_topic(TopicDraft { name: name.to_string(), ..TopicDraft::default() }).await.unwrap();
        let catalog = Arc::new(Catalog::new(broker));
        let known = catalog.topic(&name).await.unwrap().unwrap();
        assert!(Arc::ptr_eq(&known, &catalog.topic(&name).await.unwrap().unwrap()));
        // Room for one event: the first is lost, and the second is about something else.
        let (events, receiver) = broadcast::channel(1);
        for name in ["a", "b"] {
            events.send(Event::RecordChanged { kind: Kind::Schema, name: name.into() }).unwrap();
        }
        drop(events);
        follow(Arc::downgrade(&catalog), receiver).await;
        assert!(!Arc::ptr_eq(&known, &catalog.topic(&name).await.unwrap().unwrap()));
    }
}
