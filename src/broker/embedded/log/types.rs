//! What callers of the log see: places, options, errors.

use std::path::{Path, PathBuf};

/// Where a body lies. Stays valid until its segment is trimmed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct Location {
    pub segment: u32,
    /// Bytes from the start of the segment.
    pub offset: u32,
    /// Bytes of the body.
    pub length: u32,
}

/// Which space an append may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AppendKind {
    /// New messages: refused while only the reserve is left.
    Data,
    /// Acknowledgements, leases and resource changes, which free space in the end: may use the reserve.
    Control,
}

/// When an append counts as durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Durability {
    /// Once handed to the operating system: survives the end of the process, not of the machine.
    None,
    /// Once on the disk.
    #[default]
    Fsync,
}

/// Large enough that a change of segments is rare, small enough that trimming is not coarse.
pub const DEFAULT_SEGMENT_BYTES: u32 = 64 << 20;
/// For tests. A server's largest record, a publish request of 10 MB, needs more than 16 MiB to leave the reserve its room.
pub const MIN_SEGMENT_BYTES: u32 = 64 << 10;
/// Offsets are 32 bits wide, and a start may have to read a whole segment.
pub const MAX_SEGMENT_BYTES: u32 = 1 << 30;
/// Several of the largest publish requests. More than this waits only when the disk does not keep up.
pub const DEFAULT_MAX_PENDING_BYTES: usize = 64 << 20;

/// How a log is kept.
#[derive(Debug, Clone)]
pub struct LogOptions {
    /// The log's directory; it shares it only with files of other names. `None` keeps everything in memory.
    pub directory: Option<PathBuf>,
    pub durability: Durability,
    /// Bytes of a segment file, [`MIN_SEGMENT_BYTES`] to [`MAX_SEGMENT_BYTES`]. In memory segments are smaller.
    pub segment_bytes: u32,
    /// Bytes that all segments together may take; `None` sets no bound but the disk's or the memory's own.
    pub max_bytes: Option<u64>,
    /// Bytes that may wait to be written before appends are refused.
    pub max_pending_bytes: usize,
}

impl LogOptions {
    /// A log in a directory.
    pub fn on_disk(directory: &Path, durability: Durability) -> Self {
        Self { directory: Some(directory.into()), durability, ..Self::in_memory() }
    }

    /// A log in memory.
    pub fn in_memory() -> Self {
        Self {
            directory: None,
            durability: Durability::None,
            segment_bytes: DEFAULT_SEGMENT_BYTES,
            max_bytes: None,
            max_pending_bytes: DEFAULT_MAX_PENDING_BYTES,
        }
    }
}

/// What an append assigned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Appended {
    /// Where the record ends, in bytes since the log's beginning: larger than that of every record before it.
    pub position: u64,
    /// Where the bodies lie, in order.
    pub bodies: Vec<Location>,
}

/// Space taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Bytes of all segments; on disk prepared and recycled ones included.
    pub bytes: u64,
    /// Segments that hold records.
    pub segments: usize,
    /// Bytes appended and not yet written.
    pub pending_bytes: usize,
}

/// Why the log did not do what was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LogError {
    /// Only the reserve is left, or not even that, or the record does not fit into a segment. Nothing was appended.
    #[error("{0}")]
    Full(String),
    /// What is stored is not what was written, is not all there, or has a newer format. Names the file and the offset.
    #[error("{0}")]
    Damaged(String),
    /// The log can't be opened, or can't write at the moment or any more. A refused append changed nothing; a record
    /// whose wait ended like this may still get through.
    #[error("{0}")]
    Unavailable(String),
}
