//! Errors stay short, however long the text that caused them: clients take 8 KiB of trailers unless they are told otherwise,
//! and see another error when there are more.

use std::collections::BTreeSet;

use http::HeaderMap;
use http_body_util::BodyExt;
use landline::api::proto::{
    FILE_DESCRIPTOR_SET,
    pubsub::{CreateSchemaRequest, CreateSnapshotRequest, Schema},
    rpc,
};
use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage, FieldDescriptor, Kind, MapKey, MessageDescriptor, Value};
use serde_json::json;

use crate::{
    fixture::{Api, Backend, Fixture, rest},
    for_one_backend,
};

for_one_backend!(a_long_text_in_any_field_makes_a_short_error, a_long_text_anywhere_in_a_rest_request_makes_a_short_error);

/// The message and the details of an error.
const MAX_ERROR_BYTES: usize = 4 << 10;
/// What clients take of headers or trailers by default, by HTTP/2's own count.
const MAX_HEADER_BYTES: usize = 8 << 10;
/// All that an HTTP answer tells of up to twenty faults of a JSON text, and each of them twice.
const MAX_REST_BYTES: usize = 16 << 10;

/// What is not looked at: what only the server sets, what has no effect here, and the name of a client.
const ACCEPTED: [&str; 9] = [
    "CreateSnapshotRequest.tags",
    "CreateSnapshotRequest.tags (key)",
    "StreamingPullRequest.client_id",
    "Subscription.analytics_hub_subscription_info.listing",
    "Subscription.analytics_hub_subscription_info.subscription",
    "Subscription.tags",
    "Subscription.tags (key)",
    "Topic.tags",
    "Topic.tags (key)",
];

/// A string field of a request: the way to it, and whether it is the key of a map.
struct Leaf {
    way: Vec<FieldDescriptor>,
    is_key: bool,
}

impl Leaf {
    fn name(&self) -> String {
        let names: Vec<_> = self.way.iter().map(|field| field.name().to_owned()).collect();
        format!("{}{}", names.join("."), if self.is_key { " (key)" } else { "" })
    }
}

/// Every string field of a message.
fn leaves(message: &MessageDescriptor, way: &[FieldDescriptor]) -> Vec<Leaf> {
    let mut found = Vec::new();
    for field in message.fields() {
        let way = [way, std::slice::from_ref(&field)].concat();
        match field.kind() {
            Kind::String => found.push(Leaf { way, is_key: false }),
            Kind::Message(_) if field.is_map() => {
                found.push(Leaf { way: way.clone(), is_key: true });
                found.push(Leaf { way, is_key: false });
            }
            // Its fields are of its own kind again.
            Kind::Message(inner) if inner.full_name() == "google.protobuf.Struct" => {}
            Kind::Message(inner) => found.extend(leaves(&inner, &way)),
            _ => {}
        }
    }
    found
}

/// Sets a field to a text, and whatever it lies in.
fn set(message: &mut DynamicMessage, leaf: &Leaf, way: &[FieldDescriptor], text: &str) {
    let (field, rest) = way.split_first().unwrap();
    let value = Value::String(text.to_owned());
    if !rest.is_empty() {
        let Kind::Message(inner) = field.kind() else { panic!("{} is no message", field.full_name()) };
        match message.get_field_mut(field) {
            Value::List(list) => {
                list.push(Value::Message(DynamicMessage::new(inner)));
                set(list.last_mut().and_then(Value::as_message_mut).unwrap(), leaf, rest, text);
            }
            inner => set(inner.as_message_mut().unwrap(), leaf, rest, text),
        }
    } else if field.is_map() {
        let (key, value) = if leaf.is_key {
            (MapKey::String(text.to_owned()), Value::String("v".into()))
        } else {
            (MapKey::String("k".into()), value)
        };
        message.set_field(field, Value::Map([(key, value)].into()));
    } else if field.is_list() {
        message.set_field(field, Value::List(vec![value]));
    } else {
        message.set_field(field, value);
    }
}

