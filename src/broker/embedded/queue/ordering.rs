//! Ordering keys: who may get a key's next message.
//!
//! A key with a message outstanding belongs to the session that has it: that session may get more of the key, in order,
//! and nobody else. What the cursor meets of a key it can't give is parked in the key's line. A failed delivery brings the
//! key's later outstanding messages back behind the failed one.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};

use serde::{Deserialize, Serialize};

use super::{Effects, Lease, Pick, Place, Queue};
use crate::broker::embedded::topic_log::TopicLog;

/// The session number of a key that belongs to nobody.
const NOBODY: u64 = 0;

/// One key that has messages outstanding or in line.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Key {
    owner: u64,
    /// Outstanding messages, ascending.
    out: VecDeque<u64>,
    /// Messages waiting for the key, ascending.
    line: VecDeque<u64>,
    /// The line stands still until then.
    blocked_until_ms: u64,
    /// In whose list of offered keys this key is.
    offered_to: Option<u64>,
}

/// All keys of a queue that are in use.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Keys {
    keys: HashMap<u64, Key>,
    /// Keys with a line that anybody may take, in turn. May name a key that was taken since.
    free: VecDeque<u64>,
    /// Keys with a line whose owner may go on. May name keys that changed since.
    owned: HashMap<u64, VecDeque<u64>>,
    blocked: BTreeSet<(u64, u64)>,
    /// Sessions that are attached.
    #[serde(skip)]
    sessions: HashSet<u64>,
}

/// 0 says that a key is not blocked, and stays.
fn earlier(at_ms: u64, by_ms: u64) -> u64 {
    if at_ms == 0 { 0 } else { at_ms.saturating_sub(by_ms).max(1) }
}

fn insert_sorted(list: &mut VecDeque<u64>, sequence: u64) {
    if list.back().is_none_or(|last| *last < sequence) {
        return list.push_back(sequence);
    }
    if let Err(at) = list.binary_search(&sequence) {
        list.insert(at, sequence);
    }
}

fn remove_sorted(list: &mut VecDeque<u64>, sequence: u64) -> bool {
    if list.front() == Some(&sequence) {
        list.pop_front();
        return true;
    }
    list.binary_search(&sequence).is_ok_and(|at| list.remove(at).is_some())
}

impl Keys {
    pub fn next_due_ms(&self) -> Option<u64> {
        self.blocked.first().map(|(at, _)| *at)
    }

    /// Moves the end of every backoff to an earlier time.
    pub fn set_back(&mut self, by_ms: u64) {
        for state in self.keys.values_mut() {
            state.blocked_until_ms = earlier(state.blocked_until_ms, by_ms);
        }
        self.blocked = std::mem::take(&mut self.blocked).into_iter().map(|(at, key)| (earlier(at, by_ms), key)).collect();
    }

    /// How many keys anybody could take.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// A message of the key is now outstanding.
    pub fn start(&mut self, key: u64, session: u64, sequence: u64) {
        if key != 0 {
            let state = self.keys.entry(key).or_default();
            if state.owner != session {
                // What was offered to others is the new owner's now.
                state.offered_to = None;
            }
            state.owner = session;
            insert_sorted(&mut state.out, sequence);
        }
    }

    /// An outstanding message goes back to the line uncounted.
    pub fn give_back(&mut self, key: u64, sequence: u64) {
        if let Some(state) = self.keys.get_mut(&key) {
            remove_sorted(&mut state.out, sequence);
            insert_sorted(&mut state.line, sequence);
        }
    }

    /// Takes a message out of its line.
    pub fn withdraw(&mut self, key: u64, sequence: u64) -> bool {
        self.keys.get_mut(&key).is_some_and(|state| remove_sorted(&mut state.line, sequence))
    }

    fn park(&mut self, key: u64, sequence: u64) {
        insert_sorted(&mut self.keys.entry(key).or_default().line, sequence);
    }
}

impl Queue {
    /// A session that waits on the queue came or went.
    pub fn session(&mut self, session: u64, attached: bool) {
        if attached {
            self.keys.sessions.insert(session);
        } else {
            self.keys.sessions.remove(&session);
            for key in self.keys.owned.remove(&session).unwrap_or_default() {
                if let Some(state) = self.keys.keys.get_mut(&key)
                    && state.offered_to == Some(session)
                {
                    state.offered_to = None;
                }
            }
        }
    }

    /// Whether any session waits on the queue.
    pub fn has_sessions(&self) -> bool {
        !self.keys.sessions.is_empty()
    }

    /// Decides anew to whom a key's line is offered.
    pub(super) fn key_changed(&mut self, key: u64, fx: &mut Effects) {
        let Keys { keys, free, owned, blocked, sessions } = &mut self.keys;
        let Some(state) = keys.get_mut(&key) else { return };
        if state.out.is_empty() {
            state.owner = NOBODY;
            if state.line.is_empty() {
                blocked.remove(&(state.blocked_until_ms, key));
                keys.remove(&key);
                return;
            }
        }
        if state.line.is_empty() || state.blocked_until_ms > 0 || state.offered_to == Some(state.owner) {
            return;
        }
        if state.owner == NOBODY {
            state.offered_to = Some(NOBODY);
            free.push_back(key);
            fx.available = true;
        } else if sessions.contains(&state.owner) {
            state.offered_to = Some(state.owner);
            owned.entry(state.owner).or_default().push_back(key);
            fx.wake.push(state.owner);
        } else {
            state.offered_to = None; // the owner is gone; its leases end first
        }
    }

