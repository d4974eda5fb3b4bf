//! What this node knows of a queue: the sessions that wait on it and the leases they hold.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use parking_lot::Mutex;

use super::{
    codec::{Group, Reader, Set},
    slots::slot_of,
};
use crate::broker::{BrokerError, QueueRef, Session, TopicRef};

/// The key of a topic's state; all its other keys start with it.
pub fn topic_key(topic: &TopicRef) -> String {
    format!("gcp.topic.{{{}}}:{:x}", topic.channel, topic.incarnation)
}

/// The key of a queue's state; all its other keys start with it. The incarnation keeps what an earlier queue of the name
/// left from ever showing up in this one.
pub fn queue_key(queue: &QueueRef) -> String {
    format!("gcp.sub.{{{}}}:{:x}", queue.channel, queue.incarnation)
}

/// The queue a key names.
pub fn queue_of(key: &str) -> Option<QueueRef> {
    let (channel, incarnation) = key.strip_prefix("gcp.sub.{")?.split_once("}:")?;
    Some(QueueRef { channel: channel.into(), incarnation: u64::from_str_radix(incarnation, 16).ok()? })
}

/// Messages of one chunk under one lease of a session of this node.
struct Held {
    session: Arc<Session>,
    lo: u16,
    /// Encoded bytes of each message from `lo` on; 0 when it is not, or no longer, held.
    sizes: Vec<u32>,
    left: usize,
    deadline_at_ms: u64,
}

#[derive(Default)]
struct View {
    attached: HashMap<u64, Arc<Session>>,
    /// Sessions that found nothing, or whose lease call is under way, in the order in which they asked.
    hungry: VecDeque<Arc<Session>>,
    /// Sessions with a lease call under way.
    asking: HashSet<u64>,
    /// Sessions that were woken and have not leased since: each has a turn that must not be lost.
    woken: HashSet<u64>,
    held: HashMap<(u64, u64), Held>,
    /// Sessions whose last lease call got no answer.
    suspects: HashSet<u64>,
}

/// A queue as this node sees it.
pub struct QueueView {
    pub queue: QueueRef,
    pub key: Arc<str>,
    pub slot: u16,
    /// Serialises the recovery of lost lease calls.
    pub recovery: tokio::sync::Mutex<()>,
    /// When a session of this node last came or went.
    used_ms: AtomicU64,
    /// Largest operation number seen; a server that answers with a smaller one has lost data.
    seen: AtomicU64,
    /// Leases that calls of this node found to have run out.
    expired: AtomicU64,
    view: Mutex<View>,
}

impl QueueView {
    pub fn new(queue: QueueRef) -> Self {
        let key: Arc<str> = queue_key(&queue).into();
        Self {
            queue,
            slot: slot_of(&key),
            key,
            recovery: tokio::sync::Mutex::default(),
            used_ms: AtomicU64::new(0),
            seen: AtomicU64::new(0),
            expired: AtomicU64::new(0),
            view: Mutex::default(),
        }
    }

    pub fn seen(&self) -> u64 {
        self.seen.load(Ordering::Acquire)
    }

    pub fn saw(&self, operation: u64) {
        self.seen.fetch_max(operation, Ordering::AcqRel);
    }

    pub fn expired(&self) -> u64 {
        self.expired.load(Ordering::Acquire)
    }

    pub fn count_expired(&self, count: u32) {
        self.expired.fetch_add(u64::from(count), Ordering::AcqRel);
    }

    pub fn used(&self, now_ms: u64) {
        self.used_ms.fetch_max(now_ms, Ordering::AcqRel);
    }

    pub fn used_ms(&self) -> u64 {
        self.used_ms.load(Ordering::Acquire)
    }

    // ---- sessions

    pub fn attach(&self, session: &Arc<Session>) {
        self.view.lock().attached.insert(session.id, session.clone());
    }

    /// The session is over. Answers whether it leaves a turn that another should have.
    pub fn detach(&self, session: &Arc<Session>) -> bool {
        self.view.lock().attached.remove(&session.id);
        self.rest(session)
    }

