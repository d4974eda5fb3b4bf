//! The incoming half of a stream: settles what the client sends and decides when the stream ends.

use std::{pin::Pin, sync::Arc, time::Duration};

use futures::{
    FutureExt, Stream, StreamExt,
    stream::{Fuse, Peekable},
};
use rand::Rng;
use tokio::{
    sync::oneshot,
    time::{Instant, sleep_until},
};

use super::{Confirmation, StreamRequest, shared::Shared};
use crate::{
    broker::Outcome,
    connector::{Connector, Error, SubscriptionEntry, channel::Channel, pull::check_pullable, settle::undecided},
    rules::lease,
};

/// Requests settled after the server decided to end a stream: what a client sent before it could know. More than a
/// connection's receive buffer holds of the usual requests.
const MAX_LAST_REQUESTS: usize = 10_000;

/// Longest time the client gets to close its side after the end of a stream: several round trips, and short beside a drain.
const LINGER: Duration = Duration::from_secs(2);

/// A subscription that changes without pause is looked up this often.
const CHANGING_PAUSE: Duration = Duration::from_millis(50);

/// When the server stops, its streams end over this time, so that their clients don't all turn to other nodes at once.
const DRAIN_SPREAD: Duration = Duration::from_secs(1);

/// How often within the length of a lease unsent messages are looked at.
const LOOKS_PER_LEASE: u32 = 4;

/// What the client sends, one request ahead.
type Requests<S> = Pin<Box<Peekable<Fuse<Pin<Box<S>>>>>>;

pub(super) struct Incoming {
    pub connector: Arc<Connector>,
    pub channel: Arc<Channel>,
    pub shared: Arc<Shared>,
    pub answers_pings: bool,
    pub closes_at: Instant,
}

impl Incoming {
    /// Runs until the stream has to end, and tells the outgoing half. `gone` resolves when that half is no more.
    pub async fn run<S>(self, first: StreamRequest, requests: Pin<Box<S>>, gone: oneshot::Receiver<()>)
    where
        S: Stream<Item = Result<StreamRequest, Error>>,
    {
        let mut requests = Box::pin(requests.fuse().peekable());
        self.look_ahead(&mut requests);
        let end = match self.settle(first, true).await {
            Ok(()) => self.follow(&mut requests, gone).await,
            Err(error) => Err(error),
        };
        self.shared.end(end);
        // A client that is gone has closed its side too.
        let _ = tokio::time::timeout(LINGER, self.linger(&mut requests)).await;
    }

    /// Reads on until the client has closed its side, which it does when it hears of the end. To let go of the requests before
    /// would reset the stream, and a proxy may pass the reset on before the status: clients then take the end for another.
    async fn linger<S>(&self, requests: &mut Requests<S>)
    where
        S: Stream<Item = Result<StreamRequest, Error>>,
    {
        while let Some(Ok(request)) = requests.next().await {
            if self.settle(request, false).await.is_err() {
                return;
            }
        }
    }

    async fn follow<S>(&self, requests: &mut Requests<S>, mut gone: oneshot::Receiver<()>) -> Result<(), Error>
    where
        S: Stream<Item = Result<StreamRequest, Error>>,
    {
        let mut entry = self.shared.entry();
        let closes = sleep_until(self.closes_at);
        let drained = self.drain_turn();
        tokio::pin!(closes, drained);
        let mut look_at = None;
        loop {
            if !self.shared.is_watched() {
                look_at = None;
            } else if look_at.is_none() {
                look_at = Some(Instant::now() + self.look_period());
            }
            tokio::select! {
                request = requests.next(), if !self.shared.is_full() => match request {
                    Some(request) => {
                        self.look_ahead(requests);
                        self.settle(request?, false).await?;
                    }
                    None => return Ok(()),
                },
                () = entry.retired() => match self.look_up(&entry).await {
                    Ok(current) => entry = current,
                    Err(error) => return self.settle_rest(requests, error).await,
                },
                () = self.shared.taken.notified() => {}
                () = look(look_at) => {
                    look_at = None;
                    let overdue = self.shared.overdue(Instant::now() + self.look_period());
                    self.connector.delivery.release(&self.channel.queue, overdue);
                }
                () = &mut closes => return self.settle_rest(requests, Error::Closing).await,
                () = &mut drained => return self.settle_rest(requests, Error::Closing).await,
                _ = &mut gone => return self.settle_rest(requests, Error::Closing).await,
            }
        }
    }

    /// A client that closed its side with its last request gets no messages for what that request acknowledges.
    fn look_ahead<S>(&self, requests: &mut Requests<S>)
    where
        S: Stream<Item = Result<StreamRequest, Error>>,
    {
        if let Some(None) = requests.as_mut().peek().now_or_never() {
            self.shared.close();
        }
    }

