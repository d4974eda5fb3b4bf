//! Chunks outside the hot path: as entries of an index, and opened into their messages.

use bytes::Bytes;
use redis::Value;

use super::{
    codec::{FLAG_GAPS, Part, Reader},
    engine::bytes,
};
use crate::broker::BrokerError;

/// An entry of a queue's index, of a topic's log or of a snapshot.
#[derive(Debug)]
pub struct Entry {
    /// The entry's place in its index; in a queue, the sequence of its first message.
    pub sequence: u64,
    pub count: u16,
    pub publish_ms: u64,
    pub first_id: u64,
    payload: u64,
    flags: u8,
    keys: Vec<u8>,
    left_out: Vec<u8>,
}

impl Entry {
    /// Reads a row of `XRANGE`; answers its id too.
    ///
    /// # Errors
    /// [`BrokerError::Damaged`].
    pub fn read(row: &Value, of_queue: bool) -> Result<(String, Self), BrokerError> {
        let unknown = || BrokerError::Damaged("an index has an entry of an unknown form".into());
        let Value::Array(parts) = row else { return Err(unknown()) };
        let [id, Value::Array(fields)] = parts.as_slice() else { return Err(unknown()) };
        let [_, description] = fields.as_slice() else { return Err(unknown()) };
        let id = String::from_utf8(bytes(id)?.to_vec()).map_err(|_| unknown())?;
        let sequence = id.split('-').next().and_then(|s| s.parse().ok()).ok_or_else(unknown)?;
        let mut from = Reader(bytes(description)?);
        let payload = u64::from_be_bytes(from.bytes(8)?.try_into().map_err(|_| unknown())?);
        let (count, _, publish_ms, first_id, flags) = (from.u16()?, from.u32()?, from.u64()?, from.u64()?, from.u8()?);
        if of_queue {
            from.u64()?;
        }
        let length = usize::from(from.u16()?);
        let keys = from.bytes(length)?.to_vec();
        Ok((id, Self { sequence, count, publish_ms, first_id, payload, flags, keys, left_out: from.0.to_vec() }))
    }

    pub fn has_gaps(&self) -> bool {
        self.flags & FLAG_GAPS != 0
    }

    pub fn payload_key(&self, key: &str) -> String {
        format!("{key}:p:{:016x}", self.payload)
    }

    /// The payload's id as the library has it.
    pub fn payload_id(&self) -> [u8; 8] {
        self.payload.to_be_bytes()
    }

    /// Indexes that a queue's filter left out.
    pub fn left_out(&self, queue: u64) -> Vec<u16> {
        let mut from = Reader(&self.left_out);
        while let (Ok(incarnation), Ok(count)) = (from.u64(), from.u16()) {
            let Ok(list) = from.bytes(usize::from(count) * 2) else { break };
            if incarnation == queue {
                return list.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect();
            }
        }
        Vec::new()
    }

    fn key(&self, index: u16) -> u64 {
        let at = if self.keys.len() == 8 { 0 } else { usize::from(index) * 8 };
        self.keys.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes)
    }

    /// How a part of this chunk is described in a log or a snapshot.
    pub fn describe(&self, part: &Part) -> Vec<u8> {
        // A part's description is payload, count, bytes, flags, keys; id and time go between.
        let (head, tail) = part.description.split_at(14);
        let mut out = head.to_vec();
        out.extend_from_slice(&self.publish_ms.to_le_bytes());
        out.extend_from_slice(&self.first_id.to_le_bytes());
        out.extend_from_slice(tail);
        out
    }
}

/// A chunk's messages as they were published.
pub struct Chunk {
    /// Distance from the first id, encoding and ordering key hash of each.
    messages: Vec<(u16, Bytes, u64)>,
}

impl Chunk {
    /// Takes a payload apart.
    ///
    /// # Errors
    /// [`BrokerError::Damaged`].
    pub fn read(entry: &Entry, payload: Bytes) -> Result<Self, BrokerError> {
        let broken = || BrokerError::Damaged(format!("chunk {:016x} has an inconsistent payload", entry.payload));
        let count = usize::from(entry.count);
        let data = count * if entry.has_gaps() { 6 } else { 4 };
        let (mut messages, mut start) = (Vec::with_capacity(count), data);
        for index in 0..count {
            let end = payload.get(index * 4..index * 4 + 4).ok_or_else(broken)?;
            let end = data + u32::from_le_bytes(end.try_into().map_err(|_| broken())?) as usize;
            let offset = if entry.has_gaps() {
                let at = count * 4 + index * 2;
                let bytes = payload.get(at..at + 2).ok_or_else(broken)?;
                u16::from_le_bytes(bytes.try_into().map_err(|_| broken())?)
            } else {
                index as u16
            };
            if end < start || end > payload.len() {
                return Err(broken());
            }
            messages.push((offset, payload.slice(start..end), entry.key(index as u16)));
            start = end;
        }
        Ok(Self { messages })
    }

    /// Some of the messages as a chunk of their own, with the same ids.
    pub fn part(&self, id: u64, indexes: &[u16]) -> Part {
        let kept: Vec<&(u16, Bytes, u64)> = indexes.iter().filter_map(|i| self.messages.get(usize::from(*i))).collect();
        let gaps = kept.iter().enumerate().any(|(at, m)| usize::from(m.0) != at);
        let mut payload = Vec::new();
        let mut end = 0u32;
        for (_, wire, _) in &kept {
            end += wire.len() as u32;
            payload.extend_from_slice(&end.to_le_bytes());
        }
        if gaps {
            kept.iter().for_each(|(offset, _, _)| payload.extend_from_slice(&offset.to_le_bytes()));
        }
        kept.iter().for_each(|(_, wire, _)| payload.extend_from_slice(wire));
        let hashes: Vec<u64> = kept.iter().map(|m| m.2).collect();
        Part::new(payload, id, kept.len() as u16, end, gaps, &hashes)
    }
}
