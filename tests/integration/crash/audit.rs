//! The books of a run with faults: what the server confirmed, and what it did later.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Mutex, MutexGuard},
    time::{Duration, Instant},
};

use super::load::Rules;
use crate::fixture::Received;

/// A message that was not given back is not due again before its lease of 10 s ends. The lease began before it was received;
/// on a busy machine some seconds pass between the two.
const EARLY: Duration = Duration::from_secs(3);
/// A message given back whose next delivery nobody received is due again after this.
const LEASE: Duration = Duration::from_secs(10);
/// Clocks are read on both sides of a call.
const READING: Duration = Duration::from_millis(20);

/// What is known of one message on one subscription.
#[derive(Debug)]
struct Fate {
    deliveries: u32,
    last: Instant,
    last_attempt: i32,
    confirmed_nacks: i32,
    /// Given back since the last delivery; whether that was confirmed is another matter.
    returned: bool,
    /// When a confirmed nack of the last delivery was sent.
    nacked_at: Option<Instant>,
    acked: bool,
    /// When that became known.
    acked_at: Instant,
    /// An ack was sent. Without a confirmation it may have taken effect or not.
    ack_sent: bool,
    /// Its lease was extended by 600 s, confirmed: nobody else gets it.
    held: bool,
    /// It came through the dead-letter topic.
    buried: bool,
    key: String,
    /// What happened to it, to be shown beside a violation.
    history: Vec<(Instant, &'static str)>,
}

impl Fate {
    fn new() -> Self {
        Self {
            deliveries: 0,
            last: Instant::now(),
            last_attempt: 0,
            confirmed_nacks: 0,
            returned: false,
            nacked_at: None,
            acked: false,
            acked_at: Instant::now(),
            ack_sent: false,
            held: false,
            buried: false,
            key: String::new(),
            history: Vec::new(),
        }
    }

    fn note(&mut self, what: &'static str) {
        self.history.push((Instant::now(), what));
    }

    fn settled(&self) -> bool {
        self.acked || self.ack_sent || self.buried
    }
}

/// One ordering key on one subscription. Messages are known by their numbers, which grow in the order of publishing.
#[derive(Debug, Default)]
struct Line {
    /// First deliveries that were not compared with the order of publishing yet.
    arrived: Vec<u64>,
    last_compared: u64,
    /// Confirmed nacks that were not followed by a delivery, and when they were confirmed.
    open: BTreeMap<u64, Instant>,
}

/// One subscription's page.
#[derive(Debug)]
struct Page {
    rules: Rules,
    fates: HashMap<u64, Fate>,
    lines: HashMap<String, Line>,
    settled: usize,
}

/// A broken promise.
#[derive(Debug)]
struct Violation {
    what: String,
    /// Subscription and message, where it is about one.
    about: Option<(usize, u64)>,
    /// It is none where the store lost leases.
    of_lease: bool,
}

#[derive(Debug, Default)]
struct Books {
    /// Number to id of every confirmed publish. Payloads are the numbers.
    published: HashMap<u64, u64>,
    ids: HashMap<u64, u64>,
    pages: Vec<Page>,
    violations: Vec<Violation>,
    /// The store may have lost leases and attempts that were given before this, though no message and no ack.
    forgot: Option<Instant>,
    /// It is about to.
    forgetting: bool,
}

impl Books {
    fn violation(&mut self, about: Option<(usize, u64)>, what: String) {
        self.violations.push(Violation { what, about, of_lease: false });
    }

