//! The bytes of a segment: a header, then frames (one a write), each with records, each with bodies.
//!
//! ```text
//! segment  magic 8, version u32, number u32, stamp u64, capacity u32, checksum u32; frames from FIRST_FRAME on
//! frame    magic u32, records u32, stamp u64, position u64, durable u64, length u32, payload checksum u32, 0 u32, checksum u32
//! record   header length u32, bodies u32, body lengths u32 each, header, (checksum u32, body) each, zeros up to a multiple of 8
//! ```
//! Numbers are little-endian, checksums CRC32C. The stamp is random, a new one each time a file becomes a segment, and
//! every frame repeats it: what an earlier life of the file left behind, or what a message's content imitates, is never
//! taken for a frame. A position is the byte count of the log up to there; that of a frame is where it begins, `durable`
//! is what was known to be on the disk when it was written.

use crc32c::{crc32c, crc32c_append};

use super::types::Location;

/// Where the first frame of a segment begins: on a page of its own, so that no frame's write touches the header's.
pub(super) const FIRST_FRAME: u32 = 4096;
pub(super) const SEGMENT_HEADER: usize = 32;
pub(super) const FRAME_HEADER: usize = 48;
/// Bytes before every body: its checksum.
pub(super) const BODY_OVERHEAD: usize = 4;
/// Records and frames begin at multiples of this.
pub(super) const ALIGN: usize = 8;

/// The version of this format.
pub(super) const VERSION: u32 = 1;

const SEGMENT_MAGIC: &[u8; 8] = b"LandLog\n";
const FRAME_MAGIC: u32 = u32::from_le_bytes(*b"LLfr");
/// The last frame of a log that was closed: it has no records, and nothing follows.
const CLOSING_MAGIC: u32 = u32::from_le_bytes(*b"LLcl");

/// The number at `at`; 0 outside of `bytes`, which no valid checksum or magic is compared with.
pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes)
}

pub(super) fn is_frame_magic(magic: u32) -> bool {
    magic == FRAME_MAGIC || magic == CLOSING_MAGIC
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes)
}

/// A segment's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SegmentHeader {
    pub number: u32,
    pub stamp: u64,
    pub capacity: u32,
}

/// Why a segment's header can't be used.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum HeaderError {
    Damaged,
    Newer(u32),
}

impl SegmentHeader {
    pub fn encode(&self) -> [u8; SEGMENT_HEADER] {
        let mut out = [0; SEGMENT_HEADER];
        out[..8].copy_from_slice(SEGMENT_MAGIC);
        out[8..12].copy_from_slice(&VERSION.to_le_bytes());
        out[12..16].copy_from_slice(&self.number.to_le_bytes());
        out[16..24].copy_from_slice(&self.stamp.to_le_bytes());
        out[24..28].copy_from_slice(&self.capacity.to_le_bytes());
        let checksum = crc32c(&out[..28]);
        out[28..].copy_from_slice(&checksum.to_le_bytes());
        out
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, HeaderError> {
        if bytes.len() < SEGMENT_HEADER || &bytes[..8] != SEGMENT_MAGIC {
            return Err(HeaderError::Damaged);
        }
        // A newer format may keep its checksum elsewhere, so the version comes first.
        let version = u32_at(bytes, 8);
        if version > VERSION {
            return Err(HeaderError::Newer(version));
        }
        if version == 0 || crc32c(&bytes[..28]) != u32_at(bytes, 28) {
            return Err(HeaderError::Damaged);
        }
        Ok(Self { number: u32_at(bytes, 12), stamp: u64_at(bytes, 16), capacity: u32_at(bytes, 24) })
    }
}

/// A frame's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FrameHeader {
    pub closing: bool,
    pub records: u32,
    pub stamp: u64,
    pub position: u64,
    pub durable: u64,
    /// Bytes after the header.
    pub length: u32,
    pub payload_checksum: u32,
}

impl FrameHeader {
    pub fn encode(&self) -> [u8; FRAME_HEADER] {
        let mut out = [0; FRAME_HEADER];
        let magic = if self.closing { CLOSING_MAGIC } else { FRAME_MAGIC };
        out[..4].copy_from_slice(&magic.to_le_bytes());
        out[4..8].copy_from_slice(&self.records.to_le_bytes());
        out[8..16].copy_from_slice(&self.stamp.to_le_bytes());
        out[16..24].copy_from_slice(&self.position.to_le_bytes());
        out[24..32].copy_from_slice(&self.durable.to_le_bytes());
        out[32..36].copy_from_slice(&self.length.to_le_bytes());
        out[36..40].copy_from_slice(&self.payload_checksum.to_le_bytes());
        let checksum = crc32c(&out[..44]);
        out[44..].copy_from_slice(&checksum.to_le_bytes());
        out
    }

