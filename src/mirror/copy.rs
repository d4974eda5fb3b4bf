//! What becomes of a message on its way.

use bytes::Bytes;

use crate::model::EncodedMessage;

/// The attribute that a copy bears: the topic it was copied into.
pub const MARKER: &str = "landline-mirror";
/// Attributes that a topic with a schema adds to what it takes; the destination adds its own.
const SCHEMA_PREFIX: &str = "googclient_schema";

/// What to do with a message.
#[derive(Debug)]
pub enum Verdict {
    /// Publish this.
    Copy(EncodedMessage),
    /// It is a copy itself, made by the mirror of the other direction.
    Skip,
    /// It can't be read.
    Malformed,
}

/// Looks at a message of a subscription of `source`, where that is known, which goes to `topic`.
///
/// A copy that was made into another topic than `source` came here some other way, as a dead letter, and is a message of its
/// own. Where the source is not known, any copy is taken for one of the other direction: that loses nothing but such dead
/// letters, and never makes a circle.
pub fn copy(message: &Bytes, source: Option<&str>, topic: &str) -> Verdict {
    let Ok(message) = EncodedMessage::scan_system(message.clone()) else { return Verdict::Malformed };
    let (mut marker, mut foreign) = (None, false);
    for (key, value) in message.attributes() {
        match key {
            MARKER => marker = Some(value),
            _ => foreign |= key.starts_with(SCHEMA_PREFIX),
        }
    }
    let skip = marker.is_some_and(|marker| source.is_none_or(|source| source == marker));
    let replace = foreign || marker.is_some();
    match (skip, replace) {
        (true, _) => Verdict::Skip,
        (false, false) => Verdict::Copy(message.with_attributes([(MARKER, topic)])),
        (false, true) => {
            let kept = message.attributes().filter(|(key, _)| *key != MARKER && !key.starts_with(SCHEMA_PREFIX));
            let attributes = kept.chain([(MARKER, topic)]);
            Verdict::Copy(EncodedMessage::encode(message.data(), attributes, message.ordering_key()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: Option<&str> = Some("projects/a/topics/t");
    const THERE: &str = "projects/b/topics/t";

    fn received(attributes: &[(&str, &str)]) -> Bytes {
        let message = EncodedMessage::encode(b"data", attributes.iter().copied(), "key");
        let mut wire = Vec::new();
        message.seal(7, 1_700_000_000_000, &mut wire);
        wire.into()
    }

    fn copied(attributes: &[(&str, &str)], source: Option<&str>) -> Option<Vec<(String, String)>> {
        match copy(&received(attributes), source, THERE) {
            Verdict::Copy(message) => {
                assert_eq!((message.data(), message.ordering_key()), (&b"data"[..], "key"));
                assert!(EncodedMessage::sealed(message.wire()).is_none(), "the id stays behind");
                Some(message.attribute_map().into_iter().collect())
            }
            _ => None,
        }
    }

    #[test]
    fn a_copy_keeps_everything_and_is_marked() {
        let marked = |attributes: &[(&str, &str)]| {
            let all = attributes.iter().chain(&[(MARKER, THERE)]);
            Some(all.map(|(key, value)| (key.to_string(), value.to_string())).collect::<Vec<_>>())
        };
        assert_eq!(copied(&[("a", "b"), ("c", "")], HERE), marked(&[("a", "b"), ("c", "")]));
        assert_eq!(copied(&[], None), marked(&[]));
        assert_eq!(copied(&[("googclient_schemaname", "s"), ("a", "b")], HERE), marked(&[("a", "b")]));
    }

    #[test]
    fn a_copy_goes_no_further_unless_it_came_here_another_way() {
        assert_eq!(copied(&[(MARKER, "projects/a/topics/t")], HERE), None);
        assert_eq!(copied(&[(MARKER, "projects/a/topics/other")], None), None);
        let dead_letter = copied(&[(MARKER, "projects/a/topics/orders")], HERE);
        assert_eq!(dead_letter, Some(vec![(MARKER.to_owned(), THERE.to_owned())]));
    }
}
