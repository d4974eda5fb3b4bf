//! One pair, from start to drain.

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use tokio::{
    sync::mpsc,
    task::{JoinHandle, JoinSet},
};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};

use super::{
    Options, Route,
    copy::{Verdict, copy},
    lanes::{Batch, Fate, Lanes, Taken},
    progress::Progress,
    publish::{Destination, Pause, routed, text},
    source::{Settle, Source},
};
use crate::{
    api::proto::pubsub::{GetTopicRequest, ReceivedMessage, publisher_client::PublisherClient},
    client::Connection,
    model::EncodedMessage,
};

/// Messages a Publish request, as the API bounds them.
const BATCH_MESSAGES: usize = 1000;
/// Bytes a Publish request: well below the API's 10 MB, and enough to be fast.
const BATCH_BYTES: usize = 2 << 20;
/// Answers of streams that wait to be looked at.
const INCOMING: usize = 16;
/// Pause before refused messages are given back, so that they don't turn in a tight circle.
const HOLD_BACK: Duration = Duration::from_secs(2);

/// A pair at work.
struct Running {
    route: Route,
    options: Options,
    /// The topic of the subscription, where it may be known.
    source_topic: Option<String>,
    destinations: Vec<Destination>,
    settle: mpsc::UnboundedSender<Settle>,
    lanes: Lanes,
    publishing: JoinSet<(Batch, Vec<Fate>)>,
    /// To be given back at the next turn of the clock.
    held_back: Vec<String>,
    sent: usize,
    stop: CancellationToken,
    progress: Arc<Progress>,
}

/// Copies until `stop`.
pub async fn run(
    route: Route,
    options: Options,
    from: Vec<Connection>,
    to: Vec<Connection>,
    stop: CancellationToken,
    progress: Arc<Progress>,
) -> Result<(), String> {
    let publisher = |connection: &Connection| PublisherClient::new(connection.clone());
    let destinations: Vec<_> =
        to.iter().map(|connection| Destination { client: publisher(connection), topic: route.topic.clone() }).collect();
    let bounds = [options.outstanding, options.outstanding_bytes].map(|bound| bound.div_ceil(options.streams) as i64);
    let source = |connection: &Connection| {
        let deadline = options.ack_deadline_seconds as i32;
        Source::new(connection.clone(), route.subscription.clone(), deadline, (bounds[0], bounds[1]))
    };
    let Some(source_topic) = check(&mut source(&from[0]), &mut destinations[0].clone(), &stop, &progress).await? else {
        return Ok(());
    };

    let (out, incoming) = mpsc::channel(INCOMING);
    for n in 0..options.streams as usize {
        tokio::spawn(source(&from[n % from.len()]).receive(out.clone(), stop.clone(), progress.clone()));
    }
    drop(out);
    let (settle, work) = mpsc::unbounded_channel();
    // Acknowledgements don't wait behind messages on the same connection.
    let settling = tokio::spawn(source(&from[from.len() - 1]).settle(work, progress.clone()));
    let running = Running {
        route,
        options,
        source_topic: source_topic.filter(|topic| !topic.starts_with('_')),
        destinations,
        settle,
        lanes: Lanes::default(),
        publishing: JoinSet::new(),
        held_back: Vec::new(),
        sent: 0,
        stop,
        progress,
    };
    running.copy(incoming, settling).await;
    Ok(())
}

/// Sees whether both ends are there, for as long as they can't be reached; answers the source's topic, where the caller may
/// know it. `None` when `stop` came first.
async fn check(
    source: &mut Source,
    destination: &mut Destination,
    stop: &CancellationToken,
    progress: &Progress,
) -> Result<Option<Option<String>>, String> {
    let mut pause = Pause::default();
    loop {
        let name = destination.topic.clone();
        let there = destination.client.get_topic(routed(GetTopicRequest { topic: name.clone() }, "topic", &name)).await;
        let found = match there.map(drop).or_else(unless_denied) {
            Ok(()) => match source.get().await {
                Ok(subscription) => {
                    if !subscription.enable_message_ordering {
                        progress.tell("the subscription has no message ordering: messages with keys come in any order");
                    }
                    Ok(Some(subscription.topic))
                }
                Err(status) => unless_denied(status).map(|()| None).map_err(|e| (source.subscription.clone(), e)),
            },
            Err(status) => Err((name, status)),
        };
        match found {
            Ok(topic) => return Ok(Some(topic)),
            Err((name, status)) => match status.code() {
                Code::NotFound | Code::InvalidArgument | Code::Unauthenticated | Code::Unimplemented => {
                    return Err(format!("{name}: {}", text(&status)));
                }
                _ => progress.tell(&format!("{name}: {}", text(&status))),
            },
        }
        if !pause.wait(stop).await {
            return Ok(None);
        }
    }
}

/// Whoever may publish or pull may perhaps not look.
fn unless_denied(status: Status) -> Result<(), Status> {
    if status.code() == Code::PermissionDenied { Ok(()) } else { Err(status) }
}