    /// Reads a header; `None` when there is none of this stamp, or not a whole one.
    pub fn decode(bytes: &[u8], stamp: u64) -> Option<Self> {
        let bytes = bytes.get(..FRAME_HEADER)?;
        let magic = u32_at(bytes, 0);
        if !is_frame_magic(magic) {
            return None;
        }
        let header = Self {
            closing: magic == CLOSING_MAGIC,
            records: u32_at(bytes, 4),
            stamp: u64_at(bytes, 8),
            position: u64_at(bytes, 16),
            durable: u64_at(bytes, 24),
            length: u32_at(bytes, 32),
            payload_checksum: u32_at(bytes, 36),
        };
        let whole = (header.length as usize).is_multiple_of(ALIGN) && crc32c(&bytes[..44]) == u32_at(bytes, 44);
        (whole && header.stamp == stamp).then_some(header)
    }

    /// Bytes of the whole frame.
    pub fn frame_bytes(&self) -> u64 {
        FRAME_HEADER as u64 + u64::from(self.length)
    }
}

/// Whether a frame of this stamp began here, even if the rest of its header was not written.
pub(super) fn begins_frame(bytes: &[u8], stamp: u64) -> bool {
    is_frame_magic(u32_at(bytes, 0)) && u64_at(bytes, 8) == stamp
}

/// The checksum of a body. Begins with the stamp, so that a body of the file's earlier life does not pass.
pub(super) fn body_checksum(stamp: u64, body: &[u8]) -> u32 {
    crc32c_append(stamp as u32, body)
}

/// Bytes of a record.
pub(super) fn record_bytes(header: usize, body: usize, bodies: usize) -> usize {
    (8 + 4 * bodies + header + BODY_OVERHEAD * bodies + body).next_multiple_of(ALIGN)
}

/// Appends a record to `out`, its body checksums still 0, and answers where the first body's checksum lies in it.
pub(super) fn push_record(out: &mut Vec<u8>, header: &[u8], body: &[u8], lengths: &[u32]) -> usize {
    let start = out.len();
    out.reserve(record_bytes(header.len(), body.len(), lengths.len()));
    out.extend_from_slice(&(header.len() as u32).to_le_bytes());
    out.extend_from_slice(&(lengths.len() as u32).to_le_bytes());
    for length in lengths {
        out.extend_from_slice(&length.to_le_bytes());
    }
    out.extend_from_slice(header);
    let bodies = out.len();
    let mut rest = body;
    for length in lengths {
        let (this, next) = rest.split_at(*length as usize);
        out.extend_from_slice(&[0; BODY_OVERHEAD]);
        out.extend_from_slice(this);
        rest = next;
    }
    out.resize(start + (out.len() - start).next_multiple_of(ALIGN), 0);
    bodies
}

/// Where the parts of the record at `at` lie in a payload.
struct Record {
    lengths: usize,
    count: usize,
    header: usize,
    bodies: usize,
    end: usize,
}

impl Record {
    /// `None` when the payload does not hold a whole record there.
    fn at(payload: &[u8], at: usize) -> Option<Self> {
        let (header_length, count) = (u32_at(payload.get(at..at + 8)?, 0) as usize, u32_at(payload, at + 4) as usize);
        let lengths = at + 8;
        let header = lengths + 4 * count;
        let bodies = header + header_length;
        payload.get(..bodies)?;
        let body: usize = (0..count).map(|i| u32_at(payload, lengths + 4 * i) as usize).sum();
        let end = at + record_bytes(header_length, body, count);
        (end <= payload.len()).then_some(Self { lengths, count, header, bodies, end })
    }

    /// Where the bodies lie.
    fn each_body(&self, payload: &[u8], mut with: impl FnMut(usize, usize)) {
        let mut at = self.bodies;
        for i in 0..self.count {
            let length = u32_at(payload, self.lengths + 4 * i) as usize;
            with(at + BODY_OVERHEAD, length);
            at += BODY_OVERHEAD + length;
        }
    }
}

/// Fills in the checksums and the header of a frame whose payload is complete.
pub(super) fn finish(frame: &mut [u8], header: FrameHeader) {
    let (head, payload) = frame.split_at_mut(FRAME_HEADER);
    let mut at = 0;
    while let Some(record) = Record::at(payload, at) {
        let mut body = record.bodies;
        for i in 0..record.count {
            let start = body + BODY_OVERHEAD;
            body = start + u32_at(payload, record.lengths + 4 * i) as usize;
            let checksum = body_checksum(header.stamp, &payload[start..body]);
            payload[start - BODY_OVERHEAD..start].copy_from_slice(&checksum.to_le_bytes());
        }
        at = record.end;
    }
    let header = FrameHeader { length: payload.len() as u32, payload_checksum: crc32c(payload), ..header };
    head.copy_from_slice(&header.encode());
}

