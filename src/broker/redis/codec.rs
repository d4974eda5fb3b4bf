//! The binary forms shared with the function library: sets of messages, groups of tokens, chunks and answers.

use bytes::{BufMut, Bytes, BytesMut};

use crate::{
    broker::{BrokerError, LeaseToken},
    model::EncodedMessage,
};

/// Set in a chunk's flags when its payload carries a table of id offsets, because a filter left messages out.
pub const FLAG_GAPS: u8 = 1;

/// Set in the flags of an answer where of a chunk only the leased messages are given, and a table of where each ends in that.
pub const FLAG_PICKED: u8 = 128;

/// Reads little-endian fields one after the other.
pub struct Reader<'a>(pub &'a [u8]);

fn damaged() -> BrokerError {
    BrokerError::Damaged("an answer of the function library is too short".into())
}

impl<'a> Reader<'a> {
    pub fn bytes(&mut self, count: usize) -> Result<&'a [u8], BrokerError> {
        let (head, rest) = self.0.split_at_checked(count).ok_or_else(damaged)?;
        self.0 = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], BrokerError> {
        self.bytes(N)?.try_into().map_err(|_| damaged())
    }

    pub fn u8(&mut self) -> Result<u8, BrokerError> {
        Ok(self.array::<1>()?[0])
    }

    pub fn u16(&mut self) -> Result<u16, BrokerError> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub fn u32(&mut self) -> Result<u32, BrokerError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub fn u64(&mut self) -> Result<u64, BrokerError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Some messages of one chunk: the indexes `lo..=hi`, all of them or those with a bit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Set {
    pub lo: u16,
    pub hi: u16,
    bits: Option<Vec<u8>>,
}

impl Set {
    /// From ascending indexes without repeats, at least one.
    pub fn from_sorted(indexes: &[u16]) -> Self {
        let (lo, hi) = (indexes.first().copied().unwrap_or(0), indexes.last().copied().unwrap_or(0));
        if usize::from(hi - lo) + 1 == indexes.len() {
            return Self { lo, hi, bits: None };
        }
        let mut bits = vec![0u8; usize::from(hi) / 8 + 1];
        for index in indexes {
            bits[usize::from(*index) / 8] |= 1 << (index % 8);
        }
        Self { lo, hi, bits: Some(bits) }
    }

    /// Every message there can be.
    pub fn everything() -> Self {
        Self { lo: 0, hi: u16::MAX, bits: None }
    }

    pub fn contains(&self, index: u16) -> bool {
        (self.lo..=self.hi).contains(&index)
            && self.bits.as_ref().is_none_or(|b| b.get(usize::from(index) / 8).is_some_and(|v| v >> (index % 8) & 1 == 1))
    }

    pub fn iter(&self) -> impl Iterator<Item = u16> + '_ {
        (self.lo..=self.hi).filter(|index| self.contains(*index))
    }

    pub fn read(from: &mut Reader) -> Result<Self, BrokerError> {
        let (lo, hi, length) = (from.u16()?, from.u16()?, usize::from(from.u16()?));
        let bits = (length > 0).then(|| from.bytes(length).map(<[u8]>::to_vec)).transpose()?;
        Ok(Self { lo, hi, bits })
    }

    pub fn write(&self, out: &mut Vec<u8>) {
        let bits = self.bits.as_deref().unwrap_or_default();
        out.extend_from_slice(&self.lo.to_le_bytes());
        out.extend_from_slice(&self.hi.to_le_bytes());
        out.extend_from_slice(&(bits.len() as u16).to_le_bytes());
        out.extend_from_slice(bits);
    }
}

/// Tokens of one chunk, one lease and one kind of attempt, which the library handles as one.
#[derive(Debug)]
pub struct Group {
    pub chunk: u64,
    pub lease: u64,
    /// 1, or 2 for every later attempt.
    pub attempt: u32,
    pub set: Set,
}

impl Group {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(32);
        out.extend_from_slice(&self.chunk.to_le_bytes());
        out.extend_from_slice(&self.lease.to_le_bytes());
        out.extend_from_slice(&self.attempt.to_le_bytes());
        self.set.write(&mut out);
        out
    }
}

/// Where a token went: the group and the index in its chunk; nothing when no message can be meant by it.
pub type Place = Option<(usize, u16)>;

