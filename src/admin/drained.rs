//! Waiting until subscriptions are drained, for tests and for moves: `GET /drained?subscription=NAME&timeout=30s`.

use std::time::Duration;

use http::StatusCode;
use percent_encoding::percent_decode_str;
use serde_json::json;
use tokio::{sync::Semaphore, time::Instant};

use super::Admin;
use crate::{
    broker::QueueStats,
    connector::{Connector, Error},
    model::SubscriptionName,
};

/// How long is waited where the request does not say it, and the longest.
const TIMEOUT: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(600));
/// Pauses between two looks at the counts: the first, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(500));
/// Requests that wait at a time: half of the connections, so that probes and scrapes always have some.
static PLACES: Semaphore = Semaphore::const_new(32);

impl Admin {
    /// Answers 200 once nothing of the subscriptions waits or is leased, or 504 when that does not happen in time; both with
    /// the counts as JSON. Each look reads the counts of the broker itself, which every confirmed publish is part of.
    pub(super) async fn drained(&self, query: &str) -> (StatusCode, String) {
        let fault = |text: String| (StatusCode::BAD_REQUEST, json!({"error": text}).to_string());
        let (names, timeout) = match asked(query) {
            Ok(asked) => asked,
            Err(text) => return fault(text),
        };
        let Ok(_place) = PLACES.try_acquire() else {
            return (StatusCode::SERVICE_UNAVAILABLE, json!({"error": "too many requests wait already"}).to_string());
        };
        let limit = Instant::now() + timeout;
        let mut pause = PAUSES.0;
        loop {
            let looked = match self.connector.get() {
                Some(connector) => look(connector, &names).await,
                None => Err((StatusCode::SERVICE_UNAVAILABLE, "the broker is not ready yet".to_owned())),
            };
            let late = Instant::now() >= limit;
            match looked {
                Ok(counts) => {
                    let drained = counts.iter().all(|stats| stats.undelivered_messages + stats.dead_letters == 0);
                    if drained || late {
                        let status = if drained { StatusCode::OK } else { StatusCode::GATEWAY_TIMEOUT };
                        return (status, text(drained, &names, &counts));
                    }
                }
                Err((status, text)) if late || status == StatusCode::NOT_FOUND => {
                    return (status, json!({"error": text}).to_string());
                }
                Err(_) => {}
            }
            tokio::time::sleep_until((Instant::now() + pause).min(limit)).await;
            pause = (pause * 2).min(PAUSES.1);
        }
    }
}

async fn look(connector: &Connector, names: &[SubscriptionName]) -> Result<Vec<QueueStats>, (StatusCode, String)> {
    let mut counts = Vec::new();
    for name in names {
        counts.push(connector.backlog(name).await.map_err(|error| match error {
            Error::NotFound(_) => (StatusCode::NOT_FOUND, format!("{name}: there is no such subscription")),
            other => (StatusCode::SERVICE_UNAVAILABLE, format!("{name}: {other}")),
        })?);
    }
    Ok(counts)
}

fn text(drained: bool, names: &[SubscriptionName], counts: &[QueueStats]) -> String {
    let items = names.iter().zip(counts).map(|(name, stats)| {
        let leased = stats.outstanding_messages;
        let waiting = stats.undelivered_messages.saturating_sub(leased);
        json!({"subscription": name.as_str(), "waiting": waiting, "leased": leased})
    });
    json!({"drained": drained, "subscriptions": items.collect::<Vec<_>>()}).to_string()
}

/// The subscriptions and the time that a query names.
fn asked(query: &str) -> Result<(Vec<SubscriptionName>, Duration), String> {
    let (mut names, mut timeout) = (Vec::new(), TIMEOUT.0);
    for part in query.split('&').filter(|part| !part.is_empty()) {
        let (key, value) = part.split_once('=').unwrap_or((part, ""));
        let value = percent_decode_str(value).decode_utf8().map_err(|_| format!("{key}: must be UTF-8"))?;
        match key {
            "subscription" => names.push(SubscriptionName::parse(&value).map_err(|e| format!("subscription {value:?}: {e}"))?),
            "timeout" => timeout = duration(&value).ok_or_else(|| format!("timeout {value:?}: must be 0s to 600s"))?,
            other => return Err(format!("{other}: must be subscription or timeout")),
        }
    }
    if names.is_empty() {
        return Err("subscription: must be given, such as subscription=projects/shop/subscriptions/billing".into());
    }
    Ok((names, timeout))
}

/// `30s`, `1.5s` or `30`.
fn duration(text: &str) -> Option<Duration> {
    let seconds: f64 = text.trim_end_matches('s').parse().ok()?;
    let duration = Duration::try_from_secs_f64(seconds).ok()?;
    (duration <= TIMEOUT.1).then_some(duration)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_query_names_subscriptions_and_perhaps_a_time() {
        let (names, timeout) =
            asked("subscription=projects/p/subscriptions/abc&subscription=projects%2Fp%2Fsubscriptions%2Fa%2525").unwrap();
        let names: Vec<_> = names.iter().map(SubscriptionName::as_str).collect();
        assert_eq!(names, ["projects/p/subscriptions/abc", "projects/p/subscriptions/a%25"]);
        assert_eq!(timeout, Duration::from_secs(30));
        assert_eq!(asked("timeout=1.5s&subscription=projects/p/subscriptions/abc").unwrap().1, Duration::from_millis(1500));
        for (query, told) in [
            ("", "must be given"),
            ("subscription=abc", "abc"),
            ("subscription=projects/p/subscriptions/abc&timeout=1h", "timeout \"1h\": must be 0s to 600s"),
            ("subscription=projects/p/subscriptions/abc&timeout=-1", "must be 0s"),
            ("subscriptions=x", "subscriptions: must be subscription or timeout"),
        ] {
            let error = asked(query).unwrap_err();
            assert!(error.contains(told), "{query}: {error}");
        }
    }
}
