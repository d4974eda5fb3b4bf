//! The appending side: places records into batches in memory. Everything here happens under one lock and touches no file.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use super::{
    frame::{BODY_OVERHEAD, FIRST_FRAME, FRAME_HEADER, push_record, record_bytes},
    segment::Segment,
    types::{AppendKind, Appended, Location, LogError},
};

/// Share of a segment that only control records may use while there is no segment after it: acknowledgements must go on
/// when the disk is full, or it would stay full.
const RESERVE_SHARE: u32 = 2;
/// Share that messages leave alone while it is open whether there will be one.
const WAITING_SHARE: u32 = 4;
/// Share that must be left for [`Head::admit`] to promise room for the control records of one operation.
const ADMIT_SHARE: u32 = 64;
/// Share of a segment that is used before the next one is made: small logs stay at one file.
const SPARE_SHARE: u32 = 16;
/// Bytes used of the first segment before the rest of it is filled.
const UNFILLED_BYTES: u32 = 256 << 10;
/// A sync that takes less is over before waiting for company pays; a thread's sleep alone is late by some 50 microseconds.
const SLOW_SYNC: Duration = Duration::from_micros(400);
/// Share of a sync's time that may be spent on gathering records for the next.
const GATHERING_SHARE: u32 = 4;
/// Larger buffers are not kept: they came from a burst.
const KEPT_BUFFER_BYTES: usize = 4 << 20;
/// One being written, one being filled, one on its way.
const KEPT_BUFFERS: usize = 3;

/// Records that are written together, as one frame.
pub(super) struct Batch {
    pub segment: Arc<Segment>,
    pub offset: u32,
    /// Room for the frame's header, then the records.
    pub bytes: Vec<u8>,
    pub records: u32,
    pub closing: bool,
}

impl Batch {
    fn end(&self) -> u32 {
        self.offset + self.bytes.len() as u32
    }

    /// The log position after the batch.
    pub fn end_position(&self) -> u64 {
        self.segment.position_at(self.end())
    }
}

/// The segment after the current one.
pub(super) enum Spare {
    Ready(Arc<Segment>),
    /// Not there yet. `asked` once the stock thread is to make it.
    Wanted {
        asked: bool,
    },
    /// There was no room for it, for the reason given.
    Failed(String),
}

/// Whether records get through.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Health {
    Good,
    /// A write failed and is being repeated.
    Failing(String),
    /// Nothing more will be written.
    Dead(String),
}

/// What the committer is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Committer {
    Working,
    /// Waits a moment for more records before it writes.
    Gathering,
    /// Looks after a while by itself.
    Resting,
    /// Waits until it is woken.
    Asleep,
}

/// See the module.
pub(super) struct Head {
    pub segment: Arc<Segment>,
    /// Where the next frame begins, not counting `open`.
    end: u32,
    open: Option<Batch>,
    /// Batches of a segment before the current one.
    sealed: VecDeque<Batch>,
    pub pending_bytes: usize,
    /// Records among the pending ones that are to be synced.
    pending_syncs: u32,
    /// Records that the last sync was for, and how long it took.
    pub last_syncs: u32,
    pub last_sync: Duration,
    pub position: u64,
    pub spare: Spare,
    /// The first segment of all: it is filled with zeros once it is clear that more than a little will be written.
    pub unfilled: Option<Arc<Segment>>,
    /// It is time to fill this segment.
    pub to_fill: Option<Arc<Segment>>,
    /// Segments whose records are no longer needed.
    pub freed: Vec<Arc<Segment>>,
    /// Full segments for the stock thread to sync, without durability.
    pub to_sync: VecDeque<Arc<Segment>>,
    pub health: Health,
    pub closing: bool,
    /// The stock thread may end.
    pub stock_done: bool,
    pub committer: Committer,
    /// Batches wait for a write to be repeated.
    pub retrying: bool,
    max_pending_bytes: usize,
    buffers: Vec<Vec<u8>>,
}

