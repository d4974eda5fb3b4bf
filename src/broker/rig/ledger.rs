//! Random calls of several callers at once, on one or several nodes, some of them made twice or losing their answers, and a
//! ledger of what may come of them.
//!
//! Calls overlap, so the ledger notes when each began and ended, and asks of every delivery whether it can be explained:
//! nothing comes after its acknowledgement was confirmed, nothing is with two callers unless it was given back or ran out,
//! no delivery counts that did not fail, and a key is with one session at a time.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::atomic::AtomicBool,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use rand::{Rng, SeedableRng, rngs::StdRng};

use super::*;

/// What kind of queue, and what happens meanwhile.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    pub ordered: bool,
    pub exactly_once: bool,
    pub backoff: bool,
    /// Time passes, so that leases run out.
    pub expires: bool,
    pub callers: usize,
    pub steps: usize,
}

impl Plan {
    /// One of all combinations of kinds.
    pub fn of(seed: u64, callers: usize, steps: usize) -> Self {
        let bit = |n: u32| seed >> n & 1 == 1;
        Self { ordered: bit(0), exactly_once: bit(1), backoff: bit(2), expires: bit(3), callers, steps }
    }
}

struct Delivery {
    message: String,
    token: LeaseToken,
    caller: usize,
    begun: u64,
    ended: u64,
    deadline_at_ms: u64,
    given_back: bool,
    nacked: bool,
    ack_begun: bool,
    acked: bool,
}

struct Message {
    key: u8,
    confirmed: bool,
    /// When an acknowledgement was confirmed.
    acked: Option<u64>,
    ack_begun: bool,
    deliveries: Vec<usize>,
}

#[derive(Default)]
struct Book {
    /// Counts beginnings and ends of calls.
    moment: u64,
    messages: HashMap<String, Message>,
    deliveries: Vec<Delivery>,
    /// By key: how many calls are under way that can take its messages back, and when the last one ended.
    takes_back: BTreeMap<u8, (u32, u64)>,
    /// A lease call failed: what it may have leased is taken back at any time, and with it what follows in its key.
    lost: bool,
}

/// The callers share this.
pub struct Ledger<B> {
    plan: Plan,
    brokers: Vec<Arc<B>>,
    clock: Arc<AtomicU64>,
    topic: TopicRef,
    queue: QueueRef,
    book: Mutex<Book>,
    /// From now on everything runs out.
    draining: AtomicBool,
}

impl Book {
    fn now(&mut self) -> u64 {
        self.moment += 1;
        self.moment
    }

    /// Whether a delivery may be over though nobody acknowledged it: it was given back or ran out, or an earlier message of its
    /// key was or did.
    fn may_be_over(&self, plan: Plan, delivery: &Delivery, now_ms: u64) -> bool {
        let key = self.messages[&delivery.message].key;
        let with_its_key = || {
            let taken_back = self.takes_back.get(&key).is_some_and(|(running, last)| *running > 0 || *last > delivery.begun);
            plan.ordered && key != 0 && (plan.expires || self.lost || taken_back)
        };
        delivery.given_back || delivery.deadline_at_ms <= now_ms || with_its_key()
    }
}

impl<B: Broker> Ledger<B> {
    /// Makes a queue of the plan's kind. All brokers work on the store of the rig's.
    pub async fn open(rig: &mut Rig<B>, more: &[Arc<B>], plan: Plan) -> Arc<Self> {
        let config = |c: &mut QueueConfig| {
            c.ordered = plan.ordered;
            c.exactly_once = plan.exactly_once;
            c.retry = plan.backoff.then(|| retry(500, 4000).unwrap());
        };
        let queue = rig.queue(1, config).await;
        let brokers = [std::slice::from_ref(&rig.broker), more].concat();
        let (clock, topic) = (rig.clock.clone(), rig.topic.clone());
        Arc::new(Self { plan, brokers, clock, topic, queue, book: Mutex::default(), draining: AtomicBool::new(false) })
    }

    fn now_ms(&self) -> u64 {
        self.clock.load(Ordering::Acquire)
    }

