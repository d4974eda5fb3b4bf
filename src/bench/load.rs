//! Publishing and receiving as fast as the server goes.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::task::JoinSet;

use super::{
    Options, Scenario, Shaping,
    client::{Client, labelled_message, message, now_nanos, read, text_message},
    report::{Report, Seen, Watch},
};
use crate::api::proto::pubsub::{PublishRequest, StreamingPullRequest};

/// Messages a stream may have outstanding: enough to keep it busy, as the official clients' default.
const OUTSTANDING: i64 = 1000;

/// Publishes every message; answers how many the server confirmed.
pub async fn publish_all(options: &Options, client: &Client, keys: u64) -> Result<u64, String> {
    let next = Arc::new(AtomicU64::new(0));
    let mut tasks = JoinSet::new();
    for n in 0..options.publishers {
        let (mut publisher, topic, next, options) =
            (client.publisher(n as usize), client.topic.clone(), next.clone(), options.clone());
        tasks.spawn(async move {
            let mut confirmed = 0;
            loop {
                let first = next.fetch_add(options.batch(), Ordering::Relaxed);
                let end = (first + options.batch()).min(options.messages);
                if first >= end {
                    return Ok::<u64, String>(confirmed);
                }
                // One request carries one key, as the official clients do it; where keys are what is measured, one each.
                let share = if options.scenario == Scenario::Hold { 1 } else { options.batch() };
                let key = |number: u64| if keys == 0 { String::new() } else { format!("key-{}", number / share % keys) };
                let make = match (options.shaping, options.scenario) {
                    (Shaping::None, Scenario::Filtered) => labelled_message,
                    (Shaping::None, _) => message,
                    _ => text_message,
                };
                let messages = (first..end).map(|number| make(number, options.bytes as usize, &key(number))).collect();
                let request = PublishRequest { topic: topic.clone(), messages };
                let response = publisher.publish(request).await.map_err(|e| format!("Publish: {e}"))?;
                confirmed += response.into_inner().message_ids.len() as u64;
            }
        });
    }
    let mut confirmed = 0;
    while let Some(result) = tasks.join_next().await {
        confirmed += result.map_err(|e| e.to_string())??;
    }
    Ok(confirmed)
}

/// What the streams of one subscription have received.
struct Tally {
    bits: Vec<u64>,
    distinct: u64,
    last_of_key: HashMap<String, u64>,
    seen: Seen,
}

/// The streams of each subscription.
pub async fn open_streams(options: &Options, client: &Client) -> Result<Vec<Vec<Stream>>, String> {
    let mut opened = Vec::new();
    for subscription in &client.subscriptions {
        let mut streams = Vec::new();
        for n in 0..options.streams {
            streams.push(client.stream(n as usize, subscription, OUTSTANDING).await?);
        }
        opened.push(streams);
    }
    Ok(opened)
}

/// Receives until every message of every subscription was seen, or nothing comes any more.
pub async fn receive_all(options: &Options, streams: Vec<Vec<Stream>>, ordered: bool, expected: u64) -> Result<Seen, String> {
    let mut tasks = JoinSet::new();
    let mut tallies = Vec::new();
    for streams in streams {
        let bits = vec![0; expected.div_ceil(64) as usize];
        let tally = Arc::new(Mutex::new(Tally { bits, distinct: 0, last_of_key: HashMap::new(), seen: Seen::default() }));
        let done = Arc::new(tokio::sync::Notify::new());
        for stream in streams {
            let (tally, done) = (tally.clone(), done.clone());
            let patience = Duration::from_secs(options.patience_seconds);
            tasks.spawn(receive(stream, tally, done, ordered, expected, patience));
        }
        tallies.push(tally);
    }
    while let Some(result) = tasks.join_next().await {
        result.map_err(|e| e.to_string())??;
    }
    let mut total = Seen::default();
    for tally in tallies {
        let tally = tally.lock();
        total.delivered += tally.seen.delivered;
        total.duplicates += tally.seen.duplicates;
        total.out_of_order += tally.seen.out_of_order;
        total.lost += expected - tally.distinct;
        total.latencies.extend_from_slice(&tally.seen.latencies);
    }
    Ok(total)
}

