//! What the use cases tell the tracer, where there is one.

use bytes::Bytes;

use super::{Connector, Error, SubscriptionEntry, pull::Delivered};
use crate::{
    broker::Outcome,
    model::{EncodedMessage, SubscriptionName, TopicName},
    telemetry::{Batch, CREATED_BY, Context, Facts, Operation, Tracer, now_nanos},
};

/// Settling under way: one batch a kind, with what is known of its messages.
pub(super) type Settling<'t> = Vec<(Box<Batch<'t>>, Vec<Facts>)>;

/// The context that a message was created in, if its publisher wrote it down.
pub fn created(wire: &[u8]) -> Option<Context> {
    EncodedMessage::attribute_of(wire, CREATED_BY).and_then(Context::parse)
}

/// What spans tell of a stored message.
pub fn facts(wire: &[u8], delivery_attempt: u32) -> Facts {
    let message_id = EncodedMessage::sealed(wire).map_or_else(String::new, |(id, _)| id.to_owned());
    Facts { message_id, delivery_attempt }
}

/// The kind of an error, of which there are few.
fn kind(error: &Error) -> String {
    format!("{error:?}").chars().take_while(char::is_ascii_alphanumeric).collect()
}

impl Connector {
    /// The tracer, where spans are recorded.
    pub fn tracer(&self) -> Option<&Tracer> {
        self.options.tracer.as_deref()
    }

    /// The time, where spans are recorded.
    pub(super) fn traced_now(&self) -> Option<u64> {
        self.options.tracer.as_ref().map(|_| now_nanos())
    }

    pub(super) fn trace_sending(&self, topic: &TopicName, messages: &[Bytes]) -> Option<Box<Batch<'_>>> {
        let created = messages.iter().map(|wire| created(wire));
        self.tracer()?.begin(Operation::SEND, topic.project(), topic.id(), created)
    }

    /// Messages are on their way to a client, below `parent`, since `began`.
    pub(super) fn trace_receiving(
        &self,
        subscription: &SubscriptionName,
        parent: Option<Context>,
        began: Option<u64>,
        messages: &[Delivered],
    ) {
        let Some(tracer) = self.tracer().filter(|_| !messages.is_empty()) else { return };
        let created = messages.iter().map(|delivered| created(&delivered.message));
        let (project, id) = (subscription.project(), subscription.id());
        let Some(batch) = tracer.begin_below(parent, Operation::RECEIVE, project, id, created) else { return };
        let batch = match began {
            Some(began) => batch.since(began),
            None => batch,
        };
        let facts = |index: usize| facts(&messages[index].message, messages[index].delivery_attempt);
        batch.remember(|index| messages[index].ack_id.as_str(), facts);
        batch.end(facts, None);
    }

    /// Settling begins; `operation` is that of the id at an index.
    pub(super) fn trace_settling(
        &self,
        entry: &SubscriptionEntry,
        ack_ids: &[String],
        operation: impl Fn(usize) -> Operation,
    ) -> Settling<'_> {
        let Some(tracer) = self.tracer() else { return Vec::new() };
        let name = &entry.subscription.name;
        let begin = |wanted| {
            let ids = ack_ids.iter().enumerate().filter(|(index, _)| operation(*index) == wanted).map(|(_, id)| id.as_str());
            tracer.begin_settling(wanted, name.project(), name.id(), ids)
        };
        [Operation::ACK, Operation::NACK, Operation::MODACK].into_iter().filter_map(begin).collect()
    }
}

/// Publishing is over.
pub(super) fn end_sending(batch: Box<Batch<'_>>, published: &Result<Vec<u64>, Error>) {
    let facts = |index: usize| {
        let id = published.as_ref().ok().and_then(|ids| ids.get(index));
        Facts { message_id: id.map_or_else(String::new, u64::to_string), delivery_attempt: 0 }
    };
    match published {
        Ok(_) => batch.end(facts, None),
        Err(error) => batch.end(facts, Some((&kind(error), &error.to_string()))),
    }
}

/// Settling is over.
pub(super) fn end_settling(settling: Settling<'_>, outcomes: &Result<Vec<Outcome>, Error>) {
    for (batch, known) in settling {
        let facts = |index: usize| known.get(index).cloned().unwrap_or_default();
        match outcomes {
            Ok(outcomes) if outcomes.iter().all(|outcome| *outcome == Outcome::Done) => batch.end(facts, None),
            Ok(_) => batch.end(facts, Some(("AckIds", "Not every ack id of the request could be carried out."))),
            Err(error) => batch.end(facts, Some((&kind(error), &error.to_string()))),
        }
    }
}
