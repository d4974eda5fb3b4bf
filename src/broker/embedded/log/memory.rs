//! The log without a disk: only bodies are kept, in segments small enough that trimming frees memory soon.

use std::{
    collections::BTreeMap,
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

use bytes::Bytes;
use parking_lot::RwLock;

use super::{
    OnDurable,
    types::{AppendKind, Appended, Location, LogError, LogOptions, Usage},
};

/// Bytes of a segment; a larger record has one of its own. A consumer that still holds a body of a full segment keeps all
/// of it alive, so it must not be large.
const SEGMENT_BYTES: usize = 1 << 20;
/// What a record adds to the position besides its content, so that each one moves it.
const RECORD_BYTES: u64 = 8;

pub(super) struct Memory {
    max_bytes: Option<u64>,
    segment_bytes: usize,
    state: RwLock<State>,
    announced: AtomicU64,
    on_durable: OnceLock<OnDurable>,
}

#[derive(Default)]
struct State {
    position: u64,
    /// Number of the newest segment; the only one that may be open.
    newest: u32,
    segments: BTreeMap<u32, Segment>,
    bytes: u64,
}

struct Segment {
    /// Position after its last record.
    end: u64,
    data: Data,
}

enum Data {
    Open(Vec<u8>),
    Full(Bytes),
}

impl Data {
    fn len(&self) -> usize {
        match self {
            Data::Open(data) => data.len(),
            Data::Full(data) => data.len(),
        }
    }
}

impl Memory {
    pub fn new(options: &LogOptions) -> Self {
        Self {
            max_bytes: options.max_bytes,
            segment_bytes: SEGMENT_BYTES.min(options.segment_bytes as usize),
            state: RwLock::default(),
            announced: AtomicU64::new(0),
            on_durable: OnceLock::new(),
        }
    }

    pub fn current_segment(&self) -> u32 {
        self.state.read().newest
    }

    pub fn segment_bytes(&self) -> u32 {
        self.segment_bytes as u32
    }

    pub fn admit(&self, kind: AppendKind) -> Result<(), LogError> {
        self.check_room(kind, 0, &self.state.read())
    }

    /// Control records have no bodies and take nothing.
    fn check_room(&self, kind: AppendKind, size: usize, state: &State) -> Result<(), LogError> {
        match self.max_bytes {
            Some(max) if kind == AppendKind::Data && state.bytes + size as u64 > max => {
                Err(LogError::Full(format!("messages take {} of the {max} bytes of memory they may take", state.bytes)))
            }
            _ => Ok(()),
        }
    }

    pub fn append(&self, kind: AppendKind, header: usize, body: &[u8], lengths: &[u32]) -> Result<Appended, LogError> {
        if u32::try_from(body.len()).is_err() {
            return Err(LogError::Full(format!("a record of {} bytes does not fit into a log segment", body.len())));
        }
        let mut state = self.state.write();
        self.check_room(kind, body.len(), &state)?;
        state.position += RECORD_BYTES + (header + body.len()) as u64;
        let position = state.position;
        if body.is_empty() {
            let bodies = lengths.iter().map(|_| Location { segment: state.newest, offset: 0, length: 0 }).collect();
            return Ok(Appended { position, bodies });
        }
        let mut offset = state.push(body, self.segment_bytes);
        let segment = state.newest;
        let place = |length: &u32| {
            let location = Location { segment, offset, length: *length };
            offset += length;
            location
        };
        Ok(Appended { position, bodies: lengths.iter().map(place).collect() })
    }

    /// Everything is durable at once; what is left is to say so.
    pub fn durable(&self, position: u64) {
        if self.announced.fetch_max(position, Ordering::AcqRel) < position
            && let Some(callback) = self.on_durable.get()
        {
            callback(position);
        }
    }

    pub fn on_durable(&self, callback: OnDurable) {
        // Only the first one counts, as documented.
        let _ = self.on_durable.set(callback);
    }

    pub fn position(&self) -> u64 {
        self.state.read().position
    }

    pub fn read(&self, locations: &[Location]) -> Result<Vec<Bytes>, LogError> {
        let state = self.state.read();
        locations.iter().map(|location| state.read(*location)).collect()
    }

    pub fn trim(&self, before: u64, keep: &dyn Fn(u32) -> bool) {
        let mut guard = self.state.write();
        let State { segments, bytes, .. } = &mut *guard;
        segments.retain(|number, segment| {
            let stays = segment.end > before || keep(*number);
            if !stays {
                *bytes -= segment.data.len() as u64;
            }
            stays
        });
    }

    pub fn segments(&self) -> Vec<u32> {
        self.state.read().segments.keys().copied().collect()
    }

    pub fn usage(&self) -> Usage {
        let state = self.state.read();
        Usage { bytes: state.bytes, segments: state.segments.len(), pending_bytes: 0 }
    }
}

impl State {
    /// Stores a record's bodies in the newest segment, or in a new one. Answers the offset.
    fn push(&mut self, body: &[u8], segment_bytes: usize) -> u32 {
        self.bytes += body.len() as u64;
        if let Some(segment) = self.segments.get_mut(&self.newest)
            && let Data::Open(data) = &mut segment.data
        {
            if data.len() + body.len() <= segment_bytes {
                let offset = data.len() as u32;
                data.extend_from_slice(body);
                segment.end = self.position;
                return offset;
            }
            segment.data = Data::Full(Bytes::from(std::mem::take(data)));
        }
        self.newest += 1;
        let mut data = Vec::with_capacity(segment_bytes.max(body.len()));
        data.extend_from_slice(body);
        self.segments.insert(self.newest, Segment { end: self.position, data: Data::Open(data) });
        0
    }

    fn read(&self, location: Location) -> Result<Bytes, LogError> {
        let Location { segment, offset, length } = location;
        if length == 0 {
            return Ok(Bytes::new());
        }
        let damaged = |text: &str| LogError::Damaged(format!("segment {segment} of the log in memory {text}"));
        let data = &self.segments.get(&segment).ok_or_else(|| damaged("is not there"))?.data;
        let range = offset as usize..offset as usize + length as usize;
        if range.end > data.len() {
            return Err(damaged(&format!("has no body of {length} bytes at offset {offset}")));
        }
        Ok(match data {
            Data::Open(data) => Bytes::copy_from_slice(&data[range]),
            Data::Full(data) => data.slice(range),
        })
    }
}