    /// One caller's steps.
    pub async fn call(self: Arc<Self>, caller: usize, seed: u64) {
        let mut random = StdRng::seed_from_u64(seed ^ (caller as u64) << 32);
        let broker = self.brokers[caller % self.brokers.len()].clone();
        let session = Session::new(next_session_id());
        broker.attach(&self.queue, &session);
        for step in 0..self.plan.steps {
            match random.random_range(0..20) {
                0..4 => self.publish(&broker, &mut random, &format!("{caller}-{step}")).await,
                4..10 => {
                    let max = random.random_range(1..20);
                    self.lease(&broker, caller, &session, max).await;
                }
                10..15 => self.acknowledge(&broker, &mut random).await,
                15..17 => self.give_back(&broker, &mut random, true).await,
                17 => self.give_back(&broker, &mut random, false).await,
                18 => self.extend(&broker, &mut random).await,
                _ if self.plan.expires => {
                    self.clock.fetch_add(random.random_range(1..5000), Ordering::AcqRel);
                }
                _ => {}
            }
            tokio::task::yield_now().await;
        }
        broker.detach(&self.queue, &session);
    }

    async fn publish(&self, broker: &Arc<B>, random: &mut StdRng, name: &str) {
        let messages: Vec<(String, u8)> =
            (0..random.random_range(1..8)).map(|n| (format!("{name}-{n}"), random.random_range(0..4))).collect();
        for (text, key) in &messages {
            let message = Message { key: *key, confirmed: false, acked: None, ack_begun: false, deliveries: Vec::new() };
            self.book.lock().messages.insert(text.clone(), message);
        }
        let encode = |(text, key): &(String, u8)| {
            let key = if *key == 0 { String::new() } else { key.to_string() };
            EncodedMessage::encode(text.as_bytes(), [], &key)
        };
        loop {
            let Ok(route) = broker.route(&self.topic).await else { return };
            let append = Append {
                topic: self.topic.clone(),
                messages: messages.iter().map(encode).collect(),
                targets: vec![Target { queue: self.queue.clone(), filtered: Vec::new() }],
                route_version: route.version,
            };
            match broker.append(append).await {
                Ok(_) => {
                    let mut book = self.book.lock();
                    for (text, _) in &messages {
                        book.messages.get_mut(text).unwrap().confirmed = true;
                    }
                    return;
                }
                Err(BrokerError::Stale) => {}
                Err(BrokerError::Unavailable(_)) => return,
                Err(e) => panic!("{e}"),
            }
        }
    }

    /// Answers how many came, or nothing when the call failed.
    async fn lease(&self, broker: &Arc<B>, caller: usize, session: &Arc<Session>, max: usize) -> Option<usize> {
        let begun = self.book.lock().now();
        let leased = broker.lease(lease_request(&self.queue, session, max)).await;
        let mut book = self.book.lock();
        let ended = book.now();
        match leased {
            Ok(leased) => {
                let mut last = [0; 4];
                for leased in &leased {
                    let key = self.receive(&mut book, caller, (begun, ended), leased);
                    // Publishes that overlap have no order but that of the queue.
                    let place = leased.token.sequence;
                    assert!(!self.plan.ordered || key == 0 || place >= last[usize::from(key)], "key {key} came out of order");
                    last[usize::from(key)] = place;
                }
                Some(leased.len())
            }
            Err(BrokerError::Unavailable(_)) => {
                book.lost = true;
                None
            }
            Err(e) => panic!("{e}"),
        }
    }

