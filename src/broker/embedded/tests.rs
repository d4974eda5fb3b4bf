//! The engine through the port, on a clock that is set by hand, checked against what the port promises.

mod clock;
mod model;
mod promises;
mod room;

use std::sync::{Arc, atomic::AtomicU64};

use super::*;
use crate::{
    broker::{
        Expect, Target,
        rig::{self, START_MS, account, change, ledger, retry, text},
    },
    model::EncodedMessage,
};

/// Of a broker on disk: so small that tests fill several.
pub const SEGMENT_BYTES: u32 = 256 << 10;

pub type Rig = rig::Rig<Embedded>;

impl Rig {
    pub async fn new() -> Self {
        Self::with_topic_retention(None).await
    }

    pub async fn with_topic_retention(retention_ms: Option<u64>) -> Self {
        let clock = Arc::new(AtomicU64::new(START_MS));
        let broker = Embedded::memory_with_clock(Clock::Manual(clock.clone()));
        Self::with_topic(broker, clock, retention_ms).await
    }

    /// A broker on disk, with small segments.
    pub async fn on_disk(directory: &Path) -> Self {
        let clock = Arc::new(AtomicU64::new(START_MS));
        let broker = Self::open(directory, &clock);
        Self::with_topic(broker, clock, None).await
    }

    /// Nothing is synced: the process doesn't die with the power.
    fn open(directory: &Path, clock: &Arc<AtomicU64>) -> Arc<Embedded> {
        let segment_bytes = SEGMENT_BYTES;
        let options = LogOptions { segment_bytes, ..LogOptions::on_disk(directory, Durability::None) };
        Embedded::start(options, Clock::Manual(clock.clone())).unwrap()
    }

    /// The broker again, from what is on disk.
    pub fn restart(self, directory: &Path) -> Self {
        let Self { broker, clock, topic, versions } = self;
        drop(broker);
        let broker = Self::open(directory, &clock);
        Self { broker, clock, topic, versions }
    }

    /// Empties segments with at most `sparse` needed bytes, as a checkpoint does, and takes the checkpoint that lets go of
    /// them.
    pub fn gather(&self, sparse: u64, directory: Option<&Path>) {
        let shared = &self.broker.shared;
        while let Err(error) = gather::gather_where(shared, sparse, u64::from(SEGMENT_BYTES) / 2) {
            assert!(matches!(error, BrokerError::Unavailable(_)), "{error}");
            std::thread::yield_now();
        }
        checkpoint::write(shared, directory).unwrap();
    }
}

#[tokio::test]
async fn leases_that_run_out_are_counted_since_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::on_disk(folder.path()).await;
    let queue = rig.queue(1, |_| {}).await;
    rig.publish(&["a", "b", "c"]).await;
    let expired = async |rig: &Rig| rig.broker.stats(&queue).await.unwrap().expired_leases;
    let leased = rig.pull(&queue, 3).await;
    rig.modify(&queue, &leased[..1], 0).await;
    assert_eq!(expired(&rig).await, Some(0));
    rig.pass(10_050);
    assert_eq!(expired(&rig).await, Some(2));
    let rig = rig.restart(folder.path());
    assert_eq!(expired(&rig).await, Some(0));
}

#[tokio::test]
async fn a_crash_forgets_no_more_than_an_hour_of_use() {
    const HOUR_MS: u64 = 3_600_000;
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::on_disk(folder.path()).await;
    let queue = rig.queue(1, |_| {}).await;
    for hour in 1..=50 {
        rig.pass(HOUR_MS);
        if hour % 2 == 0 {
            rig.pull(&queue, 1).await;
        } else {
            rig.broker.touch(&queue).await.unwrap();
        }
    }
    let rig = rig.restart(folder.path());
    let active_ms = rig.broker.stats(&queue).await.unwrap().last_active_ms - START_MS;
    assert!(active_ms >= 49 * HOUR_MS, "{active_ms}");
}

#[tokio::test]
async fn after_a_restart_a_key_still_belongs_to_the_session_that_has_its_first_message() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = Rig::on_disk(folder.path()).await;
    let queue = rig.queue(1, |c| c.ordered = true).await;
    rig.publish_keyed(&[("a", "k"), ("b", "k"), ("c", "k")]).await;
    // Given back, so that all of it waits in line for anybody, and then the first of the line is taken.
    let leased = rig.pull(&queue, 3).await;
    rig.modify(&queue, &leased[..1], 0).await;
    assert_eq!(rig.texts(&queue, 1).await, ["a"]);
    let rig = rig.restart(folder.path());
    assert_eq!(rig.texts(&queue, 3).await, [""; 0]);
    rig.pass(10_050);
    assert_eq!(rig.texts(&queue, 3).await, ["a", "b", "c"]);
}
