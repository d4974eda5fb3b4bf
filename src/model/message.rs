//! A message in its wire encoding (`google.pubsub.v1.PubsubMessage`), scanned but never decoded on the hot path.
//!
//! Fields: data = 1, attributes = 2, message_id = 3, publish_time = 4, ordering_key = 5. A publisher's fields 3 and 4 are
//! dropped; the broker appends its own with [`EncodedMessage::seal`], and that encoding is stored and delivered unchanged.

use std::{collections::BTreeMap, hash::Hasher, ops::Range, str};

use bytes::{BufMut, Bytes, BytesMut};
use siphasher::sip::SipHasher13;

use super::{
    limits::{MAX_ATTRIBUTE_KEY_BYTES, MAX_ATTRIBUTE_VALUE_BYTES, MAX_ATTRIBUTES, MAX_ORDERING_KEY_BYTES},
    text::clipped,
};

/// Attributes with this prefix are reserved, except for those that Google's own clients add.
const RESERVED_PREFIX: &str = "goog";
const CLIENT_PREFIX: &str = "googclient_";

/// A checked message as published: without id and publish time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodedMessage {
    wire: Bytes,
    data: Range<u32>,
    ordering_key: Range<u32>,
    attributes: u32,
}

/// Why a message can't be published.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    #[error("The message is not a valid protocol buffer encoding of google.pubsub.v1.PubsubMessage ({0}).")]
    Malformed(&'static str),
    #[error(
        "One or more messages in the publish request is empty. Each message must contain either non-empty data, or at least one attribute."
    )]
    Empty,
    #[error(
        "The value for attributes count is too large. You passed {0} in the request, but the maximum value is {MAX_ATTRIBUTES}."
    )]
    TooManyAttributes(usize),
    #[error("An attribute key must not be empty.")]
    EmptyAttributeKey,
    #[error(
        "The attribute key '{key}' is too long. You passed {bytes} bytes in the request, but the maximum value is {MAX_ATTRIBUTE_KEY_BYTES}."
    )]
    AttributeKeyTooLong { key: String, bytes: usize },
    #[error(
        "The value of attribute '{key}' is too long. You passed {bytes} bytes in the request, but the maximum value is {MAX_ATTRIBUTE_VALUE_BYTES}."
    )]
    AttributeValueTooLong { key: String, bytes: usize },
    #[error("The attribute key '{0}' is reserved: keys must not start with 'goog'.")]
    ReservedAttributeKey(String),
    #[error(
        "The value for ordering_key is too long. You passed {0} bytes in the request, but the maximum value is {MAX_ORDERING_KEY_BYTES}."
    )]
    OrderingKeyTooLong(usize),
}

/// One field of a protocol buffer message.
struct Field<'a> {
    number: u32,
    wire_type: u8,
    /// The value: the bytes of a length-delimited field, or the raw bytes of a scalar.
    value: &'a [u8],
    /// Where the whole field (tag included) lies.
    span: Range<usize>,
}

/// Walks the top-level fields of `wire`.
fn fields(wire: &[u8]) -> impl Iterator<Item = Result<Field<'_>, MessageError>> {
    let mut at = 0;
    std::iter::from_fn(move || {
        if at >= wire.len() {
            return None;
        }
        let field = read_field(wire, at);
        at = match &field {
            Ok(f) => f.span.end,
            Err(_) => wire.len(),
        };
        Some(field)
    })
}

fn read_field(wire: &[u8], start: usize) -> Result<Field<'_>, MessageError> {
    let mut at = start;
    let tag = read_varint(wire, &mut at)?;
    let number =
        u32::try_from(tag >> 3).ok().filter(|n| (1..1 << 29).contains(n)).ok_or(MessageError::Malformed("field number"))?;
    let wire_type = (tag & 7) as u8;
    let length = match wire_type {
        0 => {
            let before = at;
            read_varint(wire, &mut at)?;
            let length = at - before;
            at = before;
            length
        }
        1 => 8,
        2 => usize::try_from(read_varint(wire, &mut at)?).map_err(|_| MessageError::Malformed("length"))?,
        5 => 4,
        _ => return Err(MessageError::Malformed("wire type")),
    };
    let end = at.checked_add(length).filter(|end| *end <= wire.len()).ok_or(MessageError::Malformed("truncated field"))?;
    Ok(Field { number, wire_type, value: &wire[at..end], span: start..end })
}

