//! Metrics and spans that are sent to an OpenTelemetry collector.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use landline::api::proto::pubsub::{PushConfig, publisher_client::PublisherClient};
use opentelemetry_proto::tonic::{
    common::v1::any_value::Value,
    metrics::v1::{Metric, metric::Data, number_data_point},
    trace::v1::{Span, span::SpanKind},
};

use crate::{
    fixture::{
        Backend, Fixture,
        api::{channel, publish_request},
        certificates::Authority,
        collector::{self, Collector, Protocol},
        eventually, message,
        message::Build,
        ports,
        sink::Sink,
        wait::SOON,
    },
    for_one_backend, tests_on,
};

// One node each: what a node delivered is known to itself only.
tests_on! { [embedded Embedded, redis Redis, redis_cluster RedisCluster]
    a_message_is_followed_in_its_creator_s_trace_from_publish_to_ack
    a_stream_s_messages_are_followed_as_well
    metrics_are_those_of_the_metrics_page
}
for_one_backend!(
    a_call_is_a_part_of_what_its_header_says,
    a_call_that_fails_has_a_span_that_says_why,
    a_push_is_followed_into_the_endpoint,
    chance_decides_where_no_client_does,
    without_a_setting_nothing_is_recorded,
    a_collector_that_is_away_costs_no_call,
    a_refusal_that_passes_loses_no_span,
    the_last_spans_and_metrics_are_sent_before_the_end,
    a_collector_with_tls_and_a_password_is_spoken_to,
);

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const CREATED: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
const UNSAMPLED: &str = "00-1af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00";

