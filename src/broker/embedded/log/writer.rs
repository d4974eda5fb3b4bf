//! The committer: one thread that turns whatever is pending into one write and one sync, again and again.

use std::{
    collections::VecDeque,
    io,
    sync::{Arc, atomic::Ordering},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use super::{
    disk::Shared,
    frame::{FrameHeader, finish},
    head::{Batch, Committer, Health},
    segment::Segment,
    types::Durability,
};

/// How long the committer stays alert for records that nobody waits for, before it notes how far the log is durable and
/// sleeps.
const REST: Duration = Duration::from_millis(100);
/// A waiter that was to wake others and did not run within this time is not waited for.
const PATIENCE: Duration = Duration::from_millis(1);
/// Between attempts to repeat a failed write.
const RETRY: Duration = Duration::from_millis(250);

/// The writing side.
#[derive(Default)]
pub(super) struct Tail {
    /// Batches on their way; between writes only those of a failed one.
    queue: VecDeque<Batch>,
    /// Segments written to since they were last synced.
    unsynced: Vec<Arc<Segment>>,
    /// Records written since then that are to be synced.
    syncs: u32,
}

impl Tail {
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }
}

enum Task {
    Write,
    Mark,
    Repeat,
    Stop,
}

/// The thread's life.
pub(super) fn run(shared: &Arc<Shared>, stock: JoinHandle<()>) {
    loop {
        match shared.next_task() {
            Task::Write => {}
            Task::Mark => shared.mark(),
            Task::Repeat => shared.pause(),
            Task::Stop => break,
        }
        shared.turn();
    }
    shared.wind_up(stock);
}

impl Shared {
    /// Waits for something to do.
    fn next_task(&self) -> Task {
        let mut head = self.head.lock();
        let (mut rested, mut gathered) = (false, false);
        loop {
            head.committer = Committer::Working;
            if matches!(head.health, Health::Dead(_)) {
                return Task::Stop;
            }
            if head.retrying && head.health != Health::Good {
                return if head.closing { Task::Stop } else { Task::Repeat };
            }
            if let Some(time) = head.gathering_time().filter(|_| !gathered) {
                gathered = true;
                head.committer = Committer::Gathering;
                self.work.wait_for(&mut head, time);
                continue;
            }
            if head.has_pending() || head.retrying || self.sync_is_due() {
                return Task::Write;
            }
            if head.closing {
                return Task::Stop;
            }
            let owes = self.written.owes() || self.durable.owes();
            if rested && !owes {
                head.committer = Committer::Asleep;
                self.work.wait(&mut head);
                rested = false;
                continue;
            }
            head.committer = Committer::Resting;
            let timed_out = self.work.wait_for(&mut head, if owes { PATIENCE } else { REST }).timed_out();
            if owes {
                drop(head);
                self.wake_left();
                head = self.head.lock();
            } else if timed_out {
                rested = true;
                let unmarked = !head.has_pending() && self.synced.load(Ordering::Acquire) > self.marked.load(Ordering::Acquire);
                if unmarked {
                    return Task::Mark;
                }
            }
        }
    }

    fn wake_left(&self) {
        self.written.wake_left();
        self.durable.wake_left();
    }

    fn sync_is_due(&self) -> bool {
        let wanted = self.sync_to.load(Ordering::Acquire).min(self.written.reached());
        self.durability == Durability::Fsync && wanted > self.durable.reached()
    }

    /// Notes how far the log is durable, for a start that finds something damaged.
    fn mark(&self) {
        let durable = self.synced.load(Ordering::Acquire);
        self.head.lock().push_mark(false);
        // Tried once, also where there is no room.
        self.marked.store(durable, Ordering::Release);
    }

    fn pause(&self) {
        let mut head = self.head.lock();
        let until = Instant::now() + RETRY;
        while !head.closing && !self.work.wait_until(&mut head, until).timed_out() {}
    }

    /// One write and, when somebody wants it, one sync.
    fn turn(&self) {
        let (result, reached, unsynced, syncs) = {
            let mut tail = self.tail.lock();
            let result = self.write_pending(&mut tail);
            let due = self.sync_is_due();
            let unsynced = if due { std::mem::take(&mut tail.unsynced) } else { Vec::new() };
            let syncs = if due { std::mem::take(&mut tail.syncs) } else { 0 };
            (result, self.written.reached(), unsynced, syncs)
        };
        self.announce_written();
        if !unsynced.is_empty() && !self.sync(&unsynced, reached, syncs) {
            return;
        }
        match result {
            Ok(()) => self.note_success(),
            Err(error) => self.note_failure(&error),
        }
    }

