//! The external scaler that KEDA asks.

use std::collections::BTreeMap;

use landline::{
    api::proto::{
        FILE_DESCRIPTOR_SET,
        externalscaler::{GetMetricsRequest, ScaledObjectRef, external_scaler_client::ExternalScalerClient},
    },
    tls::{Client, Trust},
};
use prost_reflect::DescriptorPool;
use tonic::{
    Code,
    transport::{Channel, Endpoint},
};

use crate::{
    fixture::{Backend, Fixture, api::channel, certificates::Authority, eventually, message, wait::SOON, within},
    for_every_backend, for_one_backend, for_two_nodes,
};

for_every_backend!(every_node_tells_the_backlog_of_the_whole_broker, a_stream_tells_when_there_is_work_and_when_there_is_none,);
for_two_nodes!(a_node_that_drains_ends_its_streams_so_that_keda_asks_another);
for_one_backend!(
    a_trigger_that_can_t_be_followed_is_refused_by_its_key,
    a_client_certificate_is_all_that_keda_needs_where_callers_must_say_who_they_are,
    the_triggers_of_the_examples_are_understood,
);

type Scaler = ExternalScalerClient<Channel>;

/// One client a node.
fn scalers(fixture: &Fixture) -> Vec<Scaler> {
    fixture.nodes.iter().map(|node| ExternalScalerClient::new(channel(node.address))).collect()
}

fn trigger(metadata: &[(&str, &str)]) -> ScaledObjectRef {
    let scaler_metadata = metadata.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    ScaledObjectRef { name: "billing".into(), namespace: "shop".into(), scaler_metadata }
}

/// The metric as KEDA reads it: the float where it is positive.
async fn metric(scaler: &Scaler, trigger: &ScaledObjectRef) -> Result<f64, tonic::Status> {
    let spec = scaler.clone().get_metric_spec(trigger.clone()).await?.into_inner().metric_specs.remove(0);
    let request = GetMetricsRequest { scaled_object_ref: Some(trigger.clone()), metric_name: spec.metric_name.clone() };
    let value = scaler.clone().get_metrics(request).await?.into_inner().metric_values.remove(0);
    assert_eq!(value.metric_name, spec.metric_name);
    assert_eq!(value.metric_value, value.metric_value_float.ceil() as i64);
    Ok(value.metric_value_float)
}

async fn is_active(scaler: &Scaler, trigger: &ScaledObjectRef) -> bool {
    scaler.clone().is_active(trigger.clone()).await.unwrap().into_inner().result
}

/// Names, numbers and types are those of KEDA's own definition.
#[test]
fn the_interface_is_that_of_keda() {
    let pool = DescriptorPool::decode(FILE_DESCRIPTOR_SET).unwrap();
    let service = pool.get_service_by_name("externalscaler.ExternalScaler").unwrap();
    let mut facts: Vec<String> = service
        .methods()
        .map(|m| {
            format!("{}({}) {}{}", m.name(), m.input().name(), if m.is_server_streaming() { "*" } else { "" }, m.output().name())
        })
        .collect();
    for message in pool.all_messages().filter(|m| m.package_name() == "externalscaler" && !m.is_map_entry()) {
        let list = |field: &prost_reflect::FieldDescriptor| if field.is_list() || field.is_map() { "*" } else { "" };
        let kind = |field: &prost_reflect::FieldDescriptor| match field.kind() {
            prost_reflect::Kind::Message(inner) => inner.name().to_owned(),
            scalar => format!("{scalar:?}").to_lowercase(),
        };
        facts
            .extend(message.fields().map(|f| format!("{}.{}={} {}{}", message.name(), f.name(), f.number(), list(&f), kind(&f))));
    }
    facts.sort();
    let mut expected = [
        "IsActive(ScaledObjectRef) IsActiveResponse",
        "StreamIsActive(ScaledObjectRef) *IsActiveResponse",
        "GetMetricSpec(ScaledObjectRef) GetMetricSpecResponse",
        "GetMetrics(GetMetricsRequest) GetMetricsResponse",
        "ScaledObjectRef.name=1 string",
        "ScaledObjectRef.namespace=2 string",
        "ScaledObjectRef.scalerMetadata=3 *ScalerMetadataEntry",
        "IsActiveResponse.result=1 bool",
        "GetMetricSpecResponse.metricSpecs=1 *MetricSpec",
        "MetricSpec.metricName=1 string",
        "MetricSpec.targetSize=2 int64",
        "MetricSpec.targetSizeFloat=3 double",
        "GetMetricsRequest.scaledObjectRef=1 ScaledObjectRef",
        "GetMetricsRequest.metricName=2 string",
        "GetMetricsResponse.metricValues=1 *MetricValue",
        "MetricValue.metricName=1 string",
        "MetricValue.metricValue=2 int64",
        "MetricValue.metricValueFloat=3 double",
    ];
    expected.sort_unstable();
    assert_eq!(facts, expected);
}

