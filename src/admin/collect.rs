//! Collects the metrics at the moment of a scrape.

use std::{
    collections::HashSet,
    sync::{Arc, atomic::Ordering::Relaxed},
};

use futures::{StreamExt, stream};

use super::{
    Admin,
    exposition::{Kind, Labels, Sink, Text},
    families::{self, Family, Fixed, Values},
    process,
    requests::CODES,
};
use crate::{
    broker::{self, MeasureValue, QueueStats},
    connector::{
        Connector, Error,
        catalog::queue_ref,
        meters::{Meters, SubscriptionMeter, TopicMeter},
    },
    model::meter::HistogramView,
    telemetry::Signal,
};

/// Records read at once.
const PAGE: usize = 500;
/// Queues asked for their state at a time: on Redis each is a round trip.
const CONCURRENCY: usize = 64;
/// Stands for the id of what has no samples of its own; no id begins like this.
const OTHER: &str = "_other";

/// A topic's numbers, or those of several that share a sample.
pub struct TopicRow {
    pub project: String,
    pub id: String,
    pub meter: Arc<TopicMeter>,
}

/// A subscription's numbers, or those of several that share a sample.
pub struct SubscriptionRow {
    pub project: String,
    pub id: String,
    pub meter: Arc<SubscriptionMeter>,
    pub stats: QueueStats,
    pub oldest_age_seconds: f64,
}

/// Where samples say which resource they are of.
trait Row {
    fn names(&self) -> (&str, &str);
}

impl Row for TopicRow {
    fn names(&self) -> (&str, &str) {
        (&self.project, &self.id)
    }
}

impl Row for SubscriptionRow {
    fn names(&self) -> (&str, &str) {
        (&self.project, &self.id)
    }
}

impl Admin {
    /// Everything, as Prometheus reads it.
    pub(super) async fn metrics(&self) -> String {
        let mut text = Text::default();
        self.collect(&mut text).await;
        text.into_string()
    }

    /// Everything, now.
    pub(super) async fn collect(&self, text: &mut (dyn Sink + Send)) {
        let _turn = self.turn.lock().await;
        let ready = (self.ready)().await;
        one(text, &families::BUILD, &[("version", env!("CARGO_PKG_VERSION"))], 1.0);
        one(text, &families::READY, &[], f64::from(u8::from(ready)));
        one(text, &families::CONNECTIONS, &[], self.open_connections() as f64);
        if let Some(authenticator) = self.authenticator.get() {
            head(text, &families::REFUSALS);
            for (reason, count) in [("unauthenticated", authenticator.unauthenticated()), ("denied", authenticator.denied())] {
                text.sample(families::REFUSALS.name, &[("reason", reason)], count as f64);
            }
        }
        self.requests(text);
        self.exports(text);
        if let Some(connector) = self.connector.get() {
            broker_measures(text, &connector.broker().measures());
            // A broker that is away shows in `landline_ready`; the rest is still worth having.
            if let Err(error) = resources(text, connector).await {
                tracing::debug!(%error, "topics and subscriptions are left out of the metrics");
            }
        }
        if let Some(own) = process::read() {
            let values = [
                own.cpu_seconds,
                own.resident_bytes as f64,
                own.threads as f64,
                own.open_files as f64,
                own.max_files as f64,
                own.started_at,
            ];
            families::PROCESS.iter().zip(values).for_each(|(family, value)| one(text, family, &[], value));
        }
    }

    /// What became of telemetry sent by OTLP.
    fn exports(&self, text: &mut dyn Sink) {
        head(text, &families::SPANS);
        if let Some(counts) = self.exports.get() {
            for (outcome, counter) in [("exported", &counts.exported), ("dropped", &counts.dropped), ("failed", &counts.failed)] {
                text.sample(families::SPANS.name, &[("outcome", outcome)], counter.load(Relaxed) as f64);
            }
        }
        head(text, &families::EXPORTS);
        for (signal, label) in Signal::ALL {
            let Some(counts) = self.exports.get() else { break };
            for (outcome, counter) in ["taken", "refused"].into_iter().zip(&counts.requests[signal as usize]) {
                text.sample(families::EXPORTS.name, &[("signal", label), ("outcome", outcome)], counter.load(Relaxed) as f64);
            }
        }
    }

