//! What was received and is not yet confirmed: in which order it is published, and what is acknowledged then.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::Arc,
};

use bytes::Bytes;

/// Ids of confirmed messages that are remembered, so that a message that comes again because its acknowledgement was late
/// is not copied again.
const REMEMBERED: usize = 200_000;

/// A message on its way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Item {
    /// Its id at the source.
    pub id: Arc<str>,
    /// What is published.
    pub wire: Bytes,
}

/// Messages that go into one request: without a key, or all of one.
#[derive(Debug, PartialEq, Eq)]
pub struct Batch {
    pub key: Option<Arc<str>>,
    pub items: Vec<Item>,
}

/// What the destination said to a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    Confirmed,
    Refused,
    Untried,
}

/// What becomes of a message that was delivered.
#[derive(Debug, PartialEq, Eq)]
pub enum Taken {
    New,
    /// It is here already; its older ack id is forgotten.
    Held,
    /// It was confirmed before: acknowledge this.
    Confirmed(String),
    /// Its key is held back: give this back.
    Back(String),
}

struct Held {
    ack_id: String,
    bytes: usize,
    /// Lease extensions happen for what is older than a tick.
    fresh: bool,
}

#[derive(Default)]
struct Lane {
    items: VecDeque<Item>,
    /// A request is under way.
    busy: bool,
}

/// All messages of a pair.
#[derive(Default)]
pub struct Lanes {
    free: VecDeque<Item>,
    keyed: HashMap<Arc<str>, Lane>,
    /// Keys with messages and no request under way.
    ready: VecDeque<Arc<str>>,
    /// Keys of refused messages: what comes is given back until the next tick.
    blocked: HashSet<Arc<str>>,
    held: HashMap<Arc<str>, Held>,
    bytes: usize,
    remembered: HashSet<Arc<str>>,
    order: VecDeque<Arc<str>>,
    /// Whose turn it is when both kinds wait.
    keyed_last: bool,
}

impl Lanes {
    /// Messages and bytes that are held.
    pub fn held(&self) -> (usize, usize) {
        (self.held.len(), self.bytes)
    }

    /// Takes a delivery.
    pub fn take(&mut self, id: &str, ack_id: String, key: &str, wire: Bytes) -> Taken {
        if let Some(held) = self.held.get_mut(id) {
            held.ack_id = ack_id;
            held.fresh = true;
            return Taken::Held;
        }
        if self.remembered.contains(id) {
            return Taken::Confirmed(ack_id);
        }
        if !key.is_empty() && self.blocked.contains(key) {
            return Taken::Back(ack_id);
        }
        let (id, bytes): (Arc<str>, _) = (id.into(), wire.len());
        self.held.insert(id.clone(), Held { ack_id, bytes, fresh: true });
        self.bytes += bytes;
        let item = Item { id, wire };
        if key.is_empty() {
            self.free.push_back(item);
            return Taken::New;
        }
        let key: Arc<str> = match self.keyed.get_key_value(key) {
            Some((known, _)) => known.clone(),
            None => key.into(),
        };
        let lane = self.keyed.entry(key.clone()).or_default();
        if lane.items.is_empty() && !lane.busy {
            self.ready.push_back(key);
        }
        lane.items.push_back(item);
        Taken::New
    }

    /// The next request, if something can go: at most this many messages, and bytes unless one alone has more.
    pub fn next(&mut self, max_messages: usize, max_bytes: usize) -> Option<Batch> {
        let keyed = !self.ready.is_empty() && (self.free.is_empty() || !self.keyed_last);
        self.keyed_last = keyed;
        let (key, queue) = if keyed {
            let key = self.ready.pop_front()?;
            let lane = self.keyed.get_mut(&key)?;
            lane.busy = true;
            (Some(key), &mut lane.items)
        } else {
            (None, &mut self.free)
        };
        let (mut items, mut bytes) = (Vec::new(), 0);
        while items.len() < max_messages
            && let Some(item) = queue.front()
            && (items.is_empty() || bytes + item.wire.len() <= max_bytes)
        {
            bytes += item.wire.len();
            items.extend(queue.pop_front());
        }
        (!items.is_empty()).then_some(Batch { key, items })
    }

    /// Settles a request: answers the ack ids to acknowledge and those to give back. Behind a message of a key that was not
    /// confirmed, everything of the key goes back, so that it comes again in order.
    pub fn settle(&mut self, batch: Batch, fates: &[Fate]) -> (Vec<String>, Vec<String>) {
        let (mut acks, mut nacks) = (Vec::new(), Vec::new());
        let mut broken = false;
        for (item, fate) in batch.items.into_iter().zip(fates) {
            let Some(held) = self.release(&item.id) else { continue };
            if *fate == Fate::Confirmed {
                self.remember(item.id);
                acks.push(held);
            } else {
                broken = true;
                nacks.push(held);
            }
        }
        let Some(key) = batch.key else { return (acks, nacks) };
        let Some(lane) = self.keyed.get_mut(&key) else { return (acks, nacks) };
        lane.busy = false;
        if broken {
            let rest = std::mem::take(&mut lane.items);
            nacks.extend(rest.into_iter().filter_map(|item| self.release(&item.id)));
            self.blocked.insert(key.clone());
        }
        match self.keyed.get(&key) {
            Some(lane) if !lane.items.is_empty() => self.ready.push_back(key),
            _ => _ = self.keyed.remove(&key),
        }
        (acks, nacks)
    }

