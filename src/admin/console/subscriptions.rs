//! Subscriptions: the list, and one with its settings and how it fares.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use askama::Template;
use futures::{StreamExt, stream};
use http::StatusCode;

use super::{
    Visit,
    exchange::{Answer, Failure, Frame, render},
    format,
    names::{self, Found, Search},
};
use crate::{
    broker::{Kind, QueueStats},
    connector::{
        Connector, Error,
        catalog::queue_ref,
        meters::{Delivery, PushAnswer, StreamState, SubscriptionMeter},
    },
    model::{ExpirationPolicy, PushWrapper, Subscription, SubscriptionName},
};

/// Queues asked for their state at a time: on Redis each is a round trip.
pub const STATS_AT_ONCE: usize = 64;
/// An age from which it is shown in red: the alert of the rules.
const OLD_SECONDS: f64 = 600.0;

/// The state of a subscription's queue; none when it has gone meanwhile, or its state can't be had.
pub async fn stats(connector: &Connector, subscription: &Subscription) -> Option<QueueStats> {
    connector.broker().stats(&queue_ref(subscription)).await.ok()
}

/// A subscription in a list.
pub struct Row {
    pub path: String,
    pub project: String,
    pub id: String,
    pub delivery: &'static str,
    /// None when the state can't be had.
    pub state: Option<State>,
    pub streams: String,
    pub sent: String,
}

/// How a queue fares.
pub struct State {
    pub undelivered: u64,
    pub oldest: String,
    pub is_old: bool,
    pub outstanding: u64,
    pub delayed: u64,
    pub dead_letters: u64,
    pub retained: u64,
    pub backlog: String,
    pub expired_leases: Option<u64>,
    pub last_used: String,
}

impl State {
    fn new(stats: &QueueStats, now_ms: u64) -> Self {
        let age = stats.oldest_unacked_ms.map(|at_ms| now_ms.saturating_sub(at_ms) as f64 / 1000.0);
        Self {
            undelivered: stats.undelivered_messages,
            oldest: age.map(format::duration).unwrap_or_default(),
            is_old: age.is_some_and(|age| age > OLD_SECONDS),
            outstanding: stats.outstanding_messages,
            delayed: stats.delayed_messages,
            dead_letters: stats.dead_letters,
            retained: stats.retained_acked_messages,
            backlog: format::size(stats.backlog_bytes),
            expired_leases: stats.expired_leases,
            last_used: format::duration(now_ms.saturating_sub(stats.last_active_ms) as f64 / 1000.0),
        }
    }
}

/// Rows of some subscriptions.
pub async fn rows(connector: &Connector, subscriptions: &[Subscription]) -> Vec<Row> {
    let asked: Vec<_> = subscriptions.iter().map(|subscription| stats(connector, subscription)).collect();
    let found: Vec<_> = stream::iter(asked).buffered(STATS_AT_ONCE).collect().await;
    let now_ms = connector.broker().now_ms();
    let row = |(subscription, stats): (&Subscription, Option<QueueStats>)| {
        let name = &subscription.name;
        let meter = meter(connector, name);
        Row {
            path: names::path_of("subscriptions", name.as_str()),
            project: name.project().to_owned(),
            id: name.id().to_owned(),
            delivery: delivery(subscription),
            state: stats.map(|stats| State::new(&stats, now_ms)),
            streams: meter.as_deref().map(streams).unwrap_or_default(),
            sent: meter.map(|meter| sent(&meter).to_string()).unwrap_or_default(),
        }
    };
    subscriptions.iter().zip(found).map(row).collect()
}

/// How messages leave.
pub fn delivery(subscription: &Subscription) -> &'static str {
    match subscription {
        Subscription { detached: true, .. } => "detached",
        Subscription { push_config, .. } if push_config.endpoint.is_empty() => "pull",
        _ => "push",
    }
}

/// The counters of a subscription; none when it has none of its own.
fn meter(connector: &Connector, name: &SubscriptionName) -> Option<Arc<SubscriptionMeter>> {
    connector.meters().subscriptions.own(&format!("{}/{}", name.project(), name.id()).into())
}

fn streams(meter: &SubscriptionMeter) -> String {
    let counts = StreamState::ALL.into_iter().map(|(state, name)| (meter.streams(state), name));
    let texts: Vec<_> = counts.filter(|(count, _)| *count > 0).map(|(count, name)| format!("{count} {name}")).collect();
    texts.join(", ")
}

fn sent(meter: &SubscriptionMeter) -> u64 {
    Delivery::ALL.into_iter().map(|(by, _)| meter.sent_so_far(by).0).sum()
}

#[derive(Template)]
#[template(path = "subscriptions.html")]
struct List {
    frame: Frame,
    search: Search,
    rows: Vec<Row>,
    next: Option<String>,
}

/// The list.
pub async fn list(visit: &Visit<'_>) -> Result<Answer, Failure> {
    let search = Search::new(&visit.ask.query);
    let found: Found<Subscription> = names::find(visit.connector, Kind::Subscription, "subscriptions", &search).await?;
    let rows = rows(visit.connector, &found.items).await;
    let next = found.next.map(|after| search.next("subscriptions", &after));
    let frame = visit.frame("subscriptions", "Subscriptions");
    Ok(render(StatusCode::OK, &List { frame, search, rows, next }))
}