impl Head {
    pub fn new(segment: Arc<Segment>, end: u32, position: u64, spare: Spare, max_pending_bytes: usize) -> Self {
        Self {
            segment,
            end,
            open: None,
            sealed: VecDeque::new(),
            pending_bytes: 0,
            pending_syncs: 0,
            last_syncs: 0,
            last_sync: Duration::ZERO,
            position,
            spare,
            unfilled: None,
            to_fill: None,
            freed: Vec::new(),
            to_sync: VecDeque::new(),
            health: Health::Good,
            closing: false,
            stock_done: false,
            committer: Committer::Working,
            retrying: false,
            max_pending_bytes,
            buffers: Vec::new(),
        }
    }

    fn used(&self) -> u32 {
        self.open.as_ref().map_or(self.end, Batch::end)
    }

    fn room(&self) -> u32 {
        self.segment.capacity - self.used()
    }

    fn no_room(&self) -> LogError {
        match &self.spare {
            Spare::Failed(reason) => LogError::Full(format!("no room for another log segment: {reason}")),
            _ => LogError::Unavailable("the next log segment is not ready yet".into()),
        }
    }

    /// Whether an operation may begin whose records will be appended under the same lock of the caller's.
    pub fn admit(&self, kind: AppendKind) -> Result<(), LogError> {
        self.check_health(true)?;
        if self.pending_bytes > self.max_pending_bytes {
            let pending = self.pending_bytes;
            return Err(LogError::Unavailable(format!("{pending} bytes wait to be written to the log already")));
        }
        self.check_share(kind, 0)
    }

    fn check_health(&self, strictly: bool) -> Result<(), LogError> {
        match &self.health {
            Health::Dead(reason) => Err(LogError::Unavailable(reason.clone())),
            Health::Failing(reason) if strictly => Err(LogError::Unavailable(reason.clone())),
            _ if self.closing => Err(LogError::Unavailable("the log is closed".into())),
            _ => Ok(()),
        }
    }

    /// Keeps the shares of the current segment free that are not for this kind.
    fn check_share(&self, kind: AppendKind, size: u32) -> Result<(), LogError> {
        let share = match (&self.spare, kind) {
            (Spare::Ready(_), _) => return Ok(()),
            (_, AppendKind::Control) => ADMIT_SHARE,
            (Spare::Wanted { .. }, AppendKind::Data) => WAITING_SHARE,
            (Spare::Failed(_), AppendKind::Data) => RESERVE_SHARE,
        };
        let room = self.room();
        if size > room || room - size < self.segment.capacity / share { Err(self.no_room()) } else { Ok(()) }
    }

    /// Whether the log is well and there is room on the disk.
    pub fn is_behind(&self) -> bool {
        self.health == Health::Good && !self.closing && !self.short_of_space()
    }

    /// Whether messages are refused for want of space, or soon will be.
    pub fn short_of_space(&self) -> bool {
        matches!(self.spare, Spare::Failed(_))
    }

    /// Adds a record. A control record is refused only when it can't fit at all, so that what
    /// [`admit`](Self::admit) let begin can be finished.
    pub fn append(&mut self, kind: AppendKind, header: &[u8], body: &[u8], lengths: &[u32]) -> Result<Appended, LogError> {
        self.check_health(kind == AppendKind::Data)?;
        let size = record_bytes(header.len(), body.len(), lengths.len());
        let needed = u32::try_from(size + FRAME_HEADER).unwrap_or(u32::MAX);
        // A record that does not fit into a fresh segment fits nowhere.
        let largest = self.segment.capacity - FIRST_FRAME;
        if needed > largest {
            return Err(LogError::Full(format!("a record of {size} bytes does not fit into a log segment")));
        }
        if kind == AppendKind::Data {
            if self.pending_bytes > 0 && self.pending_bytes + size > self.max_pending_bytes {
                let pending = self.pending_bytes;
                return Err(LogError::Unavailable(format!("{pending} bytes wait to be written to the log already")));
            }
            self.check_share(kind, needed)?;
        }
        if needed > self.room() {
            self.change_segment(needed)?;
        }
        let batch = match &mut self.open {
            Some(batch) => batch,
            None => self.open.insert(start_batch(&self.segment, self.end, &mut self.buffers)),
        };
        let before = batch.bytes.len();
        let first = push_record(&mut batch.bytes, header, body, lengths);
        batch.records += 1;
        self.pending_bytes += batch.bytes.len() - before;
        self.position = batch.end_position();
        Ok(Appended { position: self.position, bodies: locations(batch, first, lengths) })
    }