async fn start(backend: Backend, collector: &Collector, more: &[(&str, &str)]) -> Fixture {
    let url = collector.url();
    let settings = [&[("OTLP_ENDPOINT", url.as_str()), ("OTLP_METRICS_SECONDS", "0")], more].concat();
    Fixture::start_with(backend, &settings).await
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn text(span: &Span, key: &str) -> Option<String> {
    collector::text(&span.attributes, key)
}

/// Waits for spans of these names, in this order, and no others.
async fn spans(collector: &Collector, names: &[&str]) -> Vec<Span> {
    eventually(&format!("spans {names:?}"), SOON, async || collector.spans().len() >= names.len()).await;
    let spans = collector.spans();
    assert_eq!(spans.iter().map(|span| span.name.as_str()).collect::<Vec<_>>(), names);
    spans
}

async fn a_message_is_followed_in_its_creator_s_trace_from_publish_to_ack(backend: Backend) {
    let collector = Collector::start(Protocol::Grpc).await;
    let fixture = start(backend, &collector, &[("OTLP_TRACES", "0"), ("NODE_ID", "node-1")]).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair().await;
    let plain = message("plain");
    let unsampled = message("unsampled").attribute("googclient_traceparent", UNSAMPLED);
    let traced = message("traced").attribute("googclient_traceparent", CREATED);
    let ids = api.publish(&topic, [plain, unsampled, traced]).await;
    let received = api.pull(&subscription, 3).await;
    api.extend(&subscription, &received, 60).await;
    api.nack(&subscription, &received).await;
    let again = api.pull(&subscription, 3).await;
    api.ack(&subscription, &again).await;
    let names = ["send orders", "receive billing", "modack billing", "nack billing", "receive billing", "ack billing"];
    let spans = spans(&collector, &names).await;
    for span in &spans {
        assert_eq!(hex(&span.trace_id), TRACE, "{span:?}");
        assert_eq!(text(span, "messaging.system").unwrap(), "gcp_pubsub");
        assert_eq!(text(span, "messaging.message.id").unwrap(), ids[2]);
        assert_eq!(text(span, "gcp.project_id").unwrap(), api.project);
        assert_eq!(span.kind(), SpanKind::Server);
        assert!(span.start_time_unix_nano <= span.end_time_unix_nano && span.status.is_none(), "{span:?}");
    }
    let operations: Vec<_> = spans.iter().map(|span| text(span, "messaging.operation.type").unwrap()).collect();
    assert_eq!(operations, ["send", "receive", "settle", "settle", "receive", "settle"]);
    assert_eq!(text(&spans[0], "messaging.destination.name").unwrap(), "orders");
    assert_eq!(text(&spans[1], "messaging.destination.subscription.name").unwrap(), "billing");
    // Delivered below the creator, settled below the delivery.
    for index in [0, 1, 4] {
        assert_eq!(hex(&spans[index].parent_span_id), "b7ad6b7169203331");
    }
    for (settled, delivered) in [(2, 1), (3, 1), (5, 4)] {
        assert_eq!(spans[settled].parent_span_id, spans[delivered].span_id);
    }
    assert_eq!(collector.resource("service.name").unwrap(), "landline");
    assert_eq!(collector.resource("service.instance.id").unwrap(), "node-1");
    assert_eq!(collector.resource("service.version").unwrap(), env!("CARGO_PKG_VERSION"));
}

async fn a_stream_s_messages_are_followed_as_well(backend: Backend) {
    let collector = Collector::start(Protocol::Http).await;
    let fixture = start(backend, &collector, &[("OTLP_TRACES", "0"), ("OTLP_PROTOCOL", "http")]).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair().await;
    let mut stream = api.stream(&subscription).await;
    api.publish(&topic, [message("traced").attribute("googclient_traceparent", CREATED)]).await;
    let received = stream.message().await;
    stream.ack(&received);
    let spans = spans(&collector, &["send orders", "receive billing", "ack billing"]).await;
    assert!(spans.iter().all(|span| hex(&span.trace_id) == TRACE), "{spans:?}");
    assert_eq!(spans[2].parent_span_id, spans[1].span_id);
}

async fn a_call_is_a_part_of_what_its_header_says(backend: Backend) {
    let collector = Collector::start(Protocol::Grpc).await;
    let fixture = start(backend, &collector, &[("OTLP_TRACES", "1")]).await;
    let api = fixture.api().await;
    let topic = api.create_topic("orders").await;
    let address = fixture.nodes[0].address;
    for header in [CREATED, UNSAMPLED] {
        let mut request = tonic::Request::new(publish_request(&topic, ["a", "b"].map(message)));
        request.metadata_mut().insert("traceparent", header.parse().unwrap());
        PublisherClient::new(channel(address)).publish(request).await.unwrap();
        let url = format!("http://{address}/v1/{topic}:publish");
        let call = reqwest::Client::new().post(url).header("traceparent", header).body("{\"messages\":[{\"data\":\"eA==\"}]}");
        assert!(call.send().await.unwrap().status().is_success());
    }
    // What the header says is not recorded is not, whatever the ratio.
    let spans = spans(&collector, &["send orders", "send orders"]).await;
    for (span, count) in spans.iter().zip([2, 1]) {
        assert_eq!((hex(&span.trace_id).as_str(), hex(&span.parent_span_id).as_str()), (TRACE, "b7ad6b7169203331"));
        assert_eq!(collector::value(&span.attributes, "messaging.batch.message_count"), Some(Value::IntValue(count)));
    }
    // A batch points to where its messages come from, and they to it.
    let mut request = tonic::Request::new(publish_request(
        &topic,
        [
            message("a"),
            message("b").attribute("googclient_traceparent", "00-2af7651916cd43dd8448eb211c80319c-c7ad6b7169203331-01"),
        ],
    ));
    request.metadata_mut().insert("traceparent", CREATED.parse().unwrap());
    PublisherClient::new(channel(address)).publish(request).await.unwrap();
    eventually("both spans", SOON, async || collector.spans().len() == 4).await;
    let spans = collector.spans();
    let find = |trace: &str| spans[2..].iter().find(|span| hex(&span.trace_id) == trace).unwrap();
    let (call, own) = (find(TRACE), find("2af7651916cd43dd8448eb211c80319c"));
    assert_eq!((call.links.len(), hex(&call.links[0].span_id).as_str()), (1, "c7ad6b7169203331"));
    assert_eq!((own.links.len(), &own.links[0].span_id), (1, &call.span_id));
}

async fn a_call_that_fails_has_a_span_that_says_why(backend: Backend) {
    let collector = Collector::start(Protocol::Grpc).await;
    let fixture = start(backend, &collector, &[("OTLP_TRACES", "1")]).await;
    let api = fixture.api().await;
    api.failure(publish_request(&api.topic("none"), [message("m")])).await;
    let spans = spans(&collector, &["send none"]).await;
    assert_eq!(text(&spans[0], "error.type").unwrap(), "NotFound");
    let status = spans[0].status.clone().unwrap();
    assert_eq!((status.code, status.message.as_str()), (2, "Resource not found (resource=none)."));
}

async fn a_push_is_followed_into_the_endpoint(backend: Backend) {
    let collector = Collector::start(Protocol::Grpc).await;
    let fixture = start(backend, &collector, &[("OTLP_TRACES", "0")]).await;
    let api = fixture.api().await;
    let sink = Sink::start().await;
    sink.next_answers(&[503]);
    let push = PushConfig { push_endpoint: sink.url("/push"), ..Default::default() };
    let (topic, _) = api.pair_with(|s| s.push_config = Some(push)).await;
    api.publish(&topic, [message("plain")]).await;
    assert_eq!(sink.next().await.header("traceparent"), None);
    assert_eq!(sink.next().await.header("traceparent"), None);
    sink.next_answers(&[503]);
    api.publish(&topic, [message("traced").attribute("googclient_traceparent", CREATED)]).await;
    let told = [sink.next().await, sink.next().await].map(|pushed| pushed.header("traceparent").unwrap().to_owned());
    let spans = spans(&collector, &["send orders", "push billing", "push billing"]).await;
    for (span, told) in spans[1..].iter().zip(&told) {
        assert_eq!(*told, format!("00-{TRACE}-{}-01", hex(&span.span_id)));
        assert_eq!((span.kind(), hex(&span.parent_span_id).as_str()), (SpanKind::Client, "b7ad6b7169203331"));
    }
    assert_eq!(text(&spans[1], "error.type").unwrap(), "remote_server_5xx");
    assert!(spans[2].status.is_none());
}

async fn chance_decides_where_no_client_does(backend: Backend) {
    let collector = Collector::start(Protocol::Grpc).await;
    let mut fixture = start(backend, &collector, &[("OTLP_TRACES", "0.5")]).await;
    let api = fixture.api().await;
    let topic = api.create_topic("orders").await;
    for _ in 0..200 {
        api.publish(&topic, [message("m")]).await;
    }
    fixture.nodes[0].terminate();
    assert!(fixture.nodes[0].wait(SOON).is_some());
    let spans = collector.spans();
    // 200 throws of a coin: beyond these bounds once in a billion runs.
    assert!((55..=145).contains(&spans.len()), "{}", spans.len());
    assert!(spans.iter().all(|span| span.parent_span_id.is_empty()));
    assert_eq!(spans.iter().map(|span| &span.trace_id).collect::<BTreeSet<_>>().len(), spans.len());
}

async fn without_a_setting_nothing_is_recorded(backend: Backend) {
    let collector = Collector::start(Protocol::Grpc).await;
    let mut fixture = start(backend, &collector, &[]).await;
    let api = fixture.api().await;
    let topic = api.create_topic("orders").await;
    let mut request = tonic::Request::new(publish_request(&topic, [message("a").attribute("googclient_traceparent", CREATED)]));
    request.metadata_mut().insert("traceparent", CREATED.parse().unwrap());
    PublisherClient::new(channel(fixture.nodes[0].address)).publish(request).await.unwrap();
    fixture.nodes[0].terminate();
    assert!(fixture.nodes[0].wait(SOON).is_some());
    assert!(collector.spans().is_empty() && collector.reports() == 0);
}

async fn a_collector_that_is_away_costs_no_call(backend: Backend) {
    let admin = format!("127.0.0.1:{}", ports::reserve());
    let away = format!("http://127.0.0.1:{}", ports::reserve());
    let settings =
        [("OTLP_ENDPOINT", away.as_str()), ("OTLP_TRACES", "1"), ("OTLP_METRICS_SECONDS", "1"), ("ADMIN_ADDRESS", &admin)];
    let mut fixture = Fixture::start_with(backend, &settings).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair().await;
    for _ in 0..50 {
        api.publish(&topic, [message("m")]).await;
    }
    let received = api.pull(&subscription, 50).await;
    api.ack(&subscription, &received).await;
    let page = async || reqwest::get(format!("http://{admin}/metrics")).await.unwrap().text().await.unwrap();
    eventually("the refusals to be counted", SOON, async || {
        let page = page().await;
        let count = |series: &str| page.lines().find_map(|line| line.strip_prefix(series)?.trim().parse::<f64>().ok()).unwrap();
        count("landline_otlp_requests_total{signal=\"traces\",outcome=\"refused\"}") >= 1.0
            && count("landline_otlp_requests_total{signal=\"metrics\",outcome=\"refused\"}") >= 1.0
            && count("landline_otlp_spans_total{outcome=\"exported\"}") == 0.0
    })
    .await;
    let since = Instant::now();
    fixture.nodes[0].terminate();
    assert!(fixture.nodes[0].wait(SOON).is_some_and(|status| status.success()));
    assert!(since.elapsed() < Duration::from_secs(12), "{:?}", since.elapsed());
    assert!(fixture.nodes[0].log_tail().contains("the OTLP collector does not take telemetry"));
}

async fn a_refusal_that_passes_loses_no_span(backend: Backend) {
    for protocol in [Protocol::Grpc, Protocol::Http] {
        let collector = Collector::start(protocol).await;
        collector.refuse(2);
        let name = if protocol == Protocol::Grpc { "grpc" } else { "http" };
        let fixture = start(backend, &collector, &[("OTLP_TRACES", "1"), ("OTLP_PROTOCOL", name)]).await;
        let api = fixture.api().await;
        let topic = api.create_topic("orders").await;
        api.publish(&topic, [message("m")]).await;
        spans(&collector, &["send orders"]).await;
    }
}

async fn the_last_spans_and_metrics_are_sent_before_the_end(backend: Backend) {
    let collector = Collector::start(Protocol::Grpc).await;
    let mut fixture = start(backend, &collector, &[("OTLP_TRACES", "1"), ("OTLP_METRICS_SECONDS", "86400")]).await;
    let api = fixture.api().await;
    let (topic, _) = api.pair().await;
    eventually("the first metrics", SOON, async || collector.reports() == 1).await;
    api.publish_texts(&topic, &["one", "two"]).await;
    fixture.nodes[0].terminate();
    assert!(fixture.nodes[0].wait(SOON).is_some_and(|status| status.success()));
    assert_eq!(collector.spans().len(), 1);
    assert_eq!(collector.reports(), 2);
    let metrics = collector.metrics().unwrap();
    assert_eq!(points(&metrics)["landline_subscription_num_undelivered_messages"].values().sum::<f64>(), 2.0);
}

/// The values of metrics by their names in Prometheus and their labels; of a histogram its count.
fn points(metrics: &[Metric]) -> BTreeMap<String, BTreeMap<String, f64>> {
    let mut all = BTreeMap::new();
    for metric in metrics {
        let mut name = metric.name.replace('.', "_");
        name += match metric.unit.as_str() {
            "s" => "_seconds",
            "By" => "_bytes",
            _ => "",
        };
        let labels = |attributes: &[_]| {
            let keys = |a: &opentelemetry_proto::tonic::common::v1::KeyValue| {
                (a.key.clone(), collector::text(attributes, &a.key).unwrap())
            };
            attributes.iter().map(keys).map(|(key, value)| format!("{key}=\"{value}\"")).collect::<Vec<_>>().join(",")
        };
        let number = |value: &Option<number_data_point::Value>| match value {
            Some(number_data_point::Value::AsDouble(value)) => *value,
            other => panic!("{other:?}"),
        };
        let values: BTreeMap<_, _> = match metric.data.as_ref().unwrap() {
            Data::Gauge(gauge) => gauge.data_points.iter().map(|p| (labels(&p.attributes), number(&p.value))).collect(),
            Data::Sum(sum) => {
                assert!(sum.is_monotonic && sum.aggregation_temporality == 2);
                name += "_total";
                sum.data_points.iter().map(|p| (labels(&p.attributes), number(&p.value))).collect()
            }
            Data::Histogram(histogram) => {
                assert_eq!(histogram.aggregation_temporality, 2);
                for point in &histogram.data_points {
                    assert_eq!(point.bucket_counts.len(), point.explicit_bounds.len() + 1);
                    assert_eq!(point.bucket_counts.iter().sum::<u64>(), point.count);
                }
                name += "_count";
                histogram.data_points.iter().map(|p| (labels(&p.attributes), p.count as f64)).collect()
            }
            other => panic!("{other:?}"),
        };
        assert!(all.insert(name.clone(), values).is_none(), "{name} twice");
    }
    all
}

async fn metrics_are_those_of_the_metrics_page(backend: Backend) {
    let admin = format!("127.0.0.1:{}", ports::reserve());
    for (protocol, name) in [(Protocol::Grpc, "grpc"), (Protocol::Http, "http")] {
        let collector = Collector::start(protocol).await;
        let settings = [
            ("OTLP_PROTOCOL", name),
            ("OTLP_METRICS_SECONDS", "1"),
            ("OTLP_RESOURCE_ATTRIBUTES", "service.name=messages,deployment.environment.name=test"),
            ("NODE_ID", "node-1"),
            ("ADMIN_ADDRESS", admin.as_str()),
        ];
        let fixture = start(backend, &collector, &settings).await;
        let api = fixture.api().await;
        let (topic, subscription) = api.pair().await;
        api.publish_texts(&topic, &["one", "two", "three"]).await;
        let received = api.pull(&subscription, 2).await;
        api.ack(&subscription, &received[..1]).await;
        let page = reqwest::get(format!("http://{admin}/metrics")).await.unwrap().text().await.unwrap();
        // Once nothing happens any more, both tell the same but for time and the process.
        let steady = |series: &str| {
            ["process_", "age_seconds", "landline_otlp_", "landline_broker_", "_bucket", "_sum"]
                .iter()
                .all(|part| !series.contains(part))
        };
        let mut expected = BTreeMap::<String, f64>::new();
        for line in page.lines().filter(|line| !line.starts_with('#')) {
            let (series, value) = line.rsplit_once(' ').unwrap();
            if steady(series) {
                expected.insert(series.to_owned(), value.parse().unwrap());
            }
        }
        assert!(expected.len() > 40, "{page}");
        eventually("the same metrics", SOON, async || {
            let mut told = BTreeMap::new();
            for (name, values) in points(&collector.metrics().unwrap_or_default()) {
                for (labels, value) in values {
                    let series = if labels.is_empty() { name.clone() } else { format!("{name}{{{labels}}}") };
                    if steady(&series) {
                        told.insert(series, value);
                    }
                }
            }
            told == expected
        })
        .await;
        let heads = page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
        let all = points(&collector.metrics().unwrap());
        for (family, kind) in heads {
            let name = if kind == "histogram" { format!("{family}_count") } else { family.to_owned() };
            let has_samples = page.lines().any(|line| line.strip_prefix(&name).is_some_and(|rest| rest.starts_with(['{', ' '])));
            assert_eq!(all.contains_key(&name), has_samples, "{family}");
        }
        assert_eq!(collector.resource("service.name").unwrap(), "messages");
        assert_eq!(collector.resource("service.instance.id").unwrap(), "node-1");
        assert_eq!(collector.resource("deployment.environment.name").unwrap(), "test");
    }
}

async fn a_collector_with_tls_and_a_password_is_spoken_to(backend: Backend) {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new();
    let files = authority.issue(folder.path(), "collector");
    let ca = authority.write(folder.path(), "ca");
    for (protocol, name) in [(Protocol::Grpc, "grpc"), (Protocol::Http, "http")] {
        let collector = Collector::start_with(protocol, Some(&files)).await;
        let settings = [
            ("OTLP_TRACES", "1"),
            ("OTLP_PROTOCOL", name),
            ("OTLP_CA_FILE", ca.to_str().unwrap()),
            ("OTLP_HEADERS", "authorization=Basic aGk6aGk=,x-tenant=a"),
        ];
        let fixture = start(backend, &collector, &settings).await;
        let api = fixture.api().await;
        api.create_topic("orders").await;
        api.publish(&api.topic("orders"), [message("m")]).await;
        spans(&collector, &["send orders"]).await;
        assert_eq!(collector.header("authorization").unwrap(), "Basic aGk6aGk=");
        assert_eq!(collector.header("x-tenant").unwrap(), "a");
        assert!(!fixture.nodes[0].log_tail().contains("aGk6aGk="));
    }
}
