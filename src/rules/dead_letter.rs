//! What a message becomes when it is forwarded to a dead-letter topic. Source: the dead-letter section of the public
//! documentation.

use bytes::Bytes;
use prost_types::Timestamp;

use crate::model::{EncodedMessage, MessageError, SubscriptionName, limits::MAX_ATTRIBUTE_VALUE_BYTES};

/// Every attribute the server adds begins with it. What an earlier forwarding left is replaced.
const PREFIX: &str = "CloudPubSubDeadLetterSource";
const DELIVERY_COUNT: &str = "CloudPubSubDeadLetterSourceDeliveryCount";
const SUBSCRIPTION: &str = "CloudPubSubDeadLetterSourceSubscription";
const SUBSCRIPTION_PROJECT: &str = "CloudPubSubDeadLetterSourceSubscriptionProject";
const TOPIC_PUBLISH_TIME: &str = "CloudPubSubDeadLetterSourceTopicPublishTime";

/// Why the deliveries failed, where the server knows.
const DELIVERY_ERROR: &str = "CloudPubSubDeadLetterSourceDeliveryErrorMessage";

/// The message to publish for a stored one that `source` gave up after `attempts` deliveries: the same data, attributes and
/// ordering key, with attributes that tell where it comes from. They don't count for the limits on attributes.
///
/// # Errors
/// [`MessageError`] when the stored encoding is damaged.
pub fn forwarded(
    stored: Bytes,
    source: &SubscriptionName,
    attempts: u32,
    error: Option<&str>,
) -> Result<EncodedMessage, MessageError> {
    let time = EncodedMessage::sealed(&stored).map(|(_, time_ms)| source_time(time_ms));
    let message = EncodedMessage::scan_system(stored)?;
    let attempts = attempts.to_string();
    let own = message.attributes().filter(|(key, _)| !key.starts_with(PREFIX));
    let added = [
        Some((DELIVERY_COUNT, attempts.as_str())),
        Some((SUBSCRIPTION, source.id())),
        Some((SUBSCRIPTION_PROJECT, source.project())),
        time.as_deref().map(|time| (TOPIC_PUBLISH_TIME, time)),
        error.map(|error| (DELIVERY_ERROR, shorten(error))),
    ];
    Ok(EncodedMessage::encode(message.data(), own.chain(added.into_iter().flatten()), message.ordering_key()))
}

/// What a forwarded message was before: the same without the attributes that forwarding added, and the subscription that gave
/// it up, if they name one.
///
/// # Errors
/// [`MessageError`] when the stored encoding is damaged.
pub fn original(stored: Bytes) -> Result<(EncodedMessage, Option<SubscriptionName>), MessageError> {
    let message = EncodedMessage::scan_system(stored)?;
    let (mut id, mut project) = (None, None);
    for (key, value) in message.attributes() {
        match key {
            SUBSCRIPTION => id = Some(value),
            SUBSCRIPTION_PROJECT => project = Some(value),
            _ => {}
        }
    }
    let source = project.zip(id).and_then(|(project, id)| SubscriptionName::new(project, id).ok());
    let own = message.attributes().filter(|(key, _)| !key.starts_with(PREFIX));
    Ok((EncodedMessage::encode(message.data(), own, message.ordering_key()), source))
}

/// What fits into an attribute.
fn shorten(text: &str) -> &str {
    let fits = (0..=text.len().min(MAX_ATTRIBUTE_VALUE_BYTES)).rev().find(|end| text.is_char_boundary(*end));
    &text[..fits.unwrap_or_default()]
}

/// As production writes it: `2022-08-12T15:56:29.732+00:00`.
fn source_time(ms: u64) -> String {
    let time = Timestamp { seconds: (ms / 1000) as i64, nanos: (ms % 1000 * 1_000_000) as i32 };
    time.to_string().replace('Z', "+00:00")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored<'a>(attributes: impl IntoIterator<Item = (&'a str, &'a str)>) -> Bytes {
        let mut wire = Vec::new();
        EncodedMessage::encode(b"data", attributes, "key").seal(17, 1_660_319_789_732, &mut wire);
        wire.into()
    }

    fn source() -> SubscriptionName {
        SubscriptionName::new("p1", "orders").unwrap()
    }

    #[test]
    fn a_dead_letter_keeps_its_content_and_tells_where_it_comes_from() {
        let message = forwarded(stored([("a", "1")]), &source(), 5, None).unwrap();
        assert_eq!((message.data(), message.ordering_key()), (&b"data"[..], "key"));
        let attributes: Vec<_> = message.attributes().collect();
        let expected = [
            ("a", "1"),
            ("CloudPubSubDeadLetterSourceDeliveryCount", "5"),
            ("CloudPubSubDeadLetterSourceSubscription", "orders"),
            ("CloudPubSubDeadLetterSourceSubscriptionProject", "p1"),
            ("CloudPubSubDeadLetterSourceTopicPublishTime", "2022-08-12T15:56:29.732+00:00"),
        ];
        assert_eq!(attributes, expected);
        assert_eq!(EncodedMessage::sealed(message.wire()), None);
    }

    #[test]
    fn a_message_at_the_limit_of_attributes_is_still_forwarded() {
        let keys: Vec<String> = (0..100).map(|n| format!("k{n}")).collect();
        let message = forwarded(stored(keys.iter().map(|key| (key.as_str(), "v"))), &source(), 5, None).unwrap();
        assert_eq!(message.attributes().count(), 104);
    }

    #[test]
    fn a_dead_letter_becomes_what_it_was() {
        let forwarded = forwarded(stored([("a", "1"), ("b", "")]), &source(), 5, Some("why")).unwrap();
        let mut wire = Vec::new();
        forwarded.seal(18, 1_660_319_800_000, &mut wire);
        let (message, from) = original(wire.into()).unwrap();
        assert_eq!(message.wire(), EncodedMessage::encode(b"data", [("a", "1"), ("b", "")], "key").wire());
        assert_eq!(from, Some(source()));
        assert_eq!(original(stored([("a", "1")])).unwrap().1, None);
        assert_eq!(original(stored([(SUBSCRIPTION, "no/name"), (SUBSCRIPTION_PROJECT, "p1")])).unwrap().1, None);
    }

    #[test]
    fn a_second_forwarding_replaces_what_the_first_added() {
        let first = forwarded(stored([]), &source(), 5, None).unwrap();
        let mut wire = Vec::new();
        first.seal(18, 1_660_319_800_000, &mut wire);
        let second = forwarded(wire.into(), &SubscriptionName::new("p2", "dead").unwrap(), 9, Some(&"é".repeat(600))).unwrap();
        let attributes = second.attribute_map();
        assert_eq!(attributes.len(), 5);
        assert_eq!(attributes[DELIVERY_ERROR].len(), MAX_ATTRIBUTE_VALUE_BYTES);
        assert_eq!(attributes[DELIVERY_COUNT], "9");
        assert_eq!(attributes[SUBSCRIPTION], "dead");
        assert_eq!(attributes[TOPIC_PUBLISH_TIME], "2022-08-12T15:56:40+00:00");
    }
}
