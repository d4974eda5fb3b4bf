//! The worker of one push subscription.

use std::{sync::Arc, time::Duration};

use futures::{StreamExt, future::BoxFuture, stream::FuturesUnordered};
use http::header;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{guard::Guard, issuer::Issuer, request, window::Window};
use crate::{
    broker::{Broker, BrokerError, DeadlineChange, LeaseRequest, Leased, QueueRef, Session, next_session_id},
    connector::{
        Connector, SubscriptionEntry,
        meters::{Delivery, PushAnswer, SubscriptionMeter},
    },
};

/// The lease outlasts the request's time-out, so that the answer settles it.
const LEASE_MARGIN: Duration = Duration::from_secs(5);
/// Pause after the broker failed.
const BROKER_PAUSE: Duration = Duration::from_secs(1);

/// Whether a subscription's messages are pushed.
pub fn wants_push(entry: &SubscriptionEntry) -> bool {
    !entry.subscription.detached && !entry.subscription.push_config.endpoint.is_empty()
}

/// A consumer in the engine's eyes. Each request under way has its own, so that messages of one ordering key, which stay
/// with the session that has one outstanding, are never under way at the same time.
struct Slot {
    broker: Arc<dyn Broker>,
    queue: QueueRef,
    session: Arc<Session>,
}

impl Slot {
    fn new(broker: &Arc<dyn Broker>, queue: &QueueRef) -> Self {
        let session = Session::new(next_session_id());
        broker.attach(queue, &session);
        Self { broker: broker.clone(), queue: queue.clone(), session }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.broker.detach(&self.queue, &self.session);
    }
}

/// How this node reaches endpoints.
pub struct Outside {
    pub client: reqwest::Client,
    pub guard: Guard,
    pub issuer: Arc<Issuer>,
}

struct Worker {
    connector: Arc<Connector>,
    outside: Arc<Outside>,
    entry: Arc<SubscriptionEntry>,
    meter: Arc<SubscriptionMeter>,
    window: Window,
    idle: Vec<Slot>,
    under_way: FuturesUnordered<BoxFuture<'static, (Slot, Option<bool>)>>,
    not_before: Instant,
}

/// Pushes until the subscription is gone, is no longer a push subscription or `stop` is cancelled.
pub async fn run(connector: Arc<Connector>, outside: Arc<Outside>, entry: Arc<SubscriptionEntry>, stop: CancellationToken) {
    let mut worker = Worker {
        meter: connector.meters().subscriptions.get(&entry.queue.channel),
        connector,
        outside,
        entry,
        window: Window::default(),
        idle: Vec::new(),
        under_way: FuturesUnordered::new(),
        not_before: Instant::now(),
    };
    worker.push(&stop).await;
    while worker.under_way.next().await.is_some() {}
}

impl Worker {
    async fn push(&mut self, stop: &CancellationToken) {
        loop {
            let drained = match self.fill().await {
                Ok(drained) => drained,
                Err(BrokerError::Gone) => return,
                Err(error) => {
                    tracing::warn!(%error, subscription = %self.entry.subscription.name, "push can't lease");
                    self.not_before = Instant::now() + BROKER_PAUSE;
                    None
                }
            };
            let paused = self.not_before > Instant::now();
            let waiting = drained.as_ref().map(|slot| slot.session.clone());
            tokio::select! {
                () = stop.cancelled() => return,
                () = self.entry.retired() => {
                    if !self.reload().await {
                        return;
                    }
                }
                Some((slot, success)) = self.under_way.next() => self.answered(slot, success),
                () = tokio::time::sleep_until(self.not_before), if paused => {}
                () = async { match &waiting { Some(session) => session.woken().await, None => std::future::pending().await } } => {}
            }
            if let Some(slot) = drained {
                // Another may wait the next time, and a wake that this one was still in line for would be heard by nobody.
                slot.broker.rest(&slot.queue, &slot.session);
                self.idle.push(slot);
            }
        }
    }

    /// Starts requests while the window and the endpoint's pause let it. Answers the slot that found nothing to lease.
    async fn fill(&mut self) -> Result<Option<Slot>, BrokerError> {
        // What is leased after a change would still go to where the subscription pushed before.
        while self.under_way.len() < self.window.size() && self.not_before <= Instant::now() && !self.entry.is_retired() {
            let slot = self.idle.pop().unwrap_or_else(|| Slot::new(self.connector.broker(), &self.entry.queue));
            let request = LeaseRequest {
                queue: self.entry.queue.clone(),
                session: slot.session.clone(),
                max_messages: 1,
                max_bytes: u64::MAX,
                deadline_ms: (self.timeout() + LEASE_MARGIN).as_millis() as u64,
                max_inflight: self.connector.options().max_inflight_per_subscription,
            };
            match slot.broker.lease(request).await?.into_iter().next() {
                Some(leased) => self.start(slot, leased),
                None => return Ok(Some(slot)),
            }
        }
        Ok(None)
    }

