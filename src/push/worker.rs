//! The worker of one push subscription.

use std::{sync::Arc, time::Duration};

use futures::{StreamExt, future::BoxFuture, stream::FuturesUnordered};
use http::{HeaderValue, header};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{guard::Guard, issuer::Issuer, request, window::Window};
use crate::{
    broker::{Broker, BrokerError, DeadlineChange, LeaseRequest, LeaseToken, Leased, QueueRef, Session, next_session_id},
    connector::{
        Connector, SubscriptionEntry,
        meters::{Delivery, PushAnswer, SubscriptionMeter},
        note_settled,
        traces::{created, facts},
    },
    telemetry::{Context, Operation},
};

/// The lease outlasts the request's time-out, so that the answer settles it.
const LEASE_MARGIN: Duration = Duration::from_secs(5);
/// Failing pushes of one subscription are reported this often.
const COMPLAINT: Duration = Duration::from_secs(60);
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

/// What came of one push.
type Pushed = Result<(), Failed>;

/// Why a push was no success.
struct Failed {
    /// For the meters.
    answer: PushAnswer,
    /// For the log.
    why: String,
    /// The message to give back; none when it was given back.
    token: Option<LeaseToken>,
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
    under_way: FuturesUnordered<BoxFuture<'static, (Slot, Option<Pushed>)>>,
    not_before: Instant,
    complained: Option<Instant>,
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
        complained: None,
    };
    worker.push(&stop).await;
    while let Some((slot, pushed)) = worker.under_way.next().await {
        worker.answered(slot, pushed);
    }
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
                Some((slot, pushed)) = self.under_way.next() => self.answered(slot, pushed),
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
                record_version: self.entry.lease_version(),
            };
            match slot.broker.lease(request).await.map(|leased| leased.into_iter().next()) {
                Ok(Some(leased)) => self.start(slot, leased),
                Ok(None) => return Ok(Some(slot)),
                Err(BrokerError::Stale) => {
                    self.idle.push(slot);
                    let outdated = self.connector.outdated(&self.entry).await;
                    outdated.map_err(|error| BrokerError::Unavailable(error.to_string()))?;
                }
                Err(error) => return Err(error),
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
        self.under_way.push(Box::pin(async move {
            let internal = |error: String| Failed { answer: PushAnswer::Internal, why: error, token: None };
            let leased = match connector.deliverable(&entry, vec![leased]).await {
                Ok(leased) => leased.into_iter().next(),
                Err(error) => return (slot, Some(Err(internal(error.to_string())))),
            };
            // Dropped or failed, and settled as such.
            let Some(leased) = leased else { return (slot, None) };
            meter.sent(Delivery::Push, 1, leased.message.len() as u64);
            let name = &entry.subscription.name;
            let created = [created(&leased.message)];
            let trace = connector.tracer().and_then(|tracer| tracer.begin(Operation::PUSH, name.project(), name.id(), created));
            let began = Instant::now();
            let pushed = post(&outside, &entry, &leased, timeout, trace.as_ref().and_then(|trace| trace.context())).await;
            if let Some(trace) = trace {
                let failed = pushed.as_ref().err().map(|failed| (failed.answer.label(), failed.why.as_str()));
                trace.end(|_| facts(&leased.message, leased.delivery_attempt), failed);
            }
            meter.push_latency.observe(began.elapsed());
            meter.pushed(pushed.as_ref().map_or_else(|failed| failed.answer, |()| PushAnswer::Acknowledged));
            if pushed.is_ok() {
                let settled = slot.broker.acknowledge(&slot.queue, &[leased.token]).await;
                note_settled(&entry, settled);
            }
            (slot, Some(pushed))
        }));
    }

    /// `pushed` is none when there was nothing to push.
    fn answered(&mut self, slot: Slot, pushed: Option<Pushed>) {
        if let Some(pushed) = pushed {
            let pausing = self.not_before > Instant::now();
            self.window.answered(pushed.is_ok(), pausing);
            if pushed.is_ok() || !pausing {
                self.not_before = Instant::now() + self.window.pause();
            }
            if let Err(failed) = pushed {
                self.complain(&failed.why);
                if let Some(token) = failed.token {
                    return self.give_back(slot, token);
                }
            }
        }
        // Asked first the next time: an ordering key may wait for it.
        self.idle.push(slot);
    }

    /// Gives a failed message back: only when the pause is set, because it may be leased again at once.
    fn give_back(&mut self, slot: Slot, token: LeaseToken) {
        let entry = self.entry.clone();
        let bypass_backoff = self.connector.options().nack_bypasses_backoff;
        self.under_way.push(Box::pin(async move {
            let nack = DeadlineChange { token, deadline_ms: 0, bypass_backoff, max_life_ms: 0 };
            let settled = slot.broker.modify_deadlines(&slot.queue, &[nack]).await;
            note_settled(&entry, settled);
            (slot, None)
        }));
    }

    fn complain(&mut self, why: &str) {
        let name = &self.entry.subscription.name;
        if self.complained.is_none_or(|at| at.elapsed() >= COMPLAINT) {
            self.complained = Some(Instant::now());
            tracing::warn!(subscription = %name, "pushes fail: {why}");
        } else {
            tracing::debug!(subscription = %name, "a push failed: {why}");
        }
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

/// Posts a message. Whatever keeps the endpoint from being asked is as bad as a refusal.
async fn post(
    outside: &Outside,
    entry: &SubscriptionEntry,
    leased: &Leased,
    timeout: Duration,
    trace: Option<Context>,
) -> Pushed {
    let subscription = &entry.subscription;
    let failed = |answer: PushAnswer, why: String| Failed { answer, why, token: Some(leased.token) };
    let internal = |why: String| failed(PushAnswer::Internal, why);
    let unreadable = || internal(format!("the stored message {} can't be read", leased.token.sequence));
    let (mut headers, body) = request::build(subscription, leased).ok_or_else(unreadable)?;
    match outside.issuer.authorization(subscription).await {
        Ok(Some(token)) => _ = headers.insert(header::AUTHORIZATION, token),
        Ok(None) => {}
        Err(error) => return Err(internal(format!("no token: {}", error.internal().unwrap_or("the broker is busy")))),
    }
    // An attribute of that name is the publisher's own affair.
    if let Some(value) = trace.and_then(|context| HeaderValue::try_from(context.traceparent()).ok()) {
        headers.entry("traceparent").or_insert(value);
    }
    let url = reqwest::Url::parse(&subscription.push_config.endpoint);
    let url = url.map_err(|error| internal(format!("the endpoint is no URL: {error}")))?;
    outside.guard.check(&url).map_err(|refused| internal(refused.to_string()))?;
    match outside.client.post(url).headers(headers).body(body).timeout(timeout).send().await {
        // The status alone decides; the body is not read.
        Ok(response) if request::acknowledges(response.status().as_u16()) => Ok(()),
        Ok(response) => {
            let status = response.status();
            Err(failed(PushAnswer::of_status(status.as_u16()), format!("the endpoint answered {status}")))
        }
        Err(error) => {
            let answer = if error.is_timeout() {
                PushAnswer::DeadlineExceeded
            } else if error.is_builder() {
                PushAnswer::Internal
            } else {
                PushAnswer::Unreachable
            };
            Err(failed(answer, causes(&error.without_url())))
        }
    }
}

/// An error with what caused it. Endpoints may hold secrets, so that the URL is left out.
fn causes(error: &reqwest::Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(next) = cause {
        text += &format!(": {next}");
        cause = next.source();
    }
    text
}