fn read_varint(wire: &[u8], at: &mut usize) -> Result<u64, MessageError> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let byte = *wire.get(*at).ok_or(MessageError::Malformed("truncated number"))?;
        *at += 1;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Ok(value);
        }
    }
    Err(MessageError::Malformed("number too long"))
}

fn text<'a>(field: &Field<'a>) -> Result<&'a str, MessageError> {
    if field.wire_type != 2 {
        return Err(MessageError::Malformed("wire type"));
    }
    str::from_utf8(field.value).map_err(|_| MessageError::Malformed("string field contains invalid UTF-8"))
}

fn entry(bytes: &[u8]) -> Result<(&str, &str), MessageError> {
    let (mut key, mut value) = ("", "");
    for field in fields(bytes) {
        let field = field?;
        match field.number {
            1 => key = text(&field)?,
            2 => value = text(&field)?,
            _ => {}
        }
    }
    Ok((key, value))
}

impl EncodedMessage {
    /// Checks one encoded message against the form and the limits of the API. The request's own size limit is the caller's.
    ///
    /// # Errors
    /// [`MessageError`], naming the offending part, its size and the bound.
    pub fn scan(wire: Bytes) -> Result<Self, MessageError> {
        Self::scan_with(wire, true)
    }

    /// The same without the bounds on attributes, for messages the server itself extends (a dead letter may carry more
    /// than 100 attributes and reserved keys).
    ///
    /// # Errors
    /// [`MessageError::Malformed`] or [`MessageError::Empty`].
    pub fn scan_system(wire: Bytes) -> Result<Self, MessageError> {
        Self::scan_with(wire, false)
    }

    fn scan_with(wire: Bytes, bounded: bool) -> Result<Self, MessageError> {
        let mut message = Self { wire: Bytes::new(), data: 0..0, ordering_key: 0..0, attributes: 0 };
        let mut foreign = false;
        for field in fields(&wire) {
            let field = field?;
            let value = (field.span.end - field.value.len()) as u32..field.span.end as u32;
            match field.number {
                1 if field.wire_type != 2 => return Err(MessageError::Malformed("wire type")),
                1 => message.data = value,
                2 if field.wire_type != 2 => return Err(MessageError::Malformed("wire type")),
                2 => {
                    let (key, content) = entry(field.value)?;
                    if bounded {
                        check_attribute(key, content)?;
                    }
                    message.attributes += 1;
                }
                5 => {
                    text(&field)?;
                    message.ordering_key = value;
                }
                _ => foreign = true,
            }
        }
        if foreign {
            return Self::scan_with(keep_own_fields(&wire)?, bounded);
        }
        message.wire = wire;
        message.check(bounded)?;
        Ok(message)
    }

    fn check(&mut self, bounded: bool) -> Result<(), MessageError> {
        if self.data.is_empty() && self.attributes == 0 {
            return Err(MessageError::Empty);
        }
        if !bounded {
            return Ok(());
        }
        if self.attributes as usize > MAX_ATTRIBUTES {
            // A repeated key counts once (the last value wins), so count exactly before refusing.
            let distinct = self.attributes().collect::<BTreeMap<_, _>>().len();
            if distinct > MAX_ATTRIBUTES {
                return Err(MessageError::TooManyAttributes(distinct));
            }
        }
        if self.ordering_key.len() > MAX_ORDERING_KEY_BYTES {
            return Err(MessageError::OrderingKeyTooLong(self.ordering_key.len()));
        }
        Ok(())
    }