    fn timeout(&self) -> Duration {
        Duration::from_secs(u64::from(self.entry.subscription.ack_deadline_seconds))
    }

    fn start(&mut self, slot: Slot, leased: Leased) {
        let (outside, entry, timeout) = (self.outside.clone(), self.entry.clone(), self.timeout());
        let (connector, meter) = (self.connector.clone(), self.meter.clone());
        let bypass_backoff = self.connector.options().nack_bypasses_backoff;
        self.under_way.push(Box::pin(async move {
            let leased = match connector.transform_leased(&entry, vec![leased]).await {
                Ok(leased) => leased.into_iter().next(),
                Err(error) => {
                    tracing::warn!(%error, subscription = %entry.subscription.name, "push can't transform");
                    return (slot, Some(false));
                }
            };
            // Dropped or failed, and settled as such.
            let Some(leased) = leased else { return (slot, None) };
            meter.sent(Delivery::Push, 1, leased.message.len() as u64);
            let began = Instant::now();
            let answer = post(&outside, &entry, &leased, timeout).await;
            meter.push_latency.observe(began.elapsed());
            meter.pushed(answer);
            let success = answer == PushAnswer::Acknowledged;
            let settled = if success {
                slot.broker.acknowledge(&slot.queue, &[leased.token]).await
            } else {
                let nack = DeadlineChange { token: leased.token, deadline_ms: 0, bypass_backoff, max_life_ms: 0 };
                slot.broker.modify_deadlines(&slot.queue, &[nack]).await
            };
            if let Err(error) = settled {
                tracing::warn!(%error, subscription = %entry.subscription.name, "push can't settle; the lease runs out");
            }
            (slot, Some(success))
        }));
    }

    /// `success` is what the endpoint said; none when it was not asked.
    fn answered(&mut self, slot: Slot, success: Option<bool>) {
        if let Some(success) = success {
            self.window.answered(success);
            self.not_before = Instant::now() + self.window.pause();
        }
        // Asked first the next time: an ordering key may wait for it.
        self.idle.push(slot);
    }

    /// Reads the changed subscription; false when there is nothing to push any more.
    async fn reload(&mut self) -> bool {
        let name = self.entry.subscription.name.clone();
        match self.connector.subscription(&name).await {
            Ok(entry) if wants_push(&entry) && entry.queue == self.entry.queue => {
                if entry.subscription.push_config.endpoint != self.entry.subscription.push_config.endpoint {
                    self.window = Window::default();
                    self.not_before = Instant::now();
                }
                self.entry = entry;
                true
            }
            _ => false,
        }
    }
}

/// What the endpoint says to the message. Whatever keeps it from being asked is as bad as a refusal.
async fn post(outside: &Outside, entry: &SubscriptionEntry, leased: &Leased, timeout: Duration) -> PushAnswer {
    let subscription = &entry.subscription;
    let Some((mut headers, body)) = request::build(subscription, leased) else {
        tracing::error!(%subscription.name, sequence = leased.token.sequence, "a stored message can't be read");
        return PushAnswer::Internal;
    };
    match outside.issuer.authorization(subscription).await {
        Ok(Some(token)) => _ = headers.insert(header::AUTHORIZATION, token),
        Ok(None) => {}
        Err(error) => {
            tracing::warn!(%subscription.name, "push has no token: {}", error.internal().unwrap_or("the broker is busy"));
            return PushAnswer::Internal;
        }
    }
    let Ok(url) = reqwest::Url::parse(&subscription.push_config.endpoint) else {
        tracing::debug!(%subscription.name, "the endpoint is no URL");
        return PushAnswer::Internal;
    };
    if let Err(refused) = outside.guard.check(&url) {
        tracing::debug!(%subscription.name, %refused, "push refused");
        return PushAnswer::Internal;
    }
    match outside.client.post(url).headers(headers).body(body).timeout(timeout).send().await {
        // The status alone decides; the body is not read.
        Ok(response) if request::acknowledges(response.status().as_u16()) => PushAnswer::Acknowledged,
        Ok(response) => PushAnswer::of_status(response.status().as_u16()),
        Err(error) => {
            tracing::debug!(error = &error as &dyn std::error::Error, %subscription.name, "push failed");
            if error.is_timeout() {
                PushAnswer::DeadlineExceeded
            } else if error.is_builder() {
                PushAnswer::Internal
            } else {
                PushAnswer::Unreachable
            }
        }
    }
}
