//! Defaults, bounds and what is echoed.

use landline::api::proto::pubsub::{ExpirationPolicy, PushConfig, RetryPolicy, Subscription, Topic, subscription, topic};
use prost_types::Duration;
use serde_json::json;
use tonic::Code;

use crate::{
    fixture::{Backend, Fixture, call::Call, mask, rest, seconds},
    for_every_backend, for_one_backend,
};

for_every_backend!(a_subscription_that_never_expires_stays_so, a_new_subscription_shows_its_defaults);
for_one_backend!(
    a_partial_retry_policy_is_filled_up,
    ack_deadlines_have_bounds,
    retention_has_bounds_and_is_echoed_as_given,
    labels_have_bounds,
    export_and_ingestion_are_refused,
    a_topic_echoes_what_was_set,
);

/// C019
async fn a_subscription_that_never_expires_stays_so(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let (_, name) = api.pair_with(|s| s.expiration_policy = Some(ExpirationPolicy { ttl: None })).await;
        let got = api.get_subscription(&name).await.unwrap();
        assert_eq!(got.expiration_policy, Some(ExpirationPolicy { ttl: None }));
        let got = rest::get(api.address(), &format!("/v1/{name}")).await.success();
        assert_eq!(got["expirationPolicy"], json!({}));
        let ttl = |s| move |x: &mut Subscription| x.expiration_policy = Some(ExpirationPolicy { ttl: Some(seconds(s)) });
        let updated = api.update_subscription(&name, &["expiration_policy"], ttl(86_400)).await.unwrap();
        assert_eq!(updated.expiration_policy.unwrap().ttl, Some(seconds(86_400)));
        let failure = api.update_subscription(&name, &["expiration_policy"], ttl(3600)).await.unwrap_err();
        assert_eq!(failure.code, Code::InvalidArgument);
        let never = |s: &mut Subscription| s.expiration_policy = Some(ExpirationPolicy { ttl: None });
        let updated = api.update_subscription(&name, &["expiration_policy"], never).await.unwrap();
        assert_eq!(updated.expiration_policy, Some(ExpirationPolicy { ttl: None }));
        let updated = api.update_subscription(&name, &["expiration_policy"], |_| {}).await.unwrap();
        assert_eq!(updated.expiration_policy.unwrap().ttl, Some(seconds(31 * 86_400)));
    }
}

/// The echo that clients such as Terraform compare with.
async fn a_new_subscription_shows_its_defaults(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let topic = Topic { name: api.topic("orders"), message_retention_duration: Some(seconds(3600)), ..Default::default() };
        api.ok(topic.clone()).await;
        let request = Subscription { name: api.subscription("billing"), topic: topic.name.clone(), ..Default::default() };
        let created = api.ok(request.clone()).await;
        let expected = Subscription {
            push_config: Some(PushConfig::default()),
            ack_deadline_seconds: 10,
            message_retention_duration: Some(seconds(604_800)),
            expiration_policy: Some(ExpirationPolicy { ttl: Some(seconds(2_678_400)) }),
            topic_message_retention_duration: Some(seconds(3600)),
            state: subscription::State::Active as i32,
            ..request.clone()
        };
        assert_eq!(created, expected);
        assert_eq!(api.get_subscription(&request.name).await.unwrap(), expected);
        assert_eq!(api.fails(request).await, Code::AlreadyExists);
    }
}

/// A topic comes back as it was made.
async fn a_topic_echoes_what_was_set(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let request = Topic {
            name: api.topic("orders"),
            labels: [("env".to_owned(), "test".to_owned())].into(),
            kms_key_name: "projects/p1/locations/eu/keyRings/r/cryptoKeys/k".into(),
            message_retention_duration: Some(Duration { seconds: 3600, nanos: 500_000_000 }),
            ..Default::default()
        };
        let created = api.ok(request.clone()).await;
        assert_eq!(Topic { state: topic::State::Unspecified as i32, ..created.clone() }, request);
        assert_eq!(api.get_topic(&request.name).await.unwrap(), created);
        assert_eq!(api.fails(request).await, Code::AlreadyExists);
    }
}

/// C020
async fn a_partial_retry_policy_is_filled_up(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let (topic, name) = api.pair().await;
        let policy = |min: Option<i64>, max: Option<i64>| RetryPolicy {
            minimum_backoff: min.map(seconds),
            maximum_backoff: max.map(seconds),
        };
        let cases = [
            ((Some(20), None), (20, 600)),
            ((None, Some(60)), (10, 60)),
            ((None, None), (10, 600)),
            ((Some(0), Some(0)), (0, 0)),
            ((Some(600), Some(600)), (600, 600)),
        ];
        for ((min, max), (filled_min, filled_max)) in cases {
            let set = |s: &mut Subscription| s.retry_policy = Some(policy(min, max));
            let updated = api.update_subscription(&name, &["retry_policy"], set).await.unwrap();
            assert_eq!(updated.retry_policy, Some(policy(Some(filled_min), Some(filled_max))), "{min:?} {max:?}");
        }
        for (number, (min, max)) in
            [(Some(601), None), (None, Some(601)), (Some(60), Some(10)), (Some(-1), None)].into_iter().enumerate()
        {
            let set = |s: &mut Subscription| s.retry_policy = Some(policy(min, max));
            let failure = api.update_subscription(&name, &["retry_policy"], set).await.unwrap_err();
            assert_eq!(failure.code, Code::InvalidArgument, "update {min:?} {max:?}");
            let mut request =
                Subscription { topic: topic.clone(), name: api.subscription(&format!("bad{number}")), ..Default::default() };
            set(&mut request);
            assert_eq!(api.fails(request).await, Code::InvalidArgument, "create {min:?} {max:?}");
        }
    }
}