    /// What happened to a message and to the others of its key, in the order of time.
    fn history(&self, about: Option<(usize, u64)>) -> Vec<String> {
        let Some((number, payload)) = about else { return Vec::new() };
        let fates = &self.pages[number].fates;
        let Some(own) = fates.get(&payload) else { return Vec::new() };
        let related = fates.iter().filter(|(other, fate)| **other == payload || (fate.key == own.key && !own.key.is_empty()));
        let mut events: Vec<_> =
            related.flat_map(|(other, fate)| fate.history.iter().map(move |(at, e)| (at, other, e))).collect();
        events.sort_unstable();
        events.iter().map(|(at, other, event)| format!("{:?} ago: {other} {event}", at.elapsed())).collect()
    }
}

/// Shared by all clients of a test.
#[derive(Debug, Default)]
pub struct Audit(Mutex<Books>);

fn number(text: &str) -> u64 {
    text.parse().unwrap_or_else(|_| panic!("a payload of nobody: {text:?}"))
}

impl Audit {
    /// Books for these subscriptions.
    pub fn new(rules: &[Rules]) -> Self {
        let page = |rules: &Rules| Page { rules: *rules, fates: HashMap::new(), lines: HashMap::new(), settled: 0 };
        Self(Mutex::new(Books { pages: rules.iter().map(page).collect(), ..Books::default() }))
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.0.lock().expect("the books")
    }

    /// A publish was confirmed.
    pub fn published(&self, id: &str, payload: u64) {
        let books = &mut *self.books();
        let id: u64 = id.parse().expect("a decimal id");
        if let Some(other) = books.ids.insert(id, payload) {
            books.violation(None, format!("id {id} was given to {other} and to {payload}"));
        }
        books.published.insert(payload, id);
    }

    /// A message arrived.
    pub fn delivered(&self, subscription: usize, received: &Received) {
        let (now, books) = (Instant::now(), &mut *self.books());
        let payload = number(received.text());
        let (mut wrong, mut of_lease) = (Vec::new(), Vec::new());
        if books.published.get(&payload).is_some_and(|id| id.to_string() != received.id()) {
            wrong.push("arrived under another id".to_owned());
        }
        let page = &mut books.pages[subscription];
        let rules = page.rules;
        let fate = page.fates.entry(payload).or_insert_with(Fate::new);
        let sure = fate.deliveries > 0 && !books.forgetting && books.forgot.is_none_or(|at| fate.last > at);
        let since = now - fate.last;
        // Without exactly-once, the ack of a delivery that is over counts as well, and may overtake the next on its way.
        let over = rules.ordered || !sure || since >= EARLY;
        let fresh = !rules.exactly_once && now - fate.acked_at < LEASE;
        if fate.acked && !(fresh && over) {
            if fresh { &mut of_lease } else { &mut wrong }.push("came after its confirmed ack".to_owned());
        }
        if fate.held && sure {
            of_lease.push("came while its lease of 600 s was confirmed".to_owned());
        }
        if sure && !rules.ordered && !fate.returned && since < EARLY {
            of_lease.push(format!("came again after {since:?} and nobody had given it back"));
        }
        if let Some(at) = fate.nacked_at.filter(|_| sure)
            && now - at + READING < rules.backoff
        {
            of_lease.push(format!("came {:?} after its nack, before its backoff", now - at));
        }
        let attempt = received.delivery_attempt;
        if (attempt > 0) != (rules.attempts > 0) || attempt > rules.attempts {
            wrong.push(format!("came with attempt {attempt} of {}", rules.attempts));
        }
        // What is only taken back behind an earlier message of its key does not count.
        let least = (fate.last_attempt + i32::from(!rules.ordered)).max(fate.confirmed_nacks + 1);
        if attempt > 0 && sure && attempt < least {
            of_lease.push(format!("came after attempt {} and {} confirmed nacks", fate.last_attempt, fate.confirmed_nacks));
        }
        let key = &received.message.ordering_key;
        if rules.ordered && !key.is_empty() {
            let line = page.lines.entry(key.clone()).or_default();
            line.open.remove(&payload);
            if fate.deliveries == 0 {
                line.arrived.push(payload);
            }
        }
        fate.note("delivered");
        fate.key.clone_from(key);
        fate.deliveries += 1;
        (fate.last, fate.last_attempt) = (now, attempt);
        if !sure {
            // A nack of a lease that was forgotten is confirmed, and nothing came of it.
            fate.confirmed_nacks = attempt.saturating_sub(1).max(0);
        }
        (fate.returned, fate.nacked_at, fate.held) = (false, None, false);
        let what = format!("{payload} ({}) on {} (attempt {attempt})", received.id(), rules.name);
        let all = wrong.into_iter().map(|w| (w, false)).chain(of_lease.into_iter().map(|w| (w, true)));
        let about = Some((subscription, payload));
        books.violations.extend(all.map(|(wrong, of_lease)| Violation { what: format!("{what} {wrong}"), about, of_lease }));
    }

