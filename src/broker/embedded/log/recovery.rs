//! The start: reads the log back, tells a torn tail from damage, and leaves everything fit for going on.
//!
//! A frame that can't be read ends the log. It is a torn tail, left by a crash in the middle of a write, unless a later
//! frame says that this place was already on the disk when it was written: then something that was confirmed is lost, and
//! the start is refused.

use std::{collections::BTreeMap, io, sync::Arc};

use super::{
    directory::Directory,
    frame::{ALIGN, FIRST_FRAME, FRAME_HEADER, FrameHeader, begins_frame, walk},
    segment::Segment,
    types::{Location, LogError},
    window::Window,
};

/// What a log is after its start.
pub(super) struct Recovered {
    pub segments: BTreeMap<u32, Arc<Segment>>,
    pub current: Arc<Segment>,
    /// Where the next frame goes.
    pub end: u32,
    pub spare: Option<Arc<Segment>>,
    pub position: u64,
}

pub(super) type Visit<'a> = dyn FnMut(&[u8], &[Location]) -> Result<(), LogError> + 'a;

/// Opens the segments, hands every record that ends after `after` to `visit`, and mends the tail.
pub(super) fn recover(
    directory: &Arc<Directory>,
    segment_bytes: u32,
    after: u64,
    visit: &mut Visit<'_>,
) -> Result<Recovered, LogError> {
    let path = directory.path().display();
    let failed = |error: io::Error| LogError::Unavailable(format!("log directory {path}: {error}"));
    let numbers = directory.segments().map_err(failed)?;
    if numbers.is_empty() {
        if after > 0 {
            return Err(LogError::Damaged(format!("{path} holds no log segments, but the log reached position {after}")));
        }
        let current = Arc::new(Segment::create(directory, 1, segment_bytes).map_err(failed)?);
        let segments = BTreeMap::from([(1, current.clone())]);
        return Ok(Recovered { segments, current, end: FIRST_FRAME, spare: None, position: 0 });
    }
    let found = numbers.into_iter().map(|number| Found::open(directory, number)).collect::<Result<Vec<_>, _>>()?;
    let begin = first_to_read(&found, after)?;
    let mut scan = Scan { found, begin, at: 0, end: FIRST_FRAME, position: 0, closed: false };
    scan.read(after, visit)?;
    let tail = scan.examine_tail()?;
    if scan.position < after {
        let (file, position) = (scan.current().display(), scan.position);
        let text = format!("the log ends at position {position} ({file}, offset {}), but it reached {after}", scan.end);
        return Err(LogError::Damaged(text));
    }
    scan.mend(&tail)?;
    directory.sync().map_err(failed)?;
    scan.finish()
}

/// A segment file and its first frame.
struct Found {
    segment: Arc<Segment>,
    first: Option<FrameHeader>,
}

impl Found {
    fn open(directory: &Arc<Directory>, number: u32) -> Result<Self, LogError> {
        let segment = Arc::new(Segment::open(directory, number)?);
        let mut window = Window::new(&segment);
        let first = FrameHeader::decode(window.get(FIRST_FRAME, FRAME_HEADER)?, segment.stamp);
        Ok(Self { segment, first })
    }

    fn number(&self) -> u32 {
        self.segment.number
    }
}

/// The segment to begin with: the last one that begins at or before `after`.
fn first_to_read(found: &[Found], after: u64) -> Result<usize, LogError> {
    let begins_by_then = |f: &Found| f.first.is_some_and(|first| first.position <= after);
    if let Some(begin) = found.iter().rposition(begins_by_then) {
        return Ok(begin);
    }
    let Some(oldest) = found.iter().position(|f| f.first.is_some()) else {
        // Before its first record a log has segment 1, later always one with records.
        return match found.first().filter(|f| f.number() > 1) {
            Some(f) => Err(LogError::Damaged(format!(
                "{} is damaged at offset {FIRST_FRAME}, or log segments before it are missing: no segment has a first frame",
                f.segment.display()
            ))),
            None => Ok(0),
        };
    };
    let needed = found[oldest].first.map_or(0, |first| first.position);
    let text = match oldest.checked_sub(1) {
        Some(before) => format!("{} is damaged at offset {FIRST_FRAME}: its first frame", found[before].segment.display()),
        None => format!("log segments before {} are missing: the log begins there", found[oldest].segment.display()),
    };
    Err(LogError::Damaged(format!("{text} (position {needed} is the first that can be read, {after} is needed)")))
}

struct Scan {
    found: Vec<Found>,
    /// Index of the first segment that is read.
    begin: usize,
    /// Index of the segment being read, in the end the last one with records.
    at: usize,
    /// Where in it the log ends.
    end: u32,
    position: u64,
    /// The log was closed there.
    closed: bool,
}

