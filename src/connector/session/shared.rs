//! What the two halves of a stream share.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use parking_lot::Mutex;
use tokio::{sync::Notify, time::Instant};

use super::{Confirmation, StreamResponse};
use crate::{
    broker::{LeaseToken, Leased},
    connector::{Error, SubscriptionEntry},
};

/// Confirmed ids that may wait for the client to read them before no more of its requests are read: about 700 KB.
const MAX_CONFIRMATIONS: usize = 4000;

pub(super) struct Shared {
    state: Mutex<State>,
    /// Wakes the outgoing half: there is something in the state for it.
    pub changed: Notify,
    /// Wakes the incoming half: confirmations were taken, or leases need to be watched.
    pub taken: Notify,
    /// Whether the incoming half looks after `unsent` from time to time.
    watched: AtomicBool,
}

struct State {
    entry: Arc<SubscriptionEntry>,
    deadline_ms: u64,
    pong: bool,
    acknowledged: Confirmation,
    modified: Confirmation,
    /// The client has closed its side; its last request is being settled.
    closed: bool,
    end: Option<Result<(), Error>>,
    unsent: Unsent,
}

/// Leased messages that the client does not have for all we know.
#[derive(Default)]
pub(super) struct Unsent {
    /// Part of the response that was last given to the transport.
    pub handed: Vec<LeaseToken>,
    /// Leased, but too large for that response.
    pub carried: Option<Leased>,
    /// When the first of these leases ends, if they are any.
    pub expires: Option<Instant>,
}

impl Unsent {
    pub fn is_empty(&self) -> bool {
        self.handed.is_empty() && self.carried.is_none()
    }

    /// The leases to give back.
    pub fn into_tokens(self) -> Vec<LeaseToken> {
        let mut tokens = self.handed;
        tokens.extend(self.carried.map(|leased| leased.token));
        tokens
    }
}

/// What the outgoing half does next.
pub(super) enum Next {
    End(Result<(), Error>),
    /// Something to send now, with or without messages.
    Respond(StreamResponse),
    /// Only messages.
    Lease {
        deadline_ms: u64,
    },
    /// Nothing until the state changes.
    Wait,
}

impl Shared {
    pub fn new(entry: Arc<SubscriptionEntry>, deadline_ms: u64) -> Self {
        Self {
            state: Mutex::new(State {
                entry,
                deadline_ms,
                pong: false,
                acknowledged: Confirmation::default(),
                modified: Confirmation::default(),
                closed: false,
                end: None,
                unsent: Unsent::default(),
            }),
            changed: Notify::new(),
            taken: Notify::new(),
            watched: AtomicBool::new(false),
        }
    }

    // ---- for the incoming half

    pub fn entry(&self) -> Arc<SubscriptionEntry> {
        self.state.lock().entry.clone()
    }

    /// Another version of the subscription is in force.
    pub fn set_entry(&self, entry: Arc<SubscriptionEntry>) {
        self.state.lock().entry = entry;
        self.changed.notify_one();
    }

    pub fn deadline_ms(&self) -> u64 {
        self.state.lock().deadline_ms
    }

    pub fn set_deadline_ms(&self, deadline_ms: u64) {
        self.state.lock().deadline_ms = deadline_ms;
    }

    pub fn ping(&self) {
        self.state.lock().pong = true;
        self.changed.notify_one();
    }

    /// Adds confirmations with `add`.
    pub fn confirm(&self, add: impl FnOnce(&mut Confirmation, &mut Confirmation)) {
        let mut state = self.state.lock();
        let state = &mut *state;
        add(&mut state.acknowledged, &mut state.modified);
        self.changed.notify_one();
    }

    /// Whether the client has to read some confirmations before more of its requests are read.
    pub fn is_full(&self) -> bool {
        let state = self.state.lock();
        state.acknowledged.len() + state.modified.len() >= MAX_CONFIRMATIONS
    }

    /// The client sends nothing more: no further messages are leased for it.
    pub fn close(&self) {
        self.state.lock().closed = true;
    }

    /// Everything the client sent is settled; the outgoing half sends what is left and ends.
    pub fn end(&self, end: Result<(), Error>) {
        self.state.lock().end.get_or_insert(end);
        self.changed.notify_one();
    }

    /// Whether the outgoing half asked to have its unsent messages looked after.
    pub fn is_watched(&self) -> bool {
        self.watched.load(Ordering::Acquire)
    }

    /// Takes the unsent messages whose leases end before `time`. With nothing unsent, the watch is over.
    pub fn overdue(&self, time: Instant) -> Vec<LeaseToken> {
        let mut state = self.state.lock();
        if state.unsent.is_empty() {
            self.watched.store(false, Ordering::Release);
            return Vec::new();
        }
        match state.unsent.expires {
            Some(expires) if expires > time => Vec::new(),
            _ => std::mem::take(&mut state.unsent).into_tokens(),
        }
    }

    // ---- for the outgoing half

    /// The transport asks for more, so what was handed to it is on its way to the client.
    pub fn sent(&self) {
        self.state.lock().unsent.handed.clear();
    }

    pub fn next(&self) -> Next {
        let mut state = self.state.lock();
        let control = state.pong || !state.acknowledged.is_empty() || !state.modified.is_empty();
        if control {
            let response = StreamResponse {
                messages: Vec::new(),
                acknowledged: std::mem::take(&mut state.acknowledged),
                modified: std::mem::take(&mut state.modified),
                exactly_once: false,
                ordered: false,
            };
            state.pong = false;
            self.taken.notify_one();
            return Next::Respond(state.complete(response));
        }
        match &state.end {
            Some(end) => Next::End(end.clone()),
            None if state.closed => Next::Wait,
            None => Next::Lease { deadline_ms: state.deadline_ms },
        }
    }

    /// A response without messages yet.
    pub fn response(&self) -> StreamResponse {
        self.state.lock().complete(StreamResponse::default())
    }

    /// Takes the message left over from the last response.
    pub fn take_carried(&self) -> Option<Leased> {
        self.state.lock().unsent.carried.take()
    }

    /// Remembers what is about to be handed to the transport.
    pub fn hand(&self, unsent: Unsent) {
        self.state.lock().unsent = unsent;
        if !self.watched.load(Ordering::Acquire) && !self.watched.swap(true, Ordering::AcqRel) {
            self.taken.notify_one();
        }
    }

    pub fn take_unsent(&self) -> Unsent {
        std::mem::take(&mut self.state.lock().unsent)
    }
}

impl State {
    /// Every response tells the settings: clients take what a response lacks for false.
    fn complete(&self, response: StreamResponse) -> StreamResponse {
        let subscription = &self.entry.subscription;
        StreamResponse {
            exactly_once: subscription.enable_exactly_once_delivery,
            ordered: subscription.enable_message_ordering,
            ..response
        }
    }
}