    /// Everything that is not in a request: the ack ids, to give back.
    pub fn give_up(&mut self) -> Vec<String> {
        self.ready.clear();
        let mut items: Vec<_> = self.free.drain(..).collect();
        items.extend(self.keyed.values_mut().flat_map(|lane| lane.items.drain(..)));
        items.iter().filter_map(|item| self.release(&item.id)).collect()
    }

    /// What is left at the very end, in requests that were given up: the ack ids.
    pub fn rest(&mut self) -> Vec<String> {
        self.held.drain().map(|(_, held)| held.ack_id).collect()
    }

    /// Ack ids whose leases need more time: of what was here at the last tick already. Held-back keys go on.
    pub fn tick(&mut self) -> Vec<String> {
        let mut aged = Vec::new();
        for held in self.held.values_mut() {
            if !std::mem::replace(&mut held.fresh, false) {
                aged.push(held.ack_id.clone());
            }
        }
        aged
    }

    /// Keys of refused messages are taken again.
    pub fn unblock(&mut self) {
        self.blocked.clear();
    }

    fn release(&mut self, id: &str) -> Option<String> {
        let held = self.held.remove(id)?;
        self.bytes -= held.bytes;
        Some(held.ack_id)
    }

    fn remember(&mut self, id: Arc<str>) {
        if self.remembered.insert(id.clone()) {
            self.order.push_back(id);
        }
        if self.order.len() > REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.remembered.remove(&oldest);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn take(lanes: &mut Lanes, id: &str, key: &str) -> Taken {
        lanes.take(id, format!("ack-{id}"), key, Bytes::from(id.to_owned()))
    }

    fn ids(batch: &Batch) -> Vec<&str> {
        batch.items.iter().map(|item| &*item.id).collect()
    }

    #[test]
    fn a_key_has_one_request_at_a_time_and_keeps_its_order() {
        let mut lanes = Lanes::default();
        for (id, key) in [("1", "a"), ("2", "a"), ("3", "b"), ("4", ""), ("5", "a")] {
            assert_eq!(take(&mut lanes, id, key), Taken::New);
        }
        let a = lanes.next(2, 100).unwrap();
        assert_eq!((a.key.as_deref(), ids(&a)), (Some("a"), vec!["1", "2"]));
        let free = lanes.next(2, 100).unwrap();
        assert_eq!((free.key.as_deref(), ids(&free)), (None, vec!["4"]));
        let b = lanes.next(2, 100).unwrap();
        assert_eq!(ids(&b), ["3"]);
        assert_eq!(lanes.next(2, 100), None, "the rest of a waits for its first request");
        assert_eq!(lanes.settle(a, &[Fate::Confirmed; 2]), (vec!["ack-1".into(), "ack-2".into()], vec![]));
        assert_eq!(ids(&lanes.next(2, 100).unwrap()), ["5"]);
    }

    #[test]
    fn requests_are_bounded_by_messages_and_bytes() {
        let mut lanes = Lanes::default();
        ["1", "22", "333", "4"].iter().for_each(|id| _ = take(&mut lanes, id, ""));
        assert_eq!(ids(&lanes.next(10, 3).unwrap()), ["1", "22"]);
        assert_eq!(ids(&lanes.next(10, 1).unwrap()), ["333"], "one alone may have more");
        assert_eq!(lanes.held(), (4, 7));
    }

    #[test]
    fn what_comes_again_is_not_copied_again() {
        let mut lanes = Lanes::default();
        take(&mut lanes, "1", "a");
        assert_eq!(lanes.take("1", "newer".into(), "a", Bytes::from("1")), Taken::Held);
        let batch = lanes.next(1, 1).unwrap();
        assert_eq!(lanes.settle(batch, &[Fate::Confirmed]), (vec!["newer".into()], vec![]), "the newer lease is acknowledged");
        assert_eq!(take(&mut lanes, "1", "a"), Taken::Confirmed("ack-1".into()));
        assert_eq!(lanes.held(), (0, 0));
    }

    #[test]
    fn behind_a_refused_message_its_key_goes_back_whole() {
        let mut lanes = Lanes::default();
        ["1", "2", "3", "4"].iter().for_each(|id| _ = take(&mut lanes, id, "a"));
        let batch = lanes.next(3, 100).unwrap();
        let (acks, nacks) = lanes.settle(batch, &[Fate::Confirmed, Fate::Refused, Fate::Untried]);
        assert_eq!((acks, nacks), (vec!["ack-1".to_owned()], ["ack-2", "ack-3", "ack-4"].map(String::from).to_vec()));
        assert_eq!(take(&mut lanes, "5", "a"), Taken::Back("ack-5".into()));
        lanes.unblock();
        assert_eq!(take(&mut lanes, "2", "a"), Taken::New);
    }

    #[test]
    fn leases_are_extended_from_the_second_tick_on() {
        let mut lanes = Lanes::default();
        take(&mut lanes, "1", "");
        assert_eq!(lanes.tick(), Vec::<String>::new());
        take(&mut lanes, "2", "");
        assert_eq!(lanes.tick(), ["ack-1"]);
    }

    #[test]
    fn a_stop_gives_back_what_no_request_has() {
        let mut lanes = Lanes::default();
        [("1", ""), ("2", "a"), ("3", "a")].iter().for_each(|(id, key)| _ = take(&mut lanes, id, key));
        let under_way = lanes.next(1, 100).unwrap();
        assert_eq!(ids(&under_way), ["2"]);
        let mut back = lanes.give_up();
        back.sort();
        assert_eq!(back, ["ack-1", "ack-3"]);
        assert_eq!(lanes.settle(under_way, &[Fate::Confirmed]).0, ["ack-2"]);
        assert_eq!(lanes.rest(), Vec::<String>::new());
    }
}