#[derive(Template)]
#[template(path = "subscription.html")]
struct Page {
    frame: Frame,
    name: String,
    path: String,
    row: Row,
    topic: String,
    topic_path: String,
    topic_deleted: bool,
    counters: Vec<(&'static str, u64)>,
    rates: Option<(String, String)>,
    settings: Vec<(&'static str, String)>,
    labels: Vec<(String, String)>,
    transforms: Vec<(String, String)>,
}

/// One subscription.
pub async fn page(visit: &Visit<'_>, project: &str, id: &str) -> Result<Answer, Failure> {
    let connector = visit.connector;
    let name = SubscriptionName::new(project, id)?;
    let view = connector.get_subscription(&name).await?;
    let subscription = &view.subscription;
    let row = rows(connector, std::slice::from_ref(subscription)).await.pop().ok_or_else(Failure::nothing)?;
    let meter = meter(connector, &name);
    let counters = meter.as_deref().map(counters).unwrap_or_default();
    let rates = meter.as_deref().and_then(|meter| {
        let counts = [sent(meter), acknowledged(meter)];
        visit.console.rates.look(&queue_ref(subscription).channel, counts)
    });
    let page = Page {
        frame: visit.frame("subscriptions", name.id()),
        name: name.to_string(),
        path: row.path.clone(),
        row,
        topic: subscription.topic.to_string(),
        topic_path: names::path_of("topics", subscription.topic.as_str()),
        topic_deleted: view.topic.is_none(),
        counters,
        rates: rates.map(|[sent, acknowledged]| (format!("{sent:.1}"), format!("{acknowledged:.1}"))),
        settings: settings(subscription, visit.operator.is_some()),
        labels: subscription.labels.clone().into_iter().collect(),
        transforms: subscription.message_transforms.iter().map(|t| (t.function_name.clone(), t.code.clone())).collect(),
    };
    Ok(render(StatusCode::OK, &page))
}

fn acknowledged(meter: &SubscriptionMeter) -> u64 {
    meter.acknowledged.load(Relaxed) + meter.pushed_so_far(PushAnswer::Acknowledged)
}

fn counters(meter: &SubscriptionMeter) -> Vec<(&'static str, u64)> {
    vec![
        ("Sent", sent(meter)),
        ("Acknowledged", acknowledged(meter)),
        ("Nacked", meter.nacked.load(Relaxed)),
        ("Deadlines moved", meter.extended.load(Relaxed)),
        ("Ack ids refused", meter.refused.load(Relaxed)),
        ("Pull calls", meter.pulls.load(Relaxed)),
        ("Dead-lettered", meter.dead_lettered.load(Relaxed)),
    ]
}

/// An address without what may be a secret: its query.
fn endpoint(endpoint: &str, in_full: bool) -> String {
    match endpoint.split_once('?') {
        Some((address, _)) if !in_full => format!("{address}?…"),
        _ => endpoint.to_owned(),
    }
}

fn settings(subscription: &Subscription, in_full: bool) -> Vec<(&'static str, String)> {
    let yes = |flag: bool| if flag { "yes" } else { "no" }.to_owned();
    let ms = |ms: u64| format::duration(ms as f64 / 1000.0);
    let push = &subscription.push_config;
    let mut settings = vec![
        ("Ack deadline", format!("{} s", subscription.ack_deadline_seconds)),
        ("Message retention", ms(subscription.message_retention_ms)),
        ("Keeps acknowledged messages", yes(subscription.retain_acked_messages)),
        ("Message ordering", yes(subscription.enable_message_ordering)),
        ("Exactly-once delivery", yes(subscription.enable_exactly_once_delivery)),
        ("Expires", expiration(&subscription.expiration_policy)),
    ];
    if !subscription.filter.is_empty() {
        settings.push(("Filter", subscription.filter.clone()));
    }
    if let Some(policy) = &subscription.retry_policy {
        settings.push(("Backoff", format!("{} ms to {} ms", policy.minimum_backoff_ms, policy.maximum_backoff_ms)));
    }
    if let Some(policy) = &subscription.dead_letter_policy {
        let topic = policy.dead_letter_topic.as_ref().map_or_else(|| "no topic".to_owned(), ToString::to_string);
        settings.push(("Dead-letter topic", topic));
        settings.push(("Delivery attempts", policy.max_delivery_attempts.to_string()));
    }
    if !push.endpoint.is_empty() {
        settings.push(("Push endpoint", endpoint(&push.endpoint, in_full)));
        let wrapper = match push.wrapper {
            Some(PushWrapper::None { write_metadata: true }) => "none, with metadata",
            Some(PushWrapper::None { .. }) => "none",
            _ => "Pub/Sub",
        };
        settings.push(("Push wrapper", wrapper.to_owned()));
        settings.extend(push.oidc_token.iter().map(|token| ("Push identity", token.service_account_email.clone())));
    }
    settings
}

fn expiration(policy: &ExpirationPolicy) -> String {
    match policy {
        ExpirationPolicy::Never => "never".into(),
        ExpirationPolicy::After { seconds, .. } => format!("after {} without use", format::duration(*seconds as f64)),
    }
}

/// Rows of subscriptions by name; those that are gone are left out.
pub async fn rows_of(connector: &Connector, names: &[String]) -> Result<Vec<Row>, Error> {
    let mut found = Vec::new();
    for name in names.iter().filter_map(|name| SubscriptionName::parse(name).ok()) {
        match connector.subscription(&name).await {
            Ok(entry) => found.push(entry.subscription.clone()),
            Err(Error::NotFound(_)) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(rows(connector, &found).await)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_query_of_an_endpoint_is_for_operators() {
        let url = "https://example.com/push?token=secret";
        assert_eq!(endpoint(url, false), "https://example.com/push?…");
        assert_eq!(endpoint(url, true), url);
    }
}