    /// The session does not wait any more. Answers whether it leaves a turn that another should have.
    pub fn rest(&self, session: &Arc<Session>) -> bool {
        let mut view = self.view.lock();
        view.hungry.retain(|s| s.id != session.id);
        view.woken.remove(&session.id)
    }

    /// A lease call begins. The session counts as waiting already, so that a wake that overtakes the answer finds it.
    /// Answers how many others wait, whether one of them has no call under way, and whether this one waits.
    pub fn asking(&self, session: &Arc<Session>) -> (usize, bool, bool) {
        let mut view = self.view.lock();
        view.woken.remove(&session.id);
        let idle = view.hungry.iter().any(|s| s.id != session.id && !view.asking.contains(&s.id));
        view.asking.insert(session.id);
        if !view.attached.contains_key(&session.id) {
            return (view.hungry.len(), idle, false);
        }
        if !view.hungry.iter().any(|s| s.id == session.id) {
            view.hungry.push_back(session.clone());
        }
        (view.hungry.len() - 1, idle, true)
    }

    /// A lease call is over.
    pub fn answered(&self, session: &Arc<Session>) {
        self.view.lock().asking.remove(&session.id);
    }

    pub fn fed(&self, session: &Arc<Session>) {
        self.view.lock().hungry.retain(|s| s.id != session.id);
    }

    /// Wakes up to `count` waiting sessions in turn; answers whether there were any.
    pub fn wake(&self, count: usize) -> bool {
        let mut view = self.view.lock();
        let woken: Vec<Arc<Session>> = {
            let count = count.min(view.hungry.len());
            view.hungry.drain(..count).collect()
        };
        for session in &woken {
            view.woken.insert(session.id);
            session.wake();
        }
        !woken.is_empty()
    }

    pub fn wake_session(&self, id: u32) {
        let view = self.view.lock();
        if let Some(session) = view.attached.values().find(|s| s.id as u32 == id) {
            session.wake();
        }
    }

    pub fn has_sessions(&self) -> bool {
        !self.view.lock().attached.is_empty()
    }

    pub fn is_hungry(&self) -> bool {
        !self.view.lock().hungry.is_empty()
    }

    pub fn is_in_use(&self) -> bool {
        let view = self.view.lock();
        !view.attached.is_empty() || !view.held.is_empty()
    }

    // ---- leases

    /// Notes what a session was given and counts it as outstanding.
    pub fn hold(&self, session: &Arc<Session>, chunk: u64, lease: u64, set: &Set, sizes: &[u32], deadline_at_ms: u64) {
        let mut all = vec![0; usize::from(set.hi - set.lo) + 1];
        for (index, size) in set.iter().zip(sizes) {
            all[usize::from(index - set.lo)] = (*size).max(1);
        }
        session.charge(sizes.len(), sizes.iter().map(|s| u64::from(*s)).sum());
        let held = Held { session: session.clone(), lo: set.lo, sizes: all, left: sizes.len(), deadline_at_ms };
        self.view.lock().held.insert((chunk, lease), held);
    }

    /// Counts ended leases out. `notes` are the library's, of sessions of this node.
    ///
    /// # Errors
    /// [`BrokerError::Damaged`] when they can't be read.
    pub fn ended(&self, notes: &[u8]) -> Result<(), BrokerError> {
        let mut from = Reader(notes);
        while !from.is_empty() {
            from.bytes(8)?;
            let (chunk, lease) = (from.u64()?, from.u64()?);
            let set = Set::read(&mut from)?;
            self.let_go(chunk, lease, |index| set.contains(index));
        }
        Ok(())
    }

