//! Spans of operations on messages, after OpenTelemetry's conventions for messaging.
//!
//! An operation has a span of its own, below what its caller says, if the caller's trace is recorded or, where the caller
//! says nothing, by chance. Beside it, each message whose creator's trace is recorded has a span in that trace.

use std::{
    collections::{HashMap, VecDeque},
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::mpsc;

use super::{
    Counts,
    context::{Context, parent},
    now_nanos,
    wire::{self, Link, Span, Status, number, text},
};
use crate::model::meter::add;

/// Finished spans that wait to be sent; a span takes about 1 KiB.
const QUEUE_SPANS: usize = 8192;
/// Spans of one request to the collector, and how long the first of them waits for others.
const BATCH_SPANS: usize = 512;
const BATCH_WAIT: Duration = Duration::from_millis(500);
/// Links of one span, as OpenTelemetry bounds them.
const MAX_LINKS: usize = 128;
/// Deliveries whose spans are remembered for the settling to come; the oldest is forgotten first. One takes about 150 bytes.
const REMEMBERED: usize = 65_536;

/// What is done with messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operation {
    name: &'static str,
    /// One of the conventions' types.
    kind: &'static str,
    span_kind: i32,
}

impl Operation {
    pub const SEND: Self = Self { name: "send", kind: "send", span_kind: wire::SPAN_SERVER };
    pub const RECEIVE: Self = Self { name: "receive", kind: "receive", span_kind: wire::SPAN_SERVER };
    pub const PUSH: Self = Self { name: "push", kind: "send", span_kind: wire::SPAN_CLIENT };
    pub const ACK: Self = Self { name: "ack", kind: "settle", span_kind: wire::SPAN_SERVER };
    pub const NACK: Self = Self { name: "nack", kind: "settle", span_kind: wire::SPAN_SERVER };
    pub const MODACK: Self = Self { name: "modack", kind: "settle", span_kind: wire::SPAN_SERVER };
}

/// What is known of one message at the end of an operation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// Empty where the message has none.
    pub message_id: String,
    /// 0 where deliveries are not counted.
    pub delivery_attempt: u32,
}

/// Records spans. One per process that traces.
#[derive(Debug)]
pub struct Tracer {
    /// A trace that begins here is recorded when a random number is not above this; none records none of them.
    threshold: Option<u64>,
    queue: mpsc::Sender<Span>,
    counts: Arc<Counts>,
    remembered: Mutex<Remembered>,
}

/// Finished spans on their way out.
pub struct Spans {
    queue: mpsc::Receiver<Span>,
}

/// Deliveries by the hash of their ack ids.
#[derive(Debug, Default)]
struct Remembered {
    deliveries: HashMap<u64, (Context, Facts)>,
    order: VecDeque<u64>,
}

impl Remembered {
    fn keep(&mut self, ack_id: &str, context: Context, facts: Facts) {
        let key = hash(ack_id);
        if self.deliveries.insert(key, (context, facts)).is_none() {
            self.order.push_back(key);
        }
        // What was settled is still in the order, so that this also bounds it.
        while self.order.len() > REMEMBERED {
            if let Some(oldest) = self.order.pop_front() {
                self.deliveries.remove(&oldest);
            }
        }
    }
}

fn hash(ack_id: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    ack_id.hash(&mut hasher);
    hasher.finish()
}

impl Tracer {
    /// `ratio` is the part of the traces begun here that are recorded, 0 to 1.
    pub fn new(ratio: f64, counts: Arc<Counts>) -> (Arc<Self>, Spans) {
        let (sender, receiver) = mpsc::channel(QUEUE_SPANS);
        // A float beyond the range becomes the largest number.
        let threshold = (ratio > 0.0).then_some((ratio * u64::MAX as f64) as u64);
        (Arc::new(Self { threshold, queue: sender, counts, remembered: Mutex::default() }), Spans { queue: receiver })
    }

