use super::*;
use crate::{
    broker::Kind,
    connector::SeekTo,
    model::{SnapshotName, limits::MAX_SNAPSHOT_SECONDS},
};

const WEEK_MS: u64 = MAX_SNAPSHOT_SECONDS as u64 * 1000;
const DAY_MS: u64 = 86_400_000;

fn snapshot_draft(id: &str) -> SnapshotDraft {
    SnapshotDraft { name: format!("projects/p1/snapshots/{id}"), ..SnapshotDraft::default() }
}

fn snapshot_name(id: &str) -> SnapshotName {
    SnapshotName::new("p1", id).unwrap()
}

fn to_snapshot(id: &str) -> Option<SeekTo> {
    Some(SeekTo::Snapshot(format!("projects/p1/snapshots/{id}")))
}

fn to_ms(ms: u64) -> Option<SeekTo> {
    Some(SeekTo::Time(Span::from_ms(ms)))
}

#[tokio::test]
async fn a_snapshot_brings_back_what_was_unacknowledged_when_it_was_taken() {
    let rig = Rig::new().await;
    rig.topic("t11").await;
    let subscription = rig.subscription("s11", "t11").await;
    rig.publish("t11", "before").await;
    rig.acknowledge_all(&subscription).await;
    rig.publish("t11", "held").await;
    let view = rig.connector.create_snapshot(snapshot_draft("snap"), &subscription.name).await.unwrap();
    assert_eq!((view.snapshot.expire_time_ms, view.topic_deleted), (START_MS + WEEK_MS, false));
    rig.publish("t11", "after").await;
    rig.acknowledge_all(&subscription).await;
    assert_eq!(rig.pulled(&subscription).await, [""; 0]);
    rig.connector.seek(&subscription.name, to_snapshot("snap")).await.unwrap();
    assert_eq!(rig.pulled(&subscription).await, ["held", "after"]);

    // It outlives its subscription and serves others of the topic.
    rig.connector.delete_subscription(&subscription.name).await.unwrap();
    let other = rig.subscription("s12", "t11").await;
    rig.connector.seek(&other.name, to_snapshot("snap")).await.unwrap();
    assert_eq!(rig.pulled(&other).await, ["held", "after"]);
}