    /// A message of the key is no longer outstanding.
    pub(super) fn key_settled(&mut self, key: u64, sequence: u64, fx: &mut Effects) {
        if key == 0 {
            return;
        }
        if let Some(state) = self.keys.keys.get_mut(&key) {
            remove_sorted(&mut state.out, sequence);
        }
        self.key_changed(key, fx);
    }

    /// Puts a failed message back at the head of its line, and every later outstanding one behind it. Those that ended at
    /// the same moment failed too; the others were only taken back, and that does not count.
    pub(super) fn bring_back(&mut self, failed: Lease, at_ms: u64, blocked_until_ms: u64, fx: &mut Effects) {
        let Some(state) = self.keys.keys.get_mut(&failed.key) else { return };
        remove_sorted(&mut state.out, failed.sequence);
        let from = state.out.partition_point(|s| *s < failed.sequence);
        let later: Vec<u64> = state.out.drain(from..).collect();
        insert_sorted(&mut state.line, failed.sequence);
        for sequence in &later {
            insert_sorted(&mut state.line, *sequence);
        }
        if blocked_until_ms > at_ms {
            let before = (state.blocked_until_ms, failed.key);
            state.blocked_until_ms = blocked_until_ms;
            state.offered_to = None;
            self.keys.blocked.remove(&before);
            self.keys.blocked.insert((blocked_until_ms, failed.key));
        }
        self.set_place(failed.sequence, Place::Line);
        for sequence in later {
            if let Some(lease) = self.take_lease(sequence, fx) {
                self.set_place(sequence, Place::Line);
                if lease.deadline_at_ms <= at_ms
                    && let Some(retry) = self.retries.get_mut(&sequence)
                {
                    retry.failures += 1;
                    retry.counted += u32::from(self.config.max_delivery_attempts.is_some());
                }
            }
        }
        self.key_changed(failed.key, fx);
    }

    pub(super) fn advance_keys(&mut self, now_ms: u64, fx: &mut Effects) {
        while let Some((at, key)) = self.keys.blocked.first().copied().filter(|(at, _)| *at <= now_ms) {
            self.keys.blocked.remove(&(at, key));
            if let Some(state) = self.keys.keys.get_mut(&key) {
                state.blocked_until_ms = 0;
            }
            self.key_changed(key, fx);
        }
    }

    /// Gives what waits in the lines of the session's own keys, then of free keys.
    pub(super) fn lease_keys(&mut self, topic: &TopicLog, pick: &mut Pick, fx: &mut Effects) {
        let session = pick.budget.session;
        for owner in [session, NOBODY] {
            while pick.wants() {
                let list = if owner == NOBODY { Some(&mut self.keys.free) } else { self.keys.owned.get_mut(&owner) };
                let Some(key) = list.and_then(VecDeque::pop_front) else { break };
                let Some(state) = self.keys.keys.get_mut(&key).filter(|s| s.offered_to == Some(owner)) else { continue };
                state.offered_to = None;
                self.lease_line(key, topic, pick);
                self.key_changed(key, fx);
            }
        }
        if self.keys.owned.get(&session).is_some_and(VecDeque::is_empty) {
            self.keys.owned.remove(&session);
        }
    }

    fn lease_line(&mut self, key: u64, topic: &TopicLog, pick: &mut Pick) {
        while pick.wants() {
            let Some(sequence) = self.keys.keys.get_mut(&key).and_then(|s| s.line.pop_front()) else { return };
            if self.is_unacked(sequence) {
                self.keys.start(key, pick.budget.session, sequence);
                self.give(sequence, key, topic, pick);
            }
        }
    }

    /// Gives a fresh message if its key lets it, or parks it.
    pub(super) fn give_or_park(&mut self, sequence: u64, key: u64, topic: &TopicLog, pick: &mut Pick, fx: &mut Effects) {
        let session = pick.budget.session;
        let state = self.keys.keys.get(&key);
        let open = state.is_none_or(|s| s.line.is_empty() && s.blocked_until_ms == 0 && s.owner == session);
        if open {
            self.keys.start(key, session, sequence);
            self.give(sequence, key, topic, pick);
        } else {
            self.keys.park(key, sequence);
            self.key_changed(key, fx);
        }
    }

    /// What the cursor passes without giving it.
    pub(super) fn set_aside(&mut self, sequence: u64, topic: &TopicLog) {
        let key = self.key_of(sequence, topic);
        if key == 0 {
            self.make_ready(sequence, false);
        } else {
            self.keys.park(key, sequence);
            self.key_changed(key, &mut Effects::default());
        }
    }
}