    /// Encodes a message from its parts, unchecked against the limits.
    pub fn encode<'a>(data: &[u8], attributes: impl IntoIterator<Item = (&'a str, &'a str)>, ordering_key: &str) -> Self {
        let mut wire = BytesMut::new();
        put_bytes(&mut wire, 1, data);
        let data = (wire.len() - data.len()) as u32..wire.len() as u32;
        let count = put_attributes(&mut wire, attributes);
        put_bytes(&mut wire, 5, ordering_key.as_bytes());
        let ordering_key = (wire.len() - ordering_key.len()) as u32..wire.len() as u32;
        Self { wire: wire.freeze(), data, ordering_key, attributes: count }
    }

    /// The same message with more attributes, unchecked against the limits. They replace those of the same key: of a repeated
    /// key the last value counts.
    pub fn with_attributes<'a>(&self, attributes: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let mut wire = BytesMut::from(&self.wire[..]);
        let count = put_attributes(&mut wire, attributes);
        Self { wire: wire.freeze(), attributes: self.attributes + count, ..self.clone() }
    }

    /// The encoding, without id and publish time.
    pub fn wire(&self) -> &Bytes {
        &self.wire
    }

    /// The payload.
    pub fn data(&self) -> &[u8] {
        &self.wire[self.data.start as usize..self.data.end as usize]
    }

    /// The ordering key; empty when there is none.
    pub fn ordering_key(&self) -> &str {
        str::from_utf8(&self.wire[self.ordering_key.start as usize..self.ordering_key.end as usize]).unwrap_or_default()
    }

    /// A 64-bit hash of the ordering key, the same on every node and for ever; 0 only without a key.
    pub fn ordering_key_hash(&self) -> u64 {
        if self.ordering_key.is_empty() {
            return 0;
        }
        let mut hasher = SipHasher13::new();
        hasher.write(&self.wire[self.ordering_key.start as usize..self.ordering_key.end as usize]);
        hasher.finish().max(1)
    }

    /// The attributes in wire order; a repeated key appears again and the last value is the valid one.
    pub fn attributes(&self) -> impl Iterator<Item = (&str, &str)> {
        fields(&self.wire).filter_map(|f| f.ok()).filter(|f| f.number == 2).filter_map(|f| entry(f.value).ok())
    }

    /// The attributes as a map.
    pub fn attribute_map(&self) -> BTreeMap<String, String> {
        self.attributes().map(|(k, v)| (k.to_owned(), v.to_owned())).collect()
    }

    /// Appends the stored encoding to `out`: the message with its id and publish time (milliseconds since the epoch).
    /// Both parts of the time are written, so that a merge with an earlier field can't leave a stale part.
    pub fn seal(&self, message_id: u64, publish_time_ms: u64, out: &mut impl BufMut) {
        out.put_slice(&self.wire);
        Self::seal_tail(message_id, publish_time_ms, out);
    }

    /// What [`seal`](Self::seal) appends to a message: its id and publish time.
    pub fn seal_tail(message_id: u64, publish_time_ms: u64, out: &mut impl BufMut) {
        let mut digits = [0u8; 20];
        let id = decimal(message_id, &mut digits);
        put_key(out, 3, 2);
        put_varint(out, id.len() as u64);
        out.put_slice(id);
        let (seconds, nanos) = (publish_time_ms / 1000, publish_time_ms % 1000 * 1_000_000);
        put_key(out, 4, 2);
        put_varint(out, (2 + varint_len(seconds) + varint_len(nanos)) as u64);
        put_key(out, 1, 0);
        put_varint(out, seconds);
        put_key(out, 2, 0);
        put_varint(out, nanos);
    }

    /// The value of one attribute of an encoded message; of a repeated key the last. None also for what is no message.
    pub fn attribute_of<'w>(wire: &'w [u8], key: &str) -> Option<&'w str> {
        let entries = fields(wire).filter_map(Result::ok).filter(|field| field.number == 2 && field.wire_type == 2);
        entries.filter_map(|field| entry(field.value).ok()).filter(|(found, _)| *found == key).map(|(_, value)| value).last()
    }

    /// The id and the publish time (milliseconds since the epoch) that [`seal`](Self::seal) put into a stored encoding.
    pub fn sealed(wire: &[u8]) -> Option<(&str, u64)> {
        let (mut id, mut time) = (None, None);
        for field in fields(wire) {
            let field = field.ok()?;
            match field.number {
                3 => id = text(&field).ok(),
                4 => time = timestamp_ms(field.value),
                _ => {}
            }
        }
        Some((id?, time?))
    }

    /// Upper bound of the bytes [`seal`](Self::seal) appends beyond the message itself.
    pub const SEAL_BYTES: usize = 48;
}

