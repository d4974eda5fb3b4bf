//! Moving a subscription over its retained messages while another is in use.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use parking_lot::Mutex;
use prost_types::Timestamp;

use super::{
    Options,
    client::{Client, message},
    load,
    report::{Percentiles, Phase, Report, Watch},
};
use crate::api::proto::pubsub::{
    AcknowledgeRequest, CreateSnapshotRequest, DeleteSnapshotRequest, PublishRequest, SeekRequest, seek_request::Target,
};

/// The neighbour works this long before the first step and after each.
const AROUND: Duration = Duration::from_secs(2);
/// Between two messages of the neighbour.
const PAUSE: Duration = Duration::from_millis(2);

/// Round trips of the neighbour, publish to acknowledged: when each began, and how long it took.
pub type Trips = Arc<Mutex<Vec<(Instant, Duration)>>>;

/// Publishes, then takes a snapshot, seeks to the future, the past and the snapshot, and receives everything.
pub async fn seek(options: &Options, client: &Client) -> Result<Report, String> {
    let published = load::publish_all(options, client, 0).await?;
    let (stop, trips) = (Arc::new(AtomicBool::new(false)), Trips::default());
    let neighbour = tokio::spawn(neighbour(client.beside().await?, options.bytes as usize, stop.clone(), trips.clone()));
    let watch = Watch::start(options);
    let mut phases = Vec::new();
    let mut subscriber = client.subscriber(0);
    let (subscription, snapshot) = (client.subscriptions[0].clone(), client.snapshot());
    for step in ["nothing", "take a snapshot", "seek to the future", "seek to the past", "seek to the snapshot"] {
        tokio::time::sleep(AROUND).await;
        let began = Instant::now();
        let to = |target| SeekRequest { subscription: subscription.clone(), target: Some(target) };
        let done = match step {
            "nothing" => {
                tokio::time::sleep(AROUND).await;
                Ok(())
            }
            "take a snapshot" => {
                let request =
                    CreateSnapshotRequest { name: snapshot.clone(), subscription: subscription.clone(), ..Default::default() };
                subscriber.create_snapshot(request).await.map(drop)
            }
            "seek to the future" => subscriber.seek(to(Target::Time(time(Duration::from_secs(3600))))).await.map(drop),
            "seek to the past" => subscriber.seek(to(Target::Time(Timestamp { seconds: 1, nanos: 0 }))).await.map(drop),
            _ => subscriber.seek(to(Target::Snapshot(snapshot.clone()))).await.map(drop),
        };
        done.map_err(|e| format!("{step}: {e}"))?;
        let seconds = began.elapsed().as_secs_f64();
        tokio::time::sleep(PAUSE * 10).await;
        // A round trip that was under way counts as well.
        let during =
            |(start, took): &(Instant, Duration)| *start + *took >= began && *start <= began + Duration::from_secs_f64(seconds);
        let others = trips.lock().iter().filter(|trip| during(trip)).map(|(_, took)| took.as_micros() as u64).collect();
        phases.push(Phase { step: step.to_owned(), seconds, neighbour_us: Percentiles::of(others) });
    }
    stop.store(true, Ordering::Relaxed);
    neighbour.await.map_err(|e| e.to_string())??;
    let seen = load::receive_all(options, load::open_streams(options, client).await?, false, published).await?;
    let _ = subscriber.delete_snapshot(DeleteSnapshotRequest { snapshot }).await;
    Ok(Report { phases, ..watch.stop(options, published, load::without_latencies(seen)) })
}

fn time(ahead: Duration) -> Timestamp {
    Timestamp::from(SystemTime::now() + ahead)
}

/// Publishes, receives and acknowledges one message after the other until it is told to stop.
pub async fn neighbour(client: Client, bytes: usize, stop: Arc<AtomicBool>, trips: Trips) -> Result<(), String> {
    let (mut publisher, mut subscriber) = (client.publisher(1), client.subscriber(1));
    let subscription = client.subscriptions[0].clone();
    let (_requests, mut responses) = client.stream(1, &subscription, 0).await?;
    let mut number = 0;
    while !stop.load(Ordering::Relaxed) {
        let began = Instant::now();
        let request = PublishRequest { topic: client.topic.clone(), messages: vec![message(number, bytes, "")] };
        publisher.publish(request).await.map_err(|e| format!("Publish of the neighbour: {e}"))?;
        let mut ack_ids = Vec::new();
        while ack_ids.is_empty() {
            let response = responses.message().await.map_err(|e| format!("StreamingPull of the neighbour: {e}"))?;
            let response = response.ok_or("the neighbour's stream ended")?;
            ack_ids.extend(response.received_messages.into_iter().map(|m| m.ack_id));
        }
        let request = AcknowledgeRequest { subscription: subscription.clone(), ack_ids };
        subscriber.acknowledge(request).await.map_err(|e| format!("Acknowledge of the neighbour: {e}"))?;
        trips.lock().push((began, began.elapsed()));
        number += 1;
        tokio::time::sleep(PAUSE).await;
    }
    client.remove().await;
    Ok(())
}
