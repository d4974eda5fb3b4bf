//! Snapshots: create, get, list, update, delete. One whose time has come is hidden at once and removed by the janitor.

use super::{
    Connector, Error,
    catalog::{queue_ref, topic_ref},
    draft::{SnapshotDraft, Span},
    listing::{Listing, Page, PageRequest, check_project},
    mask::{Paths, merge, path},
    record,
    topics::{CHANGE_TRIES, new_incarnation},
    validate,
};
use crate::{
    broker::{BrokerError, Change, Effect, Expect, Kind},
    model::{
        Snapshot, SnapshotName, Subscription, SubscriptionName,
        limits::{MAX_SNAPSHOT_SECONDS, MIN_SNAPSHOT_SECONDS},
    },
};

/// The fields that are checked and set one by one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Field {
    Labels,
    ExpireTime,
}

const PATHS: Paths<SnapshotDraft, Field> = Paths {
    resource: "Snapshot",
    mutable: &[
        path("labels", Field::Labels, |to, from| to.labels.clone_from(&from.labels)),
        path("expire_time", Field::ExpireTime, |to, from| to.expire_time = from.expire_time),
    ],
    immutable: &["name", "topic"],
};

/// A snapshot as it is shown.
#[derive(Debug, Clone, PartialEq)]
pub struct SnapshotView {
    pub snapshot: Snapshot,
    /// The topic was deleted, even if another one has its name by now.
    pub topic_deleted: bool,
}

fn set(snapshot: &mut Snapshot, field: Field, draft: &SnapshotDraft, now_ms: u64) -> Result<(), Error> {
    match field {
        Field::Labels => snapshot.labels = validate::labels(&draft.labels)?,
        Field::ExpireTime => snapshot.expire_time_ms = validate::expire_time_ms(draft.expire_time, now_ms)?,
    }
    Ok(())
}

/// When a new snapshot ends: 7 days from now, less the age of the oldest message it holds.
fn expire_time_ms(now_ms: u64, oldest_unacked_ms: Option<u64>) -> Result<u64, Error> {
    let age_ms = oldest_unacked_ms.map_or(0, |oldest| now_ms.saturating_sub(oldest));
    let life_ms = (MAX_SNAPSHOT_SECONDS as u64 * 1000).saturating_sub(age_ms);
    if life_ms < MIN_SNAPSHOT_SECONDS as u64 * 1000 { Err(Error::BacklogTooOld) } else { Ok(now_ms + life_ms) }
}

impl Connector {
    /// Creates a snapshot of a subscription's unacknowledged messages; an empty name has the server choose one in the
    /// subscription's project.
    ///
    /// # Errors
    /// [`Error::Exists`], [`Error::NotFound`] of the subscription, [`Error::Detached`], [`Error::BacklogTooOld`], or a field
    /// that is not legal.
    pub async fn create_snapshot(&self, draft: SnapshotDraft, source: &SubscriptionName) -> Result<SnapshotView, Error> {
        let name = match draft.name.as_str() {
            "" => SnapshotName::new(source.project(), &format!("snap-{:032x}", rand::random::<u128>()))?,
            name => SnapshotName::parse(name)?,
        };
        let labels = validate::labels(&draft.labels)?;
        let (subscription, _) = self.read_subscription(source).await?;
        if subscription.detached {
            return Err(Error::Detached(source.id().to_owned()));
        }
        let now_ms = self.broker().now_ms();
        let oldest_unacked_ms = self.oldest_unacked_ms(&subscription).await?;
        let snapshot = Snapshot {
            name: name.clone(),
            incarnation: new_incarnation(),
            topic: subscription.topic.clone(),
            topic_incarnation: subscription.topic_incarnation,
            expire_time_ms: expire_time_ms(now_ms, oldest_unacked_ms)?,
            labels,
        };
        let change = Change {
            kind: Kind::Snapshot,
            name: name.to_string(),
            expect: Expect::Absent,
            body: Some(record::encode(&snapshot)?),
            effect: Effect::TakeSnapshot { snapshot: snapshot.incarnation, queue: queue_ref(&subscription) },
        };
        for _ in 0..CHANGE_TRIES {
            match self.catalog.change(change.clone()).await {
                Ok(_) => return self.snapshot_view(snapshot).await,
                Err(BrokerError::Conflict(_)) => self.make_way(&name).await?,
                Err(BrokerError::Gone) => return Err(Error::not_found(source)),
                Err(error) => return Err(error.into()),
            }
        }
        Err(Error::Contended)
    }

    async fn oldest_unacked_ms(&self, subscription: &Subscription) -> Result<Option<u64>, Error> {
        match self.broker().stats(&queue_ref(subscription)).await {
            Ok(stats) => Ok(stats.oldest_unacked_ms),
            Err(BrokerError::Gone) => Err(Error::not_found(&subscription.name)),
            Err(error) => Err(error.into()),
        }
    }

