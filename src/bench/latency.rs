//! Messages at a steady rate, whatever the server does.

use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use super::{
    Options,
    client::{Client, message, now_nanos, read},
    report::{Report, Seen, Watch},
};
use crate::api::proto::pubsub::{PublishRequest, StreamingPullRequest};

pub async fn steady(options: &Options, client: &Client) -> Result<Report, String> {
    let (requests, mut responses) = client.stream(1, &client.subscriptions[0], 0).await?;
    let watch = Watch::start(options);
    let expected = options.messages;
    let patience = Duration::from_secs(options.patience_seconds);
    let receiving = tokio::spawn(async move {
        let mut seen = Seen::default();
        let mut distinct = std::collections::HashSet::new();
        while (distinct.len() as u64) < expected {
            let Ok(response) = tokio::time::timeout(patience, responses.message()).await else { break };
            let Ok(Some(response)) = response else { break };
            let now = now_nanos();
            let mut ack_ids = Vec::with_capacity(response.received_messages.len());
            for received in response.received_messages {
                if let Some((number, sent, _)) = read(&received.message) {
                    seen.delivered += 1;
                    seen.latencies.push(now.saturating_sub(sent) / 1000);
                    seen.duplicates += u64::from(!distinct.insert(number));
                }
                ack_ids.push(received.ack_id);
            }
            let _ = requests.send(StreamingPullRequest { ack_ids, ..Default::default() }).await;
        }
        seen.lost = expected - distinct.len() as u64;
        seen
    });
    let published = publish(options, client).await?;
    let seen = receiving.await.map_err(|e| e.to_string())?;
    Ok(watch.stop(options, published, seen))
}

/// Sends each request at its time. A late answer holds nothing back.
async fn publish(options: &Options, client: &Client) -> Result<u64, String> {
    let start = Instant::now();
    let mut tasks = JoinSet::new();
    let mut published = 0u64;
    for first in (0..options.messages).step_by(options.batch() as usize) {
        let due = Duration::from_nanos(first * 1_000_000_000 / options.rate);
        tokio::time::sleep_until((start + due).into()).await;
        let (mut publisher, topic, bytes) = (client.publisher(0), client.topic.clone(), options.bytes as usize);
        let numbers = first..(first + options.batch()).min(options.messages);
        tasks.spawn(async move {
            let messages = numbers.map(|number| message(number, bytes, "")).collect();
            let published = publisher.publish(PublishRequest { topic, messages }).await;
            published.map(|ids| ids.get_ref().message_ids.len() as u64).map_err(|e| format!("Publish: {e}"))
        });
        while let Some(done) = tasks.try_join_next() {
            published += done.map_err(|e| e.to_string())??;
        }
    }
    while let Some(done) = tasks.join_next().await {
        published += done.map_err(|e| e.to_string())??;
    }
    Ok(published)
}
