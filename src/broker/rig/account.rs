//! Random operations against a naive account of what the port promises.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::broker::SeekTarget;

/// An expiry is noticed this much late at most.
const NOTICE_MS: u64 = 50;

/// Shares of a step by the weights of [`step`], for engines that add steps of their own.
pub const WEIGHT: u32 = 23;

#[derive(Debug, Clone)]
pub enum Step {
    Publish(Vec<u8>),
    Pull { session: usize, max: usize },
    Ack(usize),
    Nack(usize),
    Extend(usize),
    Release(usize),
    Pass(u64),
    SeekBack,
    Snapshot,
    SeekSnapshot,
}

pub fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => prop::collection::vec(0u8..4, 1..40).prop_map(Step::Publish),
        5 => (0usize..3, 1usize..30).prop_map(|(session, max)| Step::Pull { session, max }),
        5 => (0usize..1000).prop_map(Step::Ack),
        2 => (0usize..1000).prop_map(Step::Nack),
        1 => (0usize..1000).prop_map(Step::Extend),
        1 => (0usize..1000).prop_map(Step::Release),
        2 => (1u64..15_000).prop_map(Step::Pass),
        1 => Just(Step::SeekBack),
        1 => Just(Step::Snapshot),
        1 => Just(Step::SeekSnapshot),
    ]
}

#[derive(Debug, Clone, Copy)]
pub struct Kinds {
    pub ordered: bool,
    pub exactly_once: bool,
    pub backoff: bool,
    pub retain: bool,
}

/// Every combination of them.
pub fn kinds() -> impl Strategy<Value = Kinds> {
    any::<(bool, bool, bool, bool)>().prop_map(|(ordered, exactly_once, backoff, retain)| Kinds {
        ordered,
        exactly_once,
        backoff,
        retain,
    })
}

/// What a careful user writes down of a queue.
pub struct Account {
    kinds: Kinds,
    queue: QueueRef,
    /// Payload of every message.
    text: String,
    pub sessions: [Arc<Session>; 3],
    published: Vec<u64>,
    key: BTreeMap<u64, u8>,
    unacked: BTreeSet<u64>,
    /// Message to the time until which nobody else may get it.
    leased_until: BTreeMap<u64, u64>,
    /// The session that last got a message.
    owner: BTreeMap<u64, u64>,
    snapshot: Option<(BTreeSet<u64>, usize)>,
    held: Vec<(u64, Leased)>,
}

/// Sessions of a queue.
pub fn sessions<B: Broker>(rig: &Rig<B>, queue: &QueueRef) -> [Arc<Session>; 3] {
    std::array::from_fn(|_| rig.session(queue))
}

impl Account {
    /// Makes a queue of the kind.
    pub async fn open<B: Broker>(rig: &mut Rig<B>, kinds: Kinds, text: String) -> Self {
        let config = |c: &mut QueueConfig| {
            c.ordered = kinds.ordered;
            c.exactly_once = kinds.exactly_once;
            c.retain_acked = kinds.retain;
            c.retry = kinds.backoff.then(|| retry(500, 4000).unwrap());
        };
        let queue = rig.queue(1, config).await;
        Self {
            kinds,
            text,
            sessions: sessions(rig, &queue),
            queue,
            published: Vec::new(),
            key: BTreeMap::new(),
            unacked: BTreeSet::new(),
            leased_until: BTreeMap::new(),
            owner: BTreeMap::new(),
            snapshot: None,
            held: Vec::new(),
        }
    }

    /// The sessions again, after the broker was started anew.
    pub fn attach<B: Broker>(&mut self, rig: &Rig<B>) {
        self.sessions = sessions(rig, &self.queue);
    }

    /// Compares the backlog with the account.
    pub async fn check<B: Broker>(&self, rig: &Rig<B>) {
        let stats = rig.broker.stats(&self.queue).await.unwrap();
        assert_eq!(stats.undelivered_messages, self.unacked.len() as u64);
    }

    /// Does one step and notes what it should have done.
    pub async fn take<B: Broker>(&mut self, rig: &Rig<B>, step: Step) {
        match step {
            Step::Publish(keys) => self.publish(rig, &keys).await,
            Step::Pull { session, max } => {
                let leased = rig.lease(&self.queue, &self.sessions[session], max).await;
                self.receive(rig, self.sessions[session].id, leased);
            }
            Step::Ack(n) => self.ack(rig, n).await,
            Step::Nack(n) => self.give_back(rig, n, true).await,
            Step::Release(n) => self.give_back(rig, n, false).await,
            Step::Extend(n) => {
                if let Some((id, leased)) = self.pick(n) {
                    let newest = self.held.iter().rfind(|(m, _)| *m == id).is_some_and(|(_, l)| l.token == leased.token);
                    let done = rig.modify(&self.queue, &[leased], 12_000).await;
                    if newest && done == [Outcome::Done] && self.leased_until.get(&id).is_some_and(|until| *until > rig.now_ms())
                    {
                        self.leased_until.insert(id, rig.now_ms() + 12_000);
                    }
                }
            }
            Step::Pass(ms) => rig.pass(ms),
            Step::SeekBack if self.kinds.retain => {
                rig.broker.seek(&self.queue, SeekTarget::Time(0)).await.unwrap();
                self.unacked = self.published.iter().copied().collect();
                self.leased_until.clear();
            }
            Step::SeekBack => {}
            Step::Snapshot if self.snapshot.is_none() => {
                rig.snapshot(9, &self.queue).await;
                self.snapshot = Some((self.unacked.clone(), self.published.len()));
            }
            Step::Snapshot => {}
            Step::SeekSnapshot => {
                if let Some((unacked, count)) = &self.snapshot {
                    rig.broker.seek(&self.queue, SeekTarget::Snapshot(9)).await.unwrap();
                    self.unacked = unacked.iter().chain(&self.published[*count..]).copied().collect();
                    self.leased_until.clear();
                }
            }
        }
    }

