//! Reads a segment front to back through a buffer.

use std::os::unix::fs::FileExt;

use super::{
    frame::{ALIGN, is_frame_magic, u32_at},
    segment::Segment,
    types::LogError,
};

/// Bytes read at once: large enough for the disk, small enough to stay in the cache.
const WINDOW_BYTES: usize = 1 << 20;

/// A view of a segment that moves forward.
pub(super) struct Window<'a> {
    segment: &'a Segment,
    buffer: Vec<u8>,
    /// Offset of the buffer's first byte.
    start: u32,
}

impl<'a> Window<'a> {
    pub fn new(segment: &'a Segment) -> Self {
        Self { segment, buffer: Vec::new(), start: 0 }
    }

    /// The bytes from `offset` on, up to `length` of them; fewer only where the file or the segment ends.
    pub fn get(&mut self, offset: u32, length: usize) -> Result<&[u8], LogError> {
        let length = length.min(self.segment.capacity.saturating_sub(offset) as usize);
        let inside = offset >= self.start && (offset - self.start) as usize + length <= self.buffer.len();
        if !inside {
            self.load(offset, length)?;
        }
        let from = (offset - self.start) as usize;
        let to = (from + length).min(self.buffer.len());
        Ok(&self.buffer[from..to])
    }

    fn load(&mut self, offset: u32, length: usize) -> Result<(), LogError> {
        let wanted = length.max(WINDOW_BYTES).min(self.segment.capacity.saturating_sub(offset) as usize);
        self.start = offset;
        self.buffer.resize(wanted, 0);
        let mut filled = 0;
        while filled < wanted {
            match self.segment.file().read_at(&mut self.buffer[filled..], u64::from(offset) + filled as u64) {
                Ok(0) => break,
                Ok(n) => filled += n,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => {
                    self.buffer.clear();
                    let at = u64::from(offset) + filled as u64;
                    let text = format!("{} can't be read at offset {at}: {error}", self.segment.display());
                    return Err(LogError::Damaged(text));
                }
            }
        }
        self.buffer.truncate(filled);
        Ok(())
    }

    /// The next place from `from` on where a frame may begin.
    pub fn find_frame(&mut self, from: u32) -> Result<Option<u32>, LogError> {
        let mut at = from;
        loop {
            // Down to one word, so that the end of the file is met in the end.
            let bytes = self.get(at, ALIGN)?;
            if bytes.len() < ALIGN {
                return Ok(None);
            }
            let loaded = &self.buffer[(at - self.start) as usize..];
            let words = loaded.chunks_exact(ALIGN);
            let length = words.len() * ALIGN;
            if let Some(index) = words.map(|word| u32_at(word, 0)).position(is_frame_magic) {
                return Ok(Some(at + (index * ALIGN) as u32));
            }
            at += length as u32;
        }
    }
}