/// What lies behind the end of the log.
struct Tail {
    /// Bytes of the last segment to overwrite, from its end on.
    torn: u32,
    /// Segments after it that hold frames.
    cut: Vec<usize>,
}

/// Frames that lie where none should be reached any more.
#[derive(Default)]
struct Leftover {
    /// Where the last one ends.
    end: u32,
    /// The furthest position that one of them says was durable, and where that frame lies.
    durable: Option<(u64, u32)>,
}

impl Scan {
    fn current(&self) -> &Arc<Segment> {
        &self.found[self.at].segment
    }

    fn damaged(&self, detail: &str) -> LogError {
        LogError::Damaged(format!("{} is damaged at offset {}: {detail}", self.current().display(), self.end))
    }

    /// Reads frames until one is not what has to follow.
    fn read(&mut self, after: u64, visit: &mut Visit<'_>) -> Result<(), LogError> {
        self.at = self.begin;
        // Without any frame, the log is at its beginning.
        self.position = self.found[self.at].first.map_or(0, |first| first.position);
        self.set_bounds_before();
        loop {
            self.current().set_start(self.position);
            self.end = FIRST_FRAME;
            self.read_segment(after, visit)?;
            let Some(next) = self.found.get(self.at + 1) else { return Ok(()) };
            if next.number() != self.current().number + 1 {
                return self.check_gap();
            }
            if self.closed || next.first.is_none_or(|first| first.position != self.position) {
                return Ok(());
            }
            self.current().set_end(self.position);
            self.at += 1;
        }
    }

    /// Segments before the first one that is read were kept for what the caller's state refers to.
    fn set_bounds_before(&self) {
        let mut end = self.position;
        for found in self.found[..self.begin].iter().rev() {
            found.segment.set_end(end);
            if let Some(first) = found.first {
                found.segment.set_start(first.position);
                end = first.position;
            }
        }
    }

    /// The next file's number is not the next number: only prepared segments may be missing.
    fn check_gap(&self) -> Result<(), LogError> {
        let missing = self.current().number + 1;
        match self.found[self.at + 1..].iter().find(|f| f.first.is_some()) {
            Some(later) => Err(LogError::Damaged(format!(
                "log segment {missing} is missing between {} and {}",
                self.current().display(),
                later.segment.display()
            ))),
            None => Ok(()),
        }
    }

    fn read_segment(&mut self, after: u64, visit: &mut Visit<'_>) -> Result<(), LogError> {
        let segment = self.current().clone();
        let mut window = Window::new(&segment);
        loop {
            let header = FrameHeader::decode(window.get(self.end, FRAME_HEADER)?, segment.stamp);
            let fits = |h: &FrameHeader| u64::from(self.end) + h.frame_bytes() <= u64::from(segment.capacity);
            let Some(header) = header.filter(|h| h.position == self.position && fits(h)) else { return Ok(()) };
            if header.closing {
                self.closed = true;
                return Ok(());
            }
            let offset = self.end + FRAME_HEADER as u32;
            let payload = window.get(offset, header.length as usize)?;
            if payload.len() < header.length as usize || crc32c::crc32c(payload) != header.payload_checksum {
                return Ok(());
            }
            let start = self.position + FRAME_HEADER as u64;
            let whole =
                walk(
                    payload,
                    segment.number,
                    offset,
                    |end, record, bodies| {
                        if start + end as u64 > after { visit(record, bodies) } else { Ok(()) }
                    },
                )?;
            if !whole {
                return Err(self.damaged("the frame's records don't fill it"));
            }
            self.position += header.frame_bytes();
            self.end += header.frame_bytes() as u32;
        }
    }

    /// Looks at what lies behind the end, and refuses when it shows that the log went on durably.
    fn examine_tail(&self) -> Result<Tail, LogError> {
        let later = self.at + 1..self.found.len();
        let with_frames = |i: &usize| self.found[*i].first.is_some();
        if self.closed && !later.clone().any(|i| with_frames(&i)) {
            return Ok(Tail { torn: FRAME_HEADER as u32, cut: Vec::new() });
        }
        let here = self.leftover(self.at, self.end)?;
        let mut tail = Tail { torn: here.end.saturating_sub(self.end).max(self.torn_frame()?), cut: Vec::new() };
        self.refuse_durable(self.at, &here)?;
        for index in later {
            let leftover = self.leftover(index, FIRST_FRAME)?;
            self.refuse_durable(index, &leftover)?;
            if leftover.end > 0 {
                tail.cut.push(index);
            }
        }
        Ok(tail)
    }