    fn with<T>(&self, subscription: usize, received: &Received, change: impl FnOnce(&mut Fate) -> T) -> T {
        let page = &mut self.books().pages[subscription];
        let fate = page.fates.entry(number(received.text())).or_insert_with(Fate::new);
        let before = fate.settled();
        let answer = change(fate);
        page.settled += usize::from(!before && fate.settled());
        answer
    }

    /// An ack is about to be sent. Answers whether it has to be refused: an earlier message of the key was given back before
    /// and has not come again, so this delivery is over.
    pub fn ack_sent(&self, subscription: usize, received: &Received) -> bool {
        self.with(subscription, received, |fate| {
            fate.ack_sent = true;
            fate.note("ack sent");
        });
        let page = &self.books().pages[subscription];
        let open = page.lines.get(&received.message.ordering_key).map(|line| &line.open);
        let before = number(received.text());
        page.rules.exactly_once && open.is_some_and(|open| open.range(..before).any(|(_, at)| at.elapsed() < LEASE - EARLY))
    }

    /// An ack was confirmed.
    pub fn acked(&self, subscription: usize, received: &Received, impossible: bool) {
        self.with(subscription, received, |fate| {
            (fate.acked, fate.acked_at) = (true, Instant::now());
            fate.held = false;
            fate.note("ack confirmed");
        });
        if impossible {
            let what = format!("the ack of {} was confirmed, though an earlier one of its key was given back", received.text());
            self.books().violation(Some((subscription, number(received.text()))), what);
        }
    }

    /// A nack is about to be sent.
    pub fn nack_sent(&self, subscription: usize, received: &Received) {
        self.with(subscription, received, |fate| {
            fate.returned = true;
            fate.note("nack sent");
        });
    }

    /// A nack, sent at that time, was confirmed.
    pub fn nacked(&self, subscription: usize, received: &Received, sent: Instant) {
        self.with(subscription, received, |fate| {
            fate.confirmed_nacks += 1;
            fate.note("nack confirmed");
            if fate.returned {
                fate.nacked_at = Some(sent);
            }
        });
        let page = &mut self.books().pages[subscription];
        let last = page.rules.attempts > 0 && received.delivery_attempt + 1 >= page.rules.attempts;
        let payload = number(received.text());
        let waiting = page.fates.get(&payload).is_some_and(|fate| fate.returned);
        let key = &received.message.ordering_key;
        if page.rules.ordered && !key.is_empty() && !last && waiting {
            page.lines.entry(key.clone()).or_default().open.insert(payload, Instant::now());
        }
    }

    /// An extension by 600 s was confirmed.
    pub fn held(&self, subscription: usize, received: &Received) {
        self.with(subscription, received, |fate| {
            fate.held = true;
            fate.note("lease of 600 s confirmed");
        });
    }

    /// A message came through the dead-letter topic.
    pub fn buried(&self, received: &Received) {
        let attribute = |name: &str| received.message.attributes.get(name).map(String::as_str).unwrap_or_default();
        let (source, count) =
            (attribute("CloudPubSubDeadLetterSourceSubscription"), attribute("CloudPubSubDeadLetterSourceDeliveryCount"));
        let index = self.books().pages.iter().position(|page| page.rules.name == source);
        let Some(index) = index else { return self.books().violation(None, format!("a dead letter of {source:?}")) };
        let rules = self.books().pages[index].rules;
        let acked = self.with(index, received, |fate| {
            fate.buried = true;
            fate.note("dead letter received");
            fate.acked
        });
        let text = received.text();
        let about = Some((index, number(text)));
        if count != rules.attempts.to_string() {
            self.books().violation(about, format!("{text} of {source} is a dead letter after {count} attempts"));
        }
        // Without exactly-once a late ack may meet a message that is being forwarded.
        if acked && rules.exactly_once {
            self.books().violation(about, format!("{text} of {source} is a dead letter after its confirmed ack"));
        }
    }

