use std::sync::LazyLock;

use proptest::prelude::*;
use prost::Message;
use prost_reflect::DescriptorPool;
use serde_json::json;

use super::*;
use crate::api::proto::{FILE_DESCRIPTOR_SET, pubsub};

static POOL: LazyLock<DescriptorPool> = LazyLock::new(|| DescriptorPool::decode(FILE_DESCRIPTOR_SET).unwrap());

fn descriptor(name: &str) -> MessageDescriptor {
    POOL.get_message_by_name(&format!("google.pubsub.v1.{name}")).unwrap()
}

fn read_text(name: &str, body: &str) -> Result<DynamicMessage, String> {
    let mut message = DynamicMessage::new(descriptor(name));
    let result = read_body(&mut message, body.as_bytes());
    let texts = |violations: Vec<FieldViolation>| violations.into_iter().map(|one| one.description).collect::<Vec<_>>();
    result.map(|()| message).map_err(|violations| texts(violations).join("\n"))
}

fn read(name: &str, body: Json) -> Result<DynamicMessage, String> {
    read_text(name, &body.to_string())
}

fn subscription(body: Json) -> pubsub::Subscription {
    read("Subscription", body).unwrap().transcode_to().unwrap()
}

fn mask(mask: Json) -> Vec<String> {
    let request: pubsub::UpdateTopicRequest =
        read("UpdateTopicRequest", json!({ "updateMask": mask })).unwrap().transcode_to().unwrap();
    request.update_mask.unwrap().paths
}

#[test]
fn both_spellings_of_a_name_are_read() {
    assert_eq!(subscription(json!({"ack_deadline_seconds": 20})).ack_deadline_seconds, 20);
    assert_eq!(subscription(json!({"ackDeadlineSeconds": 20})).ack_deadline_seconds, 20);
    let push = |body| subscription(body).push_config.unwrap().push_endpoint;
    assert_eq!(push(json!({"push_config": {"pushEndpoint": "http://h"}})), "http://h");
    assert_eq!(push(json!({"pushConfig": {"push_endpoint": "http://h"}})), "http://h");
}

#[test]
fn null_means_unset() {
    let unset = subscription(json!({"pushConfig": null, "labels": null, "ackDeadlineSeconds": null, "filter": null}));
    assert_eq!(unset, pubsub::Subscription::default());
    assert!(read("PubsubMessage", json!({"attributes": {"a": null}})).is_err());
    assert!(read("AcknowledgeRequest", json!({"ackIds": [null]})).is_err());
}

#[test]
fn an_empty_body_is_an_empty_object() {
    for body in ["", " \r\n", "{}", "\u{feff}{}"] {
        assert_eq!(read_text("Topic", body).unwrap(), DynamicMessage::new(descriptor("Topic")), "{body:?}");
    }
}

#[test]
fn numbers_may_be_strings_and_strings_may_not_be_numbers() {
    assert_eq!(subscription(json!({"ackDeadlineSeconds": "20"})).ack_deadline_seconds, 20);
    assert_eq!(subscription(json!({"ackDeadlineSeconds": 20.0})).ack_deadline_seconds, 20);
    assert_eq!(subscription(json!({"ackDeadlineSeconds": "2e1"})).ack_deadline_seconds, 20);
    let error = |body| read("Subscription", body).unwrap_err();
    assert_eq!(error(json!({"ackDeadlineSeconds": "x"})), "Invalid value at 'ack_deadline_seconds' (TYPE_INT32), \"x\"");
    assert_eq!(error(json!({"ackDeadlineSeconds": 1.5})), "Invalid value at 'ack_deadline_seconds' (TYPE_INT32), 1.5");
    assert_eq!(
        error(json!({"ackDeadlineSeconds": 3_000_000_000u64})),
        "Invalid value at 'ack_deadline_seconds' (TYPE_INT32), 3000000000"
    );
    assert_eq!(error(json!({"topic": 5})), "Invalid value at 'topic' (TYPE_STRING), 5");
    assert_eq!(error(json!({"detached": 1})), "Invalid value at 'detached' (TYPE_BOOL), 1");
    assert!(subscription(json!({"detached": "true"})).detached);
}

#[test]
fn large_integers_keep_every_digit() {
    let read = |value: Json| -> i64 {
        let body = json!({"cloudStorageConfig": {"maxBytes": value}});
        subscription(body).cloud_storage_config.unwrap().max_bytes
    };
    assert_eq!(read(json!("9223372036854775807")), i64::MAX);
    assert_eq!(read(json!(9_007_199_254_740_993_i64)), 9_007_199_254_740_993);
}