    /// Writes everything pending. After an error the rest stays in the tail, to be repeated.
    pub fn write_pending(&self, tail: &mut Tail) -> io::Result<()> {
        tail.syncs += self.head.lock().take_pending(&mut tail.queue);
        while let Some(batch) = tail.queue.front_mut() {
            if let Err(error) = self.write_batch(batch, &mut tail.unsynced) {
                self.head.lock().retrying = true;
                return Err(error);
            }
            self.written.advance(batch.end_position());
            if let Some(batch) = tail.queue.pop_front() {
                self.head.lock().give_back(batch.bytes);
            }
        }
        Ok(())
    }

    fn write_batch(&self, batch: &mut Batch, unsynced: &mut Vec<Arc<Segment>>) -> io::Result<()> {
        let segment = &batch.segment;
        if unsynced.last().is_none_or(|last| last.number != segment.number) {
            if self.durability == Durability::None && !unsynced.is_empty() {
                self.head.lock().to_sync.extend(unsynced.drain(..));
                self.errands.notify_one();
            }
            unsynced.push(segment.clone());
        }
        let durable = self.synced.load(Ordering::Acquire);
        let header = FrameHeader {
            closing: batch.closing,
            records: batch.records,
            stamp: segment.stamp,
            position: segment.position_at(batch.offset),
            durable,
            length: 0,
            payload_checksum: 0,
        };
        finish(&mut batch.bytes, header);
        segment.write_at(&batch.bytes, batch.offset)?;
        self.marked.store(durable, Ordering::Release);
        Ok(())
    }

    /// Tells those who wait for a write.
    pub fn announce_written(&self) {
        if self.durability == Durability::None {
            self.announce_durable(self.written.reached());
        }
        self.written.wake();
    }

    fn announce_durable(&self, reached: u64) {
        if reached > self.durable.reached() {
            if let Some(callback) = self.on_durable.get() {
                callback(reached);
            }
            self.durable.advance(reached);
            self.durable.wake();
        }
    }

    /// Answers whether the sync succeeded. After a failed one the kernel may have dropped the pages, and a second that
    /// succeeds would prove nothing: the log stops.
    fn sync(&self, segments: &[Arc<Segment>], reached: u64, syncs: u32) -> bool {
        let begin = Instant::now();
        for segment in segments {
            if let Err(error) = segment.sync() {
                self.die(format!("syncing {} failed: {error}", segment.display()));
                return false;
            }
        }
        self.syncs.observe(begin.elapsed());
        self.synced.fetch_max(reached, Ordering::AcqRel);
        {
            let mut head = self.head.lock();
            (head.last_syncs, head.last_sync) = (syncs, begin.elapsed());
        }
        self.announce_durable(reached);
        true
    }

    fn note_success(&self) {
        let mut head = self.head.lock();
        if head.retrying {
            head.retrying = false;
            if head.health != Health::Good {
                head.health = Health::Good;
                self.written.recover();
                self.durable.recover();
                tracing::info!("the log can be written again");
            }
        }
    }

    fn note_failure(&self, error: &io::Error) {
        let reason = format!("writing the log in {} failed: {error}", self.directory.path().display());
        {
            let mut head = self.head.lock();
            if matches!(head.health, Health::Dead(_)) {
                return;
            }
            if head.health == Health::Good {
                tracing::warn!("{reason}; it is repeated until it succeeds");
            }
            head.health = Health::Failing(reason.clone());
        }
        self.fail_waiters(reason);
    }

    /// The end: makes everything durable, notes that nothing follows, and lets go of the directory.
    fn wind_up(&self, stock: JoinHandle<()>) {
        self.head.lock().stock_done = true;
        self.errands.notify_one();
        if stock.join().is_err() {
            tracing::error!("the log's stock thread panicked");
        }
        let good = self.head.lock().health == Health::Good;
        if good && let Err(error) = self.write_closing() {
            tracing::warn!("the log in {} could not be closed cleanly: {error}", self.directory.path().display());
        }
        let reason = {
            let mut head = self.head.lock();
            if head.health == Health::Good {
                head.health = Health::Dead("the log is closed".into());
            }
            head.closing = true;
            // Whoever waits is told why the log ended, which is not always that it was closed.
            match &head.health {
                Health::Dead(reason) | Health::Failing(reason) => reason.clone(),
                Health::Good => String::new(),
            }
        };
        self.fail_waiters(reason);
        self.wake_left();
        self.directory.unlock();
        self.ended.advance(1);
        self.ended.wake();
        self.ended.wake_left();
    }

    fn write_closing(&self) -> io::Result<()> {
        let mut tail = self.tail.lock();
        self.write_pending(&mut tail)?;
        let reached = self.written.reached();
        let unsynced = std::mem::take(&mut tail.unsynced);
        for segment in &unsynced {
            segment.sync()?;
        }
        self.synced.fetch_max(reached, Ordering::AcqRel);
        drop(tail);
        self.announce_written();
        self.announce_durable(reached);
        let mut tail = self.tail.lock();
        if self.head.lock().push_mark(true) {
            self.write_pending(&mut tail)?;
            for segment in std::mem::take(&mut tail.unsynced) {
                segment.sync()?;
            }
        }
        Ok(())
    }
}
