//! Metrics, readiness and liveness on the admin address.

use std::{collections::BTreeMap, net::TcpListener, time::Duration};

use landline::api::proto::pubsub::DeadLetterPolicy;
use tonic::Code;

use crate::{
    fixture::{Api, Backend, Fixture, api::acknowledge, eventually, message, message::Build, ports, sink::Sink, wait::SOON},
    for_one_backend, tests_on,
};

// One node each: the address is one.
tests_on! { [embedded Embedded, redis Redis, redis_cluster RedisCluster]
    a_backlog_is_told_as_it_is
    what_happens_to_messages_is_counted
    pushes_are_counted_by_their_answer
    every_metric_is_in_the_table
}
for_one_backend!(
    every_sample_has_the_labels_of_the_table,
    calls_are_counted_by_their_answer,
    probes_are_answered,
    a_taken_admin_address_stops_the_start,
    a_deleted_subscription_leaves_the_metrics,
);

/// A server with metrics, and where they are.
async fn start(backend: Backend) -> (Fixture, String) {
    let address = format!("127.0.0.1:{}", ports::reserve());
    let fixture = Fixture::start_with(backend, &[("ADMIN_ADDRESS", &address)]).await;
    (fixture, format!("http://{address}"))
}

/// The samples of a scrape by their series.
struct Scrape {
    text: String,
    samples: BTreeMap<String, f64>,
}

impl Scrape {
    async fn of(admin: &str) -> Self {
        let text = reqwest::get(format!("{admin}/metrics")).await.unwrap().text().await.unwrap();
        let samples = text.lines().filter(|line| !line.starts_with('#')).map(|line| {
            let (series, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("{line}"));
            (series.to_owned(), value.parse().unwrap_or_else(|e| panic!("{line}: {e}")))
        });
        Self { samples: samples.collect(), text }
    }

    fn get(&self, series: &str) -> f64 {
        *self.samples.get(series).unwrap_or_else(|| panic!("{series} is not in\n{}", self.text))
    }

    /// A metric of a subscription, with further labels, comma first.
    fn of_subscription(&self, metric: &str, name: &str, more: &str) -> f64 {
        let (project, id) = name.strip_prefix("projects/").and_then(|n| n.split_once("/subscriptions/")).unwrap();
        self.get(&format!("landline_subscription_{metric}{{project_id=\"{project}\",subscription_id=\"{id}\"{more}}}"))
    }

    fn of_topic(&self, metric: &str, name: &str, more: &str) -> f64 {
        let (project, id) = name.strip_prefix("projects/").and_then(|n| n.split_once("/topics/")).unwrap();
        self.get(&format!("landline_topic_{metric}{{project_id=\"{project}\",topic_id=\"{id}\"{more}}}"))
    }
}

async fn a_backlog_is_told_as_it_is(backend: Backend) {
    let (fixture, admin) = start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair_with(|s| s.ack_deadline_seconds = 600).await;
    let empty = Scrape::of(&admin).await;
    assert_eq!(empty.of_subscription("num_undelivered_messages", &subscription, ""), 0.0);
    assert_eq!(empty.of_subscription("oldest_unacked_message_age_seconds", &subscription, ""), 0.0);

    api.publish(&topic, ["one", "two", "three"].map(message)).await;
    let received = api.pull(&subscription, 2).await;
    api.ack(&subscription, &received[..1]).await;
    let told = Scrape::of(&admin).await;
    assert_eq!(told.of_subscription("num_undelivered_messages", &subscription, ""), 2.0);
    assert_eq!(told.of_subscription("num_outstanding_messages", &subscription, ""), 1.0);
    assert!(told.of_subscription("backlog_bytes", &subscription, "") >= 8.0);
    eventually("the age to grow", SOON, async || {
        Scrape::of(&admin).await.of_subscription("oldest_unacked_message_age_seconds", &subscription, "") > 0.2
    })
    .await;
    assert_eq!(told.get("landline_resources{kind=\"subscription\"}"), 1.0);
    assert_eq!(told.get("landline_metered_out{kind=\"subscription\"}"), 0.0);
}

