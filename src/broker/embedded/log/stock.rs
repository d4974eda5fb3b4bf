//! The stock thread: keeps one prepared segment at hand, recycles and removes those that are no longer needed.

use std::{
    io,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use super::{
    disk::Shared,
    head::{Head, Spare},
    segment::Segment,
};

/// Freed segments that are kept for recycling; more come only after a burst.
const KEPT_SEGMENTS: usize = 2;
/// Between attempts to find room for the next segment.
const RETRY: Duration = Duration::from_secs(1);

enum Errand {
    Sync(Arc<Segment>),
    Prepare { number: u32, old: Option<Arc<Segment>> },
    Fill(Arc<Segment>),
    Remove(Arc<Segment>),
    Done,
}

/// The thread's life.
pub(super) fn run(shared: &Arc<Shared>) {
    loop {
        match shared.next_errand() {
            Errand::Sync(segment) => shared.sync_full(&segment),
            Errand::Prepare { number, old } => shared.prepare(number, old),
            Errand::Fill(segment) => shared.fill(&segment),
            Errand::Remove(segment) => remove(&segment),
            Errand::Done => return,
        }
    }
}

impl Shared {
    fn next_errand(&self) -> Errand {
        let mut head = self.head.lock();
        // The first attempt after a failure waits, unless space comes free.
        let mut due = false;
        loop {
            if let Some(errand) = choose(&mut head, due) {
                return errand;
            }
            if matches!(head.spare, Spare::Failed(_)) {
                due = self.errands.wait_for(&mut head, RETRY).timed_out();
            } else {
                self.errands.wait(&mut head);
            }
        }
    }

    /// Without durability full segments are still synced, off the path of the writes, so that a crash of the machine
    /// leaves only the last ones in doubt.
    fn sync_full(&self, segment: &Segment) {
        match segment.sync() {
            Ok(()) => {
                self.synced.fetch_max(segment.end(), Ordering::AcqRel);
            }
            Err(error) => self.die(format!("syncing {} failed: {error}", segment.display())),
        }
    }

    fn prepare(&self, number: u32, old: Option<Arc<Segment>>) {
        let made = match old.map(Arc::try_unwrap) {
            Some(Ok(old)) if old.capacity == self.segment_bytes => old.recycle(number),
            Some(Ok(old)) => {
                remove(&old);
                self.create(number)
            }
            // Somebody still reads it; its space is free once they are done.
            Some(Err(old)) => {
                remove(&old);
                self.create(number)
            }
            None => self.create(number),
        };
        match made.map(Arc::new) {
            Ok(segment) => {
                self.head.lock().spare = Spare::Ready(segment.clone());
                self.fill(&segment);
            }
            Err(error) => {
                let mut head = self.head.lock();
                if matches!(head.spare, Spare::Wanted { .. }) {
                    tracing::warn!("no room for another log segment in {}: {error}", self.directory.path().display());
                }
                head.spare = Spare::Failed(error.to_string());
            }
        }
    }

    fn fill(&self, segment: &Segment) {
        if let Err(error) = segment.fill(&|| !self.head.lock().stock_done) {
            // Its space is reserved all the same.
            tracing::warn!("{} could not be filled with zeros: {error}", segment.display());
        }
    }

    fn create(&self, number: u32) -> io::Result<Segment> {
        if let Some(max) = self.max_bytes {
            let held: u64 = self.segments.read().values().map(|s| u64::from(s.capacity)).sum();
            if held + u64::from(self.segment_bytes) > max {
                return Err(io::Error::other(format!("the log may take {max} bytes, and its segments take {held} of them")));
            }
        }
        Segment::create(&self.directory, number, self.segment_bytes)
    }
}

fn choose(head: &mut Head, due: bool) -> Option<Errand> {
    if let Some(segment) = head.to_sync.pop_front() {
        return Some(Errand::Sync(segment));
    }
    if head.stock_done {
        return Some(head.freed.pop().map_or(Errand::Done, Errand::Remove));
    }
    let wanted = match head.spare {
        Spare::Ready(_) => false,
        Spare::Wanted { asked } => asked,
        Spare::Failed(_) => due || !head.freed.is_empty(),
    };
    if wanted {
        return Some(Errand::Prepare { number: head.segment.number + 1, old: head.freed.pop() });
    }
    if let Some(segment) = head.to_fill.take() {
        return Some(Errand::Fill(segment));
    }
    (head.freed.len() > KEPT_SEGMENTS).then(|| head.freed.pop()).flatten().map(Errand::Remove)
}

fn remove(segment: &Segment) {
    if let Err(error) = segment.remove() {
        tracing::warn!("{} could not be removed: {error}", segment.display());
    }
}
