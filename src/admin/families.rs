//! The table of metrics: names, types, meanings, and where the values come from.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::{
    collect::{SubscriptionRow, TopicRow},
    exposition::Kind,
};
use crate::connector::meters::{Delivery, PushAnswer, StreamState, SubscriptionMeter};

/// One metric of topics or subscriptions.
pub struct Family<R> {
    pub name: &'static str,
    pub kind: Kind,
    /// Labels beside the resource's own two.
    pub label: &'static str,
    /// Name of the same metric in Google Cloud, after `pubsub.googleapis.com/`; empty where there is none.
    pub google: &'static str,
    /// One sentence without its full stop.
    pub about: &'static str,
    pub values: fn(&R) -> Values,
}

/// The values of one resource.
pub enum Values {
    One(f64),
    /// By the further label.
    Each(Vec<(&'static str, f64)>),
    /// The metric does not apply.
    None,
}

fn counted(counter: &AtomicU64) -> Values {
    Values::One(counter.load(Relaxed) as f64)
}

fn sent(meter: &SubscriptionMeter, which: fn((u64, u64)) -> u64) -> Values {
    Values::Each(Delivery::ALL.map(|(by, label)| (label, which(meter.sent_so_far(by)) as f64)).to_vec())
}

const fn topic(
    name: &'static str,
    label: &'static str,
    google: &'static str,
    about: &'static str,
    values: fn(&TopicRow) -> Values,
) -> Family<TopicRow> {
    Family { name, kind: Kind::Counter, label, google, about, values }
}

const fn gauge(
    name: &'static str,
    google: &'static str,
    about: &'static str,
    values: fn(&SubscriptionRow) -> Values,
) -> Family<SubscriptionRow> {
    Family { name, kind: Kind::Gauge, label: "", google, about, values }
}

const fn counter(
    name: &'static str,
    label: &'static str,
    google: &'static str,
    about: &'static str,
    values: fn(&SubscriptionRow) -> Values,
) -> Family<SubscriptionRow> {
    Family { name, kind: Kind::Counter, label, google, about, values }
}

/// Metrics of topics, labelled with `project_id` and `topic_id`.
pub static TOPICS: &[Family<TopicRow>] = &[
    topic(
        "landline_topic_send_messages_total",
        "",
        "topic/send_message_operation_count",
        "Messages published, forwarded dead letters included",
        |row| counted(&row.meter.messages),
    ),
    topic("landline_topic_sent_bytes_total", "", "topic/byte_cost", "Bytes of the messages published", |row| {
        counted(&row.meter.bytes)
    }),
    topic(
        "landline_topic_send_requests_total",
        "response_class",
        "topic/send_request_count",
        "Publish requests: success, invalid (the caller's fault), internal (ours)",
        |row| {
            let meter = &row.meter;
            let classes =
                [("success", &meter.requests), ("invalid", &meter.invalid_requests), ("internal", &meter.failed_requests)];
            Values::Each(classes.map(|(class, counter)| (class, counter.load(Relaxed) as f64)).to_vec())
        },
    ),
];

/// Metrics of subscriptions, labelled with `project_id` and `subscription_id`.
pub static SUBSCRIPTIONS: &[Family<SubscriptionRow>] = &[
    gauge(
        "landline_subscription_num_undelivered_messages",
        "subscription/num_undelivered_messages",
        "Messages not acknowledged, outstanding ones included",
        |row| Values::One(row.stats.undelivered_messages as f64),
    ),
    gauge(
        "landline_subscription_oldest_unacked_message_age_seconds",
        "subscription/oldest_unacked_message_age",
        "Age of the oldest message not acknowledged; 0 without one",
        |row| Values::One(row.oldest_age_seconds),
    ),
    gauge(
        "landline_subscription_num_outstanding_messages",
        "subscription/num_outstanding_messages",
        "Messages under a lease",
        |row| Values::One(row.stats.outstanding_messages as f64),
    ),
    gauge("landline_subscription_backlog_bytes", "subscription/backlog_bytes", "Bytes of the messages not acknowledged", |row| {
        Values::One(row.stats.backlog_bytes as f64)
    }),
    gauge("landline_subscription_num_delayed_messages", "", "Messages that wait for the end of their backoff", |row| {
        Values::One(row.stats.delayed_messages as f64)
    }),
    gauge("landline_subscription_num_dead_letters", "", "Messages that wait to be forwarded to the dead-letter topic", |row| {
        Values::One(row.stats.dead_letters as f64)
    }),
    gauge(
        "landline_subscription_num_retained_acked_messages",
        "subscription/num_retained_acked_messages",
        "Acknowledged messages kept for seeking",
        |row| Values::One(row.stats.retained_acked_messages as f64),
    ),
    Family {
        name: "landline_subscription_open_streaming_pulls",
        kind: Kind::Gauge,
        label: "state",
        google: "subscription/open_streaming_pulls",
        about: "Open streams of this node: sending (the client has not taken the last response), waiting (for messages), \
                limited (by flow control)",
        values: |row| Values::Each(StreamState::ALL.map(|(state, label)| (label, row.meter.streams(state) as f64)).to_vec()),
    },
    counter(
        "landline_subscription_sent_messages_total",
        "delivery_type",
        "subscription/sent_message_count",
        "Messages sent to clients, redeliveries included",
        |row| sent(&row.meter, |(messages, _)| messages),
    ),
    counter(
        "landline_subscription_sent_bytes_total",
        "delivery_type",
        "subscription/byte_cost",
        "Bytes of the messages sent to clients",
        |row| sent(&row.meter, |(_, bytes)| bytes),
    ),
    counter(
        "landline_subscription_ack_messages_total",
        "",
        "subscription/ack_message_count",
        "Acknowledgements carried out for clients that pull",
        |row| counted(&row.meter.acknowledged),
    ),
    counter("landline_subscription_nack_messages_total", "", "", "Nacks carried out for clients that pull", |row| {
        counted(&row.meter.nacked)
    }),
    counter(
        "landline_subscription_mod_ack_deadline_messages_total",
        "",
        "subscription/mod_ack_deadline_message_count",
        "Deadlines moved, nacks left out",
        |row| counted(&row.meter.extended),
    ),
    counter(
        "landline_subscription_refused_ack_ids_total",
        "",
        "",
        "Ack ids of exactly-once subscriptions that were refused",
        |row| counted(&row.meter.refused),
    ),
    counter(
        "landline_subscription_expired_ack_deadlines_total",
        "",
        "subscription/expired_ack_deadlines_count",
        "Leases that ran out, each counted by the node that noticed it",
        |row| row.stats.expired_leases.map_or(Values::None, |count| Values::One(count as f64)),
    ),
    counter(
        "landline_subscription_dead_letter_messages_total",
        "",
        "subscription/dead_letter_message_count",
        "Messages forwarded to the dead-letter topic",
        |row| counted(&row.meter.dead_lettered),
    ),
    counter(
        "landline_subscription_returned_dead_letters_total",
        "",
        "",
        "Messages that could not be forwarded and went back to the subscription",
        |row| counted(&row.meter.dead_letters_returned),
    ),
    counter("landline_subscription_pull_requests_total", "", "subscription/pull_request_count", "Pull requests", |row| {
        counted(&row.meter.pulls)
    }),
    counter(
        "landline_subscription_streaming_pull_responses_total",
        "",
        "subscription/streaming_pull_response_count",
        "Responses sent on streams",
        |row| counted(&row.meter.stream_responses),
    ),
    counter(
        "landline_subscription_push_requests_total",
        "response_class",
        "subscription/push_request_count",
        "Push requests by answer",
        |row| Values::Each(PushAnswer::ALL.map(|(answer, label)| (label, row.meter.pushed_so_far(answer) as f64)).to_vec()),
    ),
];

/// A metric of the server itself.
pub struct Fixed {
    pub name: &'static str,
    pub kind: Kind,
    /// Its labels, separated by commas.
    pub labels: &'static str,
    /// As [`Family::google`].
    pub google: &'static str,
    /// One sentence without its full stop.
    pub about: &'static str,
}

const fn fixed(name: &'static str, kind: Kind, labels: &'static str, about: &'static str) -> Fixed {
    Fixed { name, kind, labels, google: "", about }
}

pub static PUSH_LATENCY: Fixed = Fixed {
    name: "landline_subscription_push_request_latency_seconds",
    kind: Kind::Histogram,
    labels: "project_id, subscription_id",
    google: "subscription/push_request_latencies",
    about: "Time from a push request to its answer, for subscriptions that pushed",
};
pub static REQUESTS: Fixed = fixed(
    "landline_requests_total",
    Kind::Counter,
    "service, method, code",
    "Calls by their gRPC status code, over gRPC and REST; of streams the opening",
);
pub static LATENCY: Fixed = fixed(
    "landline_request_duration_seconds",
    Kind::Histogram,
    "service, method",
    "Time from a call to its answer, streams left out; a Pull may wait for messages",
);
pub static CONNECTIONS: Fixed = fixed("landline_connections", Kind::Gauge, "", "Open connections of the API's port");
pub static REFUSALS: Fixed = fixed(
    "landline_refusals_total",
    Kind::Counter,
    "reason",
    "Calls without valid credentials or without a permission; carried out in audit mode",
);
pub static READY: Fixed =
    fixed("landline_ready", Kind::Gauge, "", "1 while the server serves, 0 while the broker is away and while it drains");
pub static BUILD: Fixed = fixed("landline_build_info", Kind::Gauge, "version", "1, labelled with the program's version");
pub static SPANS: Fixed = fixed(
    "landline_otlp_spans_total",
    Kind::Counter,
    "outcome",
    "Spans for the OTLP collector: exported, dropped (no room to wait), failed (not taken); no samples without a collector",
);
pub static EXPORTS: Fixed = fixed(
    "landline_otlp_requests_total",
    Kind::Counter,
    "signal, outcome",
    "Requests to the OTLP collector, of traces and metrics: taken, refused; no samples without a collector",
);
pub static RESOURCES: Fixed = fixed("landline_resources", Kind::Gauge, "kind", "Topics and subscriptions of the whole broker");
pub static UNLISTED: Fixed = fixed(
    "landline_metered_out",
    Kind::Gauge,
    "kind",
    "Topics and subscriptions beyond the first 1,000 of each, which share the samples with the id _other",
);
pub static PROCESS: [Fixed; 6] = [
    fixed("process_cpu_seconds_total", Kind::Counter, "", "Processor time used"),
    fixed("process_resident_memory_bytes", Kind::Gauge, "", "Resident memory"),
    fixed("process_threads", Kind::Gauge, "", "Threads"),
    fixed("process_open_fds", Kind::Gauge, "", "Open file descriptors"),
    fixed("process_max_fds", Kind::Gauge, "", "File descriptors that may be open"),
    fixed("process_start_time_seconds", Kind::Gauge, "", "Start of the process, seconds since the epoch"),
];

/// The table of metrics for operators. Those of the broker are the engine's own and follow by their prefix.
pub fn markdown() -> String {
    let mut table = String::from("| metric | type | labels | in Google Cloud | meaning |\n|---|---|---|---|---|\n");
    let mut row = |name: &str, kind: Kind, labels: &str, google: &str, about: &str| {
        let google = if google.is_empty() { String::new() } else { format!("`{google}`") };
        table += &format!("| `{name}` | {} | {labels} | {google} | {about} |\n", kind.name());
    };
    let joined = |own: &str, further: &str| if further.is_empty() { own.to_owned() } else { format!("{own}, {further}") };
    for family in TOPICS {
        row(family.name, family.kind, &joined("project_id, topic_id", family.label), family.google, family.about);
    }
    for family in SUBSCRIPTIONS {
        row(family.name, family.kind, &joined("project_id, subscription_id", family.label), family.google, family.about);
    }
    let server =
        [&PUSH_LATENCY, &REQUESTS, &LATENCY, &CONNECTIONS, &REFUSALS, &READY, &BUILD, &SPANS, &EXPORTS, &RESOURCES, &UNLISTED];
    for fixed in server.into_iter().chain(&PROCESS) {
        row(fixed.name, fixed.kind, fixed.labels, fixed.google, fixed.about);
    }
    table
}
