//! Snapshots and seek targets.

use super::{DELETED_TOPIC, time_span, timestamp_ms};
use crate::{
    api::proto::pubsub as pb,
    connector::{SeekTo, SnapshotView, draft::SnapshotDraft},
};

/// A snapshot as a caller sent it.
pub fn snapshot_draft(snapshot: pb::Snapshot) -> SnapshotDraft {
    let expire_time = snapshot.expire_time.map(time_span);
    SnapshotDraft { name: snapshot.name, labels: snapshot.labels, expire_time }
}

/// A snapshot as callers see it.
pub fn snapshot(view: SnapshotView) -> pb::Snapshot {
    let SnapshotView { snapshot, topic_deleted } = view;
    pb::Snapshot {
        name: snapshot.name.to_string(),
        topic: if topic_deleted { DELETED_TOPIC.into() } else { snapshot.topic.to_string() },
        expire_time: Some(timestamp_ms(snapshot.expire_time_ms)),
        labels: snapshot.labels,
    }
}

/// Where a caller wants to seek.
pub fn seek_target(target: Option<pb::seek_request::Target>) -> Option<SeekTo> {
    use pb::seek_request::Target;
    target.map(|target| match target {
        Target::Time(time) => SeekTo::Time(time_span(time)),
        Target::Snapshot(name) => SeekTo::Snapshot(name),
    })
}