async fn what_happens_to_messages_is_counted(backend: Backend) {
    let (fixture, admin) = start(backend).await;
    let api = fixture.api().await;
    let dead = api.create_topic("dead").await;
    let policy = DeadLetterPolicy { dead_letter_topic: dead.clone(), max_delivery_attempts: 5 };
    let (topic, subscription) = api.pair_with(|s| s.dead_letter_policy = Some(policy)).await;
    api.publish(&topic, ["good", "bad"].map(message)).await;
    let received = api.pull(&subscription, 2).await;
    api.extend(&subscription, &received, 60).await;
    api.ack(&subscription, received.iter().filter(|r| r.text() == "good")).await;
    let mut bad: Vec<_> = received.into_iter().filter(|r| r.text() == "bad").collect();
    for attempt in 1.. {
        api.nack(&subscription, &bad).await;
        if attempt == 5 {
            break;
        }
        bad = api.pull(&subscription, 1).await;
    }
    eventually("the message to be forwarded", SOON, async || {
        Scrape::of(&admin).await.of_topic("send_messages_total", &dead, "") == 1.0
    })
    .await;
    let counted = Scrape::of(&admin).await;
    assert_eq!(counted.of_topic("send_messages_total", &topic, ""), 2.0);
    assert!(counted.of_topic("sent_bytes_total", &topic, "") >= 7.0);
    assert_eq!(counted.of_topic("send_requests_total", &topic, ",response_class=\"success\""), 1.0);
    for (metric, more, expected) in [
        ("sent_messages_total", ",delivery_type=\"pull\"", 6.0),
        ("sent_messages_total", ",delivery_type=\"streaming_pull\"", 0.0),
        ("ack_messages_total", "", 1.0),
        ("nack_messages_total", "", 5.0),
        ("mod_ack_deadline_messages_total", "", 2.0),
        ("dead_letter_messages_total", "", 1.0),
        ("num_undelivered_messages", "", 0.0),
    ] {
        assert_eq!(counted.of_subscription(metric, &subscription, more), expected, "{metric}{more}");
    }

    let open = |scrape: &Scrape| {
        ["sending", "waiting", "limited"]
            .map(|state| scrape.of_subscription("open_streaming_pulls", &subscription, &format!(",state=\"{state}\"")))
    };
    let mut stream = api.stream_with(&subscription, |request| request.max_outstanding_messages = 1).await;
    eventually("the stream to wait", SOON, async || open(&Scrape::of(&admin).await) == [0.0, 1.0, 0.0]).await;
    api.publish(&topic, ["more", "still more"].map(message)).await;
    stream.message().await;
    eventually("the stream to be limited", SOON, async || open(&Scrape::of(&admin).await) == [0.0, 0.0, 1.0]).await;
    let counted = Scrape::of(&admin).await;
    assert_eq!(counted.of_subscription("sent_messages_total", &subscription, ",delivery_type=\"streaming_pull\""), 1.0);
    drop(stream);
    eventually("the stream to be gone", SOON, async || open(&Scrape::of(&admin).await) == [0.0; 3]).await;
}

async fn pushes_are_counted_by_their_answer(backend: Backend) {
    let (fixture, admin) = start(backend).await;
    let api = fixture.api().await;
    let sink = Sink::start().await;
    let (topic, subscription) = api
        .pair_with(|s| {
            s.push_config =
                Some(landline::api::proto::pubsub::PushConfig { push_endpoint: sink.url("/push"), ..Default::default() })
        })
        .await;
    api.publish(&topic, [message("m")]).await;
    sink.next().await;
    eventually("the answer to be counted", SOON, async || {
        Scrape::of(&admin).await.of_subscription("push_requests_total", &subscription, ",response_class=\"ack\"") == 1.0
    })
    .await;
    let counted = Scrape::of(&admin).await;
    assert_eq!(counted.of_subscription("sent_messages_total", &subscription, ",delivery_type=\"push\""), 1.0);
    assert_eq!(counted.of_subscription("push_request_latency_seconds_count", &subscription, ""), 1.0);
}

/// What the server tells is what the table for operators says, and the other way round.
async fn every_metric_is_in_the_table(backend: Backend) {
    let (fixture, admin) = start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair().await;
    api.publish(&topic, [message("m")]).await;
    api.pull(&subscription, 1).await;
    let scrape = Scrape::of(&admin).await;
    let head = |line: &str, what: &str| {
        line.strip_prefix(what).and_then(|l| l.split_once(' ')).map(|(n, t)| (n.to_owned(), t.to_owned()))
    };
    let mut told: Vec<_> = scrape.text.lines().filter_map(|line| head(line, "# TYPE ")).collect();
    told.retain(|(name, _)| !name.starts_with("landline_broker_"));
    let table = landline::admin::markdown();
    let mut listed: Vec<_> = table
        .lines()
        .skip(2)
        .map(|row| row.split(" | ").collect::<Vec<_>>())
        .map(|cells| (cells[0].trim_start_matches("| ").trim_matches('`').to_owned(), cells[1].to_owned()))
        .collect();
    told.sort();
    listed.sort();
    assert_eq!(told, listed);
    let file = include_str!("../../deploy/metrics.md");
    assert!(file.contains(&table), "the table in deploy/metrics.md should be:\n{table}");
    let of_broker = |line: &str, what: &str| line.strip_prefix(what).map(|rest| rest.replace([' ', '`'], ""));
    let mut told: Vec<_> = scrape.text.lines().filter_map(|line| of_broker(line, "# TYPE landline_broker_")).collect();
    let heading = if backend == Backend::Embedded { "Those of the embedded broker:" } else { "Those of a broker on Redis:" };
    let section = file.split_once(heading).and_then(|(_, rest)| rest.split("\n\n").nth(1)).unwrap_or_default();
    let rows = section.lines().filter_map(|row| of_broker(row, "| `landline_broker_"));
    let mut listed: Vec<_> = rows.map(|row| row.split('|').take(2).collect::<String>()).collect();
    told.sort();
    listed.sort();
    assert_eq!(told, listed, "the engine's metrics and those in deploy/metrics.md");
}