async fn every_node_tells_the_backlog_of_the_whole_broker(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair_with(|s| s.ack_deadline_seconds = 600).await;
    let size = trigger(&[("subscriptionName", &subscription), ("value", "2.5"), ("activationValue", "1")]);
    let mode = |mode| trigger(&[("subscriptionName", "billing"), ("projectId", &api.project), ("mode", mode)]);
    for scaler in &scalers(&fixture) {
        assert_eq!(metric(scaler, &size).await.unwrap(), 0.0);
        assert_eq!(metric(scaler, &mode("OldestUnackedMessageAge")).await.unwrap(), 0.0);
        assert!(!is_active(scaler, &size).await);
        let spec = scaler.clone().get_metric_spec(size.clone()).await.unwrap().into_inner().metric_specs.remove(0);
        assert_eq!((spec.target_size, spec.target_size_float), (3, 2.5));
        assert_eq!(spec.metric_name, format!("landline-numundeliveredmessages-{}-billing", api.project));
    }
    api.publish_texts(&topic, &["one", "two", "three"]).await;
    let received = api.pull(&subscription, 2).await;
    api.ack(&subscription, &received[..1]).await;
    for scaler in &scalers(&fixture) {
        assert_eq!(metric(scaler, &size).await.unwrap(), 2.0);
        assert_eq!(metric(scaler, &mode("NumUndeliveredMessages")).await.unwrap(), 2.0);
        assert_eq!(metric(scaler, &mode("NumOutstandingMessages")).await.unwrap(), 1.0);
        assert!(metric(scaler, &mode("BacklogBytes")).await.unwrap() >= 8.0);
        eventually("the age to grow", SOON, async || metric(scaler, &mode("OldestUnackedMessageAge")).await.unwrap() > 0.1).await;
        assert!(is_active(scaler, &size).await, "2 is more than the activation value");
    }
    api.ack(&subscription, &received[1..]).await;
    for scaler in &scalers(&fixture) {
        assert_eq!(metric(scaler, &size).await.unwrap(), 1.0);
        assert!(!is_active(scaler, &size).await, "1 is not more than the activation value");
    }
}

async fn a_stream_tells_when_there_is_work_and_when_there_is_none(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api.pair().await;
    let trigger = trigger(&[("subscriptionName", &subscription)]);
    let mut streams = Vec::new();
    for mut scaler in scalers(&fixture) {
        streams.push(scaler.stream_is_active(trigger.clone()).await.unwrap().into_inner());
    }
    let mut hear = async |expected: bool| {
        for stream in &mut streams {
            let told = within(SOON, "an answer of the stream", stream.message()).await.unwrap().unwrap();
            assert_eq!(told.result, expected);
        }
    };
    hear(false).await;
    api.publish(&topic, [message("work")]).await;
    hear(true).await;
    api.take(&subscription).await;
    hear(false).await;
    api.delete_subscription(&subscription).await;
    for mut stream in streams {
        let end = within(SOON, "the end of the stream", stream.message()).await;
        assert_eq!(end.unwrap_err().code(), Code::NotFound);
    }
}

async fn a_node_that_drains_ends_its_streams_so_that_keda_asks_another(backend: Backend) {
    let mut fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (_, subscription) = api.pair().await;
    let trigger = trigger(&[("subscriptionName", &subscription)]);
    let mut stream = scalers(&fixture).remove(0).stream_is_active(trigger.clone()).await.unwrap().into_inner();
    assert!(!stream.message().await.unwrap().unwrap().result);
    let node = fixture.nodes.remove(0);
    node.terminate();
    let end = within(SOON, "the end of the stream", stream.message()).await;
    assert_eq!(end.unwrap_err().code(), Code::Unavailable);
    assert_eq!(metric(&scalers(&fixture)[0], &trigger).await.unwrap(), 0.0);
}

