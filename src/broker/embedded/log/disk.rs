//! A log on disk: what its callers, its committer thread and its stock thread share.

use std::{
    collections::BTreeMap,
    future::poll_fn,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    task::Poll,
    thread::{self, JoinHandle},
};

use parking_lot::{Condvar, Mutex, RwLock};

use super::{
    OnDurable,
    directory::Directory,
    frame::{FIRST_FRAME, FRAME_HEADER},
    head::{Committer, Head, Health, Spare},
    recovery::{self, Recovered, Visit},
    segment::Segment,
    stock,
    types::{AppendKind, Appended, Durability, Location, LogError, LogOptions, Usage},
    wait::Waiters,
    writer::{self, Tail},
};
use crate::model::meter::{Histogram, HistogramView};

/// A caller's thread writes at most this much itself; a larger write would hold up other tasks of its runtime.
const INLINE_BYTES: usize = 128 << 10;

pub(super) struct Shared {
    pub directory: Arc<Directory>,
    pub durability: Durability,
    pub segment_bytes: u32,
    pub max_bytes: Option<u64>,
    pub head: Mutex<Head>,
    /// Wakes the committer.
    pub work: Condvar,
    /// Wakes the stock thread.
    pub errands: Condvar,
    /// Belongs to whoever writes. Never taken while `head` is held.
    pub tail: Mutex<Tail>,
    pub segments: RwLock<BTreeMap<u32, Arc<Segment>>>,
    pub written: Waiters,
    pub durable: Waiters,
    /// What is known to be on the disk; behind `durable` only when that does not mean the disk.
    pub synced: AtomicU64,
    /// What the last frame says is on the disk.
    pub marked: AtomicU64,
    /// Up to where somebody wants the log synced.
    pub sync_to: AtomicU64,
    /// Time of each sync.
    pub syncs: Histogram,
    pub on_durable: OnceLock<OnDurable>,
    /// 1 once both threads are done.
    pub ended: Waiters,
}

/// See the module.
pub(super) struct Disk {
    shared: Arc<Shared>,
    committer: Option<JoinHandle<()>>,
}

impl Disk {
    pub fn open(directory: Directory, options: &LogOptions, after: u64, visit: &mut Visit<'_>) -> Result<Self, LogError> {
        let directory = Arc::new(directory);
        let Recovered { segments, current, end, spare, position } =
            recovery::recover(&directory, options.segment_bytes, after, visit)?;
        let spare = spare.map_or(Spare::Wanted { asked: false }, Spare::Ready);
        let unfilled = (position == 0).then(|| current.clone());
        let mut head = Head::new(current, end, position, spare, options.max_pending_bytes);
        head.unfilled = unfilled;
        let shared = Arc::new(Shared {
            directory,
            durability: options.durability,
            segment_bytes: options.segment_bytes,
            max_bytes: options.max_bytes,
            head: Mutex::new(head),
            work: Condvar::new(),
            errands: Condvar::new(),
            tail: Mutex::new(Tail::default()),
            segments: RwLock::new(segments),
            written: Waiters::new(position),
            durable: Waiters::new(position),
            synced: AtomicU64::new(position),
            // A little less than the truth, but never more.
            marked: AtomicU64::new(position.saturating_sub(FRAME_HEADER as u64)),
            sync_to: AtomicU64::new(position),
            syncs: Histogram::default(),
            on_durable: OnceLock::new(),
            ended: Waiters::new(0),
        });
        let failed = |error: std::io::Error| LogError::Unavailable(format!("can't start a thread for the log: {error}"));
        let of_stock = shared.clone();
        let stock = thread::Builder::new().name("log-stock".into()).spawn(move || stock::run(&of_stock)).map_err(failed)?;
        let of_committer = shared.clone();
        let committer = thread::Builder::new().name("log-committer".into()).spawn(move || writer::run(&of_committer, stock));
        match committer {
            Ok(committer) => Ok(Self { shared, committer: Some(committer) }),
            Err(error) => {
                shared.head.lock().stock_done = true;
                shared.errands.notify_one();
                Err(failed(error))
            }
        }
    }

    pub fn append(
        &self,
        kind: AppendKind,
        sync: bool,
        header: &[u8],
        body: &[u8],
        lengths: &[u32],
    ) -> Result<Appended, LogError> {
        let shared = &self.shared;
        let sync = sync && shared.durability == Durability::Fsync;
        let (appended, wake, errand) = {
            let mut head = shared.head.lock();
            let before = head.segment.number;
            let appended = head.append(kind, header, body, lengths);
            if head.segment.number != before {
                // Known before anybody can ask for what lies there.
                shared.segments.write().insert(head.segment.number, head.segment.clone());
            }
            let mut wake = false;
            if let Ok(appended) = &appended {
                // What need not be synced is written by those who wait for it, or when the committer looks the next time.
                wake = head.committer == Committer::Asleep || (sync && head.committer == Committer::Resting);
                if sync {
                    shared.sync_to.store(appended.position, Ordering::Release);
                    wake |= head.count_sync();
                }
            }
            if wake {
                head.committer = Committer::Working;
            }
            let errand = head.has_errand(appended.is_err());
            (appended, wake, errand)
        };
        if wake {
            shared.work.notify_one();
        }
        if errand {
            shared.errands.notify_one();
        }
        appended
    }

    pub fn admit(&self, kind: AppendKind) -> Result<(), LogError> {
        self.shared.head.lock().admit(kind)
    }

    pub fn short_of_space(&self) -> bool {
        self.shared.head.lock().short_of_space()
    }

    pub fn is_behind(&self) -> bool {
        self.shared.head.lock().is_behind()
    }

    pub fn current_segment(&self) -> u32 {
        self.shared.head.lock().segment.number
    }