    fn receive(&self, book: &mut Book, caller: usize, (begun, ended): (u64, u64), leased: &Leased) -> u8 {
        let (text, token, now_ms) = (text(leased), leased.token, self.now_ms());
        let plan = Plan { expires: self.plan.expires || self.draining.load(Ordering::Acquire), ..self.plan };
        let delivery = Delivery {
            message: text.clone(),
            token,
            caller,
            begun,
            ended,
            deadline_at_ms: leased.deadline_at_ms,
            given_back: false,
            nacked: false,
            ack_begun: false,
            acked: false,
        };
        let message = book.messages.get(&text).unwrap_or_else(|| panic!("{text} was never published"));
        let key = message.key;
        assert!(
            message.acked.is_none_or(|at| at > begun),
            "{text} was delivered after its acknowledgement was confirmed: {token:?}"
        );
        let mut failures = 0;
        for noted in message.deliveries.iter().map(|at| &book.deliveries[*at]) {
            failures += u32::from(noted.nacked);
            // A receiver may be late to note what ran out meanwhile, or was taken back with its key, and came again.
            let earlier = if noted.token.lease < token.lease { noted } else { &delivery };
            let explained = noted.token.lease != token.lease && book.may_be_over(plan, earlier, now_ms);
            assert!(explained, "{text} is with two callers: {:?} and {token:?}", noted.token);
        }
        assert!(
            plan.expires || token.attempt <= failures + 1,
            "{text} failed {failures} times and this is delivery {}",
            token.attempt
        );
        if plan.ordered && key != 0 {
            // An acknowledgement may be by the token of another delivery, and ends this one too.
            let open = |d: &&Delivery| d.caller != caller && d.ended < begun && !book.messages[&d.message].ack_begun;
            for other in book.deliveries.iter().filter(open) {
                let holds = book.messages[&other.message].key == key && !book.may_be_over(plan, other, now_ms);
                assert!(!holds, "{text} of key {key} came to {caller} while {} has {}", other.caller, other.message);
            }
        }
        let at = book.deliveries.len();
        book.deliveries.push(delivery);
        book.messages.get_mut(&text).unwrap().deliveries.push(at);
        key
    }

    /// Some of the latest deliveries, to whomever.
    fn pick(&self, random: &mut StdRng) -> Vec<usize> {
        let count = self.book.lock().deliveries.len();
        let first = count.saturating_sub(60);
        let picked: BTreeSet<usize> = (0..random.random_range(1..15)).map(|_| random.random_range(first..count.max(1))).collect();
        picked.into_iter().filter(|at| *at < count).collect()
    }

    fn tokens(&self, picked: &[usize]) -> Vec<LeaseToken> {
        let book = self.book.lock();
        picked.iter().map(|at| book.deliveries[*at].token).collect()
    }

    async fn acknowledge(&self, broker: &Arc<B>, random: &mut StdRng) {
        let picked = self.pick(random);
        let twice = random.random_bool(0.2);
        self.settle(broker, &picked).await;
        if twice {
            self.settle(broker, &picked).await;
        }
    }

    async fn settle(&self, broker: &Arc<B>, picked: &[usize]) {
        let tokens = self.tokens(picked);
        let begun = {
            let mut book = self.book.lock();
            for at in picked {
                let text = book.deliveries[*at].message.clone();
                book.deliveries[*at].ack_begun = true;
                book.messages.get_mut(&text).unwrap().ack_begun = true;
            }
            book.now()
        };
        let outcomes = match broker.acknowledge(&self.queue, &tokens).await {
            Ok(outcomes) => outcomes,
            Err(BrokerError::Unavailable(_)) => return,
            Err(e) => panic!("{e}"),
        };
        let now_ms = self.now_ms();
        let mut book = self.book.lock();
        let ended = book.now();
        for (at, outcome) in picked.iter().zip(outcomes) {
            let (delivery, text) = (&book.deliveries[*at], book.deliveries[*at].message.clone());
            match outcome {
                Outcome::Done => {
                    let newer = |d: &Delivery| d.token.lease > delivery.token.lease && d.ended < begun;
                    let all = || book.messages[&text].deliveries.iter().map(|at| &book.deliveries[*at]);
                    let stale = all().any(newer) && !all().any(|d| d.token != delivery.token && d.ack_begun);
                    assert!(
                        !self.plan.exactly_once || delivery.acked || !stale,
                        "{text} was acknowledged by {:?} after a later delivery",
                        delivery.token
                    );
                    book.deliveries[*at].acked = true;
                    book.messages.get_mut(&text).unwrap().acked.get_or_insert(ended);
                }
                Outcome::Invalid => {
                    let explained = self.plan.exactly_once && book.may_be_over(self.plan, delivery, now_ms);
                    assert!(explained, "{text}: the acknowledgement by {:?} was refused", delivery.token);
                }
                Outcome::Retry => {}
            }
        }
    }