    fn requests(&self, text: &mut dyn Sink) {
        head(text, &families::REQUESTS);
        for (service, method, counts) in self.requests.called() {
            for (code, name) in CODES.iter().enumerate().filter(|(code, _)| counts.answered(*code) > 0) {
                let labels = [("service", service), ("method", method), ("code", *name)];
                text.sample(families::REQUESTS.name, &labels, counts.answered(code) as f64);
            }
        }
        head(text, &families::LATENCY);
        for (service, method, counts) in self.requests.called() {
            let view = counts.latency.view();
            if view != HistogramView::default() {
                text.histogram(families::LATENCY.name, &[("service", service), ("method", method)], &view);
            }
        }
    }
}

fn head(text: &mut dyn Sink, family: &Fixed) {
    text.head(family.name, family.kind, family.about);
}

fn one(text: &mut dyn Sink, family: &Fixed, labels: Labels, value: f64) {
    head(text, family);
    text.sample(family.name, labels, value);
}

fn broker_measures(text: &mut dyn Sink, measures: &[broker::Measure]) {
    for measure in measures {
        let name = format!("landline_broker_{}", measure.name);
        match &measure.value {
            MeasureValue::Counter(value) => {
                text.head(&name, Kind::Counter, measure.about);
                text.sample(&name, &[], *value as f64);
            }
            MeasureValue::Gauge(value) => {
                text.head(&name, Kind::Gauge, measure.about);
                text.sample(&name, &[], *value);
            }
            MeasureValue::Histogram(view) => {
                text.head(&name, Kind::Histogram, measure.about);
                text.histogram(&name, &[], view);
            }
        }
    }
}

async fn resources(text: &mut (dyn Sink + Send), connector: &Connector) -> Result<(), Error> {
    let (topics, topic_count, topics_beyond) = topic_rows(connector).await?;
    let (subscriptions, subscription_count, subscriptions_beyond) = subscription_rows(connector).await?;
    families::TOPICS.iter().for_each(|family| write(text, family, "topic_id", &topics));
    families::SUBSCRIPTIONS.iter().for_each(|family| write(text, family, "subscription_id", &subscriptions));
    head(text, &families::PUSH_LATENCY);
    for row in &subscriptions {
        let view = row.meter.push_latency.view();
        if view != HistogramView::default() {
            let labels = [("project_id", row.project.as_str()), ("subscription_id", row.id.as_str())];
            text.histogram(families::PUSH_LATENCY.name, &labels, &view);
        }
    }
    for (family, counts) in
        [(&families::RESOURCES, [topic_count, subscription_count]), (&families::UNLISTED, [topics_beyond, subscriptions_beyond])]
    {
        head(text, family);
        for (kind, count) in ["topic", "subscription"].into_iter().zip(counts) {
            text.sample(family.name, &[("kind", kind)], count as f64);
        }
    }
    Ok(())
}

fn write<R: Row>(text: &mut dyn Sink, family: &Family<R>, id_label: &str, rows: &[R]) {
    text.head(family.name, family.kind, family.about);
    for row in rows {
        let (project, id) = row.names();
        match (family.values)(row) {
            Values::One(value) => text.sample(family.name, &[("project_id", project), (id_label, id)], value),
            Values::Each(values) => {
                for (label, value) in values {
                    let labels = [("project_id", project), (id_label, id), (family.label, label)];
                    text.sample(family.name, &labels, value);
                }
            }
            Values::None => {}
        }
    }
}

/// The names of all records of a kind, without their prefix: `project/id`.
async fn channels(connector: &Connector, kind: broker::Kind, collection: &str) -> Result<HashSet<String>, Error> {
    let mut found = HashSet::new();
    let mut after = String::new();
    loop {
        let page = connector.broker().list(kind, "projects/", &after, PAGE).await?;
        for record in &page {
            let name = record.name.strip_prefix("projects/").and_then(|rest| rest.split_once(collection));
            found.extend(name.map(|(project, id)| format!("{project}/{id}")));
        }
        match page.last() {
            Some(last) if page.len() == PAGE => after.clone_from(&last.name),
            _ => return Ok(found),
        }
    }
}

