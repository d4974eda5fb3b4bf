//! Hash slots of Redis Cluster.

use redis::Value;

use super::address::Endpoint;
use crate::broker::BrokerError;

/// Slots of a cluster.
pub const SLOTS: u16 = 16384;

/// The slot of a key: of its hash tag, the part between the first `{` and the next `}`, if that is not empty.
pub fn slot_of(key: &str) -> u16 {
    let tag = key.split_once('{').and_then(|(_, rest)| rest.split_once('}')).map(|(tag, _)| tag).filter(|t| !t.is_empty());
    crc16(tag.unwrap_or(key).as_bytes()) % SLOTS
}

/// CRC-16/XMODEM, as the cluster specification asks for.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0u16, |crc, byte| {
        (0..8).fold(crc ^ (u16::from(*byte) << 8), |crc, _| if crc & 0x8000 == 0 { crc << 1 } else { crc << 1 ^ 0x1021 })
    })
}

fn number(value: &Value) -> Option<u16> {
    if let Value::Int(n) = value { u16::try_from(*n).ok() } else { None }
}

fn text(value: &Value) -> Option<String> {
    match value {
        Value::BulkString(bytes) => String::from_utf8(bytes.clone()).ok(),
        Value::SimpleString(text) => Some(text.clone()),
        _ => None,
    }
}

/// Reads the answer of `CLUSTER SLOTS`: the master of each slot, in order. Slots without a server make the answer shorter.
///
/// # Errors
/// [`BrokerError::Unavailable`] when the answer has another form.
pub fn read_slots(answer: &Value, from: &Endpoint) -> Result<Vec<Endpoint>, BrokerError> {
    let wrong = || BrokerError::Unavailable(format!("{from}: CLUSTER SLOTS was answered in an unknown form"));
    let Value::Array(ranges) = answer else { return Err(wrong()) };
    let mut by_slot: Vec<Option<Endpoint>> = vec![None; usize::from(SLOTS)];
    for range in ranges {
        let Value::Array(parts) = range else { return Err(wrong()) };
        let [first, last, Value::Array(master), ..] = parts.as_slice() else { return Err(wrong()) };
        let (Some(first), Some(last)) = (number(first), number(last)) else { return Err(wrong()) };
        let [host, port, ..] = master.as_slice() else { return Err(wrong()) };
        let host = text(host).filter(|h| !h.is_empty()).unwrap_or_else(|| from.host.clone());
        let endpoint = Endpoint { host, port: number(port).ok_or_else(wrong)? };
        for slot in by_slot.get_mut(usize::from(first)..=usize::from(last)).ok_or_else(wrong)? {
            *slot = Some(endpoint.clone());
        }
    }
    Ok(by_slot.into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_follow_the_cluster_specification() {
        assert_eq!(crc16(b"123456789"), 0x31c3);
        assert_eq!(slot_of("foo"), 12182);
        assert_eq!(slot_of("gcp.sub.{foo}:1:ls"), 12182);
        assert_eq!(slot_of("{}foo"), crc16(b"{}foo") % SLOTS);
    }
}