impl Running {
    async fn copy(mut self, mut incoming: mpsc::Receiver<Vec<ReceivedMessage>>, settling: JoinHandle<()>) {
        let lease = Duration::from_secs(self.options.ack_deadline_seconds);
        let mut leases = tokio::time::interval(lease / 3);
        let mut hold_back = tokio::time::interval(HOLD_BACK);
        let stop = self.stop.clone();
        loop {
            self.publish();
            let (messages, bytes) = self.lanes.held();
            self.progress.waiting.store(messages as u64, Relaxed);
            // The source keeps to the bounds by itself, where it knows how.
            let room = messages < 2 * self.options.outstanding as usize && bytes < 2 * self.options.outstanding_bytes as usize;
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                _ = leases.tick() => {
                    let ids = self.lanes.tick();
                    self.send(Settle::Extend, ids);
                }
                _ = hold_back.tick() => self.give_back(),
                Some(done) = self.publishing.join_next() => self.settled(done.ok()),
                Some(received) = incoming.recv(), if room => self.take(received),
            }
        }
        self.drain(incoming, settling).await;
    }

    /// Starts requests as long as there are messages and places.
    fn publish(&mut self) {
        while self.publishing.len() < self.options.publishers as usize
            && let Some(batch) = self.lanes.next(BATCH_MESSAGES, BATCH_BYTES)
        {
            let destination = self.destinations[self.sent % self.destinations.len()].clone();
            self.sent += 1;
            let (stop, progress) = (self.stop.clone(), self.progress.clone());
            self.publishing.spawn(async move { destination.publish(batch, stop, &progress).await });
        }
    }

    fn take(&mut self, received: Vec<ReceivedMessage>) {
        let mut acks = Vec::new();
        for ReceivedMessage { ack_id, message, .. } in received {
            let id = EncodedMessage::sealed(&message).map(|(id, _)| id.to_owned());
            let verdict = copy(&message, self.source_topic.as_deref(), &self.route.topic);
            match (verdict, id) {
                (Verdict::Skip, _) => {
                    self.progress.skipped.fetch_add(1, Relaxed);
                    acks.push(ack_id);
                }
                (Verdict::Copy(message), Some(id)) => {
                    match self.lanes.take(&id, ack_id, message.ordering_key(), message.wire().clone()) {
                        Taken::New => {}
                        Taken::Held => _ = self.progress.repeated.fetch_add(1, Relaxed),
                        Taken::Confirmed(ack_id) => {
                            self.progress.repeated.fetch_add(1, Relaxed);
                            acks.push(ack_id);
                        }
                        Taken::Back(ack_id) => self.held_back.push(ack_id),
                    }
                }
                (Verdict::Copy(_) | Verdict::Malformed, _) => {
                    self.progress.refused.fetch_add(1, Relaxed);
                    self.progress.tell("a message can't be read and is given back");
                    self.held_back.push(ack_id);
                }
            }
        }
        self.send(Settle::Ack, acks);
    }

    fn settled(&mut self, done: Option<(Batch, Vec<Fate>)>) {
        let Some((batch, fates)) = done else {
            // Its messages are given back at the end, which is now.
            self.progress.tell("a request ended without an answer");
            return self.stop.cancel();
        };
        let (acks, nacks) = self.lanes.settle(batch, &fates);
        self.held_back.extend(nacks);
        self.send(Settle::Ack, acks);
    }

    fn give_back(&mut self) {
        self.lanes.unblock();
        let ids = std::mem::take(&mut self.held_back);
        self.send(Settle::Nack, ids);
    }

    fn send(&self, settle: fn(Vec<String>) -> Settle, ids: Vec<String>) {
        if !ids.is_empty() {
            // It ends after this.
            let _ = self.settle.send(settle(ids));
        }
    }

    /// Waits for the requests under way, acknowledges what they brought, and gives everything else back.
    async fn drain(mut self, mut incoming: mpsc::Receiver<Vec<ReceivedMessage>>, settling: JoinHandle<()>) {
        let limit = tokio::time::Instant::now() + Duration::from_secs(self.options.drain_seconds);
        let given_up = self.lanes.give_up();
        self.held_back.extend(given_up);
        self.give_back();
        // The streams end by themselves; what they still bring goes back too.
        while let Ok(Some(received)) = tokio::time::timeout_at(limit, incoming.recv()).await {
            self.send(Settle::Nack, received.into_iter().map(|message| message.ack_id).collect());
        }
        while let Ok(Some(done)) = tokio::time::timeout_at(limit, self.publishing.join_next()).await {
            self.settled(done.ok());
            self.give_back();
        }
        self.publishing.shutdown().await;
        let rest = self.lanes.rest();
        self.send(Settle::Nack, rest);
        self.progress.waiting.store(0, Relaxed);
        drop(self.settle);
        let limit = limit.max(tokio::time::Instant::now() + Duration::from_secs(5));
        if tokio::time::timeout_at(limit, settling).await.is_err() {
            self.progress.tell("the source could not be told of everything; its leases will end by themselves");
        }
    }
}
