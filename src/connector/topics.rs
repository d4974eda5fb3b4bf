//! Topics: create, get, list, update, delete, and what hangs on a topic.

use super::{
    Connector, Error,
    catalog::topic_ref,
    draft::{SchemaDraft, Span, TopicDraft},
    listing::{Listing, Page, PageRequest, Window, check_project},
    mask::{Path, Paths, merge, path},
    record, validate,
};
use crate::{
    broker::{BrokerError, Change, Effect, Expect, Kind, TopicConfig},
    model::{Snapshot, StoragePolicy, Topic, TopicName, resource::Labels},
};

/// Attempts at one change while others change the same resource.
pub(super) const CHANGE_TRIES: usize = 16;

/// The fields of a topic that are checked and set one by one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Field {
    Labels,
    StoragePolicy,
    KmsKeyName,
    Schema,
    Retention,
    Ingestion,
    Transforms,
}

const FIELDS: [Field; 7] = [
    Field::Labels,
    Field::StoragePolicy,
    Field::KmsKeyName,
    Field::Schema,
    Field::Retention,
    Field::Ingestion,
    Field::Transforms,
];

const INGESTION_SOURCES: &[&str] =
    &["aws_kinesis", "cloud_storage", "azure_event_hubs", "aws_msk", "confluent_cloud", "platform_logs_settings"];

const PATHS: Paths<TopicDraft, Field> = Paths {
    resource: "Topic",
    mutable: &[
        path("labels", Field::Labels, |to, from| to.labels.clone_from(&from.labels)),
        path("message_storage_policy", Field::StoragePolicy, |to, from| {
            to.message_storage_policy.clone_from(&from.message_storage_policy);
        }),
        path("message_storage_policy.allowed_persistence_regions", Field::StoragePolicy, |to, from| {
            let regions = from.message_storage_policy.as_ref().map(|p| p.allowed_persistence_regions.clone());
            storage_policy(to).allowed_persistence_regions = regions.unwrap_or_default();
        }),
        path("message_storage_policy.enforce_in_transit", Field::StoragePolicy, |to, from| {
            storage_policy(to).enforce_in_transit = from.message_storage_policy.as_ref().is_some_and(|p| p.enforce_in_transit);
        }),
        path("kms_key_name", Field::KmsKeyName, |to, from| to.kms_key_name.clone_from(&from.kms_key_name)),
        path("schema_settings", Field::Schema, |to, from| to.schema_settings.clone_from(&from.schema_settings)),
        path("schema_settings.schema", Field::Schema, |to, from| schema(to, from, |to, from| to.schema = from.schema)),
        path("schema_settings.encoding", Field::Schema, |to, from| schema(to, from, |to, from| to.encoding = from.encoding)),
        path("schema_settings.first_revision_id", Field::Schema, |to, from| {
            schema(to, from, |to, from| to.first_revision_id = from.first_revision_id);
        }),
        path("schema_settings.last_revision_id", Field::Schema, |to, from| {
            schema(to, from, |to, from| to.last_revision_id = from.last_revision_id);
        }),
        path("message_retention_duration", Field::Retention, |to, from| to.message_retention = from.message_retention),
        Path {
            path: "ingestion_data_source_settings",
            nested: INGESTION_SOURCES,
            field: Field::Ingestion,
            copy: |to, from| to.ingestion = from.ingestion,
        },
        path("message_transforms", Field::Transforms, |to, from| to.message_transforms.clone_from(&from.message_transforms)),
    ],
    immutable: &["name", "state", "satisfies_pzs", "tags"],
};

fn storage_policy(draft: &mut TopicDraft) -> &mut StoragePolicy {
    draft
        .message_storage_policy
        .get_or_insert_with(|| StoragePolicy { allowed_persistence_regions: Vec::new(), enforce_in_transit: false })
}

/// Copies a part of the schema settings. Where there are none, what is cleared was clear already.
fn schema(onto: &mut TopicDraft, from: &TopicDraft, copy: fn(&mut SchemaDraft, SchemaDraft)) {
    let mut settings = onto.schema_settings.clone().unwrap_or_default();
    copy(&mut settings, from.schema_settings.clone().unwrap_or_default());
    if onto.schema_settings.is_some() || settings != SchemaDraft::default() {
        onto.schema_settings = Some(settings);
    }
}

/// The change that writes a topic's record, if what it expects is there.
fn written(topic: &Topic, expect: Expect) -> Result<Change, Error> {
    Ok(Change {
        kind: Kind::Topic,
        name: topic.name.to_string(),
        expect,
        body: Some(record::encode(topic)?),
        effect: Effect::OpenTopic(config(topic)),
    })
}

