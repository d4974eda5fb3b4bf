//! What a topic has to do with its schema: settings, and the check of its messages.

use std::sync::Arc;

use super::{SchemaEntry, aside};
use crate::{
    broker::Kind,
    connector::{Connector, Error, draft::SchemaDraft, record},
    model::{EncodedMessage, Schema, SchemaName, SchemaSettings, Topic},
};

/// Bytes of a request's payloads that are checked at once, in less than a millisecond. More, and the first use of a revision,
/// go to a thread that may take its time.
const QUICK_BYTES: usize = 64 * 1024;
/// Topics read at a time when a schema has changed.
const PAGE: usize = 500;

/// A schema by the name that a topic's settings have. It may be another one of the same name.
pub(in crate::connector) type Named = Option<Arc<SchemaEntry>>;

/// The version of such a schema's record.
pub(in crate::connector) fn version(named: &Named) -> Option<u64> {
    named.as_ref().map(|entry| entry.version)
}

fn is_meant(entry: &SchemaEntry, settings: &SchemaSettings) -> bool {
    entry.schema.incarnation == settings.schema_incarnation
}

impl Connector {
    /// Checks a topic's schema settings: the schema and the revisions exist, in this order.
    ///
    /// # Errors
    /// [`Error::NotFound`] of the schema or a revision, [`Error::SchemaEncoding`], or revisions in the wrong order.
    pub(in crate::connector) async fn schema_settings(
        &self,
        draft: Option<&SchemaDraft>,
    ) -> Result<Option<SchemaSettings>, Error> {
        let Some(draft) = draft else { return Ok(None) };
        let schema = SchemaName::parse(&draft.schema)?;
        let encoding = draft.encoding.ok_or(Error::SchemaEncoding)?;
        let (stored, _) = self.read_schema(&schema).await?;
        let first_sequence = sequence(&stored, &draft.first_revision_id)?;
        let last_sequence = sequence(&stored, &draft.last_revision_id)?;
        if let (Some(first), Some(last)) = (first_sequence, last_sequence)
            && first > last
        {
            return Err(Error::argument("schema_settings", "first_revision_id is newer than last_revision_id"));
        }
        Ok(Some(SchemaSettings {
            schema,
            schema_incarnation: stored.incarnation,
            encoding,
            first_revision_id: draft.first_revision_id.clone(),
            last_revision_id: draft.last_revision_id.clone(),
            first_sequence,
            last_sequence,
        }))
    }

    /// True when the topic's settings name a schema that was deleted, even if another one has its name by now.
    pub(in crate::connector) async fn schema_deleted(&self, topic: &Topic) -> Result<bool, Error> {
        match &topic.schema_settings {
            None => Ok(false),
            Some(settings) => Ok(!self.named_schema(topic).await?.is_some_and(|entry| is_meant(&entry, settings))),
        }
    }

    /// The schema by the name that a topic's settings have; none without settings or such a schema.
    pub(in crate::connector) async fn named_schema(&self, topic: &Topic) -> Result<Named, Error> {
        match &topic.schema_settings {
            None => Ok(None),
            Some(settings) => self.catalog.schema(&settings.schema).await,
        }
    }

    /// Whether the schema of that name is this one still. If not, it is forgotten.
    pub(in crate::connector) async fn is_named_still(&self, topic: &Topic, named: &Named) -> Result<bool, Error> {
        let Some(settings) = &topic.schema_settings else { return Ok(true) };
        let name = settings.schema.as_str();
        if self.catalog.version(Kind::Schema, name).await? == version(named) {
            return Ok(true);
        }
        self.catalog.forget_schema(name);
        Ok(false)
    }

    /// Checks messages against the schema of their topic, if it has one.
    ///
    /// # Errors
    /// [`Error::SchemaViolation`] for the first that does not follow it, [`Error::SchemaDeleted`].
    pub(in crate::connector) async fn follow_schema(
        &self,
        topic: &Topic,
        named: &Named,
        messages: Vec<EncodedMessage>,
    ) -> Result<Vec<EncodedMessage>, Error> {
        let Some(settings) = &topic.schema_settings else { return Ok(messages) };
        let entry = named.clone().filter(|entry| is_meant(entry, settings)).ok_or(Error::SchemaDeleted)?;
        let bytes: usize = messages.iter().map(|message| message.data().len()).sum();
        let quick = bytes <= QUICK_BYTES && entry.is_warm(settings);
        let settings = settings.clone();
        let work = move || {
            let checked = messages.iter().map(|message| entry.apply(&settings, message));
            checked.collect::<Result<_, _>>().map_err(|violation| Error::SchemaViolation(Box::new(violation)))
        };
        if quick { work() } else { aside(work).await }
    }

    /// After a change of a schema: makes every node look its topics up again before it takes their next message.
    pub(super) async fn renew_topics_of(&self, schema: &SchemaName) -> Result<(), Error> {
        if !self.broker().is_shared() {
            return Ok(());
        }
        let mut after = String::new();
        loop {
            let page = self.broker().list(Kind::Topic, "projects/", &after, PAGE).await?;
            for found in &page {
                // One that can't be read takes no messages.
                let Ok(topic) = record::decode::<Topic>(found) else { continue };
                if topic.schema_settings.is_some_and(|settings| settings.schema == *schema) {
                    self.renew_topic(&topic.name).await?;
                }
            }
            match page.last() {
                Some(last) if page.len() == PAGE => after.clone_from(&last.name),
                _ => return Ok(()),
            }
        }
    }
}

/// The sequence number of a revision; none for no revision.
fn sequence(schema: &Schema, revision_id: &str) -> Result<Option<u64>, Error> {
    if revision_id.is_empty() {
        return Ok(None);
    }
    super::position(schema, revision_id).map(|at| Some(schema.revisions[at].sequence))
}
