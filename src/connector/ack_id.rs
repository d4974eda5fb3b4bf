//! Ack ids: what a client hands back to settle one delivery.
//!
//! An ack id is base64url (no padding) of compact JSON with one-letter keys and text values:
//!
//! | key | holds |
//! |---|---|
//! | `c` | the subscription's channel `gcp.sub.{project/id}`, hashed |
//! | `s` | the subscription's incarnation, hashed |
//! | `n` | the id of the node that delivered the message, hashed |
//! | `t` | the broker's transaction |
//! | `q` | the message's sequence in its queue |
//! | `l` | the lease |
//! | `r` | receive count: which delivery of the message this was |
//! | `d` | when the lease ended by the time of delivery, tenths of a second since the epoch; the broker's own deadline rules |
//! | `m` | 96 bits of a keyed MAC |
//!
//! Values are numbers in base 85, so that the largest ones still fit [`MAX_BYTES`]. The MAC's key is derived from the
//! cluster's secret, the whole channel name, the whole incarnation and the node's hash: the short hashes are only hints
//! for a precise error, and a collision of them settles nothing.
//!
//! The first `HEAD_BYTES` of the JSON are the same for everything one node delivers from one subscription. They are a
//! multiple of three, so their base64 is prepared once, and reading an own id is a comparison plus the rest.

use std::hash::Hasher;

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use serde::Deserialize;
use siphasher::{
    sip::SipHasher24,
    sip128::{Hasher128, SipHasher24 as Mac},
};

use crate::broker::{LeaseToken, QueueRef};

/// Longest ack id: 2,500 of them, the largest batch of the official clients, stay below a request's 512 KiB.
pub const MAX_BYTES: usize = 176;

/// Longest JSON text: `MAX_BYTES` of base64.
const MAX_JSON_BYTES: usize = MAX_BYTES / 4 * 3;

/// `{"c":"....","s":"....","n":"....","t":"`
const HEAD_BYTES: usize = 39;

/// Base64 of the head; the head's length is a multiple of three.
const HEAD_CHARS: usize = HEAD_BYTES / 3 * 4;

/// Digits of a hash in the head.
const TAG_DIGITS: usize = 4;

/// Values of a hash in the head: what `TAG_DIGITS` digits tell apart.
const TAGS: u64 = 85u64.pow(TAG_DIGITS as u32);

/// Longest deadline, digits: tenths of a second up to the year 3165. Later ones are cut to this.
const MAX_DEADLINE: u64 = 85u64.pow(6) - 1;

/// Milliseconds of one unit of `d`.
const DEADLINE_UNIT_MS: u64 = 100;

/// Digits of the MAC: three times 32 bits of five digits each.
const MAC_DIGITS: usize = 15;

/// The digits: printable ASCII that JSON does not escape.
const DIGITS: &[u8; 85] = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_.~!*()'+,:;=@#$%&?[]{";

/// The value of each digit; `NOT_A_DIGIT` for every other byte.
const VALUES: [u8; 256] = values();

const NOT_A_DIGIT: u8 = 0xff;

const fn values() -> [u8; 256] {
    let mut values = [NOT_A_DIGIT; 256];
    let mut at = 0;
    while at < DIGITS.len() {
        values[DIGITS[at] as usize] = at as u8;
        at += 1;
    }
    values
}

/// Why an ack id can't be used with a subscription.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AckIdError {
    /// Not an ack id of this cluster: misspelt, cut, made up or changed.
    Malformed,
    /// It names a delivery of another subscription, or of an earlier one of the same name.
    Foreign,
}

/// What an ack id says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AckId {
    pub token: LeaseToken,
    /// Whether this node delivered the message.
    pub own_node: bool,
}

/// Makes and reads the ack ids of one cluster on one node.
#[derive(Clone)]
pub struct AckIds {
    secret: [u8; 16],
    node: u64,
}

/// Makes and reads the ack ids of one subscription on one node.
#[derive(Clone)]
pub struct Minter {
    ids: AckIds,
    queue: QueueRef,
    head: [u8; HEAD_CHARS],
    channel: u64,
    incarnation: u64,
    mac: Mac,
}

