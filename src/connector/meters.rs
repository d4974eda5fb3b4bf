//! What this node counts of each topic and subscription, for the metrics.
//!
//! Counters start at zero with the process and belong to a name, not to an incarnation. Names are not without bound, so
//! only the first [`MAX_NAMES`] of each kind have counters of their own, and the rest share one set.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicU64, Ordering},
    },
};

use parking_lot::RwLock;

use super::Error;
use crate::{
    broker::Outcome,
    model::meter::{Histogram, add},
};

/// Topics, and subscriptions, counted one by one. Each subscription makes some forty time series; a scrape of all of them
/// stays below 10 MB.
pub const MAX_NAMES: usize = 1000;

/// How messages reach a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivery {
    Pull,
    StreamingPull,
    Push,
}

impl Delivery {
    /// Every way, with its label.
    pub const ALL: [(Self, &'static str); 3] =
        [(Self::Pull, "pull"), (Self::StreamingPull, "streaming_pull"), (Self::Push, "push")];
}

/// What became of a push request, in Google's classes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PushAnswer {
    Acknowledged,
    /// No answer in time.
    DeadlineExceeded,
    /// The request could not be made.
    Internal,
    /// An answer that is neither success nor an error, such as a redirect.
    Invalid,
    ClientError,
    ServerError,
    /// No connection.
    Unreachable,
}

impl PushAnswer {
    /// Every class, with its label.
    pub const ALL: [(Self, &'static str); 7] = [
        (Self::Acknowledged, "ack"),
        (Self::DeadlineExceeded, "deadline_exceeded"),
        (Self::Internal, "internal"),
        (Self::Invalid, "invalid"),
        (Self::ClientError, "remote_server_4xx"),
        (Self::ServerError, "remote_server_5xx"),
        (Self::Unreachable, "unreachable"),
    ];

    /// Its label.
    pub fn label(self) -> &'static str {
        Self::ALL[self as usize].1
    }

    /// The class of an HTTP status that does not acknowledge.
    pub fn of_status(status: u16) -> Self {
        match status {
            400..=499 => Self::ClientError,
            500..=599 => Self::ServerError,
            _ => Self::Invalid,
        }
    }
}

/// What an open stream does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamState {
    /// The client has not taken the last response yet.
    Sending,
    /// There is nothing to deliver.
    Waiting,
    /// Flow control: the client has as many messages outstanding as it may.
    Limited,
}