/// A request whose names are those of what exists, or of something new where it creates, and an update of the field.
fn request(api: &Api, input: &MessageDescriptor, leaf: &Leaf, number: usize) -> DynamicMessage {
    let mut message = DynamicMessage::new(input.clone());
    let new = format!("new-{number}");
    let text = |text: &str| Value::String(text.to_owned());
    let own_name = match input.name() {
        "Topic" => api.topic(&new),
        "Subscription" => api.subscription(&new),
        "CreateSnapshotRequest" => api.snapshot(&new),
        _ => api.schema("schema"),
    };
    for field in input.fields() {
        let inner = match field.kind() {
            Kind::Message(inner) if !field.is_list() && !field.is_map() => Some(inner),
            _ => None,
        };
        let value = match (field.name(), inner) {
            ("name", _) => text(&own_name),
            ("topic" | "resource", None) => text(&api.topic("orders")),
            ("subscription", None) => text(&api.subscription("billing")),
            ("snapshot", None) => text(&api.snapshot("snap")),
            ("project" | "parent", _) => text(&api.parent()),
            ("schema_id", _) => text(&new),
            ("max_messages", _) => Value::I32(1),
            ("return_immediately", _) => Value::Bool(true),
            ("ack_deadline_seconds" | "stream_ack_deadline_seconds", _) => Value::I32(10),
            ("encoding", _) => Value::EnumNumber(1),
            ("topic" | "subscription" | "snapshot" | "schema", Some(inner)) => {
                let mut part = DynamicMessage::new(inner.clone());
                let name = match inner.name() {
                    "Topic" => api.topic("orders"),
                    "Subscription" => api.subscription("billing"),
                    "Snapshot" => api.snapshot("snap"),
                    _ => String::new(),
                };
                part.set_field_by_name("name", text(&name));
                if inner.name() == "Schema" {
                    part.set_field_by_name("type", Value::EnumNumber(2));
                }
                Value::Message(part)
            }
            ("update_mask", Some(inner)) if leaf.way[0].name() != "update_mask" => {
                let mut mask = DynamicMessage::new(inner);
                let path = leaf.way.get(1).map_or("labels", |field| field.name());
                mask.set_field_by_name("paths", Value::List(vec![text(path)]));
                Value::Message(mask)
            }
            _ => continue,
        };
        message.set_field(&field, value);
    }
    message
}

/// The status code of an answer, after checking how much it says.
fn check(headers: &HeaderMap, what: &str) -> u32 {
    let size: usize = headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 32).sum();
    assert!(size < MAX_HEADER_BYTES, "{what}: {size} bytes of headers");
    let text = |name: &str| headers.get(name).map(|value| value.to_str().unwrap().to_owned());
    let code = text("grpc-status").unwrap().parse().unwrap();
    if code != 0 {
        use base64::{Engine, engine::general_purpose::STANDARD_NO_PAD};
        let details = text("grpc-status-details-bin").unwrap_or_else(|| panic!("{what}: no details"));
        let details = STANDARD_NO_PAD.decode(details.trim_end_matches('=')).unwrap();
        let message = rpc::Status::decode(&details[..]).unwrap().message;
        let size = message.len() + details.len();
        assert!(size < MAX_ERROR_BYTES, "{what}: {size} bytes: {message}");
        // Only what the caller gave is cut, not the sentence around it.
        assert!(message.contains(['.', ')']) && !message.ends_with("..."), "{what}: {message}");
    }
    code
}