fn check_attribute(key: &str, value: &str) -> Result<(), MessageError> {
    if key.is_empty() {
        return Err(MessageError::EmptyAttributeKey);
    }
    if key.len() > MAX_ATTRIBUTE_KEY_BYTES {
        return Err(MessageError::AttributeKeyTooLong { key: clipped(key).into_owned(), bytes: key.len() });
    }
    if value.len() > MAX_ATTRIBUTE_VALUE_BYTES {
        return Err(MessageError::AttributeValueTooLong { key: clipped(key).into_owned(), bytes: value.len() });
    }
    if key.starts_with(RESERVED_PREFIX) && !key.starts_with(CLIENT_PREFIX) {
        return Err(MessageError::ReservedAttributeKey(clipped(key).into_owned()));
    }
    Ok(())
}

/// The milliseconds of an encoded `google.protobuf.Timestamp`.
fn timestamp_ms(wire: &[u8]) -> Option<u64> {
    let (mut seconds, mut nanos) = (0, 0);
    for field in fields(wire) {
        let field = field.ok()?;
        let value = read_varint(field.value, &mut 0).ok()?;
        match field.number {
            1 => seconds = value,
            2 => nanos = value,
            _ => {}
        }
    }
    Some(seconds * 1000 + nanos / 1_000_000)
}

/// Copies only the fields a publisher may set: data, attributes and ordering key.
fn keep_own_fields(wire: &[u8]) -> Result<Bytes, MessageError> {
    let mut kept = BytesMut::with_capacity(wire.len());
    for field in fields(wire) {
        let field = field?;
        if matches!(field.number, 1 | 2 | 5) {
            kept.extend_from_slice(&wire[field.span]);
        }
    }
    Ok(kept.freeze())
}

/// Writes attributes and answers how many there were.
fn put_attributes<'a>(wire: &mut BytesMut, attributes: impl IntoIterator<Item = (&'a str, &'a str)>) -> u32 {
    let mut count = 0;
    for (key, value) in attributes {
        let mut entry = BytesMut::new();
        put_bytes(&mut entry, 1, key.as_bytes());
        put_bytes(&mut entry, 2, value.as_bytes());
        put_key(wire, 2, 2);
        put_varint(wire, entry.len() as u64);
        wire.extend_from_slice(&entry);
        count += 1;
    }
    count
}

fn put_bytes(out: &mut impl BufMut, number: u64, bytes: &[u8]) {
    if !bytes.is_empty() {
        put_key(out, number, 2);
        put_varint(out, bytes.len() as u64);
        out.put_slice(bytes);
    }
}

fn put_key(out: &mut impl BufMut, number: u64, wire_type: u64) {
    put_varint(out, number << 3 | wire_type);
}

fn put_varint(out: &mut impl BufMut, mut value: u64) {
    while value >= 0x80 {
        out.put_u8(value as u8 | 0x80);
        value >>= 7;
    }
    out.put_u8(value as u8);
}

fn varint_len(value: u64) -> usize {
    (64 - (value | 1).leading_zeros() as usize).div_ceil(7)
}