    /// An operation on messages of a topic or a subscription begins. `created` has the creator's context of each message. None
    /// when nothing of it is recorded.
    pub fn begin(
        &self,
        operation: Operation,
        project: &str,
        destination: &str,
        created: impl IntoIterator<Item = Option<Context>>,
    ) -> Option<Box<Batch<'_>>> {
        self.begin_below(parent(), operation, project, destination, created)
    }

    /// The same where the caller's context was kept.
    pub fn begin_below(
        &self,
        parent: Option<Context>,
        operation: Operation,
        project: &str,
        destination: &str,
        created: impl IntoIterator<Item = Option<Context>>,
    ) -> Option<Box<Batch<'_>>> {
        let (mut count, mut messages) = (0, Vec::new());
        for created in created {
            if let Some(created) = created.filter(|created| created.sampled) {
                messages.push(Traced { index: count, created, own: created.child() });
            }
            count += 1;
        }
        let call = match parent {
            Some(parent) => parent.sampled.then(|| parent.child()),
            None => self.threshold.filter(|threshold| rand::random::<u64>() <= *threshold).map(|_| Context::root(true)),
        };
        if call.is_none() && messages.is_empty() {
            return None;
        }
        let began = now_nanos();
        Some(Box::new(Batch {
            tracer: self,
            operation,
            project: project.to_owned(),
            destination: destination.to_owned(),
            began,
            call_began: began,
            parent,
            call,
            messages,
            count,
        }))
    }

    /// Settling begins: the messages are those of these ack ids, as far as their delivery is remembered.
    pub fn begin_settling<'i>(
        &self,
        operation: Operation,
        project: &str,
        subscription: &str,
        ack_ids: impl Iterator<Item = &'i str>,
    ) -> Option<(Box<Batch<'_>>, Vec<Facts>)> {
        let mut facts = Vec::new();
        let created: Vec<_> = {
            let mut remembered = self.remembered.lock();
            let found = ack_ids.map(|ack_id| {
                let key = hash(ack_id);
                let known = match operation {
                    // The lease goes on.
                    Operation::MODACK => remembered.deliveries.get(&key).cloned(),
                    _ => remembered.deliveries.remove(&key),
                };
                let (context, known) = known.map_or((None, Facts::default()), |(context, known)| (Some(context), known));
                facts.push(known);
                context
            });
            found.collect()
        };
        (!created.is_empty()).then(|| self.begin(operation, project, subscription, created)).flatten().map(|batch| (batch, facts))
    }

    fn finish(&self, span: Span) {
        if self.queue.try_send(span).is_err() {
            add(&self.counts.dropped, 1);
        }
    }
}

/// A message with a span of its own.
struct Traced {
    /// Its place in the operation.
    index: usize,
    created: Context,
    own: Context,
}

/// An operation under way. Dropped without an [`end`](Self::end) it leaves no spans.
pub struct Batch<'t> {
    tracer: &'t Tracer,
    operation: Operation,
    project: String,
    destination: String,
    began: u64,
    call_began: u64,
    parent: Option<Context>,
    call: Option<Context>,
    messages: Vec<Traced>,
    count: usize,
}