    /// Bytes of the frame at the end of the log, of which a part was written.
    fn torn_frame(&self) -> Result<u32, LogError> {
        let segment = self.current();
        let mut window = Window::new(segment);
        let bytes = window.get(self.end, FRAME_HEADER)?;
        if !begins_frame(bytes, segment.stamp) {
            return Ok(0);
        }
        let claimed = FrameHeader::decode(bytes, segment.stamp).map_or(FRAME_HEADER as u64, |header| header.frame_bytes());
        Ok(claimed.min(u64::from(segment.capacity - self.end)) as u32)
    }

    fn refuse_durable(&self, index: usize, leftover: &Leftover) -> Result<(), LogError> {
        match leftover.durable.filter(|(durable, _)| *durable > self.position) {
            Some((_, offset)) => {
                let witness = self.found[index].segment.display();
                Err(self
                    .damaged(&format!("no whole frame, but the one at offset {offset} of {witness} shows that it was durable")))
            }
            None => Ok(()),
        }
    }

    /// Frames of a segment from `from` on.
    fn leftover(&self, index: usize, from: u32) -> Result<Leftover, LogError> {
        let segment = &self.found[index].segment;
        let mut window = Window::new(segment);
        let mut leftover = Leftover::default();
        let mut at = from;
        while let Some(offset) = window.find_frame(at)? {
            if let Some(header) = FrameHeader::decode(window.get(offset, FRAME_HEADER)?, segment.stamp) {
                let end = (u64::from(offset) + header.frame_bytes()).min(u64::from(segment.capacity)) as u32;
                leftover.end = leftover.end.max(end);
                if leftover.durable.is_none_or(|(durable, _)| durable < header.durable) {
                    leftover.durable = Some((header.durable, offset));
                }
            }
            at = offset + ALIGN as u32;
        }
        Ok(leftover)
    }

    /// Removes what was cut, so that nothing of it can ever follow on what is written from here on.
    fn mend(&mut self, tail: &Tail) -> Result<(), LogError> {
        let failed = |segment: &Segment, error: io::Error| LogError::Unavailable(format!("{}: {error}", segment.display()));
        for index in tail.cut.iter().rev() {
            let segment = &self.found[*index].segment;
            tracing::warn!("{}: cut from offset {FIRST_FRAME} on: it follows on a torn write", segment.display());
        }
        let (at, next) = (self.at, self.current().number + 1);
        // From the last one down, so that a crash in between leaves no gap.
        while self.found.len() > at + 1 {
            let last = self.found.len() - 1;
            let keep = last == at + 1 && self.found[last].number() == next && !tail.cut.contains(&last);
            if keep {
                break;
            }
            if let Some(found) = self.found.pop() {
                found.segment.remove().map_err(|error| failed(&found.segment, error))?;
            }
        }
        let current = self.current();
        current.extend().map_err(|error| failed(current, error))?;
        if tail.torn > 0 && !self.closed {
            let (file, offset) = (current.display(), self.end);
            tracing::warn!("{file}: cut {} bytes from offset {offset} on: the last write was not completed", tail.torn);
            current.zero(self.end, self.end + tail.torn).map_err(|error| failed(current, error))?;
        }
        // What was replayed counts as durable from now on.
        for found in &self.found[self.begin..=at] {
            found.segment.sync().map_err(|error| failed(&found.segment, error))?;
        }
        self.mark().map_err(|error| failed(self.current(), error))
    }

    /// Notes that everything up to the end is durable, in place of a closing frame if there is one: a closing frame must
    /// never have anything behind it.
    fn mark(&mut self) -> io::Result<()> {
        let segment = self.current().clone();
        if self.position == 0 || segment.capacity - self.end < FRAME_HEADER as u32 {
            return Ok(());
        }
        let (stamp, position) = (segment.stamp, self.position);
        let header =
            FrameHeader { closing: false, records: 0, stamp, position, durable: position, length: 0, payload_checksum: 0 };
        segment.write_at(&header.encode(), self.end)?;
        segment.sync()?;
        self.end += FRAME_HEADER as u32;
        self.position += FRAME_HEADER as u64;
        Ok(())
    }

    fn finish(mut self) -> Result<Recovered, LogError> {
        let spare = if self.found.len() > self.at + 1 { self.found.pop().map(|found| found.segment) } else { None };
        if let Some(spare) = &spare {
            spare.extend().map_err(|error| LogError::Unavailable(format!("{}: {error}", spare.display())))?;
        }
        let current = self.current().clone();
        let segments = self.found.into_iter().map(|found| (found.segment.number, found.segment)).collect();
        Ok(Recovered { segments, current, end: self.end, spare, position: self.position })
    }
}