    async fn give_back(&self, broker: &Arc<B>, random: &mut StdRng, failed: bool) {
        let picked = self.pick(random);
        let tokens = self.tokens(&picked);
        let keys: Vec<u8> = {
            let mut book = self.book.lock();
            for at in &picked {
                book.deliveries[*at].given_back = true;
                book.deliveries[*at].nacked |= failed;
            }
            picked.iter().map(|at| book.messages[&book.deliveries[*at].message].key).collect()
        };
        keys.iter().for_each(|key| self.book.lock().takes_back.entry(*key).or_default().0 += 1);
        for _ in 0..if random.random_bool(0.2) { 2 } else { 1 } {
            let done = if failed {
                let nack = |token| DeadlineChange { token, deadline_ms: 0, bypass_backoff: false, max_life_ms: 0 };
                let changes: Vec<_> = tokens.iter().copied().map(nack).collect();
                broker.modify_deadlines(&self.queue, &changes).await.map(drop)
            } else {
                broker.release(&self.queue, &tokens).await
            };
            assert!(matches!(done, Ok(()) | Err(BrokerError::Unavailable(_))), "{done:?}");
        }
        let mut book = self.book.lock();
        let ended = book.now();
        for key in keys {
            let (running, last) = book.takes_back.entry(key).or_default();
            (*running, *last) = (*running - 1, ended);
        }
    }

    async fn extend(&self, broker: &Arc<B>, random: &mut StdRng) {
        let tokens = self.tokens(&self.pick(random));
        let extend = |token| DeadlineChange { token, deadline_ms: 12_000, bypass_backoff: false, max_life_ms: 0 };
        let changes: Vec<_> = tokens.into_iter().map(extend).collect();
        let done = broker.modify_deadlines(&self.queue, &changes).await;
        assert!(matches!(done, Ok(_) | Err(BrokerError::Unavailable(_))), "{done:?}");
    }

    /// When all callers are done: everything that was confirmed and not acknowledged comes, and then there is nothing.
    pub async fn drain(self: Arc<Self>) {
        self.draining.store(true, Ordering::Release);
        let broker = &self.brokers[0];
        let session = Session::new(next_session_id());
        broker.attach(&self.queue, &session);
        let (mut idle, mut from) = (0, self.book.lock().deliveries.len());
        while idle < 3 {
            self.clock.fetch_add(20_000, Ordering::AcqRel);
            let came = self.lease(broker, usize::MAX, &session, 50).await;
            idle = if came == Some(0) { idle + 1 } else { 0 };
            let to = self.book.lock().deliveries.len();
            self.settle(broker, &(from..to).collect::<Vec<_>>()).await;
            from = to;
        }
        let book = self.book.lock();
        let lost: Vec<_> = book
            .messages
            .iter()
            .filter(|(_, m)| m.confirmed && m.acked.is_none() && !m.ack_begun)
            .map(|(text, _)| text)
            .collect();
        assert!(lost.is_empty(), "confirmed and lost: {lost:?}");
        assert_eq!(session.outstanding_messages(), 0);
    }
}

/// How long new runs are begun in one test.
const BUDGET: Duration = Duration::from_secs(20);

/// Seeds of the runs of one test, one for every kind of queue for which there is time, in any order: from
/// `LANDLINE_TEST_SEED` on, or from a new one.
pub fn seeds() -> impl Iterator<Item = u64> {
    let given = std::env::var("LANDLINE_TEST_SEED").ok().and_then(|seed| seed.parse::<u64>().ok());
    let (first, until) = (given.unwrap_or_else(rand::random), Instant::now() + BUDGET);
    (0..16).map(move |n| first.wrapping_add(n)).take_while(move |_| Instant::now() < until)
}

/// Runs a plan on the rig's broker and further nodes of the same store. `disturb` is told when the callers begin, and that
/// they are done before the rest is counted.
pub async fn run<B: Broker>(rig: &mut Rig<B>, more: &[Arc<B>], plan: Plan, seed: u64, disturb: impl Fn(bool)) {
    println!("LANDLINE_TEST_SEED={seed}: {plan:?}");
    let ledger = Ledger::open(rig, more, plan).await;
    disturb(true);
    let callers: Vec<_> = (0..plan.callers).map(|caller| tokio::spawn(ledger.clone().call(caller, seed))).collect();
    for caller in callers {
        caller.await.unwrap();
    }
    disturb(false);
    ledger.clone().drain().await;
    assert_eq!(rig.broker.stats(&ledger.queue).await.unwrap().undelivered_messages, 0);
}