impl AckIds {
    /// `secret` is the same on all nodes of the cluster; `node_id` names this one.
    pub fn new(secret: [u8; 16], node_id: &str) -> Self {
        let node = tag(&secret, b"node", node_id.as_bytes());
        Self { secret, node }
    }

    /// Prepares for one incarnation of one subscription.
    pub fn minter(&self, queue: &QueueRef) -> Minter {
        let channel = tag(&self.secret, b"channel", queue.channel.as_bytes());
        let incarnation = tag(&self.secret, b"incarnation", &queue.incarnation.to_le_bytes());
        let mut head = Text::<HEAD_BYTES>::new();
        for (key, value) in [(b'c', channel), (b's', incarnation), (b'n', self.node)] {
            head.put(if key == b'c' { b"{\"" } else { b",\"" });
            head.put(&[key]);
            head.put(b"\":\"");
            head.put_fixed::<TAG_DIGITS>(value);
            head.put(b"\"");
        }
        head.put(b",\"t\":\"");
        let mut encoded = [0; HEAD_CHARS];
        // The buffer has the exact size, so nothing can fail here.
        let _ = URL_SAFE_NO_PAD.encode_slice(head.bytes(), &mut encoded);
        let mac = self.mac(queue, self.node);
        Minter { ids: self.clone(), queue: queue.clone(), head: encoded, channel, incarnation, mac }
    }

    /// The MAC of ids that `node` makes for `queue`.
    fn mac(&self, queue: &QueueRef, node: u64) -> Mac {
        let mut hasher = Mac::new_with_key(&self.secret);
        hasher.write(b"gcp.sub.{");
        hasher.write(queue.channel.as_bytes());
        hasher.write(b"}");
        hasher.write(&queue.incarnation.to_le_bytes());
        hasher.write(&node.to_le_bytes());
        let key = hasher.finish128();
        Mac::new_with_keys(key.h1, key.h2)
    }
}

/// A hash of few digits, keyed so that nobody outside the cluster can look for collisions.
fn tag(secret: &[u8; 16], kind: &[u8], bytes: &[u8]) -> u64 {
    let mut hasher = SipHasher24::new_with_key(secret);
    hasher.write(kind);
    hasher.write(bytes);
    hasher.finish() % TAGS
}

impl Minter {
    /// The queue these ids belong to.
    pub fn queue(&self) -> &QueueRef {
        &self.queue
    }

    /// The ack id of one delivery.
    pub fn mint(&self, token: &LeaseToken, deadline_at_ms: u64) -> String {
        let deadline = (deadline_at_ms / DEADLINE_UNIT_MS).min(MAX_DEADLINE);
        let mut tail = Text::<{ MAX_JSON_BYTES - HEAD_BYTES }>::new();
        tail.put_number(token.transaction);
        tail.put(b"\",\"q\":\"");
        tail.put_number(token.sequence);
        tail.put(b"\",\"l\":\"");
        tail.put_number(token.lease);
        tail.put(b"\",\"r\":\"");
        tail.put_number(u64::from(token.attempt));
        tail.put(b"\",\"d\":\"");
        tail.put_number(deadline);
        tail.put(b"\",\"m\":\"");
        for word in sign(self.mac, token, deadline) {
            tail.put_fixed::<{ MAC_DIGITS / 3 }>(u64::from(word));
        }
        tail.put(b"\"}");
        let mut text = [0u8; MAX_BYTES];
        text[..HEAD_CHARS].copy_from_slice(&self.head);
        let length = URL_SAFE_NO_PAD.encode_slice(tail.bytes(), &mut text[HEAD_CHARS..]).unwrap_or_default();
        str::from_utf8(&text[..HEAD_CHARS + length]).unwrap_or_default().to_owned()
    }

