//! The log under the embedded broker: records in segments, written by one thread in group commits, or kept in memory.
//!
//! The caller appends records under its own lock, so that the order of the log is the order in which it applied them, and
//! waits for them outside of it. A record has a header (the operation, opaque here) and any number of bodies (messages),
//! each of which can be read alone by its [`Location`]. A checkpoint of the caller's covers everything up to a position;
//! the log repeats what comes after it at the next start, and [`trim`](Log::trim) lets go of what came before.
//!
//! - `head` places records in batches in memory, `writer` writes and syncs them, `wait` wakes those who wait for that.
//! - `stock` prepares, recycles and removes segment files. New ones are filled with zeros beforehand: overwriting costs a
//!   sync a fraction of what growing a file does.
//! - `frame` is the format, `recovery` the start.

mod directory;
mod disk;
mod frame;
mod head;
mod memory;
mod read;
mod recovery;
mod segment;
mod stock;
mod types;
mod wait;
mod window;
mod writer;

use std::sync::Arc;

use bytes::Bytes;

pub use types::{
    AppendKind, Appended, DEFAULT_MAX_PENDING_BYTES, DEFAULT_SEGMENT_BYTES, Durability, Location, LogError, LogOptions,
    MAX_SEGMENT_BYTES, MIN_SEGMENT_BYTES, Usage,
};

use self::{directory::Directory, disk::Disk, memory::Memory};
use crate::model::meter::HistogramView;

/// Called with each new durable position.
pub type OnDurable = Box<dyn Fn(u64) + Send + Sync>;

/// A log on disk or in memory. Dropping it writes and syncs what is pending, and blocks for that.
pub struct Log {
    backend: Backend,
}

enum Backend {
    Memory(Memory),
    Disk(Disk),
}

impl Log {
    /// Opens or creates a log and hands the header and the bodies' locations of every record that ends after `after` to
    /// `visit`: `after` is the position that the caller's checkpoint covers, `None` repeats everything. Blocks. The
    /// directory stays locked until the log is closed or dropped.
    ///
    /// A torn tail, which a crash in the middle of a write leaves, is cut with a warning.
    ///
    /// # Errors
    /// [`LogError::Damaged`] when something that was durable can't be read back, files are missing or of a newer format;
    /// [`LogError::Unavailable`] when the directory can't be used, an option is out of range or another process has the log;
    /// whatever `visit` answers.
    pub fn open(
        options: LogOptions,
        after: Option<u64>,
        mut visit: impl FnMut(&[u8], &[Location]) -> Result<(), LogError>,
    ) -> Result<Arc<Self>, LogError> {
        if !(MIN_SEGMENT_BYTES..=MAX_SEGMENT_BYTES).contains(&options.segment_bytes) {
            let (found, min, max) = (options.segment_bytes, MIN_SEGMENT_BYTES, MAX_SEGMENT_BYTES);
            return Err(LogError::Unavailable(format!("segment_bytes is {found}, but must be from {min} to {max}")));
        }
        let backend = match &options.directory {
            None => Backend::Memory(Memory::new(&options)),
            Some(path) => Backend::Disk(Disk::open(Directory::open(path)?, &options, after.unwrap_or(0), &mut visit)?),
        };
        Ok(Arc::new(Self { backend }))
    }

    /// Whether an operation may begin. Under one lock of the caller's, control records appended after it are taken.
    ///
    /// # Errors
    /// Like [`append`](Self::append).
    pub fn admit(&self, kind: AppendKind) -> Result<(), LogError> {
        match &self.backend {
            Backend::Memory(memory) => memory.admit(kind),
            Backend::Disk(disk) => disk.admit(kind),
        }
    }

    /// Appends one record whose bodies lie in `body`, back to back, as long as `lengths` says. Never waits for the disk: to
    /// be called under the caller's own lock. With `sync` it is synced as soon as possible; without, when a later record
    /// is, or when somebody waits for [`durable`](Self::durable), and it is written when somebody waits for it, or a tenth of
    /// a second later.
    ///
    /// # Errors
    /// [`LogError::Full`] or [`LogError::Unavailable`]; nothing was appended then.
    pub fn append(
        &self,
        kind: AppendKind,
        sync: bool,
        header: &[u8],
        body: &[u8],
        lengths: &[u32],
    ) -> Result<Appended, LogError> {
        let total: u64 = lengths.iter().map(|length| u64::from(*length)).sum();
        if total != body.len() as u64 {
            let text = format!("bodies of {total} bytes were announced, but there are {}", body.len());
            return Err(LogError::Unavailable(text));
        }
        match &self.backend {
            Backend::Memory(memory) => memory.append(kind, header.len(), body, lengths),
            Backend::Disk(disk) => disk.append(kind, sync, header, body, lengths),
        }
    }

