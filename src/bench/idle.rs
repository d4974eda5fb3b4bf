//! Streams that have nothing to do: what they take, and whether another subscription notices them.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use futures::{StreamExt, TryStreamExt, stream};

use super::{
    Options,
    client::{AT_ONCE, Client},
    report::{Percentiles, Phase, Report, Seen, Watch},
    seek::{Trips, neighbour},
};

/// How long they are watched.
const IDLE: Duration = Duration::from_secs(10);

pub async fn idle(options: &Options, client: &Client) -> Result<Report, String> {
    let began = Instant::now();
    let opened = stream::iter(0..options.subscriptions * options.streams).map(async |n| {
        let subscription = &client.subscriptions[(n % options.subscriptions) as usize];
        client.stream(n as usize, subscription, 0).await
    });
    let streams: Vec<_> = opened.buffer_unordered(AT_ONCE).try_collect().await?;
    let mut phases = vec![Phase { step: "open".to_owned(), seconds: began.elapsed().as_secs_f64(), neighbour_us: None }];
    let watch = Watch::start(options);
    tokio::time::sleep(IDLE).await;
    let alone = watch.stop(options, 0, Seen::default());

    let (stop, trips) = (Arc::new(AtomicBool::new(false)), Trips::default());
    let working = tokio::spawn(neighbour(client.beside().await?, options.bytes as usize, stop.clone(), trips.clone()));
    tokio::time::sleep(IDLE).await;
    stop.store(true, Ordering::Relaxed);
    working.await.map_err(|e| e.to_string())??;
    let times = trips.lock().iter().map(|(_, took)| took.as_micros() as u64).collect();
    phases.push(Phase { step: "idle".to_owned(), seconds: IDLE.as_secs_f64(), neighbour_us: Percentiles::of(times) });
    drop(streams);
    Ok(Report { phases, ..alone })
}
