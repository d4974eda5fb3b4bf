//! What this node keeps for every subscription it delivers from or settles for, shared by its streams and calls.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    Options, Secret,
    ack_id::{AckIds, Minter},
    dead_letter::DeadLetterCounts,
    meters::{Meters, SubscriptionMeter},
    settle::lane::{Acks, Changes, Lane},
};
use crate::broker::{Broker, LeaseToken, QueueRef, Session};

/// Channels kept before unused ones are dropped. One takes about 600 bytes.
const FEW_CHANNELS: usize = 1024;

/// One incarnation of a subscription, as this node delivers it.
pub(super) struct Channel {
    pub queue: QueueRef,
    pub minter: Minter,
    pub acks: Arc<Lane<Acks>>,
    pub changes: Arc<Lane<Changes>>,
    pub meter: Arc<SubscriptionMeter>,
}

/// Everything that delivery shares on one node.
pub(super) struct Delivery {
    broker: Arc<dyn Broker>,
    ids: AckIds,
    meters: Arc<Meters>,
    channels: Mutex<Channels>,
    /// Set when the server stops: streams end, long polls answer.
    pub draining: CancellationToken,
    /// Everything that must be done before the broker may be closed.
    pub tasks: TaskTracker,
    pub dead_letters: DeadLetterCounts,
}

#[derive(Default)]
struct Channels {
    /// By the queue's incarnation.
    known: HashMap<u64, Arc<Channel>>,
    purge_at: usize,
}

impl Delivery {
    pub fn new(broker: Arc<dyn Broker>, options: &Options, secret: &Secret, meters: Arc<Meters>) -> Self {
        Self {
            broker,
            ids: AckIds::new(secret.key("ack id"), &options.node_id),
            meters,
            channels: Mutex::new(Channels { known: HashMap::new(), purge_at: FEW_CHANNELS }),
            draining: CancellationToken::new(),
            tasks: TaskTracker::new(),
            dead_letters: DeadLetterCounts::default(),
        }
    }

    /// What is kept for this queue.
    pub fn channel(&self, queue: &QueueRef) -> Arc<Channel> {
        let mut channels = self.channels.lock();
        if let Some(channel) = channels.known.get(&queue.incarnation) {
            return channel.clone();
        }
        if channels.known.len() >= channels.purge_at {
            channels.known.retain(|_, channel| Arc::strong_count(channel) > 1);
            channels.purge_at = FEW_CHANNELS.max(channels.known.len() * 2);
        }
        let channel = Arc::new(Channel {
            queue: queue.clone(),
            minter: self.ids.minter(queue),
            meter: self.meters.subscriptions.get(&queue.channel),
            acks: Lane::new(self.broker.clone(), queue.clone(), self.tasks.clone()),
            changes: Lane::new(self.broker.clone(), queue.clone(), self.tasks.clone()),
        });
        channels.known.insert(queue.incarnation, channel.clone());
        channel
    }

    /// Begins a session on a queue; it ends when the answer is dropped.
    pub fn attach(&self, queue: &QueueRef) -> Attached {
        let session = Session::new(crate::broker::next_session_id());
        self.broker.attach(queue, &session);
        Attached { broker: self.broker.clone(), queue: queue.clone(), session }
    }

    /// Gives back leases that nobody received, without waiting.
    pub fn release(&self, queue: &QueueRef, tokens: Vec<LeaseToken>) {
        release(&self.broker, &self.tasks, queue, tokens);
    }

    /// Ends streams and long polls, and waits until everything received from clients is settled.
    pub async fn drain(&self) {
        self.draining.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}

/// Gives back leases that nobody received, without waiting. Also callable from `drop`.
pub(super) fn release(broker: &Arc<dyn Broker>, tasks: &TaskTracker, queue: &QueueRef, tokens: Vec<LeaseToken>) {
    if tokens.is_empty() {
        return;
    }
    // Without a runtime the process is at its end, and the leases run out by themselves.
    let Ok(runtime) = Handle::try_current() else { return };
    let (broker, queue) = (broker.clone(), queue.clone());
    tasks.spawn_on(
        async move {
            if let Err(error) = broker.release(&queue, &tokens).await {
                tracing::debug!(channel = %queue.channel, %error, "undelivered messages not given back, their leases run out");
            }
        },
        &runtime,
    );
}

/// Leases that are given back, as if they had never been given, unless they are forgotten before this is dropped.
#[cfg(feature = "transforms")]
pub(super) struct Held<'a> {
    broker: &'a Arc<dyn Broker>,
    tasks: TaskTracker,
    queue: &'a QueueRef,
    /// In the order of the leases, so that they go back in order.
    tokens: Vec<LeaseToken>,
}

#[cfg(feature = "transforms")]
impl<'a> Held<'a> {
    pub fn new(
        broker: &'a Arc<dyn Broker>,
        tasks: TaskTracker,
        queue: &'a QueueRef,
        tokens: impl IntoIterator<Item = LeaseToken>,
    ) -> Self {
        Self { broker, tasks, queue, tokens: tokens.into_iter().collect() }
    }

    /// Somebody else looks after these.
    pub fn forget(&mut self, tokens: &[LeaseToken]) {
        let known: std::collections::HashSet<_> = tokens.iter().collect();
        self.tokens.retain(|token| !known.contains(token));
    }
}

#[cfg(feature = "transforms")]
impl Drop for Held<'_> {
    fn drop(&mut self) {
        release(self.broker, &self.tasks, self.queue, std::mem::take(&mut self.tokens));
    }
}

/// A session that takes part in its queue's hand-out until this is dropped.
pub(super) struct Attached {
    broker: Arc<dyn Broker>,
    queue: QueueRef,
    pub session: Arc<Session>,
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.broker.detach(&self.queue, &self.session);
    }
}
