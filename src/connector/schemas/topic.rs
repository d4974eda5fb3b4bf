//! What a topic has to do with its schema: settings, and the check of its messages.

use super::{SchemaEntry, aside};
use crate::{
    connector::{Connector, Error, draft::SchemaDraft},
    model::{EncodedMessage, Schema, SchemaName, SchemaSettings, Topic},
};

/// Bytes of a request's payloads that are checked at once, in less than a millisecond. More, and the first use of a revision,
/// go to a thread that may take its time.
const QUICK_BYTES: usize = 64 * 1024;

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
            Some(settings) => Ok(self.schema_of(settings).await?.is_none()),
        }
    }

    async fn schema_of(&self, settings: &SchemaSettings) -> Result<Option<std::sync::Arc<SchemaEntry>>, Error> {
        let entry = self.catalog.schema(&settings.schema).await?;
        Ok(entry.filter(|entry| entry.schema.incarnation == settings.schema_incarnation))
    }

    /// Checks messages against the schema of their topic, if it has one.
    ///
    /// # Errors
    /// [`Error::SchemaViolation`] for the first that does not follow it, [`Error::SchemaDeleted`].
    pub(in crate::connector) async fn follow_schema(
        &self,
        topic: &Topic,
        messages: Vec<EncodedMessage>,
    ) -> Result<Vec<EncodedMessage>, Error> {
        let Some(settings) = &topic.schema_settings else { return Ok(messages) };
        let entry = self.schema_of(settings).await?.ok_or(Error::SchemaDeleted)?;
        let bytes: usize = messages.iter().map(|message| message.data().len()).sum();
        let quick = bytes <= QUICK_BYTES && entry.is_warm(settings);
        let settings = settings.clone();
        let work = move || {
            let checked = messages.iter().map(|message| entry.apply(&settings, message));
            checked.collect::<Result<_, _>>().map_err(|violation| Error::SchemaViolation(Box::new(violation)))
        };
        if quick { work() } else { aside(work).await }
    }
}

/// The sequence number of a revision; none for no revision.
fn sequence(schema: &Schema, revision_id: &str) -> Result<Option<u64>, Error> {
    if revision_id.is_empty() {
        return Ok(None);
    }
    super::position(schema, revision_id).map(|at| Some(schema.revisions[at].sequence))
}