impl Batch<'_> {
    /// The call began earlier than its messages were there.
    pub fn since(mut self: Box<Self>, began: u64) -> Box<Self> {
        self.call_began = began;
        self
    }

    /// What another process that takes part should take for its parent.
    pub fn context(&self) -> Option<Context> {
        self.messages.first().map(|message| message.own).or(self.call)
    }

    /// Remembers deliveries until they are settled; `ack_id` is that of the message at an index.
    pub fn remember<'i>(&self, ack_id: impl Fn(usize) -> &'i str, facts: impl Fn(usize) -> Facts) {
        let mut remembered = self.tracer.remembered.lock();
        for message in &self.messages {
            remembered.keep(ack_id(message.index), message.own, facts(message.index));
        }
    }

    /// Records the spans. `facts` are those of the message at an index; `error` is its type and its text.
    // Boxed from its beginning, so that calls of which nothing is recorded carry no more than a pointer.
    #[allow(clippy::boxed_local)]
    pub fn end(self: Box<Self>, facts: impl Fn(usize) -> Facts, error: Option<(&str, &str)>) {
        let end = now_nanos();
        for message in &self.messages {
            let facts = facts(message.index);
            let mut span = self.span(&message.own, Some(&message.created), end, error);
            if !facts.message_id.is_empty() {
                span.attributes.push(text("messaging.message.id", facts.message_id));
            }
            if facts.delivery_attempt > 0 {
                let key = "messaging.gcp_pubsub.message.delivery_attempt";
                span.attributes.push(number(key, i64::from(facts.delivery_attempt)));
            }
            span.links.extend(self.call.as_ref().map(link));
            self.tracer.finish(span);
        }
        if let Some(call) = &self.call {
            let mut span = self.span(call, self.parent.as_ref(), end, error);
            span.start_nanos = self.call_began;
            span.attributes.push(number("messaging.batch.message_count", self.count as i64));
            span.links = self.messages.iter().take(MAX_LINKS).map(|message| link(&message.created)).collect();
            span.dropped_links = self.messages.len().saturating_sub(MAX_LINKS) as u32;
            self.tracer.finish(span);
        }
    }

    fn span(&self, own: &Context, parent: Option<&Context>, end: u64, error: Option<(&str, &str)>) -> Span {
        let Operation { name, kind, span_kind } = self.operation;
        let mut attributes = vec![
            text("messaging.system", "gcp_pubsub"),
            text("messaging.operation.name", name),
            text("messaging.operation.type", kind),
            text("messaging.destination.name", self.destination.as_str()),
            text("gcp.project_id", self.project.as_str()),
        ];
        if self.operation != Operation::SEND {
            attributes.push(text("messaging.destination.subscription.name", self.destination.as_str()));
        }
        attributes.extend(error.map(|(kind, _)| text("error.type", kind)));
        let remote = if parent.is_some() { wire::FLAG_REMOTE } else { 0 };
        Span {
            trace_id: Bytes::copy_from_slice(&own.trace_id),
            span_id: Bytes::copy_from_slice(&own.span_id),
            parent_span_id: parent.map_or_else(Bytes::new, |parent| Bytes::copy_from_slice(&parent.span_id)),
            name: format!("{name} {}", self.destination),
            kind: span_kind,
            start_nanos: self.began,
            end_nanos: end.max(self.began),
            attributes,
            links: Vec::new(),
            dropped_links: 0,
            status: error.map(|(_, message)| Status { message: message.to_owned(), code: wire::STATUS_ERROR }),
            flags: wire::FLAG_SAMPLED | wire::FLAG_REMOTE_IS_KNOWN | remote,
        }
    }
}

fn link(context: &Context) -> Link {
    Link {
        trace_id: Bytes::copy_from_slice(&context.trace_id),
        span_id: Bytes::copy_from_slice(&context.span_id),
        flags: u32::from(context.sampled),
    }
}