async fn a_trigger_that_can_t_be_followed_is_refused_by_its_key(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let scaler = scalers(&fixture).remove(0);
    let full = ("subscriptionName", "projects/shop/subscriptions/none");
    for (metadata, key) in [
        (&[full, ("mode", "SentMessageCount")][..], "mode"),
        (&[full, ("aggregation", "max")], "aggregation"),
        (&[("topicName", "orders")], "topicName"),
        (&[("subscriptionName", "none")], "projectId"),
    ] {
        let refused = metric(&scaler, &trigger(metadata)).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
        assert!(refused.message().contains(&format!("scalerMetadata.{key}: ")), "{refused:?}");
    }
    assert_eq!(metric(&scaler, &trigger(&[full])).await.unwrap_err().code(), Code::NotFound);
    assert_eq!(metric(&scaler, &trigger(&[full, ("valueIfNull", "5")])).await.unwrap(), 5.0);
}

async fn a_client_certificate_is_all_that_keda_needs_where_callers_must_say_who_they_are(backend: Backend) {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new();
    let [server, keda, other] = ["server", "keda", "other"].map(|name| authority.issue(folder.path(), name));
    let ca = authority.write(folder.path(), "ca");
    let policy = folder.path().join("policy.yaml");
    std::fs::write(&policy, "projects: {shop: [{role: roles/pubsub.viewer, members: ['principal://tls/keda']}]}").unwrap();
    let settings = [
        ("TLS_CERT_FILE", &server.certificate),
        ("TLS_KEY_FILE", &server.key),
        ("TLS_CLIENT_CA_FILE", &ca),
        ("AUTH_POLICY_FILE", &policy),
    ];
    let mut settings: Vec<_> = settings.iter().map(|(key, path)| (*key, path.to_str().unwrap())).collect();
    settings.extend([("TLS_CLIENT_AUTH", "optional"), ("AUTH", "enforce"), ("PRELOAD", "shop,orders:billing")]);
    let fixture = Fixture::start_with(backend, &settings).await;
    let trigger = trigger(&[("subscriptionName", "projects/shop/subscriptions/billing")]);
    for (identity, expected) in
        [(Some(&keda), None), (Some(&other), Some(Code::PermissionDenied)), (None, Some(Code::Unauthenticated))]
    {
        let identity = identity.map(|files| (files.certificate.as_path(), files.key.as_path()));
        let client = Client::new(&Trust::Roots(ca.clone()), identity).unwrap();
        let connector = tower::service_fn(move |address: http::Uri| {
            let client = client.clone();
            async move { client.connect(address).await }
        });
        let endpoint = Endpoint::from_shared(format!("http://{}", fixture.nodes[0].address)).unwrap();
        let scaler = ExternalScalerClient::new(endpoint.connect_with_connector(connector).await.unwrap());
        assert_eq!(metric(&scaler, &trigger).await.err().map(|status| status.code()), expected);
        let watched = scaler.clone().stream_is_active(trigger.clone()).await.err().map(|status| status.code());
        assert_eq!(watched, expected);
    }
}

async fn the_triggers_of_the_examples_are_understood(backend: Backend) {
    let fixture = Fixture::start_with(backend, &[("PRELOAD", "shop,orders:billing:invoices")]).await;
    let scaler = scalers(&fixture).remove(0);
    let text = include_str!("../../deploy/keda/scaledobject.yaml");
    let mut triggers: Vec<BTreeMap<String, String>> = Vec::new();
    let mut within = false;
    for line in text.lines() {
        if line == "      metadata:" {
            triggers.push(BTreeMap::new());
            within = true;
        } else if let (true, Some(entry)) = (within, line.strip_prefix("        ")) {
            let (key, value) = entry.split_once(": ").unwrap();
            triggers.last_mut().unwrap().insert(key.to_owned(), value.trim_matches('"').to_owned());
        } else {
            within = false;
        }
    }
    assert_eq!(triggers.len(), 2);
    for scaler_metadata in triggers {
        let trigger = ScaledObjectRef { scaler_metadata, ..Default::default() };
        assert_eq!(metric(&scaler, &trigger).await.unwrap(), 0.0, "{trigger:?}");
        assert!(!is_active(&scaler, &trigger).await);
    }
}