impl StreamState {
    /// Every state, with its label.
    pub const ALL: [(Self, &'static str); 3] =
        [(Self::Sending, "sending"), (Self::Waiting, "waiting"), (Self::Limited, "limited")];
}

/// Counters of one subscription.
#[derive(Debug, Default)]
pub struct SubscriptionMeter {
    /// By [`Delivery`].
    sent_messages: [AtomicU64; Delivery::ALL.len()],
    sent_bytes: [AtomicU64; Delivery::ALL.len()],
    /// By [`PushAnswer`].
    pushes: [AtomicU64; PushAnswer::ALL.len()],
    pub push_latency: Histogram,
    /// By [`StreamState`].
    streams: [AtomicI64; StreamState::ALL.len()],
    pub acknowledged: AtomicU64,
    pub nacked: AtomicU64,
    /// Deadlines moved, nacks left out.
    pub extended: AtomicU64,
    /// Ack ids whose lease was over or that were none, where that is told.
    pub refused: AtomicU64,
    pub pulls: AtomicU64,
    pub stream_responses: AtomicU64,
    pub dead_lettered: AtomicU64,
    /// Dead letters that could not be forwarded and went back.
    pub dead_letters_returned: AtomicU64,
}

impl SubscriptionMeter {
    /// Counts messages on their way to a client.
    pub fn sent(&self, by: Delivery, messages: usize, bytes: u64) {
        add(&self.sent_messages[by as usize], messages as u64);
        add(&self.sent_bytes[by as usize], bytes);
    }

    /// Messages and bytes sent so far.
    pub fn sent_so_far(&self, by: Delivery) -> (u64, u64) {
        (self.sent_messages[by as usize].load(Ordering::Relaxed), self.sent_bytes[by as usize].load(Ordering::Relaxed))
    }

    /// Counts one answered push request.
    pub fn pushed(&self, answer: PushAnswer) {
        add(&self.pushes[answer as usize], 1);
    }

    /// Push requests answered like this so far.
    pub fn pushed_so_far(&self, answer: PushAnswer) -> u64 {
        self.pushes[answer as usize].load(Ordering::Relaxed)
    }

    /// Counts acknowledgements by their outcome.
    pub(super) fn settled(&self, done: &AtomicU64, outcomes: &[Outcome]) {
        let count = |wanted| outcomes.iter().filter(|outcome| **outcome == wanted).count() as u64;
        add(done, count(Outcome::Done));
        add(&self.refused, count(Outcome::Invalid));
    }

    /// Open streams in a state.
    pub fn streams(&self, state: StreamState) -> u64 {
        self.streams[state as usize].load(Ordering::Relaxed).max(0) as u64
    }
}

/// One open stream in its meter.
pub(super) struct StreamGauge {
    meter: Arc<SubscriptionMeter>,
    state: StreamState,
}

impl StreamGauge {
    pub fn open(meter: Arc<SubscriptionMeter>) -> Self {
        let state = StreamState::Waiting;
        meter.streams[state as usize].fetch_add(1, Ordering::Relaxed);
        Self { meter, state }
    }

    pub fn set(&mut self, state: StreamState) {
        if self.state != state {
            self.meter.streams[self.state as usize].fetch_sub(1, Ordering::Relaxed);
            self.meter.streams[state as usize].fetch_add(1, Ordering::Relaxed);
            self.state = state;
        }
    }
}

impl Drop for StreamGauge {
    fn drop(&mut self) {
        self.meter.streams[self.state as usize].fetch_sub(1, Ordering::Relaxed);
    }
}

/// Counters of one topic.
#[derive(Debug, Default)]
pub struct TopicMeter {
    pub messages: AtomicU64,
    pub bytes: AtomicU64,
    /// Publish requests carried out.
    pub requests: AtomicU64,
    /// Refused because of what they asked for.
    pub invalid_requests: AtomicU64,
    /// Failed because of the server or the broker.
    pub failed_requests: AtomicU64,
}

impl TopicMeter {
    pub(super) fn failed(&self, error: &Error) {
        match error {
            Error::Unavailable(_) | Error::Full(_) | Error::Internal(_) | Error::Contended | Error::Closing => {
                add(&self.failed_requests, 1);
            }
            _ => add(&self.invalid_requests, 1),
        }
    }
}

/// Meters of one kind, by `project/id`.
#[derive(Debug)]
pub struct Names<M> {
    known: RwLock<HashMap<Arc<str>, Arc<M>>>,
    rest: Arc<M>,
}

impl<M: Default> Default for Names<M> {
    fn default() -> Self {
        Self { known: RwLock::default(), rest: Arc::default() }
    }
}

impl<M: Default> Names<M> {
    /// The meter of a name; that of the rest when there are enough names.
    pub fn get(&self, channel: &Arc<str>) -> Arc<M> {
        if let Some(meter) = self.known.read().get(channel) {
            return meter.clone();
        }
        let mut known = self.known.write();
        if known.len() >= MAX_NAMES && !known.contains_key(channel) {
            return self.rest.clone();
        }
        known.entry(channel.clone()).or_default().clone()
    }

    /// The meter of a name; none when it shares that of the rest.
    pub fn own(&self, channel: &Arc<str>) -> Option<Arc<M>> {
        Some(self.get(channel)).filter(|meter| !Arc::ptr_eq(meter, &self.rest))
    }

    /// What the names without counters of their own share.
    pub fn rest(&self) -> &Arc<M> {
        &self.rest
    }

    /// Forgets names that are no more.
    pub fn retain(&self, exists: impl Fn(&str) -> bool) {
        self.known.write().retain(|channel, _| exists(channel));
    }
}

/// All counters of the node.
#[derive(Debug, Default)]
pub struct Meters {
    pub topics: Names<TopicMeter>,
    pub subscriptions: Names<SubscriptionMeter>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_beyond_the_bound_share_a_meter_until_others_go() {
        let names: Names<TopicMeter> = Names::default();
        for number in 0..MAX_NAMES {
            add(&names.get(&format!("p/{number}").into()).messages, 1);
        }
        let extra: Arc<str> = "p/extra".into();
        assert!(Arc::ptr_eq(&names.get(&extra), names.rest()));
        assert!(!Arc::ptr_eq(&names.get(&"p/0".into()), names.rest()));
        names.retain(|channel| channel != "p/0");
        assert!(!Arc::ptr_eq(&names.get(&extra), names.rest()));
        assert_eq!(names.get(&"p/1".into()).messages.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_stream_is_counted_in_one_state_until_it_ends() {
        let meter = Arc::new(SubscriptionMeter::default());
        let count = || StreamState::ALL.map(|(state, _)| meter.streams(state));
        let mut stream = StreamGauge::open(meter.clone());
        assert_eq!(count(), [0, 1, 0]);
        stream.set(StreamState::Limited);
        stream.set(StreamState::Limited);
        assert_eq!(count(), [0, 0, 1]);
        drop(stream);
        assert_eq!(count(), [0, 0, 0]);
    }

    #[test]
    fn statuses_have_googles_classes() {
        let classes = [302, 404, 500, 99].map(PushAnswer::of_status);
        assert_eq!(classes, [PushAnswer::Invalid, PushAnswer::ClientError, PushAnswer::ServerError, PushAnswer::Invalid]);
    }
}
