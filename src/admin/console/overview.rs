//! The first page: this node, its broker, and what there is altogether.

use std::{
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use askama::Template;
use futures::{StreamExt, stream};
use http::StatusCode;
use parking_lot::Mutex;

use super::{
    Visit,
    exchange::{Answer, Failure, Frame, render},
    format, names,
    subscriptions::{STATS_AT_ONCE, stats},
};
use crate::{
    admin::process,
    broker::{Kind, MeasureValue},
    connector::{Connector, Error, record},
    model::Subscription,
};

/// Records read at once.
const BATCH: usize = 500;
/// Totals are this old at most. With thousands of subscriptions on Redis they take a second to sum up.
const TOTALS_LIFE: Duration = Duration::from_secs(5);
/// Subscriptions with the largest backlogs that are shown.
const LARGEST: usize = 10;

/// A page waits this long for its totals, and does with former ones or none beyond it.
const TOTALS_PATIENCE: Duration = Duration::from_secs(2);

/// Sums over all subscriptions, kept for a while.
#[derive(Default)]
pub struct Totals {
    // Held while they are summed up: the second visitor waits for the first one's.
    turn: tokio::sync::Mutex<()>,
    known: Mutex<Option<(Instant, Arc<Summed>)>>,
}

#[derive(Default)]
struct Summed {
    topics: usize,
    subscriptions: usize,
    undelivered: u64,
    backlog_bytes: u64,
    outstanding: u64,
    delayed: u64,
    dead_letters: u64,
    oldest_ms: Option<u64>,
    /// By backlog, the largest first.
    largest: Vec<Large>,
}

struct Large {
    name: String,
    undelivered: u64,
    oldest_ms: Option<u64>,
    backlog_bytes: u64,
}

struct LargeRow {
    path: String,
    name: String,
    undelivered: u64,
    oldest: String,
    backlog: String,
}

#[derive(Template)]
#[template(path = "overview.html")]
struct Overview {
    frame: Frame,
    ready: bool,
    version: &'static str,
    node: String,
    connections: usize,
    uptime: String,
    memory: String,
    is_shared: bool,
    measures: Vec<(&'static str, String)>,
    totals: Option<Sums>,
    is_away: bool,
    largest: Vec<LargeRow>,
}

struct Sums {
    topics: usize,
    subscriptions: usize,
    undelivered: u64,
    backlog: String,
    outstanding: u64,
    delayed: u64,
    dead_letters: u64,
    oldest: String,
}

/// The page.
pub async fn page(visit: &Visit<'_>) -> Result<Answer, Failure> {
    let (admin, connector) = (visit.admin, visit.connector);
    let ready = (admin.ready)().await;
    let process = process::read();
    let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |now| now.as_secs_f64());
    let measures = connector.broker().measures().into_iter().filter_map(|measure| match measure.value {
        MeasureValue::Counter(value) => Some((measure.about, value.to_string())),
        MeasureValue::Gauge(value) if measure.name.ends_with("_bytes") => Some((measure.about, format::size(value as u64))),
        MeasureValue::Gauge(value) => Some((measure.about, value.to_string())),
        MeasureValue::Histogram(_) => None,
    });
    // A page without totals still says that the broker is away.
    let totals = visit.console.totals.get(connector).await.inspect_err(|error| tracing::debug!(%error, "no totals"));
    let is_away = totals.is_err();
    let totals = totals.ok().flatten();
    let now_ms = connector.broker().now_ms();
    let age = |at_ms: Option<u64>| at_ms.map(|at| format::duration(now_ms.saturating_sub(at) as f64 / 1000.0));
    let largest = totals.iter().flat_map(|totals| &totals.largest).map(|large| LargeRow {
        path: names::path_of("subscriptions", &large.name),
        name: large.name.clone(),
        undelivered: large.undelivered,
        oldest: age(large.oldest_ms).unwrap_or_default(),
        backlog: format::size(large.backlog_bytes),
    });
    let page = Overview {
        frame: visit.frame("overview", "Overview"),
        ready,
        version: env!("CARGO_PKG_VERSION"),
        node: connector.options().node_id.clone(),
        connections: admin.open_connections(),
        uptime: process.map_or_else(String::new, |process| format::duration(since - process.started_at)),
        memory: process.map_or_else(String::new, |process| format::size(process.resident_bytes)),
        is_shared: connector.broker().is_shared(),
        measures: measures.collect(),
        largest: largest.collect(),
        is_away,
        totals: totals.map(|totals| Sums {
            topics: totals.topics,
            subscriptions: totals.subscriptions,
            undelivered: totals.undelivered,
            backlog: format::size(totals.backlog_bytes),
            outstanding: totals.outstanding,
            delayed: totals.delayed,
            dead_letters: totals.dead_letters,
            oldest: age(totals.oldest_ms).unwrap_or_else(|| "none".into()),
        }),
    };
    Ok(render(StatusCode::OK, &page))
}

impl Totals {
    /// The sums; none while they are summed up for the first time.
    async fn get(self: &Arc<Self>, connector: &Arc<Connector>) -> Result<Option<Arc<Summed>>, Error> {
        let (totals, connector) = (self.clone(), connector.clone());
        // In a task of its own, which goes on for the next visitor.
        let task = tokio::spawn(async move {
            let _turn = totals.turn.lock().await;
            if let Some(totals) = totals.fresh() {
                return Ok(totals);
            }
            let summed = Arc::new(sum_up(&connector).await?);
            *totals.known.lock() = Some((Instant::now(), summed.clone()));
            Ok(summed)
        });
        match tokio::time::timeout(TOTALS_PATIENCE, task).await {
            Ok(Ok(summed)) => summed.map(Some),
            Ok(Err(error)) => Err(Error::Internal(format!("the totals were not summed up: {error}"))),
            Err(_) => Ok(self.known.lock().as_ref().map(|(_, totals)| totals.clone())),
        }
    }

    fn fresh(&self) -> Option<Arc<Summed>> {
        self.known.lock().as_ref().filter(|(at, _)| at.elapsed() < TOTALS_LIFE).map(|(_, totals)| totals.clone())
    }
}

async fn sum_up(connector: &Connector) -> Result<Summed, Error> {
    let mut sums = Summed { topics: count(connector, Kind::Topic).await?, ..Summed::default() };
    let mut after = String::new();
    loop {
        let records = connector.broker().list(Kind::Subscription, "projects/", &after, BATCH).await?;
        let subscriptions = records.iter().map(record::decode::<Subscription>).collect::<Result<Vec<_>, _>>()?;
        sums.subscriptions += subscriptions.len();
        let asked: Vec<_> = subscriptions.iter().map(|subscription| stats(connector, subscription)).collect();
        let found: Vec<_> = stream::iter(asked).buffered(STATS_AT_ONCE).collect().await;
        for (subscription, stats) in subscriptions.iter().zip(found) {
            let Some(stats) = stats else { continue };
            sums.undelivered += stats.undelivered_messages;
            sums.backlog_bytes += stats.backlog_bytes;
            sums.outstanding += stats.outstanding_messages;
            sums.delayed += stats.delayed_messages;
            sums.dead_letters += stats.dead_letters;
            sums.oldest_ms = [sums.oldest_ms, stats.oldest_unacked_ms].into_iter().flatten().min();
            if stats.undelivered_messages > 0 {
                sums.largest.push(Large {
                    name: subscription.name.to_string(),
                    undelivered: stats.undelivered_messages,
                    oldest_ms: stats.oldest_unacked_ms,
                    backlog_bytes: stats.backlog_bytes,
                });
            }
        }
        sums.largest.sort_by(|a, b| b.undelivered.cmp(&a.undelivered).then_with(|| a.name.cmp(&b.name)));
        sums.largest.truncate(LARGEST);
        match records.last() {
            Some(last) if records.len() == BATCH => after.clone_from(&last.name),
            _ => return Ok(sums),
        }
    }
}

async fn count(connector: &Connector, kind: Kind) -> Result<usize, Error> {
    let (mut count, mut after) = (0, String::new());
    loop {
        let records = connector.broker().list(kind, "projects/", &after, BATCH).await?;
        count += records.len();
        match records.last() {
            Some(last) if records.len() == BATCH => after.clone_from(&last.name),
            _ => return Ok(count),
        }
    }
}