    fn let_go(&self, chunk: u64, lease: u64, over: impl Fn(u16) -> bool) {
        let mut view = self.view.lock();
        let Some(held) = view.held.get_mut(&(chunk, lease)) else { return };
        let (mut messages, mut bytes) = (0, 0u64);
        for (index, size) in (held.lo..).zip(&mut held.sizes) {
            if *size > 0 && over(index) {
                bytes += u64::from(std::mem::take(size));
                messages += 1;
            }
        }
        held.left -= messages;
        let session = held.session.clone();
        if held.left == 0 {
            view.held.remove(&(chunk, lease));
        }
        drop(view);
        if messages > 0 {
            session.credit(messages, bytes);
        }
    }

    /// Leases that should have ended by `before_ms`, as far as this node knows: the notice may have been lost.
    pub fn overdue(&self, before_ms: u64) -> Vec<Group> {
        let view = self.view.lock();
        let overdue = view.held.iter().filter(|(_, held)| held.deadline_at_ms < before_ms);
        overdue
            .map(|((chunk, lease), held)| {
                let indexes: Vec<u16> = (held.lo..).zip(&held.sizes).filter(|(_, size)| **size > 0).map(|(i, _)| i).collect();
                Group { chunk: *chunk, lease: *lease, attempt: 1, set: Set::from_sorted(&indexes) }
            })
            .collect()
    }

    /// Takes over what is really live of a lease.
    pub fn correct(&self, group: &Group, live: Option<(u64, Set)>) {
        self.let_go(group.chunk, group.lease, |index| live.as_ref().is_none_or(|(_, set)| !set.contains(index)));
        if let Some((deadline, _)) = live
            && let Some(held) = self.view.lock().held.get_mut(&(group.chunk, group.lease))
        {
            held.deadline_at_ms = deadline;
        }
    }

    /// Notes where leases were moved to, except for the late ones.
    pub fn extended(&self, groups: &[Group], late: &[Option<Set>], deadline_at_ms: u64) {
        let mut view = self.view.lock();
        for (group, late) in groups.iter().zip(late) {
            if let Some(held) = view.held.get_mut(&(group.chunk, group.lease)).filter(|_| late.is_none()) {
                held.deadline_at_ms = held.deadline_at_ms.max(deadline_at_ms);
            }
        }
    }

    pub fn first_deadline(&self) -> Option<u64> {
        self.view.lock().held.values().map(|h| h.deadline_at_ms).min()
    }

    // ---- lost answers

    pub fn suspect(&self, session: u64) {
        self.view.lock().suspects.insert(session);
    }

    pub fn suspects(&self) -> Vec<u64> {
        self.view.lock().suspects.iter().copied().collect()
    }

    pub fn is_suspect(&self, session: u64) -> bool {
        self.view.lock().suspects.contains(&session)
    }

    pub fn cleared(&self, session: u64) {
        self.view.lock().suspects.remove(&session);
    }

    /// The largest lease number this node knows a session to have.
    pub fn last_lease(&self, session: u64) -> u64 {
        let view = self.view.lock();
        view.held.iter().filter(|(_, held)| held.session.id == session).map(|((_, lease), _)| *lease).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_names_its_queue() {
        let queue = QueueRef { channel: "example.com:shop/a%b".into(), incarnation: 0xfeed };
        assert_eq!(queue_of(&queue_key(&queue)), Some(queue));
    }

    #[test]
    fn credits_count_each_message_once() {
        let view = QueueView::new(QueueRef { channel: "p/s".into(), incarnation: 1 });
        let session = Session::new(1);
        view.hold(&session, 10, 5, &Set::from_sorted(&[0, 1, 3]), &[10, 20, 30], 1000);
        view.let_go(10, 5, |index| index == 1);
        view.let_go(10, 5, |index| index == 1);
        assert_eq!((session.outstanding_messages(), session.outstanding_bytes()), (2, 40));
        assert_eq!(view.overdue(1001)[0].set, Set::from_sorted(&[0, 3]));
        view.correct(&view.overdue(1001)[0], None);
        assert_eq!((session.outstanding_messages(), session.outstanding_bytes()), (0, 0));
        assert!(view.first_deadline().is_none());
    }
}
