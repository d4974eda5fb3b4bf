//! The books of a crash test: what the server confirmed, and what it did later.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Mutex,
};

use crate::fixture::Received;

/// What is known of one message on one subscription.
#[derive(Debug, Default)]
struct Fate {
    deliveries: u32,
    last_attempt: i32,
    confirmed_nacks: i32,
    acked: bool,
    /// An ack was sent. Without a confirmation it may have taken effect or not.
    ack_sent: bool,
    /// Its lease was extended by 600 s, confirmed: nobody else gets it.
    held: bool,
}

impl Fate {
    fn settled(&self) -> bool {
        self.acked || self.ack_sent
    }
}

#[derive(Debug, Default)]
struct Books {
    /// Message id to payload, of every confirmed publish.
    published: BTreeMap<String, String>,
    fates: BTreeMap<(String, String), Fate>,
    subscriptions: BTreeSet<String>,
    violations: Vec<String>,
}

/// Shared by all clients of a test.
#[derive(Debug, Default)]
pub struct Audit(Mutex<Books>);

impl Audit {
    fn books(&self) -> std::sync::MutexGuard<'_, Books> {
        self.0.lock().expect("the books")
    }

    /// A publish was confirmed.
    pub fn published(&self, id: &str, payload: &str) {
        let books = &mut *self.books();
        if let Some(other) = books.published.insert(id.to_owned(), payload.to_owned()) {
            books.violations.push(format!("id {id} was given to {other} and to {payload}"));
        }
    }

    /// A message arrived.
    pub fn delivered(&self, subscription: &str, received: &Received) {
        let books = &mut *self.books();
        books.subscriptions.insert(subscription.to_owned());
        let id = received.id();
        if books.published.get(id).is_some_and(|payload| payload != received.text()) {
            books.violations.push(format!("{id} arrived as {}", received.text()));
        }
        let fate = books.fates.entry((subscription.to_owned(), id.to_owned())).or_default();
        fate.deliveries += 1;
        let what = format!("{id} on {subscription} (attempt {})", received.delivery_attempt);
        if fate.acked {
            books.violations.push(format!("{what} came after its confirmed ack"));
        }
        if fate.held {
            books.violations.push(format!("{what} came while its lease of 600 s was confirmed"));
        }
        if received.delivery_attempt > 0 {
            if received.delivery_attempt <= fate.last_attempt {
                books.violations.push(format!("{what} came after attempt {}", fate.last_attempt));
            }
            if received.delivery_attempt <= fate.confirmed_nacks {
                books.violations.push(format!("{what} came after {} confirmed nacks", fate.confirmed_nacks));
            }
            fate.last_attempt = received.delivery_attempt;
        }
    }

    fn with(&self, subscription: &str, id: &str, change: impl FnOnce(&mut Fate)) {
        change(self.books().fates.entry((subscription.to_owned(), id.to_owned())).or_default());
    }

    /// An ack is about to be sent.
    pub fn ack_sent(&self, subscription: &str, id: &str) {
        self.with(subscription, id, |fate| fate.ack_sent = true);
    }

    /// An ack was confirmed.
    pub fn acked(&self, subscription: &str, id: &str) {
        self.with(subscription, id, |fate| {
            fate.acked = true;
            fate.held = false;
        });
    }

    /// A nack was confirmed.
    pub fn nacked(&self, subscription: &str, id: &str) {
        self.with(subscription, id, |fate| fate.confirmed_nacks += 1);
    }

    /// An extension by 600 s was confirmed.
    pub fn held(&self, subscription: &str, id: &str) {
        self.with(subscription, id, |fate| fate.held = true);
    }

    /// True once every confirmed message was delivered on a subscription, and acked as far as anybody knows.
    pub fn complete(&self, subscription: &str) -> bool {
        let books = self.books();
        let fate = |id: &String| books.fates.get(&(subscription.to_owned(), id.clone()));
        books.published.keys().all(|id| fate(id).is_some_and(Fate::settled))
    }

    /// Fails with every broken promise.
    pub fn check(&self) {
        let books = self.books();
        let shown = books.violations.len().min(20);
        assert!(books.violations.is_empty(), "{} violations: {:#?}", books.violations.len(), &books.violations[..shown]);
    }

    /// Fails unless every confirmed message was delivered and acked everywhere.
    pub fn check_complete(&self) {
        let subscriptions = self.books().subscriptions.clone();
        assert!(!self.books().published.is_empty(), "nothing was published");
        for subscription in subscriptions {
            let books = self.books();
            let fate = |id: &String| books.fates.get(&(subscription.clone(), id.clone()));
            let missing: Vec<_> = books.published.keys().filter(|id| !fate(id).is_some_and(Fate::settled)).collect();
            let never = missing.iter().filter(|id| fate(id).is_none_or(|f| f.deliveries == 0)).count();
            let shown: Vec<_> = missing.iter().take(20).map(|id| (id, fate(id))).collect();
            assert!(missing.is_empty(), "{subscription}: {} not acked, {never} never delivered: {shown:?}", missing.len());
        }
    }

    /// How far it got.
    pub fn progress(&self) -> String {
        let books = self.books();
        let acked = books.fates.values().filter(|f| f.acked).count();
        format!("{} published, {} delivered, {acked} acked", books.published.len(), books.fates.len())
    }
}
