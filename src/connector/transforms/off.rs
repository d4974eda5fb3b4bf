//! Stands in for message transforms in a server built without them: whatever has one is refused.

use std::sync::Arc;

use super::{Connector, Error, SubscriptionEntry, draft::TransformDraft};
use crate::{
    broker::{DeadLetter, Leased},
    model::{EncodedMessage, MessageTransform},
};

const REFUSED: Error = Error::Unsupported("message_transforms");
/// Messages leased at once for a subscription with transforms.
pub(super) const MAX_LEASED: usize = 1;

/// The functions of one topic or subscription, in order.
pub(super) type Pipeline = Arc<[MessageTransform]>;

/// The enabled transforms of a resource, which another server may have set.
pub(super) fn pipeline(transforms: &[MessageTransform]) -> Pipeline {
    transforms.iter().filter(|transform| !transform.disabled).cloned().collect()
}

impl Connector {
    pub(super) async fn message_transforms(&self, drafts: &[TransformDraft]) -> Result<Vec<MessageTransform>, Error> {
        if drafts.is_empty() { Ok(Vec::new()) } else { Err(REFUSED) }
    }

    pub(super) async fn transform_published(
        &self,
        transforms: &Pipeline,
        messages: Vec<EncodedMessage>,
    ) -> Result<Vec<Option<EncodedMessage>>, Error> {
        if transforms.is_empty() { Ok(messages.into_iter().map(Some).collect()) } else { Err(REFUSED) }
    }

    /// Refuses, when the subscription has transforms; the messages go back uncounted.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub(super) async fn transform_leased(&self, entry: &SubscriptionEntry, leased: Vec<Leased>) -> Result<Vec<Leased>, Error> {
        if entry.transforms.is_empty() {
            return Ok(leased);
        }
        self.delivery.release(&entry.queue, leased.iter().map(|l| l.token).collect());
        Err(REFUSED)
    }

    pub(super) async fn transform_errors(&self, _: &SubscriptionEntry, letters: &[DeadLetter]) -> Vec<Option<String>> {
        vec![None; letters.len()]
    }
}
