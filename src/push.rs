//! Push delivery: a consumer of a subscription whose sink is an HTTP endpoint.
//!
//! One worker a push subscription, on one of the nodes, leases messages, posts them and settles them by the answer: 102,
//! 200, 201, 202 and 204 acknowledge, everything else, also a time-out or a broken connection, is a failed delivery.
//! Source: the push page of the public Pub/Sub documentation.

mod guard;
mod issuer;
mod keys;
mod nodes;
mod request;
mod window;
mod worker;

use std::{collections::HashMap, path::PathBuf, sync::Arc, time::Duration};

use tokio::{
    sync::{broadcast::error::RecvError, mpsc},
    time::{Instant, sleep_until},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    broker::{Event, Kind},
    connector::Connector,
    model::SubscriptionName,
};

/// How often the list of push subscriptions is compared with the workers, whatever the events said.
const REVIEW: Duration = Duration::from_secs(60);
/// Records read at once.
const PAGE: usize = 500;

pub use issuer::{Issuer, Page, has_page};

use guard::Guard;
use nodes::Nodes;
use worker::Outside;

/// How pushes are sent.
#[derive(Debug, Clone)]
pub struct Options {
    /// Whether endpoints may be on this machine or in private networks.
    pub private_networks: bool,
    /// Certificates that are trusted beside those of the system, as PEM; empty for none.
    pub ca_file: PathBuf,
}

/// All push workers of this node.
pub struct Pusher {
    connector: Arc<Connector>,
    outside: Arc<Outside>,
    workers: HashMap<String, CancellationToken>,
    nodes: Nodes,
    tracker: TaskTracker,
    stop: CancellationToken,
    /// Names of subscriptions whose worker has ended.
    ended: mpsc::UnboundedReceiver<String>,
    ends: mpsc::UnboundedSender<String>,
}

impl Pusher {
    /// Prepares push delivery; [`run`](Self::run) does it.
    ///
    /// # Errors
    /// What keeps the HTTP client from being set up: no trusted certificates, or a file of them that can't be read.
    pub fn new(
        connector: Arc<Connector>,
        issuer: Arc<Issuer>,
        options: &Options,
        stop: CancellationToken,
    ) -> Result<Self, String> {
        let guard = Guard { private_networks: options.private_networks };
        let client = request::client(guard, &options.ca_file)?;
        let outside = Arc::new(Outside { client, guard, issuer });
        let (ends, ended) = mpsc::unbounded_channel();
        let nodes = Nodes::new(connector.broker().clone());
        let (workers, tracker) = (HashMap::new(), TaskTracker::new());
        Ok(Self { connector, outside, workers, nodes, tracker, stop, ended, ends })
    }

    /// Keeps one worker for every push subscription until told to stop; then waits for the requests under way.
    pub async fn run(mut self) {
        let mut events = self.connector.broker().events();
        let mut review_at = Instant::now() + REVIEW;
        let (mut next_beat, mut began) = (self.nodes.is_shared().then(Instant::now), false);
        if next_beat.is_none() {
            self.review().await;
        }
        loop {
            let event = tokio::select! {
                () = self.stop.cancelled() => break,
                Some(name) = self.ended.recv() => {
                    // What ended it may have changed again since.
                    self.workers.remove(&name);
                    self.look_at(&name).await;
                    continue;
                }
                () = beat(next_beat) => {
                    next_beat = Some(Instant::now() + nodes::BEAT);
                    match self.nodes.beat().await {
                        // The first beat makes the first review.
                        Ok(changed) if changed || !std::mem::replace(&mut began, true) => self.review().await,
                        Ok(_) => {}
                        Err(error) => tracing::debug!(%error, "can't tell other nodes what this one pushes"),
                    }
                    continue;
                }
                event = tokio::time::timeout_at(review_at, events.recv()) => event,
            };
            match event {
                Ok(Ok(Event::RecordChanged { kind: Kind::Subscription, name })) => self.look_at(&name).await,
                Ok(Ok(Event::RecordChanged { .. } | Event::DeadLetters(_))) => {}
                Ok(Ok(Event::Reset) | Err(RecvError::Lagged(_))) | Err(_) => {
                    self.review().await;
                    review_at = Instant::now() + REVIEW;
                }
                Ok(Err(RecvError::Closed)) => break,
            }
        }
        for worker in self.workers.values() {
            worker.cancel();
        }
        self.tracker.close();
        self.tracker.wait().await;
        self.nodes.leave().await;
    }

    /// Looks at every subscription.
    async fn review(&mut self) {
        let mut after = String::new();
        loop {
            let page = match self.connector.broker().list(Kind::Subscription, "projects/", &after, PAGE).await {
                Ok(page) => page,
                Err(error) => return tracing::warn!(%error, "push subscriptions can't be listed"),
            };
            for record in &page {
                self.look_at(&record.name).await;
            }
            match page.last() {
                Some(last) if page.len() == PAGE => after.clone_from(&last.name),
                _ => return,
            }
        }
    }

    /// Starts or stops the worker of one subscription. A worker follows changes of its subscription by itself.
    async fn look_at(&mut self, name: &str) {
        let owned = self.nodes.owns(name);
        if let Some(worker) = self.workers.get(name) {
            if !owned {
                worker.cancel();
            }
            return;
        }
        if !owned {
            return;
        }
        let Ok(parsed) = SubscriptionName::parse(name) else { return };
        let Ok(entry) = self.connector.subscription(&parsed).await else { return };
        if !worker::wants_push(&entry) {
            return;
        }
        let stop = self.stop.child_token();
        self.workers.insert(name.to_owned(), stop.clone());
        let worker = worker::run(self.connector.clone(), self.outside.clone(), entry, stop);
        let (ends, name) = (self.ends.clone(), name.to_owned());
        self.tracker.spawn(async move {
            worker.await;
            // Nobody listens once the pusher itself has ended.
            let _ = ends.send(name);
        });
    }
}

/// Resolves at a time, or never.
async fn beat(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}