    /// The name of a new snapshot is taken: removes the one that has it if its time has come.
    async fn make_way(&self, name: &SnapshotName) -> Result<(), Error> {
        match self.catalog.read::<Snapshot>(Kind::Snapshot, name.as_str()).await? {
            Some((old, version)) if old.expire_time_ms <= self.broker().now_ms() => {
                self.delete_snapshot_at(&old, version).await.map(|_| ())
            }
            Some(_) => Err(Error::exists(name)),
            None => Ok(()),
        }
    }

    pub(super) async fn delete_snapshot_at(&self, snapshot: &Snapshot, version: u64) -> Result<bool, Error> {
        let topic = topic_ref(&snapshot.topic, snapshot.topic_incarnation);
        let effect = Effect::DropSnapshot { snapshot: snapshot.incarnation, topic };
        self.delete_record(Kind::Snapshot, snapshot.name.as_str(), version, effect).await
    }

    async fn snapshot_view(&self, snapshot: Snapshot) -> Result<SnapshotView, Error> {
        let topic = self.catalog.topic(&snapshot.topic).await?;
        let topic_deleted = topic.is_none_or(|topic| topic.topic.incarnation != snapshot.topic_incarnation);
        Ok(SnapshotView { snapshot, topic_deleted })
    }

    pub(super) async fn read_snapshot(&self, name: &SnapshotName) -> Result<(Snapshot, u64), Error> {
        let found = self.catalog.read::<Snapshot>(Kind::Snapshot, name.as_str()).await?;
        let now_ms = self.broker().now_ms();
        found.filter(|(snapshot, _)| snapshot.expire_time_ms > now_ms).ok_or_else(|| Error::not_found(name))
    }

    /// Reads a snapshot.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn get_snapshot(&self, name: &SnapshotName) -> Result<SnapshotView, Error> {
        let (snapshot, _) = self.read_snapshot(name).await?;
        self.snapshot_view(snapshot).await
    }

    /// Lists the snapshots of a project, `projects/{id}`, by name.
    ///
    /// # Errors
    /// A bad project, page size or page token.
    pub async fn list_snapshots(&self, project: &str, page: &PageRequest) -> Result<Page<SnapshotView>, Error> {
        check_project(project)?;
        let listing = Listing { list: "snapshots", parent: project };
        let now_ms = self.broker().now_ms();
        let read = |found: &_| Ok(Some(record::decode::<Snapshot>(found)?).filter(|s| s.expire_time_ms > now_ms));
        let found = self.list(&listing, page, Kind::Snapshot, &format!("{project}/snapshots/"), read).await?;
        let mut items = Vec::with_capacity(found.items.len());
        for snapshot in found.items {
            items.push(self.snapshot_view(snapshot).await?);
        }
        Ok(Page { items, next_token: found.next_token })
    }

    /// Changes the fields that `mask` names, all or none.
    ///
    /// # Errors
    /// [`Error::NotFound`], a bad mask, or a named field that is not legal.
    pub async fn update_snapshot(&self, draft: SnapshotDraft, mask: &[String]) -> Result<SnapshotView, Error> {
        let name = SnapshotName::parse(&draft.name)?;
        let paths = PATHS.resolve(mask)?;
        for _ in 0..CHANGE_TRIES {
            let (mut next, version) = self.read_snapshot(&name).await?;
            let mut merged = SnapshotDraft {
                name: name.to_string(),
                labels: next.labels.clone(),
                expire_time: Some(Span::from_ms(next.expire_time_ms)),
            };
            let now_ms = self.broker().now_ms();
            for field in merge(&paths, &mut merged, &draft) {
                set(&mut next, field, &merged, now_ms)?;
            }
            let change = Change {
                kind: Kind::Snapshot,
                name: name.to_string(),
                expect: Expect::Version(version),
                body: Some(record::encode(&next)?),
                effect: Effect::None,
            };
            match self.catalog.change(change).await {
                Ok(_) => return self.snapshot_view(next).await,
                Err(BrokerError::Conflict(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(Error::Contended)
    }

    /// Deletes a snapshot.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn delete_snapshot(&self, name: &SnapshotName) -> Result<(), Error> {
        for _ in 0..CHANGE_TRIES {
            let (snapshot, version) = self.read_snapshot(name).await?;
            if self.delete_snapshot_at(&snapshot, version).await? {
                return Ok(());
            }
        }
        Err(Error::Contended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_lives_seven_days_less_the_age_of_its_oldest_message() {
        const HOUR_MS: u64 = 3_600_000;
        let now_ms = 1_000 * 24 * HOUR_MS;
        let life = |age_ms: Option<u64>| expire_time_ms(now_ms, age_ms.map(|age| now_ms - age)).map(|end| end - now_ms);
        assert_eq!(life(None), Ok(168 * HOUR_MS));
        assert_eq!(life(Some(72 * HOUR_MS)), Ok(96 * HOUR_MS));
        assert_eq!(life(Some(167 * HOUR_MS)), Ok(HOUR_MS));
        assert_eq!(life(Some(167 * HOUR_MS + 1)), Err(Error::BacklogTooOld));
        assert_eq!(life(Some(30 * 24 * HOUR_MS)), Err(Error::BacklogTooOld));
        assert_eq!(expire_time_ms(now_ms, Some(now_ms + 5)), Ok(now_ms + 168 * HOUR_MS));
    }
}