#[test]
fn enums_are_names_or_numbers() {
    let encoding = |value: Json| -> i32 {
        let topic: pubsub::Topic = read("Topic", json!({"schemaSettings": {"encoding": value}})).unwrap().transcode_to().unwrap();
        topic.schema_settings.unwrap().encoding
    };
    assert_eq!([encoding(json!("BINARY")), encoding(json!(2)), encoding(json!("2")), encoding(json!(77))], [2, 2, 2, 77]);
    assert_eq!(
        read("Topic", json!({"schemaSettings": {"encoding": "XML"}})).unwrap_err(),
        "Invalid value at 'schema_settings.encoding' (type.googleapis.com/google.pubsub.v1.Encoding), \"XML\""
    );
}

#[test]
fn base64_of_any_form_is_read() {
    let data = |text: &str| -> Vec<u8> {
        let message: pubsub::PubsubMessage = read("PubsubMessage", json!({"data": text})).unwrap().transcode_to().unwrap();
        message.data.to_vec()
    };
    let bytes = [0xfb, 0xff, 0xfe, 0x01];
    for text in ["+//+AQ==", "+//+AQ", "-__-AQ==", "-__-AQ", "+//+\nAQ==\n", "+//+AR"] {
        assert_eq!(data(text), bytes, "{text:?}");
    }
    assert_eq!(data(""), b"");
    assert_eq!(
        read("PublishRequest", json!({"messages": [{}, {"data": "*"}]})).unwrap_err(),
        "Invalid value at 'messages[1].data' (TYPE_BYTES), Base64 decoding failed for \"*\""
    );
    assert_eq!(read("PubsubMessage", json!({"data": 1})).unwrap_err(), "Invalid value at 'data' (TYPE_BYTES), 1");
}