/// Groups tokens. Answers the groups and, for each token in order, its place.
pub fn group(tokens: impl ExactSizeIterator<Item = LeaseToken>) -> (Vec<Group>, Vec<Place>) {
    let mut places: Vec<Place> = Vec::with_capacity(tokens.len());
    let mut parts: Vec<(u64, u64, u32, Vec<u16>)> = Vec::new();
    let mut index_of = std::collections::HashMap::new();
    let mut last: Option<((u64, u64, u32), usize)> = None;
    for token in tokens {
        let index = token.sequence.checked_sub(token.transaction).and_then(|i| u16::try_from(i).ok());
        let Some(index) = index.filter(|_| token.transaction > 0) else {
            places.push(None);
            continue;
        };
        let key = (token.transaction, token.lease, token.attempt.clamp(1, 2));
        let at = match last {
            Some((k, at)) if k == key => at,
            _ => *index_of.entry(key).or_insert_with(|| {
                parts.push((key.0, key.1, key.2, Vec::new()));
                parts.len() - 1
            }),
        };
        last = Some((key, at));
        parts[at].3.push(index);
        places.push(Some((at, index)));
    }
    let groups = parts.into_iter().map(|(chunk, lease, attempt, mut indexes)| {
        indexes.sort_unstable();
        indexes.dedup();
        Group { chunk, lease, attempt, set: Set::from_sorted(&indexes) }
    });
    (groups.collect(), places)
}

/// A chunk ready to be written: its payload and what the library is told about it.
#[derive(Debug)]
pub struct Part {
    pub payload: Vec<u8>,
    pub description: Vec<u8>,
}

/// Encodes messages as one chunk: a table of end offsets, a table of id offsets when some are left out, then the encodings
/// back to back. Ids and publish time are not in it; they are the chunk's and are added when the messages are read.
pub fn encode_chunk(id: u64, messages: &[EncodedMessage], left_out: &[u32]) -> Option<Part> {
    let kept: Vec<(usize, &EncodedMessage)> = if left_out.is_empty() {
        messages.iter().enumerate().collect()
    } else {
        let mut skip = left_out.iter().copied().peekable();
        messages.iter().enumerate().filter(|(at, _)| skip.next_if_eq(&(*at as u32)).is_none()).collect()
    };
    if kept.is_empty() {
        return None;
    }
    let raw: usize = kept.iter().map(|(_, m)| m.wire().len()).sum();
    let gaps = kept.len() < messages.len();
    let mut payload = Vec::with_capacity(raw + kept.len() * 6);
    let mut end = 0u32;
    for (_, message) in &kept {
        end += message.wire().len() as u32;
        payload.extend_from_slice(&end.to_le_bytes());
    }
    if gaps {
        for (at, _) in &kept {
            payload.extend_from_slice(&(*at as u16).to_le_bytes());
        }
    }
    for (_, message) in &kept {
        payload.extend_from_slice(message.wire());
    }
    let hashes: Vec<u64> = kept.iter().map(|(_, m)| m.ordering_key_hash()).collect();
    Some(Part::new(payload, id, kept.len() as u16, raw as u32, gaps, &hashes))
}

impl Part {
    /// Describes a payload: its id, how many messages and bytes it holds, whether it has a table of id offsets, and the
    /// messages' ordering key hashes, one for all when they are the same, none when there are none.
    pub fn new(payload: Vec<u8>, id: u64, count: u16, bytes: u32, gaps: bool, hashes: &[u64]) -> Self {
        let keys = match hashes.first() {
            Some(first) if hashes.iter().all(|h| h == first) => &hashes[..usize::from(*first != 0)],
            _ => hashes,
        };
        let mut description = Vec::with_capacity(17 + keys.len() * 8);
        description.extend_from_slice(&id.to_be_bytes());
        description.extend_from_slice(&count.to_le_bytes());
        description.extend_from_slice(&bytes.to_le_bytes());
        description.push(if gaps { FLAG_GAPS } else { 0 });
        description.extend_from_slice(&((keys.len() * 8) as u16).to_le_bytes());
        for key in keys {
            description.extend_from_slice(&key.to_le_bytes());
        }
        Self { payload, description }
    }
}

/// What the library answers of a chunk whose messages are to be read.
#[derive(Debug)]
pub struct Stored {
    pub chunk: u64,
    pub payload: u64,
    pub count: u16,
    pub publish_ms: u64,
    pub first_id: u64,
    pub flags: u8,
    /// Bytes of the data part that hold the wanted messages; 0 and 0 for the whole.
    pub from: u32,
    pub to: u32,
}

impl Stored {
    pub fn read(from: &mut Reader) -> Result<Self, BrokerError> {
        Ok(Self {
            chunk: from.u64()?,
            payload: u64::from_be_bytes(from.array()?),
            count: from.u16()?,
            publish_ms: from.u64()?,
            first_id: from.u64()?,
            flags: from.u8()?,
            from: from.u32()?,
            to: from.u32()?,
        })
    }

    pub fn is_whole(&self) -> bool {
        self.to == 0
    }

    /// Bytes of the tables before the data.
    pub fn header_bytes(&self) -> usize {
        usize::from(self.count) * if self.flags & FLAG_GAPS == 0 { 4 } else { 6 }
    }