    pub fn segment_bytes(&self) -> u32 {
        self.shared.segment_bytes
    }

    pub fn position(&self) -> u64 {
        self.shared.head.lock().position
    }

    pub fn durable_position(&self) -> u64 {
        self.shared.durable.reached()
    }

    pub fn syncs(&self) -> HistogramView {
        self.shared.syncs.view()
    }

    pub fn free_bytes(&self) -> Option<u64> {
        let space = rustix::fs::statvfs(self.shared.directory.path()).ok()?;
        Some(space.f_bavail * space.f_frsize)
    }

    pub fn on_durable(&self, callback: OnDurable) {
        // Only the first one counts, as documented.
        let _ = self.shared.on_durable.set(callback);
    }

    pub async fn written(&self, position: u64) -> Result<(), LogError> {
        self.write(position).await;
        self.shared.written.wait(position).await
    }

    pub async fn durable(&self, position: u64) -> Result<(), LogError> {
        let shared = &self.shared;
        if shared.durability == Durability::None {
            self.write(position).await;
        } else if shared.sync_to.load(Ordering::Acquire) < position {
            shared.sync_to.fetch_max(position, Ordering::AcqRel);
            shared.wake_committer();
        }
        shared.durable.wait(position).await
    }

    /// Has everything up to `position` written, on this thread or another.
    async fn write(&self, position: u64) {
        let shared = &self.shared;
        if shared.written.reached() < position {
            // Others that are ready to run append first, and all of it becomes one write.
            yield_once().await;
            if shared.written.reached() < position {
                shared.write_here();
            }
        }
    }

    /// Waits until what lies at `location` can be read back.
    pub async fn readable(&self, location: Location) -> Result<Arc<Segment>, LogError> {
        let segment = self.shared.segments.read().get(&location.segment).cloned();
        let Some(segment) = segment else {
            return Err(LogError::Damaged(format!("segment {} is not in the log", location.segment)));
        };
        let end = u64::from(location.offset) + u64::from(location.length);
        if end > u64::from(segment.capacity) || location.offset < FIRST_FRAME {
            let (file, offset) = (segment.display(), location.offset);
            return Err(LogError::Damaged(format!("{file}: no body of {} bytes can lie at offset {offset}", location.length)));
        }
        // Segments of a former run have no known start when they lie before what was replayed.
        let written = self.shared.written.reached();
        if segment.end() > written && segment.position_at(end as u32) > written {
            self.written(self.position()).await?;
        }
        Ok(segment)
    }

    pub fn trim(&self, before: u64, keep: &dyn Fn(u32) -> bool) {
        let before = before.min(self.shared.durable.reached());
        let current = self.shared.head.lock().segment.number;
        let mut freed = Vec::new();
        self.shared.segments.write().retain(|number, segment| {
            let goes = *number < current && segment.end() <= before && !keep(*number);
            if goes {
                freed.push(segment.clone());
            }
            !goes
        });
        if !freed.is_empty() {
            self.shared.head.lock().freed.append(&mut freed);
            self.shared.errands.notify_one();
        }
    }

    pub fn segments(&self) -> Vec<u32> {
        self.shared.segments.read().keys().copied().collect()
    }

    pub fn usage(&self) -> Usage {
        let (held, segments) = {
            let segments = self.shared.segments.read();
            (segments.values().map(|s| u64::from(s.capacity)).sum::<u64>(), segments.len())
        };
        let head = self.shared.head.lock();
        let stocked = head.freed.iter().map(|s| u64::from(s.capacity)).sum::<u64>()
            + if let Spare::Ready(spare) = &head.spare { u64::from(spare.capacity) } else { 0 };
        Usage { bytes: held + stocked, segments, pending_bytes: head.pending_bytes }
    }

    fn begin_close(&self) {
        self.shared.head.lock().closing = true;
        self.shared.wake_committer();
    }

    pub async fn close(&self) {
        self.begin_close();
        // It never fails.
        let _ = self.shared.ended.wait(1).await;
    }

    #[cfg(test)]
    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.begin_close();
        if let Some(committer) = self.committer.take()
            // The callback may hold the last reference to what owns the log.
            && committer.thread().id() != thread::current().id()
        {
            // It ends by itself, and a panic there has been reported.
            let _ = committer.join();
        }
    }
}

impl Shared {
    /// Sees to it that the committer looks for work.
    pub fn wake_committer(&self) {
        self.head.lock().committer = Committer::Working;
        self.work.notify_one();
    }

    /// Writes what is pending on this thread, if nobody else is writing: a thread switch each way costs more than the write.
    fn write_here(&self) {
        let large = self.head.lock().pending_bytes > INLINE_BYTES;
        let tail = if large { None } else { self.tail.try_lock() };
        match tail {
            Some(mut tail) if tail.is_empty() => {
                let result = self.write_pending(&mut tail);
                drop(tail);
                match result {
                    Ok(()) => self.announce_written(),
                    // The committer repeats it and tells whoever waits.
                    Err(_) => self.wake_committer(),
                }
            }
            // A write under way may have begun too early for us.
            _ => self.wake_committer(),
        }
    }

    /// Tells everybody that the log is broken for good.
    pub fn die(&self, reason: String) {
        tracing::error!("the log stops: {reason}");
        self.head.lock().health = Health::Dead(reason.clone());
        self.fail_waiters(reason);
    }

    pub fn fail_waiters(&self, reason: String) {
        self.written.fail(LogError::Unavailable(reason.clone()));
        self.durable.fail(LogError::Unavailable(reason));
    }
}

async fn yield_once() {
    let mut yielded = false;
    poll_fn(move |cx| {
        if yielded {
            return Poll::Ready(());
        }
        yielded = true;
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
