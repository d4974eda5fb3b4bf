//! Authentication and authorization against real servers.

mod rest;

use std::{collections::BTreeSet, fs, path::PathBuf, process::Command};

use bytes::{Buf, BufMut, Bytes};
use futures::StreamExt;
use landline::{
    api::proto::FILE_DESCRIPTOR_SET,
    auth::{KeyFile, Registry},
};
use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage, MessageDescriptor};
use serde_json::{Value, json};
use tempfile::TempDir;
use tonic::{
    Code, Request, Status, Streaming,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
    transport::Channel,
};

use crate::{
    fixture::{
        Backend, Fixture,
        api::channel,
        node::binary,
        sink::Sink,
        wait::{SOON, eventually, within},
    },
    for_one_backend,
};

for_one_backend!(
    every_call_is_allowed_to_the_roles_that_hold_its_permission,
    a_policy_of_a_resource_allows_what_the_project_does_not,
    rest_refuses_with_the_api_s_own_errors,
    what_one_may_not_see_is_not_told_from_what_does_not_exist,
    a_key_and_a_policy_are_taken_back_without_a_restart,
    an_open_stream_ends_when_its_caller_loses_the_permission,
    audit_carries_out_what_enforce_would_refuse,
    an_assertion_is_exchanged_for_a_token,
    the_token_of_a_provider_says_who_calls,
    limits_are_refused_by_their_name,
    the_program_issues_lists_and_takes_back_keys,
);

const AUDIENCE: &str = "https://pubsub.googleapis.com/";

/// Callers by their role in the project `p1`; `nobody` has a key and no role.
const CALLERS: [&str; 6] = ["admin", "editor", "viewer", "publisher", "subscriber", "nobody"];

struct Security {
    folder: TempDir,
    keys: Vec<(String, KeyFile, String)>,
}

impl Security {
    fn new() -> Self {
        let security = Self { folder: tempfile::tempdir().unwrap(), keys: Vec::new() };
        let bindings: Vec<_> = CALLERS[..5]
            .iter()
            .map(|name| json!({"role": format!("roles/pubsub.{name}"), "members": [format!("serviceAccount:{name}@p1.example")]}))
            .collect();
        security.write_policy(&json!({"projects": {"p1": bindings, "p2": [bindings[0]]}}));
        CALLERS.iter().fold(security, |security, name| security.with_key(name))
    }