    /// Goes on in the spare segment.
    fn change_segment(&mut self, needed: u32) -> Result<(), LogError> {
        let Spare::Ready(next) = &self.spare else { return Err(self.no_room()) };
        if needed > next.capacity - FIRST_FRAME {
            return Err(LogError::Full(format!("a record of {needed} bytes does not fit into a log segment")));
        }
        let next = next.clone();
        let position = self.segment.position_at(self.used());
        self.segment.set_end(position);
        next.set_start(position);
        self.sealed.extend(self.open.take());
        self.spare = Spare::Wanted { asked: false };
        self.segment = next;
        self.end = FIRST_FRAME;
        Ok(())
    }

    /// Whether the stock thread is to be told that there is something for it: soon another segment is needed, or something
    /// was `refused` without it, or it is time to fill the first.
    pub fn has_errand(&mut self, refused: bool) -> bool {
        let used = self.used();
        let spare_due =
            (refused || used > self.segment.capacity / SPARE_SHARE) && matches!(self.spare, Spare::Wanted { asked: false });
        if spare_due {
            self.spare = Spare::Wanted { asked: true };
        }
        let fill_due = self.unfilled.is_some() && used > UNFILLED_BYTES;
        if fill_due {
            self.to_fill = self.unfilled.take();
        }
        spare_due || fill_due
    }

    /// Adds a batch without records, which tells a later start how far the log was durable. Answers whether there was room.
    pub fn push_mark(&mut self, closing: bool) -> bool {
        if self.open.is_some() || (self.room() as usize) < FRAME_HEADER {
            return false;
        }
        let mut batch = start_batch(&self.segment, self.end, &mut self.buffers);
        batch.closing = closing;
        self.open = Some(batch);
        true
    }

    pub fn has_pending(&self) -> bool {
        self.open.is_some() || !self.sealed.is_empty()
    }

    /// Counts a record in that is to be synced. Answers whether that completes what the committer waits for.
    pub fn count_sync(&mut self) -> bool {
        self.pending_syncs += 1;
        self.committer == Committer::Gathering && self.pending_syncs >= self.last_syncs
    }

    /// How long to wait for more records. Publishers that the last sync let go on are about to come again; without them
    /// the next sync would be for a few, and the others would wait for two.
    pub fn gathering_time(&self) -> Option<Duration> {
        let worth_it = self.last_sync >= SLOW_SYNC && !self.closing;
        (worth_it && (1..self.last_syncs).contains(&self.pending_syncs)).then(|| self.last_sync / GATHERING_SHARE)
    }

    /// Moves everything pending to `queue`, in order. Answers how many records among it are to be synced.
    pub fn take_pending(&mut self, queue: &mut VecDeque<Batch>) -> u32 {
        queue.append(&mut self.sealed);
        if let Some(open) = self.open.take() {
            self.end = open.end();
            queue.push_back(open);
        }
        std::mem::take(&mut self.pending_syncs)
    }

    /// Takes a written batch's buffer back.
    pub fn give_back(&mut self, mut bytes: Vec<u8>) {
        self.pending_bytes = self.pending_bytes.saturating_sub(bytes.len() - FRAME_HEADER);
        if bytes.capacity() <= KEPT_BUFFER_BYTES && self.buffers.len() < KEPT_BUFFERS {
            bytes.clear();
            self.buffers.push(bytes);
        }
    }
}

fn start_batch(segment: &Arc<Segment>, offset: u32, buffers: &mut Vec<Vec<u8>>) -> Batch {
    let mut bytes = buffers.pop().unwrap_or_default();
    bytes.resize(FRAME_HEADER, 0);
    Batch { segment: segment.clone(), offset, bytes, records: 0, closing: false }
}

/// Where the bodies of the record just added to `batch` lie.
fn locations(batch: &Batch, first: usize, lengths: &[u32]) -> Vec<Location> {
    let mut offset = batch.offset + first as u32;
    let place = |length: &u32| {
        let location = Location { segment: batch.segment.number, offset: offset + BODY_OVERHEAD as u32, length: *length };
        offset = location.offset + length;
        location
    };
    lengths.iter().map(place).collect()
}
