//! One segment file: created at full size, recycled when its records are no longer needed.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::FileExt,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use parking_lot::Mutex;
use rustix::{
    fs::{FallocateFlags, fallocate, fdatasync},
    io::Errno,
};

use super::{
    directory::Directory,
    frame::{FIRST_FRAME, HeaderError, SEGMENT_HEADER, SegmentHeader, VERSION},
    types::LogError,
};

/// Zeros written at once when a segment is filled: about a millisecond of the disk, so that commits come in between.
const FILL_BYTES: usize = 1 << 20;
static ZEROS: [u8; FILL_BYTES] = [0; FILL_BYTES];

/// A segment file.
pub(super) struct Segment {
    pub number: u32,
    pub stamp: u64,
    /// Bytes of the file, header included.
    pub capacity: u32,
    directory: Arc<Directory>,
    file: File,
    path: PathBuf,
    /// Position of the first frame; known once the one before is full.
    start: AtomicU64,
    /// Position after the last frame; [`u64::MAX`] while there may be more.
    end: AtomicU64,
    /// Where zeros are written next; `None` once that is over. Held while they are, because they must not hit records.
    filling: Mutex<Option<u64>>,
    /// The same for writers, who don't wait behind it: before this place no zeros will be written.
    filled: AtomicU64,
}