    fn with_key(mut self, name: &str) -> Self {
        let (file, key) = KeyFile::create(&format!("{name}@p1.example"), "p1", "https://localhost/token").unwrap();
        let id = key.id.clone();
        Registry::change(&self.path("keys.json"), |registry| {
            registry.keys.push(key);
            Ok(())
        })
        .unwrap();
        self.keys.push((name.to_owned(), file, id));
        self
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write_policy(&self, policy: &Value) {
        fs::write(self.path("policy.json"), policy.to_string()).unwrap();
    }

    fn settings(&self) -> Vec<(&'static str, String)> {
        let path = |name| self.path(name).display().to_string();
        vec![("AUTH", "enforce".into()), ("AUTH_KEYS_FILE", path("keys.json")), ("AUTH_POLICY_FILE", path("policy.json"))]
    }

    async fn start(&self, backend: Backend, more: &[(&'static str, &str)]) -> Fixture {
        let mut settings = self.settings();
        settings.extend(more.iter().map(|(key, value)| (*key, (*value).to_owned())));
        let settings: Vec<_> = settings.iter().map(|(key, value)| (*key, value.as_str())).collect();
        Fixture::start_with(backend, &settings).await
    }

    fn key(&self, name: &str) -> &(String, KeyFile, String) {
        self.keys.iter().find(|(known, ..)| known == name).unwrap()
    }

    fn token(&self, name: &str) -> String {
        self.key(name).1.sign(AUDIENCE).unwrap()
    }
}

/// Messages as bytes: what is sent need not be known at compile time.
#[derive(Clone, Copy)]
struct Raw;

impl Codec for Raw {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, into: &mut EncodeBuf<'_>) -> Result<(), Status> {
        into.put(item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(from.copy_to_bytes(from.remaining())))
    }
}

/// Calls gRPC methods by their names, as some caller.
struct Caller {
    channel: Channel,
    token: Option<String>,
    pool: DescriptorPool,
}

impl Caller {
    fn new(fixture: &Fixture, token: Option<String>) -> Self {
        let pool = DescriptorPool::decode(FILE_DESCRIPTOR_SET).unwrap();
        Self { channel: channel(fixture.nodes[0].address), token, pool }
    }

    async fn call(&self, method: &str, request: Value) -> Result<Value, Status> {
        let (mut answers, output) = self.open(method, request, false).await?;
        let answer = answers.message().await?.unwrap_or_default();
        Ok(serde_json::to_value(DynamicMessage::decode(output, answer).unwrap()).unwrap())
    }

    /// Sends the first request, and keeps the stream of requests open if asked to.
    async fn open(&self, method: &str, request: Value, more: bool) -> Result<(Streaming<Bytes>, MessageDescriptor), Status> {
        let (service, name) = method.rsplit_once('.').unwrap();
        let descriptor = self.pool.get_service_by_name(service).unwrap().methods().find(|m| m.name() == name).unwrap();
        let message = DynamicMessage::deserialize(descriptor.input(), request).unwrap();
        let first = Bytes::from(message.encode_to_vec());
        let requests = tokio_stream::once(first);
        let mut request = Request::new(if more { requests.chain(futures::stream::pending()).boxed() } else { requests.boxed() });
        if let Some(token) = &self.token {
            request.metadata_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
        }
        let mut grpc = tonic::client::Grpc::new(self.channel.clone());
        grpc.ready().await.unwrap();
        let path = format!("/{service}/{name}").parse().unwrap();
        Ok((grpc.streaming(request, path, Raw).await?.into_inner(), descriptor.output()))
    }

    async fn code(&self, method: &str, request: Value) -> Code {
        self.call(method, request).await.map_or_else(|status| status.code(), |_| Code::Ok)
    }
}

const PUBLISHER: &str = "google.pubsub.v1.Publisher";
const SUBSCRIBER: &str = "google.pubsub.v1.Subscriber";

/// Every method with a request and the initials of the roles that may call it; `N` has no role. What the requests name does
/// not exist, so that what is allowed does little.
fn matrix() -> Vec<(String, Value, &'static str)> {
    let (topic, subscription) = ("projects/p1/topics/none", "projects/p1/subscriptions/none");
    let (snapshot, schema) = ("projects/p1/snapshots/none", "projects/p1/schemas/none");
    let project = "projects/p1";
    let definition = json!({"type": "AVRO", "definition": "{}"});
    let push = json!({"pushEndpoint": "http://127.0.0.1:9/push", "oidcToken": {"serviceAccountEmail": "push@p1.example"}});
    let publisher = [
        ("CreateTopic", json!({"name": "projects/p1/topics/made"}), "AE"),
        ("UpdateTopic", json!({"topic": {"name": topic}, "updateMask": "labels"}), "AE"),
        ("Publish", json!({"topic": topic, "messages": [{"data": "eA=="}]}), "AEP"),
        ("GetTopic", json!({"topic": topic}), "AEV"),
        ("ListTopics", json!({"project": project}), "AEV"),
        ("ListTopicSubscriptions", json!({"topic": topic}), "AEV"),
        ("ListTopicSnapshots", json!({"topic": topic}), "AEV"),
        ("DeleteTopic", json!({"topic": topic}), "AE"),
        ("DetachSubscription", json!({"subscription": subscription}), "AE"),
    ];
    let subscriber = [
        ("CreateSubscription", json!({"name": subscription, "topic": topic}), "AE"),
        ("CreateSubscription", json!({"name": subscription, "topic": topic, "pushConfig": push}), "AE"),
        ("GetSubscription", json!({"subscription": subscription}), "AEV"),
        ("UpdateSubscription", json!({"subscription": {"name": subscription}, "updateMask": "labels"}), "AE"),
        ("ListSubscriptions", json!({"project": project}), "AEV"),
        ("DeleteSubscription", json!({"subscription": subscription}), "AE"),
        ("ModifyAckDeadline", json!({"subscription": subscription, "ackIds": ["x"], "ackDeadlineSeconds": 10}), "AES"),
        ("Acknowledge", json!({"subscription": subscription, "ackIds": ["x"]}), "AES"),
        ("Pull", json!({"subscription": subscription, "maxMessages": 1}), "AES"),
        ("StreamingPull", json!({"subscription": subscription, "streamAckDeadlineSeconds": 10}), "AES"),
        ("ModifyPushConfig", json!({"subscription": subscription, "pushConfig": {}}), "AE"),
        ("ModifyPushConfig", json!({"subscription": subscription, "pushConfig": push}), "AE"),
        ("GetSnapshot", json!({"snapshot": snapshot}), "AEV"),
        ("ListSnapshots", json!({"project": project}), "AEV"),
        ("CreateSnapshot", json!({"name": snapshot, "subscription": subscription}), "AE"),
        ("UpdateSnapshot", json!({"snapshot": {"name": snapshot}, "updateMask": "labels"}), "AE"),
        ("DeleteSnapshot", json!({"snapshot": snapshot}), "AE"),
        ("Seek", json!({"subscription": subscription, "snapshot": snapshot}), "AES"),
        ("Seek", json!({"subscription": subscription, "time": "2026-01-31T12:00:00Z"}), "AES"),
    ];
    let schemas = [
        ("CreateSchema", json!({"parent": project, "schemaId": "shape", "schema": definition}), "AE"),
        ("GetSchema", json!({"name": schema}), "AEV"),
        ("ListSchemas", json!({"parent": project}), "AEV"),
        ("ListSchemaRevisions", json!({"name": schema}), "AEV"),
        ("CommitSchema", json!({"name": schema, "schema": definition}), "AE"),
        ("RollbackSchema", json!({"name": schema, "revisionId": "0a1b2c3d"}), "AE"),
        ("DeleteSchemaRevision", json!({"name": format!("{schema}@0a1b2c3d")}), "AE"),
        ("DeleteSchema", json!({"name": schema}), "AE"),
        ("ValidateSchema", json!({"parent": project, "schema": definition}), "AEV"),
        ("ValidateMessage", json!({"parent": project, "name": schema, "message": "eA==", "encoding": "JSON"}), "AEV"),
    ];
    let iam = [
        ("GetIamPolicy", json!({"resource": topic}), "A"),
        ("SetIamPolicy", json!({"resource": topic, "policy": {}}), "A"),
        ("TestIamPermissions", json!({"resource": topic, "permissions": ["pubsub.topics.get"]}), "AEVPSN"),
    ];
    let transforms = [
        ("ValidateMessageTransform", json!({"project": project, "messageTransform": {}}), "AEV"),
        ("TestMessageTransforms", json!({"project": project, "message": {"data": "eA=="}, "topic": topic}), "AEV"),
    ];
    let metadata = json!({"subscriptionName": subscription});
    let scaler = [
        ("IsActive", json!({"scalerMetadata": metadata}), "AEV"),
        ("StreamIsActive", json!({"scalerMetadata": metadata}), "AEV"),
        ("GetMetricSpec", json!({"scalerMetadata": metadata}), "AEV"),
        ("GetMetrics", json!({"scaledObjectRef": {"scalerMetadata": metadata}}), "AEV"),
    ];
    let of = |service: &'static str, rows: Vec<(&'static str, Value, &'static str)>| {
        rows.into_iter().map(move |(method, request, roles)| (format!("{service}.{method}"), request, roles))
    };
    of(PUBLISHER, publisher.into())
        .chain(of(SUBSCRIBER, subscriber.into()))
        .chain(of("google.pubsub.v1.SchemaService", schemas.into()))
        .chain(of("google.iam.v1.IAMPolicy", iam.into()))
        .chain(of("landline.v1.MessageTransforms", transforms.into()))
        .chain(of("externalscaler.ExternalScaler", scaler.into()))
        .collect()
}

async fn every_call_is_allowed_to_the_roles_that_hold_its_permission(backend: Backend) {
    let security = Security::new();
    let fixture = security.start(backend, &[]).await;
    let matrix = matrix();
    let pool = DescriptorPool::decode(FILE_DESCRIPTOR_SET).unwrap();
    let all: BTreeSet<_> =
        pool.services().flat_map(|s| s.methods().map(|m| m.full_name().to_owned()).collect::<Vec<_>>()).collect();
    let covered: BTreeSet<_> = matrix.iter().map(|(method, ..)| method.clone()).collect();
    assert_eq!(covered, all, "every method is in the matrix");

    let mut wrong = Vec::new();
    for name in CALLERS {
        let caller = Caller::new(&fixture, Some(security.token(name)));
        for (method, request, roles) in &matrix {
            let code = caller.code(method, request.clone()).await;
            let allowed = roles.contains(name.to_uppercase().chars().next().unwrap());
            if (code == Code::PermissionDenied) == allowed || code == Code::Unauthenticated {
                wrong.push(format!("{name} {method}: {code:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let forged = KeyFile::create("admin@p1.example", "p1", "").unwrap().0.sign(AUDIENCE).unwrap();
    for token in [None, Some(forged), Some("x".into())] {
        let caller = Caller::new(&fixture, token);
        for (method, request, _) in &matrix {
            assert_eq!(caller.code(method, request.clone()).await, Code::Unauthenticated, "{method}");
        }
    }
}

/// Lets the administrator create what a test needs.
async fn create(admin: &Caller, project: &str) -> (String, String) {
    let (topic, subscription) =
        (format!("projects/{project}/topics/orders"), format!("projects/{project}/subscriptions/billing"));
    admin.call(&format!("{PUBLISHER}.CreateTopic"), json!({"name": topic})).await.unwrap();
    let request = json!({"name": subscription, "topic": topic});
    admin.call(&format!("{SUBSCRIBER}.CreateSubscription"), request).await.unwrap();
    (topic, subscription)
}

async fn a_policy_of_a_resource_allows_what_the_project_does_not(backend: Backend) {
    let security = Security::new();
    let fixture = security.start(backend, &[]).await;
    let admin = Caller::new(&fixture, Some(security.token("admin")));
    let nobody = Caller::new(&fixture, Some(security.token("nobody")));
    let (topic, subscription) = create(&admin, "p1").await;
    let publish = async |topic: &str| {
        nobody.code(&format!("{PUBLISHER}.Publish"), json!({"topic": topic, "messages": [{"data": "eA=="}]})).await
    };
    let held = async || {
        let permissions = ["pubsub.topics.publish", "pubsub.topics.get", "pubsub.topics.delete"];
        let request = json!({"resource": topic, "permissions": permissions});
        nobody.call("google.iam.v1.IAMPolicy.TestIamPermissions", request).await.unwrap()
    };
    assert_eq!(publish(&topic).await, Code::PermissionDenied);
    assert_eq!(held().await, json!({}));

    let binding = json!({"role": "roles/pubsub.publisher", "members": ["serviceAccount:nobody@p1.example"]});
    let set = json!({"resource": topic, "policy": {"bindings": [binding]}});
    admin.call("google.iam.v1.IAMPolicy.SetIamPolicy", set).await.unwrap();
    assert_eq!(publish(&topic).await, Code::Ok);
    assert_eq!(held().await, json!({"permissions": ["pubsub.topics.publish"]}));
    assert_eq!(publish("projects/p1/topics/other").await, Code::PermissionDenied);
    assert_eq!(
        nobody.code(&format!("{SUBSCRIBER}.Pull"), json!({"subscription": subscription, "maxMessages": 1})).await,
        Code::PermissionDenied
    );
    // A topic made again under the name does not inherit the policy.
    admin.call(&format!("{PUBLISHER}.DeleteTopic"), json!({"topic": topic})).await.unwrap();
    eventually("the policy is gone", SOON, async || publish(&topic).await == Code::PermissionDenied).await;
    admin.call(&format!("{PUBLISHER}.CreateTopic"), json!({"name": topic})).await.unwrap();
    assert_eq!(publish(&topic).await, Code::PermissionDenied);

    // Attaching needs the topic's permission as well as the project's, and dead letters are publishing.
    let editor = Caller::new(&fixture, Some(security.token("editor")));
    let (foreign, _) = create(&admin, "p2").await;
    let request = json!({"name": "projects/p1/subscriptions/spy", "topic": foreign});
    assert_eq!(editor.code(&format!("{SUBSCRIBER}.CreateSubscription"), request).await, Code::PermissionDenied);
    let policy = json!({"deadLetterTopic": foreign, "maxDeliveryAttempts": 5});
    let request = json!({"name": "projects/p1/subscriptions/flood", "topic": topic, "deadLetterPolicy": policy});
    assert_eq!(editor.code(&format!("{SUBSCRIBER}.CreateSubscription"), request).await, Code::PermissionDenied);
    let request = json!({"subscription": {"name": subscription, "deadLetterPolicy": policy}, "updateMask": "deadLetterPolicy"});
    assert_eq!(editor.code(&format!("{SUBSCRIBER}.UpdateSubscription"), request).await, Code::PermissionDenied);
    // So it is with schemas, snapshots and the subscriptions they are taken of.
    let settings = json!({"schema": "projects/p2/schemas/shape", "encoding": "JSON"});
    let request = json!({"name": "projects/p1/topics/shaped", "schemaSettings": settings});
    assert_eq!(editor.code(&format!("{PUBLISHER}.CreateTopic"), request).await, Code::PermissionDenied);
    let request = json!({"topic": {"name": topic, "schemaSettings": settings}, "updateMask": "schemaSettings"});
    assert_eq!(editor.code(&format!("{PUBLISHER}.UpdateTopic"), request).await, Code::PermissionDenied);
    let request = json!({"subscription": subscription, "snapshot": "projects/p2/snapshots/before"});
    assert_eq!(editor.code(&format!("{SUBSCRIBER}.Seek"), request).await, Code::PermissionDenied);
    let request = json!({"name": "projects/p1/snapshots/stolen", "subscription": "projects/p2/subscriptions/billing"});
    assert_eq!(editor.code(&format!("{SUBSCRIBER}.CreateSnapshot"), request).await, Code::PermissionDenied);
    // Names of other projects show only to those who may see them there.
    let request = json!({"name": "projects/p2/subscriptions/theirs", "topic": topic});
    admin.call(&format!("{SUBSCRIBER}.CreateSubscription"), request).await.unwrap();
    let list = async |caller: &Caller| {
        let listed = caller.call(&format!("{PUBLISHER}.ListTopicSubscriptions"), json!({"topic": topic})).await.unwrap();
        listed["subscriptions"].as_array().map_or(0, Vec::len)
    };
    assert_eq!((list(&admin).await, list(&editor).await), (1, 0));
}

async fn body(answer: reqwest::Response) -> Value {
    serde_json::from_slice(&answer.bytes().await.unwrap()).unwrap()
}

async fn rest_refuses_with_the_api_s_own_errors(backend: Backend) {
    let security = Security::new();
    let fixture = security.start(backend, &[]).await;
    let base = format!("http://{}", fixture.nodes[0].address);
    let client = reqwest::Client::new();
    assert_eq!(client.get(&base).send().await.unwrap().status(), 200, "the root is for everyone");
    let url = format!("{base}/v1/projects/p1/topics");
    for request in [client.get(&url), client.get(&url).bearer_auth("x"), client.post(format!("{url}/t11:publish")).body("{")] {
        let answer = request.send().await.unwrap();
        assert_eq!(answer.status(), 401);
        assert_eq!(answer.headers()["www-authenticate"], "Bearer realm=\"landline\"");
        let body = body(answer).await;
        assert_eq!(body["error"]["status"], "UNAUTHENTICATED");
    }
    let answer = client.get(&url).bearer_auth(security.token("publisher")).send().await.unwrap();
    assert_eq!(answer.status(), 403);
    let body = body(answer).await;
    assert_eq!(body["error"]["status"], "PERMISSION_DENIED");
    let message = body["error"]["message"].as_str().unwrap();
    assert!(message.contains("'pubsub.topics.list'") && message.contains("'projects/p1'"), "{message}");
    assert_eq!(body["error"]["details"][0]["metadata"]["permission"], "pubsub.topics.list");
    let answer = client.get(&url).bearer_auth(security.token("viewer")).send().await.unwrap();
    assert_eq!(answer.status(), 200);
    assert!(!fixture.nodes[0].log_tail().contains("eyJ"), "no token is logged");
}

async fn what_one_may_not_see_is_not_told_from_what_does_not_exist(backend: Backend) {
    let security = Security::new();
    let fixture = security.start(backend, &[]).await;
    let admin = Caller::new(&fixture, Some(security.token("admin")));
    let editor = Caller::new(&fixture, Some(security.token("editor")));
    create(&admin, "p2").await;
    for (method, field, kind) in [
        (format!("{PUBLISHER}.GetTopic"), "topic", "topics"),
        (format!("{PUBLISHER}.DeleteTopic"), "topic", "topics"),
        (format!("{SUBSCRIBER}.GetSubscription"), "subscription", "subscriptions"),
        (format!("{SUBSCRIBER}.Pull"), "subscription", "subscriptions"),
        (format!("{PUBLISHER}.DetachSubscription"), "subscription", "subscriptions"),
    ] {
        let existing = if kind == "topics" { "orders" } else { "billing" };
        let mut texts = Vec::new();
        for id in [existing, "missing"] {
            let status = editor.call(&method, json!({field: format!("projects/p2/{kind}/{id}")})).await.unwrap_err();
            assert_eq!(status.code(), Code::PermissionDenied, "{method}");
            texts.push(status.message().replace(id, "ID"));
        }
        assert_eq!(texts[0], texts[1], "{method}");
        assert!(!texts[0].contains("orders"), "the topic's name is not told: {}", texts[0]);
    }
    assert_eq!(editor.code(&format!("{PUBLISHER}.ListTopics"), json!({"project": "projects/p2"})).await, Code::PermissionDenied);
}

async fn a_key_and_a_policy_are_taken_back_without_a_restart(backend: Backend) {
    let security = Security::new();
    let fixture = security.start(backend, &[]).await;
    let viewer = Caller::new(&fixture, Some(security.token("viewer")));
    let editor = Caller::new(&fixture, Some(security.token("editor")));
    let list = format!("{PUBLISHER}.ListTopics");
    let list = async |caller: &Caller| caller.code(&list, json!({"project": "projects/p1"})).await;
    assert_eq!((list(&viewer).await, list(&editor).await), (Code::Ok, Code::Ok));
    let id = &security.key("viewer").2;
    Registry::change(&security.path("keys.json"), |registry| {
        registry.keys.retain(|key| key.id != *id);
        Ok(())
    })
    .unwrap();
    eventually("the key is refused", SOON, async || list(&viewer).await == Code::Unauthenticated).await;
    assert_eq!(list(&editor).await, Code::Ok);
    // A policy that can't be used changes nothing, and says so; a good one is in force.
    fs::write(security.path("policy.json"), "{").unwrap();
    eventually("the server complains", SOON, async || fixture.nodes[0].log_tail().contains("policy file changed but")).await;
    assert_eq!(list(&editor).await, Code::Ok);
    security.write_policy(&json!({"projects": {}}));
    eventually("the role is gone", SOON, async || list(&editor).await == Code::PermissionDenied).await;
}

async fn an_open_stream_ends_when_its_caller_loses_the_permission(backend: Backend) {
    let security = Security::new();
    let fixture = security.start(backend, &[]).await;
    let admin = Caller::new(&fixture, Some(security.token("admin")));
    let subscriber = Caller::new(&fixture, Some(security.token("subscriber")));
    let (_, subscription) = create(&admin, "p1").await;
    let request = json!({"subscription": subscription, "streamAckDeadlineSeconds": 10});
    let (mut stream, _) = subscriber.open(&format!("{SUBSCRIBER}.StreamingPull"), request, true).await.unwrap();
    security.write_policy(&json!({"projects": {}}));
    let ended = async {
        loop {
            if let Err(status) = stream.message().await {
                return status;
            }
        }
    };
    assert_eq!(within(SOON * 3, "the stream ends", ended).await.code(), Code::PermissionDenied);
}

async fn audit_carries_out_what_enforce_would_refuse(backend: Backend) {
    let security = Security::new();
    let fixture = security.start(backend, &[("AUTH", "audit")]).await;
    for token in [None, Some(security.token("nobody")), Some("x".into())] {
        let caller = Caller::new(&fixture, token);
        assert_eq!(caller.code(&format!("{PUBLISHER}.ListTopics"), json!({"project": "projects/p1"})).await, Code::Ok);
    }
    let log = fixture.nodes[0].log_tail();
    for caller in ["anonymous", "serviceAccount:nobody@p1.example"] {
        let line = log.lines().find(|line| line.contains("audit") && line.contains(caller));
        assert!(line.is_some_and(|line| line.contains("pubsub.topics.list")), "{log}");
    }
}

async fn an_assertion_is_exchanged_for_a_token(backend: Backend) {
    let security = Security::new();
    let fixture = security.start(backend, &[]).await;
    let url = format!("http://{}/token", fixture.nodes[0].address);
    let client = reqwest::Client::new();
    let exchange = async |grant: &str, assertion: String| {
        let form = format!("grant_type={}&assertion={assertion}", grant.replace(':', "%3A"));
        let request = client.post(&url).header("content-type", "application/x-www-form-urlencoded").body(form);
        let answer = request.send().await.unwrap();
        (answer.status().as_u16(), body(answer).await)
    };
    let grant = "urn:ietf:params:oauth:grant-type:jwt-bearer";
    let assertion = |audience: &str| security.key("viewer").1.sign(audience).unwrap();
    let (status, body) = exchange(grant, assertion("https://oauth2.googleapis.com/token")).await;
    assert_eq!((status, &body["token_type"], &body["expires_in"]), (200, &json!("Bearer"), &json!(3600)));
    let caller = Caller::new(&fixture, Some(body["access_token"].as_str().unwrap().to_owned()));
    assert_eq!(caller.code(&format!("{PUBLISHER}.ListTopics"), json!({"project": "projects/p1"})).await, Code::Ok);
    for (grant, assertion, error) in [
        (grant, assertion("https://storage.googleapis.com/"), "invalid_grant"),
        (grant, "x".into(), "invalid_grant"),
        ("password", assertion("https://oauth2.googleapis.com/token"), "unsupported_grant_type"),
    ] {
        let (status, body) = exchange(grant, assertion).await;
        assert_eq!((status, body["error"].as_str().unwrap()), (400, error));
    }
    assert_eq!(client.get(&url).send().await.unwrap().status(), 405);
}

/// The provider is another server, which signs the tokens of its push requests.
async fn the_token_of_a_provider_says_who_calls(backend: Backend) {
    let (provider, sink) = (Fixture::start(backend).await, Sink::start().await);
    let own = Caller::new(&provider, None);
    own.call(&format!("{PUBLISHER}.CreateTopic"), json!({"name": "projects/p1/topics/tokens"})).await.unwrap();
    let token = async |id: &str, email: &str, audience: &str| {
        let name = format!("projects/p1/subscriptions/{id}");
        let oidc = json!({"serviceAccountEmail": email, "audience": audience});
        let push = json!({"pushEndpoint": sink.url("/"), "oidcToken": oidc});
        let request = json!({"name": name, "topic": "projects/p1/topics/tokens", "pushConfig": push});
        own.call(&format!("{SUBSCRIBER}.CreateSubscription"), request).await.unwrap();
        let publish = json!({"topic": "projects/p1/topics/tokens", "messages": [{"data": "eA=="}]});
        own.call(&format!("{PUBLISHER}.Publish"), publish).await.unwrap();
        let pushed = sink.next().await;
        own.call(&format!("{SUBSCRIBER}.DeleteSubscription"), json!({"subscription": name})).await.unwrap();
        pushed.header("authorization").unwrap().strip_prefix("Bearer ").unwrap().to_owned()
    };
    let ann = token("ann", "ann@shop.example", "landline").await;
    let bob = token("bob", "bob@shop.example", "landline").await;
    let elsewhere = token("elsewhere", "ann@shop.example", "https://other.example").await;

    let issuer = format!("http://localhost:{}", provider.nodes[0].address.port());
    let settings = [
        ("AUTH", "enforce"),
        ("AUTH_ADMINS", "user:ann@shop.example"),
        ("AUTH_OIDC_ISSUERS", issuer.as_str()),
        ("AUTH_AUDIENCES", "landline"),
    ];
    let fixture = Fixture::start_with(backend, &settings).await;
    for (token, expected) in [(ann, Code::Ok), (bob, Code::PermissionDenied), (elsewhere, Code::Unauthenticated)] {
        let caller = Caller::new(&fixture, Some(token));
        assert_eq!(caller.code(&format!("{PUBLISHER}.ListTopics"), json!({"project": "projects/p1"})).await, expected);
    }
}

async fn limits_are_refused_by_their_name(backend: Backend) {
    let limits = [
        ("LIMIT_TOPICS", "2"),
        ("LIMIT_SUBSCRIPTIONS", "1"),
        ("LIMIT_BACKLOG_BYTES", "1000"),
        ("LIMIT_REQUESTS_PER_SECOND", "1000"),
    ];
    // Without authentication as well: limits are of projects.
    let fixture = Fixture::start_with(backend, &limits).await;
    let caller = Caller::new(&fixture, None);
    let (topic, subscription) = create(&caller, "p1").await;
    let refused = |status: Status, limit: &str| {
        assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
        assert!(status.message().contains(limit), "{status}");
    };
    let named = |id: &str| json!({"name": format!("projects/p1/topics/{id}")});
    caller.call(&format!("{PUBLISHER}.CreateTopic"), named("second")).await.unwrap();
    refused(caller.call(&format!("{PUBLISHER}.CreateTopic"), named("third")).await.unwrap_err(), "LIMIT_TOPICS");
    // What exists is no further one.
    assert_eq!(caller.code(&format!("{PUBLISHER}.CreateTopic"), named("second")).await, Code::AlreadyExists);
    let again = json!({"name": subscription, "topic": topic});
    assert_eq!(caller.code(&format!("{SUBSCRIBER}.CreateSubscription"), again).await, Code::AlreadyExists);
    let request = json!({"name": "projects/p1/subscriptions/second", "topic": topic});
    refused(caller.call(&format!("{SUBSCRIBER}.CreateSubscription"), request).await.unwrap_err(), "LIMIT_SUBSCRIPTIONS");
    create(&caller, "p2").await;

    let publish = json!({"topic": topic, "messages": [{"data": "eHh4".repeat(500)}]});
    let publish = async || caller.call(&format!("{PUBLISHER}.Publish"), publish.clone()).await;
    publish().await.unwrap();
    eventually("the backlog is full", SOON, async || publish().await.is_err()).await;
    refused(publish().await.unwrap_err(), "LIMIT_BACKLOG_BYTES");
    let seek = json!({"subscription": subscription, "time": "2100-01-01T00:00:00Z"});
    caller.call(&format!("{SUBSCRIBER}.Seek"), seek).await.unwrap();
    eventually("there is room again", SOON, async || publish().await.is_ok()).await;

    let fixture = Fixture::start_with(backend, &[("LIMIT_REQUESTS_PER_SECOND", "3")]).await;
    let caller = Caller::new(&fixture, None);
    let list = format!("{PUBLISHER}.ListTopics");
    let mut codes = Vec::new();
    for _ in 0..20 {
        codes.push(caller.call(&list, json!({"project": "projects/p1"})).await);
    }
    refused(codes.into_iter().find_map(Result::err).expect("a limit"), "LIMIT_REQUESTS_PER_SECOND");
    assert_eq!(caller.code(&list, json!({"project": "projects/p2"})).await, Code::Ok, "other projects go on");
}

async fn the_program_issues_lists_and_takes_back_keys(_: Backend) {
    let folder = tempfile::tempdir().unwrap();
    let (keys, out) = (folder.path().join("keys.json"), folder.path().join("key.json"));
    let run = |arguments: &[&str]| {
        let output =
            Command::new(binary()).arg("keys").args(arguments).env("CONNECTORS_GCP_AUTH_KEYS_FILE", &keys).output().unwrap();
        (output.status.success(), String::from_utf8(output.stdout).unwrap())
    };
    let out = out.to_str().unwrap();
    let create = ["create", "--out", out, "--email", "orders@shop.example", "--endpoint", "https://pubsub.shop:443"];
    let (created, text) = run(&create);
    assert!(created && text.contains("serviceAccount:orders@shop.example"), "{text}");
    assert!(!run(&create).0, "a key file is not overwritten");
    let file: Value = serde_json::from_slice(&fs::read(out).unwrap()).unwrap();
    assert_eq!((&file["type"], &file["token_uri"]), (&json!("service_account"), &json!("https://pubsub.shop:443/token")));
    assert!(!fs::read_to_string(&keys).unwrap().contains("PRIVATE"));
    let (_, listed) = run(&["list"]);
    assert_eq!(listed.lines().count(), 1);
    let id = file["private_key_id"].as_str().unwrap();
    assert!(run(&["delete", id]).0);
    assert!(!run(&["delete", id]).0);
    assert_eq!(run(&["list"]), (true, String::new()));
}
