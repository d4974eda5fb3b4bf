//! Reading bodies: neighbours with one system call, from the page cache without leaving the thread.

use std::{io::IoSliceMut, os::unix::fs::FileExt, sync::Arc};

use bytes::Bytes;
use rustix::io::{Errno, ReadWriteFlags, preadv2};

use super::{
    disk::Disk,
    frame::{BODY_OVERHEAD, body_checksum, u32_at},
    segment::Segment,
    types::{Location, LogError},
};

/// A gap between two bodies up to which reading it along is cheaper than a second call; it covers other records' headers.
const GAP_BYTES: u32 = 2 << 10;
/// Bytes read at once, unless one body is larger. All bodies of a call live as long as the last of them.
const GROUP_BYTES: u32 = 1 << 20;

/// Bodies that are read together: bytes `from` to `to` of a segment.
struct Group {
    first: usize,
    count: usize,
    segment: u32,
    from: u32,
    to: u32,
}

/// Gathers neighbours. Offsets of locations that can't be are refused later.
fn group(locations: &[Location]) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for (index, location) in locations.iter().enumerate() {
        let from = location.offset.saturating_sub(BODY_OVERHEAD as u32);
        let to = location.offset.saturating_add(location.length);
        match groups.last_mut() {
            Some(group)
                if group.segment == location.segment
                    && from >= group.to
                    && from - group.to <= GAP_BYTES
                    && to - group.from <= GROUP_BYTES =>
            {
                group.to = to;
                group.count += 1;
            }
            _ => groups.push(Group { first: index, count: 1, segment: location.segment, from, to }),
        }
    }
    groups
}

impl Disk {
    pub async fn read(&self, locations: &[Location]) -> Result<Vec<Bytes>, LogError> {
        let mut bodies = Vec::with_capacity(locations.len());
        for group in group(locations) {
            let members = &locations[group.first..group.first + group.count];
            let Some(last) = members.last() else { continue };
            let segment = self.readable(*last).await?;
            let bytes = Bytes::from(fetch(&segment, &group).await?);
            for location in members {
                bodies.push(checked(&segment, &bytes, location, group.from)?);
            }
        }
        Ok(bodies)
    }
}

/// One body out of what was read from `from` on.
fn checked(segment: &Segment, bytes: &Bytes, location: &Location, from: u32) -> Result<Bytes, LogError> {
    let start = (location.offset - from) as usize;
    let body = bytes.slice(start..start + location.length as usize);
    if u32_at(bytes, start - BODY_OVERHEAD) != body_checksum(segment.stamp, &body) {
        let (file, offset) = (segment.display(), location.offset);
        return Err(LogError::Damaged(format!("{file} is damaged at offset {offset}: a message of {} bytes", location.length)));
    }
    Ok(body)
}

async fn fetch(segment: &Arc<Segment>, group: &Group) -> Result<Vec<u8>, LogError> {
    let mut bytes = vec![0; (group.to - group.from) as usize];
    let filled = match cached(segment, &mut bytes, group.from) {
        Some(filled) if filled == bytes.len() => return Ok(bytes),
        Some(filled) => filled,
        None => 0,
    };
    let (segment, from) = (segment.clone(), group.from);
    let read = move || {
        let result = segment.file().read_exact_at(&mut bytes[filled..], u64::from(from) + filled as u64);
        let failed = |error| LogError::Damaged(format!("{} can't be read at offset {from}: {error}", segment.display()));
        result.map(|()| bytes).map_err(failed)
    };
    match tokio::runtime::Handle::try_current() {
        Ok(runtime) => {
            let stopped = |error| LogError::Unavailable(format!("reading the log was interrupted: {error}"));
            runtime.spawn_blocking(read).await.map_err(stopped)?
        }
        Err(_) => read(),
    }
}

/// Reads what is in the page cache, without waiting for the disk. Answers how many bytes that was.
fn cached(segment: &Segment, bytes: &mut [u8], from: u32) -> Option<usize> {
    loop {
        let mut slices = [IoSliceMut::new(bytes)];
        match preadv2(segment.file(), &mut slices, u64::from(from), ReadWriteFlags::NOWAIT) {
            Ok(filled) => return Some(filled),
            Err(Errno::INTR) => {}
            // Not cached, or the file system does not know the flag.
            Err(_) => return None,
        }
    }
}
