//! The outgoing half of a stream: leases messages when the transport asks for a response.

use std::{sync::Arc, time::Duration};

use futures::Stream;
use tokio::{sync::oneshot, time::Instant};

use super::{
    StreamResponse,
    shared::{Next, Shared, Unsent},
};
use crate::{
    broker::{BrokerError, LeaseRequest, Leased},
    connector::{
        Connector, Error,
        channel::{Attached, Channel},
        meters::{Delivery, StreamGauge, StreamState},
        transforms::MAX_LEASED,
    },
    model::meter::add,
    rules::{
        flow_control::{self, Limits, MAX_RESPONSE_BYTES},
        lease,
    },
    telemetry::Context,
};

/// How often a stream looks up a subscription whose queue is said to be gone, before it ends.
const MAX_GONE: u32 = 8;

pub(super) struct Outgoing {
    connector: Arc<Connector>,
    channel: Arc<Channel>,
    shared: Arc<Shared>,
    limits: Limits,
    attached: Attached,
    gauge: StreamGauge,
    /// The broker may wake this session for something to lease.
    hungry: bool,
    gone: u32,
    ended: bool,
    /// What the client said this stream is a part of.
    parent: Option<Context>,
    /// Tells the incoming half by its end.
    _alive: oneshot::Sender<()>,
}

impl Outgoing {
    pub fn new(
        connector: Arc<Connector>,
        channel: Arc<Channel>,
        shared: Arc<Shared>,
        limits: Limits,
        alive: oneshot::Sender<()>,
        parent: Option<Context>,
    ) -> Self {
        let attached = connector.delivery.attach(&channel.queue);
        let gauge = StreamGauge::open(channel.meter.clone());
        Self { connector, channel, shared, limits, attached, gauge, hungry: false, gone: 0, ended: false, parent, _alive: alive }
    }

    /// The responses. Asking for one says that the response before it is on its way.
    pub fn into_stream(self) -> impl Stream<Item = Result<StreamResponse, Error>> + Send + 'static {
        futures::stream::unfold(self, |mut outgoing| async move {
            let response = outgoing.next().await?;
            outgoing.gauge.set(StreamState::Sending);
            add(&outgoing.channel.meter.stream_responses, 1);
            // Until the next request for a response this session takes part in nothing: if the client stops reading, no
            // message may wait for it.
            if std::mem::take(&mut outgoing.hungry) {
                outgoing.connector.broker.rest(&outgoing.channel.queue, &outgoing.attached.session);
            }
            Some((response, outgoing))
        })
    }

    async fn next(&mut self) -> Option<Result<StreamResponse, Error>> {
        if self.ended {
            return None;
        }
        self.shared.sent();
        loop {
            match self.shared.next() {
                Next::End(end) => return self.end(end),
                Next::Respond(response) => return Some(Ok(response)),
                Next::Lease { deadline_ms } => match self.lease(deadline_ms).await {
                    Ok(leased) if leased.is_empty() => {}
                    Ok(leased) => return Some(Ok(self.respond(leased))),
                    Err(error) => return self.end(Err(error)),
                },
                Next::Wait => {}
            }
            tokio::select! {
                () = self.attached.session.woken() => {}
                () = self.shared.changed.notified() => {}
            }
        }
    }

    fn end(&mut self, end: Result<(), Error>) -> Option<Result<StreamResponse, Error>> {
        self.ended = true;
        self.give_back();
        end.err().map(Err)
    }

    fn give_back(&self) {
        self.connector.delivery.release(&self.channel.queue, self.shared.take_unsent().into_tokens());
    }

    async fn lease(&mut self, deadline_ms: u64) -> Result<Vec<Leased>, Error> {
        if let Some(carried) = self.shared.take_carried()
            && carried.deadline_at_ms > self.connector.broker.now_ms()
        {
            return Ok(vec![carried]);
        }
        if self.connector.delivery.draining.is_cancelled() {
            // The stream is about to end; the messages go to other nodes at once.
            return Ok(Vec::new());
        }
        let session = &self.attached.session;
        let Some(budget) = self.limits.budget(session.outstanding_messages(), session.outstanding_bytes()) else {
            self.gauge.set(StreamState::Limited);
            return Ok(Vec::new());
        };
        let entry = self.shared.entry();
        let request = LeaseRequest {
            queue: self.channel.queue.clone(),
            session: session.clone(),
            max_messages: if entry.transforms.is_empty() { budget.messages } else { budget.messages.min(MAX_LEASED) },
            max_bytes: budget.bytes,
            deadline_ms: lease::first_deadline_ms(deadline_ms, self.connector.max_lease_life_ms()),
            max_inflight: self.connector.options.max_inflight_per_subscription,
            record_version: entry.lease_version(),
        };
        match self.connector.broker.lease(request).await {
            Ok(leased) => {
                self.hungry |= leased.is_empty();
                self.gauge.set(StreamState::Waiting);
                self.screen(leased).await
            }
            // Deleted, most likely: the incoming half looks it up and ends the stream.
            Err(BrokerError::Gone) if self.gone < MAX_GONE => {
                self.gone += 1;
                self.connector.forget_subscription(&self.shared.entry().subscription.name);
                Ok(Vec::new())
            }
            // The incoming half looks it up and tells this one.
            Err(BrokerError::Stale) => {
                self.connector.outdated(&entry).await?;
                if !entry.is_retired() {
                    self.attached.session.wake();
                }
                Ok(Vec::new())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// What of leased messages is for the client.
    async fn screen(&self, leased: Vec<Leased>) -> Result<Vec<Leased>, Error> {
        let had_some = !leased.is_empty();
        let leased = self.connector.deliverable(&self.shared.entry(), leased).await?;
        if had_some && leased.is_empty() {
            // None of them was for the client; there may be others.
            self.attached.session.wake();
        }
        Ok(leased)
    }

    fn respond(&self, mut leased: Vec<Leased>) -> StreamResponse {
        let mut surplus = leased.split_off(flow_control::fitting(leased.iter().map(|l| l.message.len()), MAX_RESPONSE_BYTES));
        let carried = (!surplus.is_empty()).then(|| surplus.swap_remove(0));
        self.connector.delivery.release(&self.channel.queue, surplus.iter().map(|l| l.token).collect());
        let first_end_ms = leased.iter().map(|l| l.deadline_at_ms).min().unwrap_or_default();
        let left = Duration::from_millis(first_end_ms.saturating_sub(self.connector.broker.now_ms()));
        let handed = leased.iter().map(|l| l.token).collect();
        self.shared.hand(Unsent { handed, carried, expires: Some(Instant::now() + left) });
        let bytes = leased.iter().map(|l| l.message.len() as u64).sum();
        self.channel.meter.sent(Delivery::StreamingPull, leased.len(), bytes);
        let messages: Vec<_> = leased.into_iter().map(|l| self.channel.deliver(l)).collect();
        if self.connector.tracer().is_some() {
            self.connector.trace_receiving(&self.shared.entry().subscription.name, self.parent, None, &messages);
        }
        StreamResponse { messages, ..self.shared.response() }
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        self.give_back();
    }
}
