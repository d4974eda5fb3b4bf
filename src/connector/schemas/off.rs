//! Stands in for schemas in a server built without them: whatever needs one is refused.

use super::{Connector, Error, draft::SchemaDraft};
use crate::model::{EncodedMessage, SchemaSettings, Topic};

const REFUSED: Error = Error::Unsupported("schema_settings");

pub(super) type Named = ();

pub(super) fn version(_named: &Named) -> Option<u64> {
    None
}

impl Connector {
    pub(super) async fn schema_settings(&self, draft: Option<&SchemaDraft>) -> Result<Option<SchemaSettings>, Error> {
        if draft.is_none() { Ok(None) } else { Err(REFUSED) }
    }

    pub(super) async fn schema_deleted(&self, _topic: &Topic) -> Result<bool, Error> {
        Ok(false)
    }

    pub(super) async fn named_schema(&self, _topic: &Topic) -> Result<Named, Error> {
        Ok(())
    }

    pub(super) async fn is_named_still(&self, _topic: &Topic, _named: &Named) -> Result<bool, Error> {
        Ok(true)
    }

    /// The topic may have got its schema from a server that has them; its messages must not pass unchecked.
    pub(super) async fn follow_schema(
        &self,
        topic: &Topic,
        _named: &Named,
        messages: Vec<EncodedMessage>,
    ) -> Result<Vec<EncodedMessage>, Error> {
        if topic.schema_settings.is_none() { Ok(messages) } else { Err(REFUSED) }
    }
}
