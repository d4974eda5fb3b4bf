//! Stands in for schemas in a server built without them: whatever needs one is refused.

use super::{Connector, Error, draft::SchemaDraft};
use crate::model::{EncodedMessage, SchemaSettings, Topic};

const REFUSED: Error = Error::Unsupported("schema_settings");

impl Connector {
    pub(super) async fn schema_settings(&self, draft: Option<&SchemaDraft>) -> Result<Option<SchemaSettings>, Error> {
        if draft.is_none() { Ok(None) } else { Err(REFUSED) }
    }

    pub(super) async fn schema_deleted(&self, _topic: &Topic) -> Result<bool, Error> {
        Ok(false)
    }

    /// The topic may have got its schema from a server that has them; its messages must not pass unchecked.
    pub(super) async fn follow_schema(&self, topic: &Topic, messages: Vec<EncodedMessage>) -> Result<Vec<EncodedMessage>, Error> {
        if topic.schema_settings.is_none() { Ok(messages) } else { Err(REFUSED) }
    }
}