fn decimal(mut value: u64, digits: &mut [u8; 20]) -> &[u8] {
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (value % 10) as u8;
        value /= 10;
        if value == 0 {
            return &digits[at..];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(attributes: &[(&str, &str)], key: &str) -> Bytes {
        EncodedMessage::encode(b"x", attributes.iter().copied(), key).wire().clone()
    }

    #[test]
    fn a_scan_finds_the_parts() {
        let scanned = EncodedMessage::scan(message(&[("a", "1"), ("b", "2")], "k")).unwrap();
        assert_eq!(scanned.data(), b"x");
        assert_eq!(scanned.ordering_key(), "k");
        assert_eq!(scanned.attributes().collect::<Vec<_>>(), [("a", "1"), ("b", "2")]);
    }

    #[test]
    fn attributes_are_added_or_replaced() {
        let message =
            EncodedMessage::scan(message(&[("a", "1"), ("b", "2")], "k")).unwrap().with_attributes([("b", "3"), ("c", "")]);
        assert_eq!(
            message.attribute_map().into_iter().collect::<Vec<_>>(),
            [("a", "1"), ("b", "3"), ("c", "")].map(|(k, v)| (k.into(), v.into()))
        );
        assert_eq!((message.data(), message.ordering_key()), (b"x".as_slice(), "k"));
        assert_eq!(EncodedMessage::scan(message.wire().clone()).unwrap(), message);
    }

    #[test]
    fn id_and_time_of_the_publisher_are_replaced() {
        let mut wire = BytesMut::from(&message(&[], "")[..]);
        put_bytes(&mut wire, 3, b"mine");
        put_bytes(&mut wire, 4, &[0x08, 0x05, 0x10, 0x07]);
        let scanned = EncodedMessage::scan(wire.freeze()).unwrap();
        let mut sealed = BytesMut::new();
        scanned.seal(1234567890123456, 1_700_000_000_123, &mut sealed);
        let ids: Vec<_> = fields(&sealed).map(|f| f.unwrap()).filter(|f| f.number == 3).map(|f| f.value.to_vec()).collect();
        assert_eq!(ids, [b"1234567890123456".to_vec()]);
        assert_eq!(EncodedMessage::sealed(&sealed), Some(("1234567890123456", 1_700_000_000_123)));
        assert_eq!(fields(&sealed).filter(|f| f.as_ref().unwrap().number == 4).count(), 1);
    }

    #[test]
    fn limits_are_inclusive_and_count_bytes() {
        let long = "k".repeat(256);
        assert!(EncodedMessage::scan(message(&[(&long, "")], "")).is_ok());
        assert!(matches!(
            EncodedMessage::scan(message(&[(&"k".repeat(257), "")], "")),
            Err(MessageError::AttributeKeyTooLong { bytes: 257, .. })
        ));
        assert!(EncodedMessage::scan(message(&[("k", &"v".repeat(1024))], "")).is_ok());
        assert!(matches!(
            EncodedMessage::scan(message(&[("k", &"é".repeat(600))], "")),
            Err(MessageError::AttributeValueTooLong { bytes: 1200, .. })
        ));
        assert!(EncodedMessage::scan(message(&[], &"o".repeat(1024))).is_ok());
        assert_eq!(EncodedMessage::scan(message(&[], &"o".repeat(1025))), Err(MessageError::OrderingKeyTooLong(1025)));
    }

    #[test]
    fn the_clients_own_tracing_attributes_are_not_reserved() {
        assert!(EncodedMessage::scan(message(&[("googclient_traceparent", "00-1")], "")).is_ok());
        assert!(matches!(EncodedMessage::scan(message(&[("goog-foo", "x")], "")), Err(MessageError::ReservedAttributeKey(_))));
    }

    #[test]
    fn an_ordering_key_alone_is_an_empty_message() {
        let wire = EncodedMessage::encode(b"", [], "k").wire().clone();
        assert_eq!(EncodedMessage::scan(wire), Err(MessageError::Empty));
    }

    #[test]
    fn broken_encodings_are_refused() {
        for wire in [&[0x0a, 0x05, 0x01][..], &[0x0b], &[0x2a, 0x01, 0xff], &[0x0a], &[0x80; 11], &[0x00, 0x00]] {
            assert!(matches!(EncodedMessage::scan(Bytes::copy_from_slice(wire)), Err(MessageError::Malformed(_))), "{wire:?}");
        }
    }
}