/// C022
async fn ack_deadlines_have_bounds(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let topic = api.create_topic("orders").await;
        for (given, expected) in [(0, Some(10)), (9, None), (10, Some(10)), (600, Some(600)), (601, None), (-1, None), (1, None)]
        {
            let name = api.subscription(&format!("sub{given}"));
            let request = Subscription { name, topic: topic.clone(), ack_deadline_seconds: given, ..Default::default() };
            match expected {
                Some(seconds) => assert_eq!(api.ok(request).await.ack_deadline_seconds, seconds),
                None => assert_eq!(api.fails(request).await, Code::InvalidArgument, "{given}"),
            }
        }
    }
}

/// C194: a value that is echoed is in force, so one that can't be honoured is refused.
async fn retention_has_bounds_and_is_echoed_as_given(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let topic = api.create_topic("orders").await;
        let cases = [(599, false), (600, true), (31 * 86_400, true), (31 * 86_400 + 1, false), (-1, false), (0, false)];
        for (number, (given, legal)) in cases.into_iter().enumerate() {
            let duration = Some(seconds(given));
            let name = api.subscription(&format!("sub{number}"));
            let request = Subscription { name, topic: topic.clone(), message_retention_duration: duration, ..Default::default() };
            let name = api.topic(&format!("topic{number}"));
            let topic = Topic { name, message_retention_duration: duration, ..Default::default() };
            if legal {
                assert_eq!(api.ok(request).await.message_retention_duration, duration);
                assert_eq!(api.ok(topic).await.message_retention_duration, duration);
            } else {
                assert_eq!(api.fails(request).await, Code::InvalidArgument, "subscription {given}");
                assert_eq!(api.fails(topic).await, Code::InvalidArgument, "topic {given}");
            }
        }
    }
}

/// Labels: at most 64, keys from a lower-case letter on, up to 63 characters.
async fn labels_have_bounds(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let many = |count: usize| (0..count).map(|n| (format!("k{n}"), String::new())).collect::<Vec<_>>();
        let one = |key: &str, value: &str| vec![(key.to_owned(), value.to_owned())];
        let (k63, k64) = ("k".repeat(63), "k".repeat(64));
        let cases = [
            (many(64), true),
            (many(65), false),
            (one(&k63, &k63), true),
            (one(&k64, ""), false),
            (one("k", &k64), false),
            (one("Key", ""), false),
            (one("1a", ""), false),
            (one("", "x"), false),
            (one("a", "A"), false),
            (one("größe", "ß_-1"), true),
        ];
        for (number, (labels, legal)) in cases.into_iter().enumerate() {
            let request =
                Topic { name: api.topic(&format!("topic{number}")), labels: labels.into_iter().collect(), ..Default::default() };
            let outcome = api.call(request.clone()).await;
            if legal {
                assert_eq!(outcome.unwrap().labels, request.labels);
            } else {
                assert_eq!(outcome.unwrap_err().code, Code::InvalidArgument, "{:?}", request.labels);
            }
        }
    }
}

/// C185 and the connector's rules: what is not offered is refused, not dropped.
async fn export_and_ingestion_are_refused(backend: Backend) {
    use landline::api::proto::pubsub::{
        BigQueryConfig, BigtableConfig, CloudStorageConfig, IngestionDataSourceSettings,
        ingestion_data_source_settings::{AwsKinesis, Source},
    };
    async fn refused<C: Call>(api: &crate::fixture::Api, request: C) {
        assert_eq!(api.fails(request).await, Code::InvalidArgument);
    }
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let topic = api.create_topic("orders").await;
        let base = Subscription { name: api.subscription("export"), topic: topic.clone(), ..Default::default() };
        let bigquery = Some(BigQueryConfig { table: "p.d.t".into(), ..Default::default() });
        refused(&api, Subscription { bigquery_config: bigquery, ..base.clone() }).await;
        let storage = Some(CloudStorageConfig { bucket: "bucket".into(), ..Default::default() });
        refused(&api, Subscription { cloud_storage_config: storage, ..base.clone() }).await;
        let table = "projects/p/instances/i/tables/t".into();
        let bigtable = Some(BigtableConfig { table, ..Default::default() });
        refused(&api, Subscription { bigtable_config: bigtable, ..base.clone() }).await;
        let kinesis = AwsKinesis {
            stream_arn: "arn:a".into(),
            consumer_arn: "arn:b".into(),
            aws_role_arn: "arn:c".into(),
            gcp_service_account: "x@y.z".into(),
            ..Default::default()
        };
        let settings = IngestionDataSourceSettings { source: Some(Source::AwsKinesis(kinesis)), ..Default::default() };
        let name = api.topic("ingest");
        refused(&api, Topic { name, ingestion_data_source_settings: Some(settings.clone()), ..Default::default() }).await;
        let changed = Topic { name: topic, ingestion_data_source_settings: Some(settings), ..Default::default() };
        let update_mask = Some(mask(&["ingestion_data_source_settings"]));
        refused(&api, landline::api::proto::pubsub::UpdateTopicRequest { topic: Some(changed), update_mask }).await;
        let set = |s: &mut Subscription| s.bigquery_config = Some(BigQueryConfig { table: "p.d.t".into(), ..Default::default() });
        api.create_subscription("plain", &base.topic).await;
        let update = api.update_subscription(&api.subscription("plain"), &["bigquery_config"], set).await;
        assert_eq!(update.unwrap_err().code, Code::InvalidArgument);
    }
}