    /// Settles what the client had already sent, and answers `end`.
    async fn settle_rest<S>(&self, requests: &mut Requests<S>, end: Error) -> Result<(), Error>
    where
        S: Stream<Item = Result<StreamRequest, Error>>,
    {
        for _ in 0..MAX_LAST_REQUESTS {
            let Some(Some(Ok(request))) = requests.next().now_or_never() else { break };
            self.settle(request, false).await?;
        }
        Err(end)
    }

    /// The subscription as it is now.
    async fn look_up(&self, known: &SubscriptionEntry) -> Result<Arc<SubscriptionEntry>, Error> {
        let name = &known.subscription.name;
        let entry = self.connector.subscription(name).await?;
        if entry.queue != known.queue {
            // Deleted and created again: another subscription, although of the same name.
            return Err(Error::not_found(name));
        }
        check_pullable(&entry)?;
        if entry.is_retired() {
            tokio::time::sleep(CHANGING_PAUSE).await;
        }
        self.shared.set_entry(entry.clone());
        Ok(entry)
    }

    /// Resolves some time after the server began to stop, on every stream at another time.
    async fn drain_turn(&self) {
        self.connector.delivery.draining.cancelled().await;
        let wait = rand::rng().random_range(Duration::ZERO..DRAIN_SPREAD);
        tokio::time::sleep(wait).await;
    }

    fn look_period(&self) -> Duration {
        Duration::from_millis(self.shared.deadline_ms()) / LOOKS_PER_LEASE
    }

    /// Carries out one request: first the acknowledgements, so that an id in both lists is acknowledged.
    async fn settle(&self, request: StreamRequest, first: bool) -> Result<(), Error> {
        if request.stream_ack_deadline_seconds != 0 {
            self.shared.set_deadline_ms(lease::stream_deadline_ms(request.stream_ack_deadline_seconds)?);
        }
        let is_ping = request.is_ping() && !first;
        let StreamRequest { ack_ids, modify_deadline_ack_ids: ids, modify_deadline_seconds: seconds, .. } = request;
        if ids.len() != seconds.len() {
            let why = format!("{} deadlines for {} ids of modify_deadline_ack_ids", seconds.len(), ids.len());
            return Err(Error::argument("modify_deadline_seconds", why));
        }
        let deadlines = seconds.iter().map(|seconds| self.connector.extension_ms(*seconds)).collect::<Result<Vec<_>, _>>()?;
        let entry = self.shared.entry();
        if !ack_ids.is_empty() {
            let outcomes = self.connector.acknowledge_on(&entry, &self.channel, &ack_ids).await;
            self.confirm(&entry, ack_ids, outcomes, |acknowledged, _| acknowledged)?;
        }
        if !ids.is_empty() {
            let deadline_ms = |index: usize| deadlines.get(index).copied().unwrap_or_default();
            let outcomes = self.connector.modify_on(&entry, &self.channel, &ids, deadline_ms).await;
            self.confirm(&entry, ids, outcomes, |_, modified| modified)?;
        }
        if is_ping && self.answers_pings {
            self.shared.ping();
        }
        Ok(())
    }

    /// With exactly-once delivery, the client hears what became of every id. Without, only a fault of the broker matters:
    /// it ends the stream, and the client comes back.
    fn confirm(
        &self,
        entry: &SubscriptionEntry,
        ids: Vec<String>,
        outcomes: Result<Vec<Outcome>, Error>,
        which: impl for<'a> FnOnce(&'a mut Confirmation, &'a mut Confirmation) -> &'a mut Confirmation,
    ) -> Result<(), Error> {
        let exactly_once = entry.subscription.enable_exactly_once_delivery;
        let outcomes = match outcomes {
            Err(Error::Unavailable(_) | Error::Full(_)) if exactly_once => vec![Outcome::Retry; ids.len()],
            outcomes => outcomes?,
        };
        if exactly_once {
            self.shared.confirm(|acknowledged, modified| {
                let confirmation = which(acknowledged, modified);
                for (id, outcome) in ids.into_iter().zip(outcomes) {
                    match outcome {
                        Outcome::Done => confirmation.done.push(id),
                        Outcome::Invalid => confirmation.invalid.push(id),
                        Outcome::Retry => confirmation.failed.push(id),
                    }
                }
            });
        } else if outcomes.contains(&Outcome::Retry) {
            return Err(undecided());
        }
        Ok(())
    }
}

/// Resolves at a time, or never.
async fn look(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}