/// A topic as it is shown: with what depends on its schema.
#[derive(Debug, Clone, PartialEq)]
pub struct TopicView {
    pub topic: Topic,
    /// The schema of the topic's settings was deleted, even if another one has its name by now.
    pub schema_deleted: bool,
}

/// Checks one field of a draft and sets it. Schema settings are read from the store and transforms are tried: see
/// [`Connector::set_topic_field`].
fn set(topic: &mut Topic, field: Field, draft: &TopicDraft) -> Result<(), Error> {
    match field {
        Field::Labels => topic.labels = validate::labels(&draft.labels)?,
        Field::StoragePolicy => {
            topic.message_storage_policy = validate::storage_policy(draft.message_storage_policy.as_ref())?;
        }
        Field::KmsKeyName => topic.kms_key_name = validate::kms_key_name(&draft.kms_key_name)?,
        Field::Schema | Field::Transforms => {}
        Field::Retention => topic.message_retention_ms = validate::topic_retention_ms(draft.message_retention)?,
        Field::Ingestion => validate::unsupported::ingestion(draft.ingestion)?,
    }
    Ok(())
}

/// A stored topic in the shape of a request, so that parts of it can be replaced.
fn to_draft(topic: &Topic) -> TopicDraft {
    TopicDraft {
        name: topic.name.to_string(),
        labels: topic.labels.clone(),
        message_storage_policy: topic.message_storage_policy.clone(),
        kms_key_name: topic.kms_key_name.clone(),
        schema_settings: topic.schema_settings.as_ref().map(|settings| SchemaDraft {
            schema: settings.schema.to_string(),
            encoding: Some(settings.encoding),
            first_revision_id: settings.first_revision_id.clone(),
            last_revision_id: settings.last_revision_id.clone(),
        }),
        message_retention: topic.message_retention_ms.map(Span::from_ms),
        ingestion: false,
        message_transforms: Vec::new(),
    }
}

fn config(topic: &Topic) -> TopicConfig {
    TopicConfig { topic: topic_ref(&topic.name, topic.incarnation), retention_ms: topic.message_retention_ms }
}

/// A random number for a new resource, never 0.
pub(super) fn new_incarnation() -> u64 {
    rand::random::<u64>().max(1)
}

impl Connector {
    /// Creates a topic.
    ///
    /// # Errors
    /// [`Error::Exists`], or a field that is not legal.
    pub async fn create_topic(&self, draft: TopicDraft) -> Result<TopicView, Error> {
        let name = TopicName::parse(&draft.name)?;
        let mut topic = Topic {
            name: name.clone(),
            incarnation: new_incarnation(),
            labels: Labels::new(),
            message_storage_policy: None,
            kms_key_name: String::new(),
            schema_settings: None,
            message_retention_ms: None,
            message_transforms: Vec::new(),
        };
        for field in FIELDS {
            self.set_topic_field(&mut topic, field, &draft).await?;
        }
        let change = written(&topic, Expect::Absent)?;
        match self.catalog.change(change).await {
            Ok(_) => self.topic_view(topic).await,
            Err(BrokerError::Conflict(_)) => Err(Error::exists(&name)),
            Err(error) => Err(error.into()),
        }
    }