#[tokio::test]
async fn a_snapshot_is_read_listed_changed_and_deleted() {
    let rig = Rig::new().await;
    for id in ["t11", "t12"] {
        rig.topic(id).await;
    }
    let subscription = rig.subscription("s11", "t11").await;
    let labels: std::collections::BTreeMap<_, _> = [("a".to_owned(), "1".to_owned())].into();
    let draft = SnapshotDraft { labels: labels.clone(), ..snapshot_draft("snap") };
    let created = rig.connector.create_snapshot(draft.clone(), &subscription.name).await.unwrap();
    assert_eq!(created.snapshot.labels, labels);
    assert_eq!(rig.connector.get_snapshot(&snapshot_name("snap")).await.unwrap(), created);
    let again = rig.connector.create_snapshot(draft, &subscription.name).await;
    assert_eq!(again, Err(Error::Exists("snap".into())));
    let unnamed = rig.connector.create_snapshot(SnapshotDraft::default(), &subscription.name).await.unwrap();
    assert_eq!(unnamed.snapshot.name.project(), "p1");

    assert_eq!(rig.connector.list_snapshots("projects/p1", &page(0, "")).await.unwrap().items.len(), 2);
    assert!(rig.connector.list_snapshots("projects/p2", &page(0, "")).await.unwrap().items.is_empty());
    let first = rig.connector.list_topic_snapshots(&topic_name("t11"), &page(1, "")).await.unwrap();
    let second = rig.connector.list_topic_snapshots(&topic_name("t11"), &page(1, &first.next_token)).await.unwrap();
    let mut listed = [first.items, second.items].concat();
    listed.sort();
    assert_eq!((listed.len(), second.next_token.as_str()), (2, ""));
    assert!(listed.contains(&"projects/p1/snapshots/snap".to_owned()));
    assert!(rig.connector.list_topic_snapshots(&topic_name("t12"), &page(0, "")).await.unwrap().items.is_empty());
    let missing = rig.connector.list_topic_snapshots(&topic_name("none"), &page(0, "")).await;
    assert_eq!(missing, Err(Error::NotFound("none".into())));

    let update = SnapshotDraft { expire_time: Some(Span::from_ms(START_MS + DAY_MS)), ..snapshot_draft("snap") };
    let run = async |paths: &[&str]| rig.connector.update_snapshot(update.clone(), &mask(paths)).await;
    let changed = run(&["expire_time"]).await.unwrap().snapshot;
    assert_eq!((changed.expire_time_ms, changed.labels.len()), (START_MS + DAY_MS, 1));
    assert_eq!(run(&["labels"]).await.unwrap().snapshot.labels.len(), 0);
    let texts = [
        (&[][..], "The update_mask in the UpdateSnapshotRequest must be set"),
        (&["topic"], "the 'topic' field in the Snapshot is not mutable"),
        (&["expireTime"], "'expireTime' is not a known Snapshot field"),
    ];
    for (paths, expected) in texts {
        let error = run(paths).await.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    rig.connector.delete_topic(&topic_name("t11")).await.unwrap();
    assert!(rig.connector.get_snapshot(&snapshot_name("snap")).await.unwrap().topic_deleted);
    rig.connector.delete_snapshot(&snapshot_name("snap")).await.unwrap();
    for result in [
        rig.connector.delete_snapshot(&snapshot_name("snap")).await,
        rig.connector.get_snapshot(&snapshot_name("snap")).await.map(|_| ()),
        rig.connector.seek(&subscription.name, to_snapshot("snap")).await,
    ] {
        assert_eq!(result, Err(Error::NotFound("snap".into())));
    }
}

#[tokio::test]
async fn the_age_of_the_backlog_shortens_a_snapshots_life() {
    let rig = Rig::new().await;
    rig.topic("t11").await;
    let subscription = rig.subscription("s11", "t11").await;
    rig.publish("t11", "old").await;
    rig.advance_ms(3 * DAY_MS);
    rig.publish("t11", "new").await;
    let view = rig.connector.create_snapshot(snapshot_draft("snap"), &subscription.name).await.unwrap();
    assert_eq!(view.snapshot.expire_time_ms, START_MS + WEEK_MS);
    rig.advance_ms(3 * DAY_MS + 23 * 3_600_000 + 1_800_000);
    let late = rig.connector.create_snapshot(snapshot_draft("late"), &subscription.name).await;
    assert_eq!(late, Err(Error::BacklogTooOld));
    assert_eq!(
        late.unwrap_err().to_string(),
        "The operation could not be completed because the requested source subscription's backlog is too old."
    );
}

#[tokio::test]
async fn an_expired_snapshot_is_hidden_at_once_and_removed_later() {
    let rig = Rig::new().await;
    rig.topic("t11").await;
    let subscription = rig.subscription("s11", "t11").await;
    for id in ["first", "second"] {
        rig.connector.create_snapshot(snapshot_draft(id), &subscription.name).await.unwrap();
    }
    rig.advance_ms(WEEK_MS);
    assert_eq!(rig.connector.get_snapshot(&snapshot_name("first")).await, Err(Error::NotFound("first".into())));
    assert!(rig.connector.list_snapshots("projects/p1", &page(0, "")).await.unwrap().items.is_empty());
    assert!(rig.connector.list_topic_snapshots(&topic_name("t11"), &page(0, "")).await.unwrap().items.is_empty());
    let gone = rig.connector.seek(&subscription.name, to_snapshot("first")).await;
    assert_eq!(gone, Err(Error::NotFound("first".into())));
    // Its name is free before it is removed.
    let renewed = rig.connector.create_snapshot(snapshot_draft("first"), &subscription.name).await.unwrap();
    rig.connector.remove_expired_snapshots().await.unwrap();
    let stored = rig.broker.list(Kind::Snapshot, "", "", 10).await.unwrap();
    assert_eq!(stored.iter().map(|record| record.name.as_str()).collect::<Vec<_>>(), [renewed.snapshot.name.as_str()]);
}

#[tokio::test]
async fn seeking_to_a_time_is_exact_to_the_nanosecond() {
    let rig = Rig::new().await;
    rig.topic("t11").await;
    let draft = SubscriptionDraft { retain_acked_messages: true, ..subscription_draft("s11", "t11") };
    let subscription = rig.connector.create_subscription(draft).await.unwrap().subscription;
    rig.publish("t11", "a").await;
    rig.advance_ms(10);
    rig.publish("t11", "b").await;
    rig.acknowledge_all(&subscription).await;
    let seek = async |target| {
        rig.connector.seek(&subscription.name, target).await.unwrap();
        rig.pulled(&subscription).await
    };
    assert_eq!(seek(to_ms(START_MS)).await, ["a", "b"]);
    let Span { seconds, nanos } = Span::from_ms(START_MS);
    assert_eq!(seek(Some(SeekTo::Time(Span { seconds, nanos: nanos + 1 }))).await, ["b"]);
    assert_eq!(seek(to_ms(START_MS + 10)).await, ["b"]);
    assert_eq!(seek(Some(SeekTo::Time(Span::seconds(-5)))).await, ["a", "b"]);
    assert_eq!(seek(to_ms(START_MS + DAY_MS)).await, [""; 0]);
}

#[tokio::test]
async fn a_seek_that_can_not_be_done_says_why() {
    let rig = Rig::new().await;
    for id in ["t11", "t12"] {
        rig.topic(id).await;
    }
    let (s1, s2) = (rig.subscription("s11", "t11").await, rig.subscription("s12", "t12").await);
    rig.connector.create_snapshot(snapshot_draft("snap"), &s1.name).await.unwrap();
    let seek = async |name: &SubscriptionName, target| rig.connector.seek(name, target).await.unwrap_err();
    assert_eq!(seek(&s1.name, None).await, Error::NoSeekTarget);
    assert_eq!(seek(&subscription_name("none"), to_ms(0)).await, Error::NotFound("none".into()));
    assert_eq!(seek(&s1.name, to_snapshot("none")).await, Error::NotFound("none".into()));
    assert!(matches!(seek(&s1.name, Some(SeekTo::Snapshot("snap".into()))).await, Error::Name(_)));
    assert!(matches!(seek(&s2.name, to_snapshot("snap")).await, Error::SnapshotOfOtherTopic { .. }));
    let bad = Span { seconds: 0, nanos: -1 };
    assert!(seek(&s1.name, Some(SeekTo::Time(bad))).await.to_string().contains("time"));
    // A topic of the same name is another topic.
    rig.connector.delete_topic(&topic_name("t11")).await.unwrap();
    rig.topic("t11").await;
    let s3 = rig.subscription("s13", "t11").await;
    assert!(matches!(seek(&s3.name, to_snapshot("snap")).await, Error::SnapshotOfOtherTopic { .. }));
    rig.connector.detach_subscription(&s3.name).await.unwrap();
    assert_eq!(seek(&s3.name, to_ms(0)).await, Error::Detached("s13".into()));
    let snapshot = rig.connector.create_snapshot(snapshot_draft("late"), &s3.name).await;
    assert_eq!(snapshot, Err(Error::Detached("s13".into())));
}