    /// Reads an ack id of this subscription.
    ///
    /// # Errors
    /// [`AckIdError::Malformed`] or [`AckIdError::Foreign`].
    pub fn read(&self, text: &str) -> Result<AckId, AckIdError> {
        let bytes = text.as_bytes();
        if bytes.len() > MAX_BYTES {
            return Err(AckIdError::Malformed);
        }
        match bytes.split_first_chunk::<HEAD_CHARS>() {
            Some((head, rest)) if *head == self.head => self.read_own(rest).ok_or(AckIdError::Malformed),
            _ => self.read_any(bytes),
        }
    }

    /// Reads the part after an own head.
    fn read_own(&self, encoded: &[u8]) -> Option<AckId> {
        let mut buffer = [0; MAX_JSON_BYTES - HEAD_BYTES + 2];
        let length = URL_SAFE_NO_PAD.decode_slice(encoded, &mut buffer).ok()?;
        let mut rest = &buffer[..length];
        let transaction = take_number(&mut rest, b"\",\"q\":\"")?;
        let sequence = take_number(&mut rest, b"\",\"l\":\"")?;
        let lease = take_number(&mut rest, b"\",\"r\":\"")?;
        let attempt = u32::try_from(take_number(&mut rest, b"\",\"d\":\"")?).ok()?;
        let deadline = take_number(&mut rest, b"\",\"m\":\"")?;
        let mac = parse_mac(rest.strip_suffix(b"\"}")?)?;
        let token = LeaseToken { transaction, sequence, lease, attempt };
        same(sign(self.mac, &token, deadline), mac).then_some(AckId { token, own_node: true })
    }

    /// Reads an id with another head: of another node, or not of this subscription at all.
    fn read_any(&self, encoded: &[u8]) -> Result<AckId, AckIdError> {
        let mut buffer = [0; MAX_JSON_BYTES + 2];
        let length = URL_SAFE_NO_PAD.decode_slice(encoded, &mut buffer).map_err(|_| AckIdError::Malformed)?;
        let fields: Fields<'_> = serde_json::from_slice(&buffer[..length]).map_err(|_| AckIdError::Malformed)?;
        let parsed = fields.parse().ok_or(AckIdError::Malformed)?;
        if (parsed.channel, parsed.incarnation) != (self.channel, self.incarnation) {
            return Err(AckIdError::Foreign);
        }
        let mac = self.ids.mac(&self.queue, parsed.node);
        if !same(sign(mac, &parsed.token, parsed.deadline), parsed.mac) {
            return Err(AckIdError::Malformed);
        }
        Ok(AckId { token: parsed.token, own_node: parsed.node == self.ids.node })
    }
}

/// The JSON text of an ack id.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields<'a> {
    c: &'a str,
    s: &'a str,
    n: &'a str,
    t: &'a str,
    q: &'a str,
    l: &'a str,
    r: &'a str,
    d: &'a str,
    m: &'a str,
}

struct Parsed {
    channel: u64,
    incarnation: u64,
    node: u64,
    token: LeaseToken,
    deadline: u64,
    mac: [u32; 3],
}

impl Fields<'_> {
    fn parse(&self) -> Option<Parsed> {
        let tag = |text: &str| (text.len() == TAG_DIGITS).then(|| parse_digits(text.as_bytes())).flatten();
        Some(Parsed {
            channel: tag(self.c)?,
            incarnation: tag(self.s)?,
            node: tag(self.n)?,
            token: LeaseToken {
                transaction: parse_number(self.t.as_bytes())?,
                sequence: parse_number(self.q.as_bytes())?,
                lease: parse_number(self.l.as_bytes())?,
                attempt: u32::try_from(parse_number(self.r.as_bytes())?).ok()?,
            },
            deadline: parse_number(self.d.as_bytes())?,
            mac: parse_mac(self.m.as_bytes())?,
        })
    }
}

/// 96 bits over everything that the key does not cover.
fn sign(mac: Mac, token: &LeaseToken, deadline: u64) -> [u32; 3] {
    let mut bytes = [0; 40];
    bytes[..8].copy_from_slice(&token.transaction.to_le_bytes());
    bytes[8..16].copy_from_slice(&token.sequence.to_le_bytes());
    bytes[16..24].copy_from_slice(&token.lease.to_le_bytes());
    bytes[24..32].copy_from_slice(&u64::from(token.attempt).to_le_bytes());
    bytes[32..].copy_from_slice(&deadline.to_le_bytes());
    let hash = mac.hash(&bytes);
    [hash.h1 as u32, (hash.h1 >> 32) as u32, hash.h2 as u32]
}