    /// Reads a topic.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn get_topic(&self, name: &TopicName) -> Result<TopicView, Error> {
        self.topic_view(self.read_topic(name).await?.0).await
    }

    async fn topic_view(&self, topic: Topic) -> Result<TopicView, Error> {
        Ok(TopicView { schema_deleted: self.schema_deleted(&topic).await?, topic })
    }

    async fn set_topic_field(&self, topic: &mut Topic, field: Field, draft: &TopicDraft) -> Result<(), Error> {
        if field == Field::Schema {
            topic.schema_settings = self.schema_settings(draft.schema_settings.as_ref()).await?;
        }
        if field == Field::Transforms {
            topic.message_transforms = self.message_transforms(&draft.message_transforms).await?;
        }
        set(topic, field, draft)
    }

    pub(super) async fn read_topic(&self, name: &TopicName) -> Result<(Topic, u64), Error> {
        self.catalog.read(Kind::Topic, name.as_str()).await?.ok_or_else(|| Error::not_found(name))
    }

    /// Lists the topics of a project, `projects/{id}`, by name.
    ///
    /// # Errors
    /// A bad project, page size or page token.
    pub async fn list_topics(&self, project: &str, page: &PageRequest) -> Result<Page<TopicView>, Error> {
        check_project(project)?;
        let listing = Listing { list: "topics", parent: project };
        let read = |found: &_| record::decode(found).map(Some);
        let page = self.list(&listing, page, Kind::Topic, &format!("{project}/topics/"), read).await?;
        let mut items = Vec::with_capacity(page.items.len());
        for topic in page.items {
            items.push(self.topic_view(topic).await?);
        }
        Ok(Page { items, next_token: page.next_token })
    }

    /// Changes the fields that `mask` names, all or none.
    ///
    /// # Errors
    /// [`Error::NotFound`], a bad mask, or a named field that is not legal.
    pub async fn update_topic(&self, draft: TopicDraft, mask: &[String]) -> Result<TopicView, Error> {
        let name = TopicName::parse(&draft.name)?;
        let paths = PATHS.resolve(mask)?;
        for _ in 0..CHANGE_TRIES {
            let (current, version) = self.read_topic(&name).await?;
            let (mut merged, mut next) = (to_draft(&current), current);
            for field in merge(&paths, &mut merged, &draft) {
                self.set_topic_field(&mut next, field, &merged).await?;
            }
            match self.catalog.change(written(&next, Expect::Version(version))?).await {
                Ok(_) => return self.topic_view(next).await,
                Err(BrokerError::Conflict(_) | BrokerError::Gone) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(Error::Contended)
    }

    /// Writes a topic's record again as it is, so that other nodes read it, and what it names, before they take its next
    /// message. One that is gone needs nothing.
    pub(super) async fn renew_topic(&self, name: &TopicName) -> Result<(), Error> {
        for _ in 0..CHANGE_TRIES {
            let (topic, version) = match self.read_topic(name).await {
                Err(Error::NotFound(_)) => return Ok(()),
                found => found?,
            };
            match self.catalog.change(written(&topic, Expect::Version(version))?).await {
                Ok(_) | Err(BrokerError::Gone) => return Ok(()),
                Err(BrokerError::Conflict(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(Error::Contended)
    }

    /// Deletes a topic. Its subscriptions live on with the messages they have and nothing new.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn delete_topic(&self, name: &TopicName) -> Result<(), Error> {
        for _ in 0..CHANGE_TRIES {
            let (topic, version) = self.read_topic(name).await?;
            let effect = Effect::CloseTopic(topic_ref(name, topic.incarnation));
            if self.delete_record(Kind::Topic, name.as_str(), version, effect).await? {
                return Ok(());
            }
        }
        Err(Error::Contended)
    }

    /// Deletes a record with its effect, or without it when the broker does not know what it is about, so that a record can
    /// always be removed. False when another change came first.
    pub(super) async fn delete_record(&self, kind: Kind, name: &str, version: u64, effect: Effect) -> Result<bool, Error> {
        for effect in [effect, Effect::None] {
            let change = Change { kind, name: name.to_owned(), expect: Expect::Version(version), body: None, effect };
            match self.catalog.change(change).await {
                Ok(_) => return Ok(true),
                Err(BrokerError::Gone) => {}
                Err(BrokerError::Conflict(_)) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(false)
    }

    /// Lists the names of the subscriptions attached to a topic, wherever they are.
    ///
    /// # Errors
    /// [`Error::NotFound`], a bad page size or page token.
    pub async fn list_topic_subscriptions(&self, name: &TopicName, page: &PageRequest) -> Result<Page<String>, Error> {
        let listing = Listing { list: "topic subscriptions", parent: name.as_str() };
        let Window { size, after } = listing.open(self.secret(), page)?;
        let (topic, _) = self.read_topic(name).await?;
        let route = match self.broker().route(&topic_ref(name, topic.incarnation)).await {
            Err(BrokerError::Gone) => return Err(Error::not_found(name)),
            route => route?,
        };
        let mut items: Vec<_> = route.subscriptions.into_iter().map(|attached| attached.name).collect();
        items.drain(..items.partition_point(|known| *known <= after));
        let more = items.len() > size;
        items.truncate(size);
        let next_token = items.last().filter(|_| more).map(|last| listing.token(self.secret(), last)).unwrap_or_default();
        Ok(Page { items, next_token })
    }

    /// Lists the names of a topic's snapshots, wherever they are.
    ///
    /// # Errors
    /// [`Error::NotFound`], a bad page size or page token.
    pub async fn list_topic_snapshots(&self, name: &TopicName, page: &PageRequest) -> Result<Page<String>, Error> {
        let (topic, _) = self.read_topic(name).await?;
        let listing = Listing { list: "topic snapshots", parent: name.as_str() };
        let now_ms = self.broker().now_ms();
        let of_topic = |snapshot: &Snapshot| {
            snapshot.topic_incarnation == topic.incarnation && snapshot.topic == topic.name && snapshot.expire_time_ms > now_ms
        };
        let read = |found: &_| Ok(Some(record::decode::<Snapshot>(found)?).filter(of_topic).map(|s| s.name.to_string()));
        self.list(&listing, page, Kind::Snapshot, "projects/", read).await
    }
}
