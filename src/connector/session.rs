//! StreamingPull: one session for each stream.
//!
//! A stream has two halves that share `Shared`. The incoming half is a task: it settles what the client sends, follows
//! the subscription's settings and decides when the stream ends. The outgoing half runs only when the transport asks for
//! the next response, so a client that does not read holds no more than one response.

mod incoming;
mod outgoing;
mod shared;

use std::{sync::Arc, time::Duration};

use futures::Stream;
use rand::Rng;
use tokio::{sync::oneshot, time::Instant};

use self::{incoming::Incoming, outgoing::Outgoing, shared::Shared};
use super::{Connector, Error, pull::Delivered};
use crate::{
    model::SubscriptionName,
    rules::{flow_control::Limits, lease},
    telemetry,
};

/// Streams end after their time give or take this part of it, so that they don't all come back at once.
const CLOSE_JITTER: f64 = 0.1;

/// The first request of a stream.
#[derive(Debug, Clone)]
pub struct Opening {
    pub subscription: SubscriptionName,
    /// Lease length of what this stream delivers, 10 to 600.
    pub stream_ack_deadline_seconds: i32,
    /// Zero or less for none.
    pub max_outstanding_messages: i64,
    /// Zero or less for none.
    pub max_outstanding_bytes: i64,
    /// From 1 on, the client expects an answer to its pings.
    pub protocol_version: i64,
    /// What the first request asks for besides.
    pub request: StreamRequest,
}

/// What any request of a stream may ask for.
#[derive(Debug, Clone, Default)]
pub struct StreamRequest {
    pub ack_ids: Vec<String>,
    pub modify_deadline_ack_ids: Vec<String>,
    /// One for each of `modify_deadline_ack_ids`.
    pub modify_deadline_seconds: Vec<i32>,
    /// A new lease length for what is delivered from now on; 0 keeps the old one.
    pub stream_ack_deadline_seconds: i32,
}

impl StreamRequest {
    /// Whether the client only wants to hear that the server is there.
    fn is_ping(&self) -> bool {
        self.ack_ids.is_empty() && self.modify_deadline_ack_ids.is_empty()
    }
}

/// A response of a stream.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StreamResponse {
    pub messages: Vec<Delivered>,
    /// With exactly-once delivery: what became of the ids acknowledged on this stream.
    pub acknowledged: Confirmation,
    /// With exactly-once delivery: what became of the deadlines changed on this stream.
    pub modified: Confirmation,
    /// The subscription's settings now.
    pub exactly_once: bool,
    pub ordered: bool,
}

/// What became of ack ids.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Confirmation {
    pub done: Vec<String>,
    pub invalid: Vec<String>,
    /// May be repeated.
    pub failed: Vec<String>,
}

impl Confirmation {
    /// Whether there is nothing to confirm.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn len(&self) -> usize {
        self.done.len() + self.invalid.len() + self.failed.len()
    }
}

impl Connector {
    /// Opens a stream. `requests` are those after the first; an error among them ends the stream with it, its end ends the
    /// stream well. The responses end with an error, or without one after the client has closed its side.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Detached`], [`Error::NotPullable`], [`Error::AckDeadline`], [`Error::Closing`].
    pub async fn stream(
        self: &Arc<Self>,
        opening: Opening,
        requests: impl Stream<Item = Result<StreamRequest, Error>> + Send + 'static,
    ) -> Result<impl Stream<Item = Result<StreamResponse, Error>> + Send + 'static, Error> {
        let deadline_ms = lease::stream_deadline_ms(opening.stream_ack_deadline_seconds)?;
        let entry = self.pullable(&opening.subscription).await?;
        if self.delivery.draining.is_cancelled() {
            return Err(Error::Closing);
        }
        let channel = self.delivery.channel(&entry.queue);
        let limits =
            Limits::new(opening.max_outstanding_messages, opening.max_outstanding_bytes, self.options.max_outstanding_messages);
        let shared = Arc::new(Shared::new(entry, deadline_ms));
        let (alive, gone) = oneshot::channel();
        let incoming = Incoming {
            connector: self.clone(),
            channel: channel.clone(),
            shared: shared.clone(),
            answers_pings: opening.protocol_version > 0,
            closes_at: Instant::now() + self.stream_life(),
        };
        let parent = telemetry::parent();
        let incoming = incoming.run(opening.request, Box::pin(requests), gone);
        self.delivery.tasks.spawn(telemetry::under(parent, incoming));
        Ok(Outgoing::new(self.clone(), channel, shared, limits, alive, parent).into_stream())
    }

    fn stream_life(&self) -> Duration {
        let jitter = rand::rng().random_range(-CLOSE_JITTER..CLOSE_JITTER);
        Duration::from_secs(self.options.stream_close_seconds).mul_f64(1.0 + jitter)
    }
}

#[cfg(test)]
mod tests;