/// What goes to the server and what comes from it.
pub type Stream =
    (tokio::sync::mpsc::Sender<StreamingPullRequest>, tonic::Streaming<crate::api::proto::pubsub::StreamingPullResponse>);

async fn receive(
    (requests, mut responses): Stream,
    tally: Arc<Mutex<Tally>>,
    done: Arc<tokio::sync::Notify>,
    ordered: bool,
    expected: u64,
    patience: Duration,
) -> Result<(), String> {
    loop {
        if tally.lock().distinct >= expected {
            done.notify_waiters();
            return Ok(());
        }
        let response = tokio::select! {
            () = done.notified() => return Ok(()),
            response = tokio::time::timeout(patience, responses.message()) => response,
        };
        let Ok(response) = response else { return Ok(()) };
        let Some(response) = response.map_err(|e| format!("StreamingPull: {e}"))? else { return Ok(()) };
        let ack_ids: Vec<String> = {
            let mut tally = tally.lock();
            response
                .received_messages
                .into_iter()
                .map(|m| {
                    tally.count(&m.message, ordered);
                    m.ack_id
                })
                .collect()
        };
        if !ack_ids.is_empty() {
            let _ = requests.send(StreamingPullRequest { ack_ids, ..Default::default() }).await;
        }
    }
}

impl Tally {
    fn count(&mut self, message: &bytes::Bytes, ordered: bool) {
        let Some((number, sent, message)) = read(message) else { return };
        self.seen.delivered += 1;
        self.seen.latencies.push(now_nanos().saturating_sub(sent) / 1000);
        let (word, bit) = ((number / 64) as usize, 1u64 << (number % 64));
        if self.bits.get(word).is_none_or(|w| w & bit != 0) {
            self.seen.duplicates += 1;
            return;
        }
        self.bits[word] |= bit;
        self.distinct += 1;
        if ordered {
            match self.last_of_key.get_mut(message.ordering_key()) {
                Some(last) if *last > number => self.seen.out_of_order += 1,
                Some(last) => *last = number,
                None => drop(self.last_of_key.insert(message.ordering_key().to_owned(), number)),
            }
        }
    }
}

pub async fn publish(options: &Options, client: &Client) -> Result<Report, String> {
    let watch = Watch::start(options);
    let published = publish_all(options, client, 0).await?;
    Ok(watch.stop(options, published, Seen { lost: options.messages - published, ..Seen::default() }))
}

pub async fn drain(options: &Options, client: &Client) -> Result<Report, String> {
    let published = publish_all(options, client, 0).await?;
    let watch = Watch::start(options);
    let seen = receive_all(options, open_streams(options, client).await?, false, published).await?;
    Ok(watch.stop(options, published, without_latencies(seen)))
}

/// Waiting in the backlog is no latency.
pub fn without_latencies(seen: Seen) -> Seen {
    Seen { latencies: Vec::new(), ..seen }
}

/// The server has to be set up to let so many messages be outstanding.
pub async fn hold(options: &Options, client: &Client) -> Result<Report, String> {
    let watch = Watch::start(options);
    let published = publish_all(options, client, options.keys).await?;
    let (_requests, mut responses) = client.stream(0, &client.subscriptions[0], i64::MAX).await?;
    let patience = Duration::from_secs(options.patience_seconds);
    let mut seen = Seen::default();
    while seen.delivered < published {
        match tokio::time::timeout(patience, responses.message()).await {
            Ok(Ok(Some(response))) => seen.delivered += response.received_messages.len() as u64,
            Ok(Err(status)) => return Err(format!("StreamingPull: {status}")),
            _ => break,
        }
    }
    seen.lost = published.saturating_sub(seen.delivered);
    Ok(watch.stop(options, published, seen))
}

pub async fn end_to_end(options: &Options, client: &Client, keys: u64) -> Result<Report, String> {
    let streams = open_streams(options, client).await?;
    let watch = Watch::start(options);
    let receiving = receive_all(options, streams, keys > 0, options.messages);
    // Ordered publishing waits for the answer before it sends the key's next batch: one publisher keeps every key's order.
    let publishing = Options { publishers: if keys > 0 { 1 } else { options.publishers }, ..options.clone() };
    let (published, seen) = tokio::join!(publish_all(&publishing, client, keys), receiving);
    Ok(watch.stop(options, published?, seen?))
}
