//! The engine through the port on real servers: the same promises as the embedded engine, and what several nodes, lost
//! connections and lost data add.

mod cluster;
mod model;
mod nodes;
mod proxy;
mod rounds;
pub mod server;
mod trouble;

// The very tests of the embedded engine: both must keep the same promises.
#[allow(clippy::duplicate_mod)]
#[path = "../embedded/tests/promises.rs"]
mod promises;

use std::sync::atomic::AtomicU64;

use super::*;
use crate::{
    broker::{
        Effect, Expect, QueueConfig, Target, TopicConfig, next_session_id,
        rig::{self, START_MS, account, change, lease_request, ledger, retry, text},
    },
    model::EncodedMessage,
};

pub type Rig = rig::Rig<Redis>;

impl Rig {
    pub async fn new() -> Self {
        Self::with_topic_retention(None).await
    }

    pub async fn with_topic_retention(retention_ms: Option<u64>) -> Self {
        Self::on(&server::empty_database(), retention_ms).await
    }

    pub async fn on(url: &str, retention_ms: Option<u64>) -> Self {
        Self::with(url, retention_ms, Durability::AsConfigured).await
    }

    pub async fn with(url: &str, retention_ms: Option<u64>, durability: Durability) -> Self {
        let clock = Arc::new(AtomicU64::new(START_MS));
        let options = Options { set_clock: Some(clock.clone()), durability };
        let broker = Redis::start(url, options).await.unwrap();
        Self::with_topic(broker, clock, retention_ms).await
    }
}

/// Waits until something holds.
pub async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let until = tokio::time::Instant::now() + Duration::from_secs(20);
    while !holds().await {
        assert!(tokio::time::Instant::now() < until, "{what} did not happen");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
