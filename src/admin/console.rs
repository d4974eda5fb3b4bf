//! The page for people: what there is and how it fares, at this moment. It shows and changes nothing.

use std::{fmt::Write, sync::atomic::Ordering::Relaxed};

use super::{
    Admin,
    collect::{SubscriptionRow, TopicRow, subscription_rows, topic_rows},
};
use crate::connector::{
    Connector, Error,
    meters::{Delivery, PushAnswer, StreamState},
};

/// Nothing is loaded from anywhere, and no other page may frame this one.
pub const CONTENT_SECURITY_POLICY: &str =
    "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'";

const STYLE: &str = "
:root { color-scheme: light dark; font: 15px/1.45 system-ui, sans-serif; }
body { margin: 2rem auto; max-width: 84rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.state { border-radius: 1rem; padding: .1rem .7rem; font-size: .85rem; background: #1a7f37; color: #fff; vertical-align: middle; }
.state.away { background: #b42318; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #8884; white-space: nowrap; }
th { font-weight: 600; font-size: .85rem; } th:nth-child(-n+3), td:nth-child(-n+3) { text-align: left; }
table.topics th:nth-child(3), table.topics td:nth-child(3) { text-align: right; }
.scroll { overflow-x: auto; } .note { color: #777; } .old { color: #b42318; font-weight: 600; }
";

/// An age from which it is shown in red: the alert of the rules.
const OLD_SECONDS: f64 = 600.0;

impl Admin {
    /// The page.
    pub(super) async fn page(&self) -> String {
        let ready = (self.ready)().await;
        let mut html = String::from("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>Landline</title>");
        let _ = write!(html, "<meta name=\"viewport\" content=\"width=device-width\"><style>{STYLE}</style></head><body>");
        let (class, state) = if ready { ("state", "serving") } else { ("state away", "not serving") };
        let _ = write!(html, "<h1>Landline <span class=\"{class}\">{state}</span></h1>");
        let _ = write!(
            html,
            "<p>Version {}, {} open connections. <a href=\"/metrics\">Metrics</a> are for Prometheus; <a href=\"/readyz\">readyz</a> \
             and <a href=\"/livez\">livez</a> for probes. Counts are this node's since its start, backlogs the whole broker's.</p>",
            env!("CARGO_PKG_VERSION"),
            self.open_connections()
        );
        match self.connector.get() {
            Some(connector) => {
                let _turn = self.turn.lock().await;
                if let Err(error) = tables(&mut html, connector).await {
                    tracing::debug!(%error, "topics and subscriptions are left out of the page");
                    html += "<p>Topics and subscriptions can't be shown: the broker does not answer.</p>";
                }
            }
            None => html += "<p>The broker is not ready yet.</p>",
        }
        html += "</body></html>\n";
        html
    }
}

async fn tables(html: &mut String, connector: &Connector) -> Result<(), Error> {
    let (subscriptions, count, _) = subscription_rows(connector).await?;
    let (topics, topic_count, _) = topic_rows(connector).await?;
    let _ = write!(html, "<h2>Subscriptions ({count})</h2>");
    if subscriptions.is_empty() {
        *html += "<p class=\"note\">There are none.</p>";
    } else {
        *html += "<div class=\"scroll\"><table><tr><th>Project</th><th>Subscription</th><th>Delivery</th><th>Undelivered</th>\
                  <th>Oldest</th><th>Outstanding</th><th>Delayed</th><th>Backlog</th><th>Streams</th><th>Sent</th>\
                  <th>Acknowledged</th><th>Dead letters</th></tr>";
        subscriptions.iter().for_each(|row| subscription(html, row));
        *html += "</table></div>";
    }
    let _ = write!(html, "<h2>Topics ({topic_count})</h2>");
    if topics.is_empty() {
        *html += "<p class=\"note\">There are none.</p>";
    } else {
        *html += "<div class=\"scroll\"><table class=\"topics\"><tr><th>Project</th><th>Topic</th><th>Published</th><th>Bytes</th>\
                  <th>Refused</th></tr>";
        topics.iter().for_each(|row| topic(html, row));
        *html += "</table></div>";
    }
    Ok(())
}

fn subscription(html: &mut String, row: &SubscriptionRow) {
    let stats = &row.stats;
    let streams: Vec<String> = StreamState::ALL
        .into_iter()
        .map(|(state, name)| (row.meter.streams(state), name))
        .filter(|(count, _)| *count > 0)
        .map(|(count, name)| format!("{count} {name}"))
        .collect();
    let sent: u64 = Delivery::ALL.into_iter().map(|(by, _)| row.meter.sent_so_far(by).0).sum();
    let age = if row.oldest_age_seconds > OLD_SECONDS { "<td class=\"old\">" } else { "<td>" };
    let oldest = if stats.undelivered_messages == 0 { String::new() } else { duration(row.oldest_age_seconds) };
    let _ = writeln!(
        html,
        "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td>{age}{oldest}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td>\
         <td>{sent}</td><td>{}</td><td>{}</td></tr>",
        escaped(&row.project),
        escaped(&row.id),
        row.delivery,
        stats.undelivered_messages,
        stats.outstanding_messages,
        stats.delayed_messages,
        size(stats.backlog_bytes),
        streams.join(", "),
        row.meter.acknowledged.load(Relaxed) + row.meter.pushed_so_far(PushAnswer::Acknowledged),
        row.meter.dead_lettered.load(Relaxed),
    );
}

fn topic(html: &mut String, row: &TopicRow) {
    let meter = &row.meter;
    let _ = writeln!(
        html,
        "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
        escaped(&row.project),
        escaped(&row.id),
        meter.messages.load(Relaxed),
        size(meter.bytes.load(Relaxed)),
        meter.invalid_requests.load(Relaxed) + meter.failed_requests.load(Relaxed),
    );
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

fn duration(seconds: f64) -> String {
    let whole = seconds as u64;
    match whole {
        0..=59 => format!("{whole} s"),
        60..=3599 => format!("{} min", whole / 60),
        3600..=86_399 => format!("{} h", whole / 3600),
        _ => format!("{} d", whole / 86_400),
    }
}

fn size(bytes: u64) -> String {
    let units = [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.into_iter().find(|(unit, _)| bytes >= *unit) {
        Some((unit, name)) => format!("{:.1} {name}", bytes as f64 / unit as f64),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_for_people() {
        assert_eq!([0.4, 61.0, 7200.0, 200_000.0].map(duration), ["0 s", "1 min", "2 h", "2 d"]);
        assert_eq!([10, 2048, 5 << 20, 3 << 30].map(size), ["10 B", "2.0 KiB", "5.0 MiB", "3.0 GiB"]);
    }

    #[test]
    fn nothing_in_a_name_becomes_markup() {
        assert_eq!(escaped("<a href=\"x\">&"), "&lt;a href=&quot;x&quot;&gt;&amp;");
    }
}