impl Spans {
    /// The next spans to send together; none once there are no more and `ended` is set.
    pub async fn next(&mut self, ended: &tokio_util::sync::CancellationToken) -> Option<Vec<Span>> {
        let mut batch = Vec::new();
        let first = tokio::select! {
            biased;
            first = self.queue.recv() => first?,
            () = ended.cancelled() => return None,
        };
        batch.push(first);
        let until = tokio::time::sleep(BATCH_WAIT);
        tokio::pin!(until);
        while batch.len() < BATCH_SPANS {
            tokio::select! {
                biased;
                more = self.queue.recv() => match more {
                    Some(span) => batch.push(span),
                    None => break,
                },
                () = &mut until => break,
                () = ended.cancelled() => break,
            }
        }
        Some(batch)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use tokio_util::sync::CancellationToken;

    use super::{super::under, *};

    async fn spans(mut spans: Spans) -> Vec<Span> {
        let ended = CancellationToken::new();
        ended.cancel();
        let mut all = Vec::new();
        while let Some(batch) = spans.next(&ended).await {
            all.extend(batch);
        }
        all
    }

    fn tracer(ratio: f64) -> (Arc<Tracer>, Spans, Arc<Counts>) {
        let counts = Arc::<Counts>::default();
        let (tracer, spans) = Tracer::new(ratio, counts.clone());
        (tracer, spans, counts)
    }

    #[tokio::test]
    async fn a_caller_decides_whether_its_call_is_recorded_and_chance_only_where_it_does_not() {
        for (ratio, parent, expected) in
            [(0.0, None, 0), (1.0, None, 1), (0.0, Some(Context::root(true)), 1), (1.0, Some(Context::root(false)), 0)]
        {
            let (tracer, queue, _) = tracer(ratio);
            under(parent, async {
                if let Some(batch) = tracer.begin(Operation::SEND, "shop", "orders", [None, None]) {
                    batch.end(|_| Facts::default(), None);
                }
            })
            .await;
            let spans = spans(queue).await;
            assert_eq!(spans.len(), expected);
            for span in spans {
                assert_eq!(span.name, "send orders");
                assert_eq!(span.parent_span_id, parent.map_or(Bytes::new(), |p| Bytes::copy_from_slice(&p.span_id)));
                assert!(span.attributes.contains(&number("messaging.batch.message_count", 2)));
            }
        }
    }

    #[tokio::test]
    async fn a_message_of_a_recorded_trace_has_a_span_in_it_from_delivery_to_settling() {
        let (tracer, queue, _) = tracer(0.0);
        let created = Context::root(true);
        let facts = |_| Facts { message_id: "7".into(), delivery_attempt: 2 };
        let batch =
            tracer.begin(Operation::RECEIVE, "shop", "billing", [None, Some(created), Some(Context::root(false))]).unwrap();
        batch.remember(|index| ["a", "b", "c"][index], facts);
        batch.end(facts, None);
        for (operation, expected) in [(Operation::MODACK, true), (Operation::ACK, true), (Operation::ACK, false)] {
            let settling = tracer.begin_settling(operation, "shop", "billing", ["a", "b"].into_iter());
            assert_eq!(settling.is_some(), expected);
            if let Some((batch, facts)) = settling {
                batch.end(|index| facts[index].clone(), Some(("Gone", "it is gone")));
            }
        }
        let spans = spans(queue).await;
        let names: Vec<_> = spans.iter().map(|span| span.name.as_str()).collect();
        assert_eq!(names, ["receive billing", "modack billing", "ack billing"]);
        assert!(spans.iter().all(|span| span.trace_id == created.trace_id[..]));
        assert_eq!(spans[0].parent_span_id, created.span_id[..]);
        assert_eq!(spans[2].parent_span_id, spans[0].span_id);
        assert!(spans[2].attributes.contains(&text("messaging.message.id", "7")));
        assert_eq!(spans[2].status, Some(Status { message: "it is gone".into(), code: wire::STATUS_ERROR }));
    }

    #[tokio::test]
    async fn spans_without_room_are_counted_and_nobody_waits() {
        let (tracer, queue, counts) = tracer(1.0);
        for _ in 0..QUEUE_SPANS + 3 {
            tracer.begin(Operation::ACK, "shop", "billing", [None]).unwrap().end(|_| Facts::default(), None);
        }
        assert_eq!(counts.dropped.load(Relaxed), 3);
        assert_eq!(spans(queue).await.len(), QUEUE_SPANS);
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut remembered = Remembered::default();
        for number in 0..REMEMBERED + 10 {
            remembered.keep(&number.to_string(), Context::root(true), Facts::default());
        }
        assert_eq!((remembered.deliveries.len(), remembered.order.len()), (REMEMBERED, REMEMBERED));
        assert!(!remembered.deliveries.contains_key(&hash("9")) && remembered.deliveries.contains_key(&hash("10")));
    }
}
