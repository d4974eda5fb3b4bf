//! Who is there: what a dead node left is taken over when its death is noticed, so that idle queues need not be looked at.
//!
//! Every node has a channel of its own. A channel without a listener means that its node is dead, and all others look at all
//! queues once. That a node hears its own channel is tested as well, because a link that is cut in silence looks like one
//! on which nothing is said. As a last resort every queue is looked at now and then, a few in each round.

use std::{
    collections::HashSet,
    sync::{Arc, Weak, atomic::Ordering},
    time::Duration,
};

use redis::{Cmd, Value, cmd};

use super::{
    connection::Request,
    engine::{Engine, array, bytes},
    queue::queue_of,
    records::CATALOG,
};
use crate::broker::BrokerError;

/// Marks a notice by which a node tests its own channel; a number follows that grows.
pub const PING: u8 = b'P';

/// Pause between rounds: the longest time until a dead node is noticed, and half of that until a lost channel is.
const ROUND: Duration = Duration::from_secs(10);
/// Rounds in which every queue is looked at once, half an hour: the node that uses a queue is told of what happens there,
/// and notes the use, which counts in days, this often.
const ROUNDS_OF_ALL: usize = 180;
/// Queues looked at together.
const BATCH: usize = 50;

/// A node's own channel.
pub fn node_channel(node: &str) -> String {
    format!("gcp.node:{node}")
}

/// A command on the set of all nodes.
fn on_nodes(name: &str) -> Cmd {
    let mut command = cmd(name);
    command.arg(format!("{CATALOG}:nodes"));
    command
}

/// What a node knows from earlier rounds.
#[derive(Default)]
pub struct Watch {
    /// The other nodes that were there; nothing before the first round.
    others: Option<HashSet<String>>,
    /// Keys of queues and topics that are still to be looked at.
    left: Vec<String>,
    per_round: usize,
    pings: u64,
    /// Over which notice channel, in the order they were opened, the last ping was sent.
    pinged: Option<u64>,
}

impl Engine {
    /// Looks for dead nodes, and at what is due to be looked at.
    ///
    /// # Errors
    /// [`BrokerError::Unavailable`]; the rest is done in the next round.
    pub async fn round(self: &Arc<Self>, watch: &mut Watch) -> Result<(), BrokerError> {
        self.complete_left_behind().await?;
        self.forget_idle_publishers();
        self.test_channel(watch).await?;
        let somebody_died = match self.find_dead(watch).await {
            Ok(died) => died,
            Err(BrokerError::Unavailable(reason)) => {
                tracing::debug!(reason, "could not find out which nodes are there");
                true
            }
            Err(e) => return Err(e),
        };
        if somebody_died {
            let all = self.registered().await?;
            return self.look_at(&all).await;
        }
        if watch.left.is_empty() {
            watch.left = self.registered().await?;
            watch.per_round = watch.left.len().div_ceil(ROUNDS_OF_ALL);
        }
        let from = watch.left.len().saturating_sub(watch.per_round);
        let part = watch.left.split_off(from);
        self.look_at(&part).await
    }

    /// Opens the notice channel again when the last ping over it has not come back.
    async fn test_channel(&self, watch: &mut Watch) -> Result<(), BrokerError> {
        let opened = self.opened.load(Ordering::Acquire);
        let last = watch.pinged.take();
        if opened == 0 {
            return Ok(());
        }
        if last == Some(opened) && self.heard.load(Ordering::Acquire) < watch.pings {
            self.deaf.notify_waiters();
            return Ok(());
        }
        watch.pings += 1;
        watch.pinged = Some(opened);
        let mut ping = vec![PING];
        ping.extend_from_slice(&watch.pings.to_le_bytes());
        let mut publish = cmd("PUBLISH");
        publish.arg(node_channel(&self.node_hex())).arg(ping);
        self.catalog(publish).await.map(drop)
    }

    /// Tells the others that this node is there. Its channel has to be open: without it they would take it for dead.
    pub(super) async fn join(&self) -> Result<(), BrokerError> {
        let mut join = on_nodes("SADD");
        join.arg(self.node_hex());
        self.catalog(join).await.map(drop)
    }

    /// Answers whether a node has died since the last round, or this is the first.
    async fn find_dead(&self, watch: &mut Watch) -> Result<bool, BrokerError> {
        let members = array(self.catalog(on_nodes("SMEMBERS")).await?)?;
        let mut others = HashSet::new();
        for member in &members {
            others.insert(String::from_utf8_lossy(bytes(member)?).into_owned());
        }
        if !others.remove(&self.node_hex()) && self.opened.load(Ordering::Acquire) > 0 {
            self.join().await?;
        }
        let dead = self.without_listener(&others).await?;
        for node in &dead {
            tracing::info!(node, "a node is gone; what it left is taken over");
            let mut leave = on_nodes("SREM");
            leave.arg(node);
            self.catalog(leave).await?;
            others.remove(node);
        }
        // Another node may have found it first and struck it off.
        let died = watch.others.as_ref().is_none_or(|known| !known.is_subset(&others)) || !dead.is_empty();
        watch.others = Some(others);
        Ok(died)
    }

    /// The nodes that nobody is for on any server.
    async fn without_listener(&self, nodes: &HashSet<String>) -> Result<HashSet<String>, BrokerError> {
        let mut silent = nodes.clone();
        if nodes.is_empty() {
            return Ok(silent);
        }
        for server in self.shards.masters() {
            let mut count = cmd("PUBSUB");
            count.arg("NUMSUB");
            nodes.iter().for_each(|node| {
                count.arg(node_channel(node));
            });
            let answer = array(self.shards.call_at(&server, &Request::One(count), false).await?)?;
            for pair in answer.chunks_exact(2) {
                if let [channel, Value::Int(1..)] = pair {
                    let channel = String::from_utf8_lossy(bytes(channel)?).into_owned();
                    silent.retain(|node| node_channel(node) != channel);
                }
            }
        }
        Ok(silent)
    }

    /// Looks at queues and topics, a batch at a time.
    async fn look_at(self: &Arc<Self>, keys: &[String]) -> Result<(), BrokerError> {
        for batch in keys.chunks(BATCH) {
            batch.iter().filter(|key| queue_of(key).is_none()).for_each(|topic| self.purge_later(topic.clone()));
            let looks = batch.iter().filter_map(|key| queue_of(key)).map(|queue| {
                let queue = self.queue(&queue);
                async move {
                    let what = if queue.is_hungry() {
                        "1"
                    } else if queue.is_in_use() {
                        "3"
                    } else {
                        "0"
                    };
                    self.sweep(&queue, what).await;
                }
            });
            futures::future::join_all(looks).await;
        }
        Ok(())
    }
}

/// One round after the other.
pub async fn run_rounds(engine: Weak<Engine>) {
    let mut watch = Watch::default();
    loop {
        {
            let Some(engine) = engine.upgrade() else { return };
            if let Err(e) = engine.round(&mut watch).await {
                tracing::debug!(error = %e, "a round could not be finished");
            }
        }
        tokio::time::sleep(ROUND).await;
    }
}
