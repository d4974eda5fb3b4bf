//! Which node pushes what: each push subscription belongs to one of the nodes that are alive.
//!
//! A node that pushes keeps a record in the store that says until when it is alive. Everybody reads all of them and gives
//! each subscription to the same node, without a word between them. While nodes come and go two of them may push one
//! subscription for some seconds; each message is still leased to one of them only.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;

use crate::broker::{Broker, BrokerError, Change, Effect, Expect, Kind, Record};

/// How often a node says that it is alive.
pub const BEAT: Duration = Duration::from_secs(2);
/// How long it is believed: some beats may be lost or late.
const LIFE_MS: u64 = 8000;
/// A record nobody renewed for this long is removed, whoever sees it.
const FORGET_MS: u64 = 600_000;
/// Nodes known at the same time.
const MAX_NODES: usize = 1000;
const PREFIX: &str = "push-nodes/";

/// The nodes that push, as this one knows them.
pub struct Nodes {
    broker: Arc<dyn Broker>,
    /// This node's record: its name is new in every run, because a node id may be configured twice.
    own: String,
    version: Option<u64>,
    alive: Vec<String>,
}

impl Nodes {
    pub fn new(broker: Arc<dyn Broker>) -> Self {
        let own = format!("{PREFIX}{:016x}", rand::random::<u64>());
        Self { broker, alive: vec![own.clone()], own, version: None }
    }

    /// Whether there may be others.
    pub fn is_shared(&self) -> bool {
        self.broker.is_shared()
    }

    /// Whether this node pushes the subscription.
    pub fn owns(&self, subscription: &str) -> bool {
        let owner = self.alive.iter().max_by_key(|node| (weight(node, subscription), node.as_str()));
        owner.is_none_or(|owner| *owner == self.own)
    }

    /// Says that this node is alive and looks who else is. Answers whether that has changed.
    ///
    /// # Errors
    /// The broker's; what was known stays.
    pub async fn beat(&mut self) -> Result<bool, BrokerError> {
        let now_ms = self.broker.now_ms();
        let expect = self.version.map_or(Expect::Absent, Expect::Version);
        let body = Bytes::from((now_ms + LIFE_MS).to_string());
        match self.write(&self.own, expect, Some(body)).await {
            Ok(version) => self.version = Some(version),
            // The store lost data, or this record was taken for a dead node's.
            Err(BrokerError::Conflict(found)) => self.version = Some(found).filter(|v| *v > 0),
            Err(error) => return Err(error),
        }
        let mut alive = Vec::new();
        for record in self.broker.list(Kind::System, PREFIX, "", MAX_NODES).await? {
            let until_ms = until_ms(&record);
            if record.name == self.own || until_ms > now_ms {
                alive.push(record.name);
            } else if until_ms + FORGET_MS < now_ms {
                // Another node may be quicker.
                let _ = self.write(&record.name, Expect::Version(record.version), None).await;
            }
        }
        if !alive.contains(&self.own) {
            alive.push(self.own.clone());
        }
        let changed = alive != self.alive;
        self.alive = alive;
        Ok(changed)
    }

    /// This node pushes no more.
    pub async fn leave(&mut self) {
        if let Some(version) = self.version.take()
            && let Err(error) = self.write(&self.own, Expect::Version(version), None).await
        {
            tracing::debug!(%error, "other nodes take over after some seconds only");
        }
    }

    async fn write(&self, name: &str, expect: Expect, body: Option<Bytes>) -> Result<u64, BrokerError> {
        self.broker.change(Change { kind: Kind::System, name: name.to_owned(), expect, body, effect: Effect::None }).await
    }
}

fn until_ms(record: &Record) -> u64 {
    std::str::from_utf8(&record.body).ok().and_then(|text| text.parse().ok()).unwrap_or(0)
}

/// How much a node wants a subscription. All nodes must agree, so this may never change (FNV-1a, then mixed).
fn weight(node: &str, subscription: &str) -> u64 {
    let bytes = node.bytes().chain([0]).chain(subscription.bytes());
    let sum = bytes.fold(0xcbf2_9ce4_8422_2325, |sum: u64, byte| (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    let sum = (sum ^ (sum >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    sum ^ (sum >> 33)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broker::embedded::Embedded;

    #[tokio::test]
    async fn every_subscription_has_one_owner_and_moves_when_its_node_leaves() {
        let broker: Arc<dyn Broker> = Embedded::memory();
        let mut nodes: Vec<Nodes> = (0..3).map(|_| Nodes::new(broker.clone())).collect();
        for _ in 0..2 {
            for node in &mut nodes {
                node.beat().await.unwrap();
            }
        }
        let names: Vec<String> = (0..300).map(|n| format!("projects/p/subscriptions/s{n}")).collect();
        let owned = |nodes: &[Nodes]| -> Vec<usize> {
            nodes.iter().map(|node| names.iter().filter(|name| node.owns(name)).count()).collect()
        };
        let before = owned(&nodes);
        assert_eq!(before.iter().sum::<usize>(), 300);
        assert!(before.iter().all(|count| (60..=140).contains(count)), "{before:?}");
        let mut gone = nodes.pop().unwrap();
        let orphans: Vec<_> = names.iter().filter(|name| gone.owns(name)).collect();
        gone.leave().await;
        for node in &mut nodes {
            assert!(node.beat().await.unwrap());
            assert!(!node.beat().await.unwrap());
        }
        assert_eq!(owned(&nodes).iter().sum::<usize>(), 300);
        assert!(orphans.iter().all(|name| nodes.iter().filter(|node| node.owns(name)).count() == 1));
    }
}