impl Segment {
    /// Creates a segment. Its space is reserved when this returns, but only its beginning is zeros on the disk, the rest by
    /// the file system's notes; [`fill`](Self::fill) makes writing there cheaper.
    pub fn create(directory: &Arc<Directory>, number: u32, capacity: u32) -> io::Result<Self> {
        let path = directory.temporary_path(number);
        let made = (|| {
            let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path)?;
            let filled = reserve(&file, 0, capacity)?;
            let mut segment = Self::assemble(directory, file, path.clone(), number, capacity, filled);
            segment.fill_step()?;
            segment.publish()?;
            Ok(segment)
        })();
        if made.is_err() {
            // Leave the space to others.
            let _ = fs::remove_file(&path);
        }
        made
    }

    /// Makes a new segment out of one whose records are no longer needed: its blocks are there, and nobody reads it.
    pub fn recycle(self, number: u32) -> io::Result<Self> {
        let path = self.directory.temporary_path(number);
        fs::rename(&self.path, &path)?;
        // Before the header changes: the old name must never lead to the new header.
        self.directory.sync()?;
        let mut segment = Self::assemble(&self.directory, self.file, path, number, self.capacity, self.filling.into_inner());
        segment.publish()?;
        Ok(segment)
    }

    fn assemble(directory: &Arc<Directory>, file: File, path: PathBuf, number: u32, capacity: u32, filled: Option<u64>) -> Self {
        Self {
            number,
            stamp: rand::random(),
            capacity,
            directory: directory.clone(),
            file,
            path,
            start: AtomicU64::new(0),
            end: AtomicU64::new(u64::MAX),
            filling: Mutex::new(filled),
            filled: AtomicU64::new(filled.unwrap_or(u64::MAX)),
        }
    }

    /// Writes the header and gives the file its name.
    fn publish(&mut self) -> io::Result<()> {
        let header = SegmentHeader { number: self.number, stamp: self.stamp, capacity: self.capacity };
        self.file.write_all_at(&header.encode(), 0)?;
        self.file.sync_all()?;
        let path = self.directory.segment_path(self.number);
        fs::rename(&self.path, &path)?;
        self.path = path;
        self.directory.sync()
    }

    /// Opens an existing segment.
    pub fn open(directory: &Arc<Directory>, number: u32) -> Result<Self, LogError> {
        let path = directory.segment_path(number);
        let failed = |error: io::Error| LogError::Unavailable(format!("{}: {error}", path.display()));
        let damaged = |detail: &str| LogError::Damaged(format!("{} is damaged at offset 0: {detail}", path.display()));
        let file = OpenOptions::new().read(true).write(true).open(&path).map_err(failed)?;
        let mut header = [0; SEGMENT_HEADER];
        match file.read_exact_at(&mut header, 0) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Err(damaged("the header is cut off")),
            other => other.map_err(failed)?,
        }
        let header = SegmentHeader::decode(&header).map_err(|error| match error {
            HeaderError::Damaged => damaged("not a segment header"),
            HeaderError::Newer(version) => LogError::Damaged(format!(
                "{} has format version {version}, and this program knows versions up to {VERSION}: a newer one wrote it",
                path.display()
            )),
        })?;
        if header.number != number {
            return Err(damaged(&format!("it is the header of segment {}", header.number)));
        }
        let mut segment = Self::assemble(directory, file, path, number, header.capacity, None);
        segment.stamp = header.stamp;
        Ok(segment)
    }

    pub fn display(&self) -> std::path::Display<'_> {
        self.path.display()
    }

    pub fn file(&self) -> &File {
        &self.file
    }

    pub fn set_start(&self, position: u64) {
        self.start.store(position, Ordering::Release);
    }

    pub fn start(&self) -> u64 {
        self.start.load(Ordering::Acquire)
    }

    pub fn set_end(&self, position: u64) {
        self.end.store(position, Ordering::Release);
    }

    pub fn end(&self) -> u64 {
        self.end.load(Ordering::Acquire)
    }

    /// The log position of a place in the segment.
    pub fn position_at(&self, offset: u32) -> u64 {
        self.start() + u64::from(offset - FIRST_FRAME)
    }

    pub fn write_at(&self, bytes: &[u8], offset: u32) -> io::Result<()> {
        if u64::from(offset) + bytes.len() as u64 > self.filled.load(Ordering::Acquire) {
            // Faster than the filling: it ends here.
            *self.filling.lock() = None;
            self.filled.store(u64::MAX, Ordering::Release);
        }
        #[cfg(test)]
        self.directory.faults.write()?;
        self.file.write_all_at(bytes, u64::from(offset))
    }

    pub fn sync(&self) -> io::Result<()> {
        #[cfg(test)]
        self.directory.faults.sync()?;
        Ok(fdatasync(&self.file)?)
    }

    /// Gives a file that lost its end its full size again.
    pub fn extend(&self) -> io::Result<()> {
        let length = self.file.metadata()?.len();
        if length < u64::from(self.capacity) {
            reserve(&self.file, length, self.capacity)?;
            self.file.sync_all()?;
        }
        Ok(())
    }

    /// Overwrites a range with zeros, durably.
    pub fn zero(&self, from: u32, to: u32) -> io::Result<()> {
        let mut at = from;
        while at < to {
            let step = FILL_BYTES.min((to - at) as usize);
            self.file.write_all_at(&ZEROS[..step], u64::from(at))?;
            at += step as u32;
        }
        self.sync()
    }

    /// Writes zeros to the end, which makes later writes plain overwrites without changes to the file system's own records.
    /// Records may be written meanwhile; should they catch up, this ends, and when `go_on` says no.
    pub fn fill(&self, go_on: &dyn Fn() -> bool) -> io::Result<()> {
        while go_on() && self.fill_step()? {
            fdatasync(&self.file)?;
        }
        Ok(())
    }

    /// Writes the next zeros. Answers whether there were any to write.
    fn fill_step(&self) -> io::Result<bool> {
        let mut filling = self.filling.lock();
        let Some(at) = *filling else { return Ok(false) };
        let step = FILL_BYTES.min((u64::from(self.capacity) - at) as usize);
        self.file.write_all_at(&ZEROS[..step], at)?;
        let next = at + step as u64;
        let over = next >= u64::from(self.capacity);
        *filling = (!over).then_some(next);
        self.filled.store(if over { u64::MAX } else { next }, Ordering::Release);
        Ok(true)
    }

    pub fn remove(&self) -> io::Result<()> {
        fs::remove_file(&self.path)
    }
}

/// Reserves the file's space, of which the first `length` bytes are there. Answers from where on to fill it with zeros.
fn reserve(file: &File, length: u64, capacity: u32) -> io::Result<Option<u64>> {
    let capacity = u64::from(capacity);
    match fallocate(file, FallocateFlags::empty(), 0, capacity) {
        Ok(()) => Ok(Some(u64::from(FIRST_FRAME))),
        // The file system can reserve space only by having it written.
        Err(Errno::OPNOTSUPP) => {
            let mut at = length;
            while at < capacity {
                let step = FILL_BYTES.min((capacity - at) as usize);
                file.write_all_at(&ZEROS[..step], at)?;
                at += step as u64;
            }
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}
