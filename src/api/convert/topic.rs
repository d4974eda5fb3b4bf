//! Topics.

use super::{DELETED_SCHEMA, duration_ms, span, transform, transform_draft};
use crate::{
    api::proto::pubsub as pb,
    connector::{
        TopicView,
        draft::{SchemaDraft, TopicDraft},
    },
    model::{Encoding, SchemaSettings, StoragePolicy},
};

/// A topic as a caller sent it. Tags are accepted and not kept: they belong to an organisation's resource manager.
pub fn topic_draft(topic: pb::Topic) -> TopicDraft {
    TopicDraft {
        name: topic.name,
        labels: topic.labels,
        message_storage_policy: topic.message_storage_policy.map(|policy| StoragePolicy {
            allowed_persistence_regions: policy.allowed_persistence_regions,
            enforce_in_transit: policy.enforce_in_transit,
        }),
        kms_key_name: topic.kms_key_name,
        schema_settings: topic.schema_settings.map(schema_draft),
        message_retention: topic.message_retention_duration.map(span),
        ingestion: topic.ingestion_data_source_settings.is_some(),
        message_transforms: topic.message_transforms.into_iter().map(transform_draft).collect(),
    }
}

/// An encoding as a caller sent it; none for one that is unspecified or unknown.
pub fn encoding(number: i32) -> Option<Encoding> {
    match pb::Encoding::try_from(number) {
        Ok(pb::Encoding::Json) => Some(Encoding::Json),
        Ok(pb::Encoding::Binary) => Some(Encoding::Binary),
        _ => None,
    }
}

fn schema_draft(settings: pb::SchemaSettings) -> SchemaDraft {
    SchemaDraft {
        schema: settings.schema,
        encoding: encoding(settings.encoding),
        first_revision_id: settings.first_revision_id,
        last_revision_id: settings.last_revision_id,
    }
}

/// A topic as callers see it.
pub fn topic(view: TopicView) -> pb::Topic {
    let TopicView { topic, schema_deleted } = view;
    pb::Topic {
        name: topic.name.to_string(),
        labels: topic.labels,
        message_storage_policy: topic.message_storage_policy.map(|policy| pb::MessageStoragePolicy {
            allowed_persistence_regions: policy.allowed_persistence_regions,
            enforce_in_transit: policy.enforce_in_transit,
        }),
        kms_key_name: topic.kms_key_name,
        schema_settings: topic.schema_settings.map(|settings| schema_settings(settings, schema_deleted)),
        message_retention_duration: topic.message_retention_ms.map(duration_ms),
        state: pb::topic::State::Active.into(),
        message_transforms: topic.message_transforms.into_iter().map(transform).collect(),
        ..pb::Topic::default()
    }
}

fn schema_settings(settings: SchemaSettings, deleted: bool) -> pb::SchemaSettings {
    let encoding = match settings.encoding {
        Encoding::Json => pb::Encoding::Json,
        Encoding::Binary => pb::Encoding::Binary,
    };
    pb::SchemaSettings {
        schema: if deleted { DELETED_SCHEMA.to_owned() } else { settings.schema.to_string() },
        encoding: encoding.into(),
        first_revision_id: settings.first_revision_id,
        last_revision_id: settings.last_revision_id,
    }
}