    /// The store begins or ends to fail over: what is neither a message nor an ack may be as it was before.
    pub fn forgetting(&self, begins: bool) {
        let books = &mut *self.books();
        (books.forgetting, books.forgot) = (begins, Some(Instant::now()));
    }

    /// The store failed over unasked, at any time since the last check.
    pub fn forgot(&self) {
        let books = &mut *self.books();
        books.forgot = Some(Instant::now());
        books.violations.retain(|violation| !violation.of_lease);
    }

    /// Messages that were published and wait for the slowest subscription.
    pub fn behind(&self) -> usize {
        let books = self.books();
        books.published.len() - books.pages.iter().map(|p| p.settled).min().unwrap_or(0).min(books.published.len())
    }

    /// True once every confirmed message was delivered on a subscription, and acked as far as anybody knows.
    pub fn complete(&self, subscription: usize) -> bool {
        let books = self.books();
        let page = &books.pages[subscription];
        page.settled >= books.published.len()
            && books.published.keys().all(|payload| page.fates.get(payload).is_some_and(Fate::settled))
    }

    /// Fails with every broken promise. No publish may be under way.
    pub fn check(&self) {
        let books = &mut *self.books();
        let mut disorder = Vec::new();
        for (number, page) in books.pages.iter_mut().enumerate() {
            for (key, line) in &mut page.lines {
                for payload in std::mem::take(&mut line.arrived) {
                    // What was not confirmed may have been published at any time.
                    if !books.published.contains_key(&payload) {
                        continue;
                    }
                    if payload < line.last_compared {
                        let what = format!("{payload} of {key} on {} came after {}", page.rules.name, line.last_compared);
                        disorder.push(Violation { what, about: Some((number, payload)), of_lease: false });
                    }
                    line.last_compared = line.last_compared.max(payload);
                }
            }
        }
        books.violations.extend(disorder);
        let shown: Vec<_> = books.violations.iter().take(20).map(|v| (&v.what, books.history(v.about))).collect();
        assert!(shown.is_empty(), "{} violations: {shown:#?}", books.violations.len());
    }

    /// Fails unless every confirmed message was delivered and acked everywhere.
    pub fn check_complete(&self) {
        let books = self.books();
        assert!(!books.published.is_empty(), "nothing was published");
        for page in &books.pages {
            let fate = |payload: &u64| page.fates.get(payload);
            let missing: Vec<_> = books.published.keys().filter(|p| !fate(p).is_some_and(Fate::settled)).collect();
            let never = missing.iter().filter(|p| fate(p).is_none_or(|f| f.deliveries == 0)).count();
            let shown: Vec<_> = missing.iter().take(20).map(|p| (p, fate(p))).collect();
            let name = page.rules.name;
            assert!(missing.is_empty(), "{name}: {} not acked, {never} never delivered: {shown:?}", missing.len());
        }
    }

    /// How far it got.
    pub fn progress(&self) -> String {
        let books = self.books();
        let count = |test: fn(&Fate) -> bool| books.pages.iter().flat_map(|p| p.fates.values()).filter(|f| test(f)).count();
        let deliveries: u32 = books.pages.iter().flat_map(|p| p.fates.values()).map(|f| f.deliveries).sum();
        let (acked, buried) = (count(|f| f.acked), count(|f| f.buried));
        format!("{} published, {deliveries} deliveries, {acked} confirmed acks, {buried} dead letters", books.published.len())
    }
}
