//! The room that messages take on the disk, and what tidying it must not change.

use super::*;

impl Rig {
    /// Changes the record of the first queue, or deletes it.
    async fn end(&self, effect: Effect) {
        let kept = matches!(effect, Effect::DetachQueue(_));
        let expect = Expect::Version(self.versions[&1]);
        self.broker.change(change(Kind::Subscription, "s1", expect, kept, effect)).await.unwrap();
    }
}

#[tokio::test]
async fn a_few_old_messages_do_not_hold_the_log() {
    let directory = tempfile::tempdir().unwrap();
    let mut rig = Rig::on_disk(directory.path()).await;
    let queue = rig.queue(1, |_| {}).await;
    let large = "y".repeat(20_000);
    let mut old = Vec::new();
    for round in 0..40 {
        let name = format!("old {round}");
        rig.publish(&[&name, &large, &large, &large]).await;
        let leased = rig.pull(&queue, 10).await;
        rig.ack(&queue, &leased[1..]).await;
        rig.modify(&queue, &leased[..1], 600_000).await;
        old.push(name);
    }
    let segments = |rig: &Rig| rig.broker.shared.log.usage().segments;
    checkpoint::write(&rig.broker.shared, Some(directory.path())).unwrap();
    assert!(segments(&rig) >= 8, "{}", segments(&rig));
    rig.gather(u64::from(SEGMENT_BYTES) / 4, Some(directory.path()));
    assert!(segments(&rig) <= 2, "{}", segments(&rig));
    let rig = rig.restart(directory.path());
    rig.pass(600_050);
    assert_eq!(rig.texts(&queue, 100).await, old);
}

/// C127: the disk comes back, however messages end.
#[tokio::test]
async fn what_nobody_needs_any_more_takes_no_room() {
    const RETENTION_MS: u64 = 600_000;
    let large = "y".repeat(20_000);
    for way in ["acknowledged", "expired", "detached", "deleted"] {
        let directory = tempfile::tempdir().unwrap();
        let mut rig = Rig::on_disk(directory.path()).await;
        let queue = rig.queue(1, |c| c.retention_ms = RETENTION_MS).await;
        let mut leased = Vec::new();
        for _ in 0..40 {
            rig.publish(&[&large, &large, &large]).await;
            leased.extend(rig.pull(&queue, 10).await);
        }
        let bytes = |rig: &Rig| rig.broker.shared.log.usage().bytes;
        checkpoint::write(&rig.broker.shared, Some(directory.path())).unwrap();
        let full = bytes(&rig);
        assert!(full >= 120 * 20_000, "{full}");
        match way {
            "acknowledged" => _ = rig.ack(&queue, &leased).await,
            "expired" => rig.pass(RETENTION_MS + 1),
            "detached" => rig.end(Effect::DetachQueue(queue.clone())).await,
            _ => rig.end(Effect::CloseQueue(queue.clone())).await,
        }
        if way == "expired" {
            assert_eq!(rig.broker.stats(&queue).await.unwrap().undelivered_messages, 0);
        }
        checkpoint::write(&rig.broker.shared, Some(directory.path())).unwrap();
        // The segment being filled and those kept in stock; files are deleted on a thread of their own.
        let most = 4 * u64::from(SEGMENT_BYTES);
        let until = Instant::now() + Duration::from_secs(30);
        while bytes(&rig) > most {
            assert!(Instant::now() < until, "{way}: {} of {full} bytes", bytes(&rig));
            tokio::task::yield_now().await;
        }
        let rig = rig.restart(directory.path());
        assert!(bytes(&rig) <= most, "{way}, after a restart: {} bytes", bytes(&rig));
    }
}

/// The process may end between a checkpoint's tidying and its file.
#[tokio::test]
async fn a_checkpoint_that_was_not_finished_changes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let mut rig = Rig::on_disk(directory.path()).await;
    let queue = rig.queue(1, |_| {}).await;
    rig.publish(&["before"]).await;
    let before = rig.pull(&queue, 1).await;
    rig.ack(&queue, &before).await;
    let now_ms = rig.now_ms();
    rig.broker.shared.state.lock().reclaim(now_ms);
    rig.publish(&["acked", "kept"]).await;
    let leased = rig.pull(&queue, 1).await;
    rig.ack(&queue, &leased).await;
    // Ended as by a crash: no last checkpoint.
    let rig = rig.restart(directory.path());
    assert_eq!(rig.texts(&queue, 10).await, ["kept"]);
}