    /// Resolves once the record at `position` is written: it survives the end of the process.
    ///
    /// # Errors
    /// [`LogError::Unavailable`] when the write failed. It is repeated, so the record may still get through.
    pub async fn written(&self, position: u64) -> Result<(), LogError> {
        match &self.backend {
            Backend::Memory(_) => Ok(()),
            Backend::Disk(disk) => disk.written(position).await,
        }
    }

    /// Resolves once the record at `position` is durable as [`Durability`] means it.
    ///
    /// # Errors
    /// As [`written`](Self::written). After a failed sync the log answers nothing else any more.
    pub async fn durable(&self, position: u64) -> Result<(), LogError> {
        match &self.backend {
            Backend::Memory(memory) => memory.durable(position),
            Backend::Disk(disk) => return disk.durable(position).await,
        }
        Ok(())
    }

    /// Sets what is called with each new durable position, before those who wait for it are woken: on the log's thread, or
    /// on one that waits in [`written`](Self::written) or [`durable`](Self::durable), and never under a lock of the log. In
    /// memory only on one that waits. Only the first callback counts.
    pub fn on_durable(&self, callback: OnDurable) {
        match &self.backend {
            Backend::Memory(memory) => memory.on_durable(callback),
            Backend::Disk(disk) => disk.on_durable(callback),
        }
    }

    /// Reads bodies, neighbours at once. Those of one call may share a buffer: copy what is kept long.
    ///
    /// # Errors
    /// [`LogError::Damaged`] naming file and offset, also when the segment was trimmed; [`LogError::Unavailable`] for what
    /// could not be written.
    pub async fn read(&self, locations: &[Location]) -> Result<Vec<Bytes>, LogError> {
        match &self.backend {
            Backend::Memory(memory) => memory.read(locations),
            Backend::Disk(disk) => disk.read(locations).await,
        }
    }

    /// Forgets segments that end at or before `before` and that `keep` does not hold on to. Whoever opens the log later
    /// passes at least `before`. `keep` is called under a lock of the log.
    pub fn trim(&self, before: u64, keep: &dyn Fn(u32) -> bool) {
        match &self.backend {
            Backend::Memory(memory) => memory.trim(before, keep),
            Backend::Disk(disk) => disk.trim(before, keep),
        }
    }

    /// The end of the last record appended, or at least replayed.
    pub fn position(&self) -> u64 {
        match &self.backend {
            Backend::Memory(memory) => memory.position(),
            Backend::Disk(disk) => disk.position(),
        }
    }

    /// Up to where the log is durable.
    pub fn durable_position(&self) -> u64 {
        match &self.backend {
            Backend::Memory(memory) => memory.position(),
            Backend::Disk(disk) => disk.durable_position(),
        }
    }

    /// Whether there is no room for another segment: time to free some, before messages are refused.
    pub fn short_of_space(&self) -> bool {
        match &self.backend {
            Backend::Memory(memory) => memory.admit(AppendKind::Data).is_err(),
            Backend::Disk(disk) => disk.short_of_space(),
        }
    }

    /// The segments with records, ascending. After a start the caller can check that those its state refers to are there.
    pub fn segments(&self) -> Vec<u32> {
        match &self.backend {
            Backend::Memory(memory) => memory.segments(),
            Backend::Disk(disk) => disk.segments(),
        }
    }

    /// Whether an append that was refused as unavailable will do in a moment: the disk is only slower than the publishers.
    pub fn is_behind(&self) -> bool {
        match &self.backend {
            Backend::Memory(_) => false,
            Backend::Disk(disk) => disk.is_behind(),
        }
    }

    /// Number of the segment that is being filled; every later append lies there or in a later one.
    pub fn current_segment(&self) -> u32 {
        match &self.backend {
            Backend::Memory(memory) => memory.current_segment(),
            Backend::Disk(disk) => disk.current_segment(),
        }
    }

    /// Bytes of a segment.
    pub fn segment_bytes(&self) -> u32 {
        match &self.backend {
            Backend::Memory(memory) => memory.segment_bytes(),
            Backend::Disk(disk) => disk.segment_bytes(),
        }
    }

    /// Space taken.
    pub fn usage(&self) -> Usage {
        match &self.backend {
            Backend::Memory(memory) => memory.usage(),
            Backend::Disk(disk) => disk.usage(),
        }
    }

    /// How long syncs took; none in memory.
    pub fn syncs(&self) -> Option<HistogramView> {
        match &self.backend {
            Backend::Memory(_) => None,
            Backend::Disk(disk) => Some(disk.syncs()),
        }
    }

    /// What the file system has left for this process; none in memory, and where it does not say.
    pub fn free_bytes(&self) -> Option<u64> {
        match &self.backend {
            Backend::Memory(_) => None,
            Backend::Disk(disk) => disk.free_bytes(),
        }
    }

    /// Writes and syncs what is pending and lets go of the directory. Appends after it are refused.
    pub async fn close(&self) {
        if let Backend::Disk(disk) = &self.backend {
            disk.close().await;
        }
    }
}

#[cfg(test)]
mod tests;