/// Walks the records of a payload whose checksum held: where each ends in it, its header and its bodies' locations.
/// `offset` is the payload's place in its segment. Answers whether the payload was made of whole records.
pub(super) fn walk<E>(
    payload: &[u8],
    segment: u32,
    offset: u32,
    mut visit: impl FnMut(usize, &[u8], &[Location]) -> Result<(), E>,
) -> Result<bool, E> {
    let mut locations = Vec::new();
    let mut at = 0;
    while at < payload.len() {
        let Some(record) = Record::at(payload, at) else { return Ok(false) };
        locations.clear();
        record.each_body(payload, |start, length| {
            locations.push(Location { segment, offset: offset + start as u32, length: length as u32 });
        });
        visit(record.end, &payload[record.header..record.bodies], &locations)?;
        at = record.end;
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> FrameHeader {
        FrameHeader { closing: false, records: 2, stamp: 77, position: 4096, durable: 12, length: 0, payload_checksum: 0 }
    }

    #[test]
    fn a_frame_reads_back_as_it_was_written() {
        let mut frame = vec![0; FRAME_HEADER];
        push_record(&mut frame, b"head", b"firstsecond", &[5, 6]);
        push_record(&mut frame, b"", b"", &[]);
        finish(&mut frame, header());
        let read = FrameHeader::decode(&frame, 77).unwrap();
        assert_eq!((read.records, read.position, read.durable), (2, 4096, 12));
        assert_eq!(read.frame_bytes() as usize, frame.len());
        assert_eq!(read.payload_checksum, crc32c(&frame[FRAME_HEADER..]));
        let mut seen = Vec::new();
        let whole = walk(&frame[FRAME_HEADER..], 3, FRAME_HEADER as u32, |end, head, bodies| {
            let bodies = bodies.iter().map(|l| frame[l.offset as usize..(l.offset + l.length) as usize].to_vec());
            seen.push((end, head.to_vec(), bodies.collect::<Vec<_>>()));
            Ok::<_, ()>(())
        });
        assert_eq!(whole, Ok(true));
        let bodies = vec![b"first".to_vec(), b"second".to_vec()];
        assert_eq!(seen, vec![(40, b"head".to_vec(), bodies), (48, vec![], vec![])]);
    }

    #[test]
    fn a_body_checksum_depends_on_the_stamp() {
        assert_ne!(body_checksum(1, b"body"), body_checksum(2, b"body"));
    }

    #[test]
    fn a_frame_of_another_stamp_or_with_any_changed_header_byte_is_none() {
        let mut frame = vec![0; FRAME_HEADER];
        finish(&mut frame, header());
        assert!(FrameHeader::decode(&frame, 78).is_none());
        for at in 0..FRAME_HEADER {
            let mut damaged = frame.clone();
            damaged[at] ^= 0x40;
            assert!(FrameHeader::decode(&damaged, 77).is_none(), "byte {at}");
        }
        assert!(FrameHeader::decode(&frame[..FRAME_HEADER - 1], 77).is_none());
    }

    #[test]
    fn a_payload_that_is_not_whole_records_is_told_apart() {
        for payload in [[0xff; 8], [0, 0, 0, 0, 0xff, 0xff, 0xff, 0x7f], [1, 0, 0, 0, 0, 0, 0, 0]] {
            assert_eq!(walk(&payload, 1, 0, |_, _, _| Ok::<_, ()>(())), Ok(false));
        }
    }

    #[test]
    fn a_segment_header_of_a_newer_version_is_told_from_damage() {
        let bytes = SegmentHeader { number: 5, stamp: 9, capacity: 1 << 20 }.encode();
        assert_eq!(SegmentHeader::decode(&bytes), Ok(SegmentHeader { number: 5, stamp: 9, capacity: 1 << 20 }));
        let mut newer = bytes;
        newer[8] = 2;
        assert_eq!(SegmentHeader::decode(&newer), Err(HeaderError::Newer(2)));
        for at in [0, 12, 16, 24, 28] {
            let mut damaged = bytes;
            damaged[at] ^= 1;
            assert_eq!(SegmentHeader::decode(&damaged), Err(HeaderError::Damaged), "byte {at}");
        }
    }
}