async fn resources(api: &Api) {
    let topic = api.create_topic("orders").await;
    let subscription = api.create_subscription("billing", &topic).await;
    api.ok(CreateSnapshotRequest { name: api.snapshot("snap"), subscription, ..Default::default() }).await;
    let definition = r#"{"type":"record","name":"R","fields":[{"name":"f","type":"string"}]}"#.to_owned();
    let schema = Some(Schema { r#type: 2, definition, ..Default::default() });
    api.ok(CreateSchemaRequest { parent: api.parent(), schema, schema_id: "schema".into() }).await;
}

/// C001 with extreme lengths.
async fn a_long_text_in_any_field_makes_a_short_error(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    resources(&api).await;
    let address = fixture.nodes[0].address;
    let client = reqwest::Client::builder().http2_prior_knowledge().build().unwrap();
    let pool = DescriptorPool::decode(FILE_DESCRIPTOR_SET).unwrap();
    let services = pool.services().filter(|s| ["google.pubsub.v1", "google.iam.v1"].contains(&s.package_name()));
    let methods: Vec<_> = services.flat_map(|s| s.methods().collect::<Vec<_>>()).collect();
    let (mut accepted, mut enormous, mut tried) = (BTreeSet::new(), BTreeSet::new(), 0);
    for method in &methods {
        let path = format!("{}/{}", method.parent_service().full_name(), method.name());
        for leaf in leaves(&method.input(), &[]) {
            for text in ["a".repeat(6_000), "é€😀".repeat(2_000), "a".repeat(3_000_000)] {
                // One method a field will do for the longest, and not in the depths.
                let last = leaf.way.last().map_or("", |field| field.full_name()).to_owned();
                if text.len() > 1_000_000 && (leaf.way.len() > 2 || !enormous.insert((last, leaf.is_key))) {
                    continue;
                }
                tried += 1;
                let what = format!("{path} with {} characters in {}", text.chars().count(), leaf.name());
                let mut request = request(&api, &method.input(), &leaf, tried);
                set(&mut request, &leaf, &leaf.way, &text);
                let encoded = request.encode_to_vec();
                let body = [&[0][..], &(encoded.len() as u32).to_be_bytes(), &encoded].concat();
                let post = client.post(format!("http://{address}/{path}")).header("content-type", "application/grpc");
                let answer = post.header("te", "trailers").body(body).send().await.unwrap_or_else(|e| panic!("{what}: {e}"));
                let mut headers = answer.headers().clone();
                if !headers.contains_key("grpc-status") {
                    // A stream has begun before its request is judged.
                    let body = http::Response::from(answer).into_body().collect().await.unwrap_or_else(|e| panic!("{what}: {e}"));
                    headers = body.trailers().unwrap_or_else(|| panic!("{what}: no trailers")).clone();
                }
                match check(&headers, &what) {
                    0 => _ = accepted.insert(format!("{}.{}", method.input().name(), leaf.name())),
                    // INVALID_ARGUMENT, NOT_FOUND.
                    code => assert!([3, 5].contains(&code), "{what}: {code}"),
                }
            }
        }
    }
    assert!(tried > 300, "{tried}");
    assert_eq!(accepted, ACCEPTED.map(str::to_owned).into());
}

/// C001 with extreme lengths, over REST.
async fn a_long_text_anywhere_in_a_rest_request_makes_a_short_error(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    resources(&api).await;
    let (topic, parent) = (api.topic("orders"), api.parent());
    let address = fixture.nodes[0].address;
    let short = "x".repeat(6_000);
    for (verb, path) in [
        ("GET", format!("/{short}")),
        ("GET", format!("/v1/{parent}/topics/{short}")),
        ("GET", format!("/v1/{parent}/topics?{short}=1")),
        ("GET", format!("/v1/{parent}/topics?pageSize={short}")),
        ("GET", format!("/v1/{parent}/topics?pageToken={short}")),
        ("GET", format!("/v1/{parent}/schemas?view={short}")),
        ("PATCH", format!("/v1/{topic}?updateMask={short}")),
        ("POST", format!("/v1/{topic}:{short}")),
    ] {
        let answer = rest::get(address, &path).await;
        let answer = if verb == "GET" { answer } else { rest::json(address, verb, &path, json!({})).await };
        assert!(answer.status.is_client_error(), "{verb} {}: {}", &path[..60], answer.status);
        assert!(answer.body.len() < MAX_ERROR_BYTES, "{verb} {}: {} bytes", &path[..60], answer.body.len());
    }
    let answer = rest::send(address, "POST", "/v1/projects/p", &[("x-http-method-override", &short)], "").await;
    assert_eq!(answer.status, 404);
    assert!(answer.body.len() < MAX_ERROR_BYTES, "{} bytes", answer.body.len());
    for text in [short, "é\u{1f600}\u{1}".repeat(2_000), "x".repeat(3_000_000)] {
        let many: serde_json::Map<_, _> =
            (0..25).map(|n| (format!("{n}{}", text.chars().take(2_000).collect::<String>()), json!(1))).collect();
        let cases = [
            ("an unknown field", &topic, json!({ &text: 1 })),
            ("many unknown fields", &topic, json!(many)),
            ("a label's key", &topic, json!({ "labels": { &text: 1 } })),
            ("a label", &topic, json!({ "labels": { &text: "v" } })),
            ("a duration", &topic, json!({ "messageRetentionDuration": text })),
            ("a message", &topic, json!({ "schemaSettings": text })),
            ("an enum", &topic, json!({ "schemaSettings": { "encoding": text } })),
            ("a flag", &topic, json!({ "satisfiesPzs": text })),
            (
                "a struct",
                &topic,
                json!({ "messageTransforms": [{ "aiInference": { "unstructuredInference": { "parameters": text } } }] }),
            ),
        ];
        let few = if text.len() > 1_000_000 { 3 } else { cases.len() };
        for (what, path, body) in cases.into_iter().take(few) {
            let answer = rest::json(address, "PUT", &format!("/v1/{path}-new"), body).await;
            assert!(answer.status.is_client_error(), "{what}: {}", answer.status);
            assert!(answer.body.len() < MAX_REST_BYTES, "{what}: {} bytes", answer.body.len());
        }
        let data = json!({ "messages": [{ "data": text }, { "publishTime": text }] });
        let answer = rest::json(address, "POST", &format!("/v1/{topic}:publish"), data).await;
        assert_eq!(answer.status, 400, "{}", text.len());
        assert!(answer.body.len() < MAX_REST_BYTES, "{} bytes", answer.body.len());
    }
}