/// Compares without telling by its duration where the difference is.
fn same(a: [u32; 3], b: [u32; 3]) -> bool {
    std::hint::black_box((a[0] ^ b[0]) | (a[1] ^ b[1]) | (a[2] ^ b[2])) == 0
}

/// Takes a number and the text that must follow it.
fn take_number(rest: &mut &[u8], then: &[u8]) -> Option<u64> {
    let end = rest.iter().position(|byte| *byte == b'"')?;
    let value = parse_number(&rest[..end])?;
    *rest = rest[end..].strip_prefix(then)?;
    Some(value)
}

/// A number without leading zeros.
fn parse_number(digits: &[u8]) -> Option<u64> {
    if digits.first() == Some(&b'0') && digits.len() > 1 {
        return None;
    }
    parse_digits(digits)
}

fn parse_digits(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() {
        return None;
    }
    let mut value = 0u64;
    for digit in digits {
        let digit = VALUES[usize::from(*digit)];
        if digit == NOT_A_DIGIT {
            return None;
        }
        value = value.checked_mul(85)?.checked_add(u64::from(digit))?;
    }
    Some(value)
}

fn parse_mac(digits: &[u8]) -> Option<[u32; 3]> {
    let (words, rest) = digits.as_chunks::<{ MAC_DIGITS / 3 }>();
    let [a, b, c] = words else { return None };
    let word = |digits: &[u8]| parse_digits(digits).and_then(|value| u32::try_from(value).ok());
    rest.is_empty().then_some([word(a)?, word(b)?, word(c)?])
}

/// Text that grows on the stack. What does not fit is cut; the sizes above rule that out.
struct Text<const N: usize> {
    buffer: [u8; N],
    length: usize,
}

impl<const N: usize> Text<N> {
    fn new() -> Self {
        Self { buffer: [0; N], length: 0 }
    }

    fn bytes(&self) -> &[u8] {
        &self.buffer[..self.length]
    }

    fn put(&mut self, bytes: &[u8]) {
        if let Some(room) = self.buffer.get_mut(self.length..self.length + bytes.len()) {
            room.copy_from_slice(bytes);
            self.length += bytes.len();
        }
    }

    /// A number without leading zeros.
    fn put_number(&mut self, mut value: u64) {
        let mut digits = [0; 10];
        let mut at = digits.len();
        loop {
            at -= 1;
            digits[at] = DIGITS[(value % 85) as usize];
            value /= 85;
            if value == 0 {
                break;
            }
        }
        self.put(&digits[at..]);
    }