    async fn publish<B: Broker>(&mut self, rig: &Rig<B>, keys: &[u8]) {
        let names: Vec<String> = keys.iter().map(|k| if *k == 0 { String::new() } else { k.to_string() }).collect();
        let messages: Vec<_> = names.iter().map(|name| (self.text.as_str(), name.as_str())).collect();
        for (id, key) in rig.publish_keyed(&messages).await.into_iter().zip(keys) {
            self.published.push(id);
            self.key.insert(id, *key);
            self.unacked.insert(id);
        }
    }

    /// An expiry on an ordered queue takes the key's later messages back.
    fn expire_keys(&mut self, now_ms: u64) {
        let expired: Vec<u64> = self.leased_until.iter().filter(|(_, until)| **until <= now_ms).map(|(id, _)| *id).collect();
        for id in expired {
            let key = self.key[&id];
            self.leased_until.retain(|m, until| key == 0 || self.key[m] != key || *m < id || *until <= now_ms);
        }
    }

    fn receive<B: Broker>(&mut self, rig: &Rig<B>, session: u64, leased: Vec<Leased>) {
        if self.kinds.ordered {
            self.expire_keys(rig.now_ms());
        }
        for leased in leased {
            let id = id(&leased);
            assert!(self.unacked.contains(&id), "{id} was delivered after its acknowledgement");
            let until = self.leased_until.get(&id).copied().unwrap_or(0);
            assert!(until <= rig.now_ms(), "{id} was delivered while leased until {until}");
            let key = self.key[&id];
            if self.kinds.ordered && key != 0 {
                let earlier = self.unacked.range(..id).filter(|m| self.key[m] == key);
                let (leased, skipped): (Vec<u64>, Vec<u64>) =
                    earlier.partition(|m| self.leased_until.get(m).is_some_and(|until| *until + NOTICE_MS > rig.now_ms()));
                assert!(skipped.is_empty(), "{id} of key {key} overtook {skipped:?}");
                let others: Vec<_> = leased.iter().filter(|m| self.owner[m] != session).collect();
                assert!(others.is_empty(), "{id} of key {key} was delivered while another session has {others:?}");
            }
            self.leased_until.insert(id, rig.now_ms() + 10_000);
            self.owner.insert(id, session);
            self.held.push((id, leased));
        }
    }

    fn pick(&self, n: usize) -> Option<(u64, Leased)> {
        let at = n.checked_rem(self.held.len())?;
        Some(self.held[at].clone())
    }

    async fn ack<B: Broker>(&mut self, rig: &Rig<B>, n: usize) {
        let Some((id, leased)) = self.pick(n) else { return };
        let before = rig.broker.stats(&self.queue).await.unwrap().undelivered_messages;
        let outcome = rig.ack(&self.queue, &[leased]).await[0];
        let removed = before - rig.broker.stats(&self.queue).await.unwrap().undelivered_messages;
        if removed == 1 {
            assert_eq!(outcome, Outcome::Done);
            assert!(self.unacked.remove(&id));
            self.leased_until.remove(&id);
        } else if self.kinds.exactly_once && outcome == Outcome::Done {
            assert!(!self.unacked.contains(&id), "{id} was confirmed and is still there");
        }
    }

    async fn give_back<B: Broker>(&mut self, rig: &Rig<B>, n: usize, failed: bool) {
        let Some((id, leased)) = self.pick(n) else { return };
        let before = rig.broker.stats(&self.queue).await.unwrap().outstanding_messages;
        if failed {
            rig.modify(&self.queue, &[leased], 0).await;
        } else {
            rig.broker.release(&self.queue, &[leased.token]).await.unwrap();
        }
        if rig.broker.stats(&self.queue).await.unwrap().outstanding_messages < before {
            // An ordered queue takes the key's later messages back too.
            let key = self.key[&id];
            self.leased_until.retain(|m, _| *m < id || (*m > id && (key == 0 || self.key[m] != key)));
        }
    }

    /// Everything unacknowledged comes out, in order by key, and nothing else.
    pub async fn drain<B: Broker>(mut self, rig: &Rig<B>) {
        rig.pass(20_000);
        let mut idle = 0;
        while idle < 3 {
            let session = Session::new(next_session_id());
            let leased = rig.lease(&self.queue, &session, 50).await;
            idle = if leased.is_empty() { idle + 1 } else { 0 };
            if leased.is_empty() {
                rig.pass(5_000);
            }
            self.receive(rig, session.id, leased.clone());
            for leased in &leased {
                self.unacked.remove(&id(leased));
            }
            rig.ack(&self.queue, &leased).await;
        }
        assert!(self.unacked.is_empty(), "lost: {:?}", self.unacked);
        assert_eq!(rig.broker.stats(&self.queue).await.unwrap().undelivered_messages, 0);
        assert!(self.sessions.iter().all(|s| s.outstanding_messages() == 0));
    }
}

fn id(leased: &Leased) -> u64 {
    // Field 3, a string: the last but one field of the stored encoding.
    let wire = &leased.message;
    let at = wire.windows(2).rposition(|w| w == [0x1a, 16]).unwrap();
    std::str::from_utf8(&wire[at + 2..at + 18]).unwrap().parse().unwrap()
}