#[test]
fn unknown_names_are_refused_with_their_place() {
    assert_eq!(
        read("Topic", json!({"topik": "x"})).unwrap_err(),
        "Invalid JSON payload received. Unknown name \"topik\": Cannot find field."
    );
    assert_eq!(
        read("PublishRequest", json!({"messages": [{"a": 1, "b": 2}]})).unwrap_err(),
        "Invalid JSON payload received. Unknown name \"a\" at 'messages[0]': Cannot find field.\n\
         Invalid JSON payload received. Unknown name \"b\" at 'messages[0]': Cannot find field."
    );
    let mut message = DynamicMessage::new(descriptor("Subscription"));
    let violations = read_body(&mut message, br#"{"pushConfig":{"x":1}}"#).unwrap_err();
    assert_eq!(violations[0].field, "push_config");
}

#[test]
fn the_number_of_faults_listed_is_bounded() {
    let bad: Map<String, Json> = (0..1000).map(|number| (format!("x{number}"), json!(1))).collect();
    assert_eq!(read("Topic", Json::Object(bad)).unwrap_err().lines().count(), MAX_VIOLATIONS);
    let long = "é".repeat(100_000);
    assert!(read("Topic", json!({ long: 1 })).unwrap_err().len() < 1000);
}

#[test]
fn a_body_that_is_no_object_is_refused() {
    for body in ["[]", "\"x\"", "1", "null", "true"] {
        let error = read_text("Topic", body).unwrap_err();
        assert_eq!(error, "Invalid JSON payload received. Unknown name \"\": Root element must be a message.", "{body}");
    }
    for body in ["{", "{]", "{\"a\"", "{} {}", "nul", "{\"name\": \"\\ud800\"}", "\u{1}"] {
        assert!(read_text("Topic", body).unwrap_err().starts_with("Invalid JSON payload received. "), "{body}");
    }
    let deep = "{\"pushConfig\":".repeat(100_000);
    assert!(read_text("Subscription", &deep).is_err());
}

#[test]
fn wrong_containers_are_refused() {
    assert!(read("PublishRequest", json!({"messages": {}})).unwrap_err().contains("an array was expected"));
    assert!(read("Topic", json!({"labels": []})).unwrap_err().contains("an object was expected"));
    assert_eq!(
        read("Subscription", json!({"pushConfig": "x"})).unwrap_err(),
        "Invalid value at 'push_config' (type.googleapis.com/google.pubsub.v1.PushConfig), \"x\""
    );
}

#[test]
fn two_fields_of_a_oneof_are_refused() {
    let error = read("PushConfig", json!({"pubsubWrapper": {}, "noWrapper": {}})).unwrap_err();
    assert!(error.contains("(oneof)") && error.contains("'wrapper'"), "{error}");
    let both_spellings = json!({"noWrapper": {"writeMetadata": true}, "no_wrapper": {"write_metadata": true}});
    assert!(read("PushConfig", both_spellings).is_ok());
    assert!(read("PushConfig", json!({"pubsubWrapper": null, "noWrapper": {}})).is_ok());
}

#[test]
fn durations_and_timestamps_have_their_json_forms() {
    let retention = |text: &str| subscription(json!({"messageRetentionDuration": text})).message_retention_duration.unwrap();
    assert_eq!(retention("600s"), prost_types::Duration { seconds: 600, nanos: 0 });
    assert_eq!(retention("600.5s"), prost_types::Duration { seconds: 600, nanos: 500_000_000 });
    for bad in [json!("600"), json!(600), json!("10m"), json!({"seconds": 600}), json!("")] {
        let error = read("Subscription", json!({"messageRetentionDuration": bad})).unwrap_err();
        let start = "Invalid value at 'message_retention_duration' (type.googleapis.com/google.protobuf.Duration), ";
        assert!(error.starts_with(start), "{error}");
    }
    let time = |text: &str| read("SeekRequest", json!({ "time": text })).map(|request| request.encode_to_vec());
    assert_eq!(time("2026-01-31T12:00:00Z"), time("2026-01-31T13:00:00.000+01:00"));
    assert!(time("2026-01-31T12:00:00.123456789Z").is_ok());
    for bad in ["2026-01-31", "2026-01-31T12:00:00", "2026-01-31 12:00:00Z", "now", "2026-13-31T12:00:00Z"] {
        assert!(time(bad).is_err(), "{bad}");
    }
}

#[test]
fn a_field_mask_is_one_string_of_either_spelling() {
    let expected = ["ack_deadline_seconds", "labels", "push_config.push_endpoint"];
    assert_eq!(mask(json!("ackDeadlineSeconds,labels,pushConfig.pushEndpoint")), expected);
    assert_eq!(mask(json!("ack_deadline_seconds, labels,push_config.push_endpoint")), expected);
    assert_eq!(mask(json!("")), Vec::<String>::new());
    assert!(read("UpdateTopicRequest", json!({"updateMask": ["labels"]})).is_err());
}

#[test]
fn free_form_values_are_read() {
    let body = json!({"messageTransforms": [{"aiInference": {
        "endpoint": "e",
        "unstructuredInference": {"parameters": {"a": null, "b": [1, {"c": "d"}]}},
    }}]});
    let topic = read("Topic", body.clone()).unwrap();
    assert_eq!(
        serde_json::to_value(topic).unwrap(),
        json!({"messageTransforms": [{"aiInference": {
            "endpoint": "e",
            "unstructuredInference": {"parameters": {"a": null, "b": [1.0, {"c": "d"}]}},
        }}]})
    );
}

fn any_json() -> impl Strategy<Value = Json> {
    let text = || prop_oneof!["[a-zA-Z0-9+/=_-]{0,12}", "[0-9.:TZs+-]{0,12}", ".{0,6}"];
    let leaf = prop_oneof![
        Just(Json::Null),
        any::<bool>().prop_map(Json::from),
        any::<i64>().prop_map(Json::from),
        any::<f64>().prop_map(Json::from),
        text().prop_map(Json::from),
    ];
    let names: Vec<String> = ["Topic", "Subscription", "PublishRequest", "PubsubMessage", "PushConfig", "SeekRequest"]
        .into_iter()
        .flat_map(|name| descriptor(name).fields().collect::<Vec<_>>())
        .map(|field| field.json_name().to_owned())
        .collect();
    let name = prop_oneof![5 => prop::sample::select(names), 1 => ".{0,6}"];
    leaf.prop_recursive(4, 48, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Json::from),
            prop::collection::btree_map(name.clone(), inner, 0..6).prop_map(|map| Json::Object(map.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn any_text_is_read_or_refused_without_a_panic(body in ".{0,64}") {
        let _ = read_text("Subscription", &body);
    }

    #[test]
    fn any_json_is_read_or_refused_without_a_panic(body in any_json()) {
        for name in ["Topic", "Subscription", "PublishRequest", "SeekRequest", "UpdateTopicRequest"] {
            let _ = read(name, body.clone());
        }
    }

    #[test]
    fn a_message_survives_the_way_to_json_and_back(
        data in prop::collection::vec(any::<u8>(), 0..40),
        attributes in prop::collection::btree_map(".{0,8}", ".{0,8}", 0..4),
        ordering_key in ".{0,8}",
        seconds in -62_135_596_800i64..253_402_300_800,
        nanos in 0..1_000_000_000,
    ) {
        let message = pubsub::PubsubMessage {
            data: data.into(),
            attributes,
            ordering_key,
            publish_time: Some(prost_types::Timestamp { seconds, nanos }),
            ..Default::default()
        };
        let mut dynamic = DynamicMessage::new(descriptor("PubsubMessage"));
        dynamic.transcode_from(&message).unwrap();
        let back = read("PubsubMessage", serde_json::to_value(&dynamic).unwrap()).unwrap();
        prop_assert_eq!(back.transcode_to::<pubsub::PubsubMessage>().unwrap(), message);
    }
}