    /// Seals the wanted messages: one `Bytes` each, in order, all sharing one buffer. `header` holds the tables and `data`
    /// the bytes from `from` on.
    ///
    /// # Errors
    /// [`BrokerError::Damaged`] when the tables don't fit the data.
    pub fn seal(&self, header: &[u8], data: &[u8], set: &Set) -> Result<Vec<Bytes>, BrokerError> {
        let broken = || BrokerError::Damaged(format!("chunk {:016x} has an inconsistent payload", self.payload));
        let end_of = |index: usize| -> Result<usize, BrokerError> {
            let bytes = header.get(index * 4..index * 4 + 4).ok_or_else(broken)?;
            Ok(u32::from_le_bytes(bytes.try_into().map_err(|_| broken())?) as usize)
        };
        self.seal_each(set, data.len(), |index, out| {
            let at = usize::from(index);
            let start = if at == 0 { 0 } else { end_of(at - 1)? };
            let (start, end) = (start.checked_sub(self.from as usize), end_of(at)?.checked_sub(self.from as usize));
            let (Some(start), Some(end)) = (start, end) else { return Err(broken()) };
            out.put_slice(data.get(start..end).ok_or_else(broken)?);
            if self.flags & FLAG_GAPS == 0 {
                return Ok(u64::from(index));
            }
            let table = usize::from(self.count) * 4 + at * 2;
            let bytes = header.get(table..table + 2).ok_or_else(broken)?;
            Ok(u64::from(u16::from_le_bytes(bytes.try_into().map_err(|_| broken())?)))
        })
    }

    /// Seals messages of which nothing but themselves was given, without id offsets: `ends` says where each ends in `data`.
    ///
    /// # Errors
    /// As [`seal`](Self::seal).
    pub fn seal_picked(&self, ends: &[u8], data: &[u8], set: &Set) -> Result<Vec<Bytes>, BrokerError> {
        let broken = || BrokerError::Damaged(format!("chunk {:016x} has an inconsistent payload", self.payload));
        let (mut ends, mut start) = (Reader(ends), 0);
        self.seal_each(set, data.len(), |index, out| {
            let end = ends.u32()? as usize;
            out.put_slice(data.get(start..end).ok_or_else(broken)?);
            start = end;
            Ok(u64::from(index))
        })
    }

    /// Calls `put` for each message of the set, which writes it and answers its distance from the first id.
    fn seal_each(
        &self,
        set: &Set,
        bytes: usize,
        mut put: impl FnMut(u16, &mut BytesMut) -> Result<u64, BrokerError>,
    ) -> Result<Vec<Bytes>, BrokerError> {
        let mut out = BytesMut::with_capacity(bytes + usize::from(set.hi - set.lo + 1) * EncodedMessage::SEAL_BYTES);
        let mut ends = Vec::with_capacity(usize::from(set.hi - set.lo + 1));
        for index in set.iter() {
            let offset = put(index, &mut out)?;
            EncodedMessage::seal_tail(self.first_id + offset, self.publish_ms, &mut out);
            ends.push(out.len());
        }
        let out = out.freeze();
        let mut start = 0;
        Ok(ends.into_iter().map(|end| out.slice(std::mem::replace(&mut start, end)..end)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(chunk: u64, index: u64, lease: u64) -> LeaseToken {
        LeaseToken { transaction: chunk, sequence: chunk + index, lease, attempt: 1 }
    }

    #[test]
    fn tokens_of_one_lease_become_one_group() {
        let tokens = [token(10, 2, 7), token(10, 0, 7), token(20, 0, 7), token(10, 1, 7), token(10, 9, 7)];
        let (groups, places) = group(tokens.into_iter());
        assert_eq!(groups.len(), 2);
        assert_eq!(groups[0].set.iter().collect::<Vec<_>>(), [0, 1, 2, 9]);
        assert_eq!(places, [Some((0, 2)), Some((0, 0)), Some((1, 0)), Some((0, 1)), Some((0, 9))]);
    }

    #[test]
    fn a_set_survives_its_encoding() {
        for indexes in [vec![0u16], vec![3, 4, 5], vec![0, 8, 9, 999]] {
            let set = Set::from_sorted(&indexes);
            let mut out = Vec::new();
            set.write(&mut out);
            assert_eq!(Set::read(&mut Reader(&out)).unwrap(), set);
            assert_eq!(set.iter().collect::<Vec<_>>(), indexes);
        }
    }

    #[test]
    fn a_chunk_keeps_ids_where_messages_were_left_out() {
        let messages: Vec<_> = (0..4).map(|n| EncodedMessage::encode(format!("m{n}").as_bytes(), [], "")).collect();
        let part = encode_chunk(1, &messages, &[0, 2]).unwrap();
        let stored = Stored { chunk: 1, payload: 1, count: 2, publish_ms: 5, first_id: 100, flags: FLAG_GAPS, from: 0, to: 0 };
        let (header, data) = part.payload.split_at(stored.header_bytes());
        let sealed = stored.seal(header, data, &Set::from_sorted(&[0, 1])).unwrap();
        let mut expected = BytesMut::new();
        messages[3].seal(103, 5, &mut expected);
        assert_eq!(sealed[1], expected.freeze());
        assert!(encode_chunk(1, &messages, &[0, 1, 2, 3]).is_none());
    }
}
