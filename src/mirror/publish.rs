//! One request to the destination, for as long as it takes.

use std::{ops::Range, sync::atomic::Ordering::Relaxed, time::Duration};

use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};

use super::{
    lanes::{Batch, Fate},
    progress::Progress,
};
use crate::{
    api::proto::pubsub::{PublishRequest, publisher_client::PublisherClient},
    client::Connection,
};

/// Pauses before a request is sent again: the first, and the longest.
pub const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(15));
/// A request without an answer is sent again after this time.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The destination of a pair.
#[derive(Clone)]
pub struct Destination {
    pub client: PublisherClient<Connection>,
    pub topic: String,
}

/// A pause that doubles, with some chance in it, so that not everyone comes back at once.
pub struct Pause(Duration);

impl Default for Pause {
    fn default() -> Self {
        Self(PAUSES.0)
    }
}

impl Pause {
    /// Waits; false when `stop` came first.
    pub async fn wait(&mut self, stop: &CancellationToken) -> bool {
        let time = self.0.mul_f64(rand::random_range(0.5..1.5));
        self.0 = (self.0 * 2).min(PAUSES.1);
        tokio::select! {
            () = tokio::time::sleep(time) => true,
            () = stop.cancelled() => false,
        }
    }
}

/// Adds the header by which balancers find the node of a resource.
pub fn routed<T>(message: T, field: &str, name: &str) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    let name = percent_encoding::utf8_percent_encode(name, percent_encoding::NON_ALPHANUMERIC);
    if let Ok(value) = format!("{field}={name}").parse() {
        request.metadata_mut().insert("x-goog-request-params", value);
    }
    request
}

/// True for what a destination says of the messages themselves: trying again won't help.
fn is_refusal(status: &Status) -> bool {
    matches!(status.code(), Code::InvalidArgument | Code::OutOfRange)
}

impl Destination {
    /// Publishes a batch and answers what became of each message. After `stop` nothing is tried again.
    ///
    /// When the destination refuses a request because of its messages, its halves are tried, down to the bad ones. Of a key,
    /// nothing behind a bad one is published.
    pub async fn publish(mut self, batch: Batch, stop: CancellationToken, progress: &Progress) -> (Batch, Vec<Fate>) {
        let mut fates = vec![Fate::Untried; batch.items.len()];
        let mut ranges = Vec::from([Range { start: 0, end: batch.items.len() }]);
        while let Some(range) = ranges.pop() {
            match self.send(&batch, range.clone(), &stop, progress).await {
                None => break,
                Some(Ok(())) => fates[range].fill(Fate::Confirmed),
                Some(Err(_)) if range.len() > 1 => {
                    let middle = range.start + range.len() / 2;
                    ranges.push(middle..range.end);
                    ranges.push(range.start..middle);
                }
                Some(Err(status)) => {
                    fates[range.start] = Fate::Refused;
                    progress.refused.fetch_add(1, Relaxed);
                    let id = &batch.items[range.start].id;
                    progress.tell(&format!("message {id} is refused and given back: {}", text(&status)));
                    if batch.key.is_some() {
                        break;
                    }
                }
            }
        }
        (batch, fates)
    }

    /// Sends some messages until there is a final answer; `None` when there is none before `stop`.
    async fn send(
        &mut self,
        batch: &Batch,
        range: Range<usize>,
        stop: &CancellationToken,
        progress: &Progress,
    ) -> Option<Result<(), Status>> {
        let mut pause = Pause::default();
        loop {
            let messages: Vec<_> = batch.items[range.clone()].iter().map(|item| item.wire.clone()).collect();
            let (count, bytes) = (messages.len(), messages.iter().map(bytes::Bytes::len).sum::<usize>());
            let request = routed(PublishRequest { topic: self.topic.clone(), messages }, "topic", &self.topic);
            let answer = tokio::time::timeout(TIMEOUT, self.client.publish(request)).await;
            let status = match answer {
                Ok(Ok(answer)) if answer.get_ref().message_ids.len() == count => {
                    progress.copied.fetch_add(count as u64, Relaxed);
                    progress.bytes.fetch_add(bytes as u64, Relaxed);
                    return Some(Ok(()));
                }
                Ok(Ok(_)) => Status::internal("the answer has not as many ids as there are messages"),
                Ok(Err(status)) if is_refusal(&status) => return Some(Err(status)),
                Ok(Err(status)) => status,
                Err(_) => Status::deadline_exceeded("there was no answer within a minute"),
            };
            progress.tell(&format!("Publish: {}", text(&status)));
            if !pause.wait(stop).await {
                return None;
            }
            progress.retries.fetch_add(1, Relaxed);
        }
    }
}

/// A status in one line.
pub fn text(status: &Status) -> String {
    format!("{:?}: {}", status.code(), status.message())
}