/// Series have the labels that the table says, and `le` in buckets.
async fn every_sample_has_the_labels_of_the_table(backend: Backend) {
    let (fixture, admin) = start(backend).await;
    let api = fixture.api().await;
    let sink = Sink::start().await;
    let (topic, subscription) = api.pair().await;
    let push = landline::api::proto::pubsub::PushConfig { push_endpoint: sink.url("/push"), ..Default::default() };
    api.create_subscription_with("pushed", &topic, |s| s.push_config = Some(push)).await;
    api.publish(&topic, [message("m")]).await;
    api.pull(&subscription, 1).await;
    sink.next().await;
    let table = landline::admin::markdown();
    let labels: BTreeMap<String, Vec<String>> = table
        .lines()
        .skip(2)
        .map(|row| row.split(" | ").collect::<Vec<_>>())
        .map(|cells| {
            let labels = cells[2].split(", ").map(str::trim).filter(|label| !label.is_empty()).map(str::to_owned).collect();
            (cells[0].trim_start_matches("| ").trim_matches('`').to_owned(), labels)
        })
        .collect();
    let mut seen = std::collections::BTreeSet::new();
    eventually("the push to be counted", SOON, async || {
        Scrape::of(&admin).await.text.contains("push_request_latency_seconds_sum")
    })
    .await;
    for series in Scrape::of(&admin).await.samples.keys().filter(|series| !series.starts_with("landline_broker_")) {
        let (name, rest) = series.split_once('{').unwrap_or((series, ""));
        let plain =
            ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end)).filter(|n| labels.contains_key(*n));
        let family = plain.unwrap_or(name);
        let mut found: Vec<_> = rest.split("\",").filter_map(|pair| Some(pair.split_once("=\"")?.0.to_owned())).collect();
        found.retain(|label| label != "le");
        assert_eq!(found, labels[family], "{series}");
        seen.insert(family.to_owned());
    }
    // Those without a sample here: no calls were refused, there is no collector, and leases have not run out.
    let unseen: Vec<_> = labels.keys().filter(|name| !seen.contains(*name)).map(String::as_str).collect();
    assert_eq!(unseen, ["landline_otlp_requests_total", "landline_otlp_spans_total"]);
}

async fn calls_are_counted_by_their_answer(backend: Backend) {
    let (fixture, admin) = start(backend).await;
    for (number, api) in fixture.apis().await.iter().enumerate() {
        let (topic, subscription) = api.pair().await;
        assert_eq!(api.fails(crate::fixture::api::pull(&api.subscription("none"), 1)).await, Code::NotFound);
        api.publish(&topic, [message("m")]).await;
        let received = api.pull(&subscription, 1).await;
        api.ok(acknowledge(&subscription, &received)).await;
        let calls = number as f64 + 1.0;
        let scrape = Scrape::of(&admin).await;
        let count = |method: &str, code: &str| {
            let service = if method == "Publish" { "Publisher" } else { "Subscriber" };
            let labels = format!("service=\"google.pubsub.v1.{service}\",method=\"{method}\"");
            scrape.get(&format!("landline_requests_total{{{labels},code=\"{code}\"}}"))
        };
        assert_eq!(count("Publish", "OK"), calls);
        assert_eq!(count("Pull", "NOT_FOUND"), calls);
        assert_eq!(count("Acknowledge", "OK"), calls);
        let latency = "landline_request_duration_seconds_count{service=\"google.pubsub.v1.Publisher\",method=\"Publish\"}";
        assert_eq!(scrape.get(latency), calls);
        assert!(scrape.get("landline_connections") >= 1.0);
    }
}

async fn probes_are_answered(backend: Backend) {
    let (fixture, admin) = start(backend).await;
    let status = async |path: &str| reqwest::get(format!("{admin}{path}")).await.unwrap().status().as_u16();
    assert_eq!([status("/readyz").await, status("/livez").await, status("/").await, status("/none").await], [200, 200, 200, 404]);
    let written = reqwest::Client::new().post(format!("{admin}/metrics")).send().await.unwrap();
    assert_eq!(written.status().as_u16(), 405);
    // A stream that its client does not end keeps the drain going, and the admin address tells of it.
    let api = fixture.api().await;
    let (_, subscription) = api.pair().await;
    let _stream = api.stream(&subscription).await;
    assert_eq!(Scrape::of(&admin).await.get("landline_ready"), 1.0);
}

async fn a_taken_admin_address_stops_the_start(backend: Backend) {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let refused = Fixture::try_start(backend, &[("ADMIN_ADDRESS", &address)]).err().expect("a refused start");
    assert!(refused.contains(&format!("can't listen on {address}")), "{refused}");
}

async fn a_deleted_subscription_leaves_the_metrics(backend: Backend) {
    let (fixture, admin) = start(backend).await;
    let api: Api = fixture.api().await;
    let (topic, subscription) = api.pair().await;
    api.publish(&topic, [message("m").attribute("a", "b")]).await;
    assert!(Scrape::of(&admin).await.text.contains("subscription_id="));
    api.delete_subscription(&subscription).await;
    eventually("its series to go", Duration::from_secs(10), async || !Scrape::of(&admin).await.text.contains("subscription_id="))
        .await;
}
