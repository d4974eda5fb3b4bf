//! The room that messages take on the disk, and what tidying it must not change.

use super::*;

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