fn split(channel: &str) -> (String, String) {
    let (project, id) = channel.split_once('/').unwrap_or((channel, ""));
    (project.to_owned(), id.to_owned())
}

/// Rows of topics, how many topics there are, and how many of them share the last row.
pub async fn topic_rows(connector: &Connector) -> Result<(Vec<TopicRow>, usize, usize), Error> {
    let Meters { topics: meters, .. } = connector.meters();
    let channels = channels(connector, broker::Kind::Topic, "/topics/").await?;
    meters.retain(|channel| channels.contains(channel));
    let mut beyond = 0;
    let mut rows = Vec::new();
    for channel in &channels {
        match meters.own(&channel.as_str().into()) {
            Some(meter) => {
                let (project, id) = split(channel);
                rows.push(TopicRow { project, id, meter });
            }
            None => beyond += 1,
        }
    }
    rows.sort_by(|a, b| a.names().cmp(&b.names()));
    let used = meters.rest().messages.load(Relaxed) > 0;
    if beyond > 0 || used {
        rows.push(TopicRow { project: String::new(), id: OTHER.into(), meter: meters.rest().clone() });
    }
    Ok((rows, channels.len(), beyond))
}

/// The same of subscriptions. What the broker knows of those without a row of their own is summed up in the last one.
pub async fn subscription_rows(connector: &Connector) -> Result<(Vec<SubscriptionRow>, usize, usize), Error> {
    let Meters { subscriptions: meters, .. } = connector.meters();
    let channels = channels(connector, broker::Kind::Subscription, "/subscriptions/").await?;
    meters.retain(|channel| channels.contains(channel));
    let now_ms = connector.broker().now_ms();
    let asked: Vec<_> = channels.iter().map(|channel| stats(connector, channel.clone())).collect();
    let found: Vec<_> = stream::iter(asked).buffer_unordered(CONCURRENCY).collect().await;
    let mut rest = SubscriptionRow {
        project: String::new(),
        id: OTHER.into(),
        meter: meters.rest().clone(),
        stats: QueueStats::default(),
        oldest_age_seconds: 0.0,
    };
    let mut beyond = 0;
    let mut rows = Vec::new();
    for (channel, stats) in found.into_iter().flatten() {
        let age_ms = stats.oldest_unacked_ms.map_or(0, |published_ms| now_ms.saturating_sub(published_ms));
        let oldest_age_seconds = age_ms as f64 / 1000.0;
        match meters.own(&channel.as_str().into()) {
            Some(meter) => {
                let (project, id) = split(&channel);
                rows.push(SubscriptionRow { project, id, meter, stats, oldest_age_seconds });
            }
            None => {
                beyond += 1;
                rest.include(&stats, oldest_age_seconds);
            }
        }
    }
    rows.sort_by(|a, b| a.names().cmp(&b.names()));
    if beyond > 0 {
        rows.push(rest);
    }
    Ok((rows, channels.len(), beyond))
}

impl SubscriptionRow {
    fn include(&mut self, stats: &QueueStats, oldest_age_seconds: f64) {
        self.oldest_age_seconds = self.oldest_age_seconds.max(oldest_age_seconds);
        let own = &mut self.stats;
        own.undelivered_messages += stats.undelivered_messages;
        own.backlog_bytes += stats.backlog_bytes;
        own.outstanding_messages += stats.outstanding_messages;
        own.delayed_messages += stats.delayed_messages;
        own.dead_letters += stats.dead_letters;
        own.retained_acked_messages += stats.retained_acked_messages;
        own.expired_leases = match (own.expired_leases, stats.expired_leases) {
            (None, None) => None,
            (a, b) => Some(a.unwrap_or_default() + b.unwrap_or_default()),
        };
    }
}

/// The state of one queue; none when the subscription has gone meanwhile, or its state can't be had.
async fn stats(connector: &Connector, channel: String) -> Option<(String, QueueStats)> {
    let (project, id) = channel.split_once('/')?;
    let name = crate::model::SubscriptionName::new(project, id).ok()?;
    let entry = connector.subscription(&name).await.ok()?;
    Some((channel, connector.broker().stats(&queue_ref(&entry.subscription)).await.ok()?))
}
