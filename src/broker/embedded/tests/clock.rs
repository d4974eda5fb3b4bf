//! A clock that is set back, as by an operator or a time server, while messages wait for a time or are published.

use super::*;

const HOUR_MS: u64 = 3_600_000;

impl Rig {
    /// The broker has seen the time up to now: a clock that stands still can't tell how much passed unseen.
    async fn set_back(&self, by_ms: u64) {
        self.broker.touch(&self.config(1).queue).await.unwrap();
        self.clock.fetch_sub(by_ms, Ordering::AcqRel);
    }

    /// Publish times of messages as subscribers see them.
    fn times(leased: &[Leased]) -> Vec<u64> {
        leased.iter().map(|leased| EncodedMessage::sealed(&leased.message).unwrap().1).collect()
    }
}

#[tokio::test]
async fn a_clock_that_is_set_back_makes_no_lease_longer() {
    let mut rig = Rig::new().await;
    let queue = rig.queue(1, |_| {}).await;
    rig.publish(&["m", "later"]).await;
    assert_eq!(rig.texts(&queue, 1).await, ["m"]);
    rig.pass(3_000);
    rig.set_back(HOUR_MS).await;
    let extended = rig.pull(&queue, 1).await;
    rig.modify(&queue, &extended, 20_000).await;
    rig.pass(6_999);
    assert!(rig.pull(&queue, 1).await.is_empty());
    rig.pass(51);
    assert_eq!(rig.texts(&queue, 10).await, ["m"]);
    rig.pass(10_050);
    rig.set_back(2 * HOUR_MS).await;
    assert_eq!(rig.texts(&queue, 1).await, ["m"]);
    rig.pass(3_000);
    assert_eq!(rig.texts(&queue, 10).await, ["later"]);
}

#[tokio::test]
async fn a_lease_is_not_longer_when_nobody_asks_after_the_clock_was_set_back() {
    let mut rig = Rig::new().await;
    let queue = rig.queue(1, |_| {}).await;
    let session = rig.session(&queue);
    rig.publish(&["m"]).await;
    assert_eq!(rig.lease(&queue, &session, 10).await.len(), 1);
    assert!(rig.lease(&queue, &session, 10).await.is_empty());
    rig.set_back(HOUR_MS).await;
    // The timer alone sees to it.
    let noticed = async {
        while rig.broker.shared.state.lock().now_ms > rig.now_ms() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), noticed).await.unwrap();
    rig.pass(10_050);
    tokio::time::timeout(Duration::from_secs(30), session.woken()).await.unwrap();
    assert_eq!(rig.lease(&queue, &session, 10).await.len(), 1);
}

#[tokio::test]
async fn a_clock_that_is_set_back_makes_no_backoff_longer() {
    let mut rig = Rig::new().await;
    let plain = rig.queue(1, |c| c.retry = retry(10_000, 10_000)).await;
    let ordered = rig
        .queue(2, |c| {
            c.retry = retry(10_000, 10_000);
            c.ordered = true;
        })
        .await;
    rig.publish_keyed(&[("m", "k")]).await;
    for queue in [&plain, &ordered] {
        let leased = rig.pull(queue, 1).await;
        rig.modify(queue, &leased, 0).await;
    }
    rig.pass(4_000);
    rig.set_back(HOUR_MS).await;
    for (ms, expected) in [(0, 0), (5_999, 0), (1, 1)] {
        rig.pass(ms);
        for queue in [&plain, &ordered] {
            assert_eq!(rig.pull(queue, 1).await.len(), expected, "after {ms} ms");
        }
    }
}

#[tokio::test]
async fn publish_times_do_not_go_back_with_the_clock() {
    let directory = tempfile::tempdir().unwrap();
    let mut rig = Rig::on_disk(directory.path()).await;
    let queue = rig.queue(1, |_| {}).await;
    rig.publish(&["a"]).await;
    let first = rig.now_ms();
    rig.set_back(HOUR_MS).await;
    rig.publish(&["b"]).await;
    let rig = rig.restart(directory.path());
    rig.publish(&["c"]).await;
    rig.pass(2 * HOUR_MS);
    rig.publish(&["d"]).await;
    let leased = rig.pull(&queue, 10).await;
    assert_eq!(leased.iter().map(text).collect::<Vec<_>>(), ["a", "b", "c", "d"]);
    assert_eq!(Rig::times(&leased), [first, first, first, first + HOUR_MS]);
}

#[tokio::test]
async fn what_waits_for_a_time_does_not_wait_longer_after_a_restart_with_an_earlier_clock() {
    let directory = tempfile::tempdir().unwrap();
    let mut rig = Rig::on_disk(directory.path()).await;
    let leased = rig.queue(1, |_| {}).await;
    let delayed = rig.queue(2, |c| c.retry = retry(10_000, 10_000)).await;
    rig.publish(&["m"]).await;
    rig.pull(&leased, 1).await;
    let failed = rig.pull(&delayed, 1).await;
    rig.modify(&delayed, &failed, 0).await;
    // Once while it runs, with a checkpoint and without, and once while it does not.
    rig.set_back(HOUR_MS).await;
    rig.broker.stats(&leased).await.unwrap();
    let rig = rig.restart(directory.path());
    rig.set_back(HOUR_MS).await;
    rig.broker.stats(&leased).await.unwrap();
    checkpoint::write(&rig.broker.shared, Some(directory.path())).unwrap();
    rig.set_back(HOUR_MS).await;
    let rig = rig.restart(directory.path());
    for (ms, expected) in [(0, 0), (9_999, 0), (51, 1)] {
        rig.pass(ms);
        for queue in [&leased, &delayed] {
            assert_eq!(rig.pull(queue, 1).await.len(), expected, "after {ms} ms");
        }
    }
}

#[tokio::test]
async fn messages_from_before_the_clock_was_set_back_are_kept_at_least_as_long() {
    let mut rig = Rig::new().await;
    let queue = rig.queue(1, |c| c.retention_ms = HOUR_MS).await;
    rig.publish(&["a"]).await;
    rig.set_back(HOUR_MS / 2).await;
    rig.publish(&["b"]).await;
    rig.pass(HOUR_MS);
    assert_eq!(rig.texts(&queue, 10).await, ["a", "b"]);
    rig.pass(HOUR_MS / 2 + 1);
    assert_eq!(rig.broker.stats(&queue).await.unwrap().undelivered_messages, 0);
}