    /// The last `D` digits of a number.
    fn put_fixed<const D: usize>(&mut self, mut value: u64) {
        let mut digits = [0; D];
        for digit in digits.iter_mut().rev() {
            *digit = DIGITS[(value % 85) as usize];
            value /= 85;
        }
        self.put(&digits);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: [u8; 16] = *b"0123456789abcdef";

    fn queue(channel: &str, incarnation: u64) -> QueueRef {
        QueueRef { channel: channel.into(), incarnation }
    }

    fn minter(node: &str) -> Minter {
        AckIds::new(SECRET, node).minter(&queue("shop/orders", 7))
    }

    const TOKEN: LeaseToken = LeaseToken { transaction: 12, sequence: 34_567, lease: 89, attempt: 1 };

    #[test]
    fn an_id_is_base64url_of_json_with_short_keys() {
        let text = minter("n1").mint(&TOKEN, 1_700_000_000_000);
        let json = URL_SAFE_NO_PAD.decode(&text).unwrap();
        let value: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(&json).unwrap();
        assert_eq!(value.keys().map(String::as_str).collect::<Vec<_>>(), ["c", "d", "l", "m", "n", "q", "r", "s", "t"]);
        assert!(value.values().all(serde_json::Value::is_string));
        assert!(!json.contains(&b' '));
    }

    #[test]
    fn the_largest_values_fit_the_limit_and_come_back() {
        let token = LeaseToken { transaction: u64::MAX, sequence: u64::MAX, lease: u64::MAX, attempt: u32::MAX };
        let minter = AckIds::new([0xff; 16], &"n".repeat(1000)).minter(&queue(&"x".repeat(511), u64::MAX));
        let text = minter.mint(&token, u64::MAX);
        assert_eq!(text.len(), MAX_BYTES);
        assert_eq!(minter.read(&text), Ok(AckId { token, own_node: true }));
    }

    #[test]
    fn any_node_of_the_cluster_reads_an_id_and_sees_whose_it_is() {
        let text = minter("n1").mint(&TOKEN, 1_700_000_000_000);
        assert_eq!(minter("n1").read(&text), Ok(AckId { token: TOKEN, own_node: true }));
        assert_eq!(minter("n2").read(&text), Ok(AckId { token: TOKEN, own_node: false }));
    }

    #[test]
    fn an_id_of_another_subscription_or_incarnation_is_foreign() {
        let ids = AckIds::new(SECRET, "n1");
        let text = minter("n1").mint(&TOKEN, 1);
        for other in [queue("shop/refunds", 7), queue("shop/orders", 8), queue("shop/order", 7)] {
            assert_eq!(ids.minter(&other).read(&text), Err(AckIdError::Foreign), "{other:?}");
        }
    }

    #[test]
    fn an_id_of_another_cluster_is_refused() {
        let text = AckIds::new(*b"fedcba9876543210", "n1").minter(&queue("shop/orders", 7)).mint(&TOKEN, 1);
        assert!(minter("n1").read(&text).is_err());
    }

    #[test]
    fn every_changed_character_is_noticed() {
        for reader in [minter("n1"), minter("n2")] {
            let text = minter("n1").mint(&TOKEN, 1_700_000_000_000).into_bytes();
            for at in 0..text.len() {
                for replacement in [b'A', b'z', b'-', b'=', b' '] {
                    let mut forged = text.clone();
                    forged[at] = replacement;
                    if forged != text {
                        let forged = String::from_utf8(forged).unwrap();
                        assert!(reader.read(&forged).is_err(), "character {at} as {replacement}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_made_up_id_is_malformed() {
        let genuine = minter("n1").mint(&TOKEN, 1);
        let cut = &genuine[..genuine.len() - 1];
        let json = URL_SAFE_NO_PAD.encode(r#"{"c":"0000","s":"0000"}"#);
        let huge = "A".repeat(100_000);
        let padded = format!("{genuine}=");
        for text in ["", "x", "projects/p/subscriptions/s:1", cut, &genuine[..HEAD_CHARS], &json, &huge, &padded, "é"] {
            assert_eq!(minter("n1").read(text), Err(AckIdError::Malformed), "{}", &text[..text.len().min(40)]);
        }
    }

    #[test]
    fn a_number_has_one_spelling() {
        assert_eq!(parse_number(b"0"), Some(0));
        assert_eq!(parse_number(b"01"), None);
        assert_eq!(parse_number(b""), None);
        assert_eq!(parse_number(b"{{{{{{{{{{"), None);
    }

    proptest::proptest! {
        #[test]
        fn what_is_minted_is_read(transaction: u64, sequence: u64, lease: u64, attempt: u32, deadline: u64) {
            let token = LeaseToken { transaction, sequence, lease, attempt };
            let text = minter("n1").mint(&token, deadline);
            proptest::prop_assert!(text.len() <= MAX_BYTES);
            proptest::prop_assert_eq!(minter("n1").read(&text), Ok(AckId { token, own_node: true }));
            proptest::prop_assert_eq!(minter("n2").read(&text), Ok(AckId { token, own_node: false }));
        }

        #[test]
        fn no_text_makes_the_reader_fail(text in ".{0,200}") {
            proptest::prop_assert!(minter("n1").read(&text).is_err());
        }
    }
}
